// Package bind publishes a directory or a device at another path, and reports where
// they are published. It uses the mount calls that work on descriptors (open_tree(2),
// mount_setattr(2), move_mount(2); Linux 5.12). So it mounts the directory that the caller
// holds open, even if its path has changed, and a read-only mount is never writable:
// mount(2) ignores MS_RDONLY together with MS_BIND, and a remount afterwards leaves the
// target writable in between.
//
// The caller decides what to publish, and for whom.
package bind

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// Errors that callers may test for.
var (
	// ErrTarget reports a target that cannot be mounted on: it is not an absolute
	// clean path, its parent is missing, or its last element is a link.
	ErrTarget = errors.New("unusable target path")
	// ErrOccupied reports a target where something else is mounted, or that is not empty.
	ErrOccupied = errors.New("target path is occupied")
	// ErrNotDevice reports a name that is not a block device.
	ErrNotDevice = errors.New("not a block device")
	// ErrBusy reports a publication that a process still uses (EBUSY).
	ErrBusy = errors.New("publication is in use")
)

// A Target is the path at which a directory or device is published. Only ParseTarget makes
// one. Links on the way to it are followed, since kubelet's directory may be one;
// its last element must not be a link.
type Target struct {
	path   string
	parent *dir.Dir // open while the target is held
}

// ParseTarget takes an absolute path without "." and ".." elements, below the root
// and at most PATH_MAX long, its elements at most NAME_MAX. It does not access the filesystem.
func ParseTarget(s string) (Target, error) {
	switch {
	case !path.IsAbs(s):
		return Target{}, fmt.Errorf("%w: %q is not absolute", ErrTarget, s)
	case strings.ContainsRune(s, 0):
		return Target{}, fmt.Errorf("%w: %q contains a NUL byte", ErrTarget, s)
	case len(s) >= unix.PathMax:
		return Target{}, fmt.Errorf("%w: %d bytes are longer than PATH_MAX", ErrTarget, len(s))
	}
	clean := strings.TrimRight(s, "/")
	if clean == "" || path.Clean(clean) != clean {
		return Target{}, fmt.Errorf("%w: %q is not a clean path below the root", ErrTarget, s)
	}
	for element := range strings.SplitSeq(clean, "/") {
		if len(element) > unix.NAME_MAX {
			return Target{}, fmt.Errorf("%w: %q is longer than NAME_MAX", ErrTarget, element)
		}
	}
	return Target{path: clean}, nil
}

// String is the path.
func (t Target) String() string { return t.path }

// Is reports whether a path from the mount table, which has links resolved, is the
// target. If the target's parent is missing, it is not.
func (t Target) Is(mounted string) bool {
	if path.Base(mounted) != t.base() {
		return false
	}
	parent, done, err := t.openParent()
	if err != nil {
		return false
	}
	defer done()
	resolved, err := os.Readlink(parent.HandlePath())
	return err == nil && resolved == path.Dir(mounted)
}

func (t Target) base() string { return path.Base(t.path) }

// aside is the temporary name of its file during removal.
func (t Target) aside() string {
	const prefix = ".unpublished-"
	base := t.base()
	return prefix + base[:min(len(base), unix.NAME_MAX-len(prefix))]
}

// Hold opens the target's parent directory for all that is done at the held target until release: where
// Within has found it, Publish mounts and Unpublish unmounts, whatever becomes of the path. A target
// without a parent is not held.
func (t Target) Hold() (held Target, release func(), err error) {
	parent, release, err := t.openParent()
	if errors.Is(err, ErrTarget) {
		return t, func() {}, nil
	}
	return Target{path: t.path, parent: parent}, release, err
}

// openParent opens the target's parent directory, unless the target is held. It returns ErrTarget if
// there is none.
func (t Target) openParent() (parent *dir.Dir, done func(), err error) {
	if t.parent != nil {
		return t.parent, func() {}, nil
	}
	parent, err = dir.OpenParent(t.path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		err = fmt.Errorf("%w: its parent directory: %w", ErrTarget, err)
	}
	if err != nil {
		return nil, nil, err
	}
	return parent, func() { _ = parent.Close() }, nil
}

// A Publication is one mount of a directory, of something inside it, or of a
// device.
type Publication struct {
	// Path is the mount point in this mount namespace, with links resolved.
	Path string
	// Inside is the mounted path relative to the directory; empty for the
	// directory or device itself. Kubelet makes such mounts for subPath.
	Inside string
	// ReadOnly: nothing can be written through the mount.
	ReadOnly bool
	// ByName: only a name in its path says that the mount may be of the entry, through an earlier mount of the filesystem. It may as
	// well be of something else that is called so.
	ByName bool
}

