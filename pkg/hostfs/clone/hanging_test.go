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
				var neighbour sync.WaitGroup
				result := tree(t, src, dst, clone.Options{
					Method: f.method, Rounds: 1,
					Pause: func(context.Context) error { during(); return nil },
					Hold: func(ctx context.Context) (context.Context, func() error, error) {
						d.KeepUnwritten(t, unwritten)
						change()
						rebuild(t, src)
						asked := d.HangWrites()
						neighbour.Go(func() {
							if err := write(root); err != nil {
								t.Error(err)
							}
						})
						<-asked
						late := time.AfterFunc(20*time.Second, func() {
							t.Errorf("pods wait for the disk:\n%s", waiting(t))
							d.Heal()
						})
						return ctx, func() error {
							late.Stop()
							d.Heal()
							d.KeepUnwritten(t, 512*mib)
							return nil
						}, nil
					},
				})
				neighbour.Wait()
				if !result.PointInTime {
					t.Errorf("it is %+v", result)
				}
				clonetest.Same(t, src, dst)
			})
		}
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
