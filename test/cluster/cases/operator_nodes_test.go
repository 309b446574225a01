package cases_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	s := begin(t)
	client := s.withOperator()
	s.class(operatorLegacyClass, "legacy", storagev1.VolumeBindingWaitForFirstConsumer)
	if _, err := c.Client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: preCSI}, Provisioner: "kubevirt.io/hostpath-provisioner",
		VolumeBindingMode: pointer(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.removeClass(preCSI) })
	s.upstreamObjects("testdata/upstream-legacy.yaml")
	const uid = "jsonpath={.metadata.uid}"
	upstream := s.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", uid)
	if _, err := client.Create(t.Context(), provisioner(t, name, "pathConfig: {path: /var/hpvolumes}\nfeatureGates: [Snapshotting]"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.endProvisioner(name) })
	s.condition(client, name, "RolledOut", "True")
	s.wantTakenOver("daemonset", "serviceaccount", "clusterrole", "clusterrolebinding")
	if now := s.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", uid); now != upstream {
		t.Error("the DaemonSet of the pre-CSI provisioner is another one")
	}
	if containers := s.kubectl("get", "daemonset", "-n", cluster.Namespace, "hostpath-provisioner", "-o", "jsonpath={.spec.template.spec.containers[*].name}"); containers != "provisioner" {
		t.Errorf("its containers are %q", containers)
	}

	s.claim("data", "64Mi", ofClass(operatorLegacyClass))
	s.pod("writer", with("data", "/data"), doing(counting), on(nodeB), func(pod *corev1.Pod) {
		pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	})
	s.claim("old", "64Mi", ofClass(preCSI))
	s.pod("old", with("old", "/data"), on(nodeB))
	s.ready("old")
	volume, _, directory := s.hostPath("old")
	if path := volume.Spec.HostPath.Path; filepath.Dir(path) != "/var/hpvolumes" {
		t.Errorf("the volume of the pre-CSI provisioner is %s", path)
	}
	s.mustRun("old", "echo hello >/data/file; sync -f /data")
	s.wantFile(filepath.Join(directory, "file"), "hello\n")
	s.remove("old")
	must.Succeed(t, c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Delete(t.Context(), "old", metav1.DeleteOptions{}))
	s.wantVolumeGone(volume.Name, directory)
	all := []writer{{s.ready("writer"), filepath.Join(s.disk(s.volume("data")), "numbers")}}
	s.goOn(all)

	upgradeAndDowngrade(s, client, name)
	kindsComeAndGo(s, client, name)
	poolOnCordonedNode(s, client, name)
	s.goOn(all)
	s.wantUninterrupted(all)

	s.kubectl("apply", "-f", operatorDir+"/example/snapshots/volumesnapshotclass.yaml")
	s.snapshot("data", "data")
	content := s.contentOf(s.snapshotReady("data")).GetName()
	s.kubectl("taint", "node", nodeB, "example.com/leave=now:NoExecute")
	// It goes with the node.
	t.Cleanup(func() {
		if t.Failed() {
			_, _ = c.Kubectl(context.Background(), "taint", "node", nodeB, "example.com/leave-")
		}
	})
	s.usableOn(client, name, 1)
	s.goOn(all)
	s.wantUninterrupted(all)
	deleteNode(s, client, name, all, content)
}

// upgradeAndDowngrade has another operator take the object over, together with a change of the object.
func upgradeAndDowngrade(s *scene, client dynamic.ResourceInterface, name string) {
	s.Helper()
	patch := []byte(`{"spec":{"pathConfig":null,"storagePools":[{"name":"legacy","path":"/var/hpvolumes"}]}}`)
	if _, err := client.Patch(s.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		s.Fatal(err)
	}
	s.operatorOf("v1.0.0")
	s.until("the newer version to be rolled out", func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if version, _, _ := unstructured.NestedString(object.Object, "status", "observedVersion"); version != "v1.0.0" {
			return "rolled out is " + version, nil
		}
		return "", nil
	})
	sets, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).List(s.Context(), metav1.ListOptions{})
	if err != nil || len(sets.Items) != 1 {
		s.Fatalf("there are %d DaemonSets (%v), want that of the driver alone", len(sets.Items), err)
	}
	before := sets.Items[0].Generation

	s.operatorOf("v0.9.0")
	s.untilStatus(client, name, "the older version to be refused", "DowngradeRefused")
	set, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(s.Context(), operatorDaemonSet, metav1.GetOptions{})
	if err != nil || set.Generation != before {
		s.Errorf("the older operator has changed the DaemonSet (%v)", err)
	}
	s.operatorOf("v1.0.0")
	s.condition(client, name, "Degraded", "False")
}

