package localpv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// leaseOf is the Lease of a disk in the namespace of the agents: the API server makes one of a name, also where two nodes ask at once. It has no
// duration, and goes with the node.
func (c *controller) leaseOf(disk string, node *metav1.PartialObjectMetadata) *coordinationv1.Lease {
	sum := sha256.Sum256([]byte(disk))
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace, Name: "disk-" + hex.EncodeToString(sum[:16]), Annotations: map[string]string{identityAnnotation: disk},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &c.Node},
	}
}

// Reserve implements devices.API.
func (c *controller) Reserve(ctx context.Context, disk string) (holder string, err error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	node := nodeMetadata(c.Node)
	if err := c.Get(ctx, client.ObjectKey{Name: c.Node}, node); err != nil {
		return "", err
	}
	lease := c.leaseOf(disk, node)
	found := lease.DeepCopy()
	holder, err = c.holder(ctx, found)
	if err == nil && holder == c.Node && !equality.Semantic.DeepEqual(found.OwnerReferences, lease.OwnerReferences) {
		// It is of a Node object that was made anew since, and the garbage collector removes it.
		c.metrics.writes.WithLabelValues("delete").Inc()
		if err = c.Delete(ctx, found, client.Preconditions{UID: &found.UID, ResourceVersion: &found.ResourceVersion}); err == nil {
			err = apierrors.NewNotFound(coordinationv1.Resource("leases"), found.Name)
		}
	}
	if !apierrors.IsNotFound(err) {
		return holder, err
	}
	c.metrics.writes.WithLabelValues("create").Inc()
	err = c.Create(ctx, lease)
	if apierrors.IsAlreadyExists(err) {
		return c.holder(ctx, lease)
	}
	return c.Node, err
}

func (c *controller) holder(ctx context.Context, lease *coordinationv1.Lease) (string, error) {
	if err := c.fresh.Get(ctx, client.ObjectKeyFromObject(lease), lease); err != nil {
		return "", err
	}
	if lease.Spec.HolderIdentity == nil || lease.DeletionTimestamp != nil {
		return "", fmt.Errorf("the Lease %s is of no node", lease.Name)
	}
	return *lease.Spec.HolderIdentity, nil
}

func (c *controller) unreserve(ctx context.Context, disk string, node *metav1.PartialObjectMetadata) error {
	lease := c.leaseOf(disk, node)
	holder, err := c.holder(ctx, lease)
	if err == nil && holder == c.Node {
		c.metrics.writes.WithLabelValues("delete").Inc()
		err = c.Delete(ctx, lease, client.Preconditions{UID: &lease.UID, ResourceVersion: &lease.ResourceVersion})
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("give up the disk %s: %w", disk, err)
	}
	c.agent.Unreserved(disk)
	return nil
}
