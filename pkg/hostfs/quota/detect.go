package quota

import (
	"fmt"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Detect returns the facility that limits directories on the filesystem of d. It changes
// nothing: quotas concern the whole filesystem, so enabling them is up to the
// administrator. If limits would not be enforced it returns ErrNone with a message that says
// what to do.
func Detect(d *dir.Dir) (Facility, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return nil, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	switch magic := uint32(st.Type); magic {
	case unix.XFS_SUPER_MAGIC:
		return detectProjects(d, XFS)
	case unix.EXT4_SUPER_MAGIC:
		return detectProjects(d, Ext4)
	case unix.BTRFS_SUPER_MAGIC:
		return detectSubvolumes(d)
	default:
		return nil, fmt.Errorf("%w: %s at %s is not supported; xfs, ext4 and btrfs are", ErrNone, filesystemName(magic), d)
	}
}

// InodeBytes is what an inode takes on the filesystem of d that no quota counts, in bytes: on XFS all of it, which mkfs.xfs(8)
// has chosen. It is 0 on others.
func InodeBytes(d *dir.Dir) (int64, error) {
	geometry, err := geometryOf(d)
	return int64(geometry.InodeSize), err
}

// DataPerByte is for how many bytes of its data a file may take one more to find them, where each block is an extent of its own: on XFS
// 16 bytes, on ext4 12, in a tree whose blocks have a header and may be half empty (xfs_bmbt_rec in xfs_format.h and ext4_extent in ext4_extents.h
// of Linux); with the levels above 36 bytes in all. On ext4 that is not the most: it splits a block behind what is added (ext4_ext_split), so that
// writes chosen for it leave blocks almost empty. It is 0 on tmpfs, on btrfs, whose trees are counted otherwise, and where it is not known.
func DataPerByte(d *dir.Dir) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return 0, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if st.Type != unix.XFS_SUPER_MAGIC && st.Type != unix.EXT4_SUPER_MAGIC {
		return 0, nil
	}
	return max(1, st.Bsize/36), nil
}

// CopyByBlock has what is created in an empty directory of XFS, at whatever depth, take one block for each that is written and
// shares its blocks with another file. XFS takes 128 KiB for it otherwise, and counts them all until its pause for them has
// passed, half an hour, or a write meets the limit while no other is under way in the file. The owner of a file can change that.
func CopyByBlock(d *dir.Dir) error {
	geometry, err := geometryOf(d)
	if err != nil || geometry.Flags&reflinks == 0 {
		return err
	}
	attr, err := attrOf(d)
	if err != nil {
		return err
	}
	attr.Flags = attr.Flags&^ioctl.HasAttr | ioctl.CowExtentSize
	attr.CowExtSize = geometry.BlockSize
	if err := ioctl.Do(d, ioctl.SetFileAttr, &attr); err != nil {
		return fmt.Errorf("have %s copied by single blocks: %w", d, err)
	}
	return nil
}

// geometryOf is that of an XFS, and zero for other filesystems.
func geometryOf(d *dir.Dir) (xfsGeometry, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return xfsGeometry{}, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	var geometry xfsGeometry
	if uint32(st.Type) != unix.XFS_SUPER_MAGIC {
		return geometry, nil
	}
	if err := ioctl.Do(d, getXFSGeometry, &geometry); err != nil {
		return geometry, fmt.Errorf("ask for the geometry of %s: %w", d, err)
	}
	return geometry, nil
}

// filesystemName names a filesystem by the number that statfs(2) gives it
// (linux/magic.h, and for ZFS its own headers).
func filesystemName(magic uint32) string {
	switch magic {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlayfs"
	case unix.NFS_SUPER_MAGIC:
		return "nfs"
	case unix.CEPH_SUPER_MAGIC:
		return "ceph"
	case unix.F2FS_SUPER_MAGIC:
		return "f2fs"
	case 0x2fc12fc1:
		return "zfs"
	}
	return fmt.Sprintf("the filesystem of type %#x", magic)
}
