package dir

import (
	"errors"
	"fmt"
	"path"

	"golang.org/x/sys/unix"
)

// Lookup follows a path, with its links and mounts, as a process does whose root directory is d. It returns the identity of what
// the path leads to, a directory or not, and those of the directories above that, up to d. It opens nothing for reading.
func Lookup(d *Dir, absolute string) (upwards []ID, err error) {
	top, err := d.ID()
	if err != nil {
		return nil, err
	}
	at, err := Resolve(d, absolute)
	for err == nil {
		var id ID
		id, err = at.ID()
		if err == nil && len(upwards) > 0 && id == upwards[len(upwards)-1] {
			err = fmt.Errorf("%s is not below %s", absolute, d)
		}
		if upwards = append(upwards, id); err != nil || id == top {
			return upwards, errors.Join(err, at.Close())
		}
		below := at
		at, err = above(below)
		err = errors.Join(err, below.Close())
	}
	return nil, err
}

// Resolve opens what a path leads to as Lookup does, a directory or not, with O_PATH: it can be asked what and where it is.
func Resolve(d *Dir, absolute string) (*Dir, error) {
	const most = 10
	for try := 1; ; try++ {
		fd, err := unix.Openat2(d.fd, absolute, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
		switch {
		case err == nil:
			return adopt(fd, absolute), nil
		case errors.Is(err, unix.ENOTDIR):
			return nil, fmt.Errorf("open %s: %w", absolute, ErrNotDirectory)
		case errors.Is(err, unix.EAGAIN) && try < most: // something was renamed or mounted meanwhile: openat2(2)
			continue
		}
		return nil, pathError("open", absolute, err)
	}
}

// above opens the directory that holds what Resolve opened.
func above(d *Dir) (*Dir, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	fd, err := unix.Openat(d.fd, "..", flags, 0)
	if errors.Is(err, unix.ENOTDIR) {
		seen, err := Seen(d)
		if err != nil {
			return nil, err
		}
		return openPath(path.Dir(seen), flags)
	}
	if err != nil {
		return nil, d.pathError("open", "..", err)
	}
	return adopt(fd, d.join("..")), nil
}
