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
	s := begin(t)
	client := s.withOperator()
	ctx := t.Context()
	scale := func(replicas string) {
		s.kubectl("-n", cluster.Namespace, "scale", "deployment", "hostpath-provisioner-operator", "--replicas="+replicas)
	}
	scale("0")
	s.upstreamObjects("testdata/upstream-objects.yaml")
	set := func() (uid, revision string) {
		got, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
		must.Succeed(t, err)
		return string(got.UID), fmt.Sprint(got.Generation)
	}
	uid, _ := set()
	s.claim("data", "64Mi", ofClass(operatorClass))
	s.pod("running", with("data", "/data"))
	s.ready("running")
	s.mustRun("running", "echo before >/data/file; sync -f /data")
	volume := s.volume("data")
	file := filepath.Join(s.disk(volume), "file")
	s.wantFile(file, "before\n")

	pools := s.upstreamPools()
	s.upstreamObject("earlier", adoptedPools)
	t.Cleanup(func() { s.endProvisioner("earlier") })
	s.withAPI(crdFile)
	// Of an earlier number than what the upstream operator observed, as ours are at first.
	s.operatorOf("v0.1.0")
	scale("1")
	s.condition(client, "earlier", "RolledOut", "True")
	s.condition(client, "earlier", "Available", "True")
	s.wantAdopted(pools)

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
	s.wantTakenOver("daemonset", "deployment", "clusterrole", "clusterrolebinding", "role", "rolebinding", "csidriver", "serviceaccount")
	role, err := c.Client.RbacV1().ClusterRoles().Get(ctx, "hostpath-provisioner-admin-csi", metav1.GetOptions{})
	must.Succeed(t, err)
	for _, rule := range role.Rules {
		if slices.Contains(rule.Resources, "nodes") {
			t.Error("a right that only the upstream operator gave is still there")
		}
	}

	// The pods go on with their volumes, and give them back.
	for _, name := range []string{"running", "on-fast"} {
		if got := s.mustRun(name, "echo after >>/data/file; cat /data/file"); got != "before\nafter\n" {
			t.Errorf("the pod %s reads %q", name, got)
		}
		pod, err := c.Client.CoreV1().Pods(s.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			t.Errorf("the pod %s was restarted %v times (%v)", name, pod.Status.ContainerStatuses, err)
		}
	}
	s.remove("on-fast")
	must.Succeed(s, c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Delete(ctx, "fast", metav1.DeleteOptions{}))
	s.remove("running")
	s.pod("next", with("data", "/data"))
	s.ready("next")
	if got := s.mustRun("next", "cat /data/file"); got != "before\nafter\n" {
		t.Errorf("the next pod reads %q", got)
	}
	s.remove("next")
	s.removeClaim("data")
	s.until("the volume to be gone", func(context.Context) (string, error) {
		found, err := filepath.Glob(filepath.Dir(file))
		return strings.Join(found, ""), err
	})
	s.deletedWhileUsed(client, "earlier", "fast")
	for name, mounted := range s.poolMounts() {
		if mounted != "" {
			t.Errorf("on %s is still mounted %s", name, mounted)
		}
	}
	s.removePoolClaims("hpp-pool-everywhere-shared", "hpp-pool-fast-node-a", "hpp-pool-fast-node-b")
}

// upstreamObjects makes what the upstream operator has made. The name of its field manager is the same as ours, but for the operation.
func (s *scene) upstreamObjects(file string) {
	s.Helper()
	s.kubectl("create", "--field-manager=hostpath-provisioner-operator", "-f", file)
}