// kindsComeAndGo adds kinds to the cluster that the operator has objects of, and removes them with their objects, twice.
func kindsComeAndGo(s *scene, client dynamic.ResourceInterface, name string) {
	s.Helper()
	const kinds = "testdata/openshift.yaml"
	s.Cleanup(func() { s.kubectl("delete", "--ignore-not-found", "-f", kinds) })
	for _, cpu := range []string{"6m", "5m"} {
		s.kubectl("apply", "-f", kinds)
		s.until("an object of a new kind", func(ctx context.Context) (string, error) {
			if out, err := c.Kubectl(ctx, "get", "securitycontextconstraints", "-o", "name"); err == nil && out != "" {
				return "", nil
			}
			return "there is none", nil
		})
		s.kubectl("delete", "-f", kinds)
		s.goesOn(client, name, mountersAskFor(cpu))
	}
	// The operator may notice later that the kind is gone, and rolls the DaemonSet out once more.
	const driver = "daemonset/hostpath-provisioner-csi"
	s.until("the pods to ask for no object of that kind", func(context.Context) (string, error) {
		return s.kubectl("get", driver, "-n", cluster.Namespace, "-o", `jsonpath={.spec.template.metadata.annotations.openshift\.io/required-scc}`), nil
	})
	s.kubectl("rollout", "status", driver, "-n", cluster.Namespace)
}

// mountersAskFor is a change of the spec that changes no pod of the driver.
func mountersAskFor(cpu string) string {
	return `{"resources":{"mounter":{"requests":{"cpu":"` + cpu + `"}}}}`
}

// goesOn changes the spec, and waits until the operator has taken that up and nothing is wrong.
func (s *scene) goesOn(client dynamic.ResourceInterface, name, spec string) {
	s.Helper()
	changed, err := client.Patch(s.Context(), name, types.MergePatchType, []byte(`{"spec":`+spec+`}`), metav1.PatchOptions{})
	must.Succeed(s, err)
	want := fmt.Sprintf("observedGeneration:%d reason:AsExpected status:False type:Degraded", changed.GetGeneration())
	s.untilStatus(client, name, "the operator to go on", want)
	s.condition(client, name, "RolledOut", "True")
}

// poolOnCordonedNode cordons the node of the writers. What runs there stays, and a pool on claims that is added is mounted there too.
func poolOnCordonedNode(s *scene, client dynamic.ResourceInterface, name string) {
	s.Helper()
	pods := func() string {
		return s.kubectl("get", "pods", "-n", cluster.Namespace, "-l", "app.kubernetes.io/name=hostpath-csi-driver", "-o", "jsonpath={.items[*].metadata.uid}")
	}
	const legacy, late = `{"name":"legacy","path":"/var/hpvolumes"}`,
		`{"name":"late","path":"/var/late","pvcTemplate":{"storageClassName":"` + operatorLegacyClass + `","volumeMode":"Block","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"320Mi"}}}}`
	s.usableOn(client, name, len(c.Nodes))
	// In the middle of one there are as many pods as nodes too.
	s.kubectl("rollout", "status", "-n", cluster.Namespace, "daemonset/"+operatorDaemonSet, "--timeout=2m")
	s.until("the pods of earlier rollouts to be gone", func(context.Context) (string, error) {
		if left := pods(); len(strings.Fields(left)) != len(c.Nodes) {
			return left, nil
		}
		return "", nil
	})
	before := pods()
	s.kubectl("cordon", nodeB)
	cordoned := true
	s.Cleanup(func() {
		if cordoned {
			s.kubectl("uncordon", nodeB)
		}
	})
	s.goesOn(client, name, mountersAskFor("6m"))
	if after := pods(); after != before {
		s.Errorf("the pods of the driver are %s, and were %s before the node was cordoned", after, before)
	}
	s.goesOn(client, name, `{"storagePools":[`+legacy+`,`+late+`]}`)
	if file, err := c.Nodes[nodeB].Output(s.Context(), "findmnt", "--noheadings", "--output", "FSTYPE", "/var/late/csi"); err != nil || strings.TrimSpace(file) != "xfs" {
		s.Errorf("on the cordoned node the pool is %q, %v", file, err)
	}
	s.goesOn(client, name, `{"storagePools":[`+legacy+`]}`)
	s.poolsUnmounted(client, name)
	s.removePoolClaims("hpp-pool-late-"+nodeA, "hpp-pool-late-"+nodeB)
	s.kubectl("uncordon", nodeB)
	cordoned = false
}

