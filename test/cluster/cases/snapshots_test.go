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

// in is the scene of a subtest.
func (s *scene) in(t *testing.T) *scene { return &scene{T: t, namespace: s.namespace} }

func (s *scene) snapshots() dynamic.ResourceInterface {
	s.Helper()
	client, err := snapshotKinds("volumesnapshots", s.namespace)
	must.Succeed(s, err)
	return client
}

// snapshot asks for one of a claim.
func (s *scene) snapshot(name, claim string) {
	s.Helper()
	s.snapshotOfClass("hostpath-csi", name, claim)
}

func (s *scene) snapshotOfClass(class, name, claim string) {
	s.Helper()
	if _, err := s.snapshots().Create(s.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": snapshotGroup + "/v1",
		"kind":       "VolumeSnapshot",
		"metadata":   map[string]any{"name": name},
		"spec": map[string]any{
			"volumeSnapshotClassName": class,
			"source":                  map[string]any{"persistentVolumeClaimName": claim},
		},
	}}, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
}

// snapshotUntil waits until a snapshot is as a check wants it, which says what is missing.
func (s *scene) snapshotUntil(name, what string, check func(volumeSnapshot) string) volumeSnapshot {
	s.Helper()
	var found volumeSnapshot
	client := s.snapshots()
	s.until("snapshot "+name+" to be "+what, func(ctx context.Context) (string, error) {
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

func (s *scene) snapshotReady(name string) volumeSnapshot {
	s.Helper()
	return s.snapshotUntil(name, "ready", func(v volumeSnapshot) string {
		if v.Status.ReadyToUse {
			return ""
		}
		return "it is " + v.String()
	})
}

// contentOf is the VolumeSnapshotContent of a snapshot that has one.
func (s *scene) contentOf(snapshot volumeSnapshot) *unstructured.Unstructured {
	s.Helper()
	client, err := snapshotKinds("volumesnapshotcontents", "")
	must.Succeed(s, err)
	content, err := client.Get(s.Context(), snapshot.Status.BoundVolumeSnapshotContentName, metav1.GetOptions{})
	must.Succeed(s, err)
	return content
}

// removeSnapshot deletes a snapshot, without waiting for it.
func (s *scene) removeSnapshot(name string) {
	s.Helper()
	must.Succeed(s, s.snapshots().Delete(s.Context(), name, metav1.DeleteOptions{}))
}

// wantSnapshotGone waits until a snapshot is gone.
func (s *scene) wantSnapshotGone(name string) {
	s.Helper()
	client := s.snapshots()
	s.until("snapshot "+name+" to be gone", func(ctx context.Context) (string, error) {
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
func (m medium) user(s *scene, claim string, changes ...func(*corev1.Pod)) {
	s.Helper()
	s.pod(claim, append(changes, m.with(claim, "/volume"))...)
}

// wantContent says what a pod reads.
func (m medium) wantContent(s *scene, pod, want string) {
	s.Helper()
	if got := strings.TrimSpace(s.mustRun(pod, m.read)); got != want {
		s.Errorf("%s reads %q, want %q", pod, got, want)
	}
}

// What is in a volume at one moment is in its snapshot, and in what is made of that, whatever becomes of the volume. A clone
// has what is in the volume.
func TestSnapshots(t *testing.T) {
	s := begin(t)
	t.Run("directory", func(t *testing.T) {
		t.Parallel()
		s := s.in(t)
		restores(s, "directory", nodeA)
		s.mustRun("directory-larger", "dd if=/dev/zero of=/volume/big bs=1M count=100")
		s.wantNoSpace("directory-larger", "dd if=/dev/zero of=/volume/bigger bs=1M count=50")
		s.wantNoSpace("directory-same", "dd if=/dev/zero of=/volume/big bs=1M count=80")
	})
	t.Run("device", func(t *testing.T) {
		t.Parallel()
		s := s.in(t)
		restores(s, "device", nodeB)
		for pod, want := range map[string]int64{"device-same": 64 * mib, "device-larger": 128 * mib} {
			if got := s.deviceSize(pod, "/volume"); got != want {
				t.Errorf("the device of %s has %d bytes, want %d", pod, got, want)
			}
		}
	})
	t.Run("in use on a filesystem that copies", func(t *testing.T) {
		t.Parallel()
		copied(s.in(t))
	})
	t.Run("restore on the wrong node, and deleted meanwhile", func(t *testing.T) {
		t.Parallel()
		wrongNode(s.in(t))
	})
}

// restores makes a snapshot and a clone of a volume in use, deletes the volume, and makes volumes of the snapshot.
func restores(s *scene, kind, node string) {
	s.Helper()
	m := media[kind]
	name := func(of string) string { return kind + "-" + of }
	s.claim(name("source"), "64Mi", m.claim)
	m.user(s, name("source"), on(node))
	s.ready(name("source"))
	s.mustRun(name("source"), fmt.Sprintf(m.write, "before"))

	s.snapshot(kind, name("source"))
	made := s.snapshotReady(kind)
	if got := s.contentOf(made).GetLabels()[managedBy]; got != node {
		s.Errorf("the snapshot is for %q to make, want %s", got, node)
	}
	if got := fmt.Sprint(made.Status.RestoreSize); got != "64Mi" {
		s.Errorf("the snapshot can be restored to %s, want 64Mi", got)
	}
	s.mustRun(name("source"), fmt.Sprintf(m.write, "after"))
	s.claim(name("clone"), "64Mi", m.claim, fromClaim(name("source")))
	m.user(s, name("clone"), on(node))
	s.ready(name("clone"))
	s.remove(name("source"))
	s.removeClaim(name("source"))

	s.claim(name("same"), "64Mi", m.claim, fromSnapshot(kind))
	s.claim(name("larger"), "128Mi", m.claim, fromSnapshot(kind))
	for _, pod := range []string{name("same"), name("larger")} {
		m.user(s, pod, on(node))
	}
	for pod, want := range map[string]string{name("same"): "before", name("larger"): "before", name("clone"): "after"} {
		s.ready(pod)
		m.wantContent(s, pod, want)
	}
	s.removeSnapshot(kind)
	s.wantSnapshotGone(kind)
	m.wantContent(s, name("same"), "before")
}

// copied makes a snapshot where all data has to be copied: not while a pod writes.
func copied(s *scene) {
	s.Helper()
	s.claim("plain", "64Mi", ofClass("hostpath-csi-plain"))
	s.pod("plain", with("plain", "/volume"))
	node := s.ready("plain").Spec.NodeName
	s.mustRun("plain", "echo before >/volume/file")
	s.snapshot("plain", "plain")
	refused := s.snapshotUntil("plain", "refused", func(v volumeSnapshot) string {
		if strings.Contains(v.Status.Error.Message, "published") {
			return ""
		}
		return "it is " + v.String()
	})
	// What docs/snapshots.md has a user look at.
	s.wantDescribed("volumesnapshot", "plain", "CreatingSnapshot", "FailedPrecondition", "published")
	s.wantDescribed("volumesnapshotcontent", refused.Status.BoundVolumeSnapshotContentName, "SnapshotCreationFailed", "FailedPrecondition", "published")
	s.remove("plain")
	s.snapshotReady("plain")
	s.wantEvent("VolumeSnapshot", "plain", "SnapshotReady")
	s.claim("plain-restored", "64Mi", ofClass("hostpath-csi-plain"), fromSnapshot("plain"))
	s.pod("plain-restored", with("plain-restored", "/volume"), on(node))
	s.ready("plain-restored")
	media["directory"].wantContent(s, "plain-restored", "before")
	s.removeSnapshot("plain")
	s.wantSnapshotGone("plain")
}

// wantDescribed waits until kubectl says all of the words of an object and its events.
func (s *scene) wantDescribed(kind, name string, words ...string) {
	s.Helper()
	s.until(fmt.Sprintf("%s %s to be described with %q", kind, name, words), func(ctx context.Context) (string, error) {
		text, err := c.Kubectl(ctx, "--namespace="+s.namespace, "describe", kind, name)
		if err != nil || hasAll(text, words) {
			return "", err
		}
		return text, nil
	})
}

// wrongNode has the scheduler send a restore to a node that does not have the snapshot, and deletes the snapshot meanwhile.
func wrongNode(s *scene) {
	s.Helper()
	const label = "case.example.com/restore"
	s.claim("here", "64Mi")
	s.pod("here", with("here", "/volume"), on(nodeA))
	s.ready("here")
	s.mustRun("here", "echo before >/volume/file; sync -f /volume")
	s.snapshot("here", "here")
	s.snapshotReady("here")

	s.labelNode(nodeB, label, "yes")
	s.Cleanup(func() { s.labelNode(nodeA, label, "") })
	s.claim("elsewhere", "64Mi", fromSnapshot("here"))
	s.pod("elsewhere", with("elsewhere", "/volume"), func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{label: "yes"} })
	s.wantEvent("PersistentVolumeClaim", "elsewhere", "ProvisioningFailed", "ResourceExhausted", "not on node "+nodeB)
	s.removeSnapshot("here")
	s.snapshotUntil("here", "kept for the restore", func(v volumeSnapshot) string {
		if v.DeletionTimestamp != nil && len(v.Finalizers) > 0 {
			return ""
		}
		return fmt.Sprintf("it has the finalizers %q", v.Finalizers)
	})
	s.labelNode(nodeA, label, "yes")
	s.labelNode(nodeB, label, "")
	if got := s.ready("elsewhere").Spec.NodeName; got != nodeA {
		s.Errorf("the pod is on %s", got)
	}
	media["directory"].wantContent(s, "elsewhere", "before")
	s.wantSnapshotGone("here")
}

// operatorRestores makes a snapshot with what the operator deploys. Without the operator's webhook what is made of it goes to the
// node that the scheduler likes best, and fails there. With it that comes at once to the node which has the snapshot.
func operatorRestores(s *scene) {
	s.Helper()
	s.kubectl("apply", "-f", operatorDir+"/example/snapshots/volumesnapshotclass.yaml")
	class := ofClass(operatorClass)
	s.claim("source", "64Mi", class)
	s.pod("source", with("source", "/volume"), on(nodeA))
	s.ready("source")
	s.mustRun("source", "echo before >/volume/file; sync -f /volume")
	s.snapshot("operated", "source")
	s.snapshotReady("operated")

	s.kubectl("delete", "mutatingwebhookconfiguration", "hostpath-provisioner-operator-restores")
	s.claim("unaided", "64Mi", class, fromSnapshot("operated"))
	s.pod("unaided", with("unaided", "/volume"), preferring(nodeB))
	s.wantEvent("PersistentVolumeClaim", "unaided", "ProvisioningFailed", "ResourceExhausted", "not on node "+nodeB)
	s.remove("unaided")
	// Not later: it marks the snapshot as used with each attempt.
	must.Succeed(s, c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Delete(s.Context(), "unaided", metav1.DeleteOptions{}))

	s.kubectl("apply", "-k", restoresDir)
	s.Cleanup(func() {
		if out, err := c.Kubectl(context.Background(), "delete", "-k", restoresDir, "--ignore-not-found", "--timeout=1m"); err != nil {
			s.Error(out, err)
		}
	})
	s.until("the webhook to answer", func(ctx context.Context) (string, error) {
		node, err := s.selectedNode(ctx, class, fromSnapshot("operated"))
		if err != nil || node == nodeA {
			return "", err
		}
		return "the claim is for the node " + strconv.Quote(node), nil
	})
	for name, source := range map[string]func(*corev1.PersistentVolumeClaim){"restored": fromSnapshot("operated"), "cloned": fromClaim("source")} {
		s.claimFor(nodeA, name, class, source)
		s.pod(name, with(name, "/volume"), preferring(nodeB))
	}
	for _, name := range []string{"restored", "cloned"} {
		if got := s.ready(name).Spec.NodeName; got != nodeA {
			s.Errorf("the pod %s is on %s", name, got)
		}
		media["directory"].wantContent(s, name, "before")
		s.wantNoEvent("PersistentVolumeClaim", name, "ProvisioningFailed")
	}

	// An operator that is away keeps no user from making a claim.
	s.scaleOperator(0)
	node, err := s.selectedNode(s.Context(), class, fromSnapshot("operated"))
	if node != "" || err != nil {
		s.Errorf("without the operator the claim is for the node %q (%v)", node, err)
	}
	s.scaleOperator(1)
	s.removeSnapshot("operated")
	s.remove("source", "restored", "cloned")
	for _, name := range []string{"source", "restored", "cloned"} {
		s.removeClaim(name)
	}
	s.wantSnapshotGone("operated")
}

// selectedNode is the node that a claim would be made on as soon as it is there.
func (s *scene) selectedNode(ctx context.Context, changes ...func(*corev1.PersistentVolumeClaim)) (string, error) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "tried"}, Spec: claimSpec("", "64Mi")}
	for _, change := range changes {
		change(claim)
	}
	made, err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Create(ctx, claim, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return "", err
	}
	return made.Annotations[selectedNode], nil
}

// claimFor makes a claim that the webhook sends to a node. The API server waits 2 s for the webhook, and then makes the claim as it
// is: on a busy machine it is made again.
func (s *scene) claimFor(node, name string, changes ...func(*corev1.PersistentVolumeClaim)) {
	s.Helper()
	claims := c.Client.CoreV1().PersistentVolumeClaims(s.namespace)
	s.until(fmt.Sprintf("claim %s to be made for %s", name, node), func(ctx context.Context) (string, error) {
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
func (s *scene) wantNoEvent(kind, name, reason string) {
	s.Helper()
	events, err := c.Client.CoreV1().Events(s.namespace).List(s.Context(), metav1.ListOptions{})
	must.Succeed(s, err)
	for _, e := range events.Items {
		if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason {
			s.Errorf("%s %s has the event %s: %s", kind, name, e.Reason, e.Message)
		}
	}
}

// scaleOperator sets the number of operators, and waits until there are so many.
func (s *scene) scaleOperator(replicas int) {
	s.Helper()
	const name = "hostpath-provisioner-operator"
	s.kubectl("--namespace="+cluster.Namespace, "scale", "deployment", name, fmt.Sprintf("--replicas=%d", replicas))
	s.until(fmt.Sprintf("%d operators", replicas), func(ctx context.Context) (string, error) {
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
func (s *scene) labelNode(node, label, value string) {
	s.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {%q: %q}}}`, label, value)
	if value == "" {
		patch = fmt.Sprintf(`{"metadata": {"labels": {%q: null}}}`, label)
	}
	if _, err := c.Client.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		s.Fatal(err)
	}
}
