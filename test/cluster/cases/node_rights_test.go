package cases_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// token is one of an account that is bound to an object, as kubelet asks for those of pods.
func (h *harness) token(namespace, account string, bound authenticationv1.BoundObjectReference) string {
	h.Helper()
	made, err := c.Client.CoreV1().ServiceAccounts(namespace).CreateToken(h.Context(), account,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &bound}}, metav1.CreateOptions{})
	must.Succeed(h, err)
	return made.Status.Token
}

// asPod is a client with the token of a pod.
func (h *harness) asPod(pod corev1.Pod) kubernetes.Interface {
	h.Helper()
	config := rest.AnonymousClientConfig(c.Config)
	config.BearerToken = h.token(pod.Namespace, pod.Spec.ServiceAccountName, authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID})
	client, err := kubernetes.NewForConfig(config)
	must.Succeed(h, err)
	return client
}

// podOn is the one pod with a label on a node.
func (h *harness) podOn(node, namespace, name string) corev1.Pod {
	h.Helper()
	pods, err := c.Client.CoreV1().Pods(namespace).List(h.Context(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=" + name, FieldSelector: "spec.nodeName=" + node})
	if err != nil || len(pods.Items) != 1 {
		h.Fatalf("%d pods %s on %s (%v)", len(pods.Items), name, node, err)
	}
	return pods.Items[0]
}

func (h *harness) wantForbidden(what string, err error) {
	h.Helper()
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "the token is of a pod on node '"+nodeA+"'") {
		h.Errorf("%s: %v", what, err)
	}
}

// volumeOfNode is a PersistentVolume as the account's program on a node makes it.
func volumeOfNode(name, key, node string, source corev1.PersistentVolumeSource) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"local-pv-provisioner.cybozu.com/node": node}, Annotations: map[string]string{
			"pv.kubernetes.io/provisioned-by": "kubevirt.io/hostpath-provisioner", "hostPathProvisionerIdentity": "kubevirt.io/hostpath-provisioner", "kubevirt.io/provisionOnNode": node}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName: name, PersistentVolumeSource: source,
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}},
		},
	}
}

// touches tries what an account may do to PersistentVolumes with the token of node-a, to one of this node and to one of another.
func (h *harness) touches(client kubernetes.Interface, of func(name, node string) *corev1.PersistentVolume) {
	h.Helper()
	ctx, volumes := h.Context(), client.CoreV1().PersistentVolumes()
	finalizer := func(name string) error {
		_, err := volumes.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/case"]}}`), metav1.PatchOptions{})
		return err
	}
	own, other := h.namespace+"-own", h.namespace+"-other"
	_, err := c.Client.CoreV1().PersistentVolumes().Create(ctx, of(other, nodeB), metav1.CreateOptions{})
	must.Succeed(h, err)
	_, err = volumes.Create(ctx, of(own, nodeB), metav1.CreateOptions{})
	h.wantForbidden("create one of another node", err)
	anywhere := of(own, nodeA)
	anywhere.Spec.NodeAffinity = nil
	_, err = volumes.Create(ctx, anywhere, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) { // one of type local is
		h.wantForbidden("create one of no node", err)
	}
	h.wantForbidden("patch one of another node", finalizer(other))
	h.wantForbidden("delete one of another node", volumes.Delete(ctx, other, metav1.DeleteOptions{}))
	_, err = volumes.Create(ctx, of(own, nodeA), metav1.CreateOptions{})
	must.Succeed(h, err)
	must.Succeed(h, finalizer(own))
	must.Succeed(h, volumes.Delete(ctx, own, metav1.DeleteOptions{}))
	h.kubectl("patch", "pv", own, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	h.kubectl("delete", "pv", other)
}

// The driver's account has a token on each node. All other cases show that what it does for its own node goes on.
func TestTokenOfNodeReachesNothingOfAnother(t *testing.T) {
	h := begin(t)
	client := h.asPod(h.podOn(nodeA, cluster.Namespace, cluster.DaemonSet))
	of := func(name, node string) *corev1.PersistentVolume {
		return volumeOfNode(name, "topology.hostpath.csi/node", node, corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: "kubevirt.io.hostpath-provisioner", VolumeHandle: name, VolumeAttributes: map[string]string{"storagePool": "plain"}}})
	}
	h.touches(client, of)
	h.secretsOfVolumes(client, of(h.namespace+"-secret", nodeA))
	h.capacityOfNodes(client)
	h.snapshotsOfNodes(client)

	h.install(perNode)
	h.provisioners(perNode, len(c.Nodes), true)
	h.touches(h.asPod(h.podOn(nodeA, perNode.namespace, "hostpath-provisioner")), func(name, node string) *corev1.PersistentVolume {
		return volumeOfNode(name, corev1.LabelHostname, node, corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/plain/.elsewhere"}})
	})
}

// secretsOfVolumes tries to have the node's kubelet read a Secret, by a volume of the node that names it for a claim.
func (h *harness) secretsOfVolumes(client kubernetes.Interface, pv *corev1.PersistentVolume) {
	h.Helper()
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: h.namespace, Name: "claim"}
	pv.Spec.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: metav1.NamespaceSystem, Name: "secret"}
	_, err := client.CoreV1().PersistentVolumes().Create(h.Context(), pv, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "names no Secret") {
		h.Errorf("create one that names a Secret: %v", err)
	}
}

