package cases_test

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// While a pod writes, its cluster changes: from pathConfig, which is of the upstream operator, to a pool, to a newer operator and not back to an
// older one. Kinds come and go. The pod's node is cordoned, takes no pods any more, is deleted, and comes back. Each time the driver is where it
// should be, and says so.
func TestOperatorOnChangingCluster(t *testing.T) {
	const name, preCSI = "changing", "hostpath-operator-pre-csi"
	h := begin(t)
	client := h.withOperator()
	h.class(operatorLegacyClass, "legacy", storagev1.VolumeBindingWaitForFirstConsumer)
	if _, err := c.Client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: preCSI}, Provisioner: "kubevirt.io/hostpath-provisioner",
		VolumeBindingMode: pointer(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.removeClass(preCSI) })
	h.upstreamObjects("testdata/upstream-legacy.yaml")
	const uid = "jsonpath={.metadata.uid}"
	upstream := h.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", uid)
	if _, err := client.Create(t.Context(), provisioner(t, name, "pathConfig: {path: /var/hpvolumes}\nfeatureGates: [Snapshotting]"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.endProvisioner(name) })
	h.condition(client, name, "RolledOut", "True")
	h.wantTakenOver("daemonset", "serviceaccount", "clusterrole", "clusterrolebinding")
	if now := h.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", uid); now != upstream {
		t.Error("the DaemonSet of the pre-CSI provisioner is another one")
	}
	if containers := h.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", "jsonpath={.spec.template.spec.containers[*].name}"); containers != "provisioner" {
		t.Errorf("its containers are %q", containers)
	}

	h.claim("data", "64Mi", ofClass(operatorLegacyClass))
	h.pod("writer", with("data", "/data"), doing(counting), on(nodeB), func(pod *corev1.Pod) {
		pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	})
	h.claim("old", "64Mi", ofClass(preCSI))
	h.pod("old", with("old", "/data"), on(nodeB))
	h.ready("old")
	volume, _, directory := h.hostPath("old")
	if path := volume.Spec.HostPath.Path; filepath.Dir(path) != "/var/hpvolumes" {
		t.Errorf("the volume of the pre-CSI provisioner is %s", path)
	}
	h.mustRun("old", "echo hello >/data/file; sync -f /data")
	h.wantFile(filepath.Join(directory, "file"), "hello\n")
	h.remove("old")
	must.Succeed(t, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(t.Context(), "old", metav1.DeleteOptions{}))
	h.wantVolumeGone(volume.Name, directory)
	all := []writer{{h.ready("writer"), filepath.Join(h.disk(h.volume("data")), "numbers")}}
	h.goOn(all)

	upgradeAndDowngrade(h, client, name)
	kindsComeAndGo(h, client, name)
	poolOnCordonedNode(h, client, name)
	h.goOn(all)
	h.wantUninterrupted(all)

	h.kubectl("apply", "-f", operatorDir+"/example/snapshots/volumesnapshotclass.yaml")
	h.snapshot("data", "data")
	content := h.contentOf(h.snapshotReady("data")).GetName()
	h.kubectl("taint", "node", nodeB, "example.com/leave=now:NoExecute")
	// It goes with the node.
	t.Cleanup(func() {
		if t.Failed() {
			_, _ = c.Kubectl(context.Background(), "taint", "node", nodeB, "example.com/leave-")
		}
	})
	h.usableOn(client, name, 1)
	h.goOn(all)
	h.wantUninterrupted(all)
	deleteNode(h, client, name, all, content)
}

