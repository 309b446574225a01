package trap

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Step is a system call that changes what outlives the process, in words.
type Step string

// A call describes a system call that is trapped: whether it changes anything, and what.
type call struct {
	name string
	// changes is nil for a call that always does.
	changes func(n *notification) bool
	// on says what it works on.
	on func(n *notification) string
}

// calls are all calls of Linux by which files, limits, mounts and devices are changed,
// of those that Go and the programs use.
var calls = map[int]call{
	unix.SYS_OPENAT:        {"openat", func(n *notification) bool { return n.args[2]&making != 0 }, named(0, 1)},
	unix.SYS_OPENAT2:       {"openat2", func(n *notification) bool { return n.word(n.args[2])&making != 0 }, named(0, 1)},
	unix.SYS_MKDIRAT:       {"mkdirat", nil, named(0, 1)},
	unix.SYS_MKNODAT:       {"mknodat", nil, named(0, 1)},
	unix.SYS_UNLINKAT:      {"unlinkat", nil, named(0, 1)},
	unix.SYS_LINKAT:        {"linkat", nil, named(2, 3)},
	unix.SYS_SYMLINKAT:     {"symlinkat", nil, named(1, 2)},
	unix.SYS_RENAMEAT:      {"renameat", nil, named(2, 3)},
	unix.SYS_RENAMEAT2:     {"renameat2", nil, named(2, 3)},
	unix.SYS_WRITE:         {"write", func(n *notification) bool { return n.args[0] == output || toFile(n) }, written},
	unix.SYS_PWRITE64:      {"pwrite64", toFile, fd},
	unix.SYS_WRITEV:        {"writev", toFile, fd},
	unix.SYS_FTRUNCATE:     {"ftruncate", toFile, fd},
	unix.SYS_FALLOCATE:     {"fallocate", nil, fd},
	unix.SYS_FSYNC:         {"fsync", nil, fd},
	unix.SYS_FDATASYNC:     {"fdatasync", nil, fd},
	unix.SYS_SYNCFS:        {"syncfs", nil, fd},
	unix.SYS_FCHMOD:        {"fchmod", nil, fd},
	unix.SYS_FCHMODAT:      {"fchmodat", nil, named(0, 1)},
	unix.SYS_FCHMODAT2:     {"fchmodat2", nil, named(0, 1)},
	unix.SYS_FCHOWN:        {"fchown", nil, fd},
	unix.SYS_FCHOWNAT:      {"fchownat", nil, named(0, 1)},
	unix.SYS_UTIMENSAT:     {"utimensat", nil, named(0, 1)},
	unix.SYS_SETXATTR:      {"setxattr", nil, pathname},
	unix.SYS_LSETXATTR:     {"lsetxattr", nil, pathname},
	unix.SYS_FSETXATTR:     {"fsetxattr", nil, fd},
	unix.SYS_REMOVEXATTR:   {"removexattr", nil, pathname},
	unix.SYS_LREMOVEXATTR:  {"lremovexattr", nil, pathname},
	unix.SYS_FREMOVEXATTR:  {"fremovexattr", nil, fd},
	unix.SYS_IOCTL:         {"ioctl", func(n *notification) bool { return !readingRequests[uint32(n.args[1])] }, request},
	unix.SYS_QUOTACTL:      {"quotactl", func(n *notification) bool { return !readingCommands[uint32(n.args[0])>>8] }, command(0)},
	unix.SYS_QUOTACTL_FD:   {"quotactl_fd", func(n *notification) bool { return !readingCommands[uint32(n.args[1])>>8] }, command(1)},
	unix.SYS_OPEN_TREE:     {"open_tree", nil, fd},
	unix.SYS_MOUNT_SETATTR: {"mount_setattr", func(n *notification) bool { return int32(n.args[0]) != -1 }, fd}, // -1 asks whether there is such a call
	unix.SYS_MOVE_MOUNT:    {"move_mount", nil, fd},
	unix.SYS_MOUNT:         {"mount", nil, none},
	unix.SYS_UMOUNT2:       {"umount2", nil, pathname},
	unix.SYS_CLOCK_GETTIME: {"clock_gettime", func(*notification) bool { return false }, none}, // see Clock
}

// output is the standard output. What a program says there is a step too: it may say what it is about to have others do.
const output = 1

// making are the flags of open(2) that change something.
const making = unix.O_CREAT | unix.O_TRUNC

