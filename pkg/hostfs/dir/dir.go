// Package dir reaches the filesystem through directory handles. Every operation
// takes a handle and the name of one entry in it, and none of them follows a
// symbolic link. So a name that a client chose cannot lead out of the handle's
// directory, even if files are renamed at the same time.
//
// [os.Root] is close, but it follows links that stay inside and offers no way to
// refuse them. Tenants write to the directories below a pool, so here a link is always
// an error. The package needs openat2(2), Linux 5.6.
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

// ErrName reports a name that is not a single path element.
var ErrName = errors.New("not the name of a directory entry")

// ErrNotDirectory reports that the entry is a link, a file or a device where a
// directory was expected.
var ErrNotDirectory = errors.New("not a directory")

// IsMissing reports whether an error says that there is no such directory: the name does not
// exist, or is not a directory.
func IsMissing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNotDirectory)
}

// ErrNotFile reports that the entry is a directory, a device or a pipe where a
// regular file was expected.
var ErrNotFile = errors.New("not a regular file")

// ErrMoved reports a directory that is not in the one where it was.
var ErrMoved = errors.New("the directory was moved meanwhile")

// ErrTooLarge reports a file larger than the limit given.
var ErrTooLarge = errors.New("file too large")

// ErrLocked reports a lock that another process or handle holds.
var ErrLocked = errors.New("locked")

// A Dir is an open directory. It must be closed, and not while another goroutine uses it.
// It is not an os.File: each call of the driver opens about five, and registering them with
// the runtime's poller costs as much as opening them.
type Dir struct {
	fd   int
	path string // for messages only: never resolved again. See maxPath
	// unread: the descriptor is O_PATH, so it serves only for lookups below it.
	unread bool
}

// An ID identifies an inode as long as it exists: the device and inode numbers
// of stat(2).
type ID struct{ Dev, Ino uint64 }

// MayBe reports whether an inode may be another one, seen through a filesystem of no disk that was mounted anew: it has its number
// there.
func (id ID) MayBe(other ID) bool {
	return id == other || id.Ino == other.Ino && unix.Major(id.Dev) == 0 && unix.Major(other.Dev) == 0
}

// String is the form that ParseID reads.
func (id ID) String() string { return fmt.Sprintf("%d:%d", id.Dev, id.Ino) }

// ParseID reads an ID of the running system.
func ParseID(s string) (id ID, err error) {
	dev, ino, _ := strings.Cut(s, ":")
	if id.Dev, err = strconv.ParseUint(dev, 10, 64); err != nil {
		return ID{}, err
	}
	if id.Ino, err = strconv.ParseUint(ino, 10, 64); err != nil {
		return ID{}, err
	}
	return id, nil
}

// An Entry is a name in a directory and whether it is itself a directory.
type Entry struct {
	Name  string
	IsDir bool
}

// Open opens the directory at a path that the administrator configured: links in
// it are followed. It never creates anything.
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
// following links on the way to it. The last element is not checked. The directory is opened
// for reading only when an operation needs it, as by OpenCached.
func OpenParent(absolute string) (*Dir, error) {
	d, err := openPath(path.Dir(absolute), unix.O_PATH)
	if err == nil {
		d.unread = true
	}
	return d, err
}

func adopt(fd int, path string) *Dir { return &Dir{fd: fd, path: path} }

// HandlePath returns a path to an open descriptor, for interfaces that take only
// paths.
func HandlePath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Fd is the descriptor, for system calls that accept O_PATH (open(2)). It is valid until
// Close or ReadFd, and never blocks.
func (d *Dir) Fd() int { return d.fd }

// ReadFd is the descriptor, open for reading, as ioctl(2) wants it. It is valid until Close.
func (d *Dir) ReadFd() (int, error) {
	err := d.read()
	return d.fd, err
}

// HandlePath returns a path to this directory by its descriptor, valid until Close.
func (d *Dir) HandlePath() string { return HandlePath(d.Fd()) }

// String is the path that the directory was opened by.
func (d *Dir) String() string { return d.path }

// Seen is the path at which the kernel has a directory now, without links, for this process. What is mounted
// over a directory has the same one.
func Seen(d *Dir) (string, error) { return os.Readlink(d.HandlePath()) }

// Close closes the handle. All later operations fail with EBADF.
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

// closed is a descriptor that every system call refuses. It must differ from AT_FDCWD.
const closed = -1

// Open opens a directory that lies directly in d. It returns fs.ErrNotExist, or
// ErrNotDirectory for anything but a directory, links included.
func (d *Dir) Open(name string) (*Dir, error) { return openIn(d, name, 0) }

// OpenInside is Open, but returns EXDEV for a mount point.
func (d *Dir) OpenInside(name string) (*Dir, error) { return openIn(d, name, unix.RESOLVE_NO_XDEV) }

// openIn takes additional resolution flags of openat2(2).
func openIn(d *Dir, name string, resolve uint64) (*Dir, error) {
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

// Make creates a directory in d, with mode 0700 regardless of the umask, and opens it.
func (d *Dir) Make(name string) (*Dir, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(d.fd, name, 0o700); err != nil {
		return nil, d.pathError("mkdir", name, err)
	}
	return d.Open(name)
}

// Ensure opens a directory in d, and creates it first if it is missing.
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
	st, err := stat(d)
	return st.Mode & 0o7777, err
}

