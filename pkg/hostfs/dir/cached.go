package dir

import (
	"io"

	"golang.org/x/sys/unix"
)

// resolveCached is RESOLVE_CACHED of linux/openat2.h (Linux 5.12): the kernel answers EAGAIN
// if it would have to read from the disk.
const resolveCached = 0x20

// OpenCached is Open without waiting for the disk; if it would have to wait, it fails with
// EAGAIN. On a filesystem that is not Cached it may wait nevertheless.
//
// The directory is opened for reading only when an operation needs it: on some filesystems
// that takes a lock which may be held by a process that waits for the disk.
func OpenCached(path string) (*Dir, error) {
	return openCached(unix.AT_FDCWD, path, path, unix.OpenHow{Resolve: resolveCached})
}

// OpenCached opens a directory that lies directly in d without waiting for the disk, like the
// function OpenCached.
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

// read reopens an O_PATH handle for reading.
func (d *Dir) read() error {
	if !d.unread {
		return nil
	}
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return pathError("open", d.path, err)
	}
	_ = unix.Close(d.fd) // O_PATH: nothing to lose
	d.fd, d.unread = fd, false
	return nil
}

// ReadCached is ReadFile without waiting for the disk; if it would have to wait, it fails with
// EAGAIN.
func ReadCached(d *Dir, name string, limit int64) ([]byte, error) {
	data, err := readFile(d, name, limit, resolveCached, func(fd int, data []byte) error {
		n, err := unix.Preadv2(fd, [][]byte{data}, 0, unix.RWF_NOWAIT)
		if err == nil && n < len(data) {
			err = io.ErrUnexpectedEOF
		}
		return err
	})
	return data, err
}

// A Way is a directory, and the mount by which it was reached.
type Way struct {
	ID
	// Mount is the mount's number, which no other has as long as the kernel runs; 0 before Linux 6.8.
	Mount uint64
	// MountRoot: the directory is what is mounted there.
	MountRoot bool
}

// statxMountUnique is STATX_MNT_ID_UNIQUE of linux/stat.h (Linux 6.8). Older kernels do not set it.
const statxMountUnique = 0x4000

// WayOf is the ID of a directory without asking a server, and by which mount.
func WayOf(d *Dir) (Way, error) {
	var st unix.Statx_t
	err := unix.Statx(d.fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO|statxMountUnique, &st)
	if err != nil {
		return Way{}, pathError("stat", d.path, err)
	}
	w := Way{ID: ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino}, MountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0}
	if st.Mask&statxMountUnique != 0 {
		w.Mount = st.Mnt_id
	}
	return w, nil
}
