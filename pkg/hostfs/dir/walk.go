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

// Walk visits everything below d; a directory comes after its content, otherwise the order is
// undefined. It calls file for each entry that is not a directory, with the directory that
// holds it, and directory for each directory; the handles are open during the call. It follows
// no links and skips mount points. Entries that appear or vanish meanwhile may be skipped.
// Walk stops at the first error.
//
// It holds a bounded number of handles, and remembers 24 bytes of each directory above those,
// which it reopens as ".." of its child. If that is another directory by then, because a process
// moved directories, Walk fails with ErrMoved before it reads anything there.
func Walk(d *Dir, file func(in *Dir, name string) error, directory func(*Dir) error) error {
	return Visit(d, visitor{file, directory})
}

// A Visitor is called by [Visit]. The handles are open during the call.
// The first error stops the visit.
type Visitor interface {
	// File is called for an entry that is not a directory.
	File(in *Dir, name string) error
	// Enter is called for a directory before its content: d is the entry of that name.
	Enter(d, in *Dir, name string) error
	// Leave is called for a directory after its content.
	Leave(d *Dir) error
}

// A MountVisitor is a Visitor that wants to know of directories that are skipped because something is mounted on them.
type MountVisitor interface {
	Visitor
	// Mount is called for each.
	Mount(in *Dir, name string) error
}

type visitor struct {
	file  func(in *Dir, name string) error
	leave func(*Dir) error
}

func (v visitor) File(in *Dir, name string) error { return v.file(in, name) }
func (v visitor) Enter(_, _ *Dir, _ string) error { return nil }
func (v visitor) Leave(d *Dir) error              { return v.leave(d) }

// Visit is Walk for a visitor that is also called for each directory before its content.
// Enter and Leave are called in pairs for the directories below d, not for d itself.
func Visit(d *Dir, v Visitor) error {
	root, err := d.Reopen()
	if err != nil {
		return err
	}
	keepAtime(root)
	w := walker{root: d.path, visitor: v, open: []*reader{{dir: root}}}
	err = w.walk()
	return errors.Join(err, w.close())
}

// Reopen opens the directory once more: the handle has a read offset of its own, and can be
// closed alone.
func (d *Dir) Reopen() (*Dir, error) {
	fd, err := unix.Openat(d.Fd(), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", d.path, err)
	}
	return adopt(fd, d.path), nil
}

// keepAtime has reading a directory not change when it was last read: that is a write, which may wait for the log of the filesystem. Only its
// owner and those with CAP_FOWNER can have that.
func keepAtime(d *Dir) { _, _ = unix.FcntlInt(uintptr(d.fd), unix.F_SETFL, unix.O_NOATIME) }

type walker struct {
	root    string // for messages
	visitor Visitor

	open  []*reader  // the directory being read, last, and those above it
	above []position // those above these, from the root down
}

// A position is where reading a directory continues.
type position struct {
	id     ID
	offset int64
}

func (w *walker) walk() error {
	for len(w.open) > 0 {
		at := w.open[len(w.open)-1]
		entry, err := at.next()
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ENOENT) && !w.atRoot():
			// ENOENT: the directory was removed meanwhile, so that nothing is in it (getdents(2)).
			err = w.up()
		case err != nil:
			err = pathError("read directory", at.dir.path, err)
		case entry.IsDir:
			err = w.down(at.dir, entry.Name)
		default:
			err = w.visitor.File(at.dir, entry.Name)
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
	case errors.Is(err, ErrNotDirectory): // replaced meanwhile
		return w.visitor.File(in, name)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.EXDEV):
		if v, ok := w.visitor.(MountVisitor); ok {
			return v.Mount(in, name)
		}
		return nil
	case err != nil:
		return err
	}
	keepAtime(sub)
	// Storing the whole path of each directory would take quadratic memory.
	sub.path = w.root + "/.../" + name
	if err := w.visitor.Enter(sub, in, name); err != nil {
		return errors.Join(err, sub.Close())
	}
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

func (w *walker) atRoot() bool { return len(w.open) == 1 && len(w.above) == 0 }

// up closes the directory being read, once it has no more entries.
func (w *walker) up() error {
	last := len(w.open) - 1
	done := w.open[last].dir
	isRoot := w.atRoot()
	w.open = w.open[:last]
	var err error
	if last == 0 && !isRoot {
		err = w.reopen(done)
	}
	if err == nil && !isRoot {
		err = w.visitor.Leave(done)
	}
	return errors.Join(err, done.Close())
}

// reopen reopens the parent of a directory.
func (w *walker) reopen(child *Dir) error {
	last := len(w.above) - 1
	at := w.above[last]
	w.above = w.above[:last]
	parent, err := Parent(child, at.id)
	if err != nil {
		return err
	}
	keepAtime(parent)
	w.open = append(w.open, &reader{dir: parent, offset: at.offset})
	if _, err := unix.Seek(parent.fd, at.offset, io.SeekStart); err != nil {
		return pathError("seek", parent.path, err)
	}
	return nil
}

// Parent opens the directory that holds d. If that is not the expected one, since a process
// moved d, it returns ErrMoved.
func Parent(d *Dir, expected ID) (*Dir, error) {
	fd, err := unix.Openat2(d.Fd(), "..", &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, d.pathError("open", "..", err)
	}
	parent := adopt(fd, d.join(".."))
	id, err := parent.ID()
	if err == nil && id != expected {
		err = fmt.Errorf("%s: %w", d, ErrMoved)
	}
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	return parent, nil
}

func (w *walker) close() error {
	var all []error
	for _, r := range w.open {
		all = append(all, r.dir.Close())
	}
	return errors.Join(all...)
}

// A reader reads a directory and knows its offset, so that another handle can continue; os.File
// does not offer that.
type reader struct {
	dir    *Dir
	offset int64 // after the last entry read
	unread []byte
}

// next returns io.EOF after the last entry.
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
