// Package quota limits the size of directories; the caller decides which, and how
// much. XFS and ext4 use project quotas: a directory has a project id, new entries
// inherit it, and the filesystem counts and limits everything with that id. Btrfs uses
// subvolumes and their qgroups.
//
// A write over the limit fails with ENOSPC on XFS and with EDQUOT on the others. On
// ext4 a process with CAP_SYS_RESOURCE is exempt (only privileged containers have it
// by default). The kernel leaves two ways around a limit: the owner of a file can change
// its project id, unless in a user namespace (FS_IOC_FSSETXATTR), and a process that can write
// to a subvolume can create another in it, which has its own qgroup. So limits keep
// volumes from filling the disk by accident, not by intent.
//
// The package starts no child process. Constants of quotactl(2) and ioctl(2) that
// x/sys/unix lacks are in abi.go, each with its header.
package quota

import (
	"errors"
	"fmt"
	"math"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for.
var (
	// ErrNone reports a filesystem that, as mounted, cannot limit directories.
	// The message says what to do.
	ErrNone = errors.New("no directory quotas")
	// ErrNoID reports that every id of the range is in use.
	ErrNoID = errors.New("no free project id")
	// ErrOtherID reports a directory that has another id than expected.
	ErrOtherID = errors.New("directory has another quota id")
	// ErrTaken reports an id that something else is counted by since NewID answered it: another process took it.
	// The directory does not carry it. Ask for another.
	ErrTaken = errors.New("project id is taken")
	// ErrTooMany reports a filesystem that has had too many projects to ask about all of them.
	ErrTooMany = errors.New("too many projects")
	// ErrPlain reports a directory that cannot have a limit, since Make did not create it.
	ErrPlain = errors.New("a plain directory, which cannot have a limit")
)

// A Kind is the filesystem type that enforces the limits.
type Kind string

// The kinds that Detect returns.
const (
	XFS   Kind = "xfs"
	Ext4  Kind = "ext4"
	Btrfs Kind = "btrfs"
)

// An ID is the number that a filesystem accounts a directory by, never 0: a project id
// (32 bits) on XFS and ext4, the subvolume's id (64 bits) on btrfs.
type ID uint64

// The range of project ids that NewID returns. It starts with the bytes "HP", far above
// the ids that administrators and container runtimes use, and has three million ids.
// Limit and Release refuse projects outside it.
const (
	FirstID ID = 0x48500000
	LastID  ID = 0x487fffff
)

// Unknown stands for a number of inodes that the filesystem does not count.
const Unknown = -1

// A Limit is how much a directory may hold. It includes the directory itself and the
// filesystem's metadata of the content: a few blocks, of 16 KiB each on btrfs.
type Limit struct {
	Bytes  int64 // 0: not limited
	Inodes int64 // 0: not limited; the directory itself counts as one
}

// Usage is the limit and the usage of a directory.
type Usage struct {
	Limit Limit
	Bytes int64
	// Shared is what of the Bytes other directories count too, as far as the filesystem knows: on btrfs.
	Shared int64
	Inodes int64 // Unknown on btrfs
}

// Alone is what no other directory counts, in bytes.
func (u Usage) Alone() int64 { return u.Bytes - u.Shared }

// Strays are the files and directories of a tree that a limit does not count.
type Strays struct {
	Outside int
	// Unseen is how many files could not be asked. Opening a file that a process has a write lease
	// of (fcntl(2), F_SETLEASE) answers EWOULDBLOCK, and one that is encrypted without its key ENOKEY.
	Unseen int
}

// A Facility enforces limits on one filesystem. All directories passed to it must be on
// that filesystem. Its methods are safe for concurrent use.
type Facility interface {
	// Kind is the filesystem type.
	Kind() Kind

	// Make creates an empty directory that can have a limit, with mode 0700, and
	// opens it. On btrfs it is a subvolume, and briefly has the mode that the umask
	// leaves: create it in a directory that others cannot enter. Dir.Rename and
	// dir.RemoveTree work on both. Remove the limit before removing the directory, and Free the
	// subvolumes in it: btrfs needs free space in a subvolume to remove one that its user created in it.
	Make(parent *dir.Dir, name string) (*dir.Dir, error)

	// NewID returns a project id of the range, not below from, that is not taken and has
	// neither limit nor usage on the filesystem, or ErrNoID. It is the lowest, unless that is
	// far from the first one asked about. It does not reserve
	// the id: until Limit has used it, taken must return true for it. On btrfs it
	// returns 0, because the kernel chose the subvolume's id in Make.
	NewID(fs *dir.Dir, from ID, taken func(ID) bool) (ID, error)

	// Limit gives the directory the id, unless it has it already, and sets the limit of
	// the id. Id 0, on btrfs only, means the id of the directory. Content from before
	// the directory had the id is not counted, so call Limit while the directory is
	// empty. Bytes are rounded up to filesystem blocks. A limit below the usage is
	// accepted, and every new block is refused. Limit returns ErrOtherID, ErrTaken,
	// ErrPlain, or errors.ErrUnsupported for Inodes on btrfs.
	//
	// Limit does not sync, so a crash may restore the previous limit. But once a later
	// rename of the directory is synced, the limit is durable too: the journal keeps the
	// order, and btrfs commits everything. If no rename follows, compare Usage with the
	// promise after a crash.
	Limit(d *dir.Dir, id ID, l Limit) error

	// Usage reads the limit and the usage of an id in microseconds: it neither walks
	// the directory nor syncs. An id without either is not an error. XFS lowers the usage
	// about 10 ms after a removal; btrfs updates it at each commit, every 30 seconds or
	// at a sync. Id 0 is as in Limit; otherwise d can be any directory.
	Usage(d *dir.Dir, id ID) (Usage, error)

	// Beside is what files of no project from FirstID to LastID hold on the filesystem, in bytes: they are of others than the directories
	// with a limit.
	// Blocks that several files share count for each. On btrfs it is what all subvolumes hold, also those with a limit.
	// With ErrTooMany it is at least that. XFS may take some seconds for it.
	Beside(fs *dir.Dir) (Usage, error)

	// Outside counts what is in the directory and not in its limit: subvolumes that its users
	// made, on btrfs all that lie directly in it. It counts some hundred at most, and none elsewhere.
	Outside(d *dir.Dir) (int, error)

	// Strays counts the files and directories below the directory that are not counted by the id:
	// their owners have changed their project. It calls step before each entry, and ends with its
	// error. Where nothing can leave a limit in this way it returns none.
	Strays(d *dir.Dir, id ID, step func() error) (Strays, error)

	// IDOf returns the id of the directory, 0 if it has none.
	IDOf(d *dir.Dir) (ID, error)

	// Release removes the limit of an id whose tree was removed, so that the id can be
	// reused. fs is any directory of the filesystem. Releasing an id without a limit, or
	// one that still has usage, changes nothing. Btrfs cleans up a subvolume in the
	// background, within about 30 seconds, and keeps the qgroup until then. Afterwards
	// Linux 6.10 and newer destroy it; on older kernels the next call of Release, for any
	// id, does.
	Release(fs *dir.Dir, id ID) error

	// ReleaseUnused releases all ids from FirstID to LastID that have a limit but no usage
	// and are not taken: leaks of an earlier crash. It returns how many it released. It asks
	// whether an id is taken for each with a limit, also for those that are in use. On
	// btrfs it releases the limits of all deleted subvolumes, also those that other programs created, since
	// ids are never reused. The kernel may still have to clean them up: see Release. It may return ErrTooMany.
	ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error)
}

// bytesOnDisk is the limit in bytes, rounded up to whole blocks.
func (l Limit) bytesOnDisk(d *dir.Dir) (int64, error) {
	if l.Bytes < 0 || l.Inodes < 0 {
		return 0, fmt.Errorf("limit %s: %d bytes and %d inodes: negative", d, l.Bytes, l.Inodes)
	}
	space, err := dir.SpaceOf(d)
	if err != nil {
		return 0, err
	}
	block := space.BlockBytes
	if l.Bytes > math.MaxInt64-block {
		return 0, fmt.Errorf("limit %s: %d bytes is too large", d, l.Bytes)
	}
	return (l.Bytes + block - 1) / block * block, nil
}
