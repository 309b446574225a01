package pool

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// roots are where the pools of a process were when they were last checked. So it is known
// that one lies in another without a check at a disk that may hang. The zero value is ready
// for use.
type roots struct {
	mu sync.Mutex
	of map[*Pool]root
}

type root struct {
	id    dir.ID
	place bind.Place
}

// settle notes where a pool is, and answers where the others are. Those that came before
// check again: this one may lie in them.
func (r *roots) settle(p *Pool, at root) map[*Pool]root {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = make(map[*Pool]root)
	}
	was, known := r.of[p]
	r.of[p] = at
	others := make(map[*Pool]root)
	for other, there := range r.of {
		if other == p {
			continue
		}
		others[other] = there
		if !known || was.id != at.id {
			other.checkNow()
		}
	}
	return others
}

// checkNow has the next check come without the rest before it.
func (p *Pool) checkNow() {
	select {
	case p.nudge <- struct{}{}:
	default: // it will
	}
}

var errNested = errors.New("another pool lies in it; give each a directory of its own")

// checkNested answers errNested for a pool that has another where its volumes are, or where
// it keeps its own. It must not serve, for it would take the other for a volume, or have it in
// one, and could remove it. The other has nothing of this one, and serves. Where it cannot be
// told, nothing is known against the pool.
func (p *Pool) checkNested(own *dir.Dir) error {
	here, err := p.locate(own)
	if errors.Is(err, errPlace) {
		p.logOnce("cannot tell where the pool is mounted, nor whether another pool is inside it", err)
		return nil
	}
	if err != nil {
		return err
	}
	for other, at := range p.roots.settle(p, here) {
		for _, path := range at.place.Below(here.place) {
			if !touches(path) {
				continue
			}
			if is, err := reaches(own, path, at.id); err != nil {
				p.logOnce("cannot tell whether another pool is inside it", err)
			} else if is {
				return fmt.Errorf("%w: pool %q at %s", errNested, other.config.Name, path)
			}
		}
	}
	return nil
}

var errPlace = errors.New("its place among the mounts")

// locate answers where the pool is, or errPlace.
func (p *Pool) locate(own *dir.Dir) (root, error) {
	id, err := own.ID()
	if err != nil {
		return root{}, err
	}
	place, err := p.options.Mounts.Locate(own)
	if err != nil {
		return root{}, fmt.Errorf("%w: %w", errPlace, err)
	}
	return root{id: id, place: place}, nil
}

// logOnce logs once what each check would find again.
func (p *Pool) logOnce(what string, err error) {
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
