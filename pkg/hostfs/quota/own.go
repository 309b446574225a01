package quota

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Own is what the filesystem of d takes for itself of what statfs(2) shows as taken, in bytes: on ext4 what is reserved for root, on XFS its
// reserves, on btrfs what is allocated for trees and free. It is no more than that, and no user changes it.
func Own(d *dir.Dir) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return 0, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	switch uint32(st.Type) {
	case unix.EXT4_SUPER_MAGIC:
		return int64(st.Bfree-st.Bavail) * st.Bsize, nil
	case unix.XFS_SUPER_MAGIC:
		return ownOfXFS(d, int64(st.Blocks))
	case unix.BTRFS_SUPER_MAGIC:
		trees, err := TreesOf(d)
		return trees.Spare, err
	}
	return 0, nil
}

// ownOfXFS is what XFS keeps free of so many blocks: those that were set aside for it (XFS_IOC_GET_RESBLKS), and what the trees of
// references, owners and free inodes may need in each of its groups (xfs_ag_resv_init): each block of those has at least half of the
// records that fit.
func ownOfXFS(d *dir.Dir, blocks int64) (int64, error) {
	geometry, err := geometryOf(d)
	if err != nil {
		return 0, err
	}
	var set reservedBlocks
	if err := ioctl.Do(d, getReserved, &set); err != nil && !errors.Is(err, unix.EPERM) {
		return 0, fmt.Errorf("ask what %s has in reserve: %w", d, err)
	}
	const head, reference, owner, inodes = 56, 12, 24, 16 // bytes of struct xfs_btree_block and of the records
	size := int64(geometry.BlockSize)
	leaves := func(records, record int64) int64 { return records / ((size - head) / record / 2) }
	own := int64(set.Available)
	if geometry.Flags&reflinks != 0 {
		own += leaves(blocks, reference)
	}
	if geometry.Flags&owners != 0 {
		own += max(blocks/100, leaves(blocks, owner))
	}
	if geometry.Flags&freeInodes != 0 {
		own += leaves(blocks*size/int64(geometry.InodeSize)/64, inodes)
	}
	return own * size, nil
}
