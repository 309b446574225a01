// Package repair brings volumes in line with their records where a crash, a change by hand or a failed call left
// them apart: their limits (limits.go), the files of block volumes, and the devices of these (devices.go). What is no
// volume is the work of pkg/pool/discard.
package repair

import (
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Pool is one that is open. Calls may be working in it.
type Pool struct {
	*scan.Pool
	// UnlessBusy does something about a volume, unless a call of this node works on it: then it is left to that.
	UnlessBusy func(id volume.ID, do func() error) error
	// UnlessBusyAnywhere is UnlessBusy for what other nodes may work on too. The zero id stands for no volume.
	UnlessBusyAnywhere func(id volume.ID, do func() error) error
	// UnlessPromising is UnlessBusyAnywhere, with nobody promising anything meanwhile.
	UnlessPromising func(id volume.ID, do func() error) error
}

// file identifies what devices of a volume are attached to, whatever its record says: see scan.FileOf.
func (p *Pool) file(id volume.ID) (file dir.ID, ok bool, err error) {
	d, err := p.Store.Root().Open(id.String())
	if err != nil {
		return dir.ID{}, false, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	return scan.FileOf(id, store.Entry{}, d)
}
