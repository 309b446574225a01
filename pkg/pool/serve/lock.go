package serve

// This is the only file that takes two locks. Their order:
//
//  1. the volume, in this process (Node.volumes);
//  2. the target, in this process (Node.targets);
//  3. the turn at the devices of the volume, in this process (Node.attaching), or
//     the byte of the volume, or the byte of promises, in the lock file of a shared pool,
//     against other nodes. No call waits for one of the three while holding another. In a shared pool Node.marking comes
//     after these: with it a call writes or removes the mark of the volume. Under that comes Node.publishing: see marks.go;
//  4. the mutex of the ledger, which is never held across a system call or another lock.
//
// In a shared pool the reaper locks the byte of the piece of trash that it erases (store.Trash), and takes no other lock under it.
// Making the layout of a pool locks the whole lock file (store.ensureFormat), before any call is served.
//
// A call does not wait for 1 or 2 while another call has it, but returns ErrBusy. That is why a call that copies may take lock 1 of
// its source out of this order: it cannot wait for a call that waits for it. Once it has given that back it may wait for its turn at
// Node.copying, which no call has that waits for another lock. Publishing and unpublishing at different targets share
// lock 1. Checks in the background hold lock 1 for an instant, as does a call that copies that of its source until it has pinned that; calls
// and other checks wait for those, which wait for no other lock 1 meanwhile.
// Recovery does not wait for 3 either: what another node works on it leaves to that node.
//
// Two locks are taken before all others, and held as long as the pool is served: its uuid, in this
// process (Node.serving), and a byte against other drivers of the node (Guard). No call waits
// for either while holding any other.
//
// The mutexes inside keylock, the places of pools, filesystems, pins, the count of copies, signs of life,
// the claims of project ids and the quotas of btrfs are held for a few instructions, and nothing is taken under them.
// Two are held across system calls that no disk can delay: that of the mount table while it is read (pkg/hostfs/bind),
// and that of loop devices while one is taken (pkg/hostfs/loop). What
// the pools of one filesystem owe together has no lock: a ledger changes it by compare and swap
// while it holds its own mutex.

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Lock takes a volume for one call, or returns ErrBusy at once.
func (n *Node) Lock(id volume.ID) (unlock func(), err error) { return n.volumes.TryLock(id) }

// LockTarget takes a volume and a target for one call, or returns ErrBusy at once.
func (n *Node) LockTarget(id volume.ID, target bind.Target) (unlock func(), err error) {
	return n.lockTarget(n.volumes.TryLock, id, target)
}

// ShareTarget is LockTarget that does not exclude calls on the volume which share it at other targets.
func (n *Node) ShareTarget(id volume.ID, target bind.Target) (unlock func(), err error) {
	return n.lockTarget(n.volumes.TryShare, id, target)
}

