package clone

import (
	"context"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// While those who write stand still, what is copied is kept in memory up to these bounds, and written once they go on: Linux has who writes
// to a disk wait for what others have written to it (balance_dirty_pages), in memory as well.
const (
	laterBytes = 32 << 20
	laterFiles = 256
)

// laterWrites is what copies have still to get. The zero value has nothing.
type laterWrites struct {
	files []*laterFile
	bytes int
}

// A laterFile is a copy, which is open for writing.
type laterFile struct {
	fd    int
	path  string
	times []unix.Timespec
	parts []part
}

type part struct {
	at   int64
	data []byte
}

// room is how many bytes more can be kept for a file.
func (l *laterWrites) room(fd int) int {
	if l.of(fd) == nil && len(l.files) == laterFiles {
		return 0
	}
	return laterBytes - l.bytes
}

// of is what is kept for the file that was opened last; nil if nothing is.
func (l *laterWrites) of(fd int) *laterFile {
	if n := len(l.files); n > 0 && l.files[n-1].fd == fd {
		return l.files[n-1]
	}
	return nil
}

// add takes over data, for which there is room.
func (l *laterWrites) add(fd int, data []byte, at int64) {
	if l.of(fd) == nil {
		l.files = append(l.files, &laterFile{fd: fd})
	}
	f := l.of(fd)
	f.parts = append(f.parts, part{at, data})
	l.bytes += len(data)
}

// drop forgets a file that could not be copied.
func (l *laterWrites) drop(fd int) {
	if f := l.of(fd); f != nil {
		for _, p := range f.parts {
			l.bytes -= len(p.data)
		}
		l.files = l.files[:len(l.files)-1]
	}
}

// settle has a copy that is complete but for what is kept of it be closed later, and reports whether there is anything.
func (l *laterWrites) settle(fd int, path string, st *unix.Stat_t) bool {
	f := l.of(fd)
	if f != nil {
		f.path, f.times = path, timesOf(st)
	}
	return f != nil
}

// write gives all copies what was kept for them, and closes them.
func (l *laterWrites) write(ctx context.Context) error {
	var err error
	for _, f := range l.files {
		if err == nil {
			err = f.write(ctx)
		}
		if closeErr := unix.Close(f.fd); err == nil && closeErr != nil {
			err = f.wrap("close", closeErr)
		}
	}
	*l = laterWrites{}
	return err
}

// close closes all copies, which are given up.
func (l *laterWrites) close() {
	for _, f := range l.files {
		_ = unix.Close(f.fd)
	}
	*l = laterWrites{}
}

func (f *laterFile) write(ctx context.Context) error {
	for _, p := range f.parts {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := writeAt(f.fd, p.data, p.at); err != nil {
			return f.wrap("write", err)
		}
	}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, dir.HandlePath(f.fd), f.times, 0); err != nil {
		return f.wrap("utimens", err)
	}
	return nil
}

func (f *laterFile) wrap(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.path, Err: err}
}
