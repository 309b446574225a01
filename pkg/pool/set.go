package pool

import (
	"fmt"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/snapshot"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// legacyName is the pool that the upstream KubeVirt driver took where none was named.
var legacyName, _ = volume.ParsePoolName("legacy")

// Options are what all pools of a process share.
type Options = serve.Options

// Mounts publishes directories and devices: bind.Kernel, or a stand-in that keeps its contract.
type Mounts = serve.Mounts

// Devices makes files block devices: loop.Kernel, or a stand-in that keeps its contract.
type Devices = content.Devices

// A Status is what is shown of a pool to people and monitoring.
type Status = serve.Status

// Copies are those of a Status.
type Copies = serve.Copies

// A CopySum is how many copies were made by a method, and how long that took.
type CopySum = serve.CopySum

// Counted is what of a Status is counted once a minute.
type Counted = serve.Counted

// Erased is what of a Status the reaper has done.
type Erased = serve.Erased

// A Volume is what is reported of one.
type Volume = reconcile.Volume

// Surveyed is what the last check at a volume saw.
type Surveyed = reconcile.Surveyed

// A Set is all pools of a node, with the calls on their volumes.
type Set struct {
	*serve.Node
	byName map[volume.PoolName]*serve.Pool
	pins   snapshot.Pins
}

// Start begins to serve pools: see serve.Start.
func Start(configs []poolconfig.Pool, options Options) *Set {
	s := &Set{Node: serve.Start(configs, options), byName: make(map[volume.PoolName]*serve.Pool)}
	for _, p := range s.Pools {
		s.byName[p.Config.Name] = p
	}
	return s
}

// pool is the pool of a name. Where none is named it is the one named "legacy", as
// with the upstream KubeVirt driver, or the only one.
func (s *Set) pool(name volume.PoolName) (*serve.Pool, error) {
	if name != (volume.PoolName{}) {
		if p, ok := s.byName[name]; ok {
			return p, nil
		}
		return nil, fmt.Errorf("%w: no pool is named %q; there are %s", volume.ErrInvalid, name, names(s.Pools))
	}
	if p, ok := s.byName[legacyName]; ok {
		return p, nil
	}
	if len(s.Pools) == 1 {
		return s.Pools[0], nil
	}
	return nil, fmt.Errorf("%w: no pool is named; choose one of %s", volume.ErrInvalid, names(s.Pools))
}

func names(pools []*serve.Pool) string {
	var names []string
	for _, p := range pools {
		names = append(names, fmt.Sprintf("%q", p.Config.Name))
	}
	return strings.Join(names, ", ")
}

// Capacity is how many bytes a pool can still promise; 0 for one that does not
// serve. The only error is ErrInvalid for a pool that is not configured.
func (s *Set) Capacity(name volume.PoolName, multiNode bool) (int64, error) {
	p, err := s.pool(name)
	if err != nil {
		return 0, err
	}
	if multiNode && !p.Config.MultiNode() {
		return 0, nil
	}
	bytes, _ := p.Free()
	return bytes, nil
}

// Serves says whether a pool that is configured serves.
func (s *Set) Serves(name volume.PoolName) bool {
	p, err := s.pool(name)
	if err != nil {
		return false
	}
	_, serves := p.Free()
	return serves
}

// Directory is the directory of a pool, as the calls on its volumes have it. Errors: ErrInvalid for a pool that is not configured, ErrUnavailable
// for one that does not serve.
func (s *Set) Directory(name volume.PoolName) (dir.ID, error) {
	p, err := s.pool(name)
	if err != nil {
		return dir.ID{}, err
	}
	v, err := s.enter(p)
	if err != nil {
		return dir.ID{}, err
	}
	defer v.Close()
	return v.Store.Root().ID()
}

// Shared reports whether a pool is served by several nodes.
func (s *Set) Shared(name volume.PoolName) (bool, error) {
	p, err := s.pool(name)
	if err != nil {
		return false, err
	}
	return p.Config.Shared, nil
}
