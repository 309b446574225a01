package reconcile

import (
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Repairs are those of a pool that is open. Calls may be working in it.
type Repairs struct {
	*Pool
	// UnlessBusy does something about a volume, unless a call of this node works on it: then it is left to that.
	UnlessBusy func(id volume.ID, do func() error) error
	// UnlessBusyAnywhere is UnlessBusy for what other nodes may work on too. The zero id stands for no volume.
	UnlessBusyAnywhere func(id volume.ID, do func() error) error
	// UnlessPromising is UnlessBusyAnywhere, with no call promising anything meanwhile.
	UnlessPromising func(id volume.ID, do func() error) error
}
