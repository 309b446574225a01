package limit

import (
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

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
