// Package health decides what is wrong with a volume or a pool from facts that others
// gathered. It reads nothing itself, so every surface that shows a condition (the calls of
// CSI, metrics, the log, inspect) shows the same one.
package health

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Condition is one thing that is wrong, or, unless Abnormal, a remark.
type Condition struct {
	Abnormal bool
	Message  string
	// Reason is what is wrong in one word, for programs; empty unless Abnormal.
	Reason Reason
}

// A Reason distinguishes kinds of conditions. The words are those of CSI, metrics, the log and
// inspect; docs/monitoring.md says what to do for each.
type Reason string

// The reasons, the worst first: those of which a volume can be used come last.
const (
	// PoolMissing, PoolHangs and PoolFailing are pools that do not serve, because their
	// filesystem or directory is away, does not answer, or cannot be read. PoolNotServing is
	// any other.
	PoolMissing      Reason = "PoolMissing"
	PoolHangs        Reason = "PoolHangs"
	PoolFailing      Reason = "PoolFailing"
	PoolNotServing   Reason = "PoolNotServing"
	RecordUnreadable Reason = "RecordUnreadable"
	DirectoryMissing Reason = "DirectoryMissing"
	FileMissing      Reason = "FileMissing"
	FileShort        Reason = "FileShort"
	// DataUnreadable is a volume of which the disk or the filesystem refuses what is recorded.
	DataUnreadable Reason = "DataUnreadable"
	ReadFailed     Reason = "ReadFailed"
	ReadOnly       Reason = "ReadOnly"
	// InlineUnpublished is a volume that its pod has left behind: what else is wrong with it matters to no pod.
	InlineUnpublished Reason = "InlineUnpublished"
	LimitDiffers      Reason = "LimitDiffers"
	LimitOff          Reason = "LimitOff"
	// OutsideLimit is a volume in which its users made what is not limited.
	OutsideLimit Reason = "OutsideLimit"
	NoSpace      Reason = "NoSpace"
	NoInodes     Reason = "NoInodes"
	// FilesystemErrors may be long past, or concern other volumes: whatever is known of
	// this one comes before it.
	FilesystemErrors Reason = "FilesystemErrors"
)

// Reasons are all of them, in that order.
func Reasons() []Reason {
	return []Reason{
		PoolMissing, PoolHangs, PoolFailing, PoolNotServing, RecordUnreadable, DirectoryMissing, FileMissing, FileShort, DataUnreadable, ReadFailed,
		ReadOnly, InlineUnpublished, LimitDiffers, LimitOff, OutsideLimit, NoSpace, NoInodes, FilesystemErrors,
	}
}

// OfPool reports whether the pool does not serve.
func (r Reason) OfPool() bool {
	return slices.Contains([]Reason{PoolMissing, PoolHangs, PoolFailing, PoolNotServing}, r)
}

// Unread reports whether reading a volume gave an error.
func (r Reason) Unread() bool {
	return r == FileMissing || r == DataUnreadable || r == ReadFailed
}

// A Status is what a reason means for who uses the volume or the pool.
type Status int

// The statuses, the worst last.
const (
	Degraded     Status = iota // it can be used
	Inaccessible               // it cannot be used now
	DataLoss                   // what was in it is gone, at least in part
)

// Status is the one of all conditions with that reason. A pool that is away has lost nothing.
func (r Reason) Status() Status {
	switch r {
	case DirectoryMissing, FileMissing, FileShort, DataUnreadable:
		return DataLoss
	case RecordUnreadable, ReadFailed:
		return Inaccessible
	}
	if r.OfPool() {
		return Inaccessible
	}
	return Degraded
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
	// Uncounted is an error that reading its quota gave; nil if none. What is in the volume is not lost with that.
	Uncounted error
	// FilesystemErrors is how many errors the pool's filesystem has counted.
	FilesystemErrors int64
	// ReadOnly: the pool's filesystem takes no writes.
	ReadOnly bool
	Room
	// Short: the file of a block volume is smaller than what was promised.
	Short bool
	Limit
	// InlineUnpublished: the volume lives as long as its publication, and has none, although it
	// was made long ago.
	InlineUnpublished bool
	// Unenforced: the kernel does not keep the volume's size, and what is reported of its
	// space is the whole pool's.
	Unenforced bool
	// Unpromised: no size was promised.
	Unpromised bool
}

// Room is what a volume may still take.
type Room struct {
	// FreeBytes is negative if it does not matter.
	FreeBytes int64
	// SizeBytes is what the volume may take in all.
	SizeBytes int64
	// InodesCounted reports whether FreeInodes means anything.
	InodesCounted bool
	FreeInodes    int64
}

