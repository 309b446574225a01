package transfer

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A stillness says whether anything in the source may change after the pass began.
type stillness struct {
	still bool
	began int64 // in nanoseconds
}

// look is for an entry that was just looked at. Of what is still, none has changed since the pass began, but one whose ctime is
// in the future, since a clock was wrong.
func (s stillness) look(st *unix.Stat_t, err error) (*unix.Stat_t, error) {
	switch {
	case !s.still:
		return st, err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, clone.ErrGone):
		return st, fmt.Errorf("%w: %w", ErrChanged, err)
	case err == nil && st.Ctim.Nano() >= s.began && st.Ctim.Nano() <= time.Now().UnixNano():
		return st, ErrChanged
	}
	return st, err
}

// A source is the tree that is sent, which may change meanwhile.
type source struct {
	stillness
	flushed bool  // all was written to the disk in an earlier pass
	missed  int64 // entries that the next pass has
	leased  bool  // a file could not be opened: for the next pass nothing has changed
}

// isGone says that an entry went while it was looked at, and counts it.
func (s *source) isGone(err error) bool {
	gone := !errors.Is(err, ErrChanged) && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, clone.ErrGone))
	if gone {
		s.missed++
	}
	return gone
}

// open opens a file, once no write to it is under way that has set its ctime before (see clone.AwaitCalls). What was written
// to it before is on the disk then, so that a store through a mapping shows by the ctime.
func (s *source) open(in *dir.Dir, name string, st *unix.Stat_t) (int, error) {
	fd, err := clone.OpenRegular(in, name, st)
	if err != nil {
		return notOpen, err
	}
	if !s.still {
		clone.AwaitCalls(fd)
	}
	if !s.still && s.flushed {
		const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		err = unix.SyncFileRange(fd, 0, 0, all)
	}
	if err == nil {
		err = unix.Fstat(fd, st)
	}
	if err != nil {
		_ = unix.Close(fd) // opened for reading
		return notOpen, pathError("read", in, name, err)
	}
	if _, err := s.look(st, nil); err != nil {
		_ = unix.Close(fd) // opened for reading
		return notOpen, err
	}
	return fd, nil
}

// changed looks at a file after its content was sent.
func (s *source) changed(fd int, in *dir.Dir, name string, before *unix.Stat_t) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	if err := unix.Fstat(fd, st); err != nil {
		return nil, pathError("stat", in, name, err)
	}
	if st.Ctim != before.Ctim || st.Size != before.Size {
		if s.still {
			return nil, ErrChanged
		}
		s.missed++
	}
	return st, nil
}

// passOver leaves to the next pass what cannot be opened nos.
func (s *source) passOver(err error) error {
	switch {
	case s.still && (errors.Is(err, clone.ErrGone) || errors.Is(err, fs.ErrNotExist)):
		return fmt.Errorf("%w: %w", ErrChanged, err)
	case s.isGone(err):
		return nil
	case !s.still && errors.Is(err, clone.ErrLeased):
		s.leased = true
		s.missed++
		return nil
	}
	return err
}

// mounted leaves to the next pass what something is mounted on: nothing would be known of what is below. The last pass is an error.
func (s *source) mounted(in *dir.Dir, name string) error {
	if s.still {
		return clone.Mounted(in, name)
	}
	s.missed++
	return nil
}

// sourceError marks an error of a system call on the source, or what cannot be sent of that: it is not explained by the connection.
func sourceError(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) || errors.Is(err, clone.ErrEncrypted) {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	return err
}

// changedAt is ErrChanged for an entry.
func changedAt(in *dir.Dir, name string, err error) error {
	if errors.Is(err, ErrChanged) {
		return fmt.Errorf("%s/%s: %w", in, name, err)
	}
	return err
}
