// Package quota keeps the size of a directory; which directory, and how much, is
// the caller's business. XFS and ext4 do it by project quota: a directory carries
// the id of a project, what is made in it inherits the id, and the filesystem
// counts and limits what carries it. Btrfs does it by subvolumes and their qgroups.
//
// What is over the limit is refused with ENOSPC by XFS and with EDQUOT by the
// others. On ext4 a process with CAP_SYS_RESOURCE is exempt (containers have it
// only if they are privileged). Two holes are the kernel's own: the owner of a file
// may take it out of its project unless it lives in a user namespace
// (FS_IOC_FSSETXATTR), and whoever may write to a subvolume may make another in
// it, which has a qgroup of its own. Limits keep volumes from filling the disk, they
// are no wall against who means it.
//
// It runs no program. The numbers of quotactl(2) and ioctl(2) that x/sys/unix lacks
// are written down in abi.go, each with the header that it is from.
package quota

import (
	"errors"
	"fmt"
	"math"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for.
var (
	// ErrNone reports a filesystem that cannot limit directories as it is mounted.
	// The message says what to do about it.
	ErrNone = errors.New("no directory quotas")
	// ErrNoID reports that every id of the range is in use.
	ErrNoID = errors.New("no free project id")
	// ErrOtherID reports a directory that carries another id than expected.
	ErrOtherID = errors.New("directory carries another quota id")
	// ErrPlain reports a directory that can carry no limit since Make did not make it.
	ErrPlain = errors.New("a plain directory, which cannot carry a limit")
)

// A Kind names what keeps the limits.
type Kind string

// The kinds that Detect finds.
const (
	XFS   Kind = "xfs"
	Ext4  Kind = "ext4"
	Btrfs Kind = "btrfs"
)

// An ID is what a filesystem counts a directory by, never 0: a project id (32 bits)
// on XFS and ext4, the subvolume's id (64 bits) on btrfs.
type ID uint64

// The project ids that NewID gives. The range begins with the letters HP, lies far
// above what people and container runtimes count up from, and holds three million.
// Limit and Release touch no project outside it.
const (
	FirstID ID = 0x48500000
	LastID  ID = 0x487fffff
)

// NotCounted stands for a number of inodes that the filesystem does not count.
const NotCounted = -1

// A Limit is how much a directory may hold, itself and what the filesystem needs to
// keep track of the content included: a few blocks, of 16 KiB each on btrfs.
type Limit struct {
	Bytes  int64 // 0: not limited
	Inodes int64 // 0: not limited; the directory itself is one
}

// Usage is what a directory may hold, and what it does hold.
type Usage struct {
	Limit  Limit
	Bytes  int64
	Inodes int64 // NotCounted on btrfs
}

// A Facility keeps limits on one filesystem. Every directory that it is given has to
// be of the filesystem that it was detected on. Its methods may be called at once.
type Facility interface {
	// Kind is what keeps the limits.
	Kind() Kind

	// Make makes an empty directory that can carry a limit, with mode 0700, and
	// opens it. On btrfs it is a subvolume, and for an instant has the mode that
	// the umask leaves: make it in a directory that others cannot enter. Dir.Rename
	// and dir.RemoveTree work on either. Take the limit off before removing: btrfs
	// wants room in a subvolume to remove another that its user made in it.
	Make(parent *dir.Dir, name string) (*dir.Dir, error)

	// NewID is the lowest project id of the range, but not below from, for which taken
	// answers false and the filesystem has neither limit nor use, or ErrNoID. It
	// reserves nothing: until Limit has used the id, taken has to know it. On btrfs it
	// is 0, because the kernel chose the id of the subvolume when it was made.
	NewID(fs *dir.Dir, from ID, taken func(ID) bool) (ID, error)

	// Limit gives the directory the id, unless it carries it already, and limits what
	// carries it. Id 0 means, on btrfs alone, the id that the directory carries.
	// Content that was there before the directory had the id is not counted: give
	// it while the directory is empty. Bytes are rounded up to the filesystem's
	// block. A limit below the use is accepted, and refuses every new block. It
	// answers ErrOtherID, ErrPlain, or errors.ErrUnsupported for Inodes on btrfs.
	//
	// It does not wait for the disk, so that a crash may bring back what was before.
	// But once a later rename of the directory is synced, the limit has survived too:
	// the journal keeps the order, and btrfs commits all for it. Where no rename
	// follows, compare Usage with the promise after a crash.
	Limit(d *dir.Dir, id ID, l Limit) error

	// Usage reads the limit and the use of an id, in microseconds: it never walks
	// and syncs nothing. An id that has neither is no error. XFS lowers the use some
	// 10 ms after a removal. Btrfs brings it up to date when it commits, every 30
	// seconds or at a sync. Id 0 is as in Limit, and d any directory otherwise.
	Usage(d *dir.Dir, id ID) (Usage, error)

	// IDOf is the id that the directory carries, 0 if it carries none.
	IDOf(d *dir.Dir) (ID, error)

	// Release forgets the limit of an id whose tree is gone, so that the id may be
	// given anew. Fs is any directory of the filesystem. Releasing an id that has
	// no limit changes nothing. Btrfs clears a subvolume away in the background, within
	// some 30 seconds, and keeps the qgroup until then. Afterwards Linux 6.10 and newer
	// destroy it themselves; on older ones the next call, for whichever id, does.
	Release(fs *dir.Dir, id ID) error

	// ReleaseUnused releases all ids from FirstID to LastID that have a limit, that
	// nothing on the filesystem is counted by, and for which taken answers false:
	// they were not released. It tells how many are gone by that. On btrfs these are the
	// limited subvolumes that are gone, whoever had them: an id is never given again. The
	// kernel may yet have to clear them away: see Release.
	ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error)
}

// bytesOnDisk is the limit in bytes, in whole blocks of the filesystem.
func (l Limit) bytesOnDisk(d *dir.Dir) (int64, error) {
	if l.Bytes < 0 || l.Inodes < 0 {
		return 0, fmt.Errorf("limit %s: %d bytes and %d inodes: less than nothing", d, l.Bytes, l.Inodes)
	}
	space, err := d.Space()
	if err != nil {
		return 0, err
	}
	block := space.BlockBytes
	if l.Bytes > math.MaxInt64-block {
		return 0, fmt.Errorf("limit %s: %d bytes are more than any filesystem has", d, l.Bytes)
	}
	return (l.Bytes + block - 1) / block * block, nil
}
