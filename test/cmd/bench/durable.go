package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// A maker makes and removes volumes in the layout of docs/layout.md, with each step
// that is needed for a crash to find them whole or not at all, and with no other: it
// parses, locks, checks and remembers nothing. It is the limit of what a driver can do.
type maker struct {
	root, volumes, creating, trash *dir.Dir
	// quota enforces the sizes; nil where none does.
	quota quota.Facility
	// lazy makers leave it to sync to bring what they make to the disk.
	lazy bool
	// last is the project id that was given last. They are given from the end of the
	// driver's range, and it gives them from the beginning.
	last atomic.Uint64
}

// newMaker makes the layout in a directory, which is to be empty, and opens it.
func newMaker(path string) (_ *maker, err error) {
	m := &maker{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	own := filepath.Join(path, ".hostpath-provisioner")
	for _, d := range []struct {
		opened **dir.Dir
		path   string
	}{
		{&m.root, path},
		{&m.volumes, filepath.Join(own, "volumes")},
		{&m.creating, filepath.Join(own, "creating", nodeName)},
		{&m.trash, filepath.Join(own, "trash", nodeName)},
	} {
		if err := os.MkdirAll(d.path, 0o700); err != nil {
			return nil, err
		}
		if *d.opened, err = dir.Open(d.path); err != nil {
			return nil, err
		}
	}
	m.last.Store(uint64(quota.LastID) + 1)
	m.quota, err = quota.Detect(m.root)
	if errors.Is(err, quota.ErrNone) {
		m.quota, err = nil, nil
	}
	return m, err
}

func (m *maker) close() error {
	var problems []error
	for _, d := range []*dir.Dir{m.trash, m.creating, m.volumes, m.root} {
		if d != nil {
			problems = append(problems, d.Close())
		}
	}
	return errors.Join(problems...)
}

// make makes a volume of volumeBytes.
func (m *maker) make(id string) error {
	return m.makeWith(id, volumeBytes, func(int) error { return nil })
}

// makeWith makes a volume of some bytes with a content.
func (m *maker) makeWith(id string, bytes int64, fill func(fd int) error) error {
	return m.put(id, bytes, func() (string, error) { return m.stage(id, bytes, fill) })
}

// put has a directory made aside, and makes it a volume. What stage answers is for the record: who
// keeps the size.
func (m *maker) put(id string, bytes int64, stage func() (kept string, err error)) error {
	kept, err := stage()
	if err != nil {
		return fmt.Errorf("make the directory of %s: %w", id, err)
	}
	if err := m.writeRecord(id, bytes, kept); err != nil {
		return fmt.Errorf("write the record of %s: %w", id, err)
	}
	if err := unix.Renameat(m.creating.Fd(), id, m.root.Fd(), id); err != nil {
		return fmt.Errorf("put %s in its place: %w", id, err)
	}
	return m.fsync(m.root.Fd())
}

// stage makes the directory and its content.
func (m *maker) stage(id string, bytes int64, fill func(fd int) error) (kept string, err error) {
	var fd int
	if m.quota == nil {
		if err := unix.Mkdirat(m.creating.Fd(), id, 0o700); err != nil {
			return "", err
		}
		if fd, err = unix.Openat(m.creating.Fd(), id, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, unix.Close(fd)) }()
	} else {
		d, project, err := m.limited(id, bytes)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, d.Close()) }()
		fd, kept = d.Fd(), fmt.Sprintf(`"quota":%q,`, m.quota.Kind())
		if project != 0 {
			kept += fmt.Sprintf(`"projectID":%d,`, project)
		}
	}
	if err := errors.Join(fill(fd), unix.Fchmod(fd, 0o777)); err != nil {
		return "", err
	}
	return kept, m.fsync(fd)
}

func (m *maker) limited(id string, bytes int64) (*dir.Dir, quota.ID, error) {
	d, err := m.quota.Make(m.creating, id)
	if err != nil {
		return nil, 0, err
	}
	var project quota.ID
	if m.quota.Kind() != quota.Btrfs {
		project = quota.ID(m.last.Add(^uint64(0)))
	}
	if err := m.quota.Limit(d, project, quota.Limit{Bytes: bytes}); err != nil {
		return nil, 0, errors.Join(err, d.Close())
	}
	return d, project, nil
}

// snapshot makes one of a subvolume aside.
func (m *maker) snapshot(id, of string) (*dir.Dir, error) {
	source, err := dir.Open(of)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(clone.Subvolume(source, m.creating, id), source.Close()); err != nil {
		return nil, err
	}
	return m.creating.Open(id)
}

func (m *maker) writeRecord(id string, bytes int64, kept string) error {
	record := fmt.Sprintf(`{"version":1,"id":%q,"uid":"handmade","mode":"mount","bytes":%d,%s"created":%q}`+"\n",
		id, bytes, kept, time.Now().UTC().Format(time.RFC3339))
	temp := ".new-" + id + ".json"
	fd, err := unix.Openat(m.volumes.Fd(), temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(record))
	if err == nil {
		err = m.fsync(fd)
	}
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return err
	}
	if err := unix.Renameat(m.volumes.Fd(), temp, m.volumes.Fd(), id+".json"); err != nil {
		return err
	}
	return m.fsync(m.volumes.Fd())
}

// remove takes a volume away. What it held is left in the trash.
func (m *maker) remove(id string) error {
	if err := unix.Renameat(m.root.Fd(), id, m.trash.Fd(), id+".handmade"); err != nil {
		return fmt.Errorf("throw %s away: %w", id, err)
	}
	if err := errors.Join(m.fsync(m.trash.Fd()), m.fsync(m.root.Fd())); err != nil {
		return err
	}
	if err := unix.Unlinkat(m.volumes.Fd(), id+".json", 0); err != nil {
		return fmt.Errorf("remove the record of %s: %w", id, err)
	}
	return m.fsync(m.volumes.Fd())
}

// empty empties the trash of a volume.
func (m *maker) empty(id string) error {
	name := id + ".handmade"
	var project quota.ID
	if m.quota != nil {
		d, err := m.trash.Open(name)
		if err != nil {
			return err
		}
		project, err = m.quota.IDOf(d)
		if err := errors.Join(err, d.Close()); err != nil {
			return err
		}
	}
	if err := m.trash.RemoveTree(context.Background(), name, func(context.Context) error { return nil }); err != nil {
		return err
	}
	if m.quota == nil {
		return nil
	}
	return m.quota.Release(m.root, project)
}

func (m *maker) fsync(fd int) error {
	if m.lazy {
		return nil
	}
	return unix.Fsync(fd)
}

// sync brings to the disk what is not there.
func (m *maker) sync() error { return unix.Syncfs(m.root.Fd()) }
