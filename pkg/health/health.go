// Package health decides what the condition of a volume is from facts that others
// gathered. It reads nothing itself, so every surface that shows a condition
// (statistics, listings, inspect) shows the same one.
package health

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// A Condition is what CSI v1.12 calls a VolumeCondition.
type Condition struct {
	Abnormal bool
	Message  string
	// Reason is what is wrong in one word, for programs; empty unless Abnormal.
	Reason Reason
}

// A Reason distinguishes kinds of conditions. The words are part of what monitoring is shown.
type Reason string

// The reasons, the worst first.
const (
	PoolNotServing   Reason = "pool_not_serving"
	RecordUnreadable Reason = "record_unreadable"
	DirectoryMissing Reason = "directory_missing"
	ReadFailed       Reason = "read_failed"
	ReadOnly         Reason = "read_only"
	FileShort        Reason = "file_short"
	LimitDiffers     Reason = "limit_differs"
	LimitOff         Reason = "limit_off"
	// OutsideLimit is a volume in which its users made what is not limited.
	OutsideLimit Reason = "outside_limit"
	NoSpace      Reason = "no_space"
	NoInodes     Reason = "no_inodes"
	// InlineUnpublished is a volume that its pod has left behind.
	InlineUnpublished Reason = "inline_unpublished"
	// FilesystemErrors may be long past, or concern other volumes: whatever is known of
	// this one comes before it.
	FilesystemErrors Reason = "filesystem_errors"
)

// Reasons are all of them, in that order.
func Reasons() []Reason {
	return []Reason{
		PoolNotServing, RecordUnreadable, DirectoryMissing, ReadFailed, ReadOnly,
		FileShort, LimitDiffers, LimitOff, OutsideLimit, NoSpace, NoInodes, InlineUnpublished, FilesystemErrors,
	}
}

// Facts are what is known of one volume. The zero value is a healthy volume.
type Facts struct {
	// Pool is why the volume's pool does not serve; nil if it does.
	Pool error
	// Volume is its id.
	Volume string
	// Missing: there is a record, but no directory.
	Missing bool
	// Damaged is why the record cannot be trusted; nil if it can.
	Damaged error
	// IO is an error that reading the volume's root gave; nil if none.
	IO error
	// FilesystemErrors is how many errors the pool's filesystem has counted.
	FilesystemErrors int64
	// ReadOnly: the pool's filesystem takes no writes.
	ReadOnly bool
	// FreeBytes is what the volume may still take; negative if that does not matter.
	FreeBytes int64
	// SizeBytes is what it may take in all.
	SizeBytes int64
	// InodesCounted reports whether FreeInodes means anything.
	InodesCounted bool
	FreeInodes    int64
	// Short: the file of a block volume is smaller than what was promised.
	Short bool
	// LimitDiffers: the limit that the kernel enforces is not what was promised.
	LimitDiffers bool
	// Outside is how many subvolumes its users made in it that are not in its limit.
	Outside int
	// Strays are what its users took out of its limit, and Unsearched is why not all of it was
	// searched for that; nil if it was.
	Strays     quota.Strays
	Unsearched error
	// LimitOff is what kept the size when the volume was made and does so no more;
	// empty if that is not so.
	LimitOff string
	// InlineUnpublished: the volume lives as long as its publication, and has none, although it
	// was made long ago.
	InlineUnpublished bool
	// Contender is another driver that is configured with the pool, which is not shared; empty
	// for none.
	Contender string
	// Unenforced: the kernel does not keep the volume's size, and what is reported of its
	// space is the whole pool's.
	Unenforced bool
	// Unpromised: no size was promised.
	Unpromised bool
}

