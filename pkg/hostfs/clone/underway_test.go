package clone_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A slowWrite is one write(2) to a file, which waits for the rest of its buffer until finish is called: like one whose buffer is
// mapped from a slow disk (userfaultfd(2)).
type slowWrite struct {
	file   *os.File
	buffer []byte
	there  int // how much of the buffer is there at once
	faults int
	fill   func()
	ended  chan error
}

// Of linux/userfaultfd.h.
const (
	uffdioAPI      = 0xc018aa3f
	uffdioRegister = 0xc020aa00
	uffdioCopy     = 0xc028aa03
	uffdVersion    = 0xaa
	uffdMissing    = 1
)

func newSlowWrite(t *testing.T, path string, size, there int) *slowWrite {
	t.Helper()
	w := &slowWrite{there: there, ended: make(chan error, 1)}
	var err error
	w.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must.Succeed(t, err)
	w.buffer, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	must.Succeed(t, err)
	copy(w.buffer[:there], bytes.Repeat([]byte{'w'}, there))
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0) // poll(2) needs that
	if errno == unix.ENOSYS {
		testenv.Missing(t, "userfaultfd(2)")
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	w.faults = int(fd)
	ask := func(request uintptr, argument unsafe.Pointer) {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(argument)); errno != 0 {
			t.Errorf("userfaultfd: %v", errno)
		}
	}
	ask(uffdioAPI, unsafe.Pointer(&struct{ api, features, ioctls uint64 }{api: uffdVersion}))
	start, length := uint64(uintptr(unsafe.Pointer(&w.buffer[there]))), uint64(size-there)
	ask(uffdioRegister, unsafe.Pointer(&struct{ start, length, mode, ioctls uint64 }{start, length, uffdMissing, 0}))
	w.fill = sync.OnceFunc(func() {
		from := bytes.Repeat([]byte{'w'}, size-there)
		ask(uffdioCopy, unsafe.Pointer(&struct {
			to, from, length, mode uint64
			copied                 int64
		}{start, uint64(uintptr(unsafe.Pointer(&from[0]))), length, 0, 0}))
		runtime.KeepAlive(from)
	})
	t.Cleanup(func() { must.Succeed(t, w.file.Close(), unix.Close(w.faults), unix.Munmap(w.buffer)) })
	return w
}

// begin returns once the write waits for its buffer.
func (w *slowWrite) begin(t *testing.T) {
	t.Helper()
	go func() {
		_, err := unix.Pwrite(int(w.file.Fd()), w.buffer, 0)
		w.ended <- err
	}()
	fault := []unix.PollFd{{Fd: int32(w.faults), Events: unix.POLLIN}}
	_, err := unix.Poll(fault, 60_000)
	for errors.Is(err, unix.EINTR) {
		_, err = unix.Poll(fault, 60_000)
	}
	must.Succeed(t, err)
	if fault[0].Revents != unix.POLLIN {
		t.Fatalf("the write does not wait for its buffer: %#x", fault[0].Revents)
	}
}

// finish may be called several times.
func (w *slowWrite) finish(t *testing.T) {
	t.Helper()
	w.fill()
	err := <-w.ended
	w.ended <- nil
	must.Succeed(t, err)
}

// finishOnceAwaited fills the buffer once the thread that calls it waits in the kernel, as for a lock of the file, until stop is called.
func (w *slowWrite) finishOnceAwaited() (stop func()) {
	thread := fmt.Sprint("/proc/self/task/", unix.Gettid())
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for last := ""; ; {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			stat, _ := os.ReadFile(thread + "/stat") // it is there until stop
			call, _ := os.ReadFile(thread + "/syscall")
			now := string(call)
			if !strings.Contains(string(stat), ") D ") {
				now = ""
			}
			if now != "" && now == last {
				w.fill()
				return
			}
			last = now
		}
	}()
	return sync.OnceFunc(func() { close(done); <-stopped })
}

// onEachWay runs a test for each way to copy a file, with an empty source and an empty copy. While a write of 8 MiB waits that
// makes a file longer, the file has half of that already, or nothing yet.
func onEachWay(t *testing.T, test func(t *testing.T, src, dst string, method clone.Method, there int)) {
	const size = 8 * mib
	for _, f := range []struct {
		name, kind string
		method     clone.Method
		there      int
	}{
		{"xfs", "xfs", clone.Share, 0},
		{"btrfs", "btrfs", clone.Share, 0},
		{"ext4", "ext4", clone.Copy, size / 2},
		{"btrfs without sharing", "btrfs", clone.Copy, size / 2},
		{"xfs without sharing", "xfs", clone.Copy, size / 2},
	} {
		t.Run(f.name, func(t *testing.T) {
			root := testenv.LoopFS(t, f.kind, 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			test(t, src, dst, f.method, f.there)
		})
	}
}

// The kernel sets the ctime of a file when a write to it begins. So nothing but the content shows that the write has gone on since.
func TestWriteUnderWayIsWaitedFor(t *testing.T) {
	onEachWay(t, func(t *testing.T, src, dst string, method clone.Method, there int) {
		w := newSlowWrite(t, filepath.Join(src, "file"), 8*mib, there)
		w.begin(t)
		awaitTick(t, filepath.Dir(src))
		var stop func()
		watch := sync.OnceFunc(func() { stop = w.finishOnceAwaited() })
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1, Pause: func(context.Context) error { watch(); return nil }})
		stop()
		w.finish(t)
		if !result.PointInTime {
			t.Errorf("it is %+v", result)
		}
		clonetest.Same(t, src, dst)
	})
}