// upstreamObject makes an object with the status that the upstream operator gives it, under its definition, and is the owner that
// it sets.
func (s *scene) upstreamObject(name, spec string) dynamic.ResourceInterface {
	s.Helper()
	client := s.withAPI("testdata/upstream-crd.yaml")
	text, err := os.ReadFile("../../../pkg/operator/testdata/upstream-object.yaml")
	must.Succeed(s, err)
	object := provisioner(s.T, name, spec)
	var upstream map[string]any
	must.Succeed(s, yaml.Unmarshal(text, &upstream))
	object.Object["status"] = upstream["status"]
	var uid types.UID
	s.until("the object to be made with its status", func(ctx context.Context) (string, error) {
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
	owned := s.kubectl("get", "-n", cluster.Namespace, "daemonset,deployment,serviceaccount", "-l", "k8s-app=hostpath-provisioner", "-o", "name")
	for _, one := range strings.Fields(owned) {
		s.kubectl("patch", "-n", cluster.Namespace, one, "--type=merge", "-p", owner)
	}
	return client
}

// wantTakenOver says that the operator has made all objects of some kinds its own.
func (s *scene) wantTakenOver(kinds ...string) {
	s.Helper()
	for _, kind := range kinds {
		out, err := c.Kubectl(s.Context(), "get", "-n", cluster.Namespace, kind, "-l", "k8s-app=hostpath-provisioner", "-o", "yaml")
		if err != nil || strings.Contains(out, "lastAppliedConfiguration") {
			s.Errorf("the annotation of the upstream operator is still on a %s (%v)", kind, err)
		}
		if strings.Contains(out, "kind: HostPathProvisioner") {
			s.Errorf("a %s still has the owner that the upstream operator has set", kind)
		}
	}
}

// deletedWhileUsed deletes an object while a pod has a volume in one of its pools on claims. The driver stays until that pod has ended, and then
// everything goes.
func (s *scene) deletedWhileUsed(client dynamic.ResourceInterface, name, pool string) {
	s.Helper()
	ctx := s.Context()
	s.until("the volumes of claims to be deleted", s.volumesOf(s.namespace))
	s.pod("user", withVolume(corev1.VolumeMount{MountPath: "/data"}, corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: cluster.DriverName, VolumeAttributes: map[string]string{"storagePool": pool, "size": "32Mi"}},
	}))
	s.ready("user")
	must.Succeed(s, client.Delete(ctx, name, metav1.DeleteOptions{}))
	s.untilStatus(client, name, "the status to name the pod that uses the pool", "pod "+s.namespace+"/user")
	s.condition(client, name, "Available", "False")
	if _, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{}); err != nil {
		s.Errorf("the pod cannot end without a driver: %v", err)
	}
	s.remove("user")
	s.until("the object to be gone", func(ctx context.Context) (string, error) {
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
func (s *scene) upstreamPools() (kept map[string]string) {
	s.Helper()
	const class = "hostpath-operator-fast"
	s.class(class, "fast", storagev1.VolumeBindingWaitForFirstConsumer)
	sharedDirectory(s)
	for name := range c.Nodes {
		s.diskOf(name)
	}
	s.upstreamObjects("testdata/upstream-claims.yaml")
	s.mountUpstream()
	s.claim("fast", "32Mi", ofClass(class))
	s.pod("on-fast", with("fast", "/data"))
	s.ready("on-fast")
	s.mustRun("on-fast", "echo before >/data/file; sync -f /data")
	return s.poolState()
}

// mountUpstream makes the mounters of the upstream operator, and mounts what they would mount, if that has a filesystem as it is.
func (s *scene) mountUpstream() {
	s.Helper()
	ctx := s.Context()
	s.upstreamObjects("testdata/upstream-pools.yaml")
	s.until("the mounters to be ready", mountersReady)
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "hpp-pool"})
	must.Succeed(s, err)
	for _, pod := range pods.Items {
		mount := "mkdir -p /var/adopted-everywhere/csi && mount --bind " + filepath.Join(c.Sandbox.Dir, "everywhere") + " /var/adopted-everywhere/csi"
		if pod.Labels["hpp-pool"] == "fast-hpp" {
			mount = fmt.Sprintf("{ blkid -p %[1]s || mkfs.xfs -q %[1]s; } && mkdir -p /var/adopted/csi && mount %[1]s /var/adopted/csi", s.loopOf(pod.Name))
		}
		if out, err := c.Nodes[pod.Spec.NodeName].Output(ctx, "sh", "-ec", mount); err != nil {
			s.Fatal(out, err)
		}
	}
	// This driver, which stands in for the upstream one, serves what is mounted over a pool that it knows only from its next start on.
	s.kubectl("delete", "pod", "-n", cluster.Namespace, "-l", "k8s-app=hostpath-provisioner,!hpp-pool")
}

