package reconcile

import (
	"context"
	"errors"
	"path"
	"slices"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// detachLimit is how long a check may wait for devices that are in use.
const detachLimit = time.Second

// DetachUnpublished detaches the devices of the pool's files that are published nowhere: a crash came before their
// publication, or after the end of it.
func (p *Repairs) DetachUnpublished(ctx context.Context) {
	all, ok := p.attachments("failed to check for devices that are not published")
	if !ok {
		return
	}
	all.Devices = slices.DeleteFunc(all.Devices, func(d loop.Device) bool { return !all.Unused(d) })
	if len(all.Devices) == 0 {
		return
	}
	ctx, stop := context.WithTimeout(ctx, detachLimit)
	defer stop()
	p.eachWithDevices("failed to detach the device of a volume that is not published", func(id volume.ID) error {
		return p.In.WithFile(id, func(file content.VolumeFile) error {
			if of, err := all.Of(file); err != nil || len(of.Attached) == 0 {
				return err
			}
			return p.In.Host.DetachUnpublished(ctx, file) // it may have been published since
		})
	})
}

// DetachDeleted detaches devices on deleted files of the pool's filesystem that are published nowhere: another driver
// removed the volume, and knew of no device. Until then the filesystem cannot be unmounted.
func (p *Repairs) DetachDeleted(ctx context.Context) {
	orphans, err := p.In.Host.Orphans(p.In.Store.Root())
	p.In.Step()
	if err != nil {
		p.In.Log.Error(err, "Failed to check for devices on deleted files")
		return
	}
	ctx, stop := context.WithTimeout(ctx, detachLimit)
	defer stop()
	for _, device := range orphans {
		id, _ := volume.ParseID(path.Base(path.Dir(device.FormerPath))) // in the trash it has no id
		if err := p.UnlessBusyAnywhere(id, func() error { return p.detachDeleted(ctx, device) }); err != nil {
			p.In.Log.Error(err, "Failed to detach a device on a deleted file", "device", device.Name, "file", device.FormerPath)
		}
	}
}

func (p *Repairs) detachDeleted(ctx context.Context, device loop.Device) error {
	// It may have been published since.
	published, err := p.In.Host.Mounts.Published(p.In.Host.Dev)
	if err != nil || len(published[device.Name]) > 0 {
		return err
	}
	p.In.Log.Info("Detaching a device on a deleted file", "device", device.Name, "file", device.FormerPath)
	return p.In.Host.Devices.Detach(ctx, device)
}

// Records gives the records of block volumes the sizes of files that are larger: a crash interrupted a growth
// between the two.
func (p *Repairs) Records() {
	for id := range p.In.Ledger.Each(ledger.Info.MayHaveDevices) {
		p.In.Step()
		larger, err := p.fileBytes(id)
		if err == nil && larger > p.In.Ledger.Known(id).Promised {
			err = p.UnlessPromising(id, func() error { return p.record(id) })
		}
		if err != nil {
			p.In.Log.Error(err, "Failed to finish an interrupted growth; the file of the volume may be larger than promised", "volume", id.String())
		}
	}
}

func (p *Repairs) record(id volume.ID) error {
	bytes, err := p.fileBytes(id)
	if err != nil {
		return err
	}
	rec, err := p.In.Store.Records().Read(id)
	if err != nil || rec == nil || rec.Mode != volume.ModeBlock || bytes <= rec.Bytes {
		return err
	}
	p.In.Log.Info("Finished an interrupted growth", "volume", id.String(), "had", rec.Bytes, "has", bytes)
	rec.Bytes = bytes
	if err := p.In.Store.Records().Write(rec); err != nil {
		return store.IgnoreReadOnly(err)
	}
	p.In.Ledger.Note(id, InfoOf(store.Entry{Record: rec, Present: true}))
	return nil
}

// fileBytes is the size that the file of a block volume allows to promise; 0 if it has no file.
func (p *Repairs) fileBytes(id volume.ID) (int64, error) {
	d, err := p.In.Store.Root().Open(id.String())
	if dir.IsMissing(err) {
		return 0, nil // a call has removed it since
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	bytes, err := content.FileBytes(id, d)
	if errors.Is(err, volume.ErrLost) {
		return 0, nil
	}
	return bytes / loop.Unit * loop.Unit, err
}

// Devices makes devices as large as their volumes: a crash came between record and device.
func (p *Repairs) Devices() {
	all, ok := p.attachments("failed to check for devices that are smaller than their volumes")
	if !ok {
		return
	}
	p.eachWithDevices("failed to grow the device of a volume", func(id volume.ID) error {
		return p.In.WithFile(id, func(file content.VolumeFile) error {
			of, err := all.Of(file)
			if err != nil {
				return err
			}
			return of.Grow(p.In.Ledger.Known(id).Promised)
		})
	})
}

// attachments are those of the node, if volumes of the pool may have some of them.
func (p *Repairs) attachments(failed string) (all content.Attachments, ok bool) {
	if !p.In.Ledger.Any(ledger.Info.MayHaveDevices) {
		return content.Attachments{}, false
	}
	all, err := p.In.Host.Attachments()
	p.In.Step() // devices of others may make it take seconds
	if err != nil {
		p.In.Log.Error(err, failed)
		return content.Attachments{}, false
	}
	return all, len(all.Devices) > 0
}

// eachWithDevices does something about each volume that may have devices, and logs what fails.
func (p *Repairs) eachWithDevices(failed string, do func(id volume.ID) error) {
	for id := range p.In.Ledger.Each(ledger.Info.MayHaveDevices) {
		p.In.Step()
		if err := p.UnlessBusy(id, func() error { return do(id) }); err != nil {
			p.In.Log.Error(err, failed, "volume", id.String())
		}
	}
}
