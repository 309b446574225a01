package clone_test

import (
	"context"
	"errors"
	"fmt"
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
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

// unwritten is how much of what is to be written the kernel keeps in memory for the disks of these tests.
const unwritten = 2 * mib

// While pods stand still the disk ends no write, as one that has much to write for others does for long. A copy of nearly as much as is kept in
// memory does not wait for it, nor for a log that another writer has begun to write.
func TestStandstillEndsWhileDiskHangs(t *testing.T) {
	for how, write := range neighbours {
		if testing.Short() && how == "data" {
			continue
		}
		for _, f := range filesystems {
			t.Run(f.kind+", "+how, func(t *testing.T) {
				d := disk.Mount(t, f.kind, 512*mib)
				root := d.At
				src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
				must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
				must.Succeed(t, os.WriteFile(filepath.Join(src, "large"), noise(8*mib), 0o600), os.Symlink("target", filepath.Join(src, "link")))
				change := func() {
					for n := range changing {
						at := filepath.Join(src, fmt.Sprint(n%2), fmt.Sprint("changing-", n))
						must.Succeed(t, os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(fmt.Sprint(time.Now())), 0o600))
					}
					large, err := os.OpenFile(filepath.Join(src, "large"), os.O_WRONLY, 0)
					must.Succeed(t, err)
					_, err = large.WriteAt([]byte(fmt.Sprint(time.Now())), 3*mib)
					must.Succeed(t, err, large.Close())
				}
				change()
				during := sync.OnceFunc(change)
				result := tree(t, src, dst, clone.Options{
					Method: f.method, Rounds: 1,
					Pause: func(context.Context) error { during(); return nil },
					Hold: func(ctx context.Context) (context.Context, func() error, error) {
						d.KeepUnwritten(t, unwritten)
						change()
						rebuild(t, src)
						if f.kind == "btrfs" { // where sharing waits for writes that have begun: see docs/snapshots.md, Limits
							syncFiles(t, filepath.Join(src, "large"), filepath.Join(src, "1/changing-5/privileged"), filepath.Join(src, "new/linked-0"))
						}
						hung := hang(t, d, write)
						return ctx, func() error {
							hung()
							d.KeepUnwritten(t, 512*mib)
							return nil
						}, nil
					},
				})
				if !result.PointInTime {
					t.Errorf("it is %+v", result)
				}
				clonetest.Same(t, src, dst)
			})
		}
	}
}

// hang has the disk end no write until the returned function is called, which has to be within 20 seconds. A neighbour has begun one.
func hang(t *testing.T, d *disk.Filesystem, write func(root string) error) (heal func()) {
	t.Helper()
	asked := d.HangWrites()
	var neighbour sync.WaitGroup
	neighbour.Go(func() {
		if err := write(d.At); err != nil {
			t.Error(err)
		}
	})
	<-asked
	late := time.AfterFunc(20*time.Second, func() {
		t.Errorf("pods wait for the disk:\n%s", waiting(t))
		d.Heal()
	})
	return func() {
		late.Stop()
		d.Heal()
		neighbour.Wait()
	}
}

