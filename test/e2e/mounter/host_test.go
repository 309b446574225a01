// Package mounter runs the real pool-mounter as its pod does: in a mount namespace of its own, with the pool's path
// shared with the host and the claim as kubelet gives it. The test's namespace is the host.
package mounter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// bound is far above what a mounter needs: mkfs, fsck and each unmount wait for the disk, which others keep busy too.
const bound = 5 * time.Minute

// program is the mounter, built once. The directory goes with this process.
var program = sync.OnceValues(func() (string, error) {
	if built := os.Getenv("POOL_MOUNTER"); built != "" {
		return built, nil
	}
	path := filepath.Join(os.TempDir(), "pool-mounter")
	build := exec.Command("go", "build", "-o", path, "kubevirt.io/hostpath-provisioner/cmd/pool-mounter")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	output, err := build.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, output)
	}
	return path, err
})

// A host is a node with the path of one pool.
type host struct {
	t *testing.T
	// Root is what the pod shares with the host. Path is the pool's path in it, Target where the pool is to be
	// mounted, and Published where a volume can be.
	Root, Path, Target, Published string
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "unshare", "mount", "blkid", "fsck", "mkfs.xfs", "mkfs.ext4", "mkfs.btrfs")
	root := testenv.Tmpfs(t, 16*mib)
	must.Succeed(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
	h := &host{t: t, Root: root, Path: filepath.Join(root, "pool"), Published: filepath.Join(root, "volume")}
	h.Target = filepath.Join(h.Path, "csi")
	must.Succeed(t, errors.Join(os.Mkdir(h.Path, 0o755), os.Mkdir(h.Published, 0o755)))
	t.Cleanup(func() {
		for len(h.mounts()) > 0 {
			h.unmount()
		}
	})
	return h
}

// unmount unmounts the target, as an administrator does: again, while a mounter has a look at it or grows it.
func (h *host) unmount() {
	h.t.Helper()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	err := unix.Unmount(h.Target, 0)
	for deadline := time.Now().Add(bound); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); {
		<-again.C
		err = unix.Unmount(h.Target, 0)
	}
	must.Succeed(h.t, err)
}

// mounts are what the host sees mounted at the target.
func (h *host) mounts() mountinfo.Table {
	h.t.Helper()
	all, err := mountinfo.Own()
	must.Succeed(h.t, err)
	return slices.DeleteFunc(all, func(m *mountinfo.Mount) bool { return m.Mountpoint != h.Target })
}

// wantMounted checks that the target carries one mount.
func (h *host) wantMounted(kind string) {
	h.t.Helper()
	found := h.mounts()
	if len(found) != 1 || found[0].Type != kind {
		h.t.Fatalf("the host sees %d mounts at the target (%+v), want one of %s", len(found), found, kind)
	}
}

func (h *host) wantUnmounted() {
	h.t.Helper()
	if found := h.mounts(); len(found) != 0 {
		h.t.Fatalf("the host sees %d mounts at the target, the first %+v", len(found), *found[0])
	}
}

// wantServed checks what the driver makes of the target with requireMount, in a container that has the pool's path as a
// volume.
func (h *host) wantServed(want bool) {
	h.t.Helper()
	volume := h.t.TempDir()
	must.Succeed(h.t, unix.Mount(h.Path, volume, "", unix.MS_BIND|unix.MS_REC, ""))
	must.Succeed(h.t, unix.Mount("", volume, "", unix.MS_SLAVE|unix.MS_REC, "")) // HostToContainer
	defer func() { must.Succeed(h.t, unix.Unmount(volume, unix.MNT_DETACH)) }()
	kernel, err := bind.NewKernel()
	must.Succeed(h.t, err)
	defer func() { must.Succeed(h.t, kernel.Close()) }()
	pool, err := dir.Open(filepath.Join(volume, filepath.Base(h.Target)))
	must.Succeed(h.t, err)
	defer func() { _ = pool.Close() }()
	if got, err := kernel.IsFilesystem(pool); err != nil || got != want {
		h.t.Errorf("the driver serves the pool: %v, %v; want %v", got, err, want)
	}
}

// A pod is one run of the mounter.
type pod struct {
	t      *testing.T
	cmd    *exec.Cmd
	output *lines
	done   chan struct{}
	err    error
}

// start runs a command of the mounter in a pod. Setup are commands of a shell that change the mounts of the pod.
func (h *host) start(setup string, args ...string) *pod {
	h.t.Helper()
	binary, err := program()
	must.Succeed(h.t, err)
	script := setup + "\n" + `exec "$@"`
	p := &pod{t: h.t, output: newLines(), done: make(chan struct{})}
	all := append([]string{"--mount", "--propagation", "unchanged", "sh", "-ec", script, "pod", binary, args[0], "--target", h.Target, "--v=2"}, args[1:]...)
	p.cmd = exec.Command("unshare", all...)
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	must.Succeed(h.t, p.cmd.Start())
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	h.t.Cleanup(func() {
		p.stop(syscall.SIGTERM) // not SIGKILL: strace would leave it running
		if h.t.Failed() {
			h.t.Logf("pool-mounter %s:\n%s", strings.Join(args, " "), p.output)
		}
	})
	return p
}

