// Package bindtest has an in-memory fake of bind.Kernel, and the contract test
// that both pass.
package bindtest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Fake keeps publications in memory and mounts nothing. Like the kernel it creates
// and removes targets, stacks mounts, follows renamed directories, and
// refuses to unmount a busy target. Its zero value is ready for use.
type Fake struct {
	mu     sync.Mutex
	mounts map[string][]fakeMount // by target, topmost last
	held   map[string]bool
}

type fakeMount struct {
	source *os.File // own handle, as a mount pins its source
	isDir  bool
	id     dir.ID
	flags  bind.Flags
}

func (m fakeMount) handlePath() string { return dir.HandlePath(int(m.source.Fd())) }

// keep opens a path with O_PATH, since it may be a device.
func keep(path string, flags bind.Flags) (fakeMount, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fakeMount{}, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	m := fakeMount{source: os.NewFile(uintptr(fd), path), flags: flags}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fakeMount{}, errors.Join(err, m.source.Close())
	}
	m.id, m.isDir = dir.ID{Dev: st.Dev, Ino: st.Ino}, st.Mode&unix.S_IFMT == unix.S_IFDIR
	return m, nil
}

// Publish is bind.Kernel.Publish.
func (f *Fake) Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error {
	m, err := keep(source.HandlePath(), flags)
	if err != nil {
		return err
	}
	return f.publish(m, target)
}

// PublishDevice is bind.Kernel.PublishDevice, and takes a regular file for a node.
func (f *Fake) PublishDevice(dev *dir.Dir, name string, target bind.Target) error {
	node, err := dev.OpenNode(name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer func() { _ = node.Close() }()
	info, err := node.Stat()
	if err != nil {
		return err
	}
	if kind := info.Mode().Type(); kind != 0 && kind != fs.ModeDevice {
		return fmt.Errorf("%s/%s: %w", dev, name, bind.ErrNotDevice)
	}
	m, err := keep(dir.HandlePath(int(node.Fd())), bind.Flags{})
	if err != nil {
		return err
	}
	return f.publish(m, target)
}

// publish takes ownership of the handle.
func (f *Fake) publish(m fakeMount, target bind.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if stack := f.mounts[target.String()]; len(stack) > 0 {
		if top := stack[len(stack)-1]; top.id != m.id || top.flags != m.flags {
			return errors.Join(fmt.Errorf("%w: %s", bind.ErrOccupied, target), m.source.Close())
		}
		return m.source.Close()
	}
	if err := prepare(target, m.isDir); err != nil {
		return errors.Join(err, m.source.Close())
	}
	f.push(m, target)
	return nil
}

// Stack mounts on top, like mount(8).
func (f *Fake) Stack(source *dir.Dir, target bind.Target) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, err := keep(source.HandlePath(), bind.Flags{})
	if err != nil {
		return err
	}
	f.push(m, target)
	return nil
}

func (f *Fake) push(m fakeMount, target bind.Target) {
	if f.mounts == nil {
		f.mounts = make(map[string][]fakeMount)
	}
	f.mounts[target.String()] = append(f.mounts[target.String()], m)
}

// prepare creates the target if missing: a directory, or a file for a device.
func prepare(target bind.Target, isDir bool) error {
	if _, err := os.Stat(filepath.Dir(target.String())); err != nil {
		return fmt.Errorf("%w: %w", bind.ErrTarget, err)
	}
	info, err := os.Lstat(target.String())
	switch {
	case os.IsNotExist(err) && isDir:
		return os.Mkdir(target.String(), 0o750)
	case os.IsNotExist(err):
		return os.WriteFile(target.String(), nil, 0o600)
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: %s is a symbolic link", bind.ErrTarget, target)
	case isDir && !info.IsDir():
		return fmt.Errorf("%w: %s is not a directory", bind.ErrOccupied, target)
	case !isDir && (!info.Mode().IsRegular() || info.Size() > 0):
		return fmt.Errorf("%w: %s is not an empty file", bind.ErrOccupied, target)
	}
	return nil
}

// Hold makes the target busy until the returned function is called.
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
		top := stack[len(stack)-1]
		if !top.isDir {
			return nil, fmt.Errorf("%w: %s is not a directory", bind.ErrTarget, target)
		}
		return dir.Open(top.handlePath())
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
			at, err := os.Readlink(m.handlePath())
			if err != nil {
				return nil, err
			}
			below, ok := strings.CutPrefix(at, home+"/")
			if !ok {
				continue
			}
			name, inside, _ := strings.Cut(below, "/")
			published[name] = append(published[name], bind.Publication{
				Path: target, Inside: inside, ReadOnly: m.flags.With(bind.ReadOnly()) == m.flags,
			})
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

// IsFilesystem asks the real kernel: true if the parent is on another
// device.
func (f *Fake) IsFilesystem(d *dir.Dir) (bool, error) {
	above, err := dir.Open(d.HandlePath() + "/..")
	if err != nil {
		return false, err
	}
	defer func() { _ = above.Close() }()
	same, err := f.SameFilesystem(d, above)
	return !same, err
}

// Locate asks the real kernel, since no pool is published by the fake.
func (f *Fake) Locate(d *dir.Dir) (bind.Place, error) {
	return asked(func(k *bind.Kernel) (bind.Place, error) { return k.Locate(d) })
}

// MountRoot asks the real kernel too.
func (f *Fake) MountRoot(d *dir.Dir, id bind.MountID) (bind.Place, error) {
	return asked(func(k *bind.Kernel) (bind.Place, error) { return k.MountRoot(d, id) })
}

func asked(where func(*bind.Kernel) (bind.Place, error)) (bind.Place, error) {
	k, err := bind.NewKernel()
	if err != nil {
		return bind.Place{}, err
	}
	at, err := where(k)
	return at, errors.Join(err, k.Close())
}

// Close closes the handles of all remaining mounts.
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
