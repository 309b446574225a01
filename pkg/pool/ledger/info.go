package ledger

import (
	"hash/maphash"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An Info is what the ledger knows of one volume: what is reported, counted and compared
// for many of them, or for one whose pool does not serve. A call reads everything else
// from the record.
type Info struct {
	// Promised is the size set aside, in bytes.
	Promised int64
	uid      uint64 // hash of the uid in the record
	project  uint32 // the project id in the record; 0 for none
	flags    Flags
	// inodes is the size for which the volume has one inode by its record, in KiB; 0 for none.
	inodes uint16
}

// Flags are the yes-or-no facts of a volume.
type Flags uint16

// The flags.
const (
	HasDirectory Flags = 1 << iota
	HasRecord          // a readable one
	HasDamage          // an unreadable one
	IsBlock
	IsInline
	IsSnapshot
	Shares // blocks with other entries
	ByXFS  // who enforces the size, by the record
	ByExt4
	ByBtrfs
	IsCrashConsistent // what a snapshot can promise, if it is not a point in time
	IsUnverified
)

// NewInfo makes the Info of a volume. The uid and the project id are those of its record.
func NewInfo(promised int64, uid string, project quota.ID, flags Flags) Info {
	c := Info{Promised: promised, project: uint32(project), flags: flags} // records have no larger ones
	if c.Is(HasRecord) {
		c.uid = hashUID(uid)
	}
	return c
}

// WithInodes is that of a volume whose record gives the volume one inode for so many bytes of its size.
// It has to be a multiple of 1024 below 64 MiB; 0 is for no limit.
func (c Info) WithInodes(bytesPerInode int64) Info {
	c.inodes = uint16(bytesPerInode >> 10)
	return c
}

// Inodes is how many inodes the volume may have, its root included; 0 for no limit. The pool
// option bytesPerInode comes before the record, unless it is volume.Unknown: not set.
func (c Info) Inodes(option int64) int64 {
	if option == volume.Unknown {
		option = int64(c.inodes) << 10
	}
	if option == 0 || c.Is(IsBlock|IsSnapshot) {
		return 0
	}
	return 1 + c.Promised/option
}

const (
	// UsualInode is what an inode of XFS takes beside the quota of its volume, in bytes, where
	// mkfs.xfs(8) has no other size: chunks of 64 are allocated and not counted for a project.
	UsualInode = 512
	// perInode is for what finds an inode, with some room: with many small directories 13 were measured.
	perInode = 32
)

// OfInodes is what so many inodes may take that no quota of that kind counts, in bytes, where one of them takes inodeBytes.
func OfInodes(kind quota.Kind, inodes, inodeBytes int64) int64 {
	if kind != quota.XFS {
		return 0
	}
	return max(0, inodes) * (inodeBytes + perInode)
}

// ofInodes is what the inodes of the volume may take that no quota counts, in bytes. Without a
// limit of inodes that is not known.
func (c Info) ofInodes(option, inodeBytes int64) int64 {
	if !c.Is(ByXFS) {
		return 0
	}
	return OfInodes(quota.XFS, c.Inodes(option), inodeBytes)
}

// usual are those of a filesystem that is not known yet.
var usual = Costs{InodeBytes: UsualInode}

// Costs are what a filesystem takes for volumes besides what is in their promises.
type Costs struct {
	// InodeBytes is what an inode takes that no quota counts: quota.InodeBytes.
	InodeBytes int64
	// DataPerByte is for how many bytes of its data a file may take one more to find them: quota.DataPerByte; 0 if that is
	// in the promises.
	DataPerByte int64
}

// overhead is what the volume may take of the pool besides its promise, in bytes.
func (c Info) overhead(option int64, costs Costs) int64 {
	return c.ofInodes(option, costs.InodeBytes) + c.ToOverwrite() + c.OfExtents(costs)
}

// OfExtents is what the file of a block volume may take besides its data, in bytes: the tree of its extents, each a block of its own if the
// guest has written in random order, or every other block of what was allocated. The rest is for the blocks that a change of the tree sets aside.
// A snapshot has a tree too.
func (c Info) OfExtents(costs Costs) int64 {
	if !c.Is(IsBlock) || costs.DataPerByte == 0 {
		return 0
	}
	return 1<<20 + c.Promised/costs.DataPerByte
}

// ToOverwrite is what the limit of a directory on XFS is above its promise, in bytes, if it shares blocks. To overwrite
// a shared block XFS needs a new one before it lets the old one go, and charges both meanwhile: a full volume could not
// even write what it has. Each may be an extent of its own then, which takes 16 bytes in a tree whose blocks may be half
// empty. Snapshots are not written to.
func (c Info) ToOverwrite() int64 {
	if !c.Is(ByXFS) || !c.Is(Shares) || c.Is(IsBlock|IsSnapshot) {
		return 0
	}
	return 1<<20 + c.Promised/64
}

// mayExceed reports whether the volume may take more than it owes without being written beyond its size: XFS takes up to the
// extent size hint of the file for each shared block that is written, by default 128 KiB. Of a directory that is not known.
func (c Info) mayExceed() bool {
	return c.Is(IsBlock) && c.Is(Shares) && c.Is(HasDirectory) && !c.Is(IsSnapshot)
}

// By is the flag for a size that is enforced by a quota of that kind.
func By(kind quota.Kind) Flags {
	switch kind {
	case quota.XFS:
		return ByXFS
	case quota.Ext4:
		return ByExt4
	case quota.Btrfs:
		return ByBtrfs
	}
	return 0
}

var uidSeed = maphash.MakeSeed()

// hashUID stands for a uid that is only compared.
func hashUID(uid string) uint64 { return maphash.String(uidSeed, uid) }

// OfUID reports whether the volume's record has that uid.
func (c Info) OfUID(uid string) bool { return hashUID(uid) == c.uid }

// Is reports whether a volume has any of the flags.
func (c Info) Is(f Flags) bool { return c.flags&f != 0 }

// Exists reports whether there is anything of the volume.
func (c Info) Exists() bool { return c.Is(HasDirectory | HasRecord | HasDamage) }

// Consistency is what a snapshot can promise of its content.
func (c Info) Consistency() volume.Consistency {
	switch {
	case c.Is(IsUnverified):
		return volume.Unverified
	case c.Is(IsCrashConsistent):
		return volume.CrashConsistent
	}
	return volume.PointInTime
}

// Lost reports that the directory is missing.
func (c Info) Lost() bool { return !c.Is(HasDirectory) }

// Mode is how the volume is used.
func (c Info) Mode() volume.Mode {
	if c.Is(IsBlock) {
		return volume.ModeBlock
	}
	return volume.ModeMount
}

// MayBeBlock reports whether the volume is a block volume, or may have been made as one:
// without a readable record it is not known.
func (c Info) MayBeBlock() bool { return c.Is(IsBlock) || !c.Is(HasRecord) }

// MayHaveDevices reports whether devices may be attached to the volume's content.
// Snapshots never have any.
func (c Info) MayHaveDevices() bool { return c.Is(HasDirectory) && c.MayBeBlock() && !c.Is(IsSnapshot) }

// Recorded reports whether the volume has a readable record.
func (c Info) Recorded() bool { return c.Is(HasRecord) }

// Matches reports whether the ledger knows that the disk has what was seen of it: HasDirectory and
// HasRecord. An unreadable record may have changed at any time.
func (c Info) Matches(seen Flags) bool {
	return c.flags&(HasDirectory|HasRecord|HasDamage) == seen
}

// QuotaID is the project id that counts the volume; 0 where the kernel chose one.
func (c Info) QuotaID() quota.ID { return quota.ID(c.project) }
