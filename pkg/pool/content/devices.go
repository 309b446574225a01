package content

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Attachments are the loop devices of the node that may be of block volumes, and where they are published.
type Attachments struct {
	Devices   []loop.Device
	Published map[string][]bind.Publication
	host      Host
}

// Attachments reads them.
func (h Host) Attachments() (Attachments, error) {
	devices, err := h.Devices.Attached(FileName)
	if err != nil || len(devices) == 0 {
		return Attachments{}, err
	}
	published, err := h.Mounts.Published(h.Dev)
	return Attachments{Devices: devices, Published: published, host: h}, err
}

// A VolumeFile is the file of a block volume, by which its devices are known.
type VolumeFile struct {
	volume volume.ID
	id     dir.ID
	// anew reports whether it can have devices through an earlier mount of its filesystem.
	anew func() (bool, error)
}

// FileOf identifies the file of a block volume, in whose directory it is. That stays open as long as this is used, or until Keep. It
// does not open the file: a pod can have one there that cannot be opened. Errors: volume.ErrLost.
func FileOf(id volume.ID, d *dir.Dir) (VolumeFile, error) {
	file, err := dir.FileID(d, FileName)
	return fileIn(id, d, file), lostFile(id, err)
}

func fileIn(id volume.ID, d *dir.Dir, file dir.ID) VolumeFile {
	return VolumeFile{volume: id, id: file, anew: func() (bool, error) { return dir.MayBeMountedAnew(d.Fd()) }}
}

// Keep is the same file for when its directory is closed.
func (f VolumeFile) Keep() VolumeFile {
	anew, err := f.anew()
	f.anew = func() (bool, error) { return anew, err }
	return f
}

// IsOf reports whether a device is on the file of a volume, also through an earlier mount of the pool: then the file has another device
// number there, but its inode number, its name, and that of the volume's directory. All that is done with devices goes by this.
// For detaching one it has to have the driver's mark too, and to be neither published nor open. All of that has besides only a device of
// another driver of this kind, on a copy of the pool that was made below the filesystem, in the instant between attaching and mounting.
func (h Host) IsOf(device loop.Device, f VolumeFile) (bool, error) { return h.isOf(&device, f) }

