package dir_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// flagged are the filesystems whose files have flags, with the size of a disk that they fit on.
var flagged = map[string]int64{"xfs": 300 << 20, "ext4": 64 << 20, "btrfs": 256 << 20, "tmpfs": 16 << 20}

// A privileged pod sets such flags on what is in its volume.
func TestRemoveTree_protected(t *testing.T) {
	testenv.NeedPrograms(t, "chattr")
	for fs, bytes := range flagged {
		t.Run(fs, func(t *testing.T) {
			var mounted string
			if fs == "tmpfs" {
				mounted = testenv.Tmpfs(t, bytes)
			} else {
				mounted = testenv.LoopFS(t, fs, bytes)
			}
			root := child(t, open(t, mounted), "pool")
			volume := child(t, root, "volume")
			for _, flag := range []string{"+i", "+a", "+ia"} {
				in := child(t, volume, flag)
				high(t, child(t, in, "directory"), 3)
				for _, name := range []string{"file", "link", "pipe"} {
					protectedNode(t, in, name, flag)
				}
				chattr(t, flag, in.String()+"/directory/d/d/d/file")
				for _, below := range []string{"/directory/d/d/d", "/directory/d", "/directory", ""} {
					chattr(t, flag, in.String()+below)
				}
			}
			if fs == "btrfs" {
				sub := subvolume(t, volume, "sub")
				must.Succeed(t, os.WriteFile(sub.String()+"/file", nil, 0o600))
				chattr(t, "+ia", sub.String()+"/file", sub.String())
				btrfsProperty(t, sub.String())
			}
			chattr(t, "+ia", volume.String())
			wantRemoved(t, root)
		})
	}
}

// protectedNode makes a file, link or pipe, with flags if the kernel has a call for that.
func protectedNode(t *testing.T, in *dir.Dir, kind, flag string) {
	t.Helper()
	path := filepath.Join(in.String(), kind)
	switch kind {
	case "file":
		must.Succeed(t, os.WriteFile(path, nil, 0o600))
		chattr(t, flag, path)
		return
	case "link":
		must.Succeed(t, os.Symlink("nowhere", path))
	case "pipe":
		must.Succeed(t, unix.Mkfifo(path, 0o600))
	}
	// struct file_attr of linux/fs.h, since Linux 6.17; FS_XFLAG_IMMUTABLE.
	attr := struct {
		flags uint64
		_     [4]uint32
	}{flags: 0x8}
	name, err := unix.BytePtrFromString(path)
	must.Succeed(t, err)
	at := unix.AT_FDCWD
	_, _, errno := unix.Syscall6(unix.SYS_FILE_SETATTR, uintptr(at), uintptr(unsafe.Pointer(name)),
		uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), unix.AT_SYMLINK_NOFOLLOW, 0)
	if errno != 0 && errno != unix.ENOSYS && errno != unix.EOPNOTSUPP {
		t.Fatalf("make %s immutable: %v", path, errno)
	}
}

func TestUnprotect(t *testing.T) {
	testenv.NeedPrograms(t, "chattr")
	root := open(t, testenv.LoopFS(t, "ext4", 64<<20))
	child(t, root, "directory")
	must.Succeed(t, os.Symlink("directory", root.String()+"/link"))
	for _, name := range []string{"directory", "link", "missing"} {
		if changed, err := dir.Unprotect(root, name); changed || err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s without flags: %t, %v", name, changed, err)
		}
	}
	chattr(t, "+i", root.String()+"/directory")
	if changed, err := dir.Unprotect(root, "link"); changed || err != nil {
		t.Errorf("a link to what has flags: %t, %v", changed, err)
	}
	if err := root.RemoveDir("directory"); !errors.Is(err, unix.EPERM) {
		t.Fatalf("remove the immutable directory: %v, want EPERM", err)
	}
	if changed, err := dir.Unprotect(root, "directory"); !changed || err != nil {
		t.Errorf("what is immutable: %t, %v", changed, err)
	}
	must.Succeed(t, root.RemoveDir("directory"))
}

func chattr(t *testing.T, flag string, paths ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "chattr", append([]string{flag}, paths...)...).CombinedOutput(); err != nil {
		t.Fatalf("chattr %s %q: %v: %s", flag, paths, err, out)
	}
}

func btrfsProperty(t *testing.T, path string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "btrfs", "property", "set", path, "ro", "true").CombinedOutput(); err != nil {
		t.Fatalf("make %s read-only: %v: %s", path, err, out)
	}
}
