// Package testenv is what tests need of a machine: root, programs, filesystems,
// and a place where they can mount without harm. What is missing skips a test
// with its name, and fails it where the variable CI is set, so that nothing
// stays untested unseen.
package testenv

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// UnitVariable is set by make unit: what needs root is skipped, also where root runs it.
const UnitVariable = "HOSTPATH_UNIT"

// refused is why Main could not make a mount namespace.
var refused error

// Main runs a package's tests, as root in a mount namespace of their own. It is
// all that TestMain does:
//
//	func TestMain(m *testing.M) { testenv.Main(m) }
func Main(m *testing.M) {
	if !isRoot() || mountns.Inside() {
		os.Exit(m.Run())
	}
	status, err := mountns.Rerun(syscall.SIGKILL)
	// A container may have root without the right to mount. The tests that need
	// no root still run there.
	if errors.Is(err, syscall.EPERM) {
		refused = err
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		os.Exit(max(status, 1))
	}
	os.Exit(status)
}

func isRoot() bool { return os.Geteuid() == 0 && os.Getenv(UnitVariable) == "" }

// NeedRoot says that a test needs root and a mount namespace of its own.
func NeedRoot(t testing.TB) {
	t.Helper()
	switch {
	case !isRoot():
		Missing(t, "root")
	case refused != nil:
		Missing(t, fmt.Sprintf("a private mount namespace (%v)", refused))
	case !mountns.Inside():
		t.Fatal("this package's TestMain has to call testenv.Main, or its mounts would reach the host")
	}
}

// NeedTime says that a test takes longer than make unit may.
func NeedTime(t testing.TB) {
	t.Helper()
	if os.Getenv(UnitVariable) != "" {
		t.Skip("this test takes long: make test has it")
	}
}

// NeedPrograms says that a test needs these programs.
func NeedPrograms(t testing.TB, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			Missing(t, "the program "+program)
		}
	}
}

// LoopFS mounts a new filesystem of the kind "xfs", "ext4" or "btrfs" and of that
// many bytes, sparse, until the test ends. A test that leaves it busy fails.
func LoopFS(t testing.TB, kind string, bytes int64, mountOptions ...string) string {
	t.Helper()
	return loopFS(t, kind, bytes, nil, mountOptions...)
}

// MadeFS is LoopFS with arguments of the kind's mkfs.
func MadeFS(t testing.TB, kind string, bytes int64, arguments ...string) string {
	t.Helper()
	return loopFS(t, kind, bytes, arguments)
}

// MountMade is LoopFS with arguments of the kind's mkfs, and mount options.
func MountMade(t testing.TB, kind string, bytes int64, arguments []string, mountOptions ...string) string {
	t.Helper()
	return loopFS(t, kind, bytes, arguments, mountOptions...)
}

