package content

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Attachments are the loop devices of the node, and where they are published.
type Attachments struct {
	Devices   []loop.Device
	Published map[string][]bind.Publication
}

// Attachments reads them.
func (h Host) Attachments() (Attachments, error) {
	devices, err := h.Devices.Attached()
	if err != nil || len(devices) == 0 {
		return Attachments{}, err
	}
	published, err := h.Mounts.Published(h.Dev)
	return Attachments{Devices: devices, Published: published}, err
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

// Silent answers volume.ErrUnavailable for a volume that may have a device which does not
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
// the filesystem of that directory. Whose they were the kernel cannot tell any more.
func (h Host) Orphans(root *dir.Dir) ([]loop.Device, error) {
	deleted, err := h.Devices.OnDeleted(FileName)
	if err != nil || len(deleted) == 0 {
		return nil, err
	}
	here, err := root.Filesystem()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(deleted, func(d loop.Device) bool { return !here.MayHold(d.Backing) }), nil
}

// DetachUnpublished detaches the devices of a file that are published nowhere. It
// answers ErrInUse for one that a process has open.
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
