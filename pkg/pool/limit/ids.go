package limit

import (
	"errors"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// IDs are the project ids that directories carry on one filesystem. See also Claims.
type IDs struct {
	facility quota.Facility // nil if nothing is counted
	Claims   *Claims
}

// drop gives up an id that a directory was to carry, unless it does by now: then
// it goes with the directory.
func (i IDs) drop(d *dir.Dir, id quota.ID) error {
	carried, err := i.facility.IDOf(d)
	if err == nil && carried != id {
		i.Claims.drop(id)
	}
	return err
}

// take takes an id that nothing on the filesystem has. No lock is held while
// the filesystem is asked: of two calls that get the same id, one asks again.
func (i IDs) take(root *dir.Dir, uid string, from quota.ID) (quota.ID, error) {
	for {
		id, err := i.facility.NewID(root, from, i.Claims.holds)
		if err != nil || i.Claims.Try(id, uid) {
			return id, err
		}
	}
}

// In is the id that what was made by the driver carries; 0 if it carries none.
func (i IDs) In(parent *dir.Dir, name string) (quota.ID, error) {
	if i.facility == nil {
		return 0, nil
	}
	d, err := parent.Open(name)
	if dir.IsMissing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	id, err := i.facility.IDOf(d)
	if i.facility.Kind() != quota.Btrfs && (id < quota.FirstID || id > quota.LastID) {
		id = 0 // not one of the driver's
	}
	return id, errors.Join(err, d.Close())
}

// Release gives an id back after its tree is gone.
func (i IDs) Release(root *dir.Dir, id quota.ID) error {
	// Without quotas there is none to be given back: what is left of it is forgotten
	// when the pool is opened with them.
	if id == 0 || i.facility == nil {
		return nil
	}
	if err := i.facility.Release(root, id); err != nil {
		return err
	}
	i.Claims.drop(id)
	return nil
}

// ReleaseUnused removes the limits of what was removed while no driver saw to them, and returns
// how many there were: the filesystem was mounted without quotas, or the directory was
// removed by hand. It calls step for each limit on the filesystem.
func (i IDs) ReleaseUnused(root *dir.Dir, step func()) (int, error) {
	if i.facility == nil {
		return 0, nil
	}
	return i.facility.ReleaseUnused(root, func(id quota.ID) bool {
		step()
		return i.Claims.holds(id)
	})
}

// Claim notes the id that counts a volume, as its record says, and returns false if another
// record has it. Of two records with one id, as when a pool was copied, the one whose
// directory carries it has it.
func (i IDs) Claim(root *dir.Dir, name string, id quota.ID, uid string) bool {
	if i.Claims.Try(id, uid) {
		return true
	}
	if carried, err := i.In(root, name); err == nil && carried == id {
		i.Claims.hold(id, uid)
	}
	return false
}

// A Registry has the claims of each filesystem, on which several pools can lie. The zero
// value is ready for use.
type Registry struct {
	mu sync.Mutex
	by map[dir.Filesystem]*Claims
}

// On has the claims of a filesystem.
func (c *Registry) On(fs dir.Filesystem) *Claims {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = make(map[dir.Filesystem]*Claims)
	}
	if c.by[fs] == nil {
		c.by[fs] = &Claims{}
	}
	return c.by[fs]
}

// Claims are the ids that volumes and trash on one filesystem are counted by. The zero
// value is ready for use.
type Claims struct {
	mu    sync.Mutex
	taken map[quota.ID]string // the uids of the records that have them
	// below has no id that is free: NewID need not ask for each of ten thousand.
	below quota.ID
}

// from is where to search for a free id.
func (c *Claims) from() quota.ID {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.below = max(c.below, quota.FirstID); c.taken[c.below] != ""; {
		c.below++
	}
	return c.below
}

// hold notes that a record has an id.
func (c *Claims) hold(id quota.ID, uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.taken == nil {
		c.taken = make(map[quota.ID]string)
	}
	c.taken[id] = uid
}

// Try is hold, unless another has the id.
func (c *Claims) Try(id quota.ID, uid string) bool {
	if id == 0 {
		return true // on btrfs, where the kernel chose
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if owner := c.taken[id]; owner != "" {
		return owner == uid
	}
	if c.taken == nil {
		c.taken = make(map[quota.ID]string)
	}
	c.taken[id] = uid
	return true
}

// Owner is the uid of the record that has an id; empty if none has.
func (c *Claims) Owner(id quota.ID) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.taken[id]
}

func (c *Claims) holds(id quota.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, taken := c.taken[id]
	return taken
}

func (c *Claims) drop(id quota.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.taken, id)
	c.below = min(c.below, id)
}