func loopFS(t testing.TB, kind string, bytes int64, arguments []string, mountOptions ...string) string {
	t.Helper()
	NeedRoot(t)
	dir := mountPoint(t)
	err := loopfs.MountMade(t.Context(), dir, kind, bytes, arguments, mountOptions...)
	if errors.Is(err, loopfs.ErrMissing) {
		Missing(t, err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, dir)
	return dir
}

// CountingBtrfs is LoopFS for a btrfs whose quotas are on, and have counted. The arguments are of
// mkfs.btrfs(8).
func CountingBtrfs(t testing.TB, bytes int64, arguments ...string) string {
	t.Helper()
	dir := loopFS(t, "btrfs", bytes, arguments)
	err := loopfs.SwitchQuotasOn(t.Context(), dir)
	if errors.Is(err, loopfs.ErrMissing) {
		Missing(t, err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// BtrfsOfDisks is CountingBtrfs on several disks of so many bytes, as mkfs.btrfs(8) makes it by itself.
func BtrfsOfDisks(t testing.TB, disks ...int64) string {
	t.Helper()
	NeedRoot(t)
	NeedPrograms(t, "btrfs", "mkfs.btrfs")
	mkfs, options := []string{"-q"}, []string(nil)
	for n, bytes := range disks {
		image := filepath.Join(t.TempDir(), fmt.Sprint("disk", n))
		if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, bytes)); err != nil {
			t.Fatal(err)
		}
		device, err := loopfs.Attach(image)
		if err != nil {
			t.Fatal(err)
		}
		defer device.Close() // the mount holds it
		mkfs, options = append(mkfs, device.Name()), append(options, "device="+device.Name())
	}
	if output, err := exec.CommandContext(t.Context(), "mkfs.btrfs", mkfs...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	dir := mountPoint(t)
	if err := loopfs.MountDevice(t.Context(), mkfs[1], dir, "btrfs", options...); err != nil {
		t.Fatal(err)
	}
	unmountAtEnd(t, dir)
	if err := loopfs.SwitchQuotasOn(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Tmpfs mounts a tmpfs of that many bytes until the test ends.
func Tmpfs(t testing.TB, bytes int64) string {
	t.Helper()
	NeedRoot(t)
	dir := mountPoint(t)
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Fatalf("mount a tmpfs on %s: %v", dir, err)
	}
	unmountAtEnd(t, dir)
	return dir
}

// Overlay mounts an overlayfs until the test ends whose files are on a new filesystem of that kind and of that many bytes.
func Overlay(t testing.TB, kind string, bytes int64) string {
	t.Helper()
	files := LoopFS(t, kind, bytes)
	layers := make(map[string]string)
	for _, layer := range []string{"lowerdir", "upperdir", "workdir"} {
		layers[layer] = filepath.Join(files, layer)
		if err := os.Mkdir(layers[layer], 0o755); err != nil {
			t.Fatal(err)
		}
	}
	dir := mountPoint(t)
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", layers["lowerdir"], layers["upperdir"], layers["workdir"])
	if err := syscall.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Fatalf("mount an overlayfs on %s: %v", dir, err)
	}
	unmountAtEnd(t, dir)
	return dir
}

// Hang makes a directory and mounts a filesystem on it that never answers: one of FUSE,
// whose server reads no request until release is called, or the test ends.
func Hang(t testing.TB, path string) (release func()) {
	t.Helper()
	NeedRoot(t)
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	server, err := syscall.Open("/dev/fuse", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		Missing(t, "FUSE: "+err.Error())
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
	if err := syscall.Mount("hang", path, "fuse", 0, options); err != nil {
		t.Fatalf("mount what hangs on %s: %v", path, errors.Join(err, syscall.Close(server)))
	}
	release = sync.OnceFunc(func() {
		if err := errors.Join(syscall.Close(server), syscall.Unmount(path, syscall.MNT_DETACH)); err != nil {
			t.Errorf("take down what hangs on %s: %v", path, err)
		}
	})
	t.Cleanup(release)
	return release
}

// SocketDir makes a directory for sockets until the test ends: the path of a socket is
// limited to 107 bytes, and t.TempDir has the name of the test in it.
func SocketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "s-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// FreeAddress is one of TCP for what listens later. No other process is given its port meanwhile, because the address is of this process.
func FreeAddress(t testing.TB) string {
	t.Helper()
	pid := os.Getpid()
	listener, err := net.Listen("tcp", net.JoinHostPort(net.IPv4(127, 1, byte(pid>>8), byte(pid)).String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return listener.Addr().String()
}

// IsLoopOfOthers reports whether a loop device is on a file that is neither of the tests of this package nor a device: tests of other
// packages have filesystems that refuse to say what a file is.
func IsLoopOfOthers(name string) bool {
	at, err := os.ReadFile("/sys/block/" + name + "/loop/backing_file")
	return err != nil || !strings.HasPrefix(string(at), os.TempDir()+"/") && !strings.HasPrefix(string(at), "/dev/")
}

func mountPoint(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "fs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func unmountAtEnd(t testing.TB, dir string) {
	t.Cleanup(func() {
		if err := loopfs.Unmount(dir); err != nil {
			t.Error(err)
		}
	})
}

// Missing ends a test that needs what this machine lacks: it is skipped, or fails
// where the variable CI is set.
func Missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("this test needs %s, and in CI nothing is skipped", what)
	}
	t.Skipf("this test needs %s", what)
}

// FutureCtime is the ctime of the files of FutureFS.
var FutureCtime = time.Date(2037, 1, 2, 3, 4, 5, 0, time.UTC)

// FutureFS is LoopFS of "xfs" or "ext4", filled before, in which files have a ctime in the future, as after a clock was set
// wrong for a while. No system call sets a ctime.
func FutureFS(t testing.TB, kind string, bytes int64, fill func(root string) (files []string)) string {
	t.Helper()
	NeedRoot(t)
	dir := mountPoint(t)
	var arguments []string
	if kind == "xfs" {
		arguments = []string{"-m", "bigtime=0"} // xfs_db(8) sets no other times
	}
	image, err := loopfs.Format(t.Context(), filepath.Dir(dir), kind, bytes, arguments...)
	if errors.Is(err, loopfs.ErrMissing) {
		Missing(t, err.Error())
	}
	must.Succeed(t, err, loopfs.MountImage(t.Context(), image, dir, kind))
	var inodes []uint64
	for _, file := range fill(dir) {
		var st syscall.Stat_t
		must.Succeed(t, syscall.Stat(file, &st))
		inodes = append(inodes, st.Ino)
	}
	must.Succeed(t, loopfs.Unmount(dir))
	for _, inode := range inodes {
		setCtime(t, kind, image, inode)
	}
	must.Succeed(t, loopfs.MountImage(t.Context(), image, dir, kind))
	unmountAtEnd(t, dir)
	return dir
}

// setCtime sets the ctime of a file in an image that is not mounted.
func setCtime(t testing.TB, kind, image string, inode uint64) {
	t.Helper()
	edit := []string{"debugfs", "-w", "-R", fmt.Sprintf("set_inode_field <%d> ctime @%d", inode, FutureCtime.Unix()), image}
	if kind == "xfs" { // which has the nanoseconds in the lower half
		edit = []string{"xfs_db", "-x", "-c", fmt.Sprintf("inode %d", inode), "-c", fmt.Sprintf("write core.ctime.sec %#x", FutureCtime.Unix()<<32), image}
	}
	NeedPrograms(t, edit[0])
	if out, err := exec.CommandContext(t.Context(), edit[0], edit[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", edit, err, out)
	}
}
