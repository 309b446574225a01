package dir

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tempPrefix marks a file that is being written. Volume ids never start with a dot,
// so the name cannot collide with a record.
const tempPrefix = ".new-"

// WriteFile replaces or creates a file. After a crash at any point it holds either the old
// content or all of data: temporary file, fsync, rename, fsync of the directory (rename(2),
// fsync(2)).
func (d *Dir) WriteFile(name string, data []byte) (err error) {
	if err := checkName(name); err != nil {
		return err
	}
	temp := tempPrefix + name
	// Remove what a crash left.
	if err := d.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeNew(d, temp, data); err != nil {
		return errors.Join(err, ignoreNotExist(d.Remove(temp)))
	}
	if err := d.Replace(temp, name); err != nil {
		return errors.Join(err, ignoreNotExist(d.Remove(temp)))
	}
	return nil
}

// Replace has a file take the place of another, durably. That needs no block.
func (d *Dir) Replace(with, name string) error {
	if err := errors.Join(checkName(with), checkName(name)); err != nil {
		return err
	}
	if err := unix.Renameat(d.fd, with, d.fd, name); err != nil {
		return d.pathError("replace", name, err)
	}
	return d.Sync()
}

func writeNew(d *Dir, name string, data []byte) (err error) {
	fd, err := openFd(d, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := unix.Close(fd); err == nil && closeErr != nil {
			err = d.pathError("close", name, closeErr)
		}
	}()
	if err := writeAll(fd, data); err != nil {
		return d.pathError("write", name, err)
	}
	if err := fsync(fd); err != nil {
		return d.pathError("sync", name, err)
	}
	return nil
}

