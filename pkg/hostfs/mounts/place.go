package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Place is a directory in another one, on which something may be mounted. It is never
// followed if it is a symbolic link.
type Place struct {
	Parent *dir.Dir
	Name   string
}

// String is the path of the place.
func (p Place) String() string { return p.Parent.String() + "/" + p.Name }

// A State is what is at a place.
type State struct {
	// Missing says that there is nothing of that name.
	Missing bool
	// Mounted says that something is mounted there. Dead says that its filesystem answers
	// with an error, and that no more is known of it than MountID.
	Mounted bool
	Dead    error
	// MountID is that of the topmost mount as in the mount table; ID is its root directory,
	// or the directory itself if nothing is mounted, and Born is when that was made, 1970 on a filesystem
	// that does not say. Filesystem is the id that statfs(2) has: of some it is made of their UUID, of others of their
	// device number.
	MountID    uint64
	ID         dir.ID
	Born       time.Time
	Filesystem [2]int32
	// IsDir says that it is a directory.
	IsDir bool
}

// State asks the kernel, and no disk: what is in memory will do.
func (p Place) State() (State, error) {
	fd, err := p.open()
	switch {
	case errors.Is(err, unix.ENOENT):
		return State{Missing: true}, nil
	case err != nil:
		return State{}, err
	}
	defer func() { _ = unix.Close(fd) }()
	state, err := stateOf(fd)
	if isDead(err) {
		id, unknown := mountID(fd)
		return State{Mounted: true, Dead: err, IsDir: true, MountID: id}, unknown
	}
	if err != nil {
		return State{}, &fs.PathError{Op: "stat", Path: p.String(), Err: err}
	}
	return state, nil
}

func stateOf(fd int) (State, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_BTIME|unix.STATX_MNT_ID, &st)
	if err != nil {
		return State{}, err
	}
	var of unix.Statfs_t
	if err := unix.Fstatfs(fd, &of); err != nil {
		return State{}, err
	}
	return State{
		Mounted:    st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		MountID:    st.Mnt_id,
		ID:         dir.ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino},
		Born:       time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)),
		Filesystem: of.Fsid.Val,
		IsDir:      st.Mode&unix.S_IFMT == unix.S_IFDIR,
	}, nil
}

// mountID is the number of the mount on which an open file is, which the kernel knows without its filesystem (proc_pid_fdinfo(5)).
func mountID(fd int) (uint64, error) {
	file := fmt.Sprintf("/proc/self/fdinfo/%d", fd)
	content, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strconv.ParseUint(strings.TrimSpace(value), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no mnt_id", file)
}

func isDead(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.ESTALE) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ESHUTDOWN)
}

// open opens the directory, or the root of the topmost mount on it.
func (p Place) open() (int, error) { return p.openAs(unix.O_PATH) }

func (p Place) openAs(flags uint64) (int, error) {
	fd, err := unix.Openat2(p.Parent.Fd(), p.Name, &unix.OpenHow{
		Flags:   flags | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: p.String(), Err: err}
	}
	return fd, nil
}

// Sync has the filesystem that is mounted there write all that is in memory. The last unmount does that too, but another mount namespace may
// have a copy of the mount, as that of a container with the root directory of the host.
func (p Place) Sync() error {
	fd, err := p.openAs(unix.O_RDONLY | unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Syncfs(fd); err != nil {
		return &fs.PathError{Op: "sync", Path: p.String(), Err: err}
	}
	return nil
}

// Unmount takes the topmost mount off, here and wherever the mount propagates to. It returns
// ErrBusy if a process uses it in any of these places, and nil if nothing is mounted.
func (p Place) Unmount() error {
	// umount2(2) takes no descriptor: the parent's handle keeps the way to the place, and
	// UMOUNT_NOFOLLOW its last step.
	err := unix.Unmount(p.Parent.HandlePath()+"/"+p.Name, unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmount %s: %w", p, ErrBusy)
	case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // no mount
		return nil
	}
	return &fs.PathError{Op: "unmount", Path: p.String(), Err: err}
}
