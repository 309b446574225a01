// Package mounts makes mounts that are nowhere yet, attaches them to a directory, and undoes
// what is mounted there. It works on descriptors (open_tree(2), fsmount(2), move_mount(2);
// Linux 5.12 with mount_setattr(2)): what is attached is what the caller has checked, a mount appears
// whole or not at all, and a process that is killed leaves no mount behind that was not
// attached yet.
//
// A mount reaches the host from a container if the directory lies on a shared mount
// (mount_namespaces(7)), which is what Kubernetes' mount propagation Bidirectional makes.
//
// Which filesystem belongs where is the caller's business.
package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Errors that callers may test for.
var (
	// ErrOptions reports mount options that the filesystem, or this kernel, does not take.
	ErrOptions = errors.New("mount options are refused")
	// ErrBusy reports a mount that a process still uses, or that has mounts below it.
	ErrBusy = errors.New("mount is in use")
)

// A Tree is a mount that is attached nowhere. It goes with Close unless it was attached.
type Tree struct {
	fd   int
	from string // for messages
}

// Clone makes another mount of a directory, without the mounts below it.
func Clone(source *dir.Dir) (*Tree, error) {
	fd, err := unix.OpenTree(source.Fd(), "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, &fs.PathError{Op: "open_tree", Path: source.String(), Err: err}
	}
	// A mount below the clone must not appear at the source as well.
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return nil, errors.Join(&fs.PathError{Op: "mount_setattr", Path: source.String(), Err: err}, unix.Close(fd))
	}
	return &Tree{fd: fd, from: source.String()}, nil
}

// New mounts the filesystem on a device, with options as in mount(8). If it is mounted
// already it is the same filesystem, with the options that it has. It returns ErrOptions if the
// filesystem refuses one of them; that it refused all together, it may report as another error.
func New(kind, device string, options []string) (*Tree, error) {
	attributes, own := split(options)
	context, err := configure(kind, device, own)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(context) }()
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, explain("mount", device, context, err)
	}
	fd, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, int(attributes))
	if err != nil {
		return nil, explain("fsmount", device, context, err)
	}
	return &Tree{fd: fd, from: device}, nil
}

// CheckOptions returns ErrOptions if a type of filesystem refuses one of the options, whatever is on the device, which is not read.
func CheckOptions(kind, device string, options []string) error {
	_, own := split(options)
	context, err := configure(kind, device, own)
	if err != nil {
		return err
	}
	return unix.Close(context)
}

// Unsupported reports whether New failed as it does for quotas that the kernel or the filesystem does not have: with EINVAL, or
// ESRCH for an ext4 where the module quota_v2 is missing. Other reasons have the same errors, but none that goes by itself, such as a lack of memory.
func Unsupported(err error) bool { return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ESRCH) }

// configure returns the descriptor of a mount that is to be made.
func configure(kind, device string, options []string) (context int, err error) {
	context, err = unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("mount %s: this kernel has no %s: %w", device, kind, err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(context)
		}
	}()
	if err := unix.FsconfigSetString(context, "source", device); err != nil {
		return -1, explain("set the source", device, context, err)
	}
	for _, option := range options {
		key, value, valued := strings.Cut(option, "=")
		if valued {
			err = unix.FsconfigSetString(context, key, value)
		} else {
			err = unix.FsconfigSetFlag(context, key)
		}
		if err != nil {
			return -1, fmt.Errorf("%w: %w", ErrOptions, explain("set option "+option, device, context, err))
		}
	}
	return context, nil
}

// split separates the attributes of a mount from the options of a filesystem. As in mount(8), ro is both.
func split(options []string) (attributes uint64, own []string) {
	var flags bind.Flags
	for _, option := range options {
		f, err := bind.ParseFlags([]string{option})
		if err != nil || option == "ro" {
			own = append(own, option)
		}
		if err == nil {
			flags = flags.With(f)
		}
	}
	return flags.Set(), own
}

// explain adds what the filesystem says of the reason, line by line as it is read from the
// descriptor (fsconfig(2)).
func explain(op, device string, context int, err error) error {
	var said []string
	for {
		line := make([]byte, 512)
		n, readErr := unix.Read(context, line)
		if readErr != nil || n <= 0 {
			break
		}
		// Each line begins with its kind: e, w or i for error, warning and information.
		_, text, _ := strings.Cut(string(line[:n]), " ")
		said = append(said, strings.TrimSpace(text))
	}
	if len(said) == 0 {
		return fmt.Errorf("%s %s: %w", op, device, err)
	}
	return fmt.Errorf("%s %s: %w (%s)", op, device, err, strings.Join(said, "; "))
}

// State is what will be at a place once the tree is attached there.
func (t *Tree) State() (State, error) {
	state, err := stateOf(t.fd)
	if err != nil {
		return State{}, &fs.PathError{Op: "stat", Path: t.from, Err: err}
	}
	return state, nil
}

// ID identifies the directory that is the root of the mount.
func (t *Tree) ID() (dir.ID, error) {
	state, err := t.State()
	return state.ID, err
}

// ReadOnly reports whether nothing can be written through the mount.
func (t *Tree) ReadOnly() (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(t.fd, &st); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: t.from, Err: err}
	}
	return st.Flags&unix.ST_RDONLY != 0, nil
}

// Attach mounts the tree at a place.
func (t *Tree) Attach(to Place) error {
	at, err := to.open()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(at) }()
	if err := unix.MoveMount(t.fd, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return &fs.PathError{Op: "move_mount", Path: to.String(), Err: err}
	}
	return nil
}

// Open opens the root of the mount, which is to be closed before the tree.
func (t *Tree) Open() (*dir.Dir, error) { return dir.Open(dir.HandlePath(t.fd)) }

// Close must be called, also after Attach: an open tree keeps its filesystem busy.
func (t *Tree) Close() error { return unix.Close(t.fd) }
