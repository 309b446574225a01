package blockdev_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Any process can mount a tmpfs in a user namespace of its own, and call its source what it likes.
func TestSourceOfMountIsNoUse(t *testing.T) {
	path, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	at := t.TempDir()
	must.Succeed(t, unix.Mount(path, at, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, 0)) })
	users, err := only(0).FindUsers([]blockdev.Facts{facts})
	if err != nil || len(users.Mounts) > 0 {
		t.Errorf("users %+v, %v; want none", users, err)
	}
}

// tower makes directories in one, each in the one before, whose path is longer than any that the kernel takes, and opens the last.
func tower(t *testing.T, in string, height int) *os.File {
	t.Helper()
	at, err := os.Open(in)
	must.Succeed(t, err)
	name := strings.Repeat("d", unix.NAME_MAX)
	for range height {
		must.Succeed(t, unix.Mkdirat(int(at.Fd()), name, 0o755))
		below, err := unix.Openat(int(at.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must.Succeed(t, errors.Join(err, at.Close()))
		at = os.NewFile(uintptr(below), "a directory of a tower")
	}
	t.Cleanup(func() { _ = at.Close() })
	return at
}

// A process that may mount, as in a user namespace of its own, can do so where no path leads to.
func TestMountWithoutPathHidesNoUser(t *testing.T) {
	_, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	top := tower(t, testenv.Tmpfs(t, 1*mib), 20)
	tree, err := unix.OpenTree(int(top.Fd()), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	must.Succeed(t, err)
	must.Succeed(t, unix.MoveMount(tree, "", int(top.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
	t.Cleanup(func() {
		must.Succeed(t, unix.Unmount(fmt.Sprintf("/proc/self/fd/%d", tree), unix.MNT_DETACH), unix.Close(tree))
	})
	users, err := only(0).FindUsers([]blockdev.Facts{facts})
	if err != nil || len(users.Mounts) > 0 {
		t.Errorf("users %+v, %v; want none", users, err)
	}
}

// A process can map a file whose path has megabytes thousands of times.
func TestMemoryOfOthersTakesNone(t *testing.T) {
	const mappings, height = 500, 800
	if os.Getenv(mappedVariable) != "" {
		for i := range mappings {
			must.Succeed(t, must.Err(unix.Mmap(3, int64(2*i*os.Getpagesize()), os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)))
		}
		awaitSearch()
		return
	}
	_, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	top := tower(t, testenv.Tmpfs(t, 16*mib), height)
	file, err := unix.Openat(int(top.Fd()), "file", unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	must.Succeed(t, err)
	mapped := os.NewFile(uintptr(file), "a file on a tower")
	must.Succeed(t, mapped.Truncate(int64(2*mappings*os.Getpagesize())))
	wantLittle(t, []blockdev.Facts{facts}, mapped)
}

// What a process has open may have megabytes to say of it, as often as it likes.
func TestDescriptorsOfOthersTakeNone(t *testing.T) {
	const watched, copies = 1000, 500
	if os.Getenv(mappedVariable) != "" {
		poll, err := unix.EpollCreate1(0)
		must.Succeed(t, err)
		for range watched {
			event, err := unix.Eventfd(0, 0)
			must.Succeed(t, err, unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, event, &unix.EpollEvent{}))
		}
		for range copies {
			must.Succeed(t, must.Err(unix.Dup(poll)))
		}
		awaitSearch()
		return
	}
	_, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	wantLittle(t, []blockdev.Facts{facts})
}

// awaitSearch says in the other process that it is ready, and waits until it was searched.
func awaitSearch() {
	fmt.Println("mapped")
	_, _ = os.Stdin.Read(make([]byte, 1)) // it is closed then
}

// wantLittle searches the process that the test is as well, which has files to inherit, and wants that to take little memory.
func wantLittle(t *testing.T, of []blockdev.Facts, files ...*os.File) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), mappedVariable+"=1"), files
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	for _, file := range files {
		must.Succeed(t, file.Close())
	}
	line := make([]byte, len("mapped\n"))
	if _, err := io.ReadFull(output, line); err != nil || string(line) != "mapped\n" {
		t.Fatalf("the other process: %q, %v", line, err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	users, err := only(cmd.Process.Pid).FindUsers(of)
	runtime.ReadMemStats(&after)
	must.Succeed(t, input.Close())
	_ = cmd.Wait() // it has been told to end
	if err != nil || len(users.Processes) > 0 {
		t.Errorf("users %+v, %v; want none", users, err)
	}
	if taken := (after.TotalAlloc - before.TotalAlloc) / mib; taken > 16 {
		t.Errorf("it took %d MiB of memory", taken)
	}
}

// Processes mount below directories that they have closed to others, as kubelet does where a container has one of its volumes inside.
func TestMountInClosedDirectoryHidesNoUser(t *testing.T) {
	const searched = "BLOCKDEV_TEST_SEARCHED"
	if pid, err := strconv.Atoi(os.Getenv(searched)); err == nil {
		if users, err := only(pid).FindUsers(nil); err != nil {
			t.Errorf("users %+v, %v; want none", users, err)
		}
		return
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "setpriv")
	in := testenv.Tmpfs(t, 1*mib)
	closed := in + "/closed"
	must.Succeed(t, os.Mkdir(closed, 0o700), os.Mkdir(closed+"/directory", 0o755), os.Mkdir(closed+"/at", 0o755),
		unix.Mount(closed+"/directory", closed+"/at", "", unix.MS_BIND, ""), os.Chown(closed, 1000, 1000))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(closed+"/at", 0)) })
	kept := "-all"
	for _, c := range privilege.ForDevices {
		kept += ",+" + strings.ToLower(strings.TrimPrefix(c.String(), "CAP_"))
	}
	cmd := exec.CommandContext(t.Context(), "setpriv", "--bounding-set="+kept, must.Value(os.Executable())(t), "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), searched+"="+strconv.Itoa(os.Getpid()))
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, output)
	}
}
