package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Locator has the mount table, as bind.Kernel does.
type Locator interface {
	Locate(d *dir.Dir) (bind.Place, error)
}

// Places are where the pools of a process were when they were last checked. So it is known that one lies in another without a check
// at a disk that may hang: that one must not serve, for it would take the other for a volume and could remove it. The zero value is
// ready for use.
type Places struct {
	mu sync.Mutex
	of map[*Place]root
}

// A Place is where one pool is.
type Place struct {
	all     *Places
	name    volume.PoolName
	mounts  Locator
	log     logr.Logger
	recheck func()
	// logged says that the log has why it could not be known whether another pool is inside.
	logged atomic.Bool
}

// Add adds a pool, whose place is noted when it is checked. To recheck has its next check come now.
func (p *Places) Add(name volume.PoolName, mounts Locator, log logr.Logger, recheck func()) *Place {
	return &Place{all: p, name: name, mounts: mounts, log: log, recheck: recheck}
}

type root struct {
	id    dir.ID
	place bind.Place
}

// settle notes where a pool is, and returns where the others are. Those that came before
// check again: this one may lie in them.
func (p *Places) settle(of *Place, at root) map[*Place]root {
	others, moved := p.note(of, at)
	if moved {
		for other := range others {
			other.recheck()
		}
	}
	return others
}

// note answers where the others are, and whether this one was elsewhere or nowhere.
func (p *Places) note(of *Place, at root) (others map[*Place]root, moved bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = make(map[*Place]root)
	}
	was, known := p.of[of]
	p.of[of] = at
	others = maps.Clone(p.of)
	delete(others, of)
	return others, !known || was.id != at.id
}

// ErrNested reports a pool that has another where its volumes are, or where it keeps its own.
var ErrNested = errors.New("another pool lies in it; give each a directory of its own")

// Note notes where the pool is, if that can be known.
func (p *Place) Note(own *dir.Dir) {
	if at, err := p.locate(own); err == nil {
		p.all.settle(p, at)
	}
}

// Check notes where the pool is, and returns ErrNested for one that has another in it. The
// other has nothing of this one, and serves. Where it cannot be known, nothing is known against
// the pool.
func (p *Place) Check(own *dir.Dir) error {
	here, err := p.locate(own)
	if errors.Is(err, errPlace) {
		p.logOnce("cannot determine where the pool is mounted, nor whether another pool is inside it", err)
		return nil
	}
	if err != nil {
		return err
	}
	for other, at := range p.all.settle(p, here) {
		for _, path := range at.place.Below(here.place) {
			if !touches(path) {
				continue
			}
			if is, err := reaches(own, path, at.id); err != nil {
				p.logOnce("cannot determine whether another pool is inside it", err)
			} else if is {
				return fmt.Errorf("%w: pool %q at %s", ErrNested, other.name, path)
			}
		}
	}
	return nil
}

var errPlace = errors.New("find the mount that it is in")

// locate returns where the pool is, or errPlace.
func (p *Place) locate(own *dir.Dir) (root, error) {
	id, err := own.ID()
	if err != nil {
		return root{}, err
	}
	place, err := p.mounts.Locate(own)
	if err != nil {
		return root{}, fmt.Errorf("%w: %w", errPlace, err)
	}
	return root{id: id, place: place}, nil
}

// logOnce logs once what each check would find again.
func (p *Place) logOnce(what string, err error) {
	if !p.logged.Swap(true) {
		p.log.Error(err, what)
	}
}

// touches reports whether a pool does anything with what is at a path below its root: in one of
// its volumes, or with what it keeps itself.
func touches(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	_, err := volume.ParseID(first)
	return err == nil || first == store.OwnName
}

// reaches reports whether a path below a directory leads to the one with that id.
func reaches(from *dir.Dir, path string, id dir.ID) (bool, error) {
	name, rest, deeper := strings.Cut(path, "/")
	d, err := from.Open(name)
	if dir.IsMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = d.Close() }()
	if deeper {
		return reaches(d, rest, id)
	}
	here, err := d.ID()
	return here == id, err
}
