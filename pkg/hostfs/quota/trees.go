package quota

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Trees is what a btrfs may need for its trees, in bytes as statfs(2) shows them. Quotas count one
// copy of the trees of a subvolume as its content, and no other trees. The zero value stands for a
// filesystem without such trees.
type Trees struct {
	// Copies is how many bytes each byte of a tree takes, compared with one of data.
	Copies int64
	// Reserve is what has to be there besides: the kernel's own reserve, and the ends of chunks
	// that are for data and needed for trees, or the other way round.
	Reserve int64
	// Spare is what is allocated for trees and free.
	Spare int64
	// Uncounted is what is taken that quotas do not count, at most: the trees in all copies, and the kernel's reserve.
	Uncounted int64
	// Room is what they can take of the disks.
	Room Room
}

// TreesOf is what the filesystem of d needs; nothing where it is no btrfs.
func TreesOf(d *dir.Dir) (Trees, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return Trees{}, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if uint32(st.Type) != unix.BTRFS_SUPER_MAGIC {
		return Trees{}, nil
	}
	all := spaces{Slots: uint64(len(spaces{}.Spaces))}
	if err := ioctl.Do(d, getSpaces, &all); err != nil {
		return Trees{}, fmt.Errorf("ask for the chunks of %s: %w", d, err)
	}
	trees := all.trees(int64(st.Blocks) * st.Bsize)
	if all.bounded() {
		devices, err := devicesOf(d)
		if err != nil {
			return Trees{}, err
		}
		trees.Room = all.room(devices)
	}
	return trees, nil
}

// trees is what a filesystem of so many bytes needs. Chunks have a tenth of it, or what
// init_alloc_chunk_ctl_policy_regular in fs/btrfs/volumes.c bounds them by; the kernel's reserve
// has at most 512 MiB (btrfs_update_global_block_rsv), and grows with the trees.
func (s *spaces) trees(size int64) Trees {
	const mib = 1 << 20
	data, metadata, mixed := int64(1), int64(1), false
	var spare, used, kept int64
	for _, space := range s.found() {
		switch {
		case space.Flags&isReserve != 0:
			kept = int64(space.Bytes)
		case space.Flags&isData != 0:
			data = space.copies()
			if space.Flags&isMetadata != 0 {
				mixed, used = true, int64(space.Used)/12 // of data, as in ledger.Filesystem
			}
		case space.Flags&isMetadata != 0:
			metadata = max(metadata, space.copies())
			spare += int64(space.Bytes-space.Used) * space.copies()
			used += int64(space.Used) * space.copies()
		}
	}
	reserve := min(512*mib, size/32)
	chunk := int64(256 * mib)
	if size > 50<<30 {
		chunk = 1 << 30
	}
	if mixed {
		// What was overwritten in the trees is free only after the next commit. Without room until then the kernel makes the
		// filesystem read-only: seen with 61 MiB of 512.
		return Trees{Copies: 1, Reserve: reserve + min(chunk, size/8), Uncounted: used + kept}
	}
	t := Trees{Copies: (metadata + data - 1) / data, Spare: spare / data, Uncounted: used/data + kept}
	t.Reserve = t.Copies*(reserve+min(chunk, size/10)) + min(1<<30, size/10)
	return t
}

// spaces is struct btrfs_ioctl_space_args of linux/btrfs.h, with room for what a filesystem has at
// most: each type of chunks in each profile, and the kernel's reserve.
type spaces struct {
	Slots, Total uint64
	Spaces       [32]chunks
}

func (s *spaces) found() []chunks { return s.Spaces[:min(s.Total, s.Slots)] }

// chunks is struct btrfs_ioctl_space_info.
type chunks struct{ Flags, Bytes, Used uint64 }

// copies is how often each byte is on the disks.
func (c chunks) copies() int64 {
	switch {
	case c.Flags&isRaid1C4 != 0:
		return 4
	case c.Flags&isRaid1C3 != 0:
		return 3
	case c.Flags&(isRaid1|isDup|isRaid10) != 0:
		return 2
	}
	return 1
}

// Of linux/btrfs_tree.h: BTRFS_BLOCK_GROUP_DATA and so on, and BTRFS_SPACE_INFO_GLOBAL_RSV.
const (
	isData     = 1 << 0
	isMetadata = 1 << 2
	isRaid0    = 1 << 3
	isRaid1    = 1 << 4
	isDup      = 1 << 5
	isRaid10   = 1 << 6
	isRaid5    = 1 << 7
	isRaid6    = 1 << 8
	isRaid1C3  = 1 << 9
	isRaid1C4  = 1 << 10
	isReserve  = 1 << 49

	allProfiles = isRaid0 | isRaid1 | isDup | isRaid10 | isRaid5 | isRaid6 | isRaid1C3 | isRaid1C4

	getSpaces = ioctl.Read | ioctl.Write | spacesHead<<ioctl.Size | ioctl.Btrfs | 20 // BTRFS_IOC_SPACE_INFO

	spacesHead = unsafe.Sizeof(spaces{}) - unsafe.Sizeof(spaces{}.Spaces)
)

var _ [16]byte = [spacesHead]byte{} // another size would not compile
