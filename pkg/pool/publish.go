package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Publication is asked for by Publish.
type Publication struct {
	ID volume.ID
	// Pool is where the volume is said to be; the zero PoolName for wherever it is.
	Pool   volume.PoolName
	Target bind.Target
	// Mode is how the volume is to be used; empty for ModeMount.
	Mode volume.Mode
	// Flags are those of the mount of a directory.
	Flags    bind.Flags
	ReadOnly bool
	// SingleTarget allows the volume only at this target.
	SingleTarget bool
	// MultiNode is the access mode of several nodes. A volume of a pool that is not shared has
	// all its pods on this node, whatever its mode.
	MultiNode bool
	// Inline makes the volume too.
	Inline bool
}

// exclusive reports whether no other publication of the volume may be under way.
func (r Publication) exclusive() bool { return r.SingleTarget || r.Inline }

// Publications publish volumes at targets of this node, and unpublish them.
type Publications struct{ set *Set }

// Publications are those of all pools.
func (s *Set) Publications() Publications { return Publications{s} }

// Lock is LockTarget for Publish and PublishInline. Pods that share a volume start and end
// together: calls at different targets do not exclude each other, unless a publication allows no
// other or makes the volume.
func (s Publications) Lock(r Publication) (unlock func(), err error) {
	if r.exclusive() {
		return s.set.node.LockTarget(r.ID, r.Target)
	}
	return s.set.node.ShareTarget(r.ID, r.Target)
}

// Publish makes a volume appear at the target. The caller has the lock. Errors: ErrInvalid, ErrNotFound, ErrExists for a target that is
// taken, ErrInUse for a second target of a volume for one, ErrNoSpace for a node without
// loop devices, ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Publications) Publish(ctx context.Context, r Publication) error {
	held, release, err := s.holdOutside(r.Target)
	if err != nil {
		return err
	}
	defer release()
	r.Target = held
	return s.publish(ctx, r)
}

func (s Publications) publish(ctx context.Context, r Publication) error {
	if r.Mode == "" {
		r.Mode = volume.ModeMount
	}
	v, err := s.set.find(ctx, r.ID, r.Pool)
	if err != nil {
		return err
	}
	defer v.close()
	if err := v.publish(ctx, r); err != nil {
		return fmt.Errorf("publish volume %s: %w", r.ID, err)
	}
	return nil
}

// holdOutside holds a target, and returns ErrInvalid for one inside a pool, by whatever path: a
// mount there would hide a volume or the driver's own directories, and what unpublishing removes
// would be theirs. Pools that were not checked yet are not known.
func (s Publications) holdOutside(target bind.Target) (held bind.Target, release func(), err error) {
	roots := make([]bind.Root, len(s.set.node.Pools))
	for i, p := range s.set.node.Pools {
		if root := p.Where(); root != nil {
			roots[i] = *root
		}
	}
	held, release, err = target.Hold()
	if err != nil {
		return target, nil, content.MountError(err)
	}
	i, err := held.Within(roots, s.set.node.Options.Mounts.MountRoot)
	if err == nil && i >= 0 {
		// Where a pool was mounted anew since its last check, another directory can have the numbers that it had then.
		var root *bind.Root
		if root, err = s.set.node.Pools[i].WhereNow(); err == nil {
			roots[i] = *root
			i, err = held.Within(roots, s.set.node.Options.Mounts.MountRoot)
		}
	}
	switch {
	case err != nil:
		err = content.MountError(err)
	case i >= 0:
		err = fmt.Errorf("%w: the target path %s lies inside pool %q", volume.ErrInvalid, target, s.set.node.Pools[i].Config.Name)
	default:
		return held, release, nil
	}
	release()
	return target, nil, err
}

func (v *found) publish(ctx context.Context, r Publication) error {
	ended, err := v.announce(ctx, r)
	if err != nil {
		return err
	}
	ended = sync.OnceFunc(ended)
	defer ended()
	if err := v.mount(ctx, r); err != nil {
		ended()
		return errors.Join(err, v.unmarkPublished(ctx))
	}
	return nil
}

