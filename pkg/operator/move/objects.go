package move

import (
	"context"
	"fmt"
	"maps"
	"time"

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
	// nameAnnotation has the namespace and name of the move.
	nameAnnotation = "hostpathprovisioner.kubevirt.io/move-of"
	port           = 8444
)

// Objects are what is made for one move in the driver's namespace.
type objects struct {
	move      *v1alpha1.VolumeMove
	api       apiServer
	namespace string
	now       func() time.Time
}

// meta is that of an object of the move.
func (o objects) meta(suffix string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: o.namespace, Name: "volumemove-" + string(o.move.UID) + suffix,
		Labels:      map[string]string{moveLabel: string(o.move.UID), "app.kubernetes.io/name": "volume-mover", "app.kubernetes.io/managed-by": "hostpath-provisioner-operator"},
		Annotations: map[string]string{nameAnnotation: o.move.Namespace + "/" + o.move.Name, begunAnnotation: beginningOf(o.move)},
	}
}

// ensure makes an object, or reads the one that is there.
func (o objects) ensure(ctx context.Context, want client.Object) error {
	key := client.ObjectKeyFromObject(want)
	err := o.api.writer.Create(ctx, want)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := o.api.reader.Get(ctx, key, want); err != nil {
		return err
	}
	if !o.has(want) {
		return fmt.Errorf("%s in the namespace %s is not of this move", key.Name, key.Namespace)
	}
	return nil
}

// has says whether an object is of the move.
func (o objects) has(object client.Object) bool {
	return object.GetLabels()[moveLabel] == string(o.move.UID)
}

// secret has the certificates, and later what is noted of the switch.
func (o objects) secret(ctx context.Context) (*corev1.Secret, error) {
	secret := &corev1.Secret{ObjectMeta: o.meta("")}
	err := o.api.reader.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if apierrors.IsNotFound(err) {
		secret = &corev1.Secret{ObjectMeta: o.meta("")}
		if secret.Data, err = issue(o.now()); err == nil {
			err = o.ensure(ctx, secret)
		}
	}
	if err == nil && !o.has(secret) {
		err = fmt.Errorf("secret %s is not of this move", secret.Name)
	}
	return secret, err
}

// connect has what movers need that talk to each other, and says whether its certificates are good for as long as one runs. Otherwise the
// movers end, and get others.
func (o objects) connect(ctx context.Context, movers ...role) (ready bool, err error) {
	secret, err := o.secret(ctx)
	if err != nil {
		return false, err
	}
	if good(secret.Data, o.now()) {
		return true, nil
	}
	left, err := o.removePods(ctx, movers...)
	if err != nil || len(left) > 0 {
		return false, err
	}
	renewed, err := issue(o.now())
	if err != nil {
		return false, err
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	maps.Copy(secret.Data, renewed) // all else is kept
	return false, o.api.writer.Update(ctx, secret)
}

// networkPolicy has the two movers talk to each other, and to nothing else. It stays until the move has ended: by it a move is heard of whose
// VolumeMove was removed by force.
func (o objects) networkPolicy(ctx context.Context) error {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: o.meta("")}
	err := o.api.reader.Get(ctx, client.ObjectKeyFromObject(policy), policy)
	if !apierrors.IsNotFound(err) {
		return err
	}
	movers := metav1.LabelSelector{MatchLabels: map[string]string{moveLabel: string(o.move.UID)}}
	ports := []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(port))}}
	peers := []networkingv1.NetworkPolicyPeer{{PodSelector: &movers}}
	policy = &networkingv1.NetworkPolicy{ObjectMeta: o.meta(""), Spec: networkingv1.NetworkPolicySpec{
		PodSelector: movers, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: ports, From: peers}},
		Egress:  []networkingv1.NetworkPolicyEgressRule{{Ports: ports, To: peers}},
	}}
	controllerutil.AddFinalizer(policy, v1alpha1.Finalizer)
	return o.ensure(ctx, policy)
}

// pods are those of the move.
func (o objects) pods(ctx context.Context) ([]corev1.Pod, error) {
	list := &corev1.PodList{}
	err := o.api.reader.List(ctx, list, client.InNamespace(o.namespace), client.MatchingLabels{moveLabel: string(o.move.UID)})
	return list.Items, err
}

// removePods removes the pods of some roles, or all. It returns those that are there still.
func (o objects) removePods(ctx context.Context, of ...role) (left []string, err error) {
	pods, err := o.pods(ctx)
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
			if err := o.api.delete(ctx, pod); err != nil {
				return nil, err
			}
		}
	}
	return left, nil
}

// remove removes all that is of the move. It returns the pods that are there still.
func (o objects) remove(ctx context.Context) ([]string, error) {
	left, err := o.removePods(ctx)
	if err != nil || len(left) > 0 {
		return left, err
	}
	return nil, o.removeConnection(ctx)
}

// removeConnection removes what pods have to talk to each other.
func (o objects) removeConnection(ctx context.Context) error {
	for _, object := range []client.Object{&corev1.Secret{}, &networkingv1.NetworkPolicy{}} {
		err := o.api.reader.Get(ctx, client.ObjectKey{Namespace: o.namespace, Name: o.meta("").Name}, object)
		if err == nil && o.has(object) {
			err = o.api.drop(ctx, object)
		}
		if client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// removeUnknown removes what an operator has made that noted nothing of the beginning of its move. A Secret with a PersistentVolume stays, as that
// may be missing.
func (o objects) removeUnknown(ctx context.Context) error {
	if left, err := o.removePods(ctx); err != nil || len(left) > 0 {
		return err
	}
	secret, policy := &corev1.Secret{}, &networkingv1.NetworkPolicy{}
	if there, err := o.api.find(ctx, client.ObjectKey{Namespace: o.namespace, Name: o.meta("").Name}, secret); err != nil || !there || secret.Data[volumeFile] == nil {
		if err == nil {
			err = o.removeConnection(ctx)
		}
		return err
	}
	there, err := o.api.find(ctx, client.ObjectKey{Namespace: o.namespace, Name: o.meta("").Name}, policy)
	if err != nil || !there || !o.has(policy) {
		return err
	}
	return o.api.drop(ctx, policy)
}
