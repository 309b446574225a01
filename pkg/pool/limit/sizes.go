package limit

import (
	"cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// DefaultBytesPerInode gives new volumes on XFS one inode for so many bytes of their size, as
// mkfs.ext4(8) does for a filesystem. XFS makes inodes as they are needed, and counts them for no
// project: so at most a thirtieth of the volume's size. Where mkfs.xfs(8) has made them larger than ledger.UsualInode, there are as many fewer.
const DefaultBytesPerInode = 16 << 10

// Sizes says how large the limits of volumes are, and what inodes take.
type Sizes struct {
	kind          quota.Kind // that enforces sizes; empty if nothing does
	enforced      bool       // new volumes have limits
	bytesPerInode int64
	inodeBytes    int64 // quota.InodeBytes
}

// NewInodes is for how many bytes of its size a new volume has an inode that its quota does not
// count; 0 where inodes are not limited, or take no space of their own.
func (s Sizes) NewInodes() int64 {
	switch {
	case !s.enforced || s.kind != quota.XFS:
		return 0
	case s.bytesPerInode == volume.Unknown:
		return DefaultBytesPerInode * max(1, s.inodeBytes/ledger.UsualInode)
	}
	return s.bytesPerInode
}

// InodeBytes is what an inode of XFS takes that no quota counts, in bytes.
func (s Sizes) InodeBytes() int64 { return cmp.Or(s.inodeBytes, ledger.UsualInode) }

// RecordedInodes is what of that the record of a new volume has: the option, which others may
// set later, is not in it.
func (s Sizes) RecordedInodes() int64 {
	if s.bytesPerInode != volume.Unknown {
		return 0
	}
	return s.NewInodes()
}

// Limit is what the kernel enforces for a promise.
func (s Sizes) Limit(c ledger.Info) quota.Limit {
	if c.Is(ledger.IsBlock) {
		// The file has the size. What the filesystem needs to keep track of the file
		// counts as well: on btrfs up to 78 bytes for each block of 4 KiB, were each apart
		// from the next, in nodes that may be half empty; on the others less.
		limit := quota.Limit{Bytes: c.Promised + c.Promised/16 + 1<<20}
		if s.kind == quota.Btrfs {
			// Earlier versions let thin disks be discarded, of which btrfs keeps whole extents: what is written in their place comes beside them.
			limit.Bytes += c.Promised
		}
		switch {
		case !c.Is(ledger.Shares):
		case s.kind == quota.XFS:
			// A shared block is written elsewhere. XFS takes 128 KiB for a block, of which the rest
			// waits for the next writes: the file may be counted twice.
			limit.Bytes += c.Promised
		case s.kind == quota.Btrfs:
			// The extent that a shared block was in counts until all of that is overwritten. With a
			// snapshot after each time that the file was written the old extents add up. Two sizes besides are
			// more than scattered writes need; what keeps more is not copied: see measure in pkg/pool. The third is
			// for what is written between that and the copy.
			limit.Bytes += 3*c.Promised + c.Promised/16
		}
		return limit
	}
	return quota.Limit{Bytes: c.Promised + c.ToOverwrite(), Inodes: c.Inodes(s.bytesPerInode)}
}

// agrees reports whether a limit is what was promised. The kernel keeps whole blocks,
// and a promise may have been given in smaller ones.
func (s Sizes) agrees(is quota.Limit, c ledger.Info) bool {
	want := s.Limit(c)
	return is.Inodes == want.Inodes && is.Bytes >= want.Bytes && is.Bytes < want.Bytes+maxBlock
}

// maxBlock is the largest block that a filesystem with quotas has on Linux, in bytes:
// that of XFS and btrfs, and ext4's is not larger.
const maxBlock = 64 << 10
