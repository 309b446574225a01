package pool

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
	id := must.Value(volume.ParseEntry(entry))(t)
	return id
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
