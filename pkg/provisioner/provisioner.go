// Package provisioner makes hostPath PersistentVolumes from directories of a node's pool, and deletes them: the
// dynamic provisioners from before CSI. It decides which claims and PersistentVolumes are its node's business and
// what they may be, and reports refusals as events. What happens on the disk is pkg/pool's business.
//
// It runs in two forms. PerNode is KubeVirt's kubevirt.io/hostpath-provisioner: one instance on each node, without
// leader election, each of which serves the claims that name its node. SingleNode is the provisioner "hostpath": one
// instance for the only node of a cluster.
package provisioner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Mode is one of the two forms of the provisioner.
type Mode string

// The modes.
const (
	PerNode    Mode = "node"
	SingleNode Mode = "single-node"
)

// Annotations of claims.
const (
	// SelectedNode is the scheduler's choice for a claim.
	SelectedNode = "volume.kubernetes.io/selected-node"
	// StorageProvisioner is on claims the name of the provisioner that is to serve them.
	StorageProvisioner = "volume.kubernetes.io/storage-provisioner"
)

// Config is what an administrator says of one instance.
type Config struct {
	Mode Mode
	// Node is the name of the Node object that this instance runs on.
	Node string
	// Namespace is that of this instance's pod, or empty.
	Namespace string
	// Path is the pool's directory on the node, absolute and clean.
	Path string
	// NamePrefix has directories be named <claim>-<pv> instead of <pv>. In SingleNode mode they always are
	// <namespace>-<claim>-<pv>.
	NamePrefix bool
	// ReclaimPolicy overrides that of the StorageClass; empty for the class's.
	ReclaimPolicy corev1.PersistentVolumeReclaimPolicy
	// Shared says that Path is the same directory on all nodes, in SingleNode mode.
	Shared bool
}

// Name is the provisioner name of the instance.
func (c Config) Name() string {
	if c.Mode == SingleNode {
		return origin.SingleNodeName
	}
	return origin.PerNodeName
}

// Pool keeps the directories: a *pool.Set of one pool.
type Pool interface {
	Create(ctx context.Context, r pool.Request) (pool.Volume, error)
	Confirm(ctx context.Context, id volume.ID, client string) error
	Delete(ctx context.Context, id volume.ID) error
	Missing(id volume.ID) error
	Lock(id volume.ID) (unlock func(), err error)
	List(ctx context.Context, after volume.ID, most int) (page []pool.Volume, next volume.ID)
}

// A Provisioner is what the controller of sig-storage-lib-external-provisioner calls: a controller.Provisioner,
// controller.Qualifier and controller.DeletionGuard.
type Provisioner struct {
	config   Config
	pool     Pool
	client   kubernetes.Interface
	events   reporter
	volumes  cache.Indexer // as ownVolumes keeps them
	claims   corelisters.PersistentVolumeClaimLister
	classes  storagelisters.StorageClassLister
	bound    bounds
	upstream upstream
}

var (
	_ controller.Provisioner   = (*Provisioner)(nil)
	_ controller.Qualifier     = (*Provisioner)(nil)
	_ controller.DeletionGuard = (*Provisioner)(nil)
)

// Provision makes the directory of a claim and returns its PersistentVolume. Errors become events on the claim.
func (p *Provisioner) Provision(ctx context.Context, o controller.ProvisionOptions) (*corev1.PersistentVolume, controller.ProvisioningState, error) {
	if err := p.config.checkRequest(o); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	if err := errors.Join(p.refuseOtherNodes(ctx), p.findUpstream(ctx)); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	node, err := p.node(ctx)
	if err != nil {
		return nil, controller.ProvisioningNoChange, err
	}
	if err := checkTopologies(o.StorageClass.AllowedTopologies, node); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	id, err := p.config.directory(o.PVC, o.PVName)
	if err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	p.warnOfMixing(ctx, o.PVC)
	if err := p.create(ctx, id, o.PVC); err != nil {
		return nil, p.stateAfter(err, o.PVC), err
	}
	return p.config.persistentVolume(o, id, node), controller.ProvisioningFinished, nil
}

func (p *Provisioner) create(ctx context.Context, id volume.ID, claim *corev1.PersistentVolumeClaim) error {
	unlock, err := p.pool.Lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	_, err = p.pool.Create(ctx, pool.Request{ID: id, Range: volume.Range{Required: request.Value()}, Provisional: true})
	return err
}

// stateAfter is what the controller has to know of a directory that could not be made. Only where the scheduler chose
// this node can it choose another.
func (p *Provisioner) stateAfter(err error, claim *corev1.PersistentVolumeClaim) controller.ProvisioningState {
	switch {
	case errors.Is(err, volume.ErrNoSpace) && p.config.Mode == PerNode && claim.Annotations[origin.ProvisionOnNode] == "":
		return controller.ProvisioningReschedule
	case errors.Is(err, volume.ErrNoSpace), errors.Is(err, volume.ErrInvalid), errors.Is(err, volume.ErrOutOfRange), errors.Is(err, volume.ErrExists):
		return controller.ProvisioningFinished
	}
	// It may be there. If the claim goes away now, the controller still asks until that is known.
	return controller.ProvisioningInBackground
}

func (c Config) path(id volume.ID) string { return filepath.Join(c.Path, id.String()) }

// ShouldProvision reports whether a claim is for this node. It is asked for every claim of the cluster.
func (p *Provisioner) ShouldProvision(_ context.Context, claim *corev1.PersistentVolumeClaim) bool {
	return p.config.Mode == SingleNode || nodeOf(claim) == p.config.Node
}

// nodeOf is the node that a claim names; empty if it names none yet.
func nodeOf(claim *corev1.PersistentVolumeClaim) string {
	return cmp.Or(claim.Annotations[origin.ProvisionOnNode], claim.Annotations[SelectedNode])
}

// warnOfMixing reports a claim that names another node than the one that the scheduler chose for its pod. The
// annotation wins; a claim of the same pod without it is made where the scheduler chose, and the pod cannot have both.
func (p *Provisioner) warnOfMixing(ctx context.Context, claim *corev1.PersistentVolumeClaim) {
	named, selected := claim.Annotations[origin.ProvisionOnNode], claim.Annotations[SelectedNode]
	if named == "" || selected == "" || named == selected || p.config.Mode == SingleNode {
		return
	}
	p.events.warn(ctx, claim, "NodesDiffer", fmt.Sprintf("annotation %s=%s takes precedence over node %s, which the scheduler selected for the pod; "+
		"a pod whose claims name their node in both ways may never start: annotate all claims of the pod, or none", origin.ProvisionOnNode, named, selected))
}
