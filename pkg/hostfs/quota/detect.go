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
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return 0, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if uint32(st.Type) != unix.XFS_SUPER_MAGIC {
		return 0, nil
	}
	var geometry xfsGeometry
	if err := ioctl.Do(d, getXFSGeometry, &geometry); err != nil {
		return 0, fmt.Errorf("ask for the size of inodes of %s: %w", d, err)
	}
	return int64(geometry.InodeSize), nil
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
