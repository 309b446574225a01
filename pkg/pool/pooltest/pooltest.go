// Package pooltest has nodes for the tests of the pools and of what calls them. Their directories are real; stand-ins
// that keep the kernel's contracts have the mounts, labels, devices, quotas and counts of errors.
package pooltest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A Node is a node on which pools can be started.
type Node struct {
	// Root is what relative paths of pools are below. It has the targets in pods.
	Root   string
	Mounts *bindtest.Fake
	Labels *labeltest.Fake
	Loops  *looptest.Fake
	Dev    *dir.Dir
	// Quota enforces the sizes of directories; nil for no enforcement.
	Quota *quotatest.Fake
	// Errors is how many errors each filesystem has counted.
	Errors atomic.Int64

	t testing.TB
}

// New is a node that has a directory to itself.
func New(t testing.TB, root string) *Node {
	t.Helper()
	n := &Node{Root: root, Labels: &labeltest.Fake{}, t: t}
	must.Succeed(t, os.Mkdir(n.Path("pods"), 0o755))
	n.keepMounts()
	n.OwnDev("dev")
	return n
}

// Beside is another node on the same disk. It has mounts of its own.
func (n *Node) Beside() *Node {
	other := &Node{Root: n.Root, Labels: n.Labels, Loops: n.Loops, Dev: n.Dev, Quota: n.Quota, t: n.t}
	other.keepMounts()
	return other
}

func (n *Node) keepMounts() {
	n.Mounts = &bindtest.Fake{}
	n.t.Cleanup(func() { must.Succeed(n.t, n.Mounts.Close()) })
}

// OwnDev gives the node a /dev, and devices in it, of its own.
func (n *Node) OwnDev(name string) {
	n.t.Helper()
	must.Succeed(n.t, os.MkdirAll(n.Path(name), 0o755))
	for _, locked := range []string{"loop-control", "null"} {
		must.Succeed(n.t, os.WriteFile(n.Path(name, locked), nil, 0o600))
	}
	dev, err := dir.Open(n.Path(name))
	must.Succeed(n.t, err)
	loops := looptest.NewFake(dev)
	n.t.Cleanup(func() { must.Succeed(n.t, errors.Join(loops.Close(), dev.Close())) })
	n.Dev, n.Loops = dev, loops
}

// Options are those of pools on this node, under a name.
func (n *Node) Options(name string) pool.Options {
	n.t.Helper()
	node, err := volume.ParseNodeID(name)
	must.Succeed(n.t, err)
	return pool.Options{
		Node: node, Mounts: n.Mounts, Labels: n.Labels, Devices: n.Loops, Dev: n.Dev,
		SystemPath: n.Root, DetectQuota: n.DetectQuota, CountErrors: n.CountErrors,
	}
}

// DetectQuota is for Options of the same name.
func (n *Node) DetectQuota(*dir.Dir) (quota.Facility, error) {
	if n.Quota == nil {
		return nil, fmt.Errorf("%w: ask for another filesystem", quota.ErrNone)
	}
	return n.Quota, nil
}

// CountErrors is for Options of the same name.
func (n *Node) CountErrors(*dir.Dir) (int64, error) { return n.Errors.Load(), nil }

// Configs parses the configuration of pools.
func (n *Node) Configs(datadir string) []poolconfig.Config {
	n.t.Helper()
	configs, err := poolconfig.Parse(datadir, n.Root)
	must.Succeed(n.t, err)
	return configs
}

// Start serves pools until it is closed, at the latest when the test ends.
func (n *Node) Start(configs []poolconfig.Config, options pool.Options) *pool.Set {
	set := pool.Start(configs, options)
	n.t.Cleanup(func() { must.Succeed(n.t, set.Close(context.WithoutCancel(n.t.Context()))) })
	return set
}

// Path is that of something below Root.
func (n *Node) Path(elements ...string) string {
	return filepath.Join(append([]string{n.Root}, elements...)...)
}

// Own is the path of something in the layout of the pool whose directory is called pool.
func (n *Node) Own(elements ...string) string {
	return n.Path(append([]string{"pool", ".hostpath-provisioner"}, elements...)...)
}

// Target is a path where a volume can be published.
func (n *Node) Target(name string) bind.Target {
	n.t.Helper()
	target, err := bind.ParseTarget(n.Path("pods", name))
	must.Succeed(n.t, err)
	return target
}

// ID parses the id of a volume.
func ID(t testing.TB, name string) volume.ID {
	t.Helper()
	id, err := volume.ParseID(name)
	must.Succeed(t, err)
	return id
}
