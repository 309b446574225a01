package localpv

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A node has a hundred disks that come at once, and a cluster ten thousand volumes. What was listed before a disk asked answers none.
func TestDevicesThatAskAtOnceShareAList(t *testing.T) {
	c := newCluster(t, Options{})
	var lists atomic.Int32
	begun, goOn := make(chan struct{}), make(chan struct{})
	c.fresh = interceptor.NewClient(c.Client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, all client.ObjectList, options ...client.ListOption) error {
			err := api.List(ctx, all, options...)
			if lists.Add(1) == 1 {
				close(begun)
				<-goOn
			}
			return err
		},
	})
	var done sync.WaitGroup
	ask := func(ctx context.Context, want bool) {
		done.Go(func() {
			_, names, err := c.controller.Volumes(ctx)
			if err != nil || names["local-n1-late"] != want {
				t.Errorf("it was told of %v, %v", names, err)
			}
		})
	}
	ask(t.Context(), false)
	<-begun
	pv := volume()
	pv.Name = "local-n1-late"
	must.Succeed(t, c.Create(t.Context(), pv))
	const devices = 20
	for range devices {
		ask(t.Context(), true)
	}
	for asking := 0; asking < devices+1; {
		runtime.Gosched()
		c.lists.mu.Lock()
		asking = c.lists.asking
		c.lists.mu.Unlock()
	}
	close(goOn)
	done.Wait()
	if n := lists.Load(); n != 2 {
		t.Errorf("there were %d lists", n)
	}
	if c.lists.last.names != nil {
		t.Error("the last list is kept")
	}
}
