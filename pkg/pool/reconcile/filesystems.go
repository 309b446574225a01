package reconcile

import (
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
)

// Filesystems says which pools of a process are on one filesystem, as they were when they were
// last checked. The zero value is ready for use.
type Filesystems[P comparable] struct {
	mu sync.Mutex
	on map[P]dir.SpaceID
	by map[dir.SpaceID]*ledger.Filesystem
}

// Settle notes the filesystem of a pool, and returns what its pools owe.
func (f *Filesystems[P]) Settle(p P, on dir.SpaceID) *ledger.Filesystem {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.on == nil {
		f.on, f.by = make(map[P]dir.SpaceID), make(map[dir.SpaceID]*ledger.Filesystem)
	}
	f.on[p] = on
	if f.by[on] == nil {
		f.by[on] = &ledger.Filesystem{}
	}
	return f.by[on]
}

// Apart reports whether two pools are known to be on different filesystems.
func (f *Filesystems[P]) Apart(p, other P) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	on, known := f.on[p]
	otherOn, otherKnown := f.on[other]
	return known && otherKnown && on != otherOn
}

// Forget has a pool be on no filesystem that is known.
func (f *Filesystems[P]) Forget(p P) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.on, p)
}

// With are the pools on the filesystem of one, and that itself, in no order.
func (f *Filesystems[P]) With(p P) []P {
	f.mu.Lock()
	defer f.mu.Unlock()
	var pools []P
	for other, on := range f.on {
		if on == f.on[p] {
			pools = append(pools, other)
		}
	}
	return pools
}
