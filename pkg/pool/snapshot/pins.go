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
	held map[pin]int
	used map[volume.ID]bool // published while they are copied
}

type pin struct {
	id        volume.ID
	exclusive bool
}

// Pin keeps an entry from being deleted, and the file of a block volume from growing. An exclusive one keeps it from being published,
// too, other than as a directory that can only be read.
func (p *Pins) Pin(id volume.ID, exclusive bool) (unpin func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(map[pin]int)
	}
	one := pin{id, exclusive}
	p.held[one]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.held[one]--; p.held[one] == 0 {
			delete(p.held, one)
			if !exclusive {
				delete(p.used, id)
			}
		}
	}
}

// Free returns ErrBusy for an entry that is being copied.
func (p *Pins) Free(id volume.ID) error { return p.free(pin{id, false}, pin{id, true}) }

// MayBeWritten is called before a volume is published. It returns ErrBusy for one that is being copied in a way that no pod may write
// to it meanwhile, and notes of others that they were, also if they are not any more when they are copied.
func (p *Pins) MayBeWritten(id volume.ID) error {
	if err := p.free(pin{id, true}); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[pin{id, false}] > 0 {
		if p.used == nil {
			p.used = make(map[volume.ID]bool)
		}
		p.used[id] = true
	}
	return nil
}

// Used reports whether a volume that the caller has pinned may have been published since.
func (p *Pins) Used(id volume.ID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used[id]
}

func (p *Pins) free(of ...pin) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range of {
		if p.held[one] > 0 {
			return fmt.Errorf("%w: a snapshot or a volume is being made from %s", volume.ErrBusy, one.id.Named())
		}
	}
	return nil
}
