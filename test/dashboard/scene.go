package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// A ground is what a pool is made on.
type ground struct {
	pool   string
	kind   string // of filesystem
	bytes  int64
	counts bool // with quotas
}

// grounds are the pools of each node.
var grounds = map[string][]ground{
	"node-a": {{pool: "local", kind: "btrfs", bytes: 8 << 30, counts: true}, {pool: "scratch", kind: "ext4", bytes: 2 << 30}},
	"node-b": {{pool: "local", kind: "ext4", bytes: 6 << 30}},
	"node-c": {{pool: "local", kind: "xfs", bytes: 4 << 30}},
}

// A worker is a node with what is on it.
type worker struct {
	name    string
	dir     string
	node    *node.Node
	address string // of its metrics
	pools   []string
	volumes []*volume
	made    int
}

func (w *worker) pool(name string) string { return filepath.Join(w.dir, "pools", name) }

// target is where kubelet would have the volume of a pod.
func (w *worker) target(id string) string { return filepath.Join(w.dir, "pods", id, "mount") }

// A scene is a few nodes, without a cluster.
type scene struct {
	dir     string
	workers []*worker
}

func setUp(ctx context.Context) (*scene, error) {
	dir, err := os.MkdirTemp("", "dashboard-")
	if err != nil {
		return nil, fmt.Errorf("make a directory to work in: %w", err)
	}
	s := &scene{dir: dir}
	binary, err := node.Binary(ctx, dir)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	for _, name := range []string{"node-a", "node-b", "node-c"} {
		w := &worker{name: name, dir: filepath.Join(dir, name)}
		s.workers = append(s.workers, w)
		if err := w.start(ctx, binary, grounds[name]); err != nil {
			return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), s.close())
		}
	}
	return s, nil
}

func (w *worker) start(ctx context.Context, binary string, grounds []ground) error {
	var pools []node.Pool
	for _, g := range grounds {
		if err := w.prepare(ctx, g); err != nil {
			return err
		}
		w.pools = append(w.pools, g.pool)
		pools = append(pools, node.Pool{Name: g.pool, Path: w.pool(g.pool)})
	}
	var err error
	if w.address, err = freeAddress(ctx); err != nil {
		return err
	}
	w.node, err = node.Start(ctx, node.Config{
		Binary: binary, Name: w.name, Version: "v0.1.0", Pools: pools,
		Flags: []string{"--metrics-address=" + w.address},
	})
	return err
}

func (w *worker) prepare(ctx context.Context, g ground) error {
	if err := os.MkdirAll(w.pool(g.pool), 0o750); err != nil || g.kind == "" {
		return err
	}
	if err := loopfs.Mount(ctx, w.pool(g.pool), g.kind, g.bytes); err != nil || !g.counts {
		return err
	}
	return loopfs.SwitchQuotasOn(ctx, w.pool(g.pool))
}

// freeAddress is one that nobody listens on at this moment.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// close takes the scene down, whatever state it is in.
func (s *scene) close() error {
	var problems []error
	for _, w := range s.workers {
		if w.node != nil {
			problems = append(problems, w.node.Close())
		}
	}
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		problems = append(problems, loopfs.Unmount(mount))
	}
	return errors.Join(append(problems, os.RemoveAll(s.dir))...)
}
