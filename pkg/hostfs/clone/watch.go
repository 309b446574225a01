package clone

import (
	"errors"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A watch tells of a file that is written all the time, so that its ctime says nothing, whether its owner, mode or
// attributes have changed (inotify(7), IN_ATTRIB). The kernel queues the event under the lock of the file under
// which it makes the change, and sharing its blocks takes that lock: so who has shared blocks after a change finds the event.
type watch struct{ fd int }

func newWatch() (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return &watch{fd}, nil
}

// begin watches an open file until end. Only one file is watched at a time.
func (w *watch) begin(file int) (end func(), err error) {
	if _, err := w.changed(); err != nil { // forgets what the end of the last left
		return nil, err
	}
	one, err := unix.InotifyAddWatch(w.fd, dir.HandlePath(file), unix.IN_ATTRIB)
	if err != nil {
		return nil, err
	}
	return func() { _, _ = unix.InotifyRmWatch(w.fd, uint32(one)) }, nil // it is gone if the file is
}

// changed reports whether anything has changed since the watch began or changed was last called.
func (w *watch) changed() (bool, error) {
	var events [4096]byte
	for some := false; ; some = true {
		_, err := retryInterrupted(func() (int, error) { return unix.Read(w.fd, events[:]) })
		if errors.Is(err, unix.EAGAIN) {
			return some, nil
		}
		if err != nil {
			return true, err
		}
	}
}

func (w *watch) close() error {
	if w == nil {
		return nil
	}
	return unix.Close(w.fd)
}
