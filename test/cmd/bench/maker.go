package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

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
	// last is the project id that was given last. They are given from the end of the
	// driver's range, and it gives them from the beginning.
	last atomic.Uint64
}

// maker makes the layout in a directory, and opens it until the scene ends.
func (s *scene) maker(path string) (*maker, error) {
	m := &maker{}
	own := filepath.Join(path, ".hostpath-provisioner")
	for opened, path := range map[**dir.Dir]string{
		&m.root: path, &m.volumes: filepath.Join(own, "volumes"),
		&m.creating: filepath.Join(own, "creating", nodeName), &m.trash: filepath.Join(own, "trash", nodeName),
	} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, err
		}
		d, err := dir.Open(path)
		if err != nil {
			return nil, err
		}
		*opened = d
		s.ends = append(s.ends, d.Close)
	}
	m.last.Store(uint64(quota.LastID) + 1)
	var err error
	m.quota, err = quota.Detect(m.root)
	if errors.Is(err, quota.ErrNone) {
		m.quota, err = nil, nil
	}
	return m, err
}

// newDir makes the directory of a volume aside, which may have a limit.
func (m *maker) newDir(id string) (*dir.Dir, error) {
	if m.quota == nil {
		return m.creating.Make(id)
	}
	return m.quota.Make(m.creating, id)
}

// make makes a volume: newDir its directory, and fill what is in it.
func (m *maker) make(id string, bytes int64, newDir func(id string) (*dir.Dir, error), fill func(*dir.Dir) error) (err error) {
	d, err := newDir(id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	kept, err := m.limit(d, bytes)
	if err := errors.Join(err, fill(d), d.Chmod(0o777), d.Sync()); err != nil {
		return err
	}
	record := fmt.Sprintf(`{"version":1,"id":%q,"uid":"handmade","mode":"mount","bytes":%d,%s"created":%q}`+"\n",
		id, bytes, kept, time.Now().UTC().Format(time.RFC3339))
	if err := m.volumes.WriteFile(id+".json", []byte(record)); err != nil {
		return err
	}
	if err := m.creating.Rename(id, m.root, id); err != nil {
		return err
	}
	return m.root.Sync()
}

// limit limits the size of a volume, if possible, and returns what its record has of that.
func (m *maker) limit(d *dir.Dir, bytes int64) (kept string, err error) {
	if m.quota == nil {
		return "", nil
	}
	var project quota.ID
	kept = fmt.Sprintf(`"quota":%q,`, m.quota.Kind())
	if m.quota.Kind() != quota.Btrfs {
		project = quota.ID(m.last.Add(^uint64(0)))
		kept += fmt.Sprintf(`"projectID":%d,`, project)
	}
	return kept, m.quota.Limit(d, project, quota.Limit{Bytes: bytes})
}

// remove takes a volume away. What it held is left in the trash.
func (m *maker) remove(id string) error {
	if err := m.root.Rename(id, m.trash, id+".handmade"); err != nil {
		return err
	}
	if err := errors.Join(m.trash.Sync(), m.root.Sync()); err != nil {
		return err
	}
	return errors.Join(m.volumes.Remove(id+".json"), m.volumes.Sync())
}

// empty empties the trash of a volume.
func (m *maker) empty(ctx context.Context, id string) error {
	name, project := id+".handmade", quota.ID(0)
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
	err := m.trash.RemoveTree(ctx, name, func(context.Context) error { return nil })
	if err != nil || m.quota == nil {
		return err
	}
	return m.quota.Release(m.root, project)
}

// pair makes and removes a volume that has nothing in it.
func (m *maker) pair(id string) pair {
	return pair{
		func(context.Context) error {
			return m.make(id, volumeBytes, m.newDir, func(*dir.Dir) error { return nil })
		},
		func(context.Context) error { return m.remove(id) },
		func(ctx context.Context) error { return m.empty(ctx, id) },
	}
}
