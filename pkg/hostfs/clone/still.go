package clone

import (
	"errors"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// laterBytes is how much memory a standstill takes for what it captures. What is more is copied at once, and may have to wait: Linux
// has who writes to a disk wait for what others have written to it (balance_dirty_pages), in memory as well.
const laterBytes = 32 << 20

// A step changes the copy in the directory where a Descent is, or has that go on to another.
type step struct {
	enters bool // an existing directory, and does nothing else
	bytes  int  // of memory that it takes
	do     func(at *dir.Descent[struct{}]) error
}

// stepBytes is what a step takes besides what was captured, more or less.
const stepBytes = 512

// Steps are what the copy has still to become. They are taken once those who write go on.
type steps struct {
	entries *entryCopier
	at      *dir.Descent[struct{}] // nil before the standstill
	all     []step
	bytes   int
	most    int
	files   map[string]bool // that have several names, one of which is made by a step
}

// room is how much memory one more step may take.
func (s *steps) room() int { return s.most - s.bytes - stepBytes }

// add takes a step later. If there is no room, those so far are taken at once.
func (s *steps) add(one step) error {
	if one.bytes > s.room() {
		if err := s.take(); err != nil {
			return err
		}
	}
	one.bytes += stepBytes
	s.all, s.bytes = append(s.all, one), s.bytes+one.bytes
	return nil
}

func (s *steps) enter(name string) error {
	return s.add(step{enters: true, bytes: len(name), do: func(at *dir.Descent[struct{}]) error { return at.Enter(name, struct{}{}) }})
}

// justEntered reports whether nothing is to be done yet in the directory that was last entered.
func (s *steps) justEntered() bool { return len(s.all) > 0 && s.all[len(s.all)-1].enters }

func (s *steps) leave() error {
	if !s.justEntered() {
		return s.add(step{do: (*dir.Descent[struct{}]).Leave})
	}
	last := len(s.all) - 1
	s.bytes -= s.all[last].bytes
	s.all = s.all[:last]
	return nil
}

// take takes all steps.
func (s *steps) take() error {
	for i, one := range s.all {
		if err := s.entries.next(); err != nil {
			return err
		}
		if err := one.do(s.at); err != nil {
			return err
		}
		s.all[i] = step{} // with what was captured
	}
	s.all, s.bytes = s.all[:0], 0
	clear(s.files)
	return nil
}

// A stillPass is the pass while those who write stand still. It only reads, but for sharing the blocks of large files that are on the
// disk: a change of a filesystem may have to wait until its log is written, behind what others write.
type stillPass struct {
	*pass
	steps *steps
}

func (p *stillPass) run(src *dir.Dir) error {
	root, err := p.look.Open(src)
	if err != nil {
		return err
	}
	p.dst.SetValue(!p.since.follows(root))
	err = dir.Visit(src, p)
	if err = errors.Join(err, p.dst.Close()); err != nil {
		return err
	}
	if err := p.removeGone(src, p.dst.Current().Dir); err != nil {
		return err
	}
	return p.attributes(src)
}

// File captures an entry that is no directory, unless there is a copy of it.
func (p *stillPass) File(in *dir.Dir, name string) error {
	st, wanted, err := p.find(in, name)
	if !wanted {
		return err
	}
	p.copied++
	from := source{in, name, st}
	file := p.identity(from)
	if file != "" {
		made, err := p.isMade(file, st)
		if err != nil {
			return err
		}
		if made {
			return p.replaceLater(name, st, file, 0, func(*dir.Dir, string) error { return ErrGone })
		}
	}
	c, err := p.capture(from, p.steps.room())
	if errors.Is(err, errTooLarge) {
		if err := p.steps.take(); err != nil {
			return err
		}
		c, err = p.capture(from, p.steps.room())
	}
	switch {
	case errors.Is(err, ErrGone):
		return p.removeLater(name)
	case errors.Is(err, errTooLarge):
		return p.copyNow(from, file)
	case err != nil:
		return err
	}
	return p.replaceLater(name, &c.st, file, c.bytes, func(to *dir.Dir, name string) error { return p.makeCaptured(c, to, name) })
}

// identity is what a file of several names is known by.
func (p *stillPass) identity(of source) string {
	if of.st.Nlink == 1 {
		return ""
	}
	return Identify(of.in, of.name, of.st)
}

// isMade says that a file has a copy already, or will have.
func (p *stillPass) isMade(file string, st *unix.Stat_t) (bool, error) {
	if p.steps.files[file] {
		return true, nil
	}
	node, err := p.made(file, st)
	return node != "", err
}

// replaceLater is replace as a step, with so many bytes of what was captured.
func (p *stillPass) replaceLater(name string, st *unix.Stat_t, file string, bytes int, create func(to *dir.Dir, name string) error) error {
	err := p.steps.add(step{bytes: bytes + len(name) + len(file), do: func(at *dir.Descent[struct{}]) error {
		return p.replace(at.Current().Dir, name, st, file, create)
	}})
	if file != "" {
		p.steps.files[file] = true
	}
	return err
}

// replace makes an entry of the copy, also in the place of another, unless it is gone. A file of several names has an identity.
func (p *stillPass) replace(to *dir.Dir, name string, st *unix.Stat_t, file string, create func(to *dir.Dir, name string) error) error {
	err := remove(p.entries.ctx, to, name)
	switch {
	case err != nil:
	case file != "":
		err = p.link(file, st, to, name, func(node string) error { return create(p.links, node) })
	default:
		err = create(to, name)
	}
	if errors.Is(err, ErrGone) { // which is found out by check
		return nil
	}
	return err
}

// copyNow copies what is too large for memory.
func (p *stillPass) copyNow(from source, file string) error {
	return p.replace(p.steps.at.Current().Dir, from.name, from.st, file, func(to *dir.Dir, name string) error {
		return p.entries.make(from, to, name)
	})
}

func (p *stillPass) removeLater(name string) error {
	return p.steps.add(step{bytes: len(name), do: func(at *dir.Descent[struct{}]) error {
		return remove(p.entries.ctx, at.Current().Dir, name)
	}})
}

// Enter goes into what was made of a directory before, or has one made.
func (p *stillPass) Enter(d, _ *dir.Dir, name string) error {
	if err := p.entries.next(); err != nil {
		return err
	}
	st, err := p.look.Open(d)
	if err != nil {
		return err
	}
	if p.updating() {
		entered, err := p.enterCopy(name, st)
		if err != nil {
			return err
		}
		if entered {
			return p.steps.enter(name)
		}
	}
	p.whole++
	p.copied++
	return p.steps.add(step{bytes: len(name), do: func(at *dir.Descent[struct{}]) error {
		if err := remove(p.entries.ctx, at.Current().Dir, name); err != nil {
			return err
		}
		return at.Make(name, struct{}{})
	}})
}

// Leave has what is gone be removed, and a directory get its attributes.
func (p *stillPass) Leave(d *dir.Dir) error {
	if p.whole > 0 {
		p.whole--
		return errors.Join(p.attributes(d), p.steps.leave())
	}
	to := p.dst.Current()
	if to.Value {
		if err := p.removeGone(d, to.Dir); err != nil {
			return err
		}
	}
	if to.Value || !p.steps.justEntered() {
		if err := p.attributes(d); err != nil {
			return err
		}
	}
	return errors.Join(p.steps.leave(), p.dst.Leave())
}

func (p *stillPass) removeGone(src, dst *dir.Dir) error {
	for entry, err := range dst.Entries() {
		if err != nil {
			return err
		}
		gone, err := p.isGone(src, dst, entry.Name)
		if err == nil && gone {
			err = p.removeLater(entry.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *stillPass) attributes(src *dir.Dir) error {
	fd, err := src.ReadFd()
	if err != nil {
		return err
	}
	st, err := statSelf(src)
	if err != nil {
		return err
	}
	attrs, bytes, err := p.entries.buffers.capture(xattr.Descriptor(fd), src.String(), p.steps.room())
	if errors.Is(err, errTooLarge) {
		if err := p.steps.take(); err != nil {
			return err
		}
		return p.entries.attributes(src, p.steps.at.Current().Dir)
	}
	if err != nil {
		return err
	}
	return p.steps.add(step{bytes: bytes, do: func(at *dir.Descent[struct{}]) error {
		dst := at.Current().Dir
		to, err := dst.ReadFd()
		if err != nil {
			return err
		}
		return errors.Join(p.entries.fileAttributes(to, st, attrs, src.String()), setTimes(dst, ".", st))
	}})
}
