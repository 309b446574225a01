package serve

import (
	"context"
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// A filesystem may be too full for the layout, or for the directories of this node in it. What is
// in the pool is published and removed all the same, and nothing is made. Each check tries again.

var (
	errNoLayout      = errors.New("no space for the layout: volumes are published and deleted, and none is created")
	errNoDirectories = errors.New("no space for the directories of this node: volumes are published and deleted, and none is created")
)

// lacks is what the filesystem is too full for; nil for nothing.
func (v *Visit) lacks() error {
	switch {
	case v.Store.Bare():
		return errNoLayout
	case errors.Is(v.Store.OpenWork(), store.ErrNoRoom):
		return errNoDirectories
	}
	return nil
}

// equip makes the layout of a pool that had no room for it, and opens the pool anew. It returns
// nil as long as there is none, and while calls are at work: recovery before a pool serves counts on there being none.
func (p *Pool) equip(ctx context.Context, id *opened) (*Visit, error) {
	s, _, err := store.Create(ctx, p.at)
	if errors.Is(err, store.ErrNoRoom) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.Close()
	p.identity.Store(nil) // no call begins
	if id.calls.Load() > 0 {
		p.identity.Store(id)
		return nil, nil
	}
	p.giveUp()
	return p.open(ctx)
}
