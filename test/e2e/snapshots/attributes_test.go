package snapshots

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Of a file with more attributes than the kernel lists no copy is whole.
func TestFileWithTooManyAttributes(t *testing.T) {
	h := newHarness(t, drivertest.Built(t), testenv.LoopFS(t, "xfs", 1<<30), "")
	h.MustCreate(directory("pvc-1", 64*mib))
	file := filepath.Join(h.path("pvc-1"), "file")
	h.Must(os.WriteFile(file, nil, 0o600))
	for i := range 300 {
		h.Must(unix.Setxattr(file, fmt.Sprintf("user.%0245d", i), nil, 0))
	}
	_, err := h.Snapshot(t.Context(), "s-1", "pvc-1", "")
	h.WantCode("snapshot", err, codes.FailedPrecondition)
}
