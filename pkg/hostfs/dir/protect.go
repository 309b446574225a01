package dir

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
)

// IsProtected reports whether an error can be that of a change which Unprotect makes possible.
func IsProtected(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EROFS)
}

// Unprotect takes off an entry what keeps even root from moving and removing it: the flags immutable and append-only
// (chattr(1)), and the read-only flag of a btrfs subvolume. A pod can set each of them in its volume, and on its root.
// It reports whether there was one to take off.
func Unprotect(d *Dir, name string) (changed bool, err error) {
	format, err := formatOf(d, name)
	switch {
	case err != nil || format == 0:
		return false, err
	case format == unix.S_IFDIR:
		sub, err := d.OpenInside(name)
		if err != nil {
			return false, err
		}
		_, writable, err := makeWritable(sub)
		if err == nil {
			changed, err = unprotect(sub, sub.path)
		}
		return changed || writable, errors.Join(err, sub.Close())
	case format == unix.S_IFREG:
		f, err := openAnyones(d, name, unix.RESOLVE_NO_XDEV)
		if err != nil {
			// It may be encrypted without its key, or have a lease: the calls of unprotectNode do not open it.
			changed, nodeErr := unprotectNode(d, name)
			if changed || nodeErr != nil {
				err = nodeErr
			}
			return changed, err
		}
		changed, err = unprotect(ioctl.File{File: f}, f.Name())
		return changed, errors.Join(err, f.Close())
	}
	return unprotectNode(d, name)
}

// Protected reports whether a directory has a flag that keeps even root from renaming it: immutable or append-only.
func Protected(d *Dir, name string) (bool, error) {
	sub, err := d.Open(name)
	if err != nil {
		return false, err
	}
	fd, err := sub.ReadFd()
	if err != nil {
		return false, errors.Join(err, sub.Close())
	}
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	return err == nil && flags&protectedFlags != 0, sub.Close() // the filesystem may have no flags
}

// protectedFlags are FS_IMMUTABLE_FL and FS_APPEND_FL of linux/fs.h.
const protectedFlags = 0x10 | 0x20

// unprotect uses the requests of chattr(1): not all filesystems that have the flags take those with FileAttr.
func unprotect(d ioctl.Directory, path string) (changed bool, err error) {
	fd, err := d.ReadFd()
	if err != nil {
		return false, err
	}
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return false, nil //nolint:nilerr // the filesystem has no flags
	}
	if flags&protectedFlags == 0 {
		return false, nil
	}
	err = privilege.With(privilege.ForErasing, func() error {
		return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags&^protectedFlags))
	})
	if err != nil {
		return false, pathError("take the flags immutable and append-only off", path, err)
	}
	return true, nil
}

// nodeAttr is struct file_attr of linux/fs.h.
type nodeAttr struct {
	flags                                uint64
	extSize, extents, project, cowExtent uint32
}

// unprotectNode is unprotect for what cannot be opened: links, pipes, sockets and devices. They have had flags since
// Linux 6.17, which has calls for them.
func unprotectNode(d *Dir, name string) (changed bool, err error) {
	var attr nodeAttr
	if err := nodeAttrCall(d, unix.SYS_FILE_GETATTR, name, &attr); err != nil {
		return false, nil //nolint:nilerr // the kernel or the filesystem has no flags of such an entry
	}
	const protected = 0x8 | 0x10 // FS_XFLAG_IMMUTABLE, FS_XFLAG_APPEND
	if attr.flags&protected == 0 {
		return false, nil
	}
	attr.flags &^= protected | ioctl.HasAttr
	err = privilege.With(privilege.ForErasing, func() error { return nodeAttrCall(d, unix.SYS_FILE_SETATTR, name, &attr) })
	if err != nil {
		return false, d.pathError("take the flags immutable and append-only off", name, err)
	}
	return true, nil
}

func nodeAttrCall(d *Dir, call uintptr, name string, attr *nodeAttr) error {
	path, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, errno := unix.Syscall6(call, uintptr(d.fd), uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(attr)),
		unsafe.Sizeof(*attr), unix.AT_SYMLINK_NOFOLLOW, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// removeProtected removes an entry other than a directory after unprotecting it, and the directory that it is in. The
// error is that of the first attempt if there is nothing to take off.
func removeProtected(d *Dir, name string, first error) error {
	in, err := unprotect(d, d.path)
	if err != nil {
		return err
	}
	entry, err := Unprotect(d, name)
	switch {
	case err != nil:
		return err
	case !in && !entry:
		return first
	}
	return d.Remove(name)
}
