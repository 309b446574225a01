package snapshot

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func idOf(t *testing.T, entry string) volume.ID {
	t.Helper()
	id, err := volume.ParseEntry(entry)
	must.Succeed(t, err)
	return id
}

func TestPins(t *testing.T) {
	var pins Pins
	a, b := idOf(t, "pvc-1"), idOf(t, "~s-1")
	first, second := pins.Pin(a, false), pins.Pin(a, true)
	must.ErrorIs(t, pins.MayBeWritten(a), volume.ErrBusy)
	for i, unpin := range []func(){first, second} {
		if err := pins.Free(a); !errors.Is(err, volume.ErrBusy) {
			t.Errorf("after %d of 2 copies ended: %v, want ErrBusy", i, err)
		}
		if err := pins.Free(b); err != nil {
			t.Errorf("another entry: %v", err)
		}
		unpin()
	}
	third := pins.Pin(a, false)
	if pins.Used(a) {
		t.Error("a volume that was not published counts as used")
	}
	must.Succeed(t, pins.MayBeWritten(a), pins.MayBeWritten(b))
	pins.Pin(a, true)() // another copy comes and goes
	if !pins.Used(a) || pins.Used(b) {
		t.Errorf("of a volume that is copied and one that is not, both published, %v are used", pins.used)
	}
	third()
	if err := pins.Free(a); err != nil || len(pins.held) != 0 || pins.Used(a) {
		t.Errorf("after both ended: %v, %v are held, %v used", err, pins.held, pins.used)
	}
}

// What a pod has made of its files is no fault of the driver.
func TestUncopyableFilesAreRefused(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.E2BIG, syscall.EMLINK, syscall.ENOKEY} {
		err := refused(&os.PathError{Op: "copy", Path: "file", Err: errno})
		must.ErrorIs(t, err, volume.ErrPrecondition)
		must.ErrorIs(t, err, errno)
	}
	if err := refused(syscall.EIO); errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a broken disk: %v", err)
	}
}
