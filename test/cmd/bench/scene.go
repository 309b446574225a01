package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	nodeName = "bench-node"
	poolName = "local"
	// filesystemBytes is the size of a filesystem that is made, sparse.
	filesystemBytes = 16 << 30
)

// A scene is where everything happens: a filesystem, and on it the pools of the
// drivers that a group has started.
type scene struct {
	order  order
	drive  driveFunc
	dir    string
	binary string
	actors []*actor
}

// An actor is a driver with one pool, and who asks it.
type actor struct {
	drivertest.Client
	dir string
	// ends stop what was started for it.
	ends []func() error
}

func setUp(ctx context.Context, o order, drive driveFunc) (*scene, error) {
	dir, err := os.MkdirTemp(o.dir, "bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory to work in: %w", err)
	}
	s := &scene{order: o, drive: drive, dir: dir}
	if err := errors.Join(ctx.Err(), s.makeFilesystem(ctx)); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if s.binary, err = drivertest.Binary(ctx, s.dir); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// filesystem is a directory of the filesystem that the pools are on.
func (s *scene) filesystem() string { return filepath.Join(s.dir, "fs") }

func (s *scene) makeFilesystem(ctx context.Context) error {
	err := os.Mkdir(s.filesystem(), 0o750)
	if err != nil || s.order.kind == "" {
		return err
	}
	if err := loopfs.Mount(ctx, s.filesystem(), s.order.kind, filesystemBytes); err != nil {
		return err
	}
	if s.order.kind == "btrfs" {
		return loopfs.SwitchQuotasOn(ctx, s.filesystem())
	}
	return nil
}

// enter starts a driver on a pool of its own. What is to be in the pool before that
// is filled in by fill, unless it is nil.
func (s *scene) enter(ctx context.Context, fill func(pool string) error) (*actor, error) {
	a := &actor{dir: filepath.Join(s.filesystem(), fmt.Sprintf("actor-%d", len(s.actors)))}
	s.actors = append(s.actors, a)
	a.Targets = filepath.Join(a.dir, "pods")
	for _, dir := range []string{a.dir, a.pool(), a.Targets} {
		if err := os.Mkdir(dir, 0o750); err != nil {
			return nil, err
		}
	}
	if fill != nil {
		if err := fill(a.pool()); err != nil {
			return nil, err
		}
	}
	var err error
	a.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary:  s.binary,
		Name:    nodeName,
		Version: "bench",
		Pools:   []drivertest.PoolConfig{{Name: poolName, Path: a.pool()}},
		Flags:   manifestFlags,
	})
	return a, err
}

func (a *actor) pool() string { return filepath.Join(a.dir, "pool") }

// strike ends the drivers and removes all that they had, mounts first.
func (s *scene) strike() error {
	var problems []error
	for _, a := range s.actors {
		if a.Process != nil {
			problems = append(problems, a.Process.Close())
		}
		for _, end := range a.ends {
			problems = append(problems, end())
		}
	}
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		if mount != s.filesystem() {
			problems = append(problems, loopfs.Unmount(mount))
		}
	}
	for _, a := range s.actors {
		// Devices of files in it would keep the filesystem busy.
		problems = append(problems, loopfs.Detach(a.dir), os.RemoveAll(a.dir))
	}
	s.actors = nil
	return errors.Join(problems...)
}

// close takes the scene down, whatever state it is in.
func (s *scene) close() error {
	problems := []error{s.strike()}
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		problems = append(problems, loopfs.Unmount(mount))
	}
	return errors.Join(append(problems, os.RemoveAll(s.dir))...)
}
