package cases_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A pool with a template gets a claim and a mounter on each node, or one claim for all of them, and serves volumes. It grows
// with its template, and mounters that are killed are no loss. What is changed or removed by hand comes back, what others added stays,
// and then nothing is written any more. Added again with another path before it is unmounted, while the operator is killed, the pool is at its
// new path only. Removed from the object, it is unmounted on each node, although another pool's name is the beginning of its own, and its claims
// stay.
// The cluster has the kinds of OpenShift and of the Prometheus operator too, and what the upstream operator has made of them.
func TestOperatorWithPoolOnClaims(t *testing.T) {
	const class = "hostpath-operator-claims"
	h := begin(t)
	client := h.withOperator()
	ctx := t.Context()
	h.class(class, "local-fast", storagev1.VolumeBindingWaitForFirstConsumer)
	h.apply("-f", "testdata/openshift.yaml")
	h.installKinds()
	h.applyText(`{apiVersion: config.openshift.io/v1, kind: APIServer, metadata: {name: cluster}, spec: {tlsSecurityProfile: {type: Modern, modern: {}}}}`)
	h.upstreamObjects("testdata/upstream-monitoring.yaml")
	sharedDirectory(h)
	pools := func(size string) string {
		return `storagePools:
- {name: local, path: /var/hpvolumes}
- name: local-fast
  path: /var/fast
  pvcTemplate: {storageClassName: ` + operatorClass + `, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: ` + size + `}}}
- name: everywhere
  path: /var/everywhere
  pvcTemplate: {storageClassName: "", volumeName: everywhere, accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}`
	}
	if _, err := client.Create(ctx, provisioner(t, "claims", pools("320Mi")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.endProvisioner("claims") })
	h.condition(client, "claims", "RolledOut", "True")
	h.wantTakenOver("securitycontextconstraints", "prometheusrule", "servicemonitor", "role", "rolebinding")
	// That of the upstream operator keeps its cluster IP, which cannot be changed. Made anew it has none.
	h.kubectl("delete", "service", "-n", cluster.Namespace, "hpp-prometheus-metrics")
	if rules := h.kubectl("get", "prometheusrule", "-n", cluster.Namespace, "prometheus-hpp-rules", "-o", "yaml"); strings.Contains(rules, "HPPOnlyUpstream") || !strings.Contains(rules, "HPPNotReady") {
		t.Errorf("the rules are those of the upstream operator: %s", rules)
	}
	before := poolSizes(h)
	if args := h.kubectl("get", "daemonset", "-n", cluster.Namespace, operatorDaemonSet, "-o", "jsonpath={.spec.template.spec.containers[*].args}"); !strings.Contains(args, "--metrics-tls-version=VersionTLS13") {
		t.Errorf("the driver does not follow the cluster's TLS profile: %s", args)
	}
	h.claim("fast", "32Mi", ofClass(class))
	h.pod("writer", with("fast", "/data"))

	larger, err := json.Marshal(map[string]any{"spec": provisioner(t, "claims", pools("448Mi")).Object["spec"]})
	must.Succeed(t, err)
	if _, err := client.Patch(ctx, "claims", types.MergePatchType, larger, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	h.ready("writer")
	h.mustRun("writer", "echo hello >/data/file")
	onAllNodes(h)
	h.until("the pools to have grown with their template", func(context.Context) (string, error) {
		for node, size := range poolSizes(h) {
			if size < before[node]+100<<20 {
				return fmt.Sprintf("that of %s has %d MiB", node, size>>20), nil
			}
		}
		return "", nil
	})

	h.kubectl("delete", "pod", "-n", cluster.Namespace, "-l", "hpp-pool", "--force", "--grace-period=0")
	if got := h.mustRun("writer", "echo again >>/data/file; cat /data/file"); got != "hello\nagain\n" {
		t.Errorf("the pod reads %q", got)
	}
	t.Run("drift is repaired", func(t *testing.T) { drift(t, h) })
	t.Run("nothing is written when all is well", func(t *testing.T) { quiet(t, h) })
	if got := h.mustRun("writer", "cat /data/file"); got != "hello\nagain\n" {
		t.Errorf("the pod reads %q", got)
	}
	h.remove("writer")
	must.Succeed(t, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(ctx, "fast", metav1.DeleteOptions{}))
	h.until("the volumes to be deleted", h.volumesOf(h.namespace))

	h.leaveOnlyLocal(client, "claims")
	h.kubectl("delete", "pod", "-n", cluster.Namespace, "-l", "name=hostpath-provisioner-operator", "--force", "--grace-period=0")
	elsewhere := provisioner(t, "claims", strings.Replace(pools("448Mi"), "/var/fast", "/var/faster", 1)).Object["spec"]
	moved, err := json.Marshal(map[string]any{"spec": elsewhere})
	must.Succeed(t, err)
	// The webhook that ends, and the one that is not there yet, answer an error.
	h.until("the change to be accepted", func(ctx context.Context) (string, error) {
		_, err := client.Patch(ctx, "claims", types.MergePatchType, moved, metav1.PatchOptions{})
		return text(err), nil
	})
	h.until("the pool to be mounted at its new path only", func(ctx context.Context) (string, error) {
		for name, n := range c.Nodes {
			mounts, err := n.Output(ctx, "cat", "/proc/self/mounts")
			before, now := strings.Contains(mounts, " /var/fast/csi "), strings.Contains(mounts, " /var/faster/csi ")
			if before || !now {
				return fmt.Sprintf("%s: mounted at the old path: %v, at the new one: %v", name, before, now), err
			}
		}
		return "", nil
	})
	h.condition(client, "claims", "RolledOut", "True")
	h.leaveOnlyLocal(client, "claims")
	h.poolsUnmounted(client, "claims")
	h.condition(client, "claims", "RolledOut", "True")
	h.removePoolClaims("hpp-pool-local-fast-node-a", "hpp-pool-local-fast-node-b", "hpp-pool-everywhere-shared")
}

// leaveOnlyLocal removes all pools from an object but the one without a template.
func (h *harness) leaveOnlyLocal(client dynamic.ResourceInterface, name string) {
	h.Helper()
	patch := []byte(`{"spec":{"storagePools":[{"name":"local","path":"/var/hpvolumes"}]}}`)
	if _, err := client.Patch(h.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		h.Fatal(err)
	}
}

// poolsUnmounted waits until there are no mounters, which go once their pools are unmounted.
func (h *harness) poolsUnmounted(client dynamic.ResourceInterface, name string) {
	h.Helper()
	h.until("the pools to be unmounted", func(ctx context.Context) (string, error) {
		left, err := c.Client.AppsV1().Deployments(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "hpp-pool"})
		if err != nil || len(left.Items) == 0 {
			return "", err
		}
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		return fmt.Sprintf("%d mounters are left: %v", len(left.Items), object.Object["status"]), err
	})
}

