package localpv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// leaseOf is the Lease of a disk in the namespace of the agents: the API server makes one of a name, also where two nodes ask at once. It has no
// duration, and goes with the node, whose name is a label so that it can list its own.
func (c *controller) leaseOf(disk string, node *metav1.PartialObjectMetadata) *coordinationv1.Lease {
	sum := sha256.Sum256([]byte(disk))
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace, Name: "disk-" + hex.EncodeToString(sum[:16]), Annotations: map[string]string{identityAnnotation: disk},
			Labels:          map[string]string{legacyNodeLabel: c.Node},
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
	if err == nil && holder == c.Node && !isOf(found, node) {
		// The garbage collector removes it.
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

// isOf says whether a Lease is of a Node object as it is now, and not of one before it that was deleted.
func isOf(lease *coordinationv1.Lease, node *metav1.PartialObjectMetadata) bool {
	return slices.ContainsFunc(lease.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Node" && o.UID == node.UID })
}

// reservations are the disks that are reserved for the node, and not nil if there are none.
func (c *controller) reservations(ctx context.Context, node *metav1.PartialObjectMetadata) ([]string, error) {
	disks := []string{}
	for page := (client.ListOptions{Limit: pageSize}); ; {
		leases, err := c.leasePage(ctx, &page)
		if err != nil {
			return nil, fmt.Errorf("list the Leases of the node: %w", err)
		}
		for n := range leases.Items {
			lease := &leases.Items[n]
			disk, holder := lease.Annotations[identityAnnotation], lease.Spec.HolderIdentity
			if holder != nil && *holder == c.Node && lease.DeletionTimestamp == nil && isOf(lease, node) && lease.Name == c.leaseOf(disk, node).Name {
				disks = append(disks, disk)
			}
		}
		if page.Continue = leases.Continue; page.Continue == "" {
			return disks, nil
		}
	}
}

func (c *controller) leasePage(ctx context.Context, page *client.ListOptions) (leases coordinationv1.LeaseList, err error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	return leases, c.fresh.List(ctx, &leases, page, client.InNamespace(c.Namespace), client.MatchingLabels{legacyNodeLabel: c.Node})
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
