// Package repair brings volumes in line with their records where a crash, a change by hand or a failed call left
// them apart: their limits (limits.go), the files of block volumes, and the devices of these (devices.go). What is no
// volume is the work of pkg/pool/discard.
package repair

import (
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
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