// mount makes the content appear at the target. All targets of a block volume share one
// device, which one of them attaches, or detaches again if it fails.
func (v *found) mount(ctx context.Context, r Publication) error {
	if v.entry.Block() {
		done, err := v.visit.Pool.Node.TurnAtDevices(ctx, v.id)
		if err != nil {
			return err
		}
		defer done()
	}
	at := content.Target{Path: r.Target, Flags: r.Flags, ReadOnly: r.ReadOnly}
	return v.visit.View().Content(v.id, v.entry.Record).Publish(ctx, v.dir, at)
}

// announce makes sure that the volume can be published as it is asked for, and informs the
// other nodes of a shared pool. After that they leave it where it is, and this one leaves the mark
// until ended is called.
func (v *found) announce(ctx context.Context, r Publication) (ended func(), err error) {
	unlock, err := v.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := v.entry.Usable(); err != nil {
		return nil, err
	}
	if err := v.entry.UsedAs(r.Mode); err != nil {
		return nil, err
	}
	if err := v.admitMoving(r); err != nil {
		return nil, err
	}
	if v.entry.Block() || !r.ReadOnly {
		if err := v.visit.Pool.Node.Pins.MayBeWritten(v.id); err != nil {
			return nil, err
		}
	}
	v.visit.Pool.Note(v.id, v.entry) // it may have been moved here by hand
	if err := v.admit(r); err != nil {
		return nil, err
	}
	if ended, err = v.visit.MarkPublishing(ctx, v.id, r.MultiNode); err != nil {
		return nil, errors.Join(err, v.unmarkPublished(ctx)) // the mark may be there all the same
	}
	return ended, nil
}

// admitMoving returns ErrPrecondition for a volume that moves between nodes, but for what a fenced source has at the target already.
func (v *found) admitMoving(r Publication) error {
	moving := v.entry.Unmoved()
	if moving == nil {
		return nil
	}
	published, err := v.use().Published()
	if err != nil {
		return err
	}
	if v.entry.Move().Role == store.MoveSource && slices.ContainsFunc(published, r.isAt) {
		return nil
	}
	return moving
}

// isAt reports whether a publication is the one that is asked for. Kubelet mounts the node of a block volume once more for itself,
// so that others do not count if it is here.
func (r Publication) isAt(p bind.Publication) bool { return p.Inside == "" && r.Target.Is(p.Path) }

// admit returns ErrInUse if the access mode is for one node, and another has the volume
// published, or if it is for one target, and there is another. What is at its target
// already stays: Publish returns.
func (v *found) admit(r Publication) error {
	var elsewhere error
	if !r.MultiNode && v.visit.Pool.Config.Shared {
		elsewhere = v.visit.Store.Nodes().UnpublishedElsewhere(v.id)
	}
	if elsewhere == nil && !r.SingleTarget {
		return nil
	}
	published, err := v.use().Published()
	if err != nil {
		return err
	}
	switch {
	case slices.ContainsFunc(published, r.isAt):
		return nil
	case elsewhere != nil:
		return fmt.Errorf("its access mode allows one node, and it is %w", elsewhere)
	case len(published) > 0:
		return fmt.Errorf("it is %w at %s, and its access mode allows one target", volume.ErrInUse, published[0].Path)
	}
	return nil
}

// afterwards is how long cleaning up after a call may take whose own time is over.
const afterwards = 5 * time.Second

// PublishInline makes a volume that lives as long as its publication, and
// publishes it. The caller has the lock.
func (s Publications) PublishInline(ctx context.Context, create Request, r Publication) error {
	held, release, err := s.holdOutside(r.Target)
	if err != nil {
		return err
	}
	defer release()
	r.Target = held
	create.Inline, create.Mode, create.MultiNode = true, volume.ModeMount, r.MultiNode
	p, err := s.set.pool(create.Pool)
	if err != nil {
		return err
	}
	lacked, err := lacks(ctx, p, create.ID)
	if err != nil {
		return err
	}
	if _, err := s.set.Create(ctx, create); err != nil {
		return err
	}
	r.Pool, r.Inline = p.Config.Name, true
	err = s.publish(ctx, r)
	if err != nil && lacked {
		// No caller knows of the volume yet, and no other call would remove it: also where the
		// call's time is over.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterwards)
		defer cancel()
		return errors.Join(err, s.set.Delete(ctx, create.ID))
	}
	return err
}

