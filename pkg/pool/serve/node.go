// Package serve keeps the pools of a node serving. Each is opened, checked, recovered, surveyed and rid of
// its trash in the background, and entered by calls: a Visit is the work of one of them in a pool. What
// calls do with volumes is up to pkg/pool. The locks of both, with their order, are in lock.go.
package serve

import (
	"context"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/errorcount"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Node is all pools of a process.
type Node struct {
	Options Options
	Pools   []*Pool // in the order of the configuration
	Pins    Pins    // what is being copied

	volumes     Locks[volume.ID]
	targets     Locks[string]    // by path
	attaching   Turns[volume.ID] // devices of block volumes to files
	copying     Turns[volume.ID] // what keeps more the more often its blocks are shared
	marking     Turns[volume.ID] // that volumes of shared pools are published
	publishing  Locks[volume.ID] // of shared pools; taken under marking
	serving     Locks[string]    // the uuids of all pools that are open
	claims      limit.Registry   // the quota ids of all pools
	places      reconcile.Places
	filesystems reconcile.Filesystems[*Pool] // which pools are on one filesystem

	stop context.CancelFunc
	// UntilClose is a context for work that goes on when the call that began it ends: Close
	// ends it, and waits until end is called.
	UntilClose func(call context.Context) (ctx context.Context, end func())
	work       sync.WaitGroup
}

// Start begins to serve pools. Each is opened in the background, so that one that
// is missing or hangs delays no other: Wait returns when all were checked.
// Close ends it.
func Start(configs []poolconfig.Config, options Options) *Node {
	ctx, stop := context.WithCancel(context.Background())
	n := &Node{Options: options.withDefaults(), stop: stop}
	n.UntilClose = func(call context.Context) (context.Context, func()) {
		n.work.Add(1)
		own, cancel := context.WithCancel(context.WithoutCancel(call))
		unhook := context.AfterFunc(ctx, cancel)
		return own, func() { unhook(); cancel(); n.work.Done() }
	}
	for _, config := range configs {
		n.Pools = append(n.Pools, n.newPool(config))
	}
	for _, p := range n.Pools {
		n.work.Go(func() { p.checks.watch(ctx) })
		n.work.Go(func() { p.reaper.run(ctx) })
		n.work.Go(func() { p.usage.run(ctx) })
		n.work.Go(func() { p.surveys.run(ctx) })
		n.work.Go(func() { p.searches.run(ctx) })
	}
	return n
}

func (o Options) withDefaults() Options {
	if o.DetectQuota == nil {
		o.DetectQuota = quota.Detect
	}
	if o.CountErrors == nil {
		o.CountErrors = errorcount.Of
	}
	if o.SinceBoot == nil {
		o.SinceBoot = reconcile.SinceBoot
	}
	set := func(d *time.Duration, value time.Duration) {
		if *d == 0 {
			*d = value
		}
	}
	set(&o.CheckEvery, 10*time.Second)
	set(&o.RetryEvery, 2*time.Second)
	set(&o.HangAfter, 5*time.Second)
	set(&o.SyncEvery, time.Minute)
	return o
}

// Close stops the background work and waits for it until ctx ends.
func (n *Node) Close(ctx context.Context) error {
	n.stop()
	done := make(chan struct{})
	go func() {
		n.work.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop the pools: %w", context.Cause(ctx))
	}
}

// Wait waits until every pool was checked once, whatever was found, or ctx ends.
func (n *Node) Wait(ctx context.Context) error {
	for _, p := range n.Pools {
		select {
		case <-p.checks.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Ready reports whether every pool was checked once. It never waits.
func (n *Node) Ready() bool {
	for _, p := range n.Pools {
		select {
		case <-p.checks.done:
		default:
			return false
		}
	}
	return true
}

// Status reports on all pools, from memory.
func (n *Node) Status() []Status {
	var all []Status
	for _, p := range n.Pools {
		all = append(all, p.Status())
	}
	return all
}