// run waits for a command to end, and answers its status and what it said.
func (h *host) run(setup string, args ...string) (status int, said string) {
	h.t.Helper()
	p := h.start(setup, args...)
	p.wait()
	return p.cmd.ProcessState.ExitCode(), p.output.String()
}

func (p *pod) wait() {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(bound):
		p.t.Fatalf("pool-mounter does not end:\n%s", p.output)
	}
}

func (p *pod) stop(s os.Signal) {
	p.t.Helper()
	if traced := p.traced(); traced != nil {
		_ = traced.Signal(s) // it may have ended
	} else if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
	p.wait()
}

// traced is the mounter, if strace runs it. A signal to strace has it let go of all threads, one after the other, and wait for
// ever for one that waits for the first step of a program which strace holds (vfork(2)).
func (p *pod) traced() *os.Process {
	proc := fmt.Sprintf("/proc/%d", p.cmd.Process.Pid)
	name, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil || string(name) != "strace\n" {
		return nil
	}
	children, _ := os.ReadFile(fmt.Sprintf("%s/task/%d/children", proc, p.cmd.Process.Pid)) // none, or gone
	var pid int
	if _, err := fmt.Sscan(string(children), &pid); err != nil {
		return nil
	}
	traced, _ := os.FindProcess(pid) // never fails on Linux
	return traced
}

// says waits until the mounter has logged a text, count times.
func (p *pod) says(text string, count int) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), bound)
	defer cancel()
	if !p.output.wait(ctx, p.done, text, count) {
		p.t.Fatalf("pool-mounter does not say %q:\n%s", text, p.output)
	}
}

// saysOrEnds waits until the mounter has logged a text, and reports whether it did before it ended.
func (p *pod) saysOrEnds(text string) bool {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), bound)
	defer cancel()
	found := p.output.wait(ctx, p.done, text, 1)
	if ctx.Err() != nil {
		p.t.Fatalf("pool-mounter neither ends nor says %q:\n%s", text, p.output)
	}
	return found
}

// What it logs when it has mounted the pool, and when it has begun to watch the mount.
const mounted, keeping = `"Mounted the pool" target`, "Keeping the pool mounted"

// lines is output that can be waited for.
type lines struct {
	mu      sync.Mutex
	written bytes.Buffer
	more    chan struct{} // closed by the next write
}

func newLines() *lines { return &lines{more: make(chan struct{})} }

// Write is that of io.Writer.
func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.more)
	l.more = make(chan struct{})
	return l.written.Write(b)
}

// String is all that was written.
func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written.String()
}

func (l *lines) wait(ctx context.Context, ended <-chan struct{}, text string, count int) bool {
	for {
		l.mu.Lock()
		found, more := strings.Count(l.written.String(), text) >= count, l.more
		l.mu.Unlock()
		if found {
			return true
		}
		select {
		case <-more:
		case <-ended:
			return strings.Count(l.String(), text) >= count
		case <-ctx.Done():
			return false
		}
	}
}

// A disk is a loop device on a sparse file.
type disk struct {
	t      *testing.T
	device *os.File // open: it goes with the test, also if that is killed
	file   string
	// Path is the device.
	Path string
}

func newDisk(t *testing.T, bytes int64) *disk {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "disk-")
	must.Succeed(t, err)
	must.Succeed(t, f.Truncate(bytes))
	must.Succeed(t, f.Close())
	return attach(t, f.Name())
}

func attach(t *testing.T, file string) *disk {
	t.Helper()
	testenv.NeedRoot(t)
	device, err := loopfs.Attach(file)
	if errors.Is(err, loopfs.ErrMissing) {
		testenv.Missing(t, err.Error())
	}
	must.Succeed(t, err)
	d := &disk{t: t, device: device, file: file, Path: device.Name()}
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	return d
}

func (d *disk) grow(bytes int64) {
	d.t.Helper()
	must.Succeed(d.t, os.Truncate(d.file, bytes))
	must.Succeed(d.t, unix.IoctlSetInt(int(d.device.Fd()), unix.LOOP_SET_CAPACITY, 0))
}

// write puts bytes onto the disk before anybody uses it.
func (d *disk) write(offset int64, data string) {
	d.t.Helper()
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	must.Succeed(d.t, err)
	_, err = f.WriteAt([]byte(data), offset)
	must.Succeed(d.t, errors.Join(err, f.Sync(), f.Close()))
}

func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	testenv.NeedPrograms(t, name)
	output, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, output)
	}
	return string(output)
}
