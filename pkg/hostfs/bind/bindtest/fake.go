// Package bindtest has an in-memory stand-in for bind.Kernel, and the contract
// that both keep.
package bindtest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Fake keeps publications in memory and mounts nothing. Like the kernel it makes
// and removes targets, stacks mounts, follows directories that are renamed, and
// refuses to unmount what is held. Its zero value is ready for use.
type Fake struct {
	mu     sync.Mutex
	mounts map[string][]fakeMount // by target, the topmost last
	held   map[string]bool
}

type fakeMount struct {
	source *dir.Dir // a handle of its own, as a mount keeps its directory
	id     dir.ID
	flags  bind.Flags
}

// Publish is bind.Kernel.Publish.
func (f *Fake) Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := source.ID()
	if err != nil {
		return err
	}
	if err := f.prepare(target); err != nil {
		return err
	}
	if stack := f.mounts[target.String()]; len(stack) > 0 {
		if top := stack[len(stack)-1]; top.id != id || top.flags != flags {
			return fmt.Errorf("%w: %s", bind.ErrOccupied, target)
		}
		return nil
	}
	return f.push(source, id, target, flags)
}

// Stack mounts on top of whatever is there, as mount(8) would.
func (f *Fake) Stack(source *dir.Dir, target bind.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := source.ID()
	if err != nil {
		return err
	}
	return f.push(source, id, target, bind.Flags{})
}

func (f *Fake) push(source *dir.Dir, id dir.ID, target bind.Target, flags bind.Flags) error {
	kept, err := dir.Open(source.HandlePath())
	if err != nil {
		return err
	}
	if f.mounts == nil {
		f.mounts = make(map[string][]fakeMount)
	}
	f.mounts[target.String()] = append(f.mounts[target.String()], fakeMount{source: kept, id: id, flags: flags})
	return nil
}

func (f *Fake) prepare(target bind.Target) error {
	if _, err := os.Stat(filepath.Dir(target.String())); err != nil {
		return fmt.Errorf("%w: %w", bind.ErrTarget, err)
	}
	info, err := os.Lstat(target.String())
	switch {
	case os.IsNotExist(err):
		return os.Mkdir(target.String(), 0o750)
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: %s is a symbolic link", bind.ErrTarget, target)
	case !info.IsDir():
		return fmt.Errorf("%w: %s is not a directory", bind.ErrOccupied, target)
	}
	return nil
}

// Hold makes unmounting the target fail until the returned function is called.
func (f *Fake) Hold(target bind.Target) (release func()) {
	set := func(held bool) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.held == nil {
			f.held = make(map[string]bool)
		}
		f.held[target.String()] = held
	}
	set(true)
	return func() { set(false) }
}

// Unpublish is bind.Kernel.Unpublish.
func (f *Fake) Unpublish(target bind.Target, of *dir.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for stack := f.mounts[target.String()]; len(stack) > 0; stack = f.mounts[target.String()] {
		top := stack[len(stack)-1]
		if of != nil && top.id != *of {
			return fmt.Errorf("%w: %s", bind.ErrOccupied, target)
		}
		if f.held[target.String()] {
			return fmt.Errorf("unmount %s: %w", target, bind.ErrBusy)
		}
		if err := top.source.Close(); err != nil {
			return err
		}
		f.mounts[target.String()] = stack[:len(stack)-1]
	}
	return removeTarget(target)
}

func removeTarget(target bind.Target) error {
	info, err := os.Lstat(target.String())
	switch {
	case os.IsNotExist(err):
		return nil
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: %s is a symbolic link", bind.ErrTarget, target)
	case info.Mode().IsRegular() && info.Size() > 0:
		return fmt.Errorf("%w: %s", bind.ErrOccupied, target)
	}
	if err := os.Remove(target.String()); err != nil {
		return fmt.Errorf("%w: %w", bind.ErrOccupied, err)
	}
	return nil
}

// Open is bind.Kernel.Open.
func (f *Fake) Open(target bind.Target) (*dir.Dir, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if stack := f.mounts[target.String()]; len(stack) > 0 {
		return dir.Open(stack[len(stack)-1].source.HandlePath())
	}
	info, err := os.Lstat(target.String())
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%w: %s is not a directory", bind.ErrTarget, target)
	}
	return dir.Open(target.String())
}

// Published is bind.Kernel.Published.
func (f *Fake) Published(parent *dir.Dir) (map[string][]bind.Publication, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	home, err := os.Readlink(parent.HandlePath())
	if err != nil {
		return nil, err
	}
	published := make(map[string][]bind.Publication)
	for target, stack := range f.mounts {
		for _, m := range stack {
			at, err := os.Readlink(m.source.HandlePath())
			if err != nil {
				return nil, err
			}
			below, ok := strings.CutPrefix(at, home+"/")
			if !ok {
				continue
			}
			name, inside, _ := strings.Cut(below, "/")
			published[name] = append(published[name], bind.Publication{Path: target, Inside: inside})
		}
	}
	return published, nil
}

// SameFilesystem is bind.Kernel.SameFilesystem.
func (f *Fake) SameFilesystem(a, b *dir.Dir) (bool, error) {
	aID, err := a.ID()
	if err != nil {
		return false, err
	}
	bID, err := b.ID()
	return aID.Dev == bID.Dev, err
}

// IsFilesystem asks the real kernel: a directory of another device than the one
// above it.
func (f *Fake) IsFilesystem(d *dir.Dir) (bool, error) {
	above, err := dir.Open(d.HandlePath() + "/..")
	if err != nil {
		return false, err
	}
	defer func() { _ = above.Close() }()
	same, err := f.SameFilesystem(d, above)
	return !same, err
}

// Close closes the handles of all mounts that are left.
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var first error
	for _, stack := range f.mounts {
		for _, m := range stack {
			if err := m.source.Close(); first == nil {
				first = err
			}
		}
	}
	f.mounts = nil
	return first
}
