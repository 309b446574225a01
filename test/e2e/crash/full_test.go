package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// longVictim has a name for which there is no room in the inode of a directory on XFS that has an attribute as well.
var longVictim = victim + strings.Repeat("-long", 28)

// On a full filesystem a volume is removed to the trash as long as that has room for its name, as here on ext4, and otherwise where
// it is, as here on XFS. Killed in whatever it does, from the start until the volume is erased, the driver finds it whole or gone.
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
			}
			steps := w.removeOnFullDisk(0)
			t.Logf("%d steps", steps)
			for n := 1; n <= steps; n += every {
				w.removeOnFullDisk(n)
			}
		})
	}
}

// removeOnFullDisk starts a driver on a full disk, and deletes a volume. The driver is
// killed at a step, and started and asked again. It returns how many steps there were.
func (w *world) removeOnFullDisk(killAt int) int {
	w.Helper()
	giveBack := w.fillUp()
	w.arm(killAt)
	answered := false
	started := w.start()
	if started == nil {
		err := w.deleteOf(longVictim).err
		if answered = err == nil; !answered && status.Code(err) != codes.Unavailable {
			w.Errorf("delete: %v", err)
		}
		w.Eventually("the volume is erased", func() bool { return w.trap.HasKilled() || w.isErased() })
	} else if !w.trap.HasKilled() {
		w.Fatal(started)
	}
	steps, killed := w.trap.Disarm()
	if inPlace := strings.Contains(w.words(steps), ".trash-"); killAt == 0 && inPlace != (w.place.name == "xfs") {
		w.Errorf("removed in place: %v", inPlace)
	}
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
		w.Errorf("the driver did not die at step %d of %d", killAt, len(steps))
	}
	w.wantWholeOrGone(where, answered)
	w.Must(w.deleteOf(longVictim).err)
	w.wantWholeOrGone(where, true)
	w.Eventually("the volume is erased", w.isErased)
	giveBack()
	w.Eventually("volumes can be created", func() bool { return w.create(longVictim, false, small).err == nil })
	w.AwaitServing()
	w.Must(w.deleteOf(longVictim).err)
	w.Must(w.deleteOf(others[0].id).err)
	w.awaitNoTrash()
	w.wantNothingLeft()
	w.Must(w.Process.Stop())
	w.Must(os.RemoveAll(w.pool.Path))
	return len(steps)
}

// fillUp makes two volumes, stops the driver and leaves no room.
func (w *world) fillUp() (giveBack func()) {
	w.Helper()
	w.Must(w.start())
	w.AwaitServing()
	for _, id := range []string{longVictim, others[0].id} {
		w.Must(w.create(id, false, small).err)
		w.fill(id, false)
	}
	w.Must(w.Process.Stop())
	var names []string
	if w.place.name == "xfs" {
		names = w.fillTrash()
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

// fillTrash leaves no room for a name in the inode of the trash, and room for many in the block of the pool's directory.
func (w *world) fillTrash() (names []string) {
	w.Helper()
	trashes, err := filepath.Glob(w.pool.Own("trash", "*"))
	w.Must(err)
	for _, trash := range trashes { // an attribute of more bytes would be outside the inode
		w.Must(unix.Setxattr(trash, "trusted.filler", make([]byte, 200), 0))
	}
	for i := range 10 {
		names = append(names, filepath.Join(w.pool.Path, fmt.Sprintf(".not-a-volume-%020d", i)))
		w.Must(os.Mkdir(names[i], 0o700))
	}
	return names
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
	for _, in := range []string{w.pool.Path, w.pool.Own("trash", "*")} {
		left, err := filepath.Glob(filepath.Join(in, "*"+longVictim+"*"))
		w.Must(err)
		if len(left) > 0 {
			return false
		}
	}
	return true
}

// wantWholeOrGone expects the volume to be served with all that is in it, or not to be known. The other
// one is whole.
func (w *world) wantWholeOrGone(where string, gone bool) {
	w.Helper()
	for _, id := range []string{longVictim, others[0].id} {
		var err error
		w.Eventually("the pool serves", func() bool {
			_, err = w.Get(w.Context(), id)
			return status.Code(err) != codes.Unavailable
		})
		switch status.Code(err) {
		case codes.NotFound:
			if id != longVictim {
				w.Errorf("%s: %s is gone", where, id)
			}
		case codes.OK:
			if id == longVictim && gone {
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
