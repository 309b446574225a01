package dir

import (
	"io"

	"golang.org/x/sys/unix"
)

// resolveCached is RESOLVE_CACHED of linux/openat2.h: what is not in memory is EAGAIN, so
// that a caller who must not wait knows that others have to (Linux 5.12).
const resolveCached = 0x20

// OpenCached is Open as far as that can be done without waiting for the disk; anything else
// is an error. On a filesystem that is not Cached it may wait all the same.
//
// The directory itself is not opened for reading before it is asked for what takes that:
// some filesystems take a lock then that is held by who waits for the disk.
func OpenCached(path string) (*Dir, error) {
	return openCached(unix.AT_FDCWD, path, path, unix.OpenHow{Resolve: resolveCached})
}

// OpenCached is Open as far as that can be done without waiting, like the function.
func (d *Dir) OpenCached(name string) (*Dir, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return openCached(d.fd, name, d.join(name), unix.OpenHow{
		Flags:   unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | resolveCached,
	})
}

func openCached(at int, name, path string, how unix.OpenHow) (*Dir, error) {
	how.Flags |= unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	fd, err := unix.Openat2(at, name, &how)
	if err != nil {
		return nil, pathError("open", path, err)
	}
	return &Dir{fd: fd, path: path, unread: true}, nil
}

// read opens the directory for reading, unless it is open so.
func (d *Dir) read() error {
	if !d.unread {
		return nil
	}
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return pathError("open", d.path, err)
	}
	_ = unix.Close(d.fd) // nothing can be lost
	d.fd, d.unread = fd, false
	return nil
}

// ReadCached is ReadFile as far as that can be done without waiting for the disk; anything
// else is an error.
func (d *Dir) ReadCached(name string, limit int64) ([]byte, error) {
	data, err := d.readFile(name, limit, resolveCached, func(fd int, data []byte) error {
		n, err := unix.Preadv2(fd, [][]byte{data}, 0, unix.RWF_NOWAIT)
		if err == nil && n < len(data) {
			err = io.ErrUnexpectedEOF
		}
		return err
	})
	return data, err
}

// IDCached is ID as it is in memory, and whether something is mounted there.
func (d *Dir) IDCached() (id ID, mounted bool, err error) {
	var st unix.Statx_t
	err = unix.Statx(d.fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st)
	if err != nil {
		return ID{}, false, pathError("stat", d.path, err)
	}
	return ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino}, st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}