func writeAll(fd int, data []byte) error {
	for len(data) > 0 {
		n, err := unix.Write(fd, data)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// fsync is fsync(2), repeated on EINTR, which some filesystems return.
func fsync(fd int) error {
	for {
		if err := unix.Fsync(fd); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Temporary reports whether a name is that of a temporary file of WriteFile, and the name
// it was to get.
func Temporary(name string) (to string, is bool) {
	to, is = strings.CutPrefix(name, tempPrefix)
	return to, is && to != ""
}

// ReadFile reads a regular file of at most limit bytes. It returns ErrNotFile or ErrTooLarge for
// anything else.
func (d *Dir) ReadFile(name string, limit int64) ([]byte, error) {
	return readFile(d, name, limit, 0, readFull)
}

// ReadFileIn is ReadFile in a directory of d, which is not opened for it.
func ReadFileIn(d *Dir, sub, name string, limit int64) ([]byte, error) {
	if err := cmp.Or(checkName(sub), checkName(name)); err != nil {
		return nil, err
	}
	return readBelow(d, sub+"/"+name, limit, 0, readFull)
}

// readFile takes additional resolution flags of openat2(2).
func readFile(d *Dir, name string, limit int64, resolve uint64, read func(fd int, data []byte) error) ([]byte, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return readBelow(d, name, limit, resolve, read)
}

func readBelow(d *Dir, name string, limit int64, resolve uint64, read func(fd int, data []byte) error) ([]byte, error) {
	// Not an os.File: each call reads two small files, and making an os.File costs more than that.
	fd, size, err := openRegular(d, name, resolve)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading: nothing to lose
	if size > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, limit %d", d.join(name), ErrTooLarge, size, limit)
	}
	data := make([]byte, size)
	if err := read(fd, data); err != nil {
		return nil, fmt.Errorf("read %s: %w", d.join(name), err)
	}
	return data, nil
}

func readFull(fd int, data []byte) error {
	for len(data) > 0 {
		n, err := unix.Read(fd, data)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		default:
			data = data[n:]
		}
	}
	return nil
}

// directUnit is the alignment of AskDisk's direct IO, in bytes. Disks with larger logical
// blocks refuse it.
const directUnit = 4096

// AskDisk reads the start of a file past the page cache: it returns when the disk, or the
// server, answered, with the disk's error. The data may still come from memory if the
// filesystem does not support direct IO of this size, or stores the file in its metadata, as
// btrfs does with small files.
func AskDisk(d *Dir, name string) error { return askDisk(d, name, directUnit) }

func askDisk(d *Dir, name string, unit int) error {
	f, err := d.OpenNode(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_DIRECT)
	if err == nil {
		err = readBegin(d, f, name, unit)
	}
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	if f, err = d.OpenFile(name); err != nil {
		return err
	}
	return readBegin(d, f, name, unit)
}

// readBegin reads that many bytes into memory aligned to the same size, and closes the file.
func readBegin(d *Dir, f *os.File, name string, unit int) error {
	defer func() { _ = f.Close() }() // opened for reading: nothing to lose
	memory := make([]byte, 2*unit)
	from := unit - int(uintptr(unsafe.Pointer(&memory[0]))%uintptr(unit))
	if _, err := f.ReadAt(memory[from:from+unit], 0); err != nil && !errors.Is(err, io.EOF) {
		return d.pathError("read", name, errors.Unwrap(err))
	}
	return nil
}

// MakeFile creates an empty regular file in d, with mode 0600, and opens it for
// reading and writing. It returns fs.ErrExist if the name exists.
func (d *Dir) MakeFile(name string) (*os.File, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return openFile(d, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
}

// OpenFile opens a regular file of d for reading. It returns ErrNotFile for anything else,
// links included.
func (d *Dir) OpenFile(name string) (*os.File, error) { return openAnyones(d, name, 0) }

// FileID identifies a regular file of d, and does not open it. It returns ErrNotFile for anything else, links included.
func FileID(d *Dir, name string) (ID, error) {
	st, err := statOf(d, name)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = d.pathError("stat", name, ErrNotFile)
	}
	if err != nil {
		return ID{}, err
	}
	return ID{Dev: st.Dev, Ino: st.Ino}, nil
}

// openAnyones is OpenFile with resolution flags of openat2(2). A process that writes to the directory may put a
// device in the file's place at any time, and opening one can do harm: so the entry itself is opened
// first, which has no effect (open(2), O_PATH).
func openAnyones(d *Dir, name string, resolve uint64) (*os.File, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	node, err := openFd(d, name, unix.O_PATH, resolve)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(node) }()
	_, err = sizeOfRegular(node)
	fd := -1
	if err == nil {
		fd, err = openNoAtime(func(flags int) (int, error) {
			// O_NONBLOCK: the holder of a write lease would have the caller wait (fcntl(2), F_SETLEASE).
			return unix.Open(HandlePath(node), flags|unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		})
	}
	if err != nil {
		return nil, d.pathError("open", name, err)
	}
	return os.NewFile(uintptr(fd), d.join(name)), nil
}

// openNoAtime opens an entry with O_NOATIME: the data may be cached, but updating the access
// time can wait for the disk, for example when the journal is full or being written. Without
// ownership or CAP_FOWNER the kernel refuses O_NOATIME (open(2)), and the entry is opened
// without it.
func openNoAtime(open func(flags int) (int, error)) (int, error) {
	fd, err := open(unix.O_NOATIME)
	if errors.Is(err, unix.EPERM) {
		return open(0)
	}
	return fd, err
}

// openRegular opens a regular file of the driver's own, with resolution flags of openat2(2), in one step; it also returns
// the size in bytes.
func openRegular(d *Dir, name string, resolve uint64) (fd int, size int64, err error) {
	// O_NONBLOCK: a FIFO of that name must not block the caller.
	fd, err = openNoAtime(func(flags int) (int, error) {
		return openFd(d, name, uint64(flags|unix.O_RDONLY|unix.O_NONBLOCK), resolve)
	})
	// A link, or a socket or a device without a driver.
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		err = fmt.Errorf("%w: %w", ErrNotFile, err)
	}
	if err != nil {
		return 0, 0, err
	}
	if size, err = sizeOfRegular(fd); err != nil {
		return 0, 0, errors.Join(fmt.Errorf("open %s: %w", d.join(name), err), unix.Close(fd))
	}
	return fd, size, nil
}

func sizeOfRegular(fd int) (int64, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = ErrNotFile
	}
	return st.Size, err
}

// OpenNode opens an entry of any kind, but never follows a link. The flags are
// those of open(2); with unix.O_PATH a device or pipe itself is not opened.
func (d *Dir) OpenNode(name string, flags int) (*os.File, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return openFile(d, name, uint64(flags))
}

// Lock takes an exclusive lock on a file in d, which it creates if missing. It waits until
// ctx ends. The lock belongs to the open file (fcntl(2), F_OFD_SETLK): it excludes other
// nodes if the filesystem propagates locks, and ends with the process.
//
// The kernel's own wait (F_OFD_SETLKW) can only be ended by a signal, so Lock polls. The order
// of waiters is not kept.
func Lock(ctx context.Context, d *Dir, name string) (unlock func(), err error) {
	return lock(d, unix.F_WRLCK, name, unix.O_CREAT, 0, 0, func(try func() error) error { return retry(ctx, try) })
}

