package crash

import (
	"os"
	"path/filepath"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

const victim = "pvc-victim"

// asked is what calls say of a volume.
func asked(id string, block bool, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Block: block, Bytes: bytes}
}

func (w *world) create(id string, block bool, bytes int64) answer {
	a, err := w.Create(w.Context(), asked(id, block, bytes))
	return answer{a, err}
}

func (w *world) publish(id string, block, inline bool) answer {
	v := asked(id, block, small)
	v.Inline = inline
	return answer{nil, w.Publish(w.Context(), v, id)}
}

func (w *world) unpublishOf(id string) answer {
	return answer{nil, w.Unpublish(w.Context(), id, id)}
}

func (w *world) deleteOf(id string) answer { return answer{nil, w.Delete(w.Context(), id)} }

func (w *world) unpublish() answer { return w.unpublishOf(victim) }
func (w *world) delete() answer    { return w.deleteOf(victim) }

func creating(block bool, bytes int64) func(*world) answer {
	return func(w *world) answer { return w.create(victim, block, bytes) }
}

func publishing(block, inline bool) func(*world) answer {
	return func(w *world) answer { return w.publish(victim, block, inline) }
}

func expanding(block bool, bytes int64) func(*world) answer {
	return func(w *world) answer { return w.expand(victim, block, bytes) }
}

func (w *world) expand(id string, block bool, bytes int64) answer {
	a, err := w.Expand(w.Context(), asked(id, block, bytes), id)
	return answer{a, err}
}

// reach brings the victim into a state by way of nothing.
func (w *world) reach(to state) {
	w.Helper()
	if w.now == to {
		return
	}
	if w.now.published {
		w.Must(w.unpublish().err)
	}
	w.Must(w.delete().err)
	w.awaitNoTrash()
	w.now, w.filled = state{}, false
	if to == w.now {
		return
	}
	if to.inline {
		w.Must(w.publish(victim, false, true).err)
	} else {
		w.Must(w.create(victim, to.block, to.bytes).err)
		w.fill(victim, to.block)
		w.filled = true
	}
	if to.published && !to.inline {
		w.Must(w.publish(victim, to.block, false).err)
	}
	w.now = to
}

// content is what users have written.
const content = "written by a user, and not to be lost\n"

// fill writes to a volume that is not published: a tree, or the begin of the disk.
func (w *world) fill(id string, block bool) {
	w.Helper()
	if block {
		disk, err := os.OpenFile(w.pool.Image(id), os.O_WRONLY, 0)
		w.Must(err)
		_, err = disk.WriteString(content)
		w.Must(err)
		w.Must(disk.Sync())
		w.Must(disk.Close())
		return
	}
	w.Must(os.MkdirAll(filepath.Join(w.pool.Path, id, "sub", "sub"), 0o755))
	w.Must(os.WriteFile(filepath.Join(w.pool.Path, id, "file"), []byte(content), 0o600))
}

// An other is a volume that stays as it is, whatever happens to the victim.
type other struct {
	id    string
	block bool
	bytes int64
}

var others = []other{{"pvc-other", false, 32 * mib}, {"pvc-other-disk", true, 16 * mib}}

func (w *world) makeOther(o other) {
	w.Helper()
	w.Must(w.create(o.id, o.block, o.bytes).err)
	w.fill(o.id, o.block)
	w.Must(w.publish(o.id, o.block, false).err)
}

func (w *world) unmakeOther(o other) {
	w.Helper()
	w.Must(w.unpublishOf(o.id).err)
	w.Must(w.deleteOf(o.id).err)
}
