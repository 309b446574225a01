package dir

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"
)

// Walk goes over all that lies below d, in no order but this: a directory comes after what
// it holds. It calls file for what is no directory, with the directory that has it, and
// directory for the others; the handles are open during the call. It follows no link, and
// leaves out directories on which something is mounted. What appears or goes meanwhile may be left out or not.
// The first error ends it.
//
// It holds a bounded number of handles, and remembers 24 bytes of each directory above those.
// Such a one it finds again as the parent of the one it comes from. If that is another by then,
// since somebody moved directories, the walk ends with an error, before anything is read there.
func (d *Dir) Walk(file func(in *Dir, name string) error, directory func(*Dir) error) error {
	fd, err := unix.Openat(d.Fd(), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return pathError("open", d.path, err)
	}
	w := walker{root: d.path, file: file, directory: directory, open: []*reader{{dir: adopt(fd, d.path)}}}
	err = w.walk()
	return errors.Join(err, w.close())
}

type walker struct {
	root      string // for messages
	file      func(in *Dir, name string) error
	directory func(*Dir) error

	open  []*reader  // the directory that is read, last, and those above it
	above []position // those above these, from the root down
}

// A position is where the reading of a directory goes on.
type position struct {
	id     ID
	offset int64
}

func (w *walker) walk() error {
	for len(w.open) > 0 {
		at := w.open[len(w.open)-1]
		entry, err := at.next()
		switch {
		case errors.Is(err, io.EOF):
			err = w.up()
		case err != nil:
			err = pathError("read directory", at.dir.path, err)
		case entry.IsDir:
			err = w.down(at.dir, entry.Name)
		default:
			err = w.file(at.dir, entry.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) down(in *Dir, name string) error {
	sub, err := in.OpenInside(name)
	switch {
	case errors.Is(err, ErrNotDirectory): // by now
		return w.file(in, name)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EXDEV):
		return nil
	case err != nil:
		return err
	}
	// The whole path of each directory of a tower would be the square of it.
	sub.path = w.root + "/.../" + name
	w.open = append(w.open, &reader{dir: sub})
	if len(w.open) > maxDepth {
		return w.closeFirst()
	}
	return nil
}

func (w *walker) closeFirst() error {
	first := w.open[0]
	w.open = slices.Delete(w.open, 0, 1)
	id, err := first.dir.ID()
	w.above = append(w.above, position{id, first.offset})
	return errors.Join(err, first.dir.Close())
}

// up leaves the directory that is read, which is at its end.
func (w *walker) up() error {
	last := len(w.open) - 1
	done := w.open[last].dir
	w.open = w.open[:last]
	isRoot := last == 0 && len(w.above) == 0
	var err error
	if last == 0 && !isRoot {
		err = w.reopen(done)
	}
	if err == nil && !isRoot {
		err = w.directory(done)
	}
	return errors.Join(err, done.Close())
}

// reopen opens the parent of a directory again.
func (w *walker) reopen(child *Dir) error {
	last := len(w.above) - 1
	at := w.above[last]
	w.above = w.above[:last]
	fd, err := unix.Openat2(child.Fd(), "..", &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return child.pathError("open", "..", err)
	}
	parent := adopt(fd, child.path+"/..")
	w.open = append(w.open, &reader{dir: parent, offset: at.offset})
	id, err := parent.ID()
	if err == nil && id != at.id {
		err = fmt.Errorf("%s was moved meanwhile", child)
	}
	if err != nil {
		return err
	}
	if _, err := unix.Seek(fd, at.offset, io.SeekStart); err != nil {
		return pathError("seek", parent.path, err)
	}
	return nil
}

func (w *walker) close() error {
	var all []error
	for _, r := range w.open {
		all = append(all, r.dir.Close())
	}
	return errors.Join(all...)
}

// A reader reads a directory so that another handle can go on where it ended, which os.File
// does not offer.
type reader struct {
	dir    *Dir
	offset int64 // behind the last entry
	unread []byte
}

// next answers io.EOF after the last entry.
func (r *reader) next() (Entry, error) {
	for {
		if len(r.unread) == 0 {
			if err := r.fill(); err != nil {
				return Entry{}, err
			}
		}
		// struct linux_dirent64 of getdents64(2).
		raw := r.unread[:binary.NativeEndian.Uint16(r.unread[16:])]
		r.unread = r.unread[len(raw):]
		r.offset = int64(binary.NativeEndian.Uint64(raw[8:]))
		name, _, _ := bytes.Cut(raw[19:], []byte{0})
		entry := Entry{Name: string(name), IsDir: raw[18] == unix.DT_DIR}
		if entry.Name == "." || entry.Name == ".." {
			continue
		}
		var err error
		if raw[18] == unix.DT_UNKNOWN {
			entry.IsDir, err = r.dir.IsDir(entry.Name)
		}
		return entry, err
	}
}

func (r *reader) fill() error {
	buffer := make([]byte, 4096)
	fd, err := r.dir.ReadFd()
	if err != nil {
		return err
	}
	n, err := unix.ReadDirent(fd, buffer)
	if err == nil && n == 0 {
		err = io.EOF
	}
	r.unread = buffer[:max(n, 0)]
	return err
}
