package serve

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

// A CopySum is how many copies were made by a method, how long that took, and for how long those
// who write to their sources had to wait at most. Of those that Failed there is only the number.
type CopySum struct {
	Count, Failed uint64
	Took, Stalled time.Duration
}

// begin counts a copy that begins.
func (c *copies) begin(method volume.CopyMethod) (end func(stalled time.Duration, err error)) {
	began := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running++
	return func(stalled time.Duration, err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.running--
		if c.done == nil {
			c.done = make(map[volume.CopyMethod]CopySum)
		}
		sum := c.done[method]
		if err != nil {
			sum.Failed++
		} else {
			sum.Count++
			sum.Took += time.Since(began)
			sum.Stalled += stalled
		}
		c.done[method] = sum
	}
}

func (c *copies) counted() (running int, done map[volume.CopyMethod]CopySum) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running, maps.Clone(c.done)
}

// CountCopy counts a copy that begins.
func (p *Pool) CountCopy(method volume.CopyMethod) (end func(stalled time.Duration, err error)) {
	return p.copies.begin(method)
}