// LockShared is Lock, but takes a lock that others may have too as long as each takes it by LockShared.
func LockShared(ctx context.Context, d *Dir, name string) (unlock func(), err error) {
	return lock(d, unix.F_RDLCK, name, unix.O_CREAT, 0, 0, func(try func() error) error { return retry(ctx, try) })
}

// LockByte is Lock for a single byte of the file, which may lie beyond its end. Locks on other
// bytes do not conflict.
func LockByte(ctx context.Context, d *Dir, name string, at int64) (unlock func(), err error) {
	return lock(d, unix.F_WRLCK, name, unix.O_CREAT, at, 1, func(try func() error) error { return retry(ctx, try) })
}

// TryLockByte is LockByte, but returns ErrLocked instead of waiting.
func TryLockByte(d *Dir, name string, at int64) (unlock func(), err error) {
	return lock(d, unix.F_WRLCK, name, unix.O_CREAT, at, 1, func(try func() error) error { return try() })
}

// TryShareByte is TryLockByte, but takes a lock that others may have too as long as each takes it by TryShareByte.
func TryShareByte(d *Dir, name string, at int64) (unlock func(), err error) {
	return lock(d, unix.F_RDLCK, name, unix.O_CREAT, at, 1, func(try func() error) error { return try() })
}

// TryLockExisting is TryLockByte for a file that must be there already.
func TryLockExisting(d *Dir, name string, at int64) (unlock func(), err error) {
	return lock(d, unix.F_WRLCK, name, 0, at, 1, func(try func() error) error { return try() })
}

// TryLockDir takes flock(2) of the directory itself, which needs no file, or returns ErrLocked. Locks of files in it do
// not conflict.
func TryLockDir(d *Dir) (unlock func(), err error) {
	return lockDir(d, func(try func() error) error { return try() })
}

// LockDir is TryLockDir that waits until ctx ends, as Lock does.
func LockDir(ctx context.Context, d *Dir) (unlock func(), err error) {
	return lockDir(d, func(try func() error) error { return retry(ctx, try) })
}

func lockDir(d *Dir, take func(try func() error) error) (unlock func(), err error) {
	own, err := d.Reopen() // the lock belongs to the descriptor
	if err != nil {
		return nil, err
	}
	if err := take(func() error { return tryFlock(own.fd) }); err != nil {
		return nil, errors.Join(pathError("lock", d.path, err), own.Close())
	}
	return func() { _ = own.Close() }, nil
}

func tryFlock(fd int) error {
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return ErrLocked
	}
	return err
}

// Rewrite replaces what a file holds, in place: a reader may see anything in between, and so
// may the next start after a crash. It makes no file, and syncs nothing. What cannot be written for want
// of space leaves no hole in its place.
func Rewrite(d *Dir, name string, data []byte) error {
	if err := checkName(name); err != nil {
		return err
	}
	f, err := openFile(d, name, unix.O_WRONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(data, 0); err == nil {
		err = f.Truncate(int64(len(data)))
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("rewrite %s: %w", d.join(name), err)
	}
	return nil
}

// lock opens a file with additional flags, and locks length bytes of it, or all if length is 0: by F_WRLCK, or F_RDLCK for a lock that
// others may have too.
func lock(d *Dir, kind int16, name string, flags uint64, start, length int64, take func(try func() error) error) (unlock func(), err error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	f, err := openFile(d, name, unix.O_RDWR|flags)
	if err != nil {
		return nil, err
	}
	if err := take(func() error { return tryLock(f, kind, start, length) }); err != nil {
		return nil, errors.Join(d.pathError("lock", name, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

func tryLock(f *os.File, kind int16, start, length int64) error {
	what := unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: start, Len: length}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &what)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINTR) {
		return ErrLocked
	}
	return err
}

// The pauses between attempts double: a lock held for long costs little CPU, and one held
// briefly is taken soon.
const (
	shortestPause = time.Millisecond
	longestPause  = 64 * time.Millisecond
)

func retry(ctx context.Context, try func() error) error {
	for pause := shortestPause; ; pause = min(2*pause, longestPause) {
		err := try()
		if !errors.Is(err, ErrLocked) {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

func openFile(d *Dir, name string, flags uint64) (*os.File, error) {
	fd, err := openFd(d, name, flags, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), d.join(name)), nil
}

func openFd(d *Dir, name string, flags, resolve uint64) (int, error) {
	how := &unix.OpenHow{
		Flags:   flags | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | resolve,
	}
	if flags&unix.O_CREAT != 0 {
		how.Mode = 0o600
	}
	fd, err := unix.Openat2(d.fd, name, how)
	if err != nil {
		return 0, d.pathError("open", name, err)
	}
	return fd, nil
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