// ID identifies the directory itself.
func (d *Dir) ID() (ID, error) {
	st, err := stat(d)
	return ID{Dev: st.Dev, Ino: st.Ino}, err
}

func stat(d *Dir) (st unix.Stat_t, err error) {
	if err = unix.Fstat(d.fd, &st); err != nil {
		err = pathError("stat", d.path, err)
	}
	return st, err
}

// statOf is stat for an entry.
func statOf(d *Dir, name string) (st unix.Stat_t, err error) {
	if err = checkName(name); err != nil {
		return st, err
	}
	if err = unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		err = d.pathError("stat", name, err)
	}
	return st, err
}

// Same reports whether two handles refer to the same directory.
func Same(d, other *Dir) (bool, error) {
	id, err := d.ID()
	if err != nil {
		return false, err
	}
	otherID, err := other.ID()
	return id == otherID, err
}

// SameMount reports whether both are reached through the same mount. Between two mounts rename(2) and
// link(2) fail with EXDEV, even if they are of one filesystem.
func SameMount(d, other *Dir) (bool, error) {
	var ids [2]uint64
	for i, at := range []*Dir{d, other} {
		var st unix.Statx_t
		// Linux 5.8.
		if err := unix.Statx(at.fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
			return false, pathError("statx", at.path, err)
		}
		ids[i] = st.Mnt_id
	}
	return ids[0] == ids[1], nil
}

// IsDir reports whether name is a directory in d. A missing entry is not an error.
func (d *Dir) IsDir(name string) (bool, error) {
	format, err := formatOf(d, name)
	return format == unix.S_IFDIR, err
}

// Exists reports whether d has an entry of any kind with that name.
func (d *Dir) Exists(name string) (bool, error) {
	format, err := formatOf(d, name)
	return format != 0, err
}

// formatOf is the file type of an entry (S_IFDIR and so on); 0 if it is missing.
func formatOf(d *Dir, name string) (uint32, error) {
	st, err := statOf(d, name)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	return st.Mode & unix.S_IFMT, err
}

// Entries lists the directory in no particular order. It reads a few entries at a time, so a
// large directory costs no memory. It stops at the first error.
func (d *Dir) Entries() iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		// Reopen: the read offset belongs to the open file, and d may be listed twice at once.
		fd, err := openNoAtime(func(flags int) (int, error) {
			return unix.Openat(d.fd, ".", flags|unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		})
		if err != nil {
			yield(Entry{}, pathError("open", d.path, err))
			return
		}
		// Named by its descriptor, so that ReadDir stats entries of unknown type through the
		// handle and never through the path.
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
			var cause *fs.PathError // has the number of the descriptor, another one each time
			if errors.As(err, &cause) {
				err = cause.Err
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
		// NFS and some others do not support RENAME_NOREPLACE. A directory can only replace an
		// empty directory, so a check before the rename puts no data at risk.
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

// Remove removes a file, a link or a device. It returns fs.ErrNotExist if there is none.
func (d *Dir) Remove(name string) error { return unlink(d, name, 0) }

// RemoveDir removes an empty directory.
func (d *Dir) RemoveDir(name string) error { return unlink(d, name, unix.AT_REMOVEDIR) }

func unlink(d *Dir, name string, flags int) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := unix.Unlinkat(d.fd, name, flags); err != nil {
		return d.pathError("remove", name, err)
	}
	return nil
}

// Sync makes the directory's entries survive a crash (fsync(2)).
func (d *Dir) Sync() error {
	if err := d.read(); err != nil {
		return err
	}
	if err := fsync(d.fd); err != nil {
		return pathError("sync", d.path, err)
	}
	return nil
}

// maxPath bounds the paths in messages, in bytes: each directory of a tower has one, and tenants build towers. Of a
// longer path the middle is left out.
const maxPath = 1024

func (d *Dir) join(name string) string {
	head := d.path
	if len(head)+1+len(name) > maxPath {
		head = head[:min(len(head), maxPath/2)]
		head = head[:max(strings.LastIndexByte(head, '/'), 0)] + "/..."
	}
	return head + "/" + name
}

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

// Touch sets the times of an entry to now, by the clock of this process.
func Touch(d *Dir, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	now := unix.NsecToTimespec(time.Now().UnixNano())
	if err := unix.UtimesNanoAt(d.fd, name, []unix.Timespec{now, now}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return d.pathError("touch", name, err)
	}
	return nil
}

// Modified is the time of the last change of an entry in the directory, or of Touch (st_mtime).
func Modified(d *Dir) (time.Time, error) {
	st, err := stat(d)
	return time.Unix(st.Mtim.Unix()), err
}

// Changed is the time of the last change of an entry: its content, mode or
// name (st_ctime). It returns fs.ErrNotExist if there is none.
func Changed(d *Dir, name string) (time.Time, error) {
	st, err := statOf(d, name)
	return time.Unix(st.Ctim.Unix()), err
}
