package pool

import (
	"maps"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// copies counts the snapshots, restores and clones of a pool since the driver has started. The
// zero value is ready for use.
type copies struct {
	mu      sync.Mutex
	running int
	done    map[volume.CopyMethod]CopySum
}

// A CopySum is how many copies were made by a method, and how long that took.
type CopySum struct {
	Count uint64
	Took  time.Duration
}

// begin counts a copy that begins. Those that fail are not counted when they end.
func (c *copies) begin(method volume.CopyMethod) (end func(error)) {
	began := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running++
	return func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.running--
		if err != nil {
			return
		}
		if c.done == nil {
			c.done = make(map[volume.CopyMethod]CopySum)
		}
		sum := c.done[method]
		c.done[method] = CopySum{Count: sum.Count + 1, Took: sum.Took + time.Since(began)}
	}
}

func (c *copies) counted() (running int, done map[volume.CopyMethod]CopySum) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running, maps.Clone(c.done)
}
