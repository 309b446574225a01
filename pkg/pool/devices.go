package pool

import (
	"context"
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// ofAnother reports whether a device that is published is that of another volume. One
// whose volume went away, or was restored from a backup, is that of none: a pod can end.
func (s Publications) ofAnother(ctx context.Context, id volume.ID, device *loop.Device) bool {
	if device == nil || !device.Ours || s.isOf(ctx, id, device) {
		return false
	}
	for _, p := range s.set.node.Pools {
		in, err := p.Enter(ctx)
		if err != nil {
			continue // the target would hang with the pool
		}
		held := reconcile.HoldsFile(in.View(), device)
		in.Close()
		if held {
			return true
		}
	}
	return false
}

func (s Publications) isOf(ctx context.Context, id volume.ID, device *loop.Device) bool {
	v, err := s.set.find(ctx, id, volume.PoolName{})
	if err != nil {
		return false
	}
	defer v.close()
	file, ok, err := reconcile.FileOf(v.id, v.entry, v.dir)
	if err != nil || !ok {
		return false
	}
	is, err := v.visit.View().Host.IsOf(*device, file)
	return err == nil && is
}

// isInPool reports whether the file of a device is where the volumes of a pool are. It may have been one, and been moved aside for one
// from a backup. A volume that is a subvolume of a btrfs has a device number of its own.
func (s Publications) isInPool(ctx context.Context, device *loop.Device) bool {
	for _, p := range s.set.node.Pools {
		in, err := p.Enter(ctx)
		if err != nil {
			continue
		}
		root, err := in.Store.Root().ID()
		in.Close()
		if err == nil && root.Dev == device.Backing.Dev {
			return true
		}
	}
	return false
}

// restore marks a mounted device of a volume as one of the driver's again: a pod can remove the mark. Without its pool the
// kernel's name of its file shows whose it is, and a pod can end where that does not help.
func (s Publications) restore(ctx context.Context, id volume.ID, device *loop.Device) error {
	if device == nil || device.Ours || device.Silent || device.Gone {
		return nil
	}
	own := s.isOf(ctx, id, device)
	if !own && !s.hasName(id, *device) {
		return nil
	}
	now, err := s.set.node.Options.Devices.Restore(*device)
	if err == nil {
		*device = now
	}
	if !own || errors.Is(err, loop.ErrNotAttached) {
		return nil
	}
	return content.DeviceError(err)
}

// hasName reports whether the kernel knows the file of a device by the name of a volume.
func (s Publications) hasName(id volume.ID, device loop.Device) bool {
	at, err := s.set.node.Options.Devices.FilePath(device.Name)
	device.FormerPath = at
	return err == nil && device.HadPath(id.String(), content.FileName)
}
