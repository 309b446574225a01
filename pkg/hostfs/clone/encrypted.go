package clone

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// ErrEncrypted reports an entry that a user has encrypted (fscrypt). A copy of it would be readable without its key. Where the key is not
// there, directories and links can be read all the same, but with other names and targets.
var ErrEncrypted = errors.New("it is encrypted, and a copy would not be")

// A Look looks at entries of a source, and returns ErrEncrypted for those that are encrypted, unless all that is beside the
// source is: what is made in an encrypted directory is encrypted like that.
type Look struct {
	refuses bool
}

// NewLook looks at what is above a source.
func NewLook(src *dir.Dir) (Look, error) {
	above, err := statx(src.Fd(), "..", src.String())
	may := above.Attributes_mask & unix.STATX_ATTR_ENCRYPTED
	return Look{may != 0 && above.Attributes&unix.STATX_ATTR_ENCRYPTED == 0}, err
}

func statx(at int, name, path string) (is unix.Statx_t, err error) {
	if err = unix.Statx(at, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_EMPTY_PATH, 0, &is); err != nil {
		err = &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return is, err
}

func (l Look) refuse(is *unix.Statx_t, path string) error {
	if l.refuses && is.Attributes&unix.STATX_ATTR_ENCRYPTED != 0 {
		return fmt.Errorf("%w: %s", ErrEncrypted, path)
	}
	return nil
}

// Stat is for an entry. It returns ErrMounted for what something is mounted on.
func (l Look) Stat(in *dir.Dir, name string) (*unix.Stat_t, error) {
	path := in.String() + "/" + name
	is, err := statx(in.Fd(), name, path)
	if err != nil {
		return nil, err
	}
	if is.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return nil, Mounted(in, name)
	}
	if err := l.refuse(&is, path); err != nil {
		return nil, err
	}
	return stat(in, name)
}

// Open is Stat for a directory that is open.
func (l Look) Open(d *dir.Dir) (*unix.Stat_t, error) {
	if l.refuses {
		is, err := statx(d.Fd(), "", d.String())
		if err == nil {
			err = l.refuse(&is, d.String())
		}
		if err != nil {
			return nil, err
		}
	}
	return statSelf(d)
}
