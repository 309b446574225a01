package reconcile

import (
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Peers are what is remembered of the other nodes of a shared pool. The zero value is ready for use.
type Peers struct {
	store.Signs          // of life
	measured    sync.Map // by node and name in its trash
}

// measurement is what an entry of another node's trash occupied when it was as it is now.
type measurement struct {
	changed time.Time
	bytes   int64
}

// trash is what volumes that the nodes of a pool have removed may still occupy, in bytes, or volume.Unknown. That of one node may be
// left out, by its name. What cannot be read may occupy anything, and is reported to left.
func (p *Peers) trash(s *store.Store, except string, left func(path string, err error)) (held int64) {
	seen := make(map[any]bool)
	err := s.Nodes().EachIn(store.InTrash, func(node string, trash *dir.Dir) error {
		if node == except {
			return nil
		}
		thrown, err := store.Names(trash)
		for _, name := range thrown {
			seen[node+"/"+name] = true
			if bytes := p.heldBy(trash, node, name); bytes == volume.Unknown || held == volume.Unknown {
				held = volume.Unknown
			} else {
				held += bytes
			}
		}
		return err
	})
	p.measured.Range(func(key, _ any) bool {
		if !seen[key] {
			p.measured.Delete(key)
		}
		return true
	})
	left(string(store.InTrash), err)
	if err != nil {
		return volume.Unknown
	}
	return held
}

// heldBy is the promise of an entry of another node's trash. What has to be measured is
// measured again only when the entry has changed: this is asked for each answer.
func (p *Peers) heldBy(trash *dir.Dir, node, name string) int64 {
	if t := store.ParseTrashName(name); t.Promised != volume.Unknown {
		return t.Promised
	}
	changed, err := dir.Changed(trash, name)
	if dir.IsMissing(err) {
		return 0 // erased meanwhile
	}
	if err != nil {
		return volume.Unknown
	}
	key := node + "/" + name
	if last, ok := p.measured.Load(key); ok && last.(measurement).changed.Equal(changed) {
		return last.(measurement).bytes
	}
	bytes := store.Measured(trash, name)
	p.measured.Store(key, measurement{changed, bytes})
	return bytes
}
