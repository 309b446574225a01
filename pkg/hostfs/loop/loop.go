// Package loop attaches files to block devices of the kernel's loop driver (loop(4),
// Linux 5.8 for LOOP_CONFIGURE). The caller decides which file, and who may use the
// device.
//
// A file has at most one writable device of this package, and one for each user that only reads.
// They are recognised by the device and inode numbers of the file, which the kernel reports for
// each attached device, and by a mark that the kernel stores with it. The package itself
// keeps no state, so the next process finds all devices of one that was killed. A device
// is attached in a single system call, so none is half configured.
//
// A process that has a device open changes it without any capability: it takes the mark off or
// shows a part of the file (LOOP_SET_STATUS64, open for writing), ends the device (LOOP_CLR_FD),
// or gives one that is read-only another file (LOOP_CHANGE_FD). See lo_ioctl() of the kernel. So
// Restore puts back what can be, devices that only read are not shared, and no file gets a number
// whose node is still mounted for another, or a device that was there before: it may be open.
//
// The caller must serialise calls for the same file. Calls for different files may run
// concurrently. No call leaves a descriptor open or starts a child process.
package loop

import (
	"errors"
	"path"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for.
var (
	// ErrNoDevice reports that the kernel has no free loop device, or that others
	// took each one that it offered.
	ErrNoDevice = errors.New("no free loop device")
	// ErrBusy reports a device that a process still has open. It stays attached.
	ErrBusy = errors.New("loop device is in use")
	// ErrForeign reports a device on the file that was not attached by this package.
	ErrForeign = errors.New("loop device was attached by another program")
	// ErrNotAttached reports a device that is not, or no longer, attached to the file.
	ErrNotAttached = errors.New("loop device is not attached to the file")
	// ErrSilent reports a device, possibly of this file, whose filesystem does not answer, or refuses to.
	ErrSilent = errors.New("the filesystem of the loop device's file does not answer")
	// ErrGone reports a device whose file's filesystem is gone.
	ErrGone = errors.New("the filesystem of the loop device's file is gone")
	// ErrNodes reports that no loop device can be made or reached.
	ErrNodes = errors.New("loop devices cannot be used")
	// ErrSize reports a size that is negative, smaller than before, or not a
	// multiple of Unit.
	ErrSize = errors.New("unusable size")
)

// Unit is what the size of a file must be a multiple of, in bytes: the largest block size
// of a device, so that the last block is complete.
const Unit = 4096

// mark distinguishes the devices of this package from others. The kernel keeps it as the
// device's lo_file_name, which it does not use: since LOOP_CONFIGURE takes a
// descriptor it is a reference of the user's own (losetup(8) --loop-ref), and udev
// makes a link /dev/disk/by-loop-ref/ of it. It must not change: devices outlive the
// program that attached them.
const mark = "hostpath-provisioner.kubevirt.io"

// A Device is the state of an attached loop device when it was read.
type Device struct {
	// Name is that of its node in the directory of device nodes, such as loop7.
	Name string
	// Major and Minor are its device number.
	Major, Minor uint32
	// Backing is the file that it is attached to.
	Backing dir.ID
	// SizeBytes is its capacity, and BlockBytes its logical block.
	SizeBytes, BlockBytes int64
	// ReadOnly: the device refuses writes.
	ReadOnly bool
	// DirectIO: the device bypasses the page cache of the file's filesystem.
	DirectIO bool
	// Discard: discarded blocks are returned to the file's filesystem, which leaves holes
	// in the file.
	Discard bool
	// Ours: this package attached it, to the whole file, and no user has changed that.
	Ours bool
	// Ending: the kernel detaches it once no process has it open.
	Ending bool
	// Gone: the filesystem of its file is gone. Only its name, its numbers and FormerPath
	// are known.
	Gone bool
	// Silent: the filesystem of its file does not answer, or refuses to. Only its name and FormerPath are
	// known.
	Silent bool
	// FormerPath is that of Kernel.FilePath, set if Gone or Silent, and by OnDeleted; empty where it is too long to be known.
	FormerPath string
}

// HadPath reports whether the file of a device whose FormerPath is set was at a path that ends with
// these elements. The kernel has names that change with the file, also where one of the
// directories above is renamed.
func (d Device) HadPath(elements ...string) bool {
	return strings.HasSuffix(d.FormerPath, "/"+path.Join(elements...))
}

// Options configure a device.
type Options struct {
	// ReadOnly makes a device that refuses writes, a new one each time: its user could change
	// what it shows. It shows what is written to the writable one, except where readers have
	// cached older data.
	ReadOnly bool
	// BlockBytes is the logical block: 512, 1024, 2048 or 4096, or 0 for what
	// File.BlockBytes returns. Content often depends on the block size, so the caller
	// must store the choice with the file. Direct IO is used if the block size allows
	// it.
	BlockBytes int64
	// Discard lets the device's users return space. Without it the file keeps its
	// allocated space; otherwise mkfs(8) discards everything.
	Discard bool
	// Mounted are the names of the devices whose nodes are mounted; nil for none. A free device
	// among them has ended before its mount did, and is passed by. The writable one of the file
	// is ours whatever its users have made of its mark: only this package's are mounted.
	Mounted func() (map[string]bool, error)
}
