package provisioner

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// orphans reports PersistentVolumes to be deleted whose node is gone, and its provisioner with it: they would wait for ever.
// All instances check, and the reporter makes one event of what they find.
type orphans struct {
	*Provisioner
	checked time.Time
	gone    map[string]bool // by node, when it was last checked
}

// check asks the API server, now and then: the informer has only what this instance has to do with.
func (o *orphans) check(ctx context.Context, now time.Time) {
	if now.Sub(o.checked) < strayAgain {
		return
	}
	o.checked = now
	volumes, err := o.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		o.events.log.Error(err, "Failed to list PersistentVolumes")
		return
	}
	gone := make(map[string]bool) // by node
	for i := range volumes.Items {
		pv := &volumes.Items[i]
		node, err := origin.Node(pv)
		if err != nil || !o.waitsForNode(pv) {
			continue
		}
		if _, known := gone[node]; !known {
			_, err := o.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				o.events.log.Error(err, "Failed to check a PersistentVolume of another node", "persistentVolume", pv.Name, "node", node)
				continue
			}
			gone[node] = err != nil
		}
		if gone[node] && o.gone[node] { // one that is made anew is back by the next check
			o.events.warn(ctx, pv, "VolumeFailedDelete", fmt.Sprintf("node %s, which had its directory %s, does not exist any more: %s",
				node, origin.Path(pv), remedy(pv, node)))
		}
	}
	o.gone = gone
}

// remedy is what to do about a PersistentVolume whose node is gone. The directory may still be there if the affinity is for
// another node than the annotation.
func remedy(pv *corev1.PersistentVolume, node string) string {
	if hosts := origin.Hosts(pv); !slices.Equal(hosts, []string{node}) {
		return fmt.Sprintf("look for a node with the label %s in %q before you delete it, which may have the directory", corev1.LabelHostname, hosts)
	}
	return "delete the PersistentVolume and remove its finalizers"
}

func (o *orphans) waitsForNode(pv *corev1.PersistentVolume) bool {
	released := pv.Status.Phase == corev1.VolumeReleased && pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete
	return pv.Annotations[origin.ProvisionedBy] == o.config.Name() && o.config.ofOtherInstance(pv) && (released || pv.DeletionTimestamp != nil)
}
