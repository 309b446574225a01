package move

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

const (
	// moveLabel has the uid of the move on all that is made for it. What has another is never touched. Owner references do not lead to
	// another namespace.
	moveLabel = "hostpathprovisioner.kubevirt.io/move"
	roleLabel = "hostpathprovisioner.kubevirt.io/move-role"
	port      = 8444
)

// meta is that of an object of the move.
func (m moving) meta(suffix string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: m.DriverNamespace, Name: "volumemove-" + string(m.UID) + suffix,
		Labels: map[string]string{moveLabel: string(m.UID), "app.kubernetes.io/name": "volume-mover", "app.kubernetes.io/managed-by": "hostpath-provisioner-operator"},
		Annotations: map[string]string{
			"hostpathprovisioner.kubevirt.io/move-of": m.Namespace + "/" + m.Name,
		},
	}
}

// ensure makes an object, or reads the one that is there.
func (m moving) ensure(ctx context.Context, want client.Object) error {
	key := client.ObjectKeyFromObject(want)
	err := m.Client.Create(ctx, want)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := m.APIReader.Get(ctx, key, want); err != nil {
		return err
	}
	if !m.has(want) {
		return fmt.Errorf("%s in the namespace %s is not of this move", key.Name, key.Namespace)
	}
	return nil
}

// has says whether an object is of the move.
func (m moving) has(object client.Object) bool { return object.GetLabels()[moveLabel] == string(m.UID) }

// secret has the certificates, and later the PersistentVolume that replaces the one before.
func (m moving) secret(ctx context.Context) (*corev1.Secret, error) {
	secret := &corev1.Secret{ObjectMeta: m.meta("")}
	err := m.APIReader.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if apierrors.IsNotFound(err) {
		secret = &corev1.Secret{ObjectMeta: m.meta("")}
		if secret.Data, err = issue(m.now()); err == nil {
			err = m.ensure(ctx, secret)
		}
	}
	if err == nil && !m.has(secret) {
		err = fmt.Errorf("secret %s is not of this move", secret.Name)
	}
	return secret, err
}

// policy has the two movers talk to each other, and to nothing else.
func (m moving) policy(ctx context.Context) error {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: m.meta("")}
	err := m.APIReader.Get(ctx, client.ObjectKeyFromObject(policy), policy)
	if !apierrors.IsNotFound(err) {
		return err
	}
	movers := metav1.LabelSelector{MatchLabels: map[string]string{moveLabel: string(m.UID)}}
	ports := []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(port))}}
	peers := []networkingv1.NetworkPolicyPeer{{PodSelector: &movers}}
	policy = &networkingv1.NetworkPolicy{ObjectMeta: m.meta(""), Spec: networkingv1.NetworkPolicySpec{
		PodSelector: movers, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: ports, From: peers}},
		Egress:  []networkingv1.NetworkPolicyEgressRule{{Ports: ports, To: peers}},
	}}
	return m.ensure(ctx, policy)
}

// pods are those of the move.
func (m moving) pods(ctx context.Context) ([]corev1.Pod, error) {
	list := &corev1.PodList{}
	err := m.APIReader.List(ctx, list, client.InNamespace(m.DriverNamespace), client.MatchingLabels{moveLabel: string(m.UID)})
	return list.Items, err
}

// removePods removes the pods of some roles, or all. It returns those that are there still.
func (m moving) removePods(ctx context.Context, of ...role) (left []string, err error) {
	pods, err := m.pods(ctx)
	if err != nil {
		return nil, err
	}
	for i := range pods {
		pod := &pods[i]
		if len(of) > 0 && !isOf(pod, of) {
			continue
		}
		left = append(left, fmt.Sprintf("pod %s on node %s", pod.Name, pod.Spec.NodeName))
		if pod.DeletionTimestamp == nil {
			if err := m.delete(ctx, pod); err != nil {
				return nil, err
			}
		}
	}
	return left, nil
}

// delete deletes an object that was read.
func (m moving) delete(ctx context.Context, object client.Object) error {
	return client.IgnoreNotFound(m.Client.Delete(ctx, object, client.Preconditions{UID: ptr.To(object.GetUID())}))
}

// cleanUp removes all that is of the move. It returns the pods that are there still.
func (m moving) cleanUp(ctx context.Context) ([]string, error) {
	left, err := m.removePods(ctx)
	if err != nil || len(left) > 0 {
		return left, err
	}
	for _, object := range []client.Object{&corev1.Secret{}, &networkingv1.NetworkPolicy{}} {
		err := m.APIReader.Get(ctx, client.ObjectKey{Namespace: m.DriverNamespace, Name: m.meta("").Name}, object)
		if err == nil && m.has(object) {
			err = m.drop(ctx, object)
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, err
		}
	}
	return nil, nil
}

// drop deletes an object that was read, and that nothing keeps any more.
func (m moving) drop(ctx context.Context, object client.Object) error {
	if controllerutil.RemoveFinalizer(object, v1alpha1.Finalizer) {
		if err := m.Client.Update(ctx, object); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	return m.delete(ctx, object)
}
