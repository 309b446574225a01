package clone_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/strace"
)

// waits are the system calls that wait for what was written to be on the disk, where others write too.
var waits = regexp.MustCompile(`^(sync|syncfs|fsync|fdatasync|sync_file_range|msync)\(|FICLONE|BTRFS_IOC_(CLONE|SYNC|WAIT_SYNC)|O_D?SYNC`)

// While pods stand still nothing waits for a disk. How long they do is for test/e2e/snapshots: that depends on the machine.
func TestNothingWaitsForDiskInStandstill(t *testing.T) {
	testenv.NeedRoot(t)
	for _, f := range filesystems {
		t.Run(f.kind, func(t *testing.T) {
			if root := strace.Traced(); root != "" {
				copyInStandstill(t, root, f.method)
				return
			}
			lists := strace.Calls(t, testenv.LoopFS(t, f.kind, 512*mib))["standstill"]
			if len(lists) != 1 {
				t.Fatalf("%d standstills were traced, want one", len(lists))
			}
			all := strings.Join(lists[0], "\n")
			for n := range changing {
				if !strings.Contains(all, fmt.Sprintf("changing-%d", n)) {
					t.Errorf("changing-%d was not copied:\n%s", n, all)
				}
			}
			for _, call := range lists[0] {
				if waits.MatchString(call) {
					t.Errorf("pods wait for %s", call)
				}
			}
		})
	}
}

// changing is how many files change while they are copied, and until all stand still.
const changing = 20

func copyInStandstill(t *testing.T, root string, method clone.Method) {
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
	change := func() {
		for n := range changing {
			at := filepath.Join(src, fmt.Sprint(n%2), fmt.Sprint("changing-", n))
			must.Succeed(t, os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, make([]byte, 32<<10), 0o600))
		}
		must.Succeed(t, os.WriteFile(filepath.Join(src, "largest"), make([]byte, 1<<20), 0o600))
	}
	change()
	during := sync.OnceFunc(change)
	result := tree(t, src, dst, clone.Options{
		Method: method, Rounds: 1,
		Pause: func(context.Context) error { during(); return nil },
		Hold: func(ctx context.Context) (context.Context, func() error, error) {
			change()
			strace.Mark("standstill")
			return ctx, func() error { strace.Mark(""); return nil }, nil
		},
	})
	if !result.PointInTime {
		t.Errorf("it is %+v", result)
	}
}
