package provisioner

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// upstreamName is what the manifests of KubeVirt's provisioner call its namespace and its DaemonSet. Ours install into the same
	// namespace, take its rights over, and leave it running.
	upstreamName = "kubevirt-hostpath-provisioner"
	// operatedName is what KubeVirt's operator calls the DaemonSet, in its own namespace. Ours is called so too, and has no operatedAnnotation.
	operatedName       = "hostpath-provisioner"
	operatedAnnotation = "hostpathprovisioner.kubevirt.io/lastAppliedConfiguration"
)

// findUpstream notes whether KubeVirt's provisioner is deployed with the same directory, in any namespace. If the DaemonSets cannot be seen, what
// was seen before holds; one that is seen counts as long as its rights are not known.
func (p *Provisioner) findUpstream(ctx context.Context) {
	remedy, served := "", make(map[types.UID]bool)
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
			switch is, err := p.mayServe(ctx, set); {
			case err != nil: // unknown: it is asked again soon
				p.events.log.Error(err, "Failed to ask whether a DaemonSet may be the upstream provisioner", "namespace", set.Namespace, "daemonSet", name)
				remedy = removalOf(set)
			case is:
				remedy, served[set.UID] = removalOf(set), true
			}
		}
	}
	p.served = served
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

// mayServe says whether the pods of a DaemonSet may make PersistentVolumes, which only an administrator lets its account. Each user of a namespace can
// make one of any name whose pods the API server refuses, and have its status say what it likes: that stays as it was while a finalizer keeps the
// DaemonSet, and counts other pods by their labels. One whose account has lost the right, as to this one in its namespace, which users do not have,
// goes on for a while: its pods make directories, and remove them when they cannot make the PersistentVolume.
func (p *Provisioner) mayServe(ctx context.Context, set *appsv1.DaemonSet) (bool, error) {
	if set.Namespace == p.config.Namespace || p.served[set.UID] {
		return true, nil
	}
	const accounts = "system:serviceaccounts"
	review, err := p.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               strings.Join([]string{"system:serviceaccount", set.Namespace, cmp.Or(set.Spec.Template.Spec.ServiceAccountName, "default")}, ":"),
		Groups:             []string{accounts, accounts + ":" + set.Namespace, "system:authenticated"},
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "create", Resource: "persistentvolumes"},
	}}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed, nil
}

// removalOf says how a DaemonSet of KubeVirt's is removed. Its operator makes its own again.
func removalOf(set *appsv1.DaemonSet) string {
	if set.Name == operatedName {
		return fmt.Sprintf("take pathConfig off the HostPathProvisioner, so that the operator in the namespace %s removes its DaemonSet %s", set.Namespace, set.Name)
	}
	return fmt.Sprintf("delete it with kubectl -n %s delete daemonset %s", set.Namespace, set.Name)
}

func (p *Provisioner) foundUpstream() bool { return p.refuseUpstream() != nil }

// refuseUpstream refuses to share the directory with KubeVirt's provisioner: each would serve the claims of the other.
func (p *Provisioner) refuseUpstream() error {
	remedy := p.upstream.Load()
	if remedy == nil || *remedy == "" {
		return nil
	}
	return fmt.Errorf("the upstream provisioner serves %s too: %s", p.config.Path, *remedy)
}