// readingRequests are the ioctls by which programs only ask.
var readingRequests = map[uint32]bool{
	unix.TCGETS:              true,
	unix.BLKGETSIZE64:        true,
	unix.BLKSSZGET:           true,
	unix.LOOP_GET_STATUS64:   true,
	0xc0686611:               true, // PROCMAP_QUERY
	unix.FS_IOC_GETFLAGS:     true,
	0x801c581f:               true, // FS_IOC_FSGETXATTR
	0xd0009411:               true, // BTRFS_IOC_TREE_SEARCH
	0xc0709411:               true, // BTRFS_IOC_TREE_SEARCH_V2
	0xd0009412:               true, // BTRFS_IOC_INO_LOOKUP
	0xd000943d:               true, // BTRFS_IOC_GET_SUBVOL_ROOTREF
	0x80089419:               true, // BTRFS_IOC_SUBVOL_GETFLAGS
	0x8040942d:               true, // BTRFS_IOC_QUOTA_RESCAN_STATUS
	0x942e:                   true, // BTRFS_IOC_QUOTA_RESCAN_WAIT
	0x8400941f:               true, // BTRFS_IOC_FS_INFO
	0xc0109414:               true, // BTRFS_IOC_SPACE_INFO
	0xc4089434:               true, // BTRFS_IOC_GET_DEV_STATS
	0x80705864:               true, // XFS_IOC_FSGEOMETRY_V1
	unix.LOOP_CTL_ADD:        false,
	unix.LOOP_SET_STATUS64:   false,
	unix.LOOP_CONFIGURE:      false,
	unix.LOOP_CLR_FD:         false,
	unix.LOOP_CTL_REMOVE:     false,
	unix.LOOP_SET_CAPACITY:   false,
	unix.FS_IOC_SETFLAGS:     false,
	0x401c5820:               false, // FS_IOC_FSSETXATTR
	unix.LOOP_SET_BLOCK_SIZE: false,
}

// readingCommands are those of quotactl(2).
var readingCommands = map[uint32]bool{
	0x800004: true, // Q_GETFMT
	0x800005: true, // Q_GETINFO
	0x800007: true, // Q_GETQUOTA
	0x800009: true, // Q_GETNEXTQUOTA
	0x5803:   true, // Q_XGETQUOTA
	0x5805:   true, // Q_XGETQSTAT
	0x5808:   true, // Q_XGETQSTATV
	0x5809:   true, // Q_XGETNEXTQUOTA
}

func (n *notification) step() (Step, bool) {
	c := calls[int(n.nr)]
	if c.changes != nil && !c.changes(n) {
		return "", false
	}
	return Step(c.name + " " + c.on(n)), true
}

// Verb is only the call.
func (s Step) Verb() string {
	verb, _, _ := strings.Cut(string(s), " ")
	return verb
}

// toFile distinguishes a file from the sockets and pipes that programs answer and log to, and from
// the sign of life in the file lock, which no order depends on.
func toFile(n *notification) bool {
	target := n.descriptor(0)
	return strings.HasPrefix(target, "/") && target != os.DevNull && !strings.HasSuffix(target, "/.hostpath-provisioner/lock")
}

// written is the file that is written to, or the line that is printed.
func written(n *notification) string {
	if n.args[0] == output {
		line, _, _ := strings.Cut(string(n.memory(n.args[1], int(min(n.args[2], unix.PathMax)))), "\n")
		return line
	}
	return n.descriptor(0)
}

func fd(n *notification) string { return n.descriptor(0) }

// named is the entry of a directory whose descriptor and name are the arguments.
func named(dir, name int) func(*notification) string {
	return func(n *notification) string {
		entry := n.text(n.args[name])
		if path.IsAbs(entry) {
			return entry
		}
		return path.Join(n.descriptor(dir), entry)
	}
}

// pathname is a path, which may begin with a descriptor of the program.
func pathname(n *notification) string {
	at := n.text(n.args[0])
	rest, ok := strings.CutPrefix(at, "/proc/self/fd/")
	number, name, _ := strings.Cut(rest, "/")
	if fd, err := strconv.Atoi(number); ok && err == nil {
		return path.Join(n.target(fd), name)
	}
	return at
}

func none(*notification) string { return "" }

func request(n *notification) string {
	return fmt.Sprintf("%#x %s", uint32(n.args[1]), n.descriptor(0))
}

func command(at int) func(*notification) string {
	return func(n *notification) string { return fmt.Sprintf("%#x", uint32(n.args[at])>>8) }
}

// descriptor is what a descriptor of the thread stands for.
func (n *notification) descriptor(argument int) string {
	return n.target(int(int32(n.args[argument])))
}

func (n *notification) target(descriptor int) string {
	target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", n.pid, descriptor))
	if err != nil {
		return "?"
	}
	return target
}

// word reads memory of the thread.
func (n *notification) word(at uint64) uint64 {
	b := n.memory(at, 8)
	return binary.NativeEndian.Uint64(b)
}

// text reads a string that ends in a NUL byte.
func (n *notification) text(at uint64) string {
	b := n.memory(at, unix.PathMax)
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

// memory reads up to so many bytes; the rest, behind which there may be nothing, is zero.
func (n *notification) memory(at uint64, size int) []byte {
	b := make([]byte, size)
	const page = 4096
	for done := 0; done < size; {
		part := min(size-done, page-int(at)%page)
		local := unix.Iovec{Base: &b[done]}
		local.SetLen(part)
		remote := unix.RemoteIovec{Base: uintptr(at), Len: part}
		if _, err := unix.ProcessVMReadv(int(n.pid), []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0); err != nil {
			break
		}
		if bytes.IndexByte(b[done:done+part], 0) >= 0 && size > 8 {
			break
		}
		done, at = done+part, at+uint64(part)
	}
	return b
}
