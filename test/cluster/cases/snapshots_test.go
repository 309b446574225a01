package cases_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	restoresDir   = operatorDir + "/restores"
	snapshotGroup = "snapshot.storage.k8s.io"
	managedBy     = "snapshot.storage.kubernetes.io/managed-by"
	selectedNode  = "volume.kubernetes.io/selected-node"
)

// A volumeSnapshot has the fields of a VolumeSnapshot that cases read.
type volumeSnapshot struct {
	metav1.ObjectMeta `json:"metadata"`
	Status            struct {
		BoundVolumeSnapshotContentName string
		ReadyToUse                     bool
		RestoreSize                    any
		Error                          struct{ Message string }
	}
}

func (v volumeSnapshot) String() string {
	text, _ := json.Marshal(v.Status)
	return string(text)
}

// snapshotKinds is a client of the namespace's snapshots, or of all contents.
func snapshotKinds(resource, namespace string) (dynamic.ResourceInterface, error) {
	client, err := dynamic.NewForConfig(c.Config)
	if err != nil {
		return nil, err
	}
	all := client.Resource(schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: resource})
	if namespace == "" {
		return all, nil
	}
	return all.Namespace(namespace), nil
}

// in is the harness of a subtest.
func (h *harness) in(t *testing.T) *harness { return &harness{T: t, namespace: h.namespace} }

func (h *harness) snapshots() dynamic.ResourceInterface {
	h.Helper()
	client, err := snapshotKinds("volumesnapshots", h.namespace)
	must.Succeed(h, err)
	return client
}

// snapshot asks for one of a claim.
func (h *harness) snapshot(name, claim string) {
	h.Helper()
	h.snapshotOfClass("hostpath-csi", name, claim)
}

func (h *harness) snapshotOfClass(class, name, claim string) {
	h.Helper()
	if _, err := h.snapshots().Create(h.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": snapshotGroup + "/v1",
		"kind":       "VolumeSnapshot",
		"metadata":   map[string]any{"name": name},
		"spec": map[string]any{
			"volumeSnapshotClassName": class,
			"source":                  map[string]any{"persistentVolumeClaimName": claim},
		},
	}}, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
}

// snapshotUntil waits until a snapshot is as a check wants it, which says what is missing.
func (h *harness) snapshotUntil(name, what string, check func(volumeSnapshot) string) volumeSnapshot {
	h.Helper()
	var found volumeSnapshot
	client := h.snapshots()
	h.until("snapshot "+name+" to be "+what, func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		text, err := object.MarshalJSON()
		if err != nil {
			return "", err
		}
		found = volumeSnapshot{}
		if err := json.Unmarshal(text, &found); err != nil {
			return "", err
		}
		return check(found), nil
	})
	return found
}

func (h *harness) snapshotReady(name string) volumeSnapshot {
	h.Helper()
	return h.snapshotUntil(name, "ready", func(v volumeSnapshot) string {
		if v.Status.ReadyToUse {
			return ""
		}
		return "it is " + v.String()
	})
}

// contentOf is the VolumeSnapshotContent of a snapshot that has one.
func (h *harness) contentOf(snapshot volumeSnapshot) *unstructured.Unstructured {
	h.Helper()
	client, err := snapshotKinds("volumesnapshotcontents", "")
	must.Succeed(h, err)
	content, err := client.Get(h.Context(), snapshot.Status.BoundVolumeSnapshotContentName, metav1.GetOptions{})
	must.Succeed(h, err)
	return content
}

// removeSnapshot deletes a snapshot, without waiting for it.
func (h *harness) removeSnapshot(name string) {
	h.Helper()
	must.Succeed(h, h.snapshots().Delete(h.Context(), name, metav1.DeleteOptions{}))
}

// wantSnapshotGone waits until a snapshot is gone.
func (h *harness) wantSnapshotGone(name string) {
	h.Helper()
	client := h.snapshots()
	h.until("snapshot "+name+" to be gone", func(ctx context.Context) (string, error) {
		left, err := client.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		} else if err != nil {
			return "", err
		}
		return fmt.Sprintf("has the finalizers %q", left.GetFinalizers()), nil
	})
}

// snapshotsLeft says which snapshots of a namespace there are still, or is empty.
func snapshotsLeft(ctx context.Context, namespace string) (string, error) {
	client, err := snapshotKinds("volumesnapshotcontents", "")
	if err != nil {
		return "", err
	}
	contents, err := client.List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, content := range contents.Items {
		of, _, err := unstructured.NestedString(content.Object, "spec", "volumeSnapshotRef", "namespace")
		if err != nil {
			return "", err
		}
		if of == namespace {
			return content.GetName() + " is left", nil
		}
	}
	return "", nil
}