// A Limit is what the kernel keeps a volume within.
type Limit struct {
	// LimitDiffers: it is not what was promised.
	LimitDiffers bool
	// LimitOff is what kept the size when the volume was made and does so no more;
	// empty if that is not so.
	LimitOff string
	// Outside is how many subvolumes its users made in the volume that are not in its limit.
	Outside int
	// Strays are what its users took out of its limit, and Unsearched is why not all of it was
	// searched for that; nil if it was.
	Strays     quota.Strays
	Unsearched error
}

// OfPool are the facts of a pool as a whole: why it does not serve, or nil, the space of its
// filesystem, and how many errors that has counted, or volume.Unknown.
func OfPool(err error, space dir.Space, errors int64) Facts {
	return Facts{
		Pool:             err,
		FilesystemErrors: max(0, errors),
		ReadOnly:         space.ReadOnly,
		Room:             Room{FreeBytes: space.FreeBytes, SizeBytes: space.SizeBytes, InodesCounted: space.Inodes > 0, FreeInodes: space.InodesFree},
	}
}

// Condition is the worst of the facts, in words for the person who has to act.
func (f Facts) Condition() Condition {
	if all := f.Conditions(); len(all) > 0 {
		return all[0]
	}
	return f.remark()
}

// Conditions are all that is wrong, the worst first, with each reason once; nil for nothing. What
// was not read because of one of them is not judged.
func (f Facts) Conditions() []Condition {
	var all []Condition
	add := func(is bool, reason Reason, format string, args ...any) {
		if is {
			all = append(all, abnormal(reason, format, args...))
		}
	}
	if f.Pool != nil {
		add(true, reasonOfPool(f.Pool), "the pool does not serve: %s", why(f.Pool))
	}
	add(f.Damaged != nil, RecordUnreadable, "the volume's record is unreadable: %v", f.Damaged)
	add(f.Missing, DirectoryMissing, "the volume's directory is missing; its record is kept: put the directory back, or give the volume up: delete the pods that use it, and then its claim; "+
		"if it has neither claim nor PersistentVolume, `/hostpath-csi-driver remove-lost --volume=%s`, in the container driver of this node, removes the record", f.Volume)
	add(f.Short && f.readable(), FileShort, "the volume's file is smaller than what was promised")
	add(f.IO != nil, reasonOfIO(f.IO), "reading the volume failed: %v", f.IO)
	if f.Pool != nil {
		return all
	}
	add(f.IO == nil && f.Uncounted != nil, ReadFailed, "reading the volume's quota failed: %v", f.Uncounted)
	add(f.ReadOnly, ReadOnly, "the pool's filesystem is read-only")
	if f.readable() && f.Uncounted == nil {
		all = append(all, f.ofContent()...)
	}
	add(f.FilesystemErrors > 0, FilesystemErrors, "the pool's filesystem has counted %s, which may concern this volume or others; see the kernel's log, and docs/answers.md for how to reset the count",
		counted(f.FilesystemErrors, "error", "errors"))
	return all
}

// readable reports whether there is something that was read.
func (f Facts) readable() bool { return f.Pool == nil && !f.Missing && f.IO == nil }

// ofContent are the conditions of a volume that could be read.
func (f Facts) ofContent() []Condition {
	var all []Condition
	add := func(is bool, reason Reason, format string, args ...any) {
		if is {
			all = append(all, abnormal(reason, format, args...))
		}
	}
	add(f.InlineUnpublished, InlineUnpublished, "the inline volume is published nowhere, and it and the start of its node are more than an hour old: its pod is gone; `/hostpath-csi-driver remove-inline --volume=%s`, in the container driver of this node, removes it with its data", f.Volume)
	add(f.LimitDiffers, LimitDiffers, "the kernel's limit is missing or is not what was promised")
	add(f.LimitOff != "", LimitOff, "the size was limited by the quotas of %s, which the pool does not have now", f.LimitOff)
	if f.Outside > 0 {
		add(true, OutsideLimit, "%s, and can fill the pool; see docs/quotas.md for how to find and remove what is outside",
			counted(f.Outside, "subvolume that was made in the volume is outside its limit", "subvolumes that were made in the volume are outside its limit"))
	} else {
		add(f.Strays.Outside > 0, OutsideLimit, "%s, and can fill the pool; see docs/quotas.md for how to find what is outside",
			counted(f.Strays.Outside, "file or directory of the volume is outside its limit, because its owner changed its project",
				"files or directories of the volume are outside its limit, because their owner changed their project"))
	}
	add(f.full(), NoSpace, "no space is left")
	add(f.InodesCounted && f.FreeInodes == 0, NoInodes, "no inodes are left")
	return all
}

