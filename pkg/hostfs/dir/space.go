package dir

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Space is what statfs(2) reports of the filesystem, or the quota, of a
// directory. All sizes are bytes.
type Space struct {
	SizeBytes  int64
	FreeBytes  int64 // for unprivileged users (f_bavail)
	UsedBytes  int64 // size less f_bfree
	BlockBytes int64
	Inodes     int64 // 0 where the filesystem does not count them (btrfs)
	InodesFree int64
	InodesUsed int64
	ReadOnly   bool
}

// TakenBytes is what unprivileged users cannot allocate: bytes in use, and bytes
// reserved for root.
func (s Space) TakenBytes() int64 { return s.SizeBytes - s.FreeBytes }

// OutOfInodes reports that the filesystem cannot create another file.
func (s Space) OutOfInodes() bool { return s.Inodes > 0 && s.InodesFree == 0 }

// A Filesystem identifies the filesystem of a directory, also across
// remounts.
type Filesystem struct {
	dev    uint64
	fsid   [2]int32
	cached bool
	// subvolumes: parts of it have device numbers of their own (btrfs).
	subvolumes bool
	ext4       bool
}

// MayHold reports whether what has that id can be on the filesystem. On btrfs the number of a
// subvolume says no more than that it is none of a disk.
func (f Filesystem) MayHold(id ID) bool {
	return id.Dev == f.dev || f.subvolumes && unix.Major(id.Dev) == 0
}

// NotesChanges reports whether a file is known to have another ctime after a store through a shared mapping to a page that was written
// to the disk since the one before. A tmpfs has no clean pages, sync_file_range(2) writes none of an overlayfs, and others may leave the ctime
// to a server.
func (f Filesystem) NotesChanges() bool { return f.cached }

// NotesMoves reports whether an entry has another ctime after it was renamed, or exchanged with another (renameat2(2),
// RENAME_EXCHANGE), which XFS does not note.
func (f Filesystem) NotesMoves() bool { return f.subvolumes || f.ext4 }

// KeepsExtents reports whether the filesystem keeps an extent until all of it is overwritten: a file that shares blocks can keep several
// times its size.
func (f Filesystem) KeepsExtents() bool { return f.subvolumes }

// Cached reports that the filesystem serves cached data without asking a server or another
// node.
func (f Filesystem) Cached() bool { return f.cached }

// FilesystemOf identifies the filesystem of a directory.
func FilesystemOf(d *Dir) (Filesystem, error) {
	id, err := d.ID()
	if err != nil {
		return Filesystem{}, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.fd, &st); err != nil {
		return Filesystem{}, pathError("statfs", d.path, err)
	}
	kind := int64(st.Type)
	return Filesystem{
		dev: id.Dev, fsid: st.Fsid.Val, cached: answersFromMemory(kind),
		subvolumes: kind == unix.BTRFS_SUPER_MAGIC, ext4: kind == unix.EXT4_SUPER_MAGIC,
	}, nil
}

func answersFromMemory(kind int64) bool {
	return kind == unix.XFS_SUPER_MAGIC || kind == unix.EXT4_SUPER_MAGIC || kind == unix.BTRFS_SUPER_MAGIC
}

// MayBeMountedAnew reports whether files of a filesystem can be in use through an earlier mount of it, with another device number: those of
// a server, and an overlay. It goes by what is named in statfs(2).
func MayBeMountedAnew(fd int) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return false, os.NewSyscallError("statfs", err)
	}
	const zfs, bcachefs = 0x2fc12fc1, 0xca451a4e
	return !slices.Contains([]int64{unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.BTRFS_SUPER_MAGIC, zfs, bcachefs}, int64(st.Type)), nil
}

// Has reports whether a directory lies on the filesystem. It compares the device number,
// which some filesystems change with each mount, and only if that differs the id of
// statfs(2), which others derive from the device.
func (f Filesystem) Has(d *Dir) (bool, error) {
	id, err := d.ID()
	if err != nil || id.Dev == f.dev {
		return err == nil, err
	}
	here, err := FilesystemOf(d)
	return err == nil && here.fsid == f.fsid, err
}

// A SpaceID identifies a filesystem by the space that its directories share. Until the
// filesystem is unmounted it does not change.
type SpaceID struct {
	Filesystem
	uuid [16]byte // of btrfs, whose subvolumes have device numbers and statfs(2) ids of their own
}

// SpaceIDOf identifies the filesystem whose space a directory shares with others.
func SpaceIDOf(d *Dir) (SpaceID, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.fd, &st); err != nil {
		return SpaceID{}, pathError("statfs", d.path, err)
	}
	if st.Type != unix.BTRFS_SUPER_MAGIC {
		fs, err := FilesystemOf(d)
		return SpaceID{Filesystem: fs}, err
	}
	var info ioctl.Filesystem
	if err := ioctl.Do(d, ioctl.GetFilesystem, &info); err != nil {
		return SpaceID{}, pathError("ask for the btrfs", d.path, err)
	}
	return SpaceID{uuid: info.UUID}, nil
}

// SpaceOf measures the filesystem of a directory in one system call.
func SpaceOf(d *Dir) (Space, error) {
	var st unix.Statfs_t
	for {
		err := unix.Fstatfs(d.fd, &st)
		if err == nil {
			break
		}
		if err != unix.EINTR {
			return Space{}, pathError("statfs", d.path, err)
		}
	}
	block := int64(st.Bsize)
	return Space{
		SizeBytes:  int64(st.Blocks) * block,
		FreeBytes:  int64(st.Bavail) * block,
		UsedBytes:  int64(st.Blocks-st.Bfree) * block,
		BlockBytes: block,
		Inodes:     int64(st.Files),
		InodesFree: int64(st.Ffree),
		InodesUsed: int64(st.Files - st.Ffree),
		ReadOnly:   st.Flags&unix.ST_RDONLY != 0,
	}, nil
}

// Occupied is how many bytes the filesystem has allocated for an entry and everything below it,
// without what is mounted there. Each name of a file counts. It calls step for each entry, and
// stops at an error from that. A missing name has 0.
func Occupied(d *Dir, name string, step func() error) (int64, error) {
	o := &occupied{step: step}
	top, err := d.OpenInside(name)
	switch {
	case errors.Is(err, ErrNotDirectory):
		err = o.File(d, name)
		return o.bytes, err
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, err
	}
	defer func() { _ = top.Close() }()
	if err := o.File(d, name); err != nil {
		return 0, err
	}
	err = Visit(top, o)
	return o.bytes, err
}

// OccupiedBelow is Occupied of all that is in a directory.
func OccupiedBelow(d *Dir, step func() error) (int64, error) {
	o := &occupied{step: step}
	err := Visit(d, o)
	return o.bytes, err
}

// occupied is a Visitor that adds up what entries occupy.
type occupied struct {
	step  func() error
	bytes int64
}

func (o *occupied) File(in *Dir, name string) error {
	if err := o.step(); err != nil {
		return err
	}
	st, err := statOf(in, name)
	if err != nil {
		return ignoreNotExist(err)
	}
	o.bytes += st.Blocks * 512 // stat(2)
	return nil
}

func (o *occupied) Enter(_, in *Dir, name string) error { return o.File(in, name) }
func (o *occupied) Leave(*Dir) error                    { return nil }
