package quota

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

func (p projects) Strays(d *dir.Dir, id ID, step func() error) (Strays, error) {
	s := &straySearch{id: id, step: step}
	err := dir.Visit(d, s)
	return s.found, err
}

// Strays is none: the kernel chooses what a subvolume counts.
func (*subvolumes) Strays(*dir.Dir, ID, func() error) (Strays, error) { return Strays{}, nil }

// straySearch counts what is in a tree and not in its project.
type straySearch struct {
	id    ID
	step  func() error
	found Strays
}

func (s *straySearch) File(in *dir.Dir, name string) error {
	if err := s.step(); err != nil {
		return err
	}
	id, ok, err := projectOf(in, name)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, unix.ENOKEY):
		s.found.Unseen++
	case err != nil:
		return fmt.Errorf("read the project of a file in %s: %w", in, err)
	case ok && id != s.id:
		s.found.Outside++
	}
	return nil
}

func (s *straySearch) Enter(d, _ *dir.Dir, _ string) error {
	if err := s.step(); err != nil {
		return err
	}
	attr, err := attrOf(d)
	if err == nil && ID(attr.Project) != s.id {
		s.found.Outside++
	}
	return err
}

func (*straySearch) Leave(*dir.Dir) error { return nil }

// projectOf is the project of a regular file. It returns false for all else, which holds no
// data, and for what is gone by now. It returns EWOULDBLOCK for a file that a process has a write
// lease of, and ENOKEY for one that is encrypted without its key.
func projectOf(in *dir.Dir, name string) (id ID, ok bool, err error) {
	f, err := in.OpenFile(name)
	if dir.IsMissing(err) || errors.Is(err, dir.ErrNotFile) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = f.Close() }() // opened for reading
	var attr ioctl.FileAttr
	if err := ioctl.Do(ioctl.File{File: f}, ioctl.GetFileAttr, &attr); err != nil {
		return 0, false, err
	}
	return ID(attr.Project), true, nil
}