// capacityOfNodes tries to tell the scheduler of more or less room on another node.
func (h *harness) capacityOfNodes(client kubernetes.Interface) {
	h.Helper()
	api := client.StorageV1().CSIStorageCapacities(cluster.Namespace)
	var of storagev1.CSIStorageCapacity
	var refusal error
	h.until("the change of a capacity of "+nodeB+" to be answered", func(ctx context.Context) (string, error) {
		list, err := api.List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		i := slices.IndexFunc(list.Items, func(o storagev1.CSIStorageCapacity) bool {
			return o.NodeTopology != nil && o.NodeTopology.MatchLabels["topology.hostpath.csi/node"] == nodeB
		})
		if i < 0 {
			return fmt.Sprintf("none of %d", len(list.Items)), nil
		}
		of = list.Items[i]
		more := of.DeepCopy()
		more.Capacity = resource.NewQuantity(1<<50, resource.BinarySI)
		// The API server compares the versions before it asks who changes it: the node's own program may have changed it meanwhile.
		if _, refusal = api.Update(ctx, more, metav1.UpdateOptions{}); apierrors.IsConflict(refusal) || apierrors.IsNotFound(refusal) {
			return refusal.Error(), nil
		}
		return "", nil
	})
	h.wantForbidden("change the capacity of another node", refusal)
	h.wantForbidden("delete the capacity of another node", api.Delete(h.Context(), of.Name, metav1.DeleteOptions{}))
}

// leasesOfNodes tries to take a disk that another node has reserved, and to give it up.
func (h *harness) leasesOfNodes(client kubernetes.Interface) {
	h.Helper()
	ctx, leases := h.Context(), client.CoordinationV1().Leases(devicesNamespace)
	of := func(name, node string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &node}}
	}
	own, other := h.namespace+"-own", h.namespace+"-other"
	_, err := c.Client.CoordinationV1().Leases(devicesNamespace).Create(ctx, of(other, nodeB), metav1.CreateOptions{})
	must.Succeed(h, err)
	_, err = leases.Create(ctx, of(own, nodeB), metav1.CreateOptions{})
	h.wantForbidden("reserve a disk for another node", err)
	h.wantForbidden("give up a disk of another node", leases.Delete(ctx, other, metav1.DeleteOptions{}))
	_, err = leases.Create(ctx, of(own, nodeA), metav1.CreateOptions{})
	must.Succeed(h, err)
	_, err = leases.Get(ctx, own, metav1.GetOptions{})
	must.Succeed(h, err)
	_, err = leases.List(ctx, metav1.ListOptions{})
	must.Succeed(h, err, leases.Delete(ctx, own, metav1.DeleteOptions{}))
	h.kubectl("delete", "lease", other, "--namespace="+devicesNamespace)
}

// snapshotsOfNodes tries the same of snapshots.
func (h *harness) snapshotsOfNodes(client kubernetes.Interface) {
	h.Helper()
	content := h.namespace + "-other"
	h.applyText(fmt.Sprintf(`
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata:
  name: %[1]s
  labels: {snapshot.storage.kubernetes.io/managed-by: no-node}
spec:
  driver: kubevirt.io.hostpath-provisioner
  deletionPolicy: Retain
  source: {snapshotHandle: none}
  volumeSnapshotRef: {namespace: %[2]s, name: none}
`, content, h.namespace))
	err := client.CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/" + content).
		Body([]byte(`{"metadata":{"labels":{"snapshot.storage.kubernetes.io/managed-by":"` + nodeA + `"}}}`)).Do(h.Context()).Error()
	h.wantForbidden("take over a snapshot of another node", err)
	h.kubectl("delete", "volumesnapshotcontent", content)
	h.handlesOfNodes(client)
}

// handlesOfNodes tries to have a restore find the snapshot of another user, under the name of one of the node's own.
func (h *harness) handlesOfNodes(client kubernetes.Interface) {
	h.Helper()
	content := h.namespace + "-own"
	h.applyText(fmt.Sprintf(`
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata:
  name: %[1]s
  labels: {snapshot.storage.kubernetes.io/managed-by: %[3]s}
spec:
  driver: kubevirt.io.hostpath-provisioner
  deletionPolicy: Retain
  source: {snapshotHandle: none}
  volumeSnapshotRef: {namespace: %[2]s, name: none}
`, content, h.namespace, nodeA))
	patch := func(subresource, body string) error {
		return client.CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/" + content + subresource).
			Body([]byte(body)).Do(h.Context()).Error()
	}
	for _, handle := range []string{"snapshot-other", "snapshot-other@" + nodeA, "snapshot-other@-?@" + nodeA} {
		h.wantForbidden("give a snapshot the handle "+handle, patch("/status", `{"status":{"snapshotHandle":"`+handle+`"}}`))
	}
	h.wantForbidden("have it be another VolumeSnapshot's", patch("", `{"spec":{"volumeSnapshotRef":{"name":"other"}}}`))
	must.Succeed(h, patch("/status", `{"status":{"snapshotHandle":"none"}}`))
	h.kubectl("delete", "volumesnapshotcontent", content)
}
