package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// On a full filesystem a pool has no layout, and a volume is removed where it is. Killed in whatever
// it does, from the first start until the volume is erased, the driver finds it whole or gone.
func TestCrashOnFullDisk(t *testing.T) {
	driver := drivertest.Built(t)
	for i, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			p := place{name: kind, mount: onLoop(kind)}
			p.mounted = p.mount(t)
			w := newWorld(t, p, driver)
			for _, o := range others {
				w.unmakeOther(o)
			}
			must.Succeed(t, w.Process.Stop())
			every := 1
			if testing.Short() {
				every = 2 + 3*i
				if testenv.Guest() {
					every *= 3
				}
			}
			steps := w.removeOnFullDisk(0)
			t.Logf("%d steps", steps)
			for n := 1; n <= steps; n += every {
				w.removeOnFullDisk(n)
			}
		})
	}
}

// removeOnFullDisk starts a driver on a full disk that is new there, and deletes a volume. It is
// killed at a step, and started and asked again. It answers how many steps there were.
func (w *world) removeOnFullDisk(killAt int) int {
	w.Helper()
	giveBack := w.earlierDriver()
	w.arm(killAt)
	answered := false
	started := w.start()
	if started == nil {
		err := w.delete().err
		if answered = err == nil; !answered && status.Code(err) != codes.Unavailable {
			w.Errorf("delete: %v", err)
		}
		w.Eventually("the volume is erased", func() bool { return w.trap.HasKilled() || w.isErased() })
	} else if !w.trap.HasKilled() {
		w.Fatal(started)
	}
	steps, killed := w.trap.Disarm()
	where := "without a crash"
	if killed {
		where = "killed at " + w.words(steps[len(steps)-1:])
		w.Log(where)
		if started == nil {
			w.kill()
		}
		w.Must(w.start())
		w.AwaitServing()
	} else if killAt > 0 && killAt < len(steps) {
		w.Errorf("nobody died at step %d of %d", killAt, len(steps))
	}
	w.wantWholeOrGone(where, answered)
	w.Eventually("the volume is deleted", func() bool { // while the layout is made, the pool is unavailable
		err := w.delete().err
		if err != nil && status.Code(err) != codes.Unavailable {
			w.Fatal(err)
		}
		return err == nil
	})
	w.wantWholeOrGone(where, true)
	w.Eventually("the volume is erased", w.isErased)
	giveBack()
	w.Eventually("volumes can be created", func() bool { return w.create(victim, false, small).err == nil })
	w.AwaitServing()
	w.Must(w.delete().err)
	w.Must(w.deleteOf(others[0].id).err)
	w.awaitNoTrash()
	w.wantNothingLeft()
	w.Must(w.Process.Stop())
	w.Must(os.RemoveAll(w.pool.Path))
	return len(steps)
}

// earlierDriver leaves two volumes and no room.
func (w *world) earlierDriver() (giveBack func()) {
	w.Helper()
	w.Must(os.RemoveAll(w.pool.Path))
	w.Must(os.Mkdir(w.pool.Path, 0o750))
	for _, id := range []string{victim, others[0].id} {
		w.Must(os.Mkdir(filepath.Join(w.pool.Path, id), 0o777))
		w.fill(id, false)
	}
	var names []string
	if w.place.name == "xfs" {
		names = w.fillInode()
	}
	empty := w.fillDisk()
	return func() {
		w.Helper()
		empty()
		for _, name := range names {
			w.Must(os.Remove(name))
		}
	}
}

// fillInode adds as many names to the pool's directory as XFS keeps in the inode: there is no room for that of a volume
// in the trash then, so that it is marked.
func (w *world) fillInode() (names []string) {
	w.Helper()
	for {
		names = append(names, filepath.Join(w.pool.Path, fmt.Sprintf(".of-an-earlier-driver-%d", 10+len(names))))
		w.Must(os.Mkdir(names[len(names)-1], 0o700))
		info, err := os.Stat(w.pool.Path)
		w.Must(err)
		if last := len(names) - 1; info.Size() >= 4096 { // a block
			w.Must(os.Remove(names[last]))
			return names[:last]
		}
	}
}

// fillDisk has others take all that the filesystem has.
func (w *world) fillDisk() (giveBack func()) {
	w.Helper()
	d, err := os.MkdirTemp(w.place.mounted, "foreign-")
	w.Must(err)
	fulldisk.Fill(w, d, fulldisk.Shortage{Bytes: true})
	return func() { w.Helper(); w.Must(os.RemoveAll(d)) }
}

// isErased reports whether nothing is left of the victim, whatever that is called.
func (w *world) isErased() bool {
	w.Helper()
	left, err := filepath.Glob(filepath.Join(w.pool.Path, "*"+victim+"*"))
	w.Must(err)
	return len(left) == 0
}

// wantWholeOrGone expects the volume to be served with all that is in it, or not to be known. The other
// one is whole.
func (w *world) wantWholeOrGone(where string, gone bool) {
	w.Helper()
	for _, id := range []string{victim, others[0].id} {
		var err error
		w.Eventually("the pool serves", func() bool {
			_, err = w.Get(w.Context(), id)
			return status.Code(err) != codes.Unavailable
		})
		switch status.Code(err) {
		case codes.NotFound:
			if id != victim {
				w.Errorf("%s: %s is gone", where, id)
			}
		case codes.OK:
			if id == victim && gone {
				w.Errorf("%s: the volume is there, although its deletion was answered", where)
			}
			if got, err := os.ReadFile(filepath.Join(w.pool.Path, id, "file")); string(got) != content {
				w.Errorf("%s: %s has %q, %v", where, id, got, err)
			}
		default:
			w.Errorf("%s: get %s: %v", where, id, err)
		}
	}
}