func fromSnapshot(name string) func(*corev1.PersistentVolumeClaim) {
	group := snapshotGroup
	return func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: name}
	}
}

func fromClaim(name string) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: name}
	}
}

// A medium is a kind of volume, with how a pod uses it.
type medium struct {
	claim func(*corev1.PersistentVolumeClaim)
	// with gives a pod the claim, at /volume.
	with func(claim, path string) func(*corev1.Pod)
	// write and read are scripts.
	write, read string
}

var media = map[string]medium{
	"directory": {func(*corev1.PersistentVolumeClaim) {}, with, "echo %s >/volume/file; sync -f /volume", "cat /volume/file"},
	"device":    {asBlock, withDevice, "echo %s | dd of=/volume conv=notrunc,fsync", "head -n 1 /volume"},
}

// user is a pod with a claim.
func (m medium) user(h *harness, claim string, changes ...func(*corev1.Pod)) {
	h.Helper()
	h.pod(claim, append(changes, m.with(claim, "/volume"))...)
}

// wantContent says what a pod reads.
func (m medium) wantContent(h *harness, pod, want string) {
	h.Helper()
	if got := strings.TrimSpace(h.mustRun(pod, m.read)); got != want {
		h.Errorf("%s reads %q, want %q", pod, got, want)
	}
}

// What is in a volume at one moment is in its snapshot, and in what is made of that, whatever becomes of the volume. A clone
// has what is in the volume.
func TestSnapshots(t *testing.T) {
	h := begin(t)
	t.Run("directory", func(t *testing.T) {
		t.Parallel()
		h := h.in(t)
		restores(h, "directory", nodeA)
		h.mustRun("directory-larger", "dd if=/dev/zero of=/volume/big bs=1M count=100")
		h.wantNoSpace("directory-larger", "dd if=/dev/zero of=/volume/bigger bs=1M count=50")
		h.wantNoSpace("directory-same", "dd if=/dev/zero of=/volume/big bs=1M count=80")
	})
	t.Run("device", func(t *testing.T) {
		t.Parallel()
		h := h.in(t)
		restores(h, "device", nodeB)
		for pod, want := range map[string]int64{"device-same": 64 * mib, "device-larger": 128 * mib} {
			if got := h.deviceSize(pod, "/volume"); got != want {
				t.Errorf("the device of %s has %d bytes, want %d", pod, got, want)
			}
		}
	})
	t.Run("in use on a filesystem that copies", func(t *testing.T) {
		t.Parallel()
		copied(h.in(t))
	})
	t.Run("restore on the wrong node, and deleted meanwhile", func(t *testing.T) {
		t.Parallel()
		wrongNode(h.in(t))
	})
}

// restores makes a snapshot and a clone of a volume in use, deletes the volume, and makes volumes of the snapshot.
func restores(h *harness, kind, node string) {
	h.Helper()
	m := media[kind]
	name := func(of string) string { return kind + "-" + of }
	h.claim(name("source"), "64Mi", m.claim)
	m.user(h, name("source"), on(node))
	h.ready(name("source"))
	h.mustRun(name("source"), fmt.Sprintf(m.write, "before"))

	h.snapshot(kind, name("source"))
	made := h.snapshotReady(kind)
	if got := h.contentOf(made).GetLabels()[managedBy]; got != node {
		h.Errorf("the snapshot is for %q to make, want %s", got, node)
	}
	if got := fmt.Sprint(made.Status.RestoreSize); got != "64Mi" {
		h.Errorf("the snapshot can be restored to %s, want 64Mi", got)
	}
	h.mustRun(name("source"), fmt.Sprintf(m.write, "after"))
	h.claim(name("clone"), "64Mi", m.claim, fromClaim(name("source")))
	m.user(h, name("clone"), on(node))
	h.ready(name("clone"))
	h.remove(name("source"))
	h.removeClaim(name("source"))

	h.claim(name("same"), "64Mi", m.claim, fromSnapshot(kind))
	h.claim(name("larger"), "128Mi", m.claim, fromSnapshot(kind))
	for _, pod := range []string{name("same"), name("larger")} {
		m.user(h, pod, on(node))
	}
	for pod, want := range map[string]string{name("same"): "before", name("larger"): "before", name("clone"): "after"} {
		h.ready(pod)
		m.wantContent(h, pod, want)
	}
	h.removeSnapshot(kind)
	h.wantSnapshotGone(kind)
	m.wantContent(h, name("same"), "before")
}

