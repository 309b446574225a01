package snapshots

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// With simple quotas what is compressed is counted as it is on the disk, and its copy is not compressed. No node can make a copy
// that is larger than its promise, and the scheduler must not be asked for another.
func TestCopyThatTakesMoreThanItsSource(t *testing.T) {
	testenv.NeedPrograms(t, "chattr", "btrfs")
	h := newHarness(t, drivertest.Built(t), testenv.SimpleBtrfs(t, 1<<30), "required")
	h.MustCreate(directory("pvc-1", 64*mib))
	h.Must(h.Publish(t.Context(), directory("pvc-1", 64*mib), "pod"))
	if output, err := exec.CommandContext(t.Context(), "chattr", "+c", h.Target("pod")).CombinedOutput(); err != nil {
		t.Fatalf("chattr: %v: %s", err, output)
	}
	f, err := os.Create(filepath.Join(h.Target("pod"), "log"))
	h.Must(err)
	line := []byte("a line of a log that is long\n")
	for range 96 {
		_, err := f.Write(bytes.Repeat(line, mib/len(line)))
		h.Must(err)
	}
	h.Must(errors.Join(f.Sync(), f.Close()))
	h.Must(h.Unpublish(t.Context(), "pvc-1", "pod"))
	_, snapshotErr := h.Snapshot(t.Context(), "s-1", "pvc-1", "")
	_, cloneErr := h.Clone(t.Context(), directory("pvc-2", 64*mib), "pvc-1")
	for what, err := range map[string]error{"snapshot": snapshotErr, "clone": cloneErr} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "compressed") {
			t.Errorf("%s: %v, want FAILED_PRECONDITION and the cause", what, err)
		}
	}
}

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
