package provisioner

import (
	"context"
	"fmt"
	"path"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// upstreamName is what the manifests of KubeVirt's provisioner call its namespace and its DaemonSet. Ours install into the same
	// namespace, take its rights over, and leave it running.
	upstreamName = "kubevirt-hostpath-provisioner"
	// operatedName is what KubeVirt's operator calls the DaemonSet, in its own namespace. Ours is called so too, and has no operatedAnnotation.
	operatedName       = "hostpath-provisioner"
	operatedAnnotation = "hostpathprovisioner.kubevirt.io/lastAppliedConfiguration"
)

// findUpstream notes whether KubeVirt's provisioner is deployed with the same directory, in any namespace. If that cannot be seen, what was
// seen before holds.
func (p *Provisioner) findUpstream(ctx context.Context) {
	remedy, near := "", false
	for _, name := range []string{upstreamName, operatedName} {
		// By the name alone: the right is to DaemonSets of these two names.
		sets, err := p.client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			p.events.log.Error(err, "Failed to look for the upstream provisioner", "daemonSet", name)
			return
		}
		for i := range sets.Items {
			set := &sets.Items[i]
			if set.Name != name || !p.config.isFor(set) {
				continue
			}
			if near = true; mayServe(set) {
				remedy = removalOf(set)
			}
		}
	}
	p.near.Store(near)
	if before := p.upstream.Swap(&remedy); remedy != "" && (before == nil || *before != remedy) {
		p.events.log.Error(p.refuseUpstream(), "Not provisioning")
	}
}

// isFor says whether the pods of a DaemonSet are to have the directory.
func (c Config) isFor(set *appsv1.DaemonSet) bool {
	if _, operated := set.Annotations[operatedAnnotation]; set.Name == operatedName && (!operated || set.Namespace == c.Namespace) {
		return false
	}
	return slices.ContainsFunc(set.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && path.Clean(v.HostPath.Path) == c.Path
	})
}

// mayServe says whether a DaemonSet has pods as it wants them, or that this is not known yet. Each user of a namespace can make one of any name, whose
// pods the API server refuses. Only its controller says how many there are.
func mayServe(set *appsv1.DaemonSet) bool {
	return set.Status.ObservedGeneration < set.Generation || set.Status.UpdatedNumberScheduled > 0
}

// removalOf says how a DaemonSet of KubeVirt's is removed. Its operator makes its own again.
func removalOf(set *appsv1.DaemonSet) string {
	if set.Name == operatedName {
		return fmt.Sprintf("take pathConfig off the HostPathProvisioner, so that the operator in the namespace %s removes its DaemonSet %s", set.Namespace, set.Name)
	}
	return fmt.Sprintf("delete it with kubectl -n %s delete daemonset %s", set.Namespace, set.Name)
}

// maySee says whether there is a DaemonSet that serves the directory, or will if it gets pods.
func (p *Provisioner) maySee() bool { return p.near.Load() || p.refuseUpstream() != nil }

// refuseUpstream refuses to share the directory with KubeVirt's provisioner: each would serve the claims of the other.
func (p *Provisioner) refuseUpstream() error {
	remedy := p.upstream.Load()
	if remedy == nil || *remedy == "" {
		return nil
	}
	return fmt.Errorf("the upstream provisioner serves %s too: %s", p.config.Path, *remedy)
}