// copied makes a snapshot where all data has to be copied: not while a pod writes.
func copied(h *harness) {
	h.Helper()
	h.claim("plain", "64Mi", ofClass("hostpath-csi-plain"))
	h.pod("plain", with("plain", "/volume"))
	node := h.ready("plain").Spec.NodeName
	h.mustRun("plain", "echo before >/volume/file")
	h.snapshot("plain", "plain")
	refused := h.snapshotUntil("plain", "refused", func(v volumeSnapshot) string {
		if strings.Contains(v.Status.Error.Message, "published") {
			return ""
		}
		return "it is " + v.String()
	})
	// What docs/snapshots.md has a user look at.
	h.wantDescribed("volumesnapshot", "plain", "CreatingSnapshot", "FailedPrecondition", "published")
	h.wantDescribed("volumesnapshotcontent", refused.Status.BoundVolumeSnapshotContentName, "SnapshotCreationFailed", "FailedPrecondition", "published")
	h.remove("plain")
	h.snapshotReady("plain")
	h.wantEvent("VolumeSnapshot", "plain", "SnapshotReady")
	h.claim("plain-restored", "64Mi", ofClass("hostpath-csi-plain"), fromSnapshot("plain"))
	h.pod("plain-restored", with("plain-restored", "/volume"), on(node))
	h.ready("plain-restored")
	media["directory"].wantContent(h, "plain-restored", "before")
	h.removeSnapshot("plain")
	h.wantSnapshotGone("plain")
}

// wantDescribed waits until kubectl says all of the words of an object and its events.
func (h *harness) wantDescribed(kind, name string, words ...string) {
	h.Helper()
	h.until(fmt.Sprintf("%s %s to be described with %q", kind, name, words), func(ctx context.Context) (string, error) {
		text, err := c.Kubectl(ctx, "--namespace="+h.namespace, "describe", kind, name)
		if err != nil || hasAll(text, words) {
			return "", err
		}
		return text, nil
	})
}

// wrongNode has the scheduler send a restore to a node that does not have the snapshot, and deletes the snapshot meanwhile.
func wrongNode(h *harness) {
	h.Helper()
	const label = "case.example.com/restore"
	h.claim("here", "64Mi")
	h.pod("here", with("here", "/volume"), on(nodeA))
	h.ready("here")
	h.mustRun("here", "echo before >/volume/file; sync -f /volume")
	h.snapshot("here", "here")
	h.snapshotReady("here")

	h.labelNode(nodeB, label, "yes")
	h.Cleanup(func() { h.labelNode(nodeA, label, "") })
	h.claim("elsewhere", "64Mi", fromSnapshot("here"))
	h.pod("elsewhere", with("elsewhere", "/volume"), func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{label: "yes"} })
	h.wantEvent("PersistentVolumeClaim", "elsewhere", "ProvisioningFailed", "ResourceExhausted", "not on node "+nodeB)
	h.removeSnapshot("here")
	h.snapshotUntil("here", "kept for the restore", func(v volumeSnapshot) string {
		if v.DeletionTimestamp != nil && len(v.Finalizers) > 0 {
			return ""
		}
		return fmt.Sprintf("it has the finalizers %q", v.Finalizers)
	})
	h.labelNode(nodeA, label, "yes")
	h.labelNode(nodeB, label, "")
	if got := h.ready("elsewhere").Spec.NodeName; got != nodeA {
		h.Errorf("the pod is on %s", got)
	}
	media["directory"].wantContent(h, "elsewhere", "before")
	h.wantSnapshotGone("here")
}

