package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
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
	// filesystemBytes is the least size of a filesystem that is made, sparse.
	filesystemBytes = 16 << 30
	// volumeBytes is the size of a volume that is not meant to be filled, and of which many have to fit.
	volumeBytes = 64 << 10
)

// A harness is where a group is measured: drivers with a pool each, in one directory.
type harness struct {
	order
	ctx    context.Context
	at     string
	actors int
	ends   []func() error // stop what was started, the last first
}

// An actor is a driver with one pool, and who asks it.
type actor struct {
	drivertest.Client
	s    *harness
	disk string // what the pool and all that is compared with it is on
}

func (h *harness) setUp() {
	h.at = got(os.MkdirTemp(h.dir, "bench-"))
	if h.kind != "" {
		h.makeFilesystem("fs", h.kind, max(filesystemBytes, 4*int64(h.moverFiles)*perFile))
	}
}

func (h *harness) path(name string) string { return filepath.Join(h.at, name) }

func (h *harness) makeFilesystem(name, kind string, bytes int64) {
	check(os.Mkdir(h.path(name), 0o750))
	check(loopfs.Mount(h.ctx, h.path(name), kind, bytes))
	if kind == "btrfs" {
		check(loopfs.SwitchQuotasOn(h.ctx, h.path(name)))
	}
}

// enter starts a driver whose pool is on a filesystem of the harness.
func (h *harness) enter(filesystem string) *actor {
	h.actors++
	a := &actor{s: h, disk: h.path(fmt.Sprintf("%s/actor-%d", filesystem, h.actors))}
	a.Targets = h.path(fmt.Sprint("pods-", h.actors))
	check(os.MkdirAll(a.pool(), 0o750))
	a.Process = got(drivertest.StartProcess(h.ctx, drivertest.Config{
		Binary: h.binary, Name: nodeName, Version: "bench", Pools: []drivertest.PoolConfig{{Name: poolName, Path: a.pool()}},
		// Flags of deploy/csi that take memory.
		Flags: []string{"--v=2", drivertest.ServeMetrics},
	}))
	h.ends = append(h.ends, a.Process.Close)
	return a
}

func (a *actor) pool() string { return a.beside("pool") }

// beside is a path next to the pool, on its filesystem.
func (a *actor) beside(name string) string { return filepath.Join(a.disk, name) }

// close stops and removes all that there is, whatever state it is in.
func (h *harness) close() error {
	if h.at == "" {
		return nil
	}
	var problems []error
	for _, end := range slices.Backward(h.ends) {
		problems = append(problems, end())
	}
	mounts, err := mountns.Below(h.at)
	for _, mount := range slices.Backward(mounts) {
		// Devices of files in it would keep a filesystem busy.
		problems = append(problems, loopfs.Detach(mount), loopfs.Unmount(mount))
	}
	return errors.Join(append(problems, err, loopfs.Detach(h.at), os.RemoveAll(h.at))...)
}

// inside serves another pool next to that of an actor in this process, put together as in the driver's
// main: what it does is what the driver does, without the way to it.
func (a *actor) inside() *pool.Set {
	path := a.beside("inside")
	check(os.Mkdir(path, 0o750))
	mounts, dev := got(bind.NewKernel()), got(dir.Open("/dev"))
	datadir := got(json.Marshal([]drivertest.PoolConfig{{Name: poolName, Path: path}}))
	pools := pool.Start(got(poolconfig.Parse(string(datadir), "/")), pool.Options{
		Node: got(volume.ParseNodeID(nodeName)), Mounts: mounts, Labels: label.NewKernel(), Devices: loop.NewKernel(dev), Dev: dev, Log: logr.Discard(),
	})
	a.s.ends = append(a.s.ends, mounts.Close, dev.Close, func() error { return pools.Close(context.Background()) })
	check(pools.Wait(a.s.ctx))
	return pools
}

// settled waits until the reaper of a pool has nothing to do, so that what it does to the disk is
// not taken for something else.
func (h *harness) settled(pool string) action {
	return func() {
		again := time.NewTicker(500 * time.Microsecond)
		defer again.Stop()
		for len(got(os.ReadDir(filepath.Join(pool, ".hostpath-provisioner", "trash", nodeName)))) > 0 {
			select {
			case <-again.C:
			case <-h.ctx.Done():
				check(fmt.Errorf("wait for volumes to be erased: %w", context.Cause(h.ctx)))
			}
		}
	}
}

// The calls of an actor, as actions.

