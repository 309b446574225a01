package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// insiders are pools that this process serves as the driver does, put together as in
// its main: what they do is what the driver does, without the way to it.
type insiders struct {
	*pool.Set
	mounts *bind.Kernel
	dev    *dir.Dir
}

// inside serves a pool of an actor's in this process, and takes a volume's name. It
// ends when the scene is struck.
func (a *actor) inside(ctx context.Context, name string) (*insiders, volume.ID, error) {
	id, err := volume.ParseID(name)
	if err != nil {
		return nil, id, err
	}
	if err := os.Mkdir(a.insidePool(), 0o750); err != nil {
		return nil, id, err
	}
	pools, err := serve(a.insidePool())
	if err != nil {
		return nil, id, err
	}
	a.ends = append(a.ends, pools.close)
	return pools, id, pools.Wait(ctx)
}

func (a *actor) insidePool() string { return a.beside("inside") }

// serve serves a pool in this process.
func serve(path string) (_ *insiders, err error) {
	p := &insiders{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.mounts, err = bind.NewKernel(); err != nil {
		return nil, err
	}
	if p.dev, err = dir.Open("/dev"); err != nil {
		return nil, err
	}
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
	p.Set = pool.Start(configs, pool.Options{
		Node: name, Mounts: p.mounts, Labels: label.NewKernel(), Devices: loop.NewKernel(p.dev), Dev: p.dev, Log: logr.Discard(),
	})
	return p, nil
}

func (p *insiders) close() error {
	var problems []error
	if p.Set != nil {
		problems = append(problems, p.Close(context.Background()))
	}
	if p.mounts != nil {
		problems = append(problems, p.mounts.Close())
	}
	if p.dev != nil {
		problems = append(problems, p.dev.Close())
	}
	return errors.Join(problems...)
}
