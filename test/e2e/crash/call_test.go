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

func (h *harness) create(id string, block bool, bytes int64) answer {
	a, err := h.Create(h.Context(), asked(id, block, bytes))
	return answer{a, err}
}

func (h *harness) publish(id string, block, inline bool) answer {
	v := asked(id, block, small)
	v.Inline = inline
	return answer{nil, h.Publish(h.Context(), v, id)}
}

func (h *harness) unpublishOf(id string) answer {
	return answer{nil, h.Unpublish(h.Context(), id, id)}
}

func (h *harness) deleteOf(id string) answer { return answer{nil, h.Delete(h.Context(), id)} }

func (h *harness) unpublish() answer { return h.unpublishOf(victim) }
func (h *harness) delete() answer    { return h.deleteOf(victim) }

func creating(block bool, bytes int64) func(*harness) answer {
	return func(h *harness) answer { return h.create(victim, block, bytes) }
}

func publishing(block, inline bool) func(*harness) answer {
	return func(h *harness) answer { return h.publish(victim, block, inline) }
}

func expanding(block bool, bytes int64) func(*harness) answer {
	return func(h *harness) answer { return h.expand(victim, block, bytes) }
}

func (h *harness) expand(id string, block bool, bytes int64) answer {
	a, err := h.Expand(h.Context(), asked(id, block, bytes), id)
	return answer{a, err}
}

// reach brings the victim into a state by way of nothing.
func (h *harness) reach(to state) {
	h.Helper()
	if h.now == to {
		return
	}
	if h.now.published {
		h.Must(h.unpublish().err)
	}
	h.Must(h.delete().err)
	h.awaitNoTrash()
	h.now, h.filled = state{}, false
	if to == h.now {
		return
	}
	if to.inline {
		h.Must(h.publish(victim, false, true).err)
	} else {
		h.Must(h.create(victim, to.block, to.bytes).err)
		h.fill(victim, to.block)
		h.filled = true
	}
	if to.published && !to.inline {
		h.Must(h.publish(victim, to.block, false).err)
	}
	h.now = to
}

// content is what users have written.
const content = "written by a user, and not to be lost\n"

// fill writes to a volume that is not published: a tree, or the begin of the disk.
func (h *harness) fill(id string, block bool) {
	h.Helper()
	if block {
		disk, err := os.OpenFile(h.pool.Image(id), os.O_WRONLY, 0)
		h.Must(err)
		_, err = disk.WriteString(content)
		h.Must(err)
		h.Must(disk.Sync())
		h.Must(disk.Close())
		return
	}
	h.Must(os.MkdirAll(filepath.Join(h.pool.Path, id, "sub", "sub"), 0o755))
	h.Must(os.WriteFile(filepath.Join(h.pool.Path, id, "file"), []byte(content), 0o600))
}

// An other is a volume that stays as it is, whatever happens to the victim.
type other struct {
	id    string
	block bool
	bytes int64
}

var others = []other{{"pvc-other", false, 32 * mib}, {"pvc-other-disk", true, 16 * mib}}

func (h *harness) makeOther(o other) {
	h.Helper()
	h.Must(h.create(o.id, o.block, o.bytes).err)
	h.fill(o.id, o.block)
	h.Must(h.publish(o.id, o.block, false).err)
}

func (h *harness) unmakeOther(o other) {
	h.Helper()
	h.Must(h.unpublishOf(o.id).err)
	h.Must(h.deleteOf(o.id).err)
}
