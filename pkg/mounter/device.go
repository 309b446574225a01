package mounter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/mount-utils"
	"k8s.io/utils/exec"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
)

// Filesystems are the types that a pool can be on. The first is the default for a blank device.
var Filesystems = []string{"xfs", "ext4", "btrfs"}

// A Device is a claim of volume mode Block.
type Device struct {
	// Path is where the device is in this container.
	Path string
	// Type is the filesystem that a blank device gets, one of Filesystems. A device that has one
	// keeps it, whatever its type.
	Type string
	// Options are mount options as in mount(8). If none of them concerns quotas, project quotas
	// are switched on where the filesystem and the kernel have them.
	Options []string
	Exec    exec.Interface
	Log     logr.Logger

	// grownBytes is the size of the device when its filesystem was last found to fill it.
	grownBytes int64
}

// Tree formats the device if it is blank, checks its filesystem and mounts it. A device that is
// mounted elsewhere is mounted once more as it is.
func (d *Device) Tree(ctx context.Context, state *dir.Dir) (*mounts.Tree, error) {
	device, err := blockdev.Find(d.Path)
	if err != nil {
		return nil, err
	}
	source := d.source(device)
	err = device.CheckUnused()
	if errors.Is(err, blockdev.ErrBusy) {
		return d.mountAgain(source, err)
	}
	if err != nil {
		return nil, err
	}
	kind, blank, err := d.prepare(ctx, device, state)
	if err != nil {
		return nil, err
	}
	tree, err := d.formatAndMount(source, kind, blank, quotaOptions[kind])
	if mounts.Unsupported(err) && !errors.Is(err, mounts.ErrOptions) && quotaOptions[kind] != nil {
		tree, err = d.withoutFeatures(device, source, kind, blank, err)
	}
	if err != nil {
		return nil, err
	}
	if err := forget(state); err != nil {
		return nil, errors.Join(err, tree.Close())
	}
	return tree, nil
}

// quotaOptions are those of mkfs for a filesystem that can have project quotas. XFS can without.
// A kernel without quotas does not mount an ext4 that has the features.
var quotaOptions = map[string][]string{"ext4": {"-I", "256", "-O", "project,quota"}}

// withoutFeatures formats a device that was blank once more, without the features for quotas, if this kernel does not take them, and the device has
// no more than the first time can have left. All other errors stay what they are: what is made without quotas never gets them again.
func (d *Device) withoutFeatures(device blockdev.Device, source, kind string, blank bool, why error) (*mounts.Tree, error) {
	if !refusesFeatures(kind, source) {
		return nil, why
	}
	if !blank {
		return nil, fmt.Errorf("%w. This kernel has no quotas of %s: \"tune2fs -O ^quota,^project %s\" takes them from the filesystem", why, kind, source)
	}
	found, err := probe(d.Exec, device.Path())
	if err != nil || !found.nothing() && found.filesystem != kind {
		return nil, errors.Join(why, err)
	}
	d.Log.Info("Formatting the device again, without the features for quotas", "device", device.String(), "reason", why.Error())
	if err := device.Erase(); err != nil {
		return nil, err
	}
	return d.formatAndMount(source, kind, true, nil)
}

// refusesFeatures reports whether this kernel mounts what is on a device for reading alone, as a filesystem that has the features, which are
// "read-only compatible", and not for writing. The pool's mount options, which may be refused themselves, are left out.
func refusesFeatures(kind, source string) bool {
	for range 2 {
		if !mounts.Unsupported(try(kind, source)) || try(kind, source, "ro") != nil {
			return false
		}
	}
	return true
}

func try(kind, source string, options ...string) error {
	tree, err := mounts.New(kind, source, options)
	if err != nil {
		return err
	}
	return tree.Close()
}

func (d *Device) formatAndMount(source, kind string, blank bool, options []string) (*mounts.Tree, error) {
	at := &detached{device: d}
	safe := mount.NewSafeFormatAndMount(at, guard{d.Exec, blank})
	err := safe.FormatAndMountSensitiveWithFormatOptions(source, d.Path, kind, d.Options, nil, options)
	return at.tree, cmp.Or(at.err, err)
}

// detached stands for mount(8) in SafeFormatAndMount: the mount is attached nowhere yet.
type detached struct {
	mount.Interface // nil: SafeFormatAndMount calls the one method below
	device          *Device
	tree            *mounts.Tree
	err             error // of the mount, which SafeFormatAndMount makes a string
}

// MountSensitive takes no sensitive options: there are none.
func (d *detached) MountSensitive(source, _, kind string, options, _ []string) error {
	d.tree, d.err = d.device.mount(source, kind, options)
	return d.err
}

// mountAgain mounts a device that is in use. If that is a mount, of a volume for example that
// is still published, the filesystem is the same.
func (d *Device) mountAgain(source string, inUse error) (*mounts.Tree, error) {
	found, err := probe(d.Exec, source)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(Filesystems, found.filesystem) {
		return nil, fmt.Errorf("%w, and has no filesystem for a pool (%s)", inUse, found)
	}
	tree, err := d.mount(source, found.filesystem, d.Options)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", inUse, err)
	}
	return tree, nil
}