// ask is a call that does nothing but travel.
func (a *actor) ask() {
	got(a.Identity().GetPluginInfo(a.s.ctx, &csi.GetPluginInfoRequest{}))
}

func (a *actor) create(id string, bytes int64) action {
	return func() { got(a.Create(a.s.ctx, drivertest.Volume{ID: id, Pool: poolName, Bytes: bytes})) }
}

func (a *actor) remove(id string) action {
	return func() { check(a.Delete(a.s.ctx, id)) }
}

// publish publishes a volume for a pod of the same name.
func (a *actor) publish(id string) action {
	return func() { check(a.Publish(a.s.ctx, drivertest.Volume{ID: id, Pool: poolName}, id)) }
}

func (a *actor) unpublish(id string) action {
	return func() { check(a.Unpublish(a.s.ctx, id, id)) }
}

func (a *actor) stats(id string) action { return func() { got(a.Stats(a.s.ctx, id, id)) } }

func (a *actor) capacity() { got(a.Capacity(a.s.ctx, poolName)) }

// volume makes and removes an empty volume.
func (a *actor) volume(id string) pair {
	return pair{a.create(id, volumeBytes), a.remove(id), a.s.settled(a.pool())}
}

// asked is a pair each of whose steps comes after an empty call.
func (a *actor) asked(p pair) pair { return pair{inOrder(a.ask, p.do), inOrder(a.ask, p.undo), p.rest} }

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

// maker makes the layout in a directory, and opens it until the harness ends.
func (h *harness) maker(path string) *maker {
	open := func(elements ...string) *dir.Dir {
		at := filepath.Join(append([]string{path}, elements...)...)
		check(os.MkdirAll(at, 0o700))
		d := got(dir.Open(at))
		h.ends = append(h.ends, d.Close)
		return d
	}
	const own = ".hostpath-provisioner"
	m := &maker{root: open(), volumes: open(own, "volumes"), creating: open(own, "creating", nodeName), trash: open(own, "trash", nodeName)}
	m.last.Store(uint64(quota.LastID) + 1)
	facility, err := quota.Detect(m.root)
	if !errors.Is(err, quota.ErrNone) {
		m.quota = got(facility, err)
	}
	return m
}

// newDir makes the directory of a volume aside, which may have a limit.
func (m *maker) newDir(id string) *dir.Dir {
	if m.quota == nil {
		return got(m.creating.Make(id))
	}
	return got(m.quota.Make(m.creating, id))
}

// make makes a volume of a directory, and fill what is in it.
func (m *maker) make(id string, bytes int64, d *dir.Dir, fill func(*dir.Dir)) {
	defer func() { check(d.Close()) }()
	kept := ""
	if m.quota != nil {
		var project quota.ID
		kept = fmt.Sprintf(`"quota":%q,`, m.quota.Kind())
		if m.quota.Kind() != quota.Btrfs {
			project = quota.ID(m.last.Add(^uint64(0)))
			kept += fmt.Sprintf(`"projectID":%d,`, project)
		}
		check(m.quota.Limit(d, project, quota.Limit{Bytes: bytes}))
	}
	fill(d)
	check(d.Chmod(0o777), d.Sync())
	record := fmt.Sprintf(`{"version":1,"id":%q,"uid":"handmade","mode":"mount","bytes":%d,%s"created":%q}`+"\n",
		id, bytes, kept, time.Now().UTC().Format(time.RFC3339))
	check(m.volumes.WriteFile(id+".json", []byte(record)))
	check(m.creating.Rename(id, m.root, id))
	check(m.root.Sync())
}

// pair makes and removes a volume, of which the latter leaves what it held in the trash.
func (m *maker) pair(id string, bytes int64, newDir func(id string) *dir.Dir, fill func(*dir.Dir)) pair {
	trashed := id + ".handmade"
	return pair{
		func() { m.make(id, bytes, newDir(id), fill) },
		func() {
			check(m.root.Rename(id, m.trash, trashed))
			check(m.trash.Sync(), m.root.Sync())
			check(m.volumes.Remove(id+".json"), m.volumes.Sync())
		},
		func() {
			var project quota.ID
			if m.quota != nil {
				d := got(m.trash.Open(trashed))
				project = got(m.quota.IDOf(d))
				check(d.Close())
			}
			check(dir.RemoveTree(context.Background(), m.trash, trashed, func(context.Context) error { return nil }))
			if m.quota != nil {
				check(m.quota.Release(m.root, project))
			}
		},
	}
}

func (m *maker) volume(id string) pair { return m.pair(id, volumeBytes, m.newDir, func(*dir.Dir) {}) }
