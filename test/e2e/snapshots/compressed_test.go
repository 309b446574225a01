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
	config := drivertest.PoolConfig{Name: "local", Path: testenv.SimpleBtrfs(t, 1<<30), Enforcement: "required"}
	b := &harness{Driver: drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{config}})}
	b.create(directory("pvc-1", 64*mib))
	b.Must(b.Publish(t.Context(), directory("pvc-1", 64*mib), "pod"))
	if output, err := exec.CommandContext(t.Context(), "chattr", "+c", b.Target("pod")).CombinedOutput(); err != nil {
		t.Fatalf("chattr: %v: %s", err, output)
	}
	f, err := os.Create(filepath.Join(b.Target("pod"), "log"))
	b.Must(err)
	line := []byte("a line of a log that is long\n")
	for range 96 {
		_, err := f.Write(bytes.Repeat(line, mib/len(line)))
		b.Must(err)
	}
	b.Must(errors.Join(f.Sync(), f.Close()))
	b.Must(b.Unpublish(t.Context(), "pvc-1", "pod"))
	_, snapshotErr := b.Snapshot(t.Context(), "s-1", "pvc-1", "")
	_, cloneErr := b.Clone(t.Context(), directory("pvc-2", 64*mib), "pvc-1")
	for what, err := range map[string]error{"snapshot": snapshotErr, "clone": cloneErr} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "compressed") {
			t.Errorf("%s: %v, want FAILED_PRECONDITION and the cause", what, err)
		}
	}
}

// Of a file with more attributes than the kernel lists no copy is whole.
func TestFileWithTooManyAttributes(t *testing.T) {
	config := drivertest.PoolConfig{Name: "local", Path: testenv.LoopFS(t, "xfs", 1<<30)}
	b := &harness{Driver: drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{config}})}
	b.create(directory("pvc-1", 64*mib))
	file := filepath.Join(config.Path, "pvc-1", "file")
	b.Must(os.WriteFile(file, nil, 0o600))
	for i := range 300 {
		b.Must(unix.Setxattr(file, fmt.Sprintf("user.%0245d", i), nil, 0))
	}
	_, err := b.Snapshot(t.Context(), "s-1", "pvc-1", "")
	b.WantCode("snapshot", err, codes.FailedPrecondition)
}
