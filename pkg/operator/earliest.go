package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// earliest remembers the DaemonSets that the first versions of the upstream operator have left, in words.
type earliest struct {
	checked time.Time
	found   []string
}

// leftByEarliest finds the DaemonSets which upstream versions before 0.8 made for this object, and called as the object. They are
// provisioners too, and go on serving. The right to remove them would be one to every DaemonSet of the namespace, so a user is told to. It
// checks at most once in the time of a resync.
func (r *Reconciler) leftByEarliest(ctx context.Context, object *hppv1.HostPathProvisioner) ([]string, error) {
	e, now := &r.earliest, r.now()
	if now.Sub(e.checked) < r.resync() {
		return e.found, nil
	}
	sets := &appsv1.DaemonSetList{}
	if err := r.APIReader.List(ctx, sets, client.InNamespace(r.Config.Namespace)); err != nil {
		return e.found, fmt.Errorf("look for DaemonSets of early versions: %w", err)
	}
	e.found, e.checked = nil, now
	for i := range sets.Items {
		set := &sets.Items[i]
		if ownedBy(set, object) && !render.MayChange("DaemonSet", set.Name) {
			e.found = append(e.found, fmt.Sprintf("An early version of the upstream operator has left a provisioner that still serves: delete it with kubectl -n %s delete daemonset %s",
				set.Namespace, set.Name))
		}
	}
	return e.found, nil
}

// ownedBy says whether an object has this owner, and not another one that had its name.
func ownedBy(object, owner client.Object) bool {
	return slices.ContainsFunc(object.GetOwnerReferences(), func(o metav1.OwnerReference) bool { return o.Kind == hppv1.Kind && o.UID == owner.GetUID() })
}