// isOf is IsOf. Volumes of btrfs all have files of one number: the path is read once for each device, and not for each pair.
func (h Host) isOf(device *loop.Device, f VolumeFile) (bool, error) {
	if device.Backing == f.id || !device.Backing.MayBe(f.id) {
		return device.Backing == f.id, nil
	}
	if device.FormerPath == "" {
		var err error
		device.FormerPath, err = h.Devices.FilePath(device.Name)
		if errors.Is(err, loop.ErrNotAttached) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	if !device.HadPath(f.volume.String(), FileName) {
		return false, nil
	}
	return f.anew()
}

// Of are those of one volume, as far as they answer.
func (a Attachments) Of(f VolumeFile) (VolumeDevices, error) {
	of := VolumeDevices{node: a}
	for i := range a.Devices {
		is, err := a.host.isOf(&a.Devices[i], f)
		if err != nil {
			return VolumeDevices{}, err
		}
		if is {
			of.Attached = append(of.Attached, a.Devices[i])
		}
	}
	return of, nil
}

// DevicesOf are the devices of a volume. It returns volume.ErrUnavailable if one may be that does not answer.
func (h Host) DevicesOf(f VolumeFile) (VolumeDevices, error) {
	all, err := h.Attachments()
	if err != nil {
		return VolumeDevices{}, err
	}
	if err := all.Silent(f.volume); err != nil {
		return VolumeDevices{}, err
	}
	return all.Of(f)
}

// mounted are the names of the devices that are published.
func (h Host) mounted() (map[string]bool, error) {
	published, err := h.Mounts.Published(h.Dev)
	names := make(map[string]bool, len(published))
	for name := range published {
		names[name] = true
	}
	return names, err
}

// Silent returns volume.ErrUnavailable for a volume that may have a device which does not
// answer whose it is.
func (a Attachments) Silent(id volume.ID) error {
	for _, d := range a.Devices {
		if d.Silent && d.HadPath(id.String(), FileName) {
			return fmt.Errorf("%w: %s may be its device: %w", volume.ErrUnavailable, d.Name, loop.ErrSilent)
		}
	}
	return nil
}

// Unused reports whether a device is ours to detach.
func (a Attachments) Unused(d loop.Device) bool { return d.Ours && len(a.Published[d.Name]) == 0 }

// Orphans are the devices of the driver on deleted files of block volumes that can have been on
// the filesystem of that directory. The kernel does not know any more whose they were.
func (h Host) Orphans(root *dir.Dir) ([]loop.Device, error) {
	deleted, err := h.Devices.OnDeleted(FileName)
	if err != nil || len(deleted) == 0 {
		return nil, err
	}
	here, err := dir.FilesystemOf(root)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(deleted, func(d loop.Device) bool { return !here.MayHold(d.Backing) }), nil
}

// DetachUnpublished detaches the devices of a volume that are published nowhere. It
// returns ErrInUse for one that a process has open.
func (h Host) DetachUnpublished(ctx context.Context, f VolumeFile) error {
	all, err := h.Attachments()
	if err != nil {
		return err
	}
	of, err := all.Of(f)
	if err != nil {
		return err
	}
	return of.DetachUnpublished(ctx)
}

// VolumeDevices are the devices of one volume, and where they are published.
type VolumeDevices struct {
	Attached []loop.Device
	node     Attachments
}

// Publications are those of the devices.
func (v VolumeDevices) Publications() (all []bind.Publication) {
	for _, d := range v.Attached {
		all = append(all, v.node.Published[d.Name]...)
	}
	return all
}

// DetachUnpublished is that of Host, for devices as they were read.
func (v VolumeDevices) DetachUnpublished(ctx context.Context) (err error) {
	for _, device := range v.Attached {
		if v.node.Unused(device) {
			err = errors.Join(err, v.node.host.Devices.Detach(ctx, device))
		}
	}
	return DeviceError(err)
}

// Grow makes the driver's devices as large as the file is, if they have fewer bytes than that.
func (v VolumeDevices) Grow(fewerThan int64) (err error) {
	for _, device := range v.Attached {
		if device.Ours && device.SizeBytes < fewerThan {
			_, growErr := v.node.host.Devices.Grow(device)
			err = errors.Join(err, growErr)
		}
	}
	return err
}

// DeviceError translates the errors of the loop devices into those of pkg/volume.
func DeviceError(err error) error {
	switch {
	case errors.Is(err, loop.ErrSilent):
		return fmt.Errorf("%w: %w", volume.ErrUnavailable, err)
	case errors.Is(err, loop.ErrNoDevice), errors.Is(err, loop.ErrNodes):
		return fmt.Errorf("%w: %w", volume.ErrNoSpace, err)
	case errors.Is(err, loop.ErrBusy), errors.Is(err, loop.ErrForeign):
		return fmt.Errorf("%w: %w", volume.ErrInUse, err)
	}
	return err
}

// DeviceAt is the loop device that is published at the target; nil if there is none.
func (h Host) DeviceAt(target bind.Target) (*loop.Device, error) {
	published, err := h.Mounts.Published(h.Dev)
	if err != nil {
		return nil, err
	}
	for name, all := range published {
		for _, p := range all {
			if !target.Is(p.Path) {
				continue
			}
			device, err := h.Devices.Inspect(name)
			if errors.Is(err, loop.ErrNotAttached) {
				return nil, nil
			}
			return &device, err
		}
	}
	return nil, nil
}

// DetachPublished takes the device that was published for a volume off its file if it is published nowhere any more. Another
// device may have its number by then, also of another driver of this kind: a pod can end its own, and the number goes to
// whatever program of the node asks next. So own says that its file is that of the volume, or on the filesystem of the pools;
// else the kernel must know the file by the name of the volume, whose pool cannot be reached.
func (h Host) DetachPublished(ctx context.Context, id volume.ID, device *loop.Device, own bool) error {
	if device == nil || device.Silent {
		return nil // the sweep detaches it when it answers
	}
	if device.Gone {
		return h.detachGone(ctx, id, *device)
	}
	all, err := h.Attachments()
	if err != nil || !all.Unused(*device) {
		return err
	}
	// One that only reads may show another file of its pod (LOOP_CHANGE_FD), which it would keep.
	if !own && !device.ReadOnly {
		device.FormerPath, err = h.Devices.FilePath(device.Name)
		if errors.Is(err, loop.ErrNotAttached) {
			return nil
		}
		if err != nil || !device.HadPath(id.String(), FileName) {
			h.Log.Info("Leaving a device attached that is not known to be of the volume", "volume", id.String(), "device", device.Name, "file", device.FormerPath)
			return err
		}
	}
	return trace.Step(ctx, "detach loop device", func() error {
		return DeviceError(h.Devices.Detach(ctx, *device))
	})
}

// detachGone is DetachPublished where the filesystem of the file is gone. The device would keep what
// is left of that, which could not be repaired then. What it was published for shows whose
// it is: a volume of that name, and the kernel has that name of the file too.
func (h Host) detachGone(ctx context.Context, id volume.ID, device loop.Device) error {
	if !device.HadPath(id.String(), FileName) {
		return nil
	}
	published, err := h.Mounts.Published(h.Dev)
	if err != nil || len(published[device.Name]) > 0 {
		return err
	}
	return DeviceError(h.Devices.Detach(ctx, device))
}

// CheckPublished returns volume.ErrNotFound unless the path carries a device of the volume.
func (h Host) CheckPublished(id volume.ID, d *dir.Dir, at bind.Target) error {
	file, err := FileOf(id, d)
	if err != nil {
		return err
	}
	device, err := h.DeviceAt(at)
	if err != nil {
		return err
	}
	if device != nil && device.Gone {
		return fmt.Errorf("%w: the filesystem of the device at %s is gone", volume.ErrIO, at)
	}
	if device != nil && device.Silent {
		return fmt.Errorf("%w: the device at %s: %w", volume.ErrUnavailable, at, loop.ErrSilent)
	}
	of := false
	if device != nil {
		of, err = h.IsOf(*device, file)
	}
	if err == nil && !of {
		err = fmt.Errorf("%w: it is not published at %s", volume.ErrNotFound, at)
	}
	return err
}
