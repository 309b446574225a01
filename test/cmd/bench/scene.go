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
	// missing is what could not be measured, and why.
	missing []string
}

// An actor is a driver with one pool, and who asks it.
type actor struct {
	drivertest.Client
	dir string
	// disk is where the pool is, and what is compared with it: the filesystem of dir, or another.
	disk string
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
	return makeFilesystem(ctx, s.filesystem(), s.order.kind)
}

func makeFilesystem(ctx context.Context, path, kind string) error {
	if err := loopfs.Mount(ctx, path, kind, filesystemBytes); err != nil {
		return err
	}
	if kind == "btrfs" {
		return loopfs.SwitchQuotasOn(ctx, path)
	}
	return nil
}

// enter starts a driver on a pool of its own. What is to be in the pool before that
// is filled in by fill, unless it is nil.
func (s *scene) enter(ctx context.Context, fill func(pool string) error) (*actor, error) {
	a, err := s.newActor()
	if err != nil {
		return nil, err
	}
	a.disk = a.dir
	if err := os.Mkdir(a.pool(), 0o750); err != nil {
		return nil, err
	}
	if fill != nil {
		if err := fill(a.pool()); err != nil {
			return nil, err
		}
	}
	return a, s.start(ctx, a)
}

// enterOn starts a driver whose pool is on a filesystem of its own. Where its volumes are published
// is not. Errors: loopfs.ErrMissing.
func (s *scene) enterOn(ctx context.Context, kind string) (*actor, error) {
	a, err := s.newActor()
	if err != nil {
		return nil, err
	}
	a.disk = filepath.Join(s.dir, kind)
	if err := os.Mkdir(a.disk, 0o750); err != nil {
		return nil, err
	}
	if err := makeFilesystem(ctx, a.disk, kind); err != nil {
		return nil, err
	}
	if err := os.Mkdir(a.pool(), 0o750); err != nil {
		return nil, err
	}
	return a, s.start(ctx, a)
}

func (s *scene) newActor() (*actor, error) {
	a := &actor{dir: filepath.Join(s.filesystem(), fmt.Sprintf("actor-%d", len(s.actors)))}
	s.actors = append(s.actors, a)
	a.Targets = filepath.Join(a.dir, "pods")
	return a, os.MkdirAll(a.Targets, 0o750)
}

// start starts the driver of an actor.
func (s *scene) start(ctx context.Context, a *actor) (err error) {
	a.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary:  s.binary,
		Name:    nodeName,
		Version: "bench",
		Pools:   []drivertest.PoolConfig{{Name: poolName, Path: a.pool()}},
		Flags:   manifestFlags,
	})
	return err
}

func (a *actor) pool() string { return a.beside("pool") }

// beside is a path next to the pool, on its filesystem.
func (a *actor) beside(name string) string { return filepath.Join(a.disk, name) }

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