// A write that is under way in the pass before the standstill, and ends before pods stand still, is in the copy whole: a pod may
// have written elsewhere that it is.
func TestWriteUnderWayBeforeStandstillIsWaitedFor(t *testing.T) {
	onEachWay(t, func(t *testing.T, src, dst string, method clone.Method, there int) {
		for n := range 8 {
			write(t, filepath.Join(src, fmt.Sprint(n)), "")
		}
		d, err := os.Open(src)
		must.Succeed(t, err)
		listed, err := d.Readdirnames(-1) // in the order in which they are copied
		must.Succeed(t, err, d.Close())
		w := newSlowWrite(t, filepath.Join(src, listed[0]), 8*mib, there)
		begin := sync.OnceFunc(func() {
			w.begin(t)
			write(t, filepath.Join(src, listed[1]), "changes too")
		})
		var stop func()
		watch := sync.OnceFunc(func() { stop = w.finishOnceAwaited() })
		copied := func(name string) bool {
			_, err := os.Lstat(filepath.Join(dst, name))
			return err == nil
		}
		held := false
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1,
			Pause: func(context.Context) error {
				if copied(listed[0]) {
					begin()
				}
				if copied(listed[len(listed)-1]) { // the second pass begins
					watch()
				}
				return nil
			},
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				stop()
				w.finish(t)
				held = true
				write(t, filepath.Join(src, listed[2]), "the first is whole")
				return ctx, func() error { return nil }, nil
			}})
		if !result.PointInTime || !held {
			t.Errorf("it is %+v, held %v", result, held)
		}
		clonetest.Same(t, src, dst)
	})
}

// A store through a mapping that was under way while a file was copied is in the copy, although the ctime is older: here it is
// taken out of the copy.
func TestFileThatChangedRightBeforeItWasCopiedIsCopiedAgain(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		must.Succeed(t, os.Mkdir(filepath.Join(src, "directory"), 0o755))
		name := filepath.Join("directory", "file")
		write(t, filepath.Join(src, name), "stored")
		write(t, filepath.Join(src, "changes-1"), "")
		awaitTick(t, filepath.Dir(src))
		change := sync.OnceFunc(func() {
			write(t, filepath.Join(src, "changes-1"), "changed")
			write(t, filepath.Join(src, "changes-2"), "")
		})
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1,
			Pause: func(context.Context) error { change(); return nil },
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				was, err := os.Stat(filepath.Join(src, name))
				must.Succeed(t, err)
				write(t, filepath.Join(dst, name), "before")
				must.Succeed(t, os.Chtimes(filepath.Join(dst, name), was.ModTime(), was.ModTime()))
				return ctx, func() error { return nil }, nil
			}})
		if !result.PointInTime {
			t.Errorf("it is %+v", result)
		}
		clonetest.Same(t, src, dst)
	})
}

// A copy whose size or mtime is not that of its file is no copy of it, however old the file is.
func TestFileWithOtherSizeThanItsCopyIsCopiedAgain(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		write(t, filepath.Join(src, "one"), "content")
		write(t, filepath.Join(src, "two"), "content")
		must.Succeed(t, os.Link(filepath.Join(src, "two"), filepath.Join(src, "three")))
		awaitSettled(t, filepath.Dir(src))
		change := sync.OnceFunc(func() {
			write(t, filepath.Join(src, "changes-1"), "")
			write(t, filepath.Join(src, "changes-2"), "")
		})
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1,
			Pause: func(context.Context) error { change(); return nil },
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				must.Succeed(t, os.Truncate(filepath.Join(dst, "one"), 3), os.Truncate(filepath.Join(dst, "two"), 3))
				return ctx, func() error { return nil }, nil
			}})
		if !result.PointInTime {
			t.Errorf("it is %+v", result)
		}
		clonetest.Same(t, src, dst)
	})
}

// Once its pods go on, a program removes its secret, and then opens its directory, which is the volume, to all.
func TestRootIsOfMomentOfTheRest(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		must.Succeed(t, os.Chmod(src, 0o700))
		write(t, filepath.Join(src, "secret"), "secret")
		write(t, filepath.Join(src, "other"), "")
		change := sync.OnceFunc(func() {
			write(t, filepath.Join(src, "other"), "changes")
			write(t, filepath.Join(src, "another"), "comes")
		})
		old := time.Date(1999, 12, 31, 23, 59, 59, 123456789, time.UTC)
		released := false
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1,
			Pause: func(context.Context) error { change(); return nil },
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				must.Succeed(t, os.Chtimes(src, old, old))
				return ctx, func() error {
					released = true
					must.Succeed(t, os.Remove(filepath.Join(src, "secret")), os.Chmod(src, 0o777)) //nolint:gosec // as a pod may
					return nil
				}, nil
			}})
		st, err := os.Stat(dst)
		must.Succeed(t, err)
		if !result.PointInTime || !released || st.Mode().Perm() != 0o700 || !st.ModTime().Equal(old) {
			t.Errorf("%+v, released %v: the root has mode %s and is of %s, want those of the standstill", result, released, st.Mode(), st.ModTime())
		}
	})
}
