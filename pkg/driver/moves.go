package driver

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// movers has the calls of movers, each under the lock of the volume.
type movers struct{ pools *pool.Set }

// call makes one call of package moves.
func (m movers) call(ctx context.Context, name string, r moves.Request) (*moves.Volume, error) {
	id, err := volume.ParseID(r.Volume)
	if err != nil {
		return nil, err
	}
	if name == moves.State {
		return described(m.pools.Moves().State(ctx, id))
	}
	move, err := parseMove(id, r)
	if err != nil {
		return nil, err
	}
	if name == moves.Reference {
		return &moves.Volume{}, m.pools.Moves().Reference(ctx, move, r.Reference, r.Base)
	}
	unlock, err := m.pools.Lock(id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	switch name {
	case moves.Fence:
		return described(m.pools.Moves().Fence(ctx, pool.FenceRequest{Move: move, Bytes: r.Bytes, LeaveSnapshots: r.LeaveSnapshots}))
	case moves.PrepareTarget:
		return m.prepare(ctx, move, r)
	}
	return &moves.Volume{}, map[string]func() error{
		moves.Unfence:       func() error { return m.pools.Moves().Unfence(ctx, move, r.TargetAborted) },
		moves.HandOver:      func() error { return m.pools.Moves().HandOver(ctx, move, r.Fence) },
		moves.RemoveSource:  func() error { return m.pools.Moves().RemoveSource(ctx, move) },
		moves.Based:         func() error { return m.pools.Moves().Based(ctx, move, r.Was, r.Base, r.Verify) },
		moves.Received:      func() error { return m.pools.Moves().Received(ctx, move, r.Fence, r.Was) },
		moves.ConfirmTarget: func() error { return m.pools.Moves().ConfirmTarget(ctx, move, r.Fence) },
		moves.AbortTarget:   func() error { return m.pools.Moves().AbortTarget(ctx, move, r.EvenConfirmed) },
	}[name]()
}

// parseMove reads what all calls but State name. Those that record the peer need it.
func parseMove(id volume.ID, r moves.Request) (pool.Move, error) {
	uid, err := volume.ParseMoveID(r.Move)
	if err != nil {
		return pool.Move{}, err
	}
	peer, err := volume.ParseNodeID(r.Peer)
	return pool.Move{Volume: id, ID: uid, Peer: peer}, err
}

func (m movers) prepare(ctx context.Context, move pool.Move, r moves.Request) (*moves.Volume, error) {
	mode := volume.Mode(r.Mode)
	if mode != volume.ModeMount && mode != volume.ModeBlock {
		return nil, invalid("the mode is %q, not %s or %s", r.Mode, volume.ModeMount, volume.ModeBlock)
	}
	var name volume.PoolName
	if r.Pool != "" {
		var err error
		if name, err = volume.ParsePoolName(r.Pool); err != nil {
			return nil, err
		}
	}
	return described(m.pools.Moves().PrepareTarget(ctx, pool.TargetRequest{Move: move, Pool: name, Shape: volume.Shape{
		Mode: mode, Bytes: r.Bytes, BlockBytes: r.BlockBytes, BytesPerInode: r.BytesPerInode,
	}}))
}

func described(is pool.MoveState, err error) (*moves.Volume, error) {
	if err != nil {
		return nil, err
	}
	return &moves.Volume{
		Pool: is.Pool.String(), UID: is.UID, Recorded: is.Recorded, Used: is.Used,
		Shape: moves.Shape{Mode: string(is.Mode), Bytes: is.Bytes, BlockBytes: is.BlockBytes, BytesPerInode: is.BytesPerInode},
		Move:  is.ID, Role: string(is.Role), Peer: is.Peer, Fence: is.Fence, HandedOver: is.HandedOver, Moved: is.Moved, Undone: is.Undone,
		Base: is.Base, Verify: is.Verify,
	}, nil
}
