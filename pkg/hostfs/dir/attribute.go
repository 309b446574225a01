package dir

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

// Attribute is an extended attribute of the directory (xattr(7)), of at most limit bytes. It
// returns false where there is none, also on a filesystem that has none of its kind.
func (d *Dir) Attribute(name string, limit int) (value []byte, found bool, err error) {
	if err := d.read(); err != nil {
		return nil, false, err
	}
	value = make([]byte, limit)
	n, err := unix.Fgetxattr(d.fd, name, value)
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.EOPNOTSUPP):
		return nil, false, nil
	case errors.Is(err, unix.ERANGE):
		return nil, false, pathError("read attribute "+name, d.path, ErrTooLarge)
	case err != nil:
		return nil, false, pathError("read attribute "+name, d.path, err)
	}
	return value[:n], true, nil
}

// Attributes are the names of the extended attributes of the directory.
func (d *Dir) Attributes() ([]string, error) {
	if err := d.read(); err != nil {
		return nil, err
	}
	names := make([]byte, maxAttributes)
	n, err := unix.Flistxattr(d.fd, names)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("list the attributes", d.path, err)
	}
	return strings.FieldsFunc(string(names[:n]), func(c rune) bool { return c == 0 }), nil
}

// maxAttributes is XATTR_LIST_MAX of linux/limits.h, in bytes.
const maxAttributes = 64 << 10

// SetAttribute sets an extended attribute. Sync makes it durable.
func (d *Dir) SetAttribute(name string, value []byte) error {
	if err := d.read(); err != nil {
		return err
	}
	if err := unix.Fsetxattr(d.fd, name, value, 0); err != nil {
		return pathError("set attribute "+name, d.path, err)
	}
	return nil
}

// RemoveAttribute removes an extended attribute. One that is not there is no error.
func (d *Dir) RemoveAttribute(name string) error {
	if err := d.read(); err != nil {
		return err
	}
	err := unix.Fremovexattr(d.fd, name)
	if err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP) {
		return pathError("remove attribute "+name, d.path, err)
	}
	return nil
}
