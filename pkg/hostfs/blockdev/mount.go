package blockdev

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// A mount is a line of a mount table (proc_pid_mountinfo(5)).
type mount struct {
	pid, id, parent int
	// on is the number of its filesystem, root what of that it has, and place where it is. What is cut, or far, is longer than any path.
	on, root, place string
	cut, far        bool
	nodev           bool
	kind, source    string
}

// mountOf is what of a line of the mount table of a process is searched. The root of an NFS is always a directory.
func mountOf(pid int, m *mountinfo.Mount) mount {
	root := m.Root
	if mountinfo.IsNFS(m.Type) {
		root = "/"
	}
	return mount{pid: pid, id: m.ID, parent: m.Parent, on: fmt.Sprintf("%d:%d", m.Major, m.Minor), root: root, cut: m.Cut, place: m.Mountpoint, far: m.Far,
		nodev: slices.Contains(strings.Split(m.Options, ","), "nodev"), kind: m.Type, source: m.Source}
}

// remembered is what is kept of a mount for others that are looked at: not the paths that no program makes, of which there may be a
// hundred thousand (fs.mount-max of proc(5)).
func (m mount) remembered() mount {
	const most = 1 << 10
	if m.cut || m.far || len(m.root) > most || len(m.place) > most {
		m.root, m.cut, m.place, m.far = "", true, "", true
	}
	return m
}

// path leads to the mount for every process.
func (m mount) path() string { return fmt.Sprintf("/proc/%d/root%s", m.pid, m.place) }

// statInside looks at a file of a mount, and of no other one that may be on the way.
func statInside(m mount, below string) (file, error) {
	root, err := unix.Open(m.path(), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return file{}, err
	}
	defer func() { _ = unix.Close(root) }()
	if describe(os.Getpid(), strconv.Itoa(root)).mount != m.id {
		return file{}, fs.ErrNotExist // another one is on it
	}
	const inside = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS
	return statBelow(root, below, inside)
}

// statBelow looks at a file of a directory that is open.
func statBelow(dir int, path string, resolve uint64) (file, error) {
	fd, err := unix.Openat2(dir, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve})
	if err != nil {
		return file{}, err
	}
	defer func() { _ = unix.Close(fd) }()
	return stat(fd, "")
}

// local are the types of filesystems that ask no server, and have no device by whose number that would be known.
var local = []string{"bcachefs", "btrfs", "devtmpfs", "hugetlbfs", "overlay", "proc", "ramfs", "rootfs", "sysfs", "tmpfs", "ubifs", "zfs"}

// remote says whether a filesystem may ask a server: another machine, or a program.
func (m mount) remote() bool {
	return strings.HasPrefix(m.kind, "fuse") || strings.HasPrefix(m.on, "0:") && !slices.Contains(local, m.kind)
}
