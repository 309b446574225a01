package clone

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Subvolume makes a writable snapshot of the btrfs subvolume src under a name in to. All
// that was synced before is in it; of what was written since, some may be and some not, as
// after a power cut. Subvolumes below src are empty directories in it: see [Nested]. It
// returns ErrNotSupported if src is no subvolume, and fs.ErrExist if the name is taken.
func Subvolume(src, to *dir.Dir, name string) error {
	args := ioctl.Subvolume{}
	if len(name) >= len(args.Name) {
		return &fs.PathError{Op: "snapshot", Path: name, Err: unix.ENAMETOOLONG}
	}
	fd, err := src.ReadFd()
	if err != nil {
		return err
	}
	args.FD = int64(fd)
	copy(args.Name[:], name)
	err = ioctl.Do(to, ioctl.CreateSnapshot, &args)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EXDEV):
		return fmt.Errorf("snapshot %s: %w: %w", src, ErrNotSupported, err)
	}
	return &fs.PathError{Op: "snapshot", Path: src.String() + " to " + to.String() + "/" + name, Err: err}
}

// Nested counts the subvolumes that lie directly in the subvolume d, at whatever depth of
// directories, at most 255 of them. It returns ErrNotSupported if d is no subvolume
// (Linux 4.18).
func Nested(d *dir.Dir) (int, error) {
	args := ioctl.Nested{}
	// Of a directory in a subvolume it would list those of that.
	st, err := statSelf(d)
	if err == nil && st.Ino != ioctl.SubvolumeRoot {
		err = unix.EINVAL
	}
	if err == nil {
		err = ioctl.Do(d, ioctl.GetNested, &args)
	}
	switch {
	case err == nil, errors.Is(err, unix.EOVERFLOW):
		return int(args.Count), nil
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return 0, fmt.Errorf("list the subvolumes in %s: %w: %w", d, ErrNotSupported, err)
	}
	return 0, &fs.PathError{Op: "list the subvolumes in", Path: d.String(), Err: err}
}
