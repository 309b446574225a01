package clone

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A page that is written through a mapping while a later pass begins is found out if it is written again: it must be
// clean after it was copied, or it would not fault.
func TestWriteThroughMappingWhileLaterPassBegins(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512<<20)
			src, dst, links := filepath.Join(root, "src"), filepath.Join(root, "dst"), filepath.Join(root, "dst", "links")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.Mkdir(links, 0o700), os.WriteFile(filepath.Join(src, "file"), make([]byte, 4096), 0o600))
			f, err := os.OpenFile(filepath.Join(src, "file"), os.O_RDWR, 0)
			must.Succeed(t, err)
			page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			must.Succeed(t, err, f.Close())
			defer func() { must.Succeed(t, unix.Munmap(page)) }()
			var o Options
			if kind == "ext4" {
				o.Method = Copy
			}
			c := newCopier(open(t, src), open(t, links), o)
			c.dst, err = dir.NewDescent(open(t, dst), false)
			must.Succeed(t, err)
			page[0]++
			first, err := c.begin(t.Context(), true)
			must.Succeed(t, err)
			defer func() { must.Succeed(t, c.clocks.machine.Close()) }()
			must.Succeed(t, c.pass(t.Context(), moment{}, false))

			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				for {
					select {
					case <-stop:
						return
					default:
						page[0]++
					}
				}
			}()
			start, err := c.clocks.later(t.Context())
			close(stop)
			<-stopped
			must.Succeed(t, err)
			c.round++
			must.Succeed(t, c.pass(t.Context(), first, false))
			page[0]++
			changed, err := c.check(t.Context(), start)
			if err != nil || changed.files != 1 {
				t.Errorf("%+v (%v), want the file to have changed", changed, err)
			}
		})
	}
}

// While all stand still entries are compared twice: to find what has changed, and that nothing does.
func TestNothingIsHeldThatCannotBeComparedTwiceInTime(t *testing.T) {
	testenv.NeedRoot(t)
	src, dst, links := t.TempDir(), t.TempDir(), t.TempDir()
	c := newCopier(open(t, src), open(t, links), Options{Method: Copy, HoldAtMost: 8 * time.Second})
	c.compared = 5 * time.Second
	var err error
	c.dst, err = dir.NewDescent(open(t, dst), false)
	must.Succeed(t, err)
	start, err := c.begin(t.Context(), true)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, c.clocks.machine.Close()) }()
	c.options.Hold = func(context.Context) (context.Context, func() error, error) {
		t.Error("they are stopped")
		return nil, nil, context.Canceled
	}
	_, err = c.standstill(t.Context(), start, Result{})
	must.ErrorIs(t, err, ErrTooMany)
}

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}
