package provisioner

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/util"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// selectNamedNode says in the scheduler's place where claims are to be made that name this node, and that no pod uses yet.
// Kubernetes hands a claim of a class with WaitForFirstConsumer to no provisioner before a node is selected for it; a pod that
// comes later is placed on the node that is. KubeVirt's provisioner, which does not wait for Kubernetes, makes them at once.
func (p *Provisioner) selectNamedNode(ctx context.Context) {
	claims, err := p.claims.List(labels.Everything())
	if err != nil {
		p.events.log.Error(err, "Failed to list claims")
		return
	}
	for _, claim := range claims {
		if !p.waitsForPod(claim) {
			continue
		}
		if err := p.selectNode(ctx, claim); err != nil {
			p.events.log.Error(err, "Failed to select the node that a claim names", "namespace", claim.Namespace, "claim", claim.Name)
		}
	}
}

// waitsForPod reports whether a claim of this provisioner names this node, and nothing but a pod is missing.
func (p *Provisioner) waitsForPod(claim *corev1.PersistentVolumeClaim) bool {
	if claim.Annotations[origin.ProvisionOnNode] != p.config.Node || claim.Annotations[SelectedNode] != "" || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil {
		return false
	}
	class, err := p.classes.Get(util.GetPersistentVolumeClaimClass(claim))
	return err == nil && class.Provisioner == p.config.Name() && class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// selectNode reads the claim anew: what the informer has is not all of it, and may be old.
func (p *Provisioner) selectNode(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	api := p.client.CoreV1().PersistentVolumeClaims(claim.Namespace)
	now, err := api.Get(ctx, claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil || now.UID != claim.UID || !p.waitsForPod(now) {
		return err
	}
	now.Annotations[SelectedNode] = p.config.Node
	_, err = api.Update(ctx, now, metav1.UpdateOptions{})
	return err
}
