package provisioner

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// checkPods reports pods that use a claim which names this node, and one of another node: no node has both. All
// claims of a pod have to name the same node, or none. The scheduler only says that no node fits.
func (s *strays) checkPods(ctx context.Context, claims []*corev1.PersistentVolumeClaim) {
	named := make(map[string]bool) // namespaces with claims that name this node
	for _, claim := range claims {
		if claim.Annotations[origin.ProvisionOnNode] == s.config.Node && s.serves(claim) {
			named[claim.Namespace] = true
		}
	}
	for namespace := range named {
		// Those without a node, which are few. The state in the API server's memory is good enough.
		pods, err := s.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=", ResourceVersion: "0"})
		if err != nil {
			s.events.log.Error(err, "failed to list the pods that are not scheduled", "namespace", namespace)
			continue
		}
		for i := range pods.Items {
			s.checkPod(ctx, &pods.Items[i])
		}
	}
}

func (s *strays) checkPod(ctx context.Context, pod *corev1.Pod) {
	if pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return
	}
	var here, elsewhere []*corev1.PersistentVolumeClaim
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		claim, err := s.claims.PersistentVolumeClaims(pod.Namespace).Get(v.PersistentVolumeClaim.ClaimName)
		if err != nil || !s.serves(claim) { // it is not there yet, or no business of this provisioner
			continue
		}
		switch node := nodeOf(claim); {
		case claim.Annotations[origin.ProvisionOnNode] == s.config.Node:
			here = append(here, claim)
		case node != "" && node != s.config.Node:
			elsewhere = append(elsewhere, claim)
		}
	}
	for _, claim := range here {
		for _, other := range elsewhere {
			s.warnOfPod(ctx, pod, claim, other)
			s.warnOfPod(ctx, pod, other, claim)
		}
	}
}

func (s *strays) warnOfPod(ctx context.Context, pod *corev1.Pod, claim, other *corev1.PersistentVolumeClaim) {
	s.events.warn(ctx, claim, "NodesDiffer", fmt.Sprintf("pod %s cannot start: this claim is for node %s, and its claim %s for node %s; "+
		"name the same node in the annotation %s of all claims of a pod, or of none", pod.Name, nodeOf(claim), other.Name, nodeOf(other), origin.ProvisionOnNode))
}
