package reconcile

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A VolumeUse is how this node uses a volume, as a call has read it.
type VolumeUse struct {
	Host  content.Host
	Root  *dir.Dir // of the pool
	ID    volume.ID
	Entry store.Entry
	Dir   *dir.Dir // nil if the directory is lost
	// Marked reports whether the node has noted that it publishes the volume, or notes that of none.
	Marked func() (bool, error)
}

// file identifies what devices of the volume are attached to: see FileOf.
func (u *VolumeUse) file() (file content.VolumeFile, ok bool, err error) {
	return FileOf(u.ID, u.Entry, u.Dir)
}

// Published are the mounts of the volume, of what is inside it, and of its devices.
func (u *VolumeUse) Published() ([]bind.Publication, error) {
	mounts, err := u.mounts()
	if err != nil {
		return nil, err
	}
	file, ok, err := u.file()
	if err != nil || !ok {
		return mounts, err
	}
	devices, err := u.Host.DevicesOf(file)
	return append(mounts, devices.Publications()...), err
}

// mounts are those of the volume, and of what is inside it. Those that are known by a name alone, which a pod may have chosen, count as
// long as the node has it noted that it publishes the volume.
func (u *VolumeUse) mounts() ([]bind.Publication, error) {
	all, err := u.Host.Mounts.Published(u.Root)
	if err != nil {
		return nil, err
	}
	mounts := slices.Clone(all[u.ID.String()])
	byName := func(p bind.Publication) bool { return p.ByName }
	if !slices.ContainsFunc(mounts, byName) {
		return mounts, nil
	}
	marked, err := u.Marked()
	if err == nil && !marked {
		mounts = slices.DeleteFunc(mounts, byName)
	}
	return mounts, err
}

// Used reports whether this node has the volume published, or its file attached.
func (u *VolumeUse) Used() (bool, error) {
	mounts, err := u.mounts()
	if err != nil || len(mounts) > 0 {
		return true, err
	}
	file, ok, err := u.file()
	if err != nil || !ok {
		return false, err
	}
	// What is published of a device is attached: each device of the node is asked once.
	devices, err := u.Host.DevicesOf(file)
	return len(devices.Attached) > 0, err
}

// Written reports whether pods or devices of this node may write to the volume: it is used, and not only by directories that
// are mounted read-only.
func (u *VolumeUse) Written() (bool, error) {
	if u.Entry.Block() {
		return u.Used()
	}
	published, err := u.Published()
	writable := func(p bind.Publication) bool { return !p.ReadOnly }
	return err != nil || slices.ContainsFunc(published, writable), err
}

// DetachUnpublished detaches the volume's devices that are published nowhere.
func (u *VolumeUse) DetachUnpublished(ctx context.Context) error {
	file, ok, err := u.file()
	if err != nil || !ok {
		return err
	}
	return u.Host.DetachUnpublished(ctx, file)
}

// Detach detaches what a crash left attached. It returns ErrInUse, with the device, for a volume whose file is attached
// all the same: in use, or by another process.
func (u *VolumeUse) Detach(ctx context.Context) error {
	if err := u.DetachUnpublished(ctx); err != nil {
		return err
	}
	file, ok, err := u.file()
	if err != nil || !ok {
		return err
	}
	devices, err := u.Host.DevicesOf(file)
	if err != nil {
		return err
	}
	for _, device := range devices.Attached {
		return fmt.Errorf("it is %w: its file is attached as %s", volume.ErrInUse, device.Name)
	}
	return nil
}

// GrowDevices makes the devices of a block volume as large as its file is.
func (u *VolumeUse) GrowDevices() error {
	if !u.Entry.Block() {
		return nil
	}
	file, err := content.FileOf(u.ID, u.Dir)
	if err != nil {
		return err
	}
	devices, err := u.Host.DevicesOf(file)
	if err != nil {
		return err
	}
	return content.DeviceError(devices.Grow(math.MaxInt64))
}

// CheckPublished returns ErrNotFound unless the volume is published at the path.
func (u *VolumeUse) CheckPublished(at bind.Target) error {
	if u.Entry.Block() {
		return u.Host.CheckPublished(u.ID, u.Dir, at)
	}
	err := u.checkDirectory(at)
	if !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	if _, ok, fileErr := u.file(); ok && fileErr == nil {
		return u.Host.CheckPublished(u.ID, u.Dir, at)
	}
	return err
}

func (u *VolumeUse) checkDirectory(at bind.Target) error {
	d, err := u.Host.Mounts.Open(at)
	if dir.IsMissing(err) || errors.Is(err, bind.ErrTarget) {
		return fmt.Errorf("%w: %w", volume.ErrNotFound, err)
	}
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	same, err := dir.Same(d, u.Dir)
	if err == nil && !same {
		err = fmt.Errorf("%w: it is not published at %s", volume.ErrNotFound, at)
	}
	return err
}

// PublishedVolumes are the volumes of a pool that this node has published. The caller holds no lock.
func PublishedVolumes(p *View) (map[volume.ID]bool, error) {
	mounts, err := p.Host.Mounts.Published(p.Store.Root())
	if err != nil {
		return nil, err
	}
	published := make(map[volume.ID]bool)
	for name := range mounts {
		if id, err := volume.ParseID(name); err == nil {
			published[id] = true
		}
	}
	if !p.Ledger.Any(ledger.Info.MayHaveDevices) {
		return published, nil
	}
	attached, err := p.Host.Attachments()
	if err != nil {
		return nil, err
	}
	for id := range p.Ledger.Each(ledger.Info.MayHaveDevices) {
		// One that cannot be read now is looked at again.
		_ = p.WithFile(id, func(file content.VolumeFile) error {
			of, err := attached.Of(file)
			if len(of.Publications()) > 0 {
				published[id] = true
			}
			return err
		})
	}
	return published, nil
}

// HoldsFile reports whether a volume of the pool has the file of a device. One that only reads may show a file of its pod
// (LOOP_CHANGE_FD), also one in a directory without a record.
func HoldsFile(p *View, d *loop.Device) bool {
	for id, c := range p.Ledger.Each(ledger.Info.MayHaveDevices) {
		if d.ReadOnly && !c.Is(ledger.HasRecord|ledger.HasDamage) {
			continue
		}
		held := false
		err := p.WithFile(id, func(file content.VolumeFile) (err error) {
			held, err = p.Host.IsOf(*d, file)
			return err
		})
		if err == nil && held {
			return true
		}
	}
	return false
}
