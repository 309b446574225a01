package serve

import (
	"errors"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
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

// A directory is what is known of the place where a pool is.
type directory struct {
	pool  *Pool
	at    *store.Location
	place *reconcile.Place // among all pools
	// root is the pool's directory, as the last check that opened it found it, and where the one at its path, whether the
	// pool serves or not: nil before one was found.
	root  atomic.Pointer[dir.Way]
	where atomic.Pointer[bind.Root]
	// needMount says that a filesystem must be mounted at the pool's path.
	needMount atomic.Bool
	// seen is where the kernel had the pool's directory when it was opened first.
	seen atomic.Pointer[string]
}

// noteVacancy notes whether the pool has a volume, record or trash, as far as a check can see. What cannot be read is something.
func (c *checks) noteVacancy(in *Visit) {
	if c.vacant = c.knownEmpty(); c.vacant {
		vacant, err := in.Store.Vacant()
		c.vacant = vacant && err == nil
	}
}

func (c *checks) knownEmpty() bool {
	now := c.pool.Ledger.Summary()
	return now.Volumes == 0 && now.Snapshots.Count == 0 && now.Trash.Pieces == 0
}

// replaced reports whether a pool cannot be opened any more because another filesystem is
// mounted over it, and nothing was in it. It forgets the pool then. A call that is still at work in it may be making a volume: it is
// waited for by trying again.
func (c *checks) replaced(id *opened, err error) (bool, error) {
	// The calls first: what they made is known once they have ended, and none can begin while
	// something else is mounted.
	if !errors.Is(err, store.ErrOther) || id.calls.Load() > 0 || !c.vacant || !c.knownEmpty() {
		return false, nil
	}
	if over, err := c.pool.directory.mountedOver(); err != nil || !over {
		return false, err
	}
	c.pool.Log.Info("A filesystem was mounted over the empty pool; opening that filesystem", "path", c.pool.Config.Path)
	if err := c.pool.directory.markCovered(); err != nil {
		c.pool.Log.Error(err, "Failed to mark the directory below the mount; without the mount it is served again after a restart", "path", c.pool.Config.Path)
	}
	if err := c.pool.note.Forget(id.Format.UUID); err != nil {
		c.pool.Log.Error(err, "Failed to forget the empty pool below the mount; forget-pool does it")
	}
	c.pool.directory.needMount.Store(true)
	c.pool.directory.at.MakePath = false
	c.pool.state.Store(&state{err: c.pool.Unavailable(ErrNotChecked), errors: c.pool.state.Load().errors})
	c.pool.identity.Store(nil)
	c.pool.Node.filesystems.Forget(c.pool)
	c.pool.Ledger.Leave()
	c.giveUp()
	return true, nil
}

// markCovered notes in the directory below the mount that it is not to be served after a restart.
func (d *directory) markCovered() error {
	root := d.root.Load()
	if root == nil {
		return ErrNotChecked
	}
	covered, err := mounts.OpenCovered(d.pool.Config.Path, root.ID)
	if err != nil {
		return err
	}
	defer func() { _ = covered.Close() }()
	return store.MarkCovered(covered)
}

var errCovered = volume.PoolMissing("a filesystem was mounted over it and is missing; mount it, or, to serve the bare directory, remove " + store.OwnName + "/covered in it")

// checkCovered returns why a directory is not served that another filesystem was mounted over before
// a restart.
func (d *directory) checkCovered(s *store.Store) error {
	covered, err := s.Covered()
	if err != nil || !covered {
		return err
	}
	mounted, err := d.pool.Options.Mounts.IsFilesystem(s.Root())
	if err != nil || mounted {
		return err
	}
	return errCovered
}

func (d *directory) mountedOver() (bool, error) {
	root, err := dir.Open(d.pool.Config.Path)
	if err != nil {
		return false, err
	}
	defer func() { _ = root.Close() }()
	mounted, err := d.pool.Options.Mounts.IsFilesystem(root)
	if err != nil || !mounted {
		return false, err
	}
	return true, d.checkSeen(root)
}

// errElsewhere reports a link, or another directory, in the place of the one that was opened.
var errElsewhere = volume.PoolMissing("its path leads to another place than when it was opened first")

// checkSeen returns errElsewhere for a directory that is elsewhere.
func (d *directory) checkSeen(root *dir.Dir) error {
	first := d.seen.Load()
	if first == nil {
		return nil
	}
	at, err := dir.Seen(root)
	if err == nil && at != *first {
		err = errElsewhere
	}
	return err
}

// checkRoot returns why the pool must not be opened in a directory. One whose identity is known by its format may be anywhere.
func (d *directory) checkRoot(root *dir.Dir) error {
	if d.pool.identity.Load() == nil {
		if err := d.checkSeen(root); err != nil {
			return err
		}
	}
	return d.checkMount(root)
}

// checkMount returns why a pool that must be a filesystem of its own is none.
func (d *directory) checkMount(root *dir.Dir) error {
	if d.pool.Config.RequireMount || !d.needMount.Load() {
		return reconcile.CheckMount(&d.pool.Config, d.pool.Options.Mounts, root)
	}
	if mounted, err := d.pool.Options.Mounts.IsFilesystem(root); err != nil || mounted {
		return err
	}
	return errUnmounted
}

var errUnmounted = volume.PoolMissing("the filesystem that was mounted over it is gone")
