package mover

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Pools are those of this node, which its driver serves.
type Pools struct {
	Configs []poolconfig.Config
	Mounts  reconcile.Mounts
}

// Open is an Open for volumes of the pools, and for their references, whose names are never given again. What is on the disk has to
// be what the driver has described: the pool that this process sees may be another.
func (p Pools) Open(_ context.Context, name string, v moves.Volume) (*dir.Dir, error) {
	id, err := volume.ParseEntry(name)
	if err != nil {
		return nil, err
	}
	for i := range p.Configs {
		if c := &p.Configs[i]; c.Name.String() == v.Pool {
			d, err := p.open(c, id, v)
			if err != nil {
				return nil, fmt.Errorf("open volume %s in pool %q at %s: %w", id, c.Name, c.Path, err)
			}
			return d, nil
		}
	}
	return nil, fmt.Errorf("volume %s is in pool %q, which is not configured for this process", id, v.Pool)
}

func (p Pools) open(c *poolconfig.Config, id volume.ID, v moves.Volume) (*dir.Dir, error) {
	s, _, err := store.OpenReadOnly(&store.Location{
		Path: c.Path, Reserved: c.Reserved(), ReadOnly: true,
		Verify: func(root *dir.Dir) error { return reconcile.CheckMount(c, p.Mounts, root) },
		Nested: func(*dir.Dir) error { return nil },
	})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	e, d, err := s.Lookup(id)
	if err != nil {
		return nil, err
	}
	if id.IsSnapshot() {
		err = e.Usable()
	} else {
		err = isDescribed(e, v)
	}
	if err != nil {
		if d != nil {
			err = errors.Join(err, d.Close())
		}
		return nil, err
	}
	return d, nil
}

// isDescribed returns an error for another volume than the driver has described.
func isDescribed(e store.Entry, v moves.Volume) error {
	if err := e.Usable(); err != nil {
		return err
	}
	uid := ""
	if e.Record != nil {
		uid = e.Record.UID
	}
	if uid != v.UID {
		return fmt.Errorf("its record is of %q, and the driver has %q: this process sees another pool than the driver, or the volume was replaced", uid, v.UID)
	}
	return nil
}