// diskOf gives a node a disk, as a PersistentVolume of a class without a provisioner.
func (s *scene) diskOf(node string) {
	s.Helper()
	ctx, n, file := s.Context(), c.Nodes[node], filepath.Join(c.Sandbox.Dir, "disk-of-"+node)
	must.Succeed(s, os.WriteFile(file, nil, 0o600))
	must.Succeed(s, os.Truncate(file, 320<<20))
	device, err := n.Output(ctx, "losetup", "--find", "--show", file)
	must.Succeed(s, err)
	device = strings.TrimSpace(device)
	s.Cleanup(func() {
		_, err := n.Output(context.Background(), "losetup", "--detach", device)
		must.Succeed(s, errors.Join(err, os.Remove(file)))
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
	must.Succeed(s, err)
}

// loopOf is the loop device that a mounter has its claim as.
func (s *scene) loopOf(pod string) string {
	s.Helper()
	out, err := s.exec(cluster.Namespace, pod, "", "stat", "-c", "%T", "/dev/data")
	must.Succeed(s, err)
	minor, err := strconv.ParseUint(strings.TrimSpace(out), 16, 32)
	must.Succeed(s, err)
	return fmt.Sprintf("/dev/loop%d", minor)
}

// poolState has the mounts of pools on each node, and the UIDs of what the pools consist of.
func (s *scene) poolState() map[string]string {
	s.Helper()
	state := s.poolMounts()
	out, err := c.Kubectl(s.Context(), "get", "-n", cluster.Namespace, "deployment,pvc,storageclass", "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{"\n"}{end}`)
	if err != nil {
		s.Fatal(out, err)
	}
	for line := range strings.Lines(out) {
		if object, uid, _ := strings.Cut(strings.TrimSpace(line), " "); strings.Contains(object, "/hpp-") {
			state[object] = uid
		}
	}
	return state
}

// poolMounts are the lines of each node's mount table for the pools of testdata/upstream-pools.yaml.
func (s *scene) poolMounts() map[string]string {
	s.Helper()
	mounts := map[string]string{}
	for name, n := range c.Nodes {
		table, err := n.Output(s.Context(), "cat", "/proc/self/mountinfo")
		must.Succeed(s, err)
		for line := range strings.Lines(table) {
			if strings.Contains(line, " /var/adopted") {
				mounts[name] += line
			}
		}
	}
	return mounts
}

// wantAdopted says that pools consist of the same claims, mounters and mounts as before, and that the mounters are of this operator.
func (s *scene) wantAdopted(before map[string]string) {
	s.Helper()
	if len(before) != len(c.Nodes)*4+2 {
		s.Errorf("the upstream operator is to have, on each node, mounts and two mounters and a claim, and one claim and a class for all: %v", before)
	}
	if diff := cmp.Diff(before, s.poolState()); diff != "" {
		s.Errorf("the pools are not what they were (-want +got):\n%s", diff)
	}
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(s.Context(), metav1.ListOptions{LabelSelector: "hpp-pool"})
	must.Succeed(s, err)
	for _, pod := range pods.Items {
		if image := pod.Spec.Containers[0].Image; pod.DeletionTimestamp == nil && image != "localhost/pool-mounter:test" {
			s.Errorf("the mounter %s has the image %s", pod.Name, image)
		}
	}
}
