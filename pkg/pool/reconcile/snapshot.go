package reconcile

import (
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Snapshot is the condition of a snapshot of which the disk has that. The directory may be nil.
func (l *Listing) Snapshot(id volume.ID, e store.Entry, d *dir.Dir) health.Condition {
	facts := health.Facts{Pool: l.Err, Missing: e.Lost(), Damaged: e.Damage, FilesystemErrors: max(0, l.In.Errors)}
	if e.Record == nil && e.Damage == nil {
		facts.Damaged = fmt.Errorf("%w of %s: there is none", volume.ErrDamagedRecord, id.Named())
	}
	if d != nil && e.Record != nil {
		facts.Short, facts.IO = l.incomplete(id, e.Record, d)
	}
	return facts.OfSnapshot()
}

// SnapshotLost reports whether a snapshot cannot be restored. One that a call is making or
// removing is not lost.
func (l *Listing) SnapshotLost(id volume.ID) bool {
	e, d, err := l.In.LookupSettled(id)
	if err != nil {
		return true
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	c := l.Snapshot(id, e, d)
	return e.Exists() && c.Abnormal && c.Reason != health.FilesystemErrors
}

// incomplete reports whether the file of a block volume's snapshot is not all there, and what
// reading the directory gave.
func (l *Listing) incomplete(id volume.ID, rec *store.Record, d *dir.Dir) (short bool, err error) {
	for _, err := range d.Entries() {
		if err != nil {
			return false, err
		}
		break
	}
	if rec.Mode != volume.ModeBlock {
		return false, nil
	}
	disk := l.In.Disk(id, rec)
	disk.Bytes = rec.Origin.Bytes
	err = disk.Check(d)
	if errors.Is(err, volume.ErrLost) {
		return true, nil
	}
	return false, err
}
