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
}

// Attachments reads them.
func (h Host) Attachments() (Attachments, error) {
	devices, err := h.Devices.Attached(FileName)
	if err != nil || len(devices) == 0 {
		return Attachments{}, err
	}
	published, err := h.Mounts.Published(h.Dev)
	return Attachments{Devices: devices, Published: published}, err
}

// AttachmentsOf are those of the node, if each of them reports whether it is on the file of a volume. One that does not answer may be.
// One that is, through an earlier mount of the pool, counts as on the file. The directory is the volume's.
func (h Host) AttachmentsOf(id volume.ID, file dir.ID, d *dir.Dir) (Attachments, error) {
	all, err := h.Attachments()
	if err != nil {
		return Attachments{}, err
	}
	for i, device := range all.Devices {
		if device.Backing == file || !device.Backing.MayBe(file) {
			continue
		}
		device.FormerPath, err = h.Devices.FilePath(device.Name)
		if err != nil && !errors.Is(err, loop.ErrNotAttached) {
			return Attachments{}, err
		}
		if !device.HadPath(id.String(), FileName) {
			continue
		}
		anew, err := dir.MayBeMountedAnew(d.Fd())
		if err != nil {
			return Attachments{}, err
		}
		if anew {
			all.Devices[i].Backing = file
		}
	}
	return all, all.Silent(id)
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

// Of are the devices of one file.
func (a Attachments) Of(file dir.ID) (devices []loop.Device) {
	for _, d := range a.Devices {
		if d.Backing == file {
			devices = append(devices, d)
		}
	}
	return devices
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

// Publications are those of the devices of one file.
func (a Attachments) Publications(file dir.ID) (all []bind.Publication) {
	for _, d := range a.Of(file) {
		all = append(all, a.Published[d.Name]...)
	}
	return all
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

// DetachUnpublished detaches the devices of a file that are published nowhere. It
// returns ErrInUse for one that a process has open.
func (h Host) DetachUnpublished(ctx context.Context, file dir.ID) error {
	all, err := h.Attachments()
	if err != nil {
		return err
	}
	for _, device := range all.Of(file) {
		if all.Unused(device) {
			err = errors.Join(err, h.Devices.Detach(ctx, device))
		}
	}
	return DeviceError(err)
}

// Grow makes the driver's devices as large as their files are, if they have fewer bytes than
// that.
func (h Host) Grow(devices []loop.Device, fewerThan int64) (err error) {
	for _, device := range devices {
		if device.Ours && device.SizeBytes < fewerThan {
			_, growErr := h.Devices.Grow(device)
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
	file, err := FileID(id, d)
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
	if device == nil || device.Backing != file {
		return fmt.Errorf("%w: it is not published at %s", volume.ErrNotFound, at)
	}
	return nil
}
