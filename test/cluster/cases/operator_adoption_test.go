package cases_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// adoptedPools are the pools of testdata/upstream-objects.yaml, upstream-claims.yaml and upstream-pools.yaml.
const adoptedPools = `storagePools:
- {name: local, path: /var/hpvolumes}
- name: fast
  path: /var/adopted
  pvcTemplate: {storageClassName: disks, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 320Mi}}}
- name: everywhere
  path: /var/adopted-everywhere
  pvcTemplate: {storageClassName: "", volumeName: everywhere, accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}`

// A cluster of the upstream operator is taken over in place: the same objects, with what only the upstream one wanted
// removed from them, and the same volumes, in pods that go on. Neither a second driver nor a second DaemonSet appears. Pools with
// templates keep their claims, mounters and mounts, and are unmounted when the object is deleted.
func TestOperatorAdoptsUpstreamCluster(t *testing.T) {
	h := begin(t)
	client := h.withOperator()
	ctx := t.Context()
	scale := func(replicas string) {
		h.kubectl("-n", cluster.Namespace, "scale", "deployment", "hostpath-provisioner-operator", "--replicas="+replicas)
	}
	scale("0")
	h.upstreamObjects("testdata/upstream-objects.yaml")
	set := func() (uid, revision string) {
		got, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
		must.Succeed(t, err)
		return string(got.UID), fmt.Sprint(got.Generation)
	}
	uid, _ := set()
	h.claim("data", "64Mi", ofClass(operatorClass))
	h.pod("running", with("data", "/data"))
	h.ready("running")
	h.mustRun("running", "echo before >/data/file; sync -f /data")
	volume := h.volume("data")
	file := filepath.Join(h.disk(volume), "file")
	h.wantFile(file, "before\n")

	pools := h.upstreamPools()
	h.upstreamObject("earlier", adoptedPools)
	t.Cleanup(func() { h.endProvisioner("earlier") })
	h.withAPI(crdFile)
	// Of an earlier number than what the upstream operator observed, as ours are at first.
	h.operatorOf("v0.1.0")
	scale("1")
	h.condition(client, "earlier", "RolledOut", "True")
	h.condition(client, "earlier", "Available", "True")
	h.wantAdopted(pools)

	if now, _ := set(); now != uid {
		t.Error("the DaemonSet is another one")
	}
	got, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
	must.Succeed(t, err)
	var names []string
	for _, container := range got.Spec.Template.Spec.Containers {
		names = append(names, container.Name)
	}
	slices.Sort(names)
	if want := "csi-provisioner csi-resizer driver health-monitor livenessprobe node-driver-registrar"; strings.Join(names, " ") != want {
		t.Errorf("the containers are %q, want %q", names, want)
	}
	for _, v := range got.Spec.Template.Spec.Volumes {
		if strings.HasSuffix(v.Name, "-dir") {
			t.Errorf("the volume %s of the upstream operator is still there", v.Name)
		}
	}
	h.wantTakenOver("daemonset", "deployment", "clusterrole", "clusterrolebinding", "role", "rolebinding", "csidriver", "serviceaccount")
	role, err := c.Client.RbacV1().ClusterRoles().Get(ctx, "hostpath-provisioner-admin-csi", metav1.GetOptions{})
	must.Succeed(t, err)
	for _, rule := range role.Rules {
		if slices.Contains(rule.Resources, "nodes") {
			t.Error("a right that only the upstream operator gave is still there")
		}
	}

	// The pods go on with their volumes, and give them back.
	for _, name := range []string{"running", "on-fast"} {
		if got := h.mustRun(name, "echo after >>/data/file; cat /data/file"); got != "before\nafter\n" {
			t.Errorf("the pod %s reads %q", name, got)
		}
		pod, err := c.Client.CoreV1().Pods(h.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			t.Errorf("the pod %s was restarted %v times (%v)", name, pod.Status.ContainerStatuses, err)
		}
	}
	h.remove("on-fast")
	must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(ctx, "fast", metav1.DeleteOptions{}))
	h.remove("running")
	h.pod("next", with("data", "/data"))
	h.ready("next")
	if got := h.mustRun("next", "cat /data/file"); got != "before\nafter\n" {
		t.Errorf("the next pod reads %q", got)
	}
	h.remove("next")
	h.removeClaim("data")
	h.until("the volume to be gone", func(context.Context) (string, error) {
		found, err := filepath.Glob(filepath.Dir(file))
		return strings.Join(found, ""), err
	})
	h.deletedWhileUsed(client, "earlier", "fast")
	for name, mounted := range h.poolMounts() {
		if mounted != "" {
			t.Errorf("on %s is still mounted %s", name, mounted)
		}
	}
	h.removePoolClaims("hpp-pool-everywhere-shared", "hpp-pool-fast-node-a", "hpp-pool-fast-node-b")
}

