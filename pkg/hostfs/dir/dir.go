// Package dir reaches the filesystem through directory handles. Every operation
// takes a handle and the name of one entry in it, and none of them follows a
// symbolic link, so a name that a client chose cannot lead out of the directory
// that the handle stands for, whoever renames what meanwhile.
//
// [os.Root] is close, but it follows links that stay inside and offers no way to
// refuse them; the directories below a pool are written by tenants, so here a link
// is always an error. It needs openat2(2), Linux 5.6.
package dir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrName reports a name that is not that of a single directory entry.
var ErrName = errors.New("not the name of a directory entry")

// ErrNotDirectory reports that the entry is a link, a file or a device where a
// directory was expected.
var ErrNotDirectory = errors.New("not a directory")

// ErrNotFile reports that the entry is a directory, a device or a pipe where a
// regular file was expected.
var ErrNotFile = errors.New("not a regular file")

// ErrLocked reports a lock that somebody else has.
var ErrLocked = errors.New("locked")

// A Dir is an open directory. It must be closed, and is not for use by several
// goroutines while it is. It is not an os.File: each call of the driver opens five or
// so, and what os.File does for files that are polled costs as much as opening them.
type Dir struct {
	fd   int
	path string // for messages only: never resolved again
	// unread says that the descriptor is good for what is below it alone (O_PATH).
	unread bool
}

// An ID tells one inode from all others while it exists: the device and inode
// numbers of stat(2).
type ID struct{ Dev, Ino uint64 }

// An Entry is a name in a directory and whether it is itself a directory.
type Entry struct {
	Name  string
	IsDir bool
}

// Open opens the directory at a path that the administrator configured: links in
// it are followed. It never makes anything.
func Open(path string) (*Dir, error) { return openPath(path, 0) }

func openPath(path string, flags int) (*Dir, error) {
	fd, err := unix.Open(path, flags|unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", path, err)
	}
	return adopt(fd, path), nil
}

// OpenLast opens the directory at an absolute path, following links on the way to its
// last element. If that is itself a link, or no directory, the answer is
// ErrNotDirectory.
func OpenLast(absolute string) (*Dir, error) {
	d, err := openPath(absolute, unix.O_NOFOLLOW)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("open %s: %w", absolute, ErrNotDirectory)
	}
	return d, err
}

// OpenParent opens the directory that holds the last element of an absolute path,
// following links on the way to it. The last element is not looked at.
func OpenParent(absolute string) (*Dir, error) {
	return Open(path.Dir(absolute))
}

func adopt(fd int, path string) *Dir { return &Dir{fd: fd, path: path} }

// HandlePath names an open descriptor as a path, for the interfaces that take
// nothing else.
func HandlePath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Fd is the descriptor, for what takes one that is not open for reading (open(2), O_PATH). It
// is valid until Close or ReadFd, and asking for it waits for nothing.
func (d *Dir) Fd() int { return d.fd }

// ReadFd is the descriptor, open for reading, as ioctl(2) wants it. It is valid until Close.
func (d *Dir) ReadFd() (int, error) {
	err := d.read()
	return d.fd, err
}

// HandlePath names this directory by its descriptor, and is valid for as long.
func (d *Dir) HandlePath() string { return HandlePath(d.Fd()) }

// String is the path that the directory was reached by.
func (d *Dir) String() string { return d.path }

// Close closes the handle. After that no operation reaches any directory.
func (d *Dir) Close() error {
	if d.fd < 0 {
		return pathError("close", d.path, fs.ErrClosed)
	}
	fd := d.fd
	d.fd = closed
	if err := unix.Close(fd); err != nil {
		return pathError("close", d.path, err)
	}
	return nil
}

// closed is a descriptor that no system call takes: AT_FDCWD is another.
const closed = -1

// Open opens a directory that lies directly in d. It answers fs.ErrNotExist, or
// ErrNotDirectory for anything else than a directory, links included.
func (d *Dir) Open(name string) (*Dir, error) { return d.open(name, 0) }

// OpenInside is Open, but answers EXDEV for a directory on which something is mounted.
func (d *Dir) OpenInside(name string) (*Dir, error) { return d.open(name, unix.RESOLVE_NO_XDEV) }

// open adds to the resolution flags of openat2(2).
func (d *Dir) open(name string, resolve uint64) (*Dir, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	fd, err := unix.Openat2(d.fd, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | resolve,
	})
	switch {
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("open %s: %w", d.join(name), ErrNotDirectory)
	case err != nil:
		return nil, d.pathError("open", name, err)
	}
	return adopt(fd, d.join(name)), nil
}

// Make makes a directory in d, with mode 0700 whatever the umask, and opens it.
func (d *Dir) Make(name string) (*Dir, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(d.fd, name, 0o700); err != nil {
		return nil, d.pathError("mkdir", name, err)
	}
	return d.Open(name)
}

// Ensure opens a directory in d, and makes it first if it is not there.
func (d *Dir) Ensure(name string) (*Dir, error) {
	made, err := d.Make(name)
	if errors.Is(err, fs.ErrExist) {
		return d.Open(name)
	}
	return made, err
}