// Kernel publishes in the mount namespace of this process.
type Kernel struct{ table *table }

// NewKernel opens the mount table. It fails if the kernel is too old.
func NewKernel() (*Kernel, error) {
	if err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{}); errors.Is(err, unix.ENOSYS) {
		return nil, errors.New("publish volumes: the kernel has no mount_setattr(2); Linux 5.12 or newer is needed")
	}
	table, err := openTable()
	if err != nil {
		return nil, err
	}
	return &Kernel{table: table}, nil
}

// Close closes the mount table.
func (k *Kernel) Close() error { return k.table.close() }

// Publish mounts source at target, which it creates if missing. Publishing
// the same again with the same flags changes nothing. It returns ErrTarget for an
// unusable path, and ErrOccupied if something else is mounted or stored there.
func (k *Kernel) Publish(source *dir.Dir, target Target, flags Flags) error {
	return publish(origin{fd: source.Fd(), path: source.String(), format: unix.S_IFDIR}, target, flags)
}

// PublishDevice mounts the node of a block device, which is an entry of dev, at
// target, a file that it creates if missing. The mount allows devices, even if the mount
// of dev does not. It does not restrict access to the device: a device can be written
// through a read-only mount too. Otherwise it works like Publish. It returns ErrNotDevice
// for a name that is not a block device.
//
// Published(dev) reports published devices.
func (k *Kernel) PublishDevice(dev *dir.Dir, name string, target Target) error {
	node, err := dev.OpenNode(name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = node.Close() }()
	source := origin{fd: int(node.Fd()), path: node.Name(), format: unix.S_IFBLK}
	found, err := examine(source.fd)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: source.path, Err: err}
	}
	if found.format != unix.S_IFBLK {
		return fmt.Errorf("publish %s: %w", source.path, ErrNotDevice)
	}
	return publish(source, target, Flags{clear: unix.MOUNT_ATTR_NODEV})
}

// An origin is what is published.
type origin struct {
	fd     int
	path   string // for messages
	format uint16 // S_IFDIR or S_IFBLK
}

func (o origin) isDir() bool { return o.format == unix.S_IFDIR }

func publish(source origin, target Target, flags Flags) error {
	parent, done, err := target.openParent()
	if err != nil {
		return err
	}
	defer done()

	made, err := makeTarget(source, parent, target)
	if err != nil {
		return err
	}
	if made && source.isDir() {
		// It is empty, and no mount. A link that takes its place is not followed, and is no directory to mount on.
		err = mountTree(source, parent.Fd(), target.base(), target, flags)
	} else {
		err = publishAt(source, parent, target, flags)
	}
	if err != nil && made {
		// Remove only what was created here, and only while it is empty and not a mount point.
		err = errors.Join(err, removeMade(source, parent, target))
	}
	return err
}

// makeTarget creates the target if missing: a directory for a directory, a file for a
// device.
func makeTarget(source origin, parent *dir.Dir, target Target) (made bool, err error) {
	op := "mkdir"
	if source.isDir() {
		err = unix.Mkdirat(parent.Fd(), target.base(), 0o750)
	} else {
		op = "create file"
		err = unix.Mknodat(parent.Fd(), target.base(), unix.S_IFREG|0o600, 0)
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return false, nil
	case err != nil:
		return false, &fs.PathError{Op: op, Path: target.path, Err: err}
	}
	return true, nil
}

func removeMade(source origin, parent *dir.Dir, target Target) error {
	if source.isDir() {
		return parent.RemoveDir(target.base())
	}
	return removeFile(parent, target)
}

func publishAt(source origin, parent *dir.Dir, target Target, flags Flags) error {
	at, err := openAt(parent, target.base())
	if err != nil {
		return &fs.PathError{Op: "open", Path: target.path, Err: err}
	}
	defer func() { _ = unix.Close(at) }()

	found, err := examine(at)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: target.path, Err: err}
	}
	switch {
	case found.format == unix.S_IFLNK:
		return fmt.Errorf("%w: %s is a symbolic link", ErrTarget, target)
	case found.mounted:
		return samePublication(source, at, found.id, target, flags)
	case source.isDir() && found.format != unix.S_IFDIR:
		return fmt.Errorf("%w: %s is not a directory", ErrOccupied, target)
	case !source.isDir() && (found.format != unix.S_IFREG || !found.empty):
		return fmt.Errorf("%w: %s is not an empty file", ErrOccupied, target)
	}
	return mountTree(source, at, "", target, flags)
}