// Changes that are far from each other in a large file count by what is written, and not by what lies between: a copy waits for no disk. On
// btrfs it may: see docs/snapshots.md, Limits.
func TestStandstillAfterScatteredWrites(t *testing.T) {
	for _, f := range sharing[:1] {
		t.Run(f.kind, func(t *testing.T) {
			const apart, writes = 64 << 10, 640
			d := disk.Mount(t, f.kind, 512*mib)
			src, dst := filepath.Join(d.At, "src"), filepath.Join(d.At, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			large := filepath.Join(src, "large")
			must.Succeed(t, os.WriteFile(large, noise(apart*writes), 0o600))
			forget(t, large)
			write(t, filepath.Join(src, "other"), "content")
			scatter := func() {
				f, err := os.OpenFile(large, os.O_WRONLY, 0)
				must.Succeed(t, err)
				for n := range int64(writes) {
					_, err := f.WriteAt(fmt.Appendf(nil, "%010d", n), n*apart+20_000)
					must.Succeed(t, err)
				}
				must.Succeed(t, f.Close())
				write(t, filepath.Join(src, "other"), "changed")
			}
			during := sync.OnceFunc(scatter)
			result := tree(t, src, dst, clone.Options{
				Method: f.method, Rounds: 1,
				Pause: func(context.Context) error { during(); return nil },
				Hold: func(ctx context.Context) (context.Context, func() error, error) {
					scatter()
					heal := hang(t, d, neighbours["data"])
					return ctx, func() error { heal(); return nil }, nil
				},
			})
			if !result.PointInTime {
				t.Errorf("it is %+v", result)
			}
			clonetest.Same(t, src, dst)
		})
	}
}

// rebuild has entries come, go and move.
func rebuild(t *testing.T, src string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(src, name) }
	must.Succeed(t, os.MkdirAll(in("new/below"), 0o711), os.Rename(in("0/changing-0"), in("new/below/moved")), os.Remove(in("1/changing-1")),
		os.Link(in("1/changing-3"), in("new/below/linked")), unix.Mkfifo(in("0/changing-0"), 0o640),
		unix.Setxattr(in("1"), "user.of", []byte("a directory"), 0), os.Remove(in("1/changing-5")), os.Mkdir(in("1/changing-5"), 0o700))
	// More than the kernel keeps, once for each way that a file is copied.
	must.Succeed(t, os.WriteFile(in("1/changing-5/privileged"), noise(2*unwritten), 0o700), unix.Chmod(in("1/changing-5/privileged"), 0o4755))
	for n := range 300 {
		must.Succeed(t, os.WriteFile(in(fmt.Sprint("new/", n)), make([]byte, 48<<10), 0o600))
	}
	must.Succeed(t, os.WriteFile(in("new/linked-0"), noise(unwritten), 0o600))
	for n := range 16 {
		must.Succeed(t, os.Link(in("new/linked-0"), in(fmt.Sprint("new/below/linked-", n))))
	}
}

func syncFiles(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		f, err := os.Open(path)
		must.Succeed(t, err, f.Sync(), f.Close())
	}
}

// forget has the kernel keep nothing of a file in memory: pages that are written then are single ones, and not part of large folios that count as
// written as a whole.
func forget(t *testing.T, path string) {
	t.Helper()
	syncFiles(t, path)
	f, err := os.Open(path)
	must.Succeed(t, err, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
}

// neighbours wait for the disk themselves.
var neighbours = map[string]func(root string) error{
	"data": func(root string) error {
		f, err := os.Create(filepath.Join(root, "neighbour"))
		if err != nil {
			return err
		}
		_, err = f.Write(make([]byte, mib))
		return errors.Join(err, f.Sync(), f.Close())
	},
	"names": func(root string) error {
		if err := os.Mkdir(filepath.Join(root, "neighbour"), 0o755); err != nil {
			return err
		}
		f, err := os.Open(root)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), f.Close())
	},
}

// waiting is where in the kernel the threads of this process are that wait for something that is no signal, and with which file.
func waiting(t *testing.T) string {
	t.Helper()
	threads, err := filepath.Glob("/proc/self/task/*")
	must.Succeed(t, err)
	var all []string
	for _, thread := range threads {
		stat, _ := os.ReadFile(filepath.Join(thread, "stat")) // it may have ended
		stack, _ := os.ReadFile(filepath.Join(thread, "stack"))
		if !strings.Contains(string(stat), ") D ") {
			continue
		}
		call, _ := os.ReadFile(filepath.Join(thread, "syscall")) // with a descriptor first, or none
		var number, fd int
		_, _ = fmt.Sscanf(string(call), "%d 0x%x", &number, &fd)
		file, _ := os.Readlink(fmt.Sprint("/proc/self/fd/", fd))
		all = append(all, fmt.Sprintf("call %d of %s: %s%s", number, file, call, stack))
	}
	return strings.Join(all, "\n")
}
