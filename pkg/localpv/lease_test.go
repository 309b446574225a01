package localpv

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

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

// Of the Leases of the namespace those count that the node holds, as it is now.
func TestNodeKnowsWhatIsReservedForIt(t *testing.T) {
	c := newCluster(t, Options{})
	of := nodeMetadata(c.Node)
	must.Succeed(t, c.Get(t.Context(), client.ObjectKey{Name: c.Node}, of))
	if disks, err := c.reservations(t.Context(), of); err != nil || disks == nil || len(disks) > 0 {
		t.Errorf("without Leases, %q are reserved, %v", disks, err)
	}
	_, err := c.controller.Reserve(t.Context(), disk)
	must.Succeed(t, err)
	other := c.another("n2")
	_, err = other.Reserve(t.Context(), "of the other node")
	must.Succeed(t, err)
	for of, change := range map[string]func(*coordinationv1.Lease){
		"that another node holds":        func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &other.Node },
		"that no node holds":             func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil },
		"of the Node before it":          func(l *coordinationv1.Lease) { l.OwnerReferences[0].UID = "uid of the one before" },
		"with the name of another Lease": func(l *coordinationv1.Lease) { l.Name = "by-hand" },
		"that is not said":               func(l *coordinationv1.Lease) { l.Annotations = nil },
	} {
		lease := c.leaseOf(of, nodeMetadata(c.Node))
		lease.OwnerReferences[0].UID = "node-uid"
		change(lease)
		must.Succeed(t, c.Create(t.Context(), lease))
	}
	if disks, err := c.reservations(t.Context(), of); err != nil || !slices.Equal(disks, []string{disk}) {
		t.Errorf("%q are reserved, %v; want only %q", disks, err, disk)
	}
}

// What is reserved is compared with the volumes at each poll: after Leases were deleted, and where an agent has left one.
func TestLeasesAreThoseOfTheVolumes(t *testing.T) {
	c := newCluster(t, Options{})
	pv := volume()
	pv.Annotations[identityAnnotation] = "wwid=" + disk
	must.Succeed(t, c.Create(t.Context(), pv))
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
	must.Succeed(t, c.Update(t.Context(), pv))
	pv.Status.Phase = corev1.VolumeBound
	must.Succeed(t, c.Status().Update(t.Context(), pv))
	_, err := c.controller.Reserve(t.Context(), "left")
	must.Succeed(t, err)
	lists, failing := 0, errors.New("no answer")
	c.fresh = interceptor.NewClient(c.Client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, to client.ObjectList, o ...client.ListOption) error {
			if _, is := to.(*coordinationv1.LeaseList); is {
				if lists++; lists == 1 {
					return failing
				}
			}
			return api.List(ctx, to, o...)
		},
	})
	c.pass()
	if leases := c.leases(); len(leases) != 1 || c.ready.Load() {
		t.Errorf("while they cannot be listed the Leases are %+v, want them to stay; ready %v", leases, c.ready.Load())
	}
	again := func() {
		t.Helper()
		_, err := c.Reconcile(t.Context(), reconcile.Request{})
		must.Succeed(t, err)
	}
	c.retry.at = time.Now()
	again()
	if leases := c.leases(); len(leases) != 1 || leases[0].Annotations[identityAnnotation] != disk || !c.ready.Load() {
		t.Errorf("the Leases are %+v, want one of the volume; ready %v", leases, c.ready.Load())
	}
	writes := value(c.metrics.writes)
	c.pass()
	again()
	c.retry.at = time.Now()
	again()
	if lists != 3 {
		t.Errorf("they were listed %d times, want once at each of two polls, and again after a failure", lists)
	}
	c.wantMetric(c.metrics.writes, writes)
}

// Where the API server does not reserve a disk, it is asked again before the next poll.
func TestReservationIsTriedAgain(t *testing.T) {
	c := newCluster(t, Options{})
	pv := volume()
	pv.Annotations[identityAnnotation] = "wwid=" + disk
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
	must.Succeed(t, c.Create(t.Context(), pv))
	failing := errors.New("no answer")
	api := c.Client
	c.Client = interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error { return failing },
	})
	c.pass()
	if c.ready.Load() || !strings.Contains(c.logged.String(), failing.Error()) {
		t.Errorf("ready %v, and the log is %s", c.ready.Load(), c.logged.String())
	}
	c.Client, c.retry.at = api, time.Now()
	_, err := c.Reconcile(t.Context(), reconcile.Request{})
	must.Succeed(t, err)
	if n := len(c.leases()); n != 1 || !c.ready.Load() {
		t.Errorf("then there are %d Leases, want one; ready %v", n, c.ready.Load())
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
