package localpv

import (
	"context"
	"errors"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const disk = "naa.600a"

// another is the controller of another node with the same API.
func (c *cluster) another(name string) *controller {
	c.Helper()
	must.Succeed(c.Harness, c.Create(c.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name)}}))
	other := newCluster(c.T, Options{}).controller
	other.Node, other.Client, other.fresh = name, c.Client, c.fresh
	return other
}

func (c *cluster) leases() []coordinationv1.Lease {
	c.Helper()
	var list coordinationv1.LeaseList
	must.Succeed(c.Harness, c.List(c.Context(), &list))
	return list.Items
}

// Both find no Lease before either makes one.
func TestDiskIsReservedByOneOfTwoNodes(t *testing.T) {
	c := newCluster(t, Options{})
	var both sync.WaitGroup
	both.Add(2)
	c.fresh = interceptor.NewClient(c.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, to client.Object, o ...client.GetOption) error {
			err := api.Get(ctx, key, to, o...)
			if apierrors.IsNotFound(err) {
				both.Done()
				both.Wait()
			}
			return err
		},
	})
	other := c.another("n2")
	var holders [2]string
	var errs [2]error
	var done sync.WaitGroup
	for n, node := range []*controller{c.controller, other} {
		done.Go(func() { holders[n], errs[n] = node.Reserve(t.Context(), disk) })
	}
	done.Wait()
	if holders[0] != holders[1] || errors.Join(errs[:]...) != nil || len(c.leases()) != 1 {
		t.Fatalf("it is reserved for %q, %v, with the Leases %+v; want one", holders, errs, c.leases())
	}
	lease := c.leases()[0]
	if owners := lease.OwnerReferences; len(owners) != 1 || owners[0].Kind != "Node" || owners[0].Name != holders[0] || *lease.Spec.HolderIdentity != holders[0] || lease.Namespace != "ns" {
		t.Errorf("the Lease is %+v, want it to go with the node %s", lease, holders[0])
	}
}

// A Lease goes when its node gives the disk up, and no other node's goes.
func TestLeaseIsDeletedWithReservation(t *testing.T) {
	c := newCluster(t, Options{})
	node := nodeMetadata(c.Node)
	_, err := c.controller.Reserve(t.Context(), disk)
	must.Succeed(t, err)
	other := c.another("n2")
	must.Succeed(t, other.unreserve(t.Context(), disk, nodeMetadata("n2")))
	if n := len(c.leases()); n != 1 {
		t.Fatalf("%d Leases after another node gave the disk up, want one", n)
	}
	report := devices.Report{GivenUp: []string{disk, "of no Lease"}}
	must.Succeed(t, c.apply(t.Context(), node, devices.Config{}, nil, &report))
	if n := len(c.leases()); n != 0 {
		t.Fatalf("%d Leases after its node gave the disk up, want none", n)
	}
	if holder, err := other.Reserve(t.Context(), disk); err != nil || holder != "n2" {
		t.Errorf("then it is reserved for %q, %v", holder, err)
	}
}

// The garbage collector removes the Lease of a node that was made anew since: it is one of the node that was deleted.
func TestLeaseIsOfTheNodeAsItIsNow(t *testing.T) {
	c := newCluster(t, Options{})
	_, err := c.controller.Reserve(t.Context(), disk)
	must.Succeed(t, err)
	node := &corev1.Node{}
	must.Succeed(t, c.Get(t.Context(), client.ObjectKey{Name: c.Node}, node), c.Delete(t.Context(), node))
	node.ResourceVersion, node.UID = "", "uid of the next"
	must.Succeed(t, c.Create(t.Context(), node))
	for range 2 {
		holder, err := c.controller.Reserve(t.Context(), disk)
		must.Succeed(t, err)
		if leases := c.leases(); holder != c.Node || len(leases) != 1 || leases[0].OwnerReferences[0].UID != node.UID {
			t.Errorf("it is reserved for %q with the Leases %+v", holder, leases)
		}
	}
}

// Without an answer nothing is cleaned or offered.
func TestDiskIsNotReservedWithoutAnswer(t *testing.T) {
	c := newCluster(t, Options{})
	failing := errors.New("no answer")
	c.Client = interceptor.NewClient(c.Client.(client.WithWatch), interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error { return failing },
	})
	if _, err := c.controller.Reserve(t.Context(), disk); !errors.Is(err, failing) {
		t.Errorf("Reserve = %v, want %v", err, failing)
	}
}
