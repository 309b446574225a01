package serve

import (
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Another filesystem may be mounted over a pool after the driver opened the bare directory, as
// a pool mounter does that starts later. If nothing is in what was opened, the pool goes on in
// that filesystem. From then on one has to be mounted at the pool's path, so that nothing is
// written into the bare directory once it is unmounted. It has to be mounted where that directory
// was: a symbolic link that takes the place of the directory is not followed.

// noteVacancy notes whether the pool has a volume, record or trash, as far as a check can see. What cannot be read is something.
func (v *Visit) noteVacancy() {
	vacant := false
	if v.Pool.knownEmpty() {
		var err error
		vacant, err = v.Store.Vacant()
		vacant = vacant && err == nil
	}
	v.Pool.vacant = vacant
}

func (p *Pool) knownEmpty() bool {
	now := p.Ledger.Summary()
	return now.Volumes == 0 && now.Snapshots.Count == 0 && now.Trash.Pieces == 0
}

// replaced reports whether a pool cannot be opened any more because another filesystem is
// mounted over it, and nothing was in it. It forgets the pool then. A call that is still at work in it may be making a volume: it is
// waited for by trying again.
func (p *Pool) replaced(id *opened, err error) (bool, error) {
	// The calls first: what they made is known once they have ended, and none can begin while
	// something else is mounted.
	if !errors.Is(err, store.ErrOther) || id.calls.Load() > 0 || !p.vacant || !p.knownEmpty() {
		return false, nil
	}
	if over, err := p.mountedOver(); err != nil || !over {
		return false, err
	}
	p.Log.Info("A filesystem was mounted over the empty pool; opening that filesystem", "path", p.Config.Path)
	if err := p.markCovered(); err != nil {
		p.Log.Error(err, "Failed to mark the directory below the mount; without the mount it is served again after a restart", "path", p.Config.Path)
	}
	if err := p.note.Forget(id.Format.UUID); err != nil {
		p.Log.Error(err, "Failed to forget the empty pool below the mount; forget-pool does it")
	}
	p.needMount.Store(true)
	p.at.MakePath = false
	p.state.Store(&state{err: p.Unavailable(ErrNotChecked), errors: p.state.Load().errors})
	p.identity.Store(nil)
	p.node.filesystems.Forget(p)
	p.Ledger.Leave()
	p.giveUp()
	return true, nil
}

// markCovered notes in the directory below the mount that it is not to be served after a restart.
func (p *Pool) markCovered() error {
	root := p.root.Load()
	if root == nil {
		return ErrNotChecked
	}
	covered, err := mounts.OpenCovered(p.Config.Path, root.ID)
	if err != nil {
		return err
	}
	defer func() { _ = covered.Close() }()
	return store.MarkCovered(covered)
}

var errCovered = volume.PoolMissing("a filesystem was mounted over it and is missing; mount it, or, to serve the bare directory, remove " + store.OwnName + "/covered in it")

// checkCovered returns why a directory is not served that another filesystem was mounted over before
// a restart.
func (v *Visit) checkCovered() error {
	covered, err := v.Store.Covered()
	if err != nil || !covered {
		return err
	}
	mounted, err := v.Pool.Options.Mounts.IsFilesystem(v.Store.Root())
	if err != nil || mounted {
		return err
	}
	return errCovered
}

func (p *Pool) mountedOver() (bool, error) {
	root, err := dir.Open(p.Config.Path)
	if err != nil {
		return false, err
	}
	defer func() { _ = root.Close() }()
	mounted, err := p.Options.Mounts.IsFilesystem(root)
	if err != nil || !mounted {
		return false, err
	}
	return true, p.checkSeen(root)
}

// errElsewhere reports a link, or another directory, in the place of the one that was opened.
var errElsewhere = volume.PoolMissing("its path leads to another place than when it was opened first")

// checkSeen returns errElsewhere for a directory that is elsewhere.
func (p *Pool) checkSeen(root *dir.Dir) error {
	first := p.seen.Load()
	if first == nil {
		return nil
	}
	at, err := dir.Seen(root)
	if err == nil && at != *first {
		err = errElsewhere
	}
	return err
}

// checkRoot returns why the pool must not be opened in a directory. One whose identity is known by its
// format may be anywhere.
func (p *Pool) checkRoot(root *dir.Dir) error {
	if p.identity.Load() == nil {
		if err := p.checkSeen(root); err != nil {
			return err
		}
	}
	return p.checkMount(root)
}

// checkMount returns why a pool that must be a filesystem of its own is none.
func (p *Pool) checkMount(root *dir.Dir) error {
	if p.Config.RequireMount || !p.needMount.Load() {
		return reconcile.CheckMount(&p.Config, p.Options.Mounts, root)
	}
	if mounted, err := p.Options.Mounts.IsFilesystem(root); err != nil || mounted {
		return err
	}
	return errUnmounted
}

var errUnmounted = volume.PoolMissing("the filesystem that was mounted over it is gone")