// upgradeAndDowngrade has another operator take the object over, together with a change of the object.
func upgradeAndDowngrade(h *harness, client dynamic.ResourceInterface, name string) {
	h.Helper()
	patch := []byte(`{"spec":{"pathConfig":null,"storagePools":[{"name":"legacy","path":"/var/hpvolumes"}]}}`)
	if _, err := client.Patch(h.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		h.Fatal(err)
	}
	h.operatorOf("v1.0.0")
	h.until("the newer version to be rolled out", func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if version, _, _ := unstructured.NestedString(object.Object, "status", "observedVersion"); version != "v1.0.0" {
			return "rolled out is " + version, nil
		}
		return "", nil
	})
	sets, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).List(h.Context(), metav1.ListOptions{})
	if err != nil || len(sets.Items) != 1 {
		h.Fatalf("there are %d DaemonSets (%v), want that of the driver alone", len(sets.Items), err)
	}
	before := sets.Items[0].Generation

	h.operatorOf("v0.9.0")
	h.untilStatus(client, name, "the older version to be refused", "DowngradeRefused")
	set, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(h.Context(), operatorDaemonSet, metav1.GetOptions{})
	if err != nil || set.Generation != before {
		h.Errorf("the older operator has changed the DaemonSet (%v)", err)
	}
	h.operatorOf("v1.0.0")
	h.condition(client, name, "Degraded", "False")
}

// kindsComeAndGo adds kinds to the cluster that the operator has objects of, and removes them with their objects, twice.
func kindsComeAndGo(h *harness, client dynamic.ResourceInterface, name string) {
	h.Helper()
	const kinds = "testdata/openshift.yaml"
	h.Cleanup(func() { h.kubectl("delete", "--ignore-not-found", "-f", kinds) })
	for _, cpu := range []string{"6m", "5m"} {
		h.kubectl("apply", "-f", kinds)
		h.until("an object of a new kind", func(ctx context.Context) (string, error) {
			if out, err := c.Kubectl(ctx, "get", "securitycontextconstraints", "-o", "name"); err == nil && out != "" {
				return "", nil
			}
			return "there is none", nil
		})
		h.kubectl("delete", "-f", kinds)
		h.goesOn(client, name, mountersAskFor(cpu))
	}
	// The operator may notice later that the kind is gone, and rolls the DaemonSet out once more.
	const driver = "daemonset/hostpath-provisioner-csi"
	h.until("the pods to ask for no object of that kind", func(context.Context) (string, error) {
		return h.kubectl("get", driver, "-n", cluster.Namespace, "-o", `jsonpath={.spec.template.metadata.annotations.openshift\.io/required-scc}`), nil
	})
	h.kubectl("rollout", "status", driver, "-n", cluster.Namespace)
}

// mountersAskFor is a change of the spec that changes no pod of the driver.
func mountersAskFor(cpu string) string {
	return `{"resources":{"mounter":{"requests":{"cpu":"` + cpu + `"}}}}`
}

// goesOn changes the spec, and waits until the operator has taken that up and nothing is wrong.
func (h *harness) goesOn(client dynamic.ResourceInterface, name, spec string) {
	h.Helper()
	changed, err := client.Patch(h.Context(), name, types.MergePatchType, []byte(`{"spec":`+spec+`}`), metav1.PatchOptions{})
	must.Succeed(h, err)
	want := fmt.Sprintf("observedGeneration:%d reason:AsExpected status:False type:Degraded", changed.GetGeneration())
	h.untilStatus(client, name, "the operator to go on", want)
	h.condition(client, name, "RolledOut", "True")
}

