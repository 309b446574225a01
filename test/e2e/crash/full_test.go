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
			h := newHarness(t, p, driver)
			for _, o := range others {
				h.unmakeOther(o)
			}
			must.Succeed(t, h.Process.Stop())
			every := 1
			if testing.Short() {
				every = 2 + 3*i
			}
			steps := h.removeOnFullDisk(0)
			t.Logf("%d steps", steps)
			for n := 1; n <= steps; n += every {
				h.removeOnFullDisk(n)
			}
		})
	}
}

// removeOnFullDisk starts a driver on a full disk, and deletes a volume. The driver is
// killed at a step, and started and asked again. It returns how many steps there were.
func (h *harness) removeOnFullDisk(killAt int) int {
	h.Helper()
	giveBack := h.fillUp()
	h.arm(killAt)
	answered := false
	started := h.start()
	if started == nil {
		err := h.deleteOf(longVictim).err
		if answered = err == nil; !answered && status.Code(err) != codes.Unavailable {
			h.Errorf("delete: %v", err)
		}
		h.Eventually("the volume is erased", func() bool { return h.trap.HasKilled() || h.isErased() })
	} else if !h.trap.HasKilled() {
		h.Fatal(started)
	}
	steps, killed := h.trap.Disarm()
	if inPlace := strings.Contains(h.words(steps), ".trash-"); killAt == 0 && inPlace != (h.place.name == "xfs") {
		h.Errorf("removed in place: %v", inPlace)
	}
	where := "without a crash"
	if killed {
		where = "killed at " + h.words(steps[len(steps)-1:])
		h.Log(where)
		if started == nil {
			h.kill()
		}
		h.Must(h.start())
		h.AwaitServing()
	} else if killAt > 0 && killAt < len(steps) {
		h.Errorf("the driver did not die at step %d of %d", killAt, len(steps))
	}
	h.wantWholeOrGone(where, answered)
	h.Must(h.deleteOf(longVictim).err)
	h.wantWholeOrGone(where, true)
	h.Eventually("the volume is erased", h.isErased)
	giveBack()
	h.Eventually("volumes can be created", func() bool { return h.create(longVictim, false, small).err == nil })
	h.AwaitServing()
	h.Must(h.deleteOf(longVictim).err)
	h.Must(h.deleteOf(others[0].id).err)
	h.awaitNoTrash()
	h.wantNothingLeft()
	h.Must(h.Process.Stop())
	h.Must(os.RemoveAll(h.pool.Path))
	return len(steps)
}

// fillUp makes two volumes, stops the driver and leaves no room.
func (h *harness) fillUp() (giveBack func()) {
	h.Helper()
	h.Must(h.start())
	h.AwaitServing()
	for _, id := range []string{longVictim, others[0].id} {
		h.Must(h.create(id, false, small).err)
		h.fill(id, false)
	}
	h.Must(h.Process.Stop())
	var names []string
	if h.place.name == "xfs" {
		names = h.fillTrash()
	}
	empty := h.fillDisk()
	return func() {
		h.Helper()
		empty()
		for _, name := range names {
			h.Must(os.Remove(name))
		}
	}
}

// fillTrash leaves no room for a name in the inode of the trash, and room for many in the block of the pool's directory.
func (h *harness) fillTrash() (names []string) {
	h.Helper()
	trashes := must.Value(filepath.Glob(h.pool.Own("trash", "*")))(h)
	for _, trash := range trashes { // an attribute of more bytes would be outside the inode
		h.Must(unix.Setxattr(trash, "trusted.filler", make([]byte, 200), 0))
	}
	for i := range 10 {
		names = append(names, filepath.Join(h.pool.Path, fmt.Sprintf(".not-a-volume-%020d", i)))
		h.Must(os.Mkdir(names[i], 0o700))
	}
	return names
}

// fillDisk has others take all that the filesystem has.
func (h *harness) fillDisk() (giveBack func()) {
	h.Helper()
	d := must.Value(os.MkdirTemp(h.place.mounted, "foreign-"))(h)
	fulldisk.Fill(h, d, fulldisk.Shortage{Bytes: true})
	return func() { h.Helper(); h.Must(os.RemoveAll(d)) }
}

// isErased reports whether nothing is left of the victim, whatever that is called.
func (h *harness) isErased() bool {
	h.Helper()
	for _, in := range []string{h.pool.Path, h.pool.Own("trash", "*")} {
		left := must.Value(filepath.Glob(filepath.Join(in, "*"+longVictim+"*")))(h)
		if len(left) > 0 {
			return false
		}
	}
	return true
}

// wantWholeOrGone expects the volume to be served with all that is in it, or not to be known. The other
// one is whole.
func (h *harness) wantWholeOrGone(where string, gone bool) {
	h.Helper()
	for _, id := range []string{longVictim, others[0].id} {
		var err error
		h.Eventually("the pool serves", func() bool {
			_, err = h.Get(h.Context(), id)
			return status.Code(err) != codes.Unavailable
		})
		switch status.Code(err) {
		case codes.NotFound:
			if id != longVictim {
				h.Errorf("%s: %s is gone", where, id)
			}
		case codes.OK:
			if id == longVictim && gone {
				h.Errorf("%s: the volume is there, although its deletion was answered", where)
			}
			if got, err := os.ReadFile(filepath.Join(h.pool.Path, id, "file")); string(got) != content {
				h.Errorf("%s: %s has %q, %v", where, id, got, err)
			}
		default:
			h.Errorf("%s: get %s: %v", where, id, err)
		}
	}
}