// Chmod sets the permission bits of the directory itself, setuid, setgid and
// sticky bits included.
func (d *Dir) Chmod(mode uint32) error {
	if err := d.read(); err != nil {
		return err
	}
	if err := unix.Fchmod(d.fd, mode); err != nil {
		return pathError("chmod", d.path, err)
	}
	return nil
}

// Mode is the directory's permission bits.
func (d *Dir) Mode() (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return 0, pathError("stat", d.path, err)
	}
	return st.Mode & 0o7777, nil
}

// ID identifies the directory itself.
func (d *Dir) ID() (ID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return ID{}, pathError("stat", d.path, err)
	}
	return ID{Dev: st.Dev, Ino: st.Ino}, nil
}

// IsDir tells whether name is a directory in d. A missing entry is not an error.
func (d *Dir) IsDir(name string) (bool, error) {
	format, err := d.format(name)
	return format == unix.S_IFDIR, err
}

// Exists tells whether d has an entry of any kind with that name.
func (d *Dir) Exists(name string) (bool, error) {
	format, err := d.format(name)
	return format != 0, err
}

// format is the kind of an entry as S_IFDIR and so on; 0 if there is none.
func (d *Dir) format(name string) (uint32, error) {
	if err := checkName(name); err != nil {
		return 0, err
	}
	var st unix.Stat_t
	err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, d.pathError("stat", name, err)
	}
	return st.Mode & unix.S_IFMT, nil
}

// Entries lists the directory in no order. It reads a few at a time, so a large
// directory costs no memory, and ends at the first error.
func (d *Dir) Entries() iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		// A handle of its own: the offset of a directory belongs to the open file.
		fd, err := unnoticed(func(flags int) (int, error) {
			return unix.Openat(d.fd, ".", flags|unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		})
		if err != nil {
			yield(Entry{}, pathError("open", d.path, err))
			return
		}
		// Its name is the handle's own, so that ReadDir asks about entries of unknown type
		// through the handle, and never through the path.
		f := os.NewFile(uintptr(fd), HandlePath(fd))
		defer func() { _ = f.Close() }()
		for {
			batch, err := f.ReadDir(256)
			for _, e := range batch {
				if !yield(Entry{Name: e.Name(), IsDir: e.IsDir()}, nil) {
					return
				}
			}
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(Entry{}, pathError("read directory", d.path, err))
				return
			}
		}
	}
}

// Rename moves an entry to another directory of the same filesystem. It never
// replaces: a target that exists is fs.ErrExist.
func (d *Dir) Rename(name string, to *Dir, toName string) error {
	if err := errors.Join(checkName(name), checkName(toName)); err != nil {
		return err
	}
	err := unix.Renameat2(d.fd, name, to.fd, toName, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) {
		// NFS and some others know no flags. A directory replaces nothing but an
		// empty directory, so that looking first leaves no data at risk.
		err = renamePlain(d, name, to, toName)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: d.join(name), New: to.join(toName), Err: err}
	}
	return nil
}

func renamePlain(d *Dir, name string, to *Dir, toName string) error {
	var st unix.Stat_t
	err := unix.Fstatat(to.fd, toName, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		return unix.EEXIST
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	return unix.Renameat(d.fd, name, to.fd, toName)
}

// Remove removes a file, a link or a device. A missing one is fs.ErrNotExist.
func (d *Dir) Remove(name string) error { return d.unlink(name, 0) }

// RemoveDir removes an empty directory.
func (d *Dir) RemoveDir(name string) error { return d.unlink(name, unix.AT_REMOVEDIR) }

func (d *Dir) unlink(name string, flags int) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := unix.Unlinkat(d.fd, name, flags); err != nil {
		return d.pathError("remove", name, err)
	}
	return nil
}

// Sync makes the directory's entries durable: after a crash they are there.
func (d *Dir) Sync() error {
	if err := d.read(); err != nil {
		return err
	}
	if err := fsync(d.fd); err != nil {
		return pathError("sync", d.path, err)
	}
	return nil
}

func (d *Dir) join(name string) string { return d.path + "/" + name }

func (d *Dir) pathError(op, name string, err error) error {
	return pathError(op, d.join(name), err)
}

func pathError(op, path string, err error) error {
	return &fs.PathError{Op: op, Path: path, Err: err}
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%q: %w", name, ErrName)
	}
	return nil
}

// Touch sets the directory's times to now.
func (d *Dir) Touch() error {
	now := time.Now()
	return os.Chtimes(d.HandlePath(), now, now)
}

// Modified is when an entry of the directory last changed, or Touch was called.
func (d *Dir) Modified() (time.Time, error) {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return time.Time{}, pathError("stat", d.path, err)
	}
	return time.Unix(st.Mtim.Unix()), nil
}

// Changed is when the entry of that name last changed: its content, its mode, or its
// place (st_ctime). A missing one is fs.ErrNotExist.
func (d *Dir) Changed(name string) (time.Time, error) {
	if err := checkName(name); err != nil {
		return time.Time{}, err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return time.Time{}, d.pathError("stat", name, err)
	}
	return time.Unix(st.Ctim.Unix()), nil
}
