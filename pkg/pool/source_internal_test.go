package pool

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
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
	for _, cause := range []error{syscall.E2BIG, syscall.EMLINK, clone.ErrEncrypted} {
		err := refused(&os.PathError{Op: "copy", Path: "file", Err: cause})
		must.ErrorIs(t, err, volume.ErrPrecondition)
		must.ErrorIs(t, err, cause)
	}
	if err := refused(syscall.EIO); errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a broken disk: %v", err)
	}
}