// poolOnCordonedNode cordons the node of the writers. What runs there stays, and a pool on claims that is added is mounted there too.
func poolOnCordonedNode(h *harness, client dynamic.ResourceInterface, name string) {
	h.Helper()
	pods := func() string { // but for those that end
		return h.kubectl("get", "pods", "-n", cluster.Namespace, "-l", "app.kubernetes.io/name=hostpath-csi-driver", "-o",
			"go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.uid}} {{end}}{{end}}")
	}
	const legacy, late = `{"name":"legacy","path":"/var/hpvolumes"}`,
		`{"name":"late","path":"/var/late","pvcTemplate":{"storageClassName":"` + operatorLegacyClass + `","volumeMode":"Block","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"320Mi"}}}}`
	h.usableOn(client, name, len(c.Nodes))
	// In the middle of one there are as many pods as nodes too.
	h.kubectl("rollout", "status", "-n", cluster.Namespace, "daemonset/"+operatorDaemonSet, "--timeout=2m")
	h.until("the pods of earlier rollouts to be gone", func(context.Context) (string, error) {
		if left := pods(); len(strings.Fields(left)) != len(c.Nodes) {
			return left, nil
		}
		return "", nil
	})
	before := pods()
	h.kubectl("cordon", nodeB)
	cordoned := true
	h.Cleanup(func() {
		if cordoned {
			h.kubectl("uncordon", nodeB)
		}
	})
	h.goesOn(client, name, mountersAskFor("6m"))
	if after := pods(); after != before {
		h.Errorf("the pods of the driver are %s, and were %s before the node was cordoned", after, before)
	}
	h.goesOn(client, name, `{"storagePools":[`+legacy+`,`+late+`]}`)
	if file, err := c.Nodes[nodeB].Output(h.Context(), "findmnt", "--noheadings", "--output", "FSTYPE", "/var/late/csi"); err != nil || strings.TrimSpace(file) != "xfs" {
		h.Errorf("on the cordoned node the pool is %q, %v", file, err)
	}
	h.goesOn(client, name, `{"storagePools":[`+legacy+`]}`)
	h.poolsUnmounted(client, name)
	h.removePoolClaims("hpp-pool-late-"+nodeA, "hpp-pool-late-"+nodeB)
	h.kubectl("uncordon", nodeB)
	cordoned = false
}

// operatorOf replaces the operator by one that says it is of a version.
func (h *harness) operatorOf(version string) {
	h.Helper()
	const deployment = "deployment/hostpath-provisioner-operator"
	for _, args := range [][]string{{"set", "env", deployment, "VERSION=" + version}, {"rollout", "status", deployment, "--timeout=2m"}} {
		h.kubectl(append(args, "-n", cluster.Namespace)...)
	}
}

// usableOn waits until an object is available on so many nodes, and says so of its one pool.
func (h *harness) usableOn(client dynamic.ResourceInterface, name string, nodes int) {
	h.Helper()
	want := fmt.Sprintf("currentReady:%d desiredReady:%d", nodes, nodes)
	h.untilStatus(client, name, fmt.Sprintf("the pool to be usable on %d nodes", nodes), want)
	h.condition(client, name, "RolledOut", "True")
}

// deleteNode deletes the node of the writers, as one that is lost. What names it is reported, and removed as operator.md says,
// and the node can come back.
func deleteNode(h *harness, client dynamic.ResourceInterface, name string, all []writer, content string) {
	h.Helper()
	ctx := h.Context()
	volume, n := h.volume("data"), c.Nodes[nodeB]
	volumesToKeep(h)
	must.Succeed(h, n.StopKubelet(ctx))
	stopped := true
	h.Cleanup(func() {
		if stopped {
			must.Succeed(h, n.StartKubelet(context.Background()))
		}
	})
	h.kubectl("delete", "node", nodeB)
	h.deletedNode(client, name, "persistentVolumes:1", "claims:1", "volumeSnapshotContents:1")
	h.usableOn(client, name, 1)
	h.goOn(all)
	// The controller of pods deletes those of a node that is gone for 40 s, too.
	h.kubectl("delete", "pod", "writer", "-n", h.namespace, "--force", "--grace-period=0", "--ignore-not-found")
	removeAsDocumented(h, volume.Name, content)
	h.goOn(all)
	h.wantSnapshotGone("data")

	must.Succeed(h, n.StartKubelet(ctx))
	stopped = false
	h.usableOn(client, name, 2)
	// Only what is left of its pod asks for the volume.
	h.until("the volume to be unpublished", func(ctx context.Context) (string, error) {
		mounts, err := n.Output(ctx, "cat", "/proc/self/mountinfo")
		if err != nil || !strings.Contains(mounts, volume.Spec.CSI.VolumeHandle) {
			return "", err
		}
		return "it is mounted", nil
	})
	if last, err := all[0].last(); err != nil || last == 0 {
		h.Errorf("the data of the volume is gone: %d, %v", last, err)
	}
}