// upstreamObjects makes what the upstream operator has made. The name of its field manager is the same as ours, but for the operation.
func (h *harness) upstreamObjects(file string) {
	h.Helper()
	h.kubectl("create", "--field-manager=hostpath-provisioner-operator", "-f", file)
}

// upstreamObject makes an object with the status that the upstream operator gives it, under its definition, and is the owner that
// it sets.
func (h *harness) upstreamObject(name, spec string) dynamic.ResourceInterface {
	h.Helper()
	client := h.withAPI("testdata/upstream-crd.yaml")
	text, err := os.ReadFile("../../../pkg/operator/testdata/upstream-object.yaml")
	must.Succeed(h, err)
	object := provisioner(h.T, name, spec)
	var upstream map[string]any
	must.Succeed(h, yaml.Unmarshal(text, &upstream))
	object.Object["status"] = upstream["status"]
	var uid types.UID
	h.until("the object to be made with its status", func(ctx context.Context) (string, error) {
		_, err := client.Create(ctx, object, metav1.CreateOptions{FieldManager: "hostpath-provisioner-operator"})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err.Error(), nil
		}
		made, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		version, _, _ := unstructured.NestedString(made.Object, "status", "observedVersion")
		if version == "" {
			return "the object has no version", client.Delete(ctx, name, metav1.DeleteOptions{})
		}
		uid = made.GetUID()
		return "", nil
	})
	owner := fmt.Sprintf(`{"metadata":{"ownerReferences":[{"apiVersion":"hostpathprovisioner.kubevirt.io/v1beta1","kind":"HostPathProvisioner",`+
		`"name":%q,"uid":%q,"controller":true,"blockOwnerDeletion":true}]}}`, name, uid)
	owned := h.kubectl("get", "-n", cluster.Namespace, "daemonset,deployment,serviceaccount", "-l", "k8s-app=hostpath-provisioner", "-o", "name")
	for _, one := range strings.Fields(owned) {
		h.kubectl("patch", "-n", cluster.Namespace, one, "--type=merge", "-p", owner)
	}
	return client
}

// wantTakenOver says that the operator has made all objects of some kinds its own.
func (h *harness) wantTakenOver(kinds ...string) {
	h.Helper()
	for _, kind := range kinds {
		out, err := c.Kubectl(h.Context(), "get", "-n", cluster.Namespace, kind, "-l", "k8s-app=hostpath-provisioner", "-o", "yaml")
		if err != nil || strings.Contains(out, "lastAppliedConfiguration") {
			h.Errorf("the annotation of the upstream operator is still on a %s (%v)", kind, err)
		}
		if strings.Contains(out, "kind: HostPathProvisioner") {
			h.Errorf("a %s still has the owner that the upstream operator has set", kind)
		}
	}
}

// deletedWhileUsed deletes an object while a pod has a volume in one of its pools on claims. The driver stays until that pod has ended, and then
// everything goes.
func (h *harness) deletedWhileUsed(client dynamic.ResourceInterface, name, pool string) {
	h.Helper()
	ctx := h.Context()
	h.until("the volumes of claims to be deleted", h.volumesOf(h.namespace))
	h.pod("user", withVolume(corev1.VolumeMount{MountPath: "/data"}, corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: cluster.DriverName, VolumeAttributes: map[string]string{"storagePool": pool, "size": "32Mi"}},
	}))
	h.ready("user")
	must.Succeed(h, client.Delete(ctx, name, metav1.DeleteOptions{}))
	h.untilStatus(client, name, "the status to name the pod that uses the pool", "pod "+h.namespace+"/user")
	h.condition(client, name, "Available", "False")
	if _, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{}); err != nil {
		h.Errorf("the pod cannot end without a driver: %v", err)
	}
	h.remove("user")
	h.until("the object to be gone", func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		return fmt.Sprint(object.Object["status"]), nil
	})
}

// upstreamPools makes what the upstream operator has of pools with templates, mounted on each node, and a pod with a volume in one of
// them. It returns what is to stay.
func (h *harness) upstreamPools() (kept map[string]string) {
	h.Helper()
	const class = "hostpath-operator-fast"
	h.class(class, "fast", storagev1.VolumeBindingWaitForFirstConsumer)
	sharedDirectory(h)
	for name := range c.Nodes {
		h.diskOf(name)
	}
	h.upstreamObjects("testdata/upstream-claims.yaml")
	h.mountUpstream()
	h.claim("fast", "32Mi", ofClass(class))
	h.pod("on-fast", with("fast", "/data"))
	h.ready("on-fast")
	h.mustRun("on-fast", "echo before >/data/file; sync -f /data")
	return h.poolState()
}