// Unpublish removes a volume from the target, and an inline volume altogether
// once it is published nowhere. A volume or target that is not there is no error. The
// caller has ShareTarget. Errors: ErrInvalid, ErrBusy for an inline volume that another call works on, ErrInUse for a publication that a
// process uses and for a target that carries another volume or holds data.
func (s Publications) Unpublish(ctx context.Context, id volume.ID, target bind.Target) error {
	target, release, err := s.holdOutside(target)
	if err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	defer release()
	v, unfound := s.set.find(ctx, id, volume.PoolName{})
	if unfound == nil {
		defer v.close()
	}
	// What is mounted first: a pod can end, whatever became of its volume.
	done := false
	if unfound == nil {
		done, err = v.unpublishOwn(ctx, target)
	}
	if err == nil && !done {
		err = s.unpublishAny(ctx, id, target)
	}
	if err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	if unfound != nil {
		return s.unlessItCanEnd(id, unfound)
	}
	if err := v.afterUnpublish(ctx); err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	return nil
}

// unlessItCanEnd is why a volume was not found that is unmounted, and nil if nothing is left to do: it is gone or damaged, or its pool
// went away. An inline volume would stay there: it is removed when it is unpublished.
func (s Publications) unlessItCanEnd(id volume.ID, unfound error) error {
	away := errors.Is(unfound, volume.ErrUnavailable) && !errors.Is(unfound, serve.ErrNotChecked)
	if errors.Is(unfound, volume.ErrNotFound) || volume.IsDamage(unfound) || away && !s.knownInline(id) {
		return nil
	}
	return unfound
}

// unpublishOwn unmounts what is at the target if it is the directory of the volume. That
// does not read the mount table, which has some ten lines for each pod of the node
// and has just changed. It returns false for all else that is there.
func (v *found) unpublishOwn(ctx context.Context, target bind.Target) (done bool, err error) {
	if v.dir == nil || v.entry.Block() {
		return false, nil
	}
	own, err := v.dir.ID()
	if err != nil {
		return false, nil //nolint:nilerr // its filesystem died, and the pod can end all the same
	}
	step := trace.Begin(ctx, "unmount")
	err = v.visit.Pool.Options.Mounts.Unpublish(target, &own)
	if errors.Is(err, bind.ErrOccupied) {
		return false, nil
	}
	return true, content.MountError(step.EndWith(err))
}