// operatorRestores makes a snapshot with what the operator deploys. Without the operator's webhook what is made of it goes to the
// node that the scheduler likes best, and fails there. With it that comes at once to the node which has the snapshot.
func operatorRestores(h *harness) {
	h.Helper()
	h.kubectl("apply", "-f", operatorDir+"/example/snapshots/volumesnapshotclass.yaml")
	class := ofClass(operatorClass)
	h.claim("source", "64Mi", class)
	h.pod("source", with("source", "/volume"), on(nodeA))
	h.ready("source")
	h.mustRun("source", "echo before >/volume/file; sync -f /volume")
	h.snapshot("operated", "source")
	h.snapshotReady("operated")

	h.kubectl("delete", "mutatingwebhookconfiguration", "hostpath-provisioner-operator-restores")
	h.claim("unaided", "64Mi", class, fromSnapshot("operated"))
	h.pod("unaided", with("unaided", "/volume"), preferring(nodeB))
	h.wantEvent("PersistentVolumeClaim", "unaided", "ProvisioningFailed", "ResourceExhausted", "not on node "+nodeB)
	h.remove("unaided")
	// Not later: it marks the snapshot as used with each attempt.
	must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(h.Context(), "unaided", metav1.DeleteOptions{}))

	h.kubectl("apply", "-k", restoresDir)
	h.Cleanup(func() {
		if out, err := c.Kubectl(context.Background(), "delete", "-k", restoresDir, "--ignore-not-found", "--timeout=1m"); err != nil {
			h.Error(out, err)
		}
	})
	h.until("the webhook to answer", func(ctx context.Context) (string, error) {
		node, err := h.selectedNode(ctx, class, fromSnapshot("operated"))
		if err != nil || node == nodeA {
			return "", err
		}
		return "the claim is for the node " + strconv.Quote(node), nil
	})
	for name, source := range map[string]func(*corev1.PersistentVolumeClaim){"restored": fromSnapshot("operated"), "cloned": fromClaim("source")} {
		h.claimFor(nodeA, name, class, source)
		h.pod(name, with(name, "/volume"), preferring(nodeB))
	}
	for _, name := range []string{"restored", "cloned"} {
		if got := h.ready(name).Spec.NodeName; got != nodeA {
			h.Errorf("the pod %s is on %s", name, got)
		}
		media["directory"].wantContent(h, name, "before")
		h.wantNoEvent("PersistentVolumeClaim", name, "ProvisioningFailed")
	}

	// An operator that is away keeps no user from making a claim.
	h.scaleOperator(0)
	node, err := h.selectedNode(h.Context(), class, fromSnapshot("operated"))
	if node != "" || err != nil {
		h.Errorf("without the operator the claim is for the node %q (%v)", node, err)
	}
	h.scaleOperator(1)
	h.removeSnapshot("operated")
	h.remove("source", "restored", "cloned")
	for _, name := range []string{"source", "restored", "cloned"} {
		h.removeClaim(name)
	}
	h.wantSnapshotGone("operated")
}

// selectedNode is the node that a claim would be made on as soon as it is there.
func (h *harness) selectedNode(ctx context.Context, changes ...func(*corev1.PersistentVolumeClaim)) (string, error) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "tried"}, Spec: claimSpec("", "64Mi")}
	for _, change := range changes {
		change(claim)
	}
	made, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Create(ctx, claim, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return "", err
	}
	return made.Annotations[selectedNode], nil
}

// claimFor makes a claim that the webhook sends to a node. The API server waits 2 s for the webhook, and then makes the claim as it
// is: on a busy machine it is made again.
func (h *harness) claimFor(node, name string, changes ...func(*corev1.PersistentVolumeClaim)) {
	h.Helper()
	claims := c.Client.CoreV1().PersistentVolumeClaims(h.namespace)
	h.until(fmt.Sprintf("claim %s to be made for %s", name, node), func(ctx context.Context) (string, error) {
		made, err := claims.Create(ctx, newClaim(name, "64Mi", changes...), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return "the one before is being deleted", nil
		}
		if err != nil || made.Annotations[selectedNode] == node {
			return "", err
		}
		return fmt.Sprintf("it is for %q", made.Annotations[selectedNode]), claims.Delete(ctx, name, metav1.DeleteOptions{})
	})
}

// wantNoEvent says that there is no event for a reason about an object.
func (h *harness) wantNoEvent(kind, name, reason string) {
	h.Helper()
	events, err := c.Client.CoreV1().Events(h.namespace).List(h.Context(), metav1.ListOptions{})
	must.Succeed(h, err)
	for _, e := range events.Items {
		if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason {
			h.Errorf("%s %s has the event %s: %s", kind, name, e.Reason, e.Message)
		}
	}
}

// scaleOperator sets the number of operators, and waits until there are so many.
func (h *harness) scaleOperator(replicas int) {
	h.Helper()
	const name = "hostpath-provisioner-operator"
	h.kubectl("--namespace="+cluster.Namespace, "scale", "deployment", name, fmt.Sprintf("--replicas=%d", replicas))
	h.until(fmt.Sprintf("%d operators", replicas), func(ctx context.Context) (string, error) {
		pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "name=" + name})
		if err != nil {
			return "", err
		}
		ready := 0
		for _, pod := range pods.Items {
			if podReady(pod) {
				ready++
			}
		}
		if len(pods.Items) == replicas && ready == replicas {
			return "", nil
		}
		return fmt.Sprintf("%d, of which %d are ready", len(pods.Items), ready), nil
	})
}

// labelNode gives a node a label, or takes it away if the value is empty.
func (h *harness) labelNode(node, label, value string) {
	h.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {%q: %q}}}`, label, value)
	if value == "" {
		patch = fmt.Sprintf(`{"metadata": {"labels": {%q: null}}}`, label)
	}
	if _, err := c.Client.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		h.Fatal(err)
	}
}
