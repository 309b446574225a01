package clone

import (
	"errors"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

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
	at    *dir.Descent[struct{}]
	all   []step
	bytes int
}

// add takes a step later. If the memory for that is full, those so far are taken at once.
func (s *steps) add(one step) error {
	one.bytes += stepBytes
	if s.bytes+one.bytes > laterBytes {
		if err := s.take(); err != nil {
			return err
		}
	}
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
		if err := one.do(s.at); err != nil {
			return err
		}
		s.all[i] = step{} // with what was captured
	}
	s.all, s.bytes = s.all[:0], 0
	return nil
}

// A stillPass is the pass while those who write stand still, if copies share no blocks: it only reads. A change of a filesystem may
// have to wait until its log is written, behind what others write.
type stillPass struct {
	*pass
	steps *steps
}

func (p *stillPass) run(src *dir.Dir) error {
	root, err := statSelf(src)
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
	c, err := p.entries.capture(source{in, name, st}, laterBytes/2)
	switch {
	case errors.Is(err, ErrGone):
		return p.remove(name)
	case errors.Is(err, errTooLarge):
		return p.copyNow(in, name, st)
	case err != nil:
		return err
	}
	file := ""
	if c.st.Nlink > 1 {
		file = Identify(in, name, &c.st)
	}
	return p.steps.add(step{bytes: c.bytes, do: func(at *dir.Descent[struct{}]) error {
		return p.replace(at.Current().Dir, name, &c.st, file, func(to *dir.Dir, name string) error { return p.entries.makeCaptured(c, to, name) })
	}})
}

// replace makes an entry of the copy, also in the place of another. A file of several names has an identity.
func (p *stillPass) replace(to *dir.Dir, name string, st *unix.Stat_t, file string, create func(to *dir.Dir, name string) error) error {
	if err := remove(p.entries.ctx, to, name); err != nil {
		return err
	}
	if file != "" {
		return p.link(file, st, to, name, func(node string) error { return create(p.links, node) })
	}
	return create(to, name)
}

// copyNow copies what is too large for memory.
func (p *stillPass) copyNow(in *dir.Dir, name string, st *unix.Stat_t) error {
	if err := p.steps.take(); err != nil {
		return err
	}
	file := ""
	if st.Nlink > 1 {
		file = Identify(in, name, st)
	}
	err := p.replace(p.steps.at.Current().Dir, name, st, file, func(to *dir.Dir, as string) error {
		return p.entries.make(source{in, name, st}, to, as)
	})
	if errors.Is(err, ErrGone) {
		return nil
	}
	return err
}

func (p *stillPass) remove(name string) error {
	return p.steps.add(step{bytes: len(name), do: func(at *dir.Descent[struct{}]) error {
		return remove(p.entries.ctx, at.Current().Dir, name)
	}})
}

// Enter goes into what was made of a directory before, or has one made.
func (p *stillPass) Enter(d, _ *dir.Dir, name string) error {
	if err := p.entries.next(); err != nil {
		return err
	}
	if p.updating() {
		st, err := statSelf(d)
		if err != nil {
			return err
		}
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
			err = p.remove(entry.Name)
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
	attrs, bytes, err := p.entries.buffers.capture(xattr.Descriptor(fd), src.String())
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