// mount switches project quotas on if it can: the driver limits volumes with them. It leaves them out only if they were refused twice, as by a kernel
// without them, and the same mount without them works: no remount switches them on.
func (d *Device) mount(source, kind string, options []string) (*mounts.Tree, error) {
	says := func(option string) bool { return strings.Contains(option, "quota") }
	if kind == "btrfs" || slices.ContainsFunc(options, says) {
		return mounts.New(kind, source, options)
	}
	for again := false; ; again = true {
		tree, refused := mounts.New(kind, source, append(slices.Clone(options), "prjquota"))
		if !mounts.Unsupported(refused) {
			return tree, refused
		}
		tree, err := mounts.New(kind, source, options)
		if err != nil {
			return nil, err
		}
		if again {
			d.Log.Info("Mounted the pool without project quotas: the sizes of its volumes are not enforced", "reason", refused.Error())
			return tree, nil
		}
		if err := tree.Close(); err != nil {
			return nil, err
		}
	}
}

// source is the path of the device that mount tables show. It is the host's, for people and
// programs there, with a node in this container so that tools that read the mount table find it.
func (d *Device) source(device blockdev.Device) string {
	name, err := device.HostName()
	if err == nil {
		err = device.Node(name)
	}
	if err != nil {
		d.Log.Info("The device is mounted by its path in the container", "path", d.Path, "reason", err.Error())
		return d.Path
	}
	return name
}

// erase is what to do about what is on a device.
const erase = "If that can go, make a filesystem on it by hand with mkfs, or erase it with blkdiscard --zeroout"

// prepare returns the type of the filesystem that the device has, or is to get because it is blank.
// A device that is not blank, and has none, is an error, and so is one that cannot be read.
func (d *Device) prepare(ctx context.Context, device blockdev.Device, state *dir.Dir) (kind string, blank bool, err error) {
	zero, err := device.StartsBlank()
	if err != nil {
		return "", false, err
	}
	found, err := probe(d.Exec, device.Path())
	if err != nil {
		return "", false, err
	}
	unfinished, err := noted(state, device)
	if err != nil {
		return "", false, err
	}
	switch {
	case unfinished && found.unfinished(device):
		// A mounter was killed while it formatted this device, which was blank before.
		d.Log.Info("Formatting the device again: the last time was not finished", "device", device.String())
		return d.Type, true, device.Erase()
	case slices.Contains(Filesystems, found.filesystem):
		if found.filesystem != d.Type {
			d.Log.Info("The device has a filesystem of another type, and keeps it", "device", device.String(), "type", found.filesystem)
		}
		return found.filesystem, false, nil
	case !found.nothing():
		return "", false, fmt.Errorf("%s: %w: it has %s. %s", device, ErrForeign, found, erase)
	case !zero:
		return "", false, fmt.Errorf("%s: %w: its first 4096 bytes have data of an unknown kind. %s", device, ErrForeign, erase)
	default:
		// What mkfs had written when it was killed, and has no name, cannot be told from data of another program.
		if zero, err = device.Blank(ctx); err != nil {
			return "", false, err
		}
		if !zero {
			return "", false, fmt.Errorf("%s: %w: it does not read as zeroes everywhere, and what it has is of an unknown kind. %s", device, ErrForeign, erase)
		}
	}
	if err := mounts.CheckOptions(d.Type, device.Path(), d.Options); err != nil {
		return "", false, err
	}
	d.Log.Info("Formatting the device", "device", device.String(), "type", d.Type)
	return d.Type, true, note(state, device)
}

// Is compares the number of the device with that of the filesystem. On btrfs that has a number of
// its own, so it is mounted once more: that is the same filesystem.
func (d *Device) Is(mount *mountinfo.Mount, root dir.ID) (bool, error) {
	device, err := blockdev.Find(d.Path)
	if err != nil {
		return false, err
	}
	if root.Dev == device.Number().Dev() {
		// Another directory of the filesystem is mounted there by hand.
		return mount.Root == "/", nil
	}
	if mount.Type != "btrfs" || !errors.Is(device.CheckUnused(), blockdev.ErrBusy) {
		return false, nil
	}
	again, err := mounts.New(mount.Type, d.Path, d.Options)
	if err != nil {
		return false, fmt.Errorf("compare %s with %s: %w", mount.Mountpoint, device, err)
	}
	id, err := again.ID()
	return id == root, errors.Join(err, again.Close())
}

// Unused opens the device exclusively.
func (d *Device) Unused() error {
	device, err := blockdev.Find(d.Path)
	if err != nil {
		return err
	}
	err = device.CheckUnused()
	if errors.Is(err, blockdev.ErrBusy) {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}

// Grow compares the size of the device with the last one, and has the filesystem fill the device if it
// changed. After a start it always does: the last mounter may have been killed before that.
func (d *Device) Grow(at *mountinfo.Mount) error {
	device, err := blockdev.Find(d.Path)
	if err != nil {
		return err
	}
	size, err := device.SizeBytes()
	if err != nil || size == d.grownBytes {
		return err
	}
	// xfs_growfs and resize2fs search for the device by its name in the mount table.
	if strings.HasPrefix(at.Source, "/dev/") {
		if err := device.Node(at.Source); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	resize := mount.NewResizeFs(d.Exec)
	need, err := resize.NeedResize(d.Path, at.Mountpoint)
	if err != nil {
		return err
	}
	if need {
		if _, err := resize.Resize(d.Path, at.Mountpoint); err != nil {
			return err
		}
		d.Log.Info("The filesystem fills the device", "device", device.String(), "bytes", size)
	}
	d.grownBytes = size
	return nil
}