// mountTree mounts on a descriptor, or on a name in the directory that it is of.
func mountTree(source origin, at int, name string, target Target, flags Flags) error {
	tree, err := unix.OpenTree(source.fd, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "open_tree", Path: source.path, Err: err}
	}
	// An open tree would make a later unmount fail with EBUSY.
	defer func() { _ = unix.Close(tree) }()
	attr := flags.attr()
	// Private: a mount below the target must not propagate into the pool.
	attr.Propagation = unix.MS_PRIVATE
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &fs.PathError{Op: "mount_setattr", Path: source.path, Err: err}
	}
	if err := unix.MoveMount(tree, "", at, name, unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return &fs.PathError{Op: "move_mount", Path: target.path, Err: err}
	}
	return nil
}

// openAt opens the target without following a link: the directory to mount on, or the
// root of the topmost mount on it.
func openAt(parent *dir.Dir, name string) (int, error) {
	return unix.Openat2(parent.Fd(), name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
}

// An inode is what statx(2) reports of a descriptor.
type inode struct {
	mounted bool // root of a mount (STATX_ATTR_MOUNT_ROOT, Linux 5.8)
	id      dir.ID
	format  uint16 // S_IFDIR and so on
	empty   bool
}

func examine(fd int) (inode, error) { return examineAt(fd, "", unix.AT_EMPTY_PATH) }

// examineAt is examine for a name in the directory that a descriptor is of: a link is not followed.
func examineAt(fd int, name string, flags int) (inode, error) {
	var st unix.Statx_t
	// Cached attributes suffice, and a filesystem that hangs must not be asked.
	flags |= unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	err := unix.Statx(fd, name, flags, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_SIZE, &st)
	return inode{
		mounted: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		id:      dir.ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino},
		format:  st.Mode & unix.S_IFMT,
		empty:   st.Size == 0,
	}, err
}

// samePublication returns ErrOccupied if the existing mount is not the requested one.
func samePublication(source origin, at int, mounted dir.ID, target Target, flags Flags) error {
	own, err := examine(source.fd)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: source.path, Err: err}
	}
	if own.id != mounted {
		return fmt.Errorf("%w: %s carries another mount", ErrOccupied, target)
	}
	var have, base unix.Statfs_t
	if err := unix.Fstatfs(at, &have); err != nil {
		return &fs.PathError{Op: "statfs", Path: target.path, Err: err}
	}
	if err := unix.Fstatfs(source.fd, &base); err != nil {
		return &fs.PathError{Op: "statfs", Path: source.path, Err: err}
	}
	// What the flags do not name is as the source was mounted then, which may have changed.
	named, set := flags.statfs()
	if source.isDir() { // a device can be written through a read-only mount
		named |= unix.ST_RDONLY &^ int64(base.Flags)
	}
	if int64(have.Flags)&named != set {
		return fmt.Errorf("%w: %s is published with other mount flags", ErrOccupied, target)
	}
	return nil
}

// Unpublish unmounts what is published at target and then removes the target.
// It removes only what is empty and not a mount point. If of is not nil, it unmounts only a
// mount of that directory or node, and returns ErrOccupied for any other. A missing
// target is not an error.
func (k *Kernel) Unpublish(target Target, of *dir.ID) error {
	parent, done, err := target.openParent()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer done()
	// The upstream KubeVirt driver stacked mounts: each round unmounts one.
	for range mostStacked {
		kind, err := stateOf(parent, target, of)
		if err != nil {
			return err
		}
		switch kind {
		case missing:
			return removeAside(parent, target)
		case directory:
			return removed(parent.RemoveDir(target.base()))
		case file:
			return removeFile(parent, target)
		}
		if err := unmount(parent, target); err != nil {
			return err
		}
		// The target is nearly always an empty directory; rmdir(2) removes nothing else.
		if parent.RemoveDir(target.base()) == nil {
			return nil
		}
	}
	return fmt.Errorf("unmount %s: something is mounted there still after %d times", target, mostStacked)
}

// mostStacked is more than any number of mounts on one directory that is known of.
const mostStacked = 1000

type kind int

const (
	missing kind = iota
	directory
	file
	mount
)

