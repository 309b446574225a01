package blockdev

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A mount is a line of a mount table (proc_pid_mountinfo(5)).
type mount struct {
	pid, id, parent int
	// on is the number of its filesystem, root what of that it has, and place where it is.
	on, root, place string
	nodev           bool
	kind, source    string
}

func parseMount(pid int, line string) (mount, error) {
	before, after, ok := strings.Cut(line, " - ")
	fields, last := strings.Fields(before), strings.Fields(after)
	if !ok || len(fields) < 6 || len(last) < 2 {
		return mount{}, fmt.Errorf("%q", line)
	}
	id, err := strconv.Atoi(fields[0])
	if err != nil {
		return mount{}, err
	}
	parent, err := strconv.Atoi(fields[1])
	return mount{pid: pid, id: id, parent: parent, on: fields[2], root: unescape(fields[3]), place: unescape(fields[4]),
		nodev: slices.Contains(strings.Split(fields[5], ","), "nodev"), kind: last[0], source: last[1]}, err
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

// unescape reads a path of a mount table: spaces and the like are octal there.
func unescape(path string) string {
	var text strings.Builder
	for at := 0; at < len(path); at++ {
		if path[at] == '\\' && at+4 <= len(path) {
			if c, err := strconv.ParseUint(path[at+1:at+4], 8, 8); err == nil {
				text.WriteByte(byte(c))
				at += 3
				continue
			}
		}
		text.WriteByte(path[at])
	}
	return text.String()
}
