package pool

import (
	"cmp"
	"slices"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// filesystems says which pools of a process are on one filesystem, as they were when they were
// last checked. The zero value is ready for use.
type filesystems struct {
	mu sync.Mutex
	on map[*Pool]dir.SpaceID
	by map[dir.SpaceID]*ledger.Filesystem
}

// settle notes the filesystem of a pool, and answers what its pools owe.
func (f *filesystems) settle(p *Pool, on dir.SpaceID) *ledger.Filesystem {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.on == nil {
		f.on, f.by = make(map[*Pool]dir.SpaceID), make(map[dir.SpaceID]*ledger.Filesystem)
	}
	f.on[p] = on
	if f.by[on] == nil {
		f.by[on] = &ledger.Filesystem{}
	}
	return f.by[on]
}

// with are the pools on the filesystem of one, and that itself, in the order of their names.
func (f *filesystems) with(p *Pool) []*Pool {
	f.mu.Lock()
	defer f.mu.Unlock()
	var pools []*Pool
	for other, on := range f.on {
		if on == f.on[p] {
			pools = append(pools, other)
		}
	}
	slices.SortFunc(pools, func(a, b *Pool) int { return cmp.Compare(a.config.Name.String(), b.config.Name.String()) })
	return pools
}

// join has the promises of the pool count against the filesystem that it is on, with those of
// the other pools there. It reports whether that is another one than before.
func (v *visit) join(f store.Format) (joined bool, err error) {
	on, err := v.store.Root().SpaceID()
	if err != nil {
		return false, err
	}
	p := v.pool
	joined = p.ledger.Join(p.filesystems.settle(p, on), ledger.Origin{Made: f.Created, Foreign: f.Foreign, Shared: p.config.Shared})
	if with := p.ledger.Summary().SharesWith(); joined && len(with) > 0 {
		p.log.Info("the pool shares its filesystem with others; the promises of all of them count", "with", with)
	}
	return joined, nil
}
