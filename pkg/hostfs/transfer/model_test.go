package transfer_test

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A tenant changes a tree at random.
type tenant struct {
	*rand.Rand
	root string
}

// pick is a random entry of the tree below its root, or "" if there is none that is wanted.
func (n *tenant) pick(wanted func(fs.FileMode) bool) string {
	var all []string
	_ = filepath.WalkDir(n.root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && path != n.root && wanted(d.Type()) {
			all = append(all, path)
		}
		return nil
	})
	if len(all) == 0 {
		return ""
	}
	return all[n.IntN(len(all))]
}

func anything(fs.FileMode) bool      { return true }
func isFile(m fs.FileMode) bool      { return m.IsRegular() }
func isDirectory(m fs.FileMode) bool { return m.IsDir() }
func noDirectory(m fs.FileMode) bool { return !m.IsDir() }

// place is a path that may be free.
func (n *tenant) place() string {
	in := n.root
	if n.IntN(3) > 0 {
		if d := n.pick(isDirectory); d != "" {
			in = d
		}
	}
	return filepath.Join(in, fmt.Sprintf("n%d", n.IntN(12)))
}

func (n *tenant) bytes(most int) []byte {
	b := make([]byte, n.IntN(most))
	for i := range b {
		b[i] = byte(n.Uint32())
	}
	return b
}

// samples of file sizes, the blocks of the protocol among them.
var samples = []int64{0, 1, 4096, 65536, 131071, 131072, 131073, 400_000, 9 << 20}

// change does one thing to the tree, or fails to: whatever it does is right.
func (n *tenant) change() {
	switch n.IntN(20) {
	case 0, 1, 2:
		if f, err := os.OpenFile(n.place(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644); err == nil {
			_, _ = f.Write(n.bytes(20_000))
			_ = f.Close()
		}
	case 3, 4: // in a file, far out perhaps, with its mtime kept perhaps
		n.overwrite()
	case 5:
		_ = os.Truncate(n.pick(isFile), samples[n.IntN(len(samples))])
	case 6:
		if f, err := os.OpenFile(n.pick(isFile), os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0); err == nil {
			_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, n.Int64N(300_000), 1+n.Int64N(300_000))
			_ = f.Close()
		}
	case 7:
		_ = os.RemoveAll(n.pick(anything))
	case 8, 9:
		_ = os.Rename(n.pick(anything), n.place())
	case 10:
		_ = unix.Renameat2(unix.AT_FDCWD, n.pick(anything), unix.AT_FDCWD, n.pick(anything), unix.RENAME_EXCHANGE)
	case 11, 12:
		_ = os.Link(n.pick(noDirectory), n.place())
	case 13:
		_ = os.Symlink(fmt.Sprint(n.IntN(5)), n.place())
	case 14:
		_ = unix.Mkfifo(n.place(), 0o600)
		_ = unix.Mknod(n.place(), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3+2*n.Uint32N(2)))) // null and zero
	case 15, 16:
		_ = os.Mkdir(n.place(), 0o755)
	case 17:
		_ = os.Lchown(n.pick(anything), n.IntN(3), n.IntN(3))
		_ = os.Chmod(n.pick(noLink), fs.FileMode(n.IntN(0o1000))|fs.ModeSetuid)
	case 18:
		at := n.pick(noLink)
		_ = unix.Setxattr(at, fmt.Sprintf("user.%d", n.IntN(3)), n.bytes(50), 0)
		_ = unix.Removexattr(n.pick(noLink), fmt.Sprintf("user.%d", n.IntN(3)))
	case 19: // times of many are the same, as of what was unpacked
		old := time.Unix(1000, 0)
		_ = os.Chtimes(n.pick(isFile), old, old)
	}
}

func noLink(m fs.FileMode) bool { return m.IsRegular() || m.IsDir() }

func (n *tenant) overwrite() {
	path := n.pick(isFile)
	before, err := os.Lstat(path)
	if err != nil {
		return
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	_, _ = f.WriteAt(n.bytes(10_000), n.Int64N(before.Size()+1+n.Int64N(200_000)))
	_ = f.Close()
	if n.IntN(2) == 0 {
		_ = os.Chtimes(path, before.ModTime(), before.ModTime())
	}
}

// seeds is how many trees are tried, a third where time is short.
func seeds(all uint64) uint64 {
	if testing.Short() {
		return all / 3
	}
	return all
}

// Whatever changes between passes, in a pass or while the connection is cut, the last pass makes the trees equal.
func TestPassesOverTreeThatChanges(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 2048*mib)
			for seed := range seeds(8) {
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
					src, dst := filepath.Join(root, fmt.Sprint("src", seed)), filepath.Join(root, fmt.Sprint("dst", seed))
					must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
					defer func() { must.Succeed(t, os.RemoveAll(src), os.RemoveAll(dst)) }()
					n := &tenant{rand.New(rand.NewPCG(seed, 1)), src}
					var since time.Time
					c := connect(t, dst, transfer.Options{})
					for range 12 {
						for range n.IntN(40) {
							n.change()
						}
						p := transfer.Pass{Since: since}
						switch n.IntN(5) {
						case 0:
							p.Still, p.Verify = true, transfer.VerifyChanged
						case 1:
							p.Still, p.Verify = true, transfer.VerifyAll
						case 2:
							c.cut()
							c = connect(t, dst, transfer.Options{})
						case 3:
							p.Since = time.Time{}
						}
						since = c.pass(src, p).Began
					}
					for range 30 {
						n.change()
					}
					c.pass(src, transfer.Pass{Since: since, Still: true, Verify: transfer.VerifyAll})
					c.finish()
					same(t, src, dst)
				})
			}
		})
	}
}

// Passes are made while the tree changes all the time, and one when it does not any more.
func TestPassesOverTreeInUse(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 1024*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			stop, stopped := make(chan struct{}), make(chan struct{})
			n := &tenant{rand.New(rand.NewPCG(1, 2)), src}
			for range 200 {
				n.change()
			}
			go func() {
				defer close(stopped)
				for {
					select {
					case <-stop:
						return
					default:
						n.change()
					}
				}
			}()
			c := connect(t, dst, transfer.Options{})
			var since time.Time
			for range 15 {
				result, err := c.Pass(t.Context(), open(t, src), transfer.Pass{Since: since})
				if err != nil {
					t.Errorf("a pass over a tree in use: %v", err)
					break
				}
				since = result.Began
			}
			close(stop)
			<-stopped
			c.pass(src, transfer.Pass{Since: since, Still: true, Verify: transfer.VerifyAll})
			c.finish()
			same(t, src, dst)
		})
	}
}