func (n *Node) lockTarget(lock func(volume.ID) (func(), error), id volume.ID, target bind.Target) (unlock func(), err error) {
	unlockVolume, err := lock(id)
	if err != nil {
		return nil, err
	}
	unlockTarget, err := n.targets.TryLock(target.String())
	if err != nil {
		unlockVolume()
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	return func() { unlockTarget(); unlockVolume() }, nil
}

// LockNodes extends the lock that the caller has of a volume to all nodes of a shared pool.
func (in *Visit) LockNodes(ctx context.Context, id volume.ID) (unlock func(), err error) {
	return in.Store.Nodes().LockByte(ctx, store.VolumeByte(id))
}

// tryLock takes a volume on this node, and in a shared pool on all, for a check, or returns ErrBusy at once if a call has it. What checks of
// several nodes do at once is the same.
func (in *Visit) tryLock(id volume.ID) (unlock func(), err error) {
	unlockHere, err := in.Pool.Node.volumes.TryCheck(id)
	if err != nil {
		return nil, err
	}
	unlockNodes, err := in.Store.Nodes().TryShareByte(store.VolumeByte(id))
	if err != nil {
		unlockHere()
		return nil, err
	}
	return func() { unlockNodes(); unlockHere() }, nil
}

// LockToPromise extends the lock that the caller has of a volume to all nodes of a shared
// pool, and keeps those from promising anything. While it waits for one of the two it does
// not have the other: a volume is published while its growth waits for a disk that another
// node allocates, and volumes are made while that of a node which hangs is waited for.
func (in *Visit) LockToPromise(ctx context.Context, id volume.ID) (unlock func(), err error) {
	for {
		unlockPromises, err := in.Store.Nodes().LockByte(ctx, store.PromisesByte)
		if err != nil {
			return nil, err
		}
		unlockVolume, err := in.Store.Nodes().TryLockByte(store.VolumeByte(id))
		if err == nil {
			return func() { unlockVolume(); unlockPromises() }, nil
		}
		unlockPromises()
		if !errors.Is(err, volume.ErrBusy) {
			return nil, err
		}
		if unlockVolume, err = in.LockNodes(ctx, id); err != nil {
			return nil, err
		}
		unlockVolume()
	}
}

// Alone does something about a volume whose lock the caller shares, or returns ErrBusy if others share it too.
func (in *Visit) Alone(id volume.ID, do func() error) error {
	done, err := in.Pool.Node.volumes.TryAlone(id)
	if err != nil {
		return err
	}
	defer done()
	return do()
}

// LockToPin is Lock for what is copied, until it is pinned, which is soon: calls on it wait for that. The caller has the lock of the copy.
func (n *Node) LockToPin(id volume.ID) (unlock func(), err error) { return n.volumes.TryCheck(id) }

// TurnAtDevices waits for the turn at the devices of a block volume until ctx ends.
func (n *Node) TurnAtDevices(ctx context.Context, id volume.ID) (done func(), err error) {
	return n.attaching.Wait(ctx, id)
}

// TurnToCopy waits for the turn at measuring and copying what is pinned until ctx ends. The caller has the lock of the copy.
func (n *Node) TurnToCopy(ctx context.Context, id volume.ID) (done func(), err error) {
	return n.copying.Wait(ctx, id)
}

// claim has the pool of a uuid served by the caller alone, in this process, or returns ErrBusy at once.
func (n *Node) claim(uuid string) (giveUp func(), err error) { return n.serving.TryLock(uuid) }

// unlessBusy is Pool.unlessBusy for what other nodes of a shared pool may be at work on too.
func (in *Visit) unlessBusy(id volume.ID, do func() error) error {
	return in.Pool.unlessBusy(id, func() error { return in.unlessLocked(store.VolumeByte(id), do) })
}

// unlessPromising is unlessBusy while no node promises anything: another may be about to write the record.
func (in *Visit) unlessPromising(id volume.ID, do func() error) error {
	return in.unlessBusy(id, func() error { return in.unlessLocked(store.PromisesByte, do) })
}

// unlessLocked does something under the lock of a byte, unless another node of a shared pool has that: then it is skipped.
func (in *Visit) unlessLocked(at int64, do func() error) error {
	unlock, err := in.Store.Nodes().TryLockByte(at)
	if errors.Is(err, volume.ErrBusy) {
		in.Pool.checks.skipped = true
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return do()
}

// unlessBusyOr is unlessBusy for what may be about no volume, on which no call can work: then
// the id is the zero one.
func (in *Visit) unlessBusyOr(id volume.ID, do func() error) error {
	if id == (volume.ID{}) {
		return do()
	}
	return in.unlessBusy(id, do)
}

// unlessBusy does something about a volume, unless a call is at work on it: then it is skipped.
// Before the pool was opened none can be: a call that holds the lock is at work in another pool.
func (p *Pool) unlessBusy(id volume.ID, do func() error) error {
	unlock, err := p.Node.volumes.TryCheck(id)
	switch {
	case err == nil:
		defer unlock()
	case p.identity.Load() != nil:
		p.checks.skipped = true
		return nil
	}
	return do()
}
