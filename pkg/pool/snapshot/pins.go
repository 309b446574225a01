package snapshot

import (
	"fmt"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Pins has the volumes and snapshots that are being copied. They are taken and checked under
// the lock of their id, so that a call that has that and finds none knows that none comes. The
// zero value is ready for use.
type Pins struct {
	mu   sync.Mutex
	held map[volume.ID]int
}

// Pin keeps an entry from being deleted and from growing.
func (p *Pins) Pin(id volume.ID) (unpin func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(map[volume.ID]int)
	}
	p.held[id]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.held[id]--; p.held[id] == 0 {
			delete(p.held, id)
		}
	}
}

// Free returns ErrBusy for an entry that is being copied.
func (p *Pins) Free(id volume.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[id] > 0 {
		return fmt.Errorf("%w: a snapshot or a volume is being made from %s", volume.ErrBusy, id.Named())
	}
	return nil
}