// removePoolClaims expects claims of pools, which the operator leaves, and removes them with their volumes.
func (h *harness) removePoolClaims(want ...string) {
	h.Helper()
	ctx := h.Context()
	claims, err := c.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).List(ctx, metav1.ListOptions{})
	must.Succeed(h, err)
	got := map[string]bool{}
	for _, claim := range claims.Items {
		got[claim.Name] = true
		must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).Delete(ctx, claim.Name, metav1.DeleteOptions{}))
	}
	slices.Sort(want)
	if !slices.Equal(sorted(got), want) {
		h.Errorf("the pools have left the claims %q, want %q", sorted(got), want)
	}
	volumes, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	must.Succeed(h, err)
	for _, volume := range volumes.Items {
		// Those that were made by hand are not deleted.
		if of := volume.Spec.ClaimRef; of != nil && of.Namespace == cluster.Namespace && volume.Spec.CSI == nil {
			must.Succeed(h, c.Client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{}))
		}
	}
	h.until("the volumes of the claims to be deleted", h.volumesOf(cluster.Namespace))
}

// installKinds installs the kinds of the Prometheus operator, which go at the end of the test.
func (h *harness) installKinds() {
	h.Helper()
	text, err := os.ReadFile(filepath.Join(c.Programs, "prometheus-operator.yaml"))
	must.Succeed(h, err)
	var kinds []string
	for _, object := range strings.Split(string(text), "\n---\n") {
		if strings.Contains(object, "\nkind: CustomResourceDefinition\n") {
			kinds = append(kinds, object)
		}
	}
	file := filepath.Join(h.TempDir(), "kinds.yaml")
	must.Succeed(h, os.WriteFile(file, []byte(strings.Join(kinds, "\n---\n")), 0o600))
	h.Cleanup(func() { h.kubectl("delete", "--ignore-not-found", "-f", file) })
	// One of them is too large for the annotation of a client-side apply.
	h.kubectl("apply", "--server-side", "-f", file)
	must.Succeed(h, c.Established(h.Context(), "-f", file))
}

// sharedDirectory makes a volume that all nodes have, as one of NFS: a directory of this machine.
func sharedDirectory(h *harness) {
	h.Helper()
	path := filepath.Join(c.Sandbox.Dir, "everywhere")
	must.Succeed(h, os.MkdirAll(path, 0o755))
	if _, err := c.Client.CoreV1().PersistentVolumes().Create(h.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "everywhere"},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}},
		},
	}, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		err := c.Client.CoreV1().PersistentVolumes().Delete(context.Background(), "everywhere", metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			h.Error(err)
		}
		h.removeClass("hpp-overlay")
	})
}

// onAllNodes has pods of both nodes use one volume of the shared pool.
func onAllNodes(h *harness) {
	h.Helper()
	h.claim("common", "32Mi", ofClass("hpp-overlay"), func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	})
	for _, node := range []string{nodeA, nodeB} {
		h.pod("on-"+node, with("common", "/data"), on(node))
		h.ready("on-" + node)
		h.mustRun("on-"+node, "echo "+node+" >>/data/file; sync -f /data")
	}
	if got := h.mustRun("on-"+nodeA, "cat /data/file"); got != nodeA+"\n"+nodeB+"\n" {
		h.Errorf("the pod on %s reads %q", nodeA, got)
	}
	h.remove("on-"+nodeA, "on-"+nodeB)
	must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(h.Context(), "common", metav1.DeleteOptions{}))
}

// poolSizes are the sizes in bytes of the filesystems that the pool local-fast has on the nodes.
func poolSizes(h *harness) map[string]int64 {
	h.Helper()
	sizes := map[string]int64{}
	for name, n := range c.Nodes {
		out, err := n.Output(h.Context(), "stat", "--file-system", "--format=%b %S", "/var/fast/csi")
		must.Succeed(h, err)
		var blocks, bytes int64
		if _, err := fmt.Sscan(out, &blocks, &bytes); err != nil {
			h.Fatal(err)
		}
		sizes[name] = blocks * bytes
	}
	return sizes
}

// volumesOf says which volumes there are for the claims of a namespace.
func (h *harness) volumesOf(namespace string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		volumes, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		for _, volume := range volumes.Items {
			if claim := volume.Spec.ClaimRef; claim != nil && claim.Namespace == namespace {
				return volume.Name + " is " + string(volume.Status.Phase), nil
			}
		}
		return "", nil
	}
}
