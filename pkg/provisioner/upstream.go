package provisioner

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
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

// upstream is KubeVirt's provisioner, as it was seen last.
type upstream struct {
	looking sync.Mutex
	// served are the DaemonSets that had the right to make PersistentVolumes.
	served map[types.UID]bool
	// refusal is why nothing is provisioned; nil if there is none.
	refusal atomic.Pointer[error]
}

// findUpstream refuses to share the name with KubeVirt's provisioner, in any namespace and of any directory: each would serve the claims of the
// other, and delete PersistentVolumes and directories of its. It is asked for each claim, since a DaemonSet may be made anew in any second. One counts as long as its rights are
// not known, and unknown DaemonSets do.
func (p *Provisioner) findUpstream(ctx context.Context) error {
	if p.config.Mode != PerNode {
		return nil // another serves all claims of its class
	}
	p.upstream.looking.Lock()
	defer p.upstream.looking.Unlock()
	remedy, err := p.seenUpstream(ctx)
	refusal := err
	if remedy != "" {
		refusal = fmt.Errorf("the upstream provisioner serves the claims of %s too: %s", p.config.Name(), remedy)
	}
	if before := p.refuseUpstream(); refusal != nil && (before == nil || before.Error() != refusal.Error()) {
		p.events.log.Error(refusal, "Not provisioning")
	}
	p.upstream.refusal.Store(&refusal)
	return refusal
}

// refuseUpstream is what findUpstream has found last.
func (p *Provisioner) refuseUpstream() error {
	if refusal := p.upstream.refusal.Load(); refusal != nil {
		return *refusal
	}
	return nil
}

// seenUpstream says how what is seen of KubeVirt's provisioner is removed; empty if there is none, or, with an error, if that is not known.
func (p *Provisioner) seenUpstream(ctx context.Context) (remedy string, err error) {
	served := make(map[types.UID]bool)
	for _, name := range []string{upstreamName, operatedName} {
		// By the name alone: the right is to DaemonSets of these two names.
		sets, err := p.client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			return remedy, fmt.Errorf("look for the upstream provisioner: %w", err)
		}
		for i := range sets.Items {
			set := &sets.Items[i]
			if set.Name != name || p.config.isOwn(set) {
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
	p.upstream.served = served
	return remedy, nil
}

// isOwn says whether a DaemonSet of one of the names is one of ours.
func (c Config) isOwn(set *appsv1.DaemonSet) bool {
	_, operated := set.Annotations[operatedAnnotation]
	return set.Name == operatedName && (!operated || set.Namespace == c.Namespace)
}

// mayServe says whether the pods of a DaemonSet may make PersistentVolumes, which only an administrator lets its account. Each user of a namespace can
// make one of any name whose pods the API server refuses, and have its status say what it likes: that stays as it was while a finalizer keeps the
// DaemonSet, and counts other pods by their labels. One whose account has lost the right, as to this one in its namespace, which users do not have,
// goes on for a while: its pods make directories, and remove them when they cannot make the PersistentVolume.
func (p *Provisioner) mayServe(ctx context.Context, set *appsv1.DaemonSet) (bool, error) {
	if set.Namespace == p.config.Namespace || p.upstream.served[set.UID] {
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