// mountUpstream makes the mounters of the upstream operator, and mounts what they would mount, if that has a filesystem as it is.
func (h *harness) mountUpstream() {
	h.Helper()
	ctx := h.Context()
	h.upstreamObjects("testdata/upstream-pools.yaml")
	h.until("the mounters to be ready", mountersReady)
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "hpp-pool"})
	must.Succeed(h, err)
	for _, pod := range pods.Items {
		mount := "mkdir -p /var/adopted-everywhere/csi && mount --bind " + filepath.Join(c.Sandbox.Dir, "everywhere") + " /var/adopted-everywhere/csi"
		if pod.Labels["hpp-pool"] == "fast-hpp" {
			mount = fmt.Sprintf("{ blkid -p %[1]s || mkfs.xfs -q %[1]s; } && mkdir -p /var/adopted/csi && mount %[1]s /var/adopted/csi", h.loopOf(pod.Name))
		}
		if out, err := c.Nodes[pod.Spec.NodeName].Output(ctx, "sh", "-ec", mount); err != nil {
			h.Fatal(out, err)
		}
	}
	// This driver, which stands in for the upstream one, serves what is mounted over a pool that it knows only from its next start on.
	h.kubectl("delete", "pod", "-n", cluster.Namespace, "-l", "k8s-app=hostpath-provisioner,!hpp-pool")
}

// diskOf gives a node a disk, as a PersistentVolume of a class without a provisioner.
func (h *harness) diskOf(node string) {
	h.Helper()
	ctx, n, file := h.Context(), c.Nodes[node], filepath.Join(c.Sandbox.Dir, "disk-of-"+node)
	must.Succeed(h, os.WriteFile(file, nil, 0o600))
	must.Succeed(h, os.Truncate(file, 320<<20))
	device, err := n.Output(ctx, "losetup", "--find", "--show", file)
	must.Succeed(h, err)
	device = strings.TrimSpace(device)
	h.Cleanup(func() {
		_, err := n.Output(context.Background(), "losetup", "--detach", device)
		must.Succeed(h, errors.Join(err, os.Remove(file)))
	})
	block := corev1.PersistentVolumeBlock
	_, err = c.Client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "disk-of-" + node},
		Spec: corev1.PersistentVolumeSpec{
			StorageClassName:              "disks",
			VolumeMode:                    &block,
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("320Mi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: device}},
			ClaimRef:                      &corev1.ObjectReference{Namespace: cluster.Namespace, Name: "hpp-pool-fast-" + node},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}}},
		},
	}, metav1.CreateOptions{})
	must.Succeed(h, err)
}

// loopOf is the loop device that a mounter has its claim as.
func (h *harness) loopOf(pod string) string {
	h.Helper()
	out, err := h.exec(cluster.Namespace, pod, "", "stat", "-c", "%T", "/dev/data")
	must.Succeed(h, err)
	minor, err := strconv.ParseUint(strings.TrimSpace(out), 16, 32)
	must.Succeed(h, err)
	return fmt.Sprintf("/dev/loop%d", minor)
}

// poolState has the mounts of pools on each node, and the UIDs of what the pools consist of.
func (h *harness) poolState() map[string]string {
	h.Helper()
	state := h.poolMounts()
	out, err := c.Kubectl(h.Context(), "get", "-n", cluster.Namespace, "deployment,pvc,storageclass", "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{"\n"}{end}`)
	if err != nil {
		h.Fatal(out, err)
	}
	for line := range strings.Lines(out) {
		if object, uid, _ := strings.Cut(strings.TrimSpace(line), " "); strings.Contains(object, "/hpp-") {
			state[object] = uid
		}
	}
	return state
}

// poolMounts are the lines of each node's mount table for the pools of testdata/upstream-pools.yaml.
func (h *harness) poolMounts() map[string]string {
	h.Helper()
	mounts := map[string]string{}
	for name, n := range c.Nodes {
		table, err := n.Output(h.Context(), "cat", "/proc/self/mountinfo")
		must.Succeed(h, err)
		for line := range strings.Lines(table) {
			if strings.Contains(line, " /var/adopted") {
				mounts[name] += line
			}
		}
	}
	return mounts
}

// wantAdopted says that pools consist of the same claims, mounters and mounts as before, and that the mounters are of this operator.
func (h *harness) wantAdopted(before map[string]string) {
	h.Helper()
	if len(before) != len(c.Nodes)*4+2 {
		h.Errorf("the upstream operator is to have, on each node, mounts and two mounters and a claim, and one claim and a class for all: %v", before)
	}
	if diff := cmp.Diff(before, h.poolState()); diff != "" {
		h.Errorf("the pools are not what they were (-want +got):\n%s", diff)
	}
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(h.Context(), metav1.ListOptions{LabelSelector: "hpp-pool"})
	must.Succeed(h, err)
	for _, pod := range pods.Items {
		if image := pod.Spec.Containers[0].Image; pod.DeletionTimestamp == nil && image != "localhost/pool-mounter:test" {
			h.Errorf("the mounter %s has the image %s", pod.Name, image)
		}
	}
}
