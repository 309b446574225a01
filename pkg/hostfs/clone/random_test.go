package clone_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A tenant does anything to its tree that needs no privilege but root's. What is not possible has no effect.
type tenant struct {
	*rand.Rand
	root string
}

// path is that of an entry that may be there, and be of any kind.
func (u *tenant) path() string {
	in := []string{"", "d0", "d1", "d0/d0", "d0/d1", "d1/d0", "large"}[u.IntN(7)]
	switch n := u.IntN(6); {
	case n == 0:
		return filepath.Join(u.root, in, fmt.Sprint("d", u.IntN(2)))
	case in == "large": // of several blocks
		return filepath.Join(u.root, in, strings.Repeat("f", 100)+fmt.Sprint(u.IntN(200)))
	}
	return filepath.Join(u.root, in, fmt.Sprint("f", u.IntN(6)))
}

// write writes one of files of the same size.
func (u *tenant) write(path string) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return
	}
	_, _ = fmt.Fprintf(f, "%010d", u.IntN(1e9))
	_ = f.Close()
}

// writeLarge writes to a file whose blocks are shared, and may have it written to the disk.
func (u *tenant) writeLarge(path string) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return
	}
	_, _ = f.WriteAt(fmt.Appendf(nil, "%010d", u.IntN(1e9)), u.Int64N(3*mib))
	if u.IntN(2) == 0 {
		_ = unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
	}
	_ = f.Close()
}

func (u *tenant) change() {
	a, b := u.path(), u.path()
	[]func(){
		func() { u.write(a) },
		func() { _ = os.Rename(a, b) },
		func() { _ = unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) },
		func() { _ = os.Link(a, b) },
		func() { _ = os.Remove(a) },
		func() { _ = os.Mkdir(a, 0o755) },
		func() { _ = os.Symlink(fmt.Sprint(u.IntN(10)), a) },
		func() { _ = unix.Mkfifo(a, 0o600) },
		func() { _ = unix.Lsetxattr(a, "user.a", fmt.Append(nil, u.IntN(100)), 0) },
		func() { _ = unix.Lremovexattr(a, "user.a") },
		func() { _ = os.Chmod(a, os.FileMode(0o600+u.IntN(64))) },
		func() { _ = os.Lchown(a, u.IntN(5), u.IntN(5)) },
		func() { _ = os.Chtimes(a, time.Unix(1, 0), time.Unix(1, 0)) },
		func() { _ = os.Truncate(a, u.Int64N(3)*5000) },
		func() { _ = os.Remove(a); u.write(b); u.write(a) }, // which may be listed twice
		func() { u.writeLarge(a) },
	}[u.IntN(16)]()
}

// Whatever is done to a tree while it is copied, the copy is what the tree was while all stood still, however little is remembered.
func TestTreeThatChangesAtRandom(t *testing.T) {
	testenv.NeedTime(t)
	runs := 40
	if testing.Short() {
		runs = 4
	}
	for _, f := range filesystems {
		t.Run(f.kind, func(t *testing.T) {
			root := testenv.LoopFS(t, f.kind, 512*mib)
			for run := range runs {
				at := filepath.Join(root, fmt.Sprint(run))
				src, dst := filepath.Join(at, "src"), filepath.Join(at, "dst")
				must.Succeed(t, os.MkdirAll(filepath.Join(src, "large"), 0o755), os.Mkdir(dst, 0o700))
				u := &tenant{rand.New(rand.NewPCG(1, uint64(run))), src} //nolint:gosec // to be repeated
				for range 1500 {
					u.change()
				}
				if awaitTick(t, root); run%2 == 0 {
					awaitSettled(t, root)
				}
				// If one file alone changed, which shares its blocks, nothing would have to stand still.
				first := sync.OnceFunc(func() {
					write(t, filepath.Join(src, "changes-1"), "")
					write(t, filepath.Join(src, "changes-2"), "")
				})
				held := false
				result, err := clone.TreeWithin(t.Context(), open(t, src), open(t, dst), endingWithStandstill(clone.Options{
					Method: f.method, Rounds: 1,
					Pause: func(context.Context) error {
						first()
						if u.IntN(3) == 0 {
							u.change()
						}
						return nil
					},
					Hold: func(ctx context.Context) (context.Context, func() error, error) {
						u.root, held = filepath.Join(at, "nowhere"), true
						return ctx, func() error { return nil }, nil
					},
				}), []int{1 << 17, 0, 20, 80}[run%4], []int{32 * mib, 0, 20_000}[run%3])
				must.Succeed(t, err)
				if !result.PointInTime || !held {
					t.Errorf("it is %+v, held %v", result, held)
				}
				if clonetest.Same(t, src, dst); t.Failed() {
					t.Fatalf("run %d", run)
				}
				must.Succeed(t, os.RemoveAll(at))
			}
		})
	}
}