// operatorOf replaces the operator by one that says it is of a version.
func (s *scene) operatorOf(version string) {
	s.Helper()
	const deployment = "deployment/hostpath-provisioner-operator"
	for _, args := range [][]string{{"set", "env", deployment, "VERSION=" + version}, {"rollout", "status", deployment, "--timeout=2m"}} {
		s.kubectl(append(args, "-n", cluster.Namespace)...)
	}
}

// usableOn waits until an object is available on so many nodes, and says so of its one pool.
func (s *scene) usableOn(client dynamic.ResourceInterface, name string, nodes int) {
	s.Helper()
	want := fmt.Sprintf("currentReady:%d desiredReady:%d", nodes, nodes)
	s.untilStatus(client, name, fmt.Sprintf("the pool to be usable on %d nodes", nodes), want)
	s.condition(client, name, "RolledOut", "True")
}

// deleteNode deletes the node of the writers, as one that is lost. What names it is reported, and removed as operator.md says,
// and the node can come back.
func deleteNode(s *scene, client dynamic.ResourceInterface, name string, all []writer, content string) {
	s.Helper()
	ctx := s.Context()
	volume, n := s.volume("data"), c.Nodes[nodeB]
	must.Succeed(s, n.StopKubelet(ctx))
	stopped := true
	s.Cleanup(func() {
		if stopped {
			must.Succeed(s, n.StartKubelet(context.Background()))
		}
	})
	s.kubectl("delete", "node", nodeB)
	s.deletedNode(client, name, "persistentVolumes:1", "claims:1", "volumeSnapshotContents:1")
	s.usableOn(client, name, 1)
	s.goOn(all)
	listed := s.kubectl("get", "pv", "-o", "custom-columns=PV:.metadata.name,NODE:..values[*],NAMESPACE:.spec.claimRef.namespace,CLAIM:.spec.claimRef.name")
	if !slices.ContainsFunc(strings.Split(listed, "\n"), func(line string) bool {
		return slices.Equal(strings.Fields(line), []string{volume.Name, nodeB, s.namespace, "data"})
	}) {
		s.Errorf("the PersistentVolumes are listed as %s", listed)
	}
	const withoutFinalizers = `{"metadata":{"finalizers":null}}`
	s.kubectl("delete", "volumesnapshot", "-n", s.namespace, "data", "--wait=false")
	s.kubectl("delete", "volumesnapshotcontent", content, "--wait=false")
	s.kubectl("patch", "volumesnapshotcontent", content, "--type=merge", "-p", withoutFinalizers)
	s.kubectl("delete", "pvc", "-n", s.namespace, "data", "--wait=false")
	s.kubectl("delete", "pv", volume.Name, "--wait=false")
	s.kubectl("patch", "pv", volume.Name, "--type=merge", "-p", withoutFinalizers)
	s.until("the volume of the deleted node to be removed", func(ctx context.Context) (string, error) {
		left, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		} else if err != nil {
			return "", err
		}
		return string(left.Status.Phase), nil
	})
	s.goOn(all)
	s.wantSnapshotGone("data")

	// The controller of pods deletes those of a node that is gone for 40 s, too.
	s.kubectl("delete", "pod", "writer", "-n", s.namespace, "--force", "--grace-period=0", "--ignore-not-found")
	must.Succeed(s, n.StartKubelet(ctx))
	stopped = false
	s.usableOn(client, name, 2)
	// Only what is left of its pod asks for the volume.
	s.until("the volume to be unpublished", func(ctx context.Context) (string, error) {
		mounts, err := n.Output(ctx, "cat", "/proc/self/mountinfo")
		if err != nil || !strings.Contains(mounts, volume.Spec.CSI.VolumeHandle) {
			return "", err
		}
		return "it is mounted", nil
	})
	if last, err := all[0].last(); err != nil || last == 0 {
		s.Errorf("the data of the volume is gone: %d, %v", last, err)
	}
}

// deletedNode waits until the node of the writers is reported as deleted, in these words.
func (s *scene) deletedNode(client dynamic.ResourceInterface, name string, words ...string) {
	s.Helper()
	s.until("the deleted node to be reported", func(ctx context.Context) (string, error) {
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
