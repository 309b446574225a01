package pool

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/use"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// reread reads the volume again, as lock does after it has waited. It answers ErrNotFound for a volume
// that is not there any more.
func (v *found) reread() error {
	e, d, err := v.visit.scan().Lookup(v.id)
	if err != nil {
		return err
	}
	if v.dir != nil {
		_ = v.dir.Close() // opened for reading
	}
	v.entry, v.dir = e, d
	v.visit.pool.note(v.id, e)
	if !e.Exists() {
		return fmt.Errorf("volume %s: %w any more", v.id, volume.ErrNotFound)
	}
	return nil
}

// unmarkPublished takes the mark back once the volume is published nowhere on this
// node. As long as a device that may be the volume's does not answer, nobody knows, and
// the mark stays for the next check: it keeps other nodes from deleting, and nobody else.
func (v *found) unmarkPublished() error {
	s := v.visit
	if !s.pool.config.Shared {
		return nil
	}
	used, err := v.use().Used()
	if errors.Is(err, loop.ErrSilent) {
		return nil
	}
	if err != nil || used {
		return err
	}
	return s.store.Unmark(v.id)
}

// restoreMarks marks what this node has published without a mark: the pool was not shared before,
// or somebody took the node for gone.
func (v *visit) restoreMarks(context.Context) error {
	marked, err := v.store.Marked()
	if err != nil {
		return err
	}
	published, err := use.OfPool(v.scan())
	if err != nil {
		return err
	}
	for id := range published {
		if marked[id.String()] {
			continue
		}
		if err := v.unlessBusy(id, func() error { return v.restoreMark(id) }); err != nil {
			return err
		}
	}
	return nil
}

func (v *visit) restoreMark(id volume.ID) error {
	e, d, err := v.scan().Lookup(id)
	if err != nil || d == nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	used, err := (&found{id: id, visit: v, entry: e, dir: d}).use().Used()
	if err != nil || !used {
		return err
	}
	return v.store.Mark(id)
}
