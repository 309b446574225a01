// Package transfer makes a directory tree on another node equal to one here, over a connection. [Sender.Pass] sends what differs,
// and may be called while the source is in use: what changes meanwhile is left to the next pass, and the last one is made when
// nothing changes any more. Entries have the names, hard links, holes, owners, modes, times, ACLs, capabilities, labels and other
// extended attributes of the source as the copies of pkg/hostfs/clone do. What is zero in units of 64 KiB is a hole.
//
// Neither side trusts the other, nor the trees: the receiver reaches its tree by directory handles, takes only single names and
// follows no link; both hold a bounded amount of memory, whatever is in the trees or comes over the connection. But whether the trees
// are equal the receiver says, which has the copy: one that lies about that harms the copy. Which trees these are, who the peer is,
// and when a pass is the last one is decided elsewhere.
package transfer

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for. After another error the connection is of no use any more.
var (
	// ErrChanged reports a source that changed although Pass.Still says that nothing writes to it.
	ErrChanged = errors.New("the source changed although nothing should write to it")
	// ErrDiffers reports that the comparison after a pass found differences: see [DifferencesError].
	ErrDiffers = errors.New("the trees differ")
	// ErrNoRoom reports a target whose filesystem or quota is full. What fits is there.
	ErrNoRoom = errors.New("no room on the target")
)

// Errors that end the connection.
var (
	// ErrProtocol reports a peer that does not keep to the protocol.
	ErrProtocol = errors.New("the peer broke the protocol")
	// ErrVersion reports a peer with another version of the protocol.
	ErrVersion = errors.New("the peer has another version of the protocol")
	// ErrPeer reports an error that the peer had.
	ErrPeer = errors.New("the peer failed")
	// ErrConnection reports a connection that could block forever, since it can neither be closed nor be given a deadline.
	ErrConnection = errors.New("the connection can neither be closed nor be given a deadline")
)

// Options of both sides.
type Options struct {
	// BytesPerSecond limits what is sent, on average over a few hundred milliseconds. 0 is no limit.
	BytesPerSecond int64
	// Allocated has the receiver keep the blocks of files that are there, as those of a disk whose space is set aside: what is a
	// hole in the source is made zero, and not given back.
	Allocated bool
	// Doubted has the receiver believe its disk alone of what is there: an earlier connection did not come to its Finish, so that the disk may
	// have refused what is in memory still. The kernel says so once, perhaps to another process.
	Doubted bool
	// Finished is called by the receiver when all is on the disk after Sender.Finish, and before the sender hears of it.
	Finished func() error
	// Progress is called from time to time while a pass goes on, from the goroutine that works: it must be fast.
	Progress func(Progress)
}

// Progress of a pass so far.
type Progress struct {
	Entries, Files int64 // that were looked at
	Bytes          int64 // of content that was sent
	Compared       int64 // bytes of content that were compared after the pass
}

// Verify is what is compared after a pass.
type Verify int

const (
	// VerifyNone compares nothing.
	VerifyNone Verify = iota
	// VerifyChanged compares each entry, its owner, mode, times, links and attributes, and the content and holes of the files that
	// may have changed since Pass.Since.
	VerifyChanged
	// VerifyAll compares the content and holes of all files as well.
	VerifyAll
)

// A Pass says what the sender may rely on.
type Pass struct {
	// Since is the Result.Began of a pass over the same tree to the same target that succeeded; zero for the first. What has not
	// changed since then is not read. If the node of the target may have crashed since, that pass must not have been Still,
	// unless Finish was called after it. A pass from a snapshot is as of the moment before the snapshot was made: see [Now].
	Since time.Time
	// Still says that nothing writes to the source: a change is ErrChanged.
	Still bool
	// Verify needs Still.
	Verify Verify
	// Base is a tree on the filesystem of the source that the target is known to equal, and that nothing changes; nil if there is
	// none. It needs Still, and stands for Since. Blocks that a file shares with that of the same name in Base are not read, and of
	// content only what differs from Base is compared: the pass that made the target equal it compares the rest.
	Base *dir.Dir
}

// A Result is what a pass did.
type Result struct {
	Began   time.Time // by the clock of the source's filesystem
	Entries int64     // of the source, without its root
	Files   int64     // regular ones among them
	Sent    int64     // files of which content or attributes were sent: the others are as they were
	Bytes   int64     // of content that were sent
	// BytesCompared are those of content that were compared after the pass.
	BytesCompared int64
	// Missed is how many entries changed or went while they were sent. The next pass has them.
	Missed int64
}

// A DifferencesError is the ErrDiffers of a comparison.
type DifferencesError struct {
	Count int64
	First []string // some of them: what differs, and where
}

func (e *DifferencesError) Error() string {
	return fmt.Sprintf("%v: %d differences: %s", ErrDiffers, e.Count, strings.Join(e.First, "; "))
}

// Is makes it an ErrDiffers.
func (e *DifferencesError) Is(target error) bool { return target == ErrDiffers }

// outOfRoom says that the filesystem or a quota is full.
func outOfRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