// volumesToKeep makes PersistentVolumes that have an affinity to the node of the writers, and are not to be removed with it: one is of another driver,
// and what says of the other that it is of the provisioner also says that it is on another node.
func volumesToKeep(h *harness) {
	h.Helper()
	var other, contradicting corev1.PersistentVolumeSource
	other.CSI = &corev1.CSIPersistentVolumeSource{Driver: "example.com", VolumeHandle: "other"}
	contradicting.HostPath = &corev1.HostPathVolumeSource{Path: "/var/hpvolumes/contradicting"}
	for name, source := range map[string]corev1.PersistentVolumeSource{"hostpath-of-another-driver": other, "hostpath-contradicting": contradicting} {
		volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, PersistentVolumeSource: source, StorageClassName: "kept",
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{nodeB}}},
			}}}},
		}}
		if source.HostPath != nil {
			volume.Annotations = map[string]string{"pv.kubernetes.io/provisioned-by": "kubevirt.io/hostpath-provisioner", "kubevirt.io/provisionOnNode": nodeA}
		}
		_, err := c.Client.CoreV1().PersistentVolumes().Create(h.Context(), volume, metav1.CreateOptions{})
		must.Succeed(h, err)
		h.Cleanup(func() { h.kubectl("delete", "pv", name) })
	}
}

// removeAsDocumented removes what names the deleted node, a claim's volume and the content of its snapshot, by the commands of operator.md.
func removeAsDocumented(h *harness, volume, content string) {
	h.Helper()
	blocks := h.documented("operator.md", "Deleted nodes")
	if len(blocks) != 3 {
		h.Fatalf("operator.md lists, checks and removes volumes of deleted nodes in %d blocks of commands, want 3", len(blocks))
	}
	of := strings.NewReplacer("NODE", nodeB, " NAMESPACE CLAIM", " "+h.namespace+" data", " PV", " "+volume)
	if listed := strings.Fields(h.shell(of.Replace(blocks[0]), "")); len(listed) != 9 || !slices.Equal(listed[:3], []string{volume, h.namespace, "data"}) {
		h.Errorf("operator.md lists %q, want the volume %s alone", listed, volume)
	}
	checked := regexp.MustCompile(` +`).ReplaceAllString(h.shell(of.Replace(blocks[1]), ""), " ")
	finalizers := strings.FieldsFunc(checked[strings.LastIndexByte(checked, '\n')+1:], func(r rune) bool { return strings.ContainsRune(`[,"]`, r) })
	slices.Sort(finalizers)
	if !hasAll(checked, []string{"Volume: " + volume + "\n", "Used By: <none>\n"}) ||
		!slices.Equal(finalizers, []string{"external-provisioner.volume.kubernetes.io/finalizer", "kubernetes.io/pv-protection"}) {
		h.Errorf("what operator.md has a user check is %s", checked)
	}
	h.kubectl("delete", "volumesnapshot", "-n", h.namespace, "data", "--wait=false")
	h.kubectl("delete", "volumesnapshotcontent", content, "--wait=false")
	h.kubectl("patch", "volumesnapshotcontent", content, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	h.shell(of.Replace(blocks[2]), "")
	h.until("the volume of the deleted node to be removed", func(ctx context.Context) (string, error) {
		left, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		} else if err != nil {
			return "", err
		}
		return string(left.Status.Phase), nil
	})
}

// deletedNode waits until the node of the writers is reported as deleted, in these words.
func (h *harness) deletedNode(client dynamic.ResourceInterface, name string, words ...string) {
	h.Helper()
	h.until("the deleted node to be reported", func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		deleted, _, _ := unstructured.NestedSlice(object.Object, "status", "deletedNodes")
		if text := fmt.Sprint(deleted); len(deleted) != 1 || !hasAll(text, append(words, "node:"+nodeB)) {
			return text, nil
		}
		return "", nil
	})
}