// Condition is the worst of the facts, in words for the person who has to act.
func (f Facts) Condition() Condition {
	switch {
	case f.Pool != nil:
		return abnormal(PoolNotServing, "the pool does not serve: %v", f.Pool)
	case f.Damaged != nil:
		return abnormal(RecordUnreadable, "the volume's record is unreadable: %v", f.Damaged)
	case f.Missing:
		return abnormal(DirectoryMissing, "the volume's directory is missing; its record is kept: put the directory back, or give the volume up: delete the pods that use it, and then its claim; "+
			"if it has neither claim nor PersistentVolume, `/hostpath-csi-driver remove-lost --volume=%s`, in the container driver of this node, removes the record", f.Volume)
	case f.IO != nil:
		return abnormal(ReadFailed, "reading the volume failed: %v", f.IO)
	case f.ReadOnly:
		return abnormal(ReadOnly, "the pool's filesystem is read-only")
	case f.Short:
		return abnormal(FileShort, "the volume's file is smaller than what was promised")
	case f.LimitDiffers:
		return abnormal(LimitDiffers, "the kernel's limit is missing or is not what was promised")
	case f.LimitOff != "":
		return abnormal(LimitOff, "the size was limited by the quotas of %s, which the pool does not have now", f.LimitOff)
	case f.Outside > 0:
		return abnormal(OutsideLimit, "%d subvolumes that were made in the volume are outside its limit, and can fill the pool; see docs/quotas.md for how to find and remove them", f.Outside)
	case f.Strays.Outside > 0:
		return abnormal(OutsideLimit, "%d files or directories of the volume are outside its limit, because their owner changed their project, and can fill the pool; see docs/quotas.md for how to find them", f.Strays.Outside)
	case f.full():
		return abnormal(NoSpace, "no space is left")
	case f.InodesCounted && f.FreeInodes == 0:
		return abnormal(NoInodes, "no inodes are left")
	case f.InlineUnpublished:
		return abnormal(InlineUnpublished, "the inline volume is published nowhere, and it and the start of its node are more than an hour old: its pod is gone; `/hostpath-csi-driver remove-inline --volume=%s`, in the container driver of this node, removes it with its data", f.Volume)
	case f.FilesystemErrors > 0:
		return abnormal(FilesystemErrors, "the pool's filesystem has counted %d errors, which may concern this volume or others; see the kernel's log for them, and docs/answers.md for how to reset the count", f.FilesystemErrors)
	case f.Contender != "":
		return Condition{Message: fmt.Sprintf("in order; but another driver is configured with the pool, which is not shared, and waits for it: %s", f.Contender)}
	case f.Unsearched != nil:
		return Condition{Message: fmt.Sprintf("in order as far as is known; the search for files outside its limit failed: %v", f.Unsearched)}
	case f.Strays.Unseen > 0:
		return Condition{Message: fmt.Sprintf("in order as far as is known; %d files could not be checked for being outside its limit, because processes have leases of them", f.Strays.Unseen)}
	case f.Unpromised:
		return Condition{Message: "in order; the volume has no record, so that no size is promised or enforced, and the numbers are the whole pool's"}
	case f.Unenforced:
		return Condition{Message: "in order; the size is promised but not enforced, because the pool has no quotas, or had none when the volume was made: the numbers are the whole pool's"}
	}
	return Condition{Message: "in order"}
}

// OfSnapshot is the condition if the facts are of a snapshot. Nothing is written to one: it is
// never full, and its limit and a read-only filesystem do it no harm.
func (f Facts) OfSnapshot() Condition {
	switch {
	case f.Pool != nil:
		return abnormal(PoolNotServing, "the pool does not serve: %v", f.Pool)
	case f.Damaged != nil:
		return abnormal(RecordUnreadable, "the snapshot's record is unreadable: %v", f.Damaged)
	case f.Missing:
		return abnormal(DirectoryMissing, "the snapshot is lost: its directory is missing, and its record is kept: put the directory back, or delete the snapshot")
	case f.IO != nil:
		return abnormal(ReadFailed, "reading the snapshot failed: %v", f.IO)
	case f.Short:
		return abnormal(FileShort, "the snapshot's file is smaller than its volume was")
	case f.FilesystemErrors > 0:
		return abnormal(FilesystemErrors, "the pool's filesystem has counted %d errors, which may concern this snapshot or others; see the kernel's log for them, and docs/answers.md for how to reset the count", f.FilesystemErrors)
	}
	return Condition{Message: "in order"}
}

// full describes a volume that refuses writes. What is left can be less than a filesystem
// needs for the next one, up to its largest block: btrfs leaves 16 KiB.
func (f Facts) full() bool {
	return f.FreeBytes == 0 || f.FreeBytes > 0 && f.FreeBytes < min(largestBlock, f.SizeBytes/16)
}

// largestBlock is that of XFS and btrfs, in bytes.
const largestBlock = 64 << 10

func abnormal(reason Reason, format string, args ...any) Condition {
	return Condition{Abnormal: true, Reason: reason, Message: fmt.Sprintf(format, args...)}
}
