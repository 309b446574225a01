package provisioner

import (
	"context"
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// upstreamName is what the manifests of KubeVirt's provisioner call its namespace and its DaemonSet. Ours install into the same
// namespace, take its rights over, and leave it running.
const upstreamName = "kubevirt-hostpath-provisioner"

// findUpstream notes whether KubeVirt's provisioner is deployed with the same directory. If that cannot be seen, what was seen
// before holds.
func (p *Provisioner) findUpstream(ctx context.Context) {
	set, err := p.client.AppsV1().DaemonSets(upstreamName).Get(ctx, upstreamName, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		p.events.log.Error(err, "Failed to look for the upstream provisioner", "namespace", upstreamName, "daemonSet", upstreamName)
		return
	}
	found := err == nil && slices.ContainsFunc(set.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && path.Clean(v.HostPath.Path) == p.config.Path
	})
	if p.upstream.Swap(found) != found && found {
		p.events.log.Error(p.refuseUpstream(), "Not provisioning")
	}
}

// refuseUpstream refuses to share the directory with KubeVirt's provisioner: each would serve the claims of the other.
func (p *Provisioner) refuseUpstream() error {
	if !p.upstream.Load() {
		return nil
	}
	return fmt.Errorf("the upstream provisioner serves %s too: delete it with kubectl -n %s delete daemonset %s", p.config.Path, upstreamName, upstreamName)
}
