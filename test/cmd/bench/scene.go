package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	nodeName = "bench-node"
	poolName = "local"
	// filesystemBytes is the size of a filesystem that is made, sparse.
	filesystemBytes = 16 << 30
	// volumeBytes is the size of a volume that is not meant to be filled, and of which many have to fit.
	volumeBytes = 64 << 10
)

// A scene is where a group is measured: drivers with a pool each, in one directory.
type scene struct {
	order  order
	dir    string
	actors []*actor
	ends   []func() error // stop what was started, the last first
}

// An actor is a driver with one pool, and who asks it.
type actor struct {
	drivertest.Client
	disk string // what the pool and all that is compared with it is on
}

func setUp(ctx context.Context, o order) (*scene, error) {
	dir, err := os.MkdirTemp(o.dir, "bench-")
	if err != nil {
		return &scene{}, err
	}
	s := &scene{order: o, dir: dir}
	if o.kind == "" {
		return s, nil
	}
	return s, makeFilesystem(ctx, s.path("fs"), o.kind)
}

func (s *scene) path(name string) string { return filepath.Join(s.dir, name) }

func makeFilesystem(ctx context.Context, path, kind string) error {
	if err := os.Mkdir(path, 0o750); err != nil {
		return err
	}
	if err := loopfs.Mount(ctx, path, kind, filesystemBytes); err != nil {
		return err
	}
	if kind == "btrfs" {
		return loopfs.SwitchQuotasOn(ctx, path)
	}
	return nil
}

// enter starts a driver whose pool is on the filesystem of the scene.
func (s *scene) enter(ctx context.Context) (*actor, error) {
	return s.enterOn(ctx, filepath.Join(s.path("fs"), fmt.Sprint("actor-", len(s.actors))))
}

// enterOn starts a driver whose pool is in a directory.
func (s *scene) enterOn(ctx context.Context, disk string) (*actor, error) {
	a := &actor{disk: disk}
	a.Targets = s.path(fmt.Sprint("pods-", len(s.actors)))
	s.actors = append(s.actors, a)
	if err := os.MkdirAll(a.pool(), 0o750); err != nil {
		return nil, err
	}
	var err error
	a.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary: s.order.binary, Name: nodeName, Version: "bench",
		Pools: []drivertest.PoolConfig{{Name: poolName, Path: a.pool()}},
		// Flags of deploy/csi that take memory.
		Flags: []string{"--v=2", drivertest.ServeMetrics},
	})
	if err != nil {
		return nil, err
	}
	s.ends = append(s.ends, a.Process.Close)
	return a, nil
}

func (a *actor) pool() string { return a.beside("pool") }

// beside is a path next to the pool, on its filesystem.
func (a *actor) beside(name string) string { return filepath.Join(a.disk, name) }

// close stops and removes all that there is, whatever state it is in.
func (s *scene) close() error {
	if s.dir == "" {
		return nil
	}
	var problems []error
	for _, end := range slices.Backward(s.ends) {
		problems = append(problems, end())
	}
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		// Devices of files in it would keep a filesystem busy.
		problems = append(problems, loopfs.Detach(mount), loopfs.Unmount(mount))
	}
	return errors.Join(append(problems, loopfs.Detach(s.dir), os.RemoveAll(s.dir))...)
}

// inside serves another pool next to that of an actor in this process, put together as in the driver's
// main: what it does is what the driver does, without the way to it.
func (s *scene) inside(ctx context.Context, a *actor) (_ *pool.Set, err error) {
	path := a.beside("inside")
	if err := os.Mkdir(path, 0o750); err != nil {
		return nil, err
	}
	mounts, err := bind.NewKernel()
	if err != nil {
		return nil, err
	}
	s.ends = append(s.ends, mounts.Close)
	dev, err := dir.Open("/dev")
	if err != nil {
		return nil, err
	}
	s.ends = append(s.ends, dev.Close)
	datadir, err := json.Marshal([]drivertest.PoolConfig{{Name: poolName, Path: path}})
	if err != nil {
		return nil, err
	}
	configs, err := poolconfig.Parse(string(datadir), "/")
	if err != nil {
		return nil, err
	}
	name, err := volume.ParseNodeID(nodeName)
	if err != nil {
		return nil, err
	}
	pools := pool.Start(configs, pool.Options{
		Node: name, Mounts: mounts, Labels: label.NewKernel(), Devices: loop.NewKernel(dev), Dev: dev, Log: logr.Discard(),
	})
	s.ends = append(s.ends, func() error { return pools.Close(context.Background()) })
	return pools, pools.Wait(ctx)
}

// settled waits until the reaper of a pool has nothing to do, so that what it does to the disk is
// not taken for something else.
func settled(pool string) action {
	trash := filepath.Join(pool, ".hostpath-provisioner", "trash", nodeName)
	return func(ctx context.Context) error {
		again := time.NewTicker(500 * time.Microsecond)
		defer again.Stop()
		for {
			left, err := os.ReadDir(trash)
			if err != nil || len(left) == 0 {
				return err
			}
			select {
			case <-again.C:
			case <-ctx.Done():
				return fmt.Errorf("wait for %d volumes to be erased: %w", len(left), context.Cause(ctx))
			}
		}
	}
}

// The calls of an actor, as actions.

// ask is a call that does nothing but travel.
func (a *actor) ask(ctx context.Context) error {
	_, err := a.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return err
}

func (a *actor) create(id string, bytes int64) action {
	return func(ctx context.Context) error {
		_, err := a.Create(ctx, drivertest.Volume{ID: id, Pool: poolName, Bytes: bytes})
		return err
	}
}

func (a *actor) remove(id string) action {
	return func(ctx context.Context) error { return a.Delete(ctx, id) }
}

// publish publishes a volume for a pod of the same name.
func (a *actor) publish(id string) action {
	return func(ctx context.Context) error { return a.Publish(ctx, drivertest.Volume{ID: id, Pool: poolName}, id) }
}

func (a *actor) unpublish(id string) action {
	return func(ctx context.Context) error { return a.Unpublish(ctx, id, id) }
}

func (a *actor) stats(id string) action {
	return func(ctx context.Context) error {
		_, err := a.Stats(ctx, id, id)
		return err
	}
}

func (a *actor) capacity(ctx context.Context) error {
	_, err := a.Capacity(ctx, poolName)
	return err
}