// unpublishAny unmounts what is at the target, and detaches a device that was published only there.
func (s Publications) unpublishAny(ctx context.Context, id volume.ID, target bind.Target) error {
	device, err := s.set.node.Options.Host(s.set.node.Options.Log).DeviceAt(target)
	if err != nil {
		// A pod can end whose filesystem died, and with it the file of its device.
		s.set.node.Options.Log.Error(err, "Cannot determine what is published at the target; unmounting it", "target", target.String())
	}
	if s.ofAnother(ctx, id, device) {
		return fmt.Errorf("%w: %s carries %s, the device of another volume", volume.ErrInUse, target, device.Name)
	}
	if err := s.restore(ctx, id, device); err != nil {
		return err
	}
	if err := trace.Step(ctx, "unmount", func() error { return s.unmount(ctx, id, target) }); err != nil {
		return err
	}
	if device == nil {
		return nil
	}
	done, err := s.set.node.TurnAtDevices(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	return s.set.node.Options.Host(s.set.node.Options.Log).DetachPublished(ctx, id, device, s.isOf(ctx, id, device) || s.isInPool(ctx, device))
}

// unmount takes off whatever is mounted at the target, unless that is another
// volume. The volume itself need not be there any more, nor be the directory that
// was published: it may be lost, or restored from a backup.
func (s Publications) unmount(ctx context.Context, id volume.ID, target bind.Target) error {
	other, err := s.otherAt(ctx, id, target)
	if err != nil {
		return err
	}
	if other != "" {
		return fmt.Errorf("%w: %s carries the volume %s", volume.ErrInUse, target, other)
	}
	err = s.set.node.Options.Mounts.Unpublish(target, nil)
	if errors.Is(err, bind.ErrOccupied) {
		return fmt.Errorf("%w: %w", volume.ErrInUse, err)
	}
	return content.MountError(err)
}

// otherAt is another volume that is published at the target; empty if there is
// none. Pools that do not serve are not asked: the target would hang with them.
func (s Publications) otherAt(ctx context.Context, id volume.ID, target bind.Target) (string, error) {
	for _, p := range s.set.node.Pools {
		in, err := p.Enter(ctx)
		if err != nil {
			continue
		}
		other, err := otherAt(in, id, target)
		in.Close()
		if err != nil || other != "" {
			return other, err
		}
	}
	return "", nil
}

func otherAt(in *serve.Visit, id volume.ID, target bind.Target) (string, error) {
	published, err := in.Pool.Options.Mounts.Published(in.Store.Root())
	if err != nil {
		return "", err
	}
	for name, at := range published {
		if _, err := volume.ParseID(name); err != nil || name == id.String() {
			continue // the layout's own, such as the trash
		}
		for _, p := range at {
			if p.Inside == "" && target.Is(p.Path) {
				return name, nil
			}
		}
	}
	return "", nil
}

func (s Publications) knownInline(id volume.ID) bool {
	for _, p := range s.set.node.Pools {
		if p.Ledger.Known(id).Is(ledger.IsInline) {
			return true
		}
	}
	return false
}

// afterUnpublish takes back the mark of a shared pool, and removes a volume that is
// inline and published nowhere any more.
func (v *found) afterUnpublish(ctx context.Context) error {
	if err := v.detachUnpublished(ctx); err != nil {
		return err
	}
	if err := v.unmarkPublished(ctx); err != nil {
		return err
	}
	if !v.entry.Inline() {
		return nil
	}
	err := v.visit.Alone(v.id, func() error { return v.delete(ctx) })
	switch {
	case errors.Is(err, volume.ErrInUse): // the last of its publications will remove it
		return nil
	case errors.Is(err, volume.ErrNotFound): // another node has
		return nil
	case errors.Is(err, syscall.EROFS): // nothing can be removed, also after a restart, and a pod can end all the same
		v.visit.Pool.Log.Error(err, "An inline volume stays, because its pool is read-only", "volume", v.id.String())
		return nil
	}
	return err
}

// detachUnpublished detaches a device that is left from an earlier call, which did not get that far. A publication at
// another target attaches one before it is mounted.
func (v *found) detachUnpublished(ctx context.Context) error {
	if !v.entry.Block() {
		return nil
	}
	done, err := v.visit.Pool.Node.TurnAtDevices(ctx, v.id)
	if err != nil {
		return err
	}
	defer done()
	return v.use().DetachUnpublished(ctx)
}

// Stats are what a published volume holds.
type Stats struct {
	Mode volume.Mode
	// Space is what is in use and free; of a block volume only the size is known.
	Space     dir.Space
	Condition health.Condition
}

// Stats measures a published volume. It returns ErrNotFound if the volume is not
// published at the path. Of one that is lost, or whose pool does not serve, there is only
// the condition.
func (s Publications) Stats(ctx context.Context, id volume.ID, at bind.Target) (Stats, error) {
	v, err := s.set.findSettled(ctx, id)
	if err != nil {
		v, err := remembered(ctx, s.set, id, err)
		return Stats{Mode: v.Mode, Condition: v.Condition}, err
	}
	defer v.close()
	stats, err := s.stats(v, at)
	if err != nil {
		return Stats{}, fmt.Errorf("measure volume %s: %w", id, err)
	}
	return stats, nil
}

func (s Publications) stats(v *found, at bind.Target) (Stats, error) {
	immeasurable := v.entry.Lost()
	if !immeasurable {
		err := v.use().CheckPublished(at)
		if immeasurable = volume.IsDamage(err); err != nil && !immeasurable {
			return Stats{}, err
		}
	}
	whole, err := v.visit.Store.Space()
	if err != nil {
		return Stats{Mode: v.entry.Mode(), Condition: health.Facts{Pool: err}.Condition()}, nil //nolint:nilerr // the condition says it
	}
	space, facts := v.visit.View().Measure(v.id, v.dir, v.entry, whole)
	if immeasurable {
		space = dir.Space{}
	}
	return Stats{Mode: v.entry.Mode(), Space: space, Condition: facts.Condition()}, nil
}