// stateOf reports what is at the target.
func stateOf(parent *dir.Dir, target Target, of *dir.ID) (kind, error) {
	found, err := examineAt(parent.Fd(), target.base(), 0)
	if err != nil {
		// It is missing, or it is a mount whose filesystem is dead. Most of these can be opened, and not the stale root of an NFS.
		var fd int
		fd, err = openAt(parent, target.base())
		if errors.Is(err, unix.ENOENT) {
			return missing, nil
		}
		if err == nil {
			found, err = examine(fd)
			// An open descriptor would make the unmount fail with EBUSY.
			_ = unix.Close(fd)
		}
	}
	switch {
	case errors.Is(err, unix.EIO), errors.Is(err, unix.ESTALE), errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ESHUTDOWN):
		return deadAt(parent, target, of, err)
	case err != nil:
		return 0, &fs.PathError{Op: "stat", Path: target.path, Err: err}
	case found.mounted && of != nil && *of != found.id:
		return 0, fmt.Errorf("%w: %s carries another mount", ErrOccupied, target)
	case found.mounted:
		return mount, nil
	case found.format == unix.S_IFDIR:
		return directory, nil
	case found.format == unix.S_IFREG && found.empty:
		return file, nil
	case found.format == unix.S_IFLNK:
		return 0, fmt.Errorf("%w: %s is a symbolic link", ErrTarget, target)
	}
	return 0, fmt.Errorf("%w: %s is neither a mount nor an empty directory or file", ErrOccupied, target)
}

// deadAt tells a mount whose filesystem is dead, which still has to be removed, from a target whose own filesystem is.
// Whose mount it is does not show any more.
func deadAt(parent *dir.Dir, target Target, of *dir.ID, died error) (kind, error) {
	died = &fs.PathError{Op: "stat", Path: target.path, Err: died}
	seen, err := dir.Seen(parent)
	if err != nil {
		return 0, errors.Join(died, err)
	}
	mounts, err := mountinfo.Own()
	if err != nil {
		return 0, errors.Join(died, err)
	}
	at := path.Join(seen, target.base())
	switch {
	case !slices.ContainsFunc(mounts, func(m *mountinfo.Mount) bool { return m.Mountpoint == at }):
		return 0, died
	case of != nil:
		return 0, fmt.Errorf("%w: %s carries a mount whose filesystem died: %w", ErrOccupied, target, died)
	}
	return mount, nil
}

func unmount(parent *dir.Dir, target Target) error {
	// umount2(2) takes no descriptor: the parent's handle protects the path to the
	// target, and UMOUNT_NOFOLLOW its last element.
	err := unix.Unmount(parent.HandlePath()+"/"+target.base(), unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmount %s: %w", target, ErrBusy)
	case errors.Is(err, unix.EINVAL):
		return nil // unmounted by another process meanwhile: check again
	case err != nil:
		return &fs.PathError{Op: "unmount", Path: target.path, Err: err}
	}
	return nil
}

// removeFile removes the empty file that was created for a device. rmdir(2) refuses a directory
// that is not empty, but unlink(2) removes any file, and only by name, which may belong to
// another file by now. So the file is first renamed to a name that no other program uses, and checked.
//
// A race remains between the check and the unlink: a process that can write to the directory and
// knows the name can put another file there, or data into the empty file.
func removeFile(parent *dir.Dir, target Target) error {
	err := parent.Rename(target.base(), parent, target.aside())
	if errors.Is(err, fs.ErrExist) { // left by an interrupted call
		if err := removeAside(parent, target); err != nil {
			return err
		}
		err = parent.Rename(target.base(), parent, target.aside())
	}
	if err != nil {
		return removed(err)
	}
	return removeAside(parent, target)
}

// removeAside removes the renamed file, or renames it back if it is not an empty file.
func removeAside(parent *dir.Dir, target Target) error {
	shown := parent.String() + "/" + target.aside()
	at, err := openAt(parent, target.aside())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "open", Path: shown, Err: err}
	}
	found, err := examine(at)
	_ = unix.Close(at)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: shown, Err: err}
	}
	if found.format == unix.S_IFREG && found.empty {
		return removed(parent.Remove(target.aside()))
	}
	if err := parent.Rename(target.aside(), parent, target.base()); err != nil {
		return fmt.Errorf("%w: the file at %s is not empty, and is now at %s: %w", ErrOccupied, target, shown, err)
	}
	return fmt.Errorf("%w: %s is neither a mount nor an empty directory or file", ErrOccupied, target)
}

func removed(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%w: neither a mount point nor empty: %w", ErrOccupied, err)
	}
	return err
}

// Open opens the directory that is published at target, for statistics. It returns
// fs.ErrNotExist if the target is missing, and ErrTarget for a link or a device.
func (k *Kernel) Open(target Target) (*dir.Dir, error) {
	at, err := dir.OpenLast(target.path)
	if errors.Is(err, dir.ErrNotDirectory) {
		return nil, fmt.Errorf("%w: %w", ErrTarget, err)
	}
	return at, err
}