// remark is what is said of a volume that is in order.
func (f Facts) remark() Condition {
	switch {
	case f.Unsearched != nil:
		return Condition{Message: fmt.Sprintf("in order as far as is known; the search for files outside its limit failed: %v", f.Unsearched)}
	case f.Strays.Unseen > 0:
		return Condition{Message: fmt.Sprintf("in order as far as is known; %s: processes have leases, or it is encrypted without a key",
			counted(f.Strays.Unseen, "file could not be checked for being outside its limit", "files could not be checked for being outside its limit"))}
	case f.Unpromised:
		return Condition{Message: "in order; the volume has no record, so that no size is promised or enforced, and the numbers are the whole pool's"}
	case f.Unenforced:
		return Condition{Message: "in order; the size is promised but not enforced, because the pool has no quotas, or had none when the volume was made: the numbers are the whole pool's"}
	}
	return Condition{Message: "in order"}
}

// why a pool does not serve, without saying once more that it is unavailable.
func why(err error) string {
	return strings.TrimPrefix(err.Error(), volume.ErrUnavailable.Error()+": ")
}

// reasonOfPool tells why a pool does not serve.
func reasonOfPool(err error) Reason {
	switch {
	case errors.Is(err, hang.ErrTimeout):
		return PoolHangs
	case errors.Is(err, volume.ErrPoolMissing), errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return PoolMissing
	case Unreadable(err):
		return PoolFailing
	}
	return PoolNotServing
}

// reasonOfIO tells whether content is lost that could not be read.
func reasonOfIO(err error) Reason {
	switch {
	case errors.Is(err, volume.ErrLost):
		return FileMissing
	case Unreadable(err):
		return DataUnreadable
	}
	return ReadFailed
}

// Unreadable describes what Linux returns for a disk that cannot be read, and for what is damaged
// on it: XFS and ext4 have EUCLEAN for structures that make no sense, and EBADMSG for wrong
// checksums.
func Unreadable(err error) bool {
	return slices.ContainsFunc([]error{syscall.EIO, syscall.EUCLEAN, syscall.EBADMSG, syscall.ENXIO, syscall.EREMOTEIO, syscall.ENODATA},
		func(errno error) bool { return errors.Is(err, errno) })
}

// OfSnapshot is the condition if the facts are of a snapshot. Nothing is written to one: it is
// never full, and its limit and a read-only filesystem do it no harm.
func (f Facts) OfSnapshot() Condition {
	switch {
	case f.Pool != nil:
		return abnormal(reasonOfPool(f.Pool), "the pool does not serve: %s", why(f.Pool))
	case f.Damaged != nil:
		return abnormal(RecordUnreadable, "the snapshot's record is unreadable: %v", f.Damaged)
	case f.Missing:
		return abnormal(DirectoryMissing, "the snapshot is lost: its directory is missing, and its record is kept: put the directory back, or delete the snapshot")
	case f.IO != nil:
		return abnormal(reasonOfIO(f.IO), "reading the snapshot failed: %v", f.IO)
	case f.Short:
		return abnormal(FileShort, "the snapshot's file is smaller than its volume was")
	case f.FilesystemErrors > 0:
		return abnormal(FilesystemErrors, "the pool's filesystem has counted %s, which may concern this snapshot or others; see the kernel's log, and docs/answers.md for how to reset the count",
			counted(f.FilesystemErrors, "error", "errors"))
	}
	return Condition{Message: "in order"}
}

// full describes a volume that refuses writes. What is left can be less than a filesystem
// needs for the next one, up to its largest block: btrfs leaves 16 KiB.
func (r Room) full() bool {
	return r.FreeBytes == 0 || r.FreeBytes > 0 && r.FreeBytes < min(largestBlock, r.SizeBytes/16)
}

// largestBlock is that of XFS and btrfs, in bytes.
const largestBlock = 64 << 10

// counted is a number with the words for one and for several.
func counted[N int | int64](n N, one, several string) fmt.Stringer {
	return count{int64(n), one, several}
}

type count struct {
	n            int64
	one, several string
}

// String is made only of what is said.
func (c count) String() string {
	if c.n == 1 {
		return "1 " + c.one
	}
	return fmt.Sprintf("%d %s", c.n, c.several)
}

func abnormal(reason Reason, format string, args ...any) Condition {
	return Condition{Abnormal: true, Reason: reason, Message: fmt.Sprintf(format, args...)}
}
