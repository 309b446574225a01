package pool

// This is the only file that takes two locks. Their order:
//
//  1. the volume, in this process (Set.volumes);
//  2. the target, in this process (Set.targets);
//  3. the turn at the devices of the volume, in this process (Set.attaching), or
//     the byte of the volume, or the byte of promises, in the lock file of a shared pool,
//     against other nodes. Nobody waits for one of the three while holding another;
//  4. the mutex of the ledger, which is never held across a system call or another lock.
//
// Calls do not wait for 1 and 2: who does not get them answers ErrBusy. Publications at
// different targets share 1. Recovery does not wait for 3 either, and leaves to another node
// what that works on. The mutexes inside keylock, the places of pools, filesystems and the
// claims of project ids are held for a few instructions, and nothing is taken under them. What
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

// Lock takes a volume for one call, or answers ErrBusy at once.
func (s *Set) Lock(id volume.ID) (unlock func(), err error) { return s.volumes.TryLock(id) }

// LockTarget takes a volume and a target for one call, or answers ErrBusy at once.
func (s *Set) LockTarget(id volume.ID, target bind.Target) (unlock func(), err error) {
	return s.lockTarget(s.volumes.TryLock, id, target)
}

// LockToPublish is LockTarget for Publish and PublishInline. Pods that share a volume start
// together: publications at different targets do not exclude each other, unless one allows no
// other or makes the volume.
func (s *Set) LockToPublish(r Publication) (unlock func(), err error) {
	if r.exclusive() {
		return s.LockTarget(r.ID, r.Target)
	}
	return s.lockTarget(s.volumes.TryShare, r.ID, r.Target)
}

func (s *Set) lockTarget(lock func(volume.ID) (func(), error), id volume.ID, target bind.Target) (unlock func(), err error) {
	unlockVolume, err := lock(id)
	if err != nil {
		return nil, err
	}
	unlockTarget, err := s.targets.TryLock(target)
	if err != nil {
		unlockVolume()
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	return func() { unlockTarget(); unlockVolume() }, nil
}

// locksNodes reports whether locks have to hold against other nodes.
func (v *visit) locksNodes() bool { return v.pool.config.Shared && !v.pool.at.ReadOnly }

// lockNodes extends the lock that the caller has of a volume to all nodes of a shared pool.
func (v *visit) lockNodes(ctx context.Context, id volume.ID) (unlock func(), err error) {
	return v.store.LockByte(ctx, store.VolumeByte(id))
}

// tryLock takes a volume on this node, and in a shared pool on all, or answers ErrBusy at once.
func (v *visit) tryLock(id volume.ID) (unlock func(), err error) {
	unlockHere, err := v.pool.locks.TryLock(id)
	if err != nil {
		return nil, err
	}
	unlockNodes, err := v.store.TryLockByte(store.VolumeByte(id))
	if err != nil {
		unlockHere()
		return nil, err
	}
	return func() { unlockNodes(); unlockHere() }, nil
}

// lockToPromise extends the lock that the caller has of a volume to all nodes of a shared
// pool, and keeps those from promising anything. While it waits for one of the two it does
// not have the other: a volume is published while its growth waits for a disk that another
// node allocates, and volumes are made while that of a node which hangs is waited for.
func (v *visit) lockToPromise(ctx context.Context, id volume.ID) (unlock func(), err error) {
	for {
		unlockPromises, err := v.store.LockByte(ctx, store.PromisesByte)
		if err != nil {
			return nil, err
		}
		unlockVolume, err := v.store.TryLockByte(store.VolumeByte(id))
		if err == nil {
			return func() { unlockVolume(); unlockPromises() }, nil
		}
		unlockPromises()
		if !errors.Is(err, volume.ErrBusy) {
			return nil, err
		}
		if unlockVolume, err = v.lockNodes(ctx, id); err != nil {
			return nil, err
		}
		unlockVolume()
	}
}

// withdraw takes back the mark of a publication that failed. The mark is also that of the
// publications at other targets that are under way.
func (v *found) withdraw(r Publication) error {
	if r.exclusive() {
		return v.unmarkPublished()
	}
	done, err := v.visit.pool.locks.TryAlone(v.id)
	if errors.Is(err, volume.ErrBusy) {
		return nil // if they fail too, recovery takes it back within a minute
	}
	if err != nil {
		return err
	}
	defer done()
	return v.unmarkPublished()
}

// lock extends the caller's lock of the volume to all nodes of a shared pool, and reads it
// again: another node may have removed it since it was found, or made another.
func (v *found) lock(ctx context.Context) (unlock func(), err error) {
	unlock, err = v.visit.lockNodes(ctx, v.id)
	if err != nil || !v.visit.locksNodes() {
		return unlock, err
	}
	if err := v.reread(); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// unlessBusy is Pool.unlessBusy for what other nodes of a shared pool may be at work on too.
func (v *visit) unlessBusy(id volume.ID, do func() error) error {
	return v.pool.unlessBusy(id, func() error {
		unlock, err := v.store.TryLockByte(store.VolumeByte(id))
		if errors.Is(err, volume.ErrBusy) {
			v.pool.skipped = true
			return nil
		}
		if err != nil {
			return err
		}
		defer unlock()
		return do()
	})
}

// unlessPromising is unlessBusy with nobody promising anything meanwhile, on whatever node.
func (v *visit) unlessPromising(id volume.ID, do func() error) error {
	return v.unlessBusy(id, func() error {
		unlock, err := v.store.TryLockByte(store.PromisesByte)
		if errors.Is(err, volume.ErrBusy) {
			v.pool.skipped = true // another node may be about to write the record
			return nil
		}
		if err != nil {
			return err
		}
		defer unlock()
		return do()
	})
}

// unlessBusyOr is unlessBusy for what may be about no volume, on which no call can work: then
// the id is the zero one.
func (v *visit) unlessBusyOr(id volume.ID, do func() error) error {
	if id == (volume.ID{}) {
		return do()
	}
	return v.unlessBusy(id, do)
}

// unlessBusy does something about a volume, unless a call is at work on it: then it is skipped.
// Before the pool was opened none can be: whoever holds the lock is at work in another pool.
func (p *Pool) unlessBusy(id volume.ID, do func() error) error {
	unlock, err := p.locks.TryLock(id)
	switch {
	case err == nil:
		defer unlock()
	case p.identity.Load() != nil:
		p.skipped = true
		return nil
	}
	return do()
}
