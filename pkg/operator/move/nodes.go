package move

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// A nodeState says of a node that it has an object, and that its kubelet answers.
type nodeState struct{ there, ready bool }

// away says of a node that does not answer what is the matter, and what ends that; it is empty for one that does.
func (s nodeState) away(name string) string {
	switch {
	case s.ready:
		return ""
	case s.there:
		return fmt.Sprintf("node %s does not answer (if it never comes back, delete its Node object)", name)
	}
	return fmt.Sprintf("node %s is gone", name)
}

func (a apiServer) nodeState(ctx context.Context, name string) (s nodeState, err error) {
	node := &corev1.Node{}
	if err := a.reader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return s, client.IgnoreNotFound(err)
	}
	s.there = true
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			s.ready = condition.Status == corev1.ConditionTrue
		}
	}
	return s, nil
}

// ownedByNode says that a pod goes with its node. The VolumeMove is in another namespace, and kubectl drain refuses a node with pods that
// no controller makes again.
func (a apiServer) ownedByNode(ctx context.Context, name string) ([]metav1.OwnerReference, error) {
	node := &corev1.Node{}
	if err := a.reader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nil, err
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: ptr.To(true)}}, nil
}

// A driver is what runs on the nodes.
type driver struct {
	api       apiServer
	namespace string
}

// daemonSet is the DaemonSet, and the container of the driver in it.
func (d driver) daemonSet(ctx context.Context) (*appsv1.DaemonSet, *corev1.Container, error) {
	sets := &appsv1.DaemonSetList{}
	if err := d.api.reader.List(ctx, sets, client.InNamespace(d.namespace)); err != nil {
		return nil, nil, err
	}
	for i := range sets.Items {
		all := sets.Items[i].Spec.Template.Spec.Containers
		for j := range all {
			if slices.Contains(all[j].Args, "--drivername="+render.DriverName) {
				return &sets.Items[i], &all[j], nil
			}
		}
	}
	return nil, nil, fmt.Errorf("there is no DaemonSet of the driver %s in the namespace %s", render.DriverName, d.namespace)
}

// templateGeneration is the label of a DaemonSet's pods that says which of its templates they are of.
const templateGeneration = "pod-template-generation"

// readyNodes are those on which the driver is ready, and what is the matter with it there; empty where nothing is.
func (d driver) readyNodes(ctx context.Context) (map[string]string, error) {
	set, own, err := d.daemonSet(ctx)
	if err != nil {
		return nil, err
	}
	pods := &corev1.PodList{}
	if err := d.api.reader.List(ctx, pods, client.InNamespace(d.namespace), client.MatchingLabels(set.Spec.Selector.MatchLabels)); err != nil {
		return nil, err
	}
	nodes := map[string]string{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue }) {
			nodes[pod.Spec.NodeName] = earlier(set, pod, own.Name)
		}
	}
	return nodes, nil
}

// earlier says of a driver's pod that it is of another template than its DaemonSet has by now, from which movers are made: it may be of a
// version that does not know them, or have other pools.
func earlier(set *appsv1.DaemonSet, pod *corev1.Pod, container string) string {
	is, wanted := pod.Labels[templateGeneration], set.Annotations[appsv1.DeprecatedTemplateGeneration]
	if is == wanted || is == "" || wanted == "" {
		return ""
	}
	image := ""
	for _, c := range pod.Spec.Containers {
		if c.Name == container {
			image = c.Image
		}
	}
	return fmt.Sprintf("the driver on node %s has the image %s, from before the last change of its DaemonSet: wait until its pod %s is replaced, or delete that",
		pod.Spec.NodeName, image, pod.Name)
}
