// Package loop makes a file a block device, by the kernel's loop driver (loop(4),
// Linux 5.8 for LOOP_CONFIGURE). Which file, and who may use the device, is the
// caller's business.
//
// A file has at most one device of this package that can be written and one that
// cannot. They are told by the device and inode numbers of the file, which the kernel
// answers for each attached device, and by a mark that the kernel keeps with it:
// nothing is remembered here, so a process that was killed at any instant leaves
// devices that the next one finds whole. A device is attached in a single step; there
// are none that are half made.
//
// The caller keeps two calls for one file apart. Calls for different files need not
// wait for each other. No call leaves a descriptor open, and none starts a process.
package loop

import (
	"errors"
	"path"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for.
var (
	// ErrNoDevice reports that the kernel has no loop device left, or that others
	// took each one that it offered.
	ErrNoDevice = errors.New("no free loop device")
	// ErrBusy reports a device that somebody still has open. It stays attached.
	ErrBusy = errors.New("loop device is in use")
	// ErrForeign reports a device on the file that was not attached by this package.
	ErrForeign = errors.New("loop device was attached by somebody else")
	// ErrNotAttached reports a device that is not, or no longer, attached to the file.
	ErrNotAttached = errors.New("loop device is not attached to the file")
	// ErrSilent reports a device of the file's name whose file's filesystem does not answer.
	ErrSilent = errors.New("the filesystem of the loop device's file does not answer")
	// ErrGone reports a device whose file's filesystem is gone.
	ErrGone = errors.New("the filesystem of the loop device's file is gone")
	// ErrSize reports a size that is less than nothing, less than before, or not a
	// multiple of Unit.
	ErrSize = errors.New("unusable size")
)

// Unit is what the size of a file has to be a multiple of, in bytes: the largest
// block that a device may have, so that it has no torn block at its end.
const Unit = 4096

// mark tells the devices of this package from others. The kernel keeps it as the
// device's lo_file_name, which it does not look at: since LOOP_CONFIGURE takes a
// descriptor it is a reference of the user's own (losetup(8) --loop-ref), and udev
// makes a link /dev/disk/by-loop-ref/ of it. It must not change: devices outlive the
// program that attached them.
const mark = "hostpath-provisioner.kubevirt.io"

// A Device is an attached loop device, as it was when it was asked for.
type Device struct {
	// Name is that of its node in the directory of device nodes, such as loop7.
	Name string
	// Major and Minor are its device number.
	Major, Minor uint32
	// Backing is the file that it is attached to.
	Backing dir.ID
	// SizeBytes is its capacity, and BlockBytes its logical block.
	SizeBytes, BlockBytes int64
	// ReadOnly tells that nothing can be written through it.
	ReadOnly bool
	// DirectIO tells that it goes past the page cache of the file's filesystem.
	DirectIO bool
	// Discard tells that what its user discards is given back to the file's
	// filesystem, so that the file has holes then.
	Discard bool
	// Ours tells that this package attached it, to the whole of the file.
	Ours bool
	// Ending tells that the kernel detaches it once nobody has it open.
	Ending bool
	// Gone tells that the filesystem of its file is gone, and nothing more is known of the
	// device than its name, its numbers and FormerPath.
	Gone bool
	// Silent tells that the filesystem of its file does not answer, and nothing more is known
	// of the device than its name and FormerPath.
	Silent bool
	// FormerPath is where the file was when it was attached, as the kernel has it now: where
	// a mount went away, only the part below that. Set if Gone or Silent.
	FormerPath string
}

// Was tells of a device that is Gone or Silent whether its file was at a path that ends with
// these elements. The kernel has names that change with the file, also where one of the
// directories above is renamed.
func (d Device) Was(elements ...string) bool {
	return strings.HasSuffix(d.FormerPath, "/"+path.Join(elements...))
}

// Options are how a device is to be.
type Options struct {
	// ReadOnly makes a device that refuses writes. It is one of its own, beside the
	// one that can be written: what is written there, others read here as far as
	// their caches let them.
	ReadOnly bool
	// BlockBytes is the logical block: 512, 1024, 2048 or 4096, or 0 for what
	// File.BlockBytes says. What a user wrote can often be read with the same
	// block only, so the choice has to be kept with the file. Direct IO is used
	// where the block allows it.
	BlockBytes int64
	// Discard lets the device's users give space back. Without it the file keeps
	// what was allocated for it; mkfs(8) discards all otherwise.
	Discard bool
}
