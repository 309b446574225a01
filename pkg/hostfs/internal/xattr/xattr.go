// Package xattr reads and writes extended attributes of what is open, and of entries that must not be opened. ACLs,
// capabilities and security labels are such attributes, too.
package xattr

import (
	"bytes"
	"errors"
	"iter"
	"strconv"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Max is how long the list of an entry's names can be, and one value, in bytes (xattr(7), XATTR_LIST_MAX and XATTR_SIZE_MAX).
const Max = 64 << 10

// MaxName is how long a name can be, in bytes (XATTR_NAME_MAX).
const MaxName = 255

// SELinuxLabel is an attribute that each file has, and that the kernel takes off none.
const SELinuxLabel = "security.selinux"

// A Holder of extended attributes: a descriptor, or an entry that must not be opened.
type Holder interface {
	List(into []byte) (int, error)
	Get(name string, into []byte) (int, error)
	Set(name string, value []byte) error
	Remove(name string) error
}

// A Descriptor is an open file or directory.
type Descriptor int

// ReadFd is for ioctl(2).
func (d Descriptor) ReadFd() (int, error) { return int(d), nil }

// List is flistxattr(2).
func (d Descriptor) List(into []byte) (int, error) { return unix.Flistxattr(int(d), into) }

// Get is fgetxattr(2).
func (d Descriptor) Get(name string, into []byte) (int, error) {
	return unix.Fgetxattr(int(d), name, into)
}

// Set is fsetxattr(2).
func (d Descriptor) Set(name string, value []byte) error {
	return unix.Fsetxattr(int(d), name, value, 0)
}

// Remove is fremovexattr(2).
func (d Descriptor) Remove(name string) error { return unix.Fremovexattr(int(d), name) }

// An Entry is reached through the handle of its directory, and not followed if it is a link.
type Entry string

// Of is an entry of a directory, as long as that is open.
func Of(in *dir.Dir, name string) Entry {
	return Entry("/proc/self/fd/" + strconv.Itoa(in.Fd()) + "/" + name)
}

// List is llistxattr(2).
func (e Entry) List(into []byte) (int, error) { return unix.Llistxattr(string(e), into) }

// Get is lgetxattr(2).
func (e Entry) Get(name string, into []byte) (int, error) {
	return unix.Lgetxattr(string(e), name, into)
}

// Set is lsetxattr(2).
func (e Entry) Set(name string, value []byte) error { return unix.Lsetxattr(string(e), name, value, 0) }

// Remove is lremovexattr(2).
func (e Entry) Remove(name string) error { return unix.Lremovexattr(string(e), name) }

// Listed are the names of attributes, each with a NUL after it: none on a filesystem without.
func Listed(h Holder, into []byte) ([]byte, error) {
	n, err := h.List(into)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	return into[:max(n, 0)], err
}

// Each name of a list.
func Each(names []byte) iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range bytes.SplitSeq(names, []byte{0}) {
			if len(name) > 0 && !yield(string(name)) {
				return
			}
		}
	}
}

// TakeOff removes an attribute. One may have gone with another: XFS has each ACL under two names.
func TakeOff(h Holder, name string) error {
	err := h.Remove(name)
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	return err
}
