package limit

import (
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Accounting is what the kernel counts for directories.
type Accounting struct {
	facility quota.Facility // nil if it counts nothing
}

// Usage is what the kernel counts for a volume's directory, and its limit.
func (a Accounting) Usage(d *dir.Dir, c ledger.Card) (quota.Usage, error) {
	return a.facility.Usage(d, c.QuotaID())
}

// Outside counts what users made in a volume that its limit does not include.
func (a Accounting) Outside(d *dir.Dir) (int, error) { return a.facility.Outside(d) }

// Counted is what the kernel counts for any directory, and by which id; an id of 0 if it does
// not, or cannot be asked.
func (a Accounting) Counted(d *dir.Dir) (usage quota.Usage, id quota.ID, ok bool) {
	if a.facility == nil {
		return quota.Usage{}, 0, false
	}
	id, err := a.facility.IDOf(d)
	if err != nil || id == 0 {
		return quota.Usage{}, id, false
	}
	usage, err = a.facility.Usage(d, id)
	return usage, id, err == nil
}

// UsedByID is what is counted by an id, in bytes, or volume.Unknown where nothing is counted.
func (a Accounting) UsedByID(root *dir.Dir, id quota.ID) int64 {
	if id == 0 {
		return volume.Unknown
	}
	usage, err := a.facility.Usage(root, id)
	if err != nil {
		return volume.Unknown
	}
	return usage.Bytes
}

// UsedBy is what a volume holds: by its id, or, where the kernel chose that, by its directory.
func (a Accounting) UsedBy(root *dir.Dir, name string, c ledger.Card) (quota.Usage, error) {
	if c.QuotaID() == 0 {
		return a.UsedIn(root, name, 0)
	}
	return a.facility.Usage(root, c.QuotaID())
}

// UsedIn is what one directory holds. One that went away meanwhile holds nothing.
func (a Accounting) UsedIn(parent *dir.Dir, name string, id quota.ID) (quota.Usage, error) {
	none := quota.Usage{Inodes: quota.Unknown}
	d, err := parent.Open(name)
	if dir.IsMissing(err) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	defer func() { _ = d.Close() }()
	if id == 0 {
		if id, err = a.facility.IDOf(d); err != nil || id == 0 {
			return none, err
		}
	}
	return a.facility.Usage(d, id)
}

// Beside is what is known to be of no volume on the filesystem, in bytes.
func (a Accounting) Beside(root *dir.Dir) (int64, error) {
	if a.facility == nil {
		return 0, nil
	}
	return a.facility.Beside(root)
}
