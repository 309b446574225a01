package pool

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// host is what contents need of the node.
func (p *Pool) host() content.Host { return p.options.host(p.log) }

func (s *Set) host() content.Host { return s.options.host(s.options.Log) }

func (o Options) host(log logr.Logger) content.Host {
	return content.Host{Mounts: o.Mounts, Labels: o.Labels, Devices: o.Devices, Dev: o.Dev, Log: log}
}

// growContent makes the content of a volume larger, and its limit before that, and answers the
// size that it had. What of it fails changes nothing.
func (v *found) growContent(ctx context.Context, to store.Entry) (had int64, err error) {
	keeper := v.visit.keeper
	if had, err = content.FileBytes(v.id, v.dir); err != nil {
		return 0, err
	}
	if err = keeper.Apply(v.dir, scan.CardOf(to)); err == nil {
		err = v.visit.scan().Content(v.id, v.entry.Record).Grow(ctx, v.dir, to.Record.Bytes)
	}
	if err != nil {
		return 0, errors.Join(err, keeper.Apply(v.dir, scan.CardOf(v.entry)))
	}
	return had, nil
}

// cutFile undoes growContent where the record was not written.
func (v *found) cutFile(had int64) error {
	if !v.entry.Block() || v.entry.Record.Bytes > had {
		return nil
	}
	return errors.Join(v.visit.scan().Disk(v.id, v.entry.Record).Cut(v.dir, had), v.visit.keeper.Apply(v.dir, scan.CardOf(v.entry)))
}

// attachments are those of the node, if each of them reports whether it is the volume's. One
// that does not answer may be by its name, which is that of the volume's file now.
func (v *found) attachments() (content.Attachments, error) {
	all, err := v.visit.pool.host().Attachments()
	if err != nil {
		return content.Attachments{}, err
	}
	return all, all.Silent(v.id)
}

// file identifies what devices of a volume are attached to: see scan.FileOf.
func (v *found) file() (id dir.ID, ok bool, err error) { return scan.FileOf(v.id, v.entry, v.dir) }

// detachUnpublished detaches the volume's devices that are published nowhere.
func (v *found) detachUnpublished(ctx context.Context) error {
	file, ok, err := v.file()
	if err != nil || !ok {
		return err
	}
	return v.visit.pool.host().DetachUnpublished(ctx, file)
}

// used reports whether this node has the volume published, or its file attached.
func (v *found) used() (bool, error) {
	published, err := v.published()
	if err != nil || len(published) > 0 {
		return true, err
	}
	file, ok, err := v.file()
	if err != nil || !ok {
		return false, err
	}
	all, err := v.attachments()
	return len(all.Of(file)) > 0, err
}

// detached detaches what a crash left attached, and answers ErrInUse, with the device,
// for a volume whose file is attached all the same: in use, or by somebody else.
func (v *found) detached(ctx context.Context) error {
	if err := v.detachUnpublished(ctx); err != nil {
		return err
	}
	file, ok, err := v.file()
	if err != nil || !ok {
		return err
	}
	all, err := v.attachments()
	if err != nil {
		return err
	}
	for _, device := range all.Of(file) {
		return fmt.Errorf("it is %w: its file is attached as %s", volume.ErrInUse, device.Name)
	}
	return nil
}

// ofAnother reports whether a device that is published is that of another volume. One
// whose volume went away, or was restored from a backup, is nobody's: a pod can end.
func (s *Set) ofAnother(id volume.ID, device *loop.Device) bool {
	if device == nil || !device.Ours || s.isOf(id, device) {
		return false
	}
	for _, p := range s.pools {
		in, err := p.enter()
		if err != nil {
			continue // the target would hang with the pool
		}
		held := in.holds(device.Backing)
		in.close()
		if held {
			return true
		}
	}
	return false
}

func (s *Set) isOf(id volume.ID, device *loop.Device) bool {
	v, err := s.find(id, volume.PoolName{})
	if err != nil {
		return false
	}
	defer v.close()
	file, ok, err := v.file()
	return err == nil && ok && file == device.Backing
}

// holds reports whether a volume of the pool has that file.
func (v *visit) holds(file dir.ID) bool {
	for id := range v.pool.ledger.Each(ledger.Card.MayHaveDevices) {
		if found, ok, err := v.backing(id); err == nil && ok && found == file {
			return true
		}
	}
	return false
}

// backing is found.file, whatever the record says.
func (v *visit) backing(id volume.ID) (file dir.ID, ok bool, err error) {
	d, err := v.store.Root().Open(id.String())
	if err != nil {
		return dir.ID{}, false, err
	}
	defer func() { _ = d.Close() }()
	return (&found{id: id, dir: d}).file()
}

// grownTo is the size to promise where a growth was interrupted: that of the file,
// which is larger than its record then, and never shrinks.
func (v *found) grownTo(bytes int64, r volume.Range) (int64, error) {
	if !v.entry.Block() {
		return bytes, nil
	}
	disk, err := content.OpenFile(v.id, v.dir)
	if err != nil {
		return 0, err
	}
	has, err := disk.Size()
	if err := errors.Join(err, disk.Close()); err != nil || has <= bytes {
		return bytes, err
	}
	if r.Limit > 0 && has > r.Limit {
		return 0, fmt.Errorf("%w: its file has %d bytes already, from a growth that was interrupted, and never shrinks", volume.ErrOutOfRange, has)
	}
	return has, nil
}

// growDevices makes the devices of a volume as large as its file is.
func (v *found) growDevices() error {
	if !v.entry.Block() {
		return nil
	}
	file, err := content.FileID(v.id, v.dir)
	if err != nil {
		return err
	}
	all, err := v.attachments()
	if err != nil {
		return err
	}
	return content.DeviceError(v.visit.pool.host().Grow(all.Of(file), math.MaxInt64))
}
