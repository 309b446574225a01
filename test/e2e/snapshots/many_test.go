package snapshots

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// TestVeryManyEntries copies a directory of a million entries, a tenth of them in one directory
// and another tenth names of one file. What the driver needs for that does not grow with them.
func TestVeryManyEntries(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "rsync")
	entries := 1_000_000
	if testing.Short() {
		entries = 4_000
	}
	const mostMemory = 64 * mib
	program, err := drivertest.StaticBinary(t.Context(), t.TempDir()) // the race detector takes memory of its own
	if err != nil {
		t.Fatal(err)
	}
	h := newHarness(t, program, testenv.LoopFS(t, "xfs", 16<<30), "", drivertest.ServeMetrics)
	many := directory("pvc-many", 4<<30)
	h.MustCreate(many)
	h.fill(h.path(many.ID), entries)
	before := h.memory()
	const id = "s-1@" + drivertest.NodeName
	h.Must(again(func() error { _, err := h.Snapshot(t.Context(), "s-1", many.ID, ""); return err }))
	h.Must(again(func() error {
		_, err := h.Restore(t.Context(), directory("pvc-restored", many.Bytes), id)
		return err
	}))
	if grown := h.memory() - before; grown > mostMemory {
		t.Errorf("copying %d entries took the driver %d MiB more, at most %d are allowed", entries, grown/mib, mostMemory/mib)
	}
	clonetest.Same(t, h.path(many.ID), h.path("pvc-restored"))
	h.delete(many.ID, "pvc-restored")
	h.Must(h.DeleteSnapshot(t.Context(), id))
	h.awaitErased()
	h.wantEmpty()
}

// awaitErased waits for the reaper for as long as it gets on: it leaves most of the time of the disk to
// others, and so takes minutes for millions of entries.
func (h *harness) awaitErased() {
	h.Helper()
	free := func() uint64 {
		var fs unix.Statfs_t
		h.Must(unix.Statfs(h.pool.Path, &fs))
		return fs.Ffree
	}
	trash := h.pool.Own("trash", drivertest.NodeName)
	empty := func() bool {
		names, err := drivertest.Names(trash)
		h.Must(err)
		return len(names) == 0
	}
	for before := free(); !empty(); before = free() {
		h.Eventually("the reaper gets on", func() bool { return free() > before || empty() })
	}
}

// again repeats a call whose work goes on, as the sidecars do.
func again(call func() error) error {
	repeat := time.NewTicker(time.Second)
	defer repeat.Stop()
	for {
		err := call()
		if code := status.Code(err); code != codes.DeadlineExceeded && code != codes.Aborted {
			return err
		}
		<-repeat.C
	}
}

// fill makes so many entries.
func (h *harness) fill(at string, entries int) {
	h.Helper()
	named := filepath.Join(at, "named")
	h.Must(os.WriteFile(named, []byte("many names"), 0o600))
	h.Must(os.Mkdir(filepath.Join(at, "wide"), 0o755))
	for i := range entries {
		in := filepath.Join(at, fmt.Sprint("d", i/1000))
		if i%1000 == 0 {
			h.Must(os.Mkdir(in, 0o755))
		}
		name := fmt.Sprint("n", i)
		switch i % 10 {
		case 0:
			h.Must(os.Link(named, filepath.Join(in, name)))
		case 1:
			h.Must(os.Symlink("../named", filepath.Join(in, name)))
		case 2:
			h.Must(os.WriteFile(filepath.Join(at, "wide", name), nil, 0o600))
		default:
			h.Must(os.WriteFile(filepath.Join(in, name), nil, 0o600))
		}
	}
}

// memory is the most that the driver has had, in bytes (proc_pid_status(5)).
func (h *harness) memory() int64 {
	h.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.Process.Pid()))
	h.Must(err)
	var kib int64
	_, after, _ := strings.Cut(string(text), "VmHWM:")
	_, err = fmt.Sscanf(after, "%d kB", &kib)
	h.Must(err)
	return kib << 10
}
