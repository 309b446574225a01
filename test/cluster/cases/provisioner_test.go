package cases_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A form is one of the two of the provisioner from before CSI, as its overlay installs it.
type form struct{ overlay, namespace, path string }

var (
	perNode    = form{"../overlay/provisioner", "kubevirt-hostpath-provisioner", "/var/plain/.provisioner"}
	singleNode = form{"../overlay/single-node", "hostpath-provisioner-single-node", "/var/plain/.single-node"}
)

// install has the form there until the end of the test, when its directories have to be empty.
func (h *harness) install(f form) {
	h.Helper()
	h.Cleanup(func() {
		for name, n := range c.Nodes {
			if left, err := filepath.Glob(filepath.Join(n.Disk(f.path), "[a-z]*")); err != nil || len(left) > 0 {
				h.Errorf("left on the disk of %s: %v (%v)", name, left, err)
			}
			must.Succeed(h, os.RemoveAll(n.Disk(f.path)))
		}
	})
	h.apply("-k", f.overlay)
}

// provisioners waits for as many pods of a form as are wanted, ready or only running.
func (h *harness) provisioners(f form, count int, ready bool) (pods []corev1.Pod) {
	h.Helper()
	h.until("provisioners of "+f.namespace, func(ctx context.Context) (string, error) {
		list, err := c.Client.CoreV1().Pods(f.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		pods = list.Items
		var waiting []string
		for _, pod := range pods {
			if pod.Status.Phase != corev1.PodRunning || podReady(pod) != ready {
				waiting = append(waiting, pod.Name+" "+string(pod.Status.Phase)+" "+cluster.State(pod))
			}
		}
		if len(pods) == count && len(waiting) == 0 {
			return "", nil
		}
		return fmt.Sprintf("%d of %d: %s", len(pods), count, strings.Join(waiting, ", ")), nil
	})
	return pods
}

// bound waits until a claim is.
func (h *harness) bound(claim string) {
	h.Helper()
	h.until("claim "+claim+" to be bound", func(ctx context.Context) (string, error) {
		bound, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || bound.Status.Phase == corev1.ClaimBound {
			return "", err
		}
		return string(bound.Status.Phase), nil
	})
}

// hostPath is what a claim is bound to, its node, and its directory as it is seen from outside.
func (h *harness) hostPath(claim string) (volume *corev1.PersistentVolume, node, directory string) {
	h.Helper()
	h.bound(claim)
	volume = h.volume(claim)
	node = cmp.Or(volume.Annotations["kubevirt.io/provisionOnNode"], volume.Annotations["hostPathProvisionerIdentity"])
	if volume.Spec.HostPath == nil || c.Nodes[node] == nil {
		h.Fatalf("volume %s has the source %+v and the node %q", volume.Name, volume.Spec.PersistentVolumeSource, node)
	}
	return volume, node, c.Nodes[node].Disk(volume.Spec.HostPath.Path)
}

// wantVolumeGone waits until a PersistentVolume and its directory are gone.
func (h *harness) wantVolumeGone(volume, directory string) {
	h.Helper()
	h.until("volume "+volume+" to be gone", func(ctx context.Context) (string, error) {
		left, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return string(left.Status.Phase), err
	})
	h.wantGone(directory)
}

func madeOn(node string) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) {
		claim.Annotations = map[string]string{"kubevirt.io/provisionOnNode": node}
	}
}

// lookalike makes a DaemonSet by the name of KubeVirt's provisioner, as each user can who may have no hostPath: no pod of it runs. It is deleted, and
// stays until the end of the test, so that its controller says nothing of it any more.
func (h *harness) lookalike(path string) {
	h.Helper()
	labels := map[string]string{"app": "lookalike"}
	pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
		NodeSelector: map[string]string{"example.com/node": "none"},
		Containers:   []corev1.Container{{Name: "any", Image: "any"}},
		Volumes:      []corev1.Volume{{Name: "directory", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}},
	}}
	sets := c.Client.AppsV1().DaemonSets(h.namespace)
	set, err := sets.Create(h.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "kubevirt-hostpath-provisioner", Finalizers: []string{"example.com/kept"}},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod},
	}, metav1.CreateOptions{})
	must.Succeed(h, err)
	h.Cleanup(func() {
		_, err := sets.Patch(context.Background(), set.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		must.Succeed(h, err)
	})
	must.Succeed(h, sets.Delete(h.Context(), set.Name, metav1.DeleteOptions{}))
}

func TestProvisionerOnEachNode(t *testing.T) {
	h := begin(t)
	h.lookalike(perNode.path)
	h.install(perNode)
	for _, pod := range h.provisioners(perNode, len(c.Nodes), true) {
		h.wantEndpoints(pod, "")
	}
	h.runsExample()

	// The annotation wins, and works where the class binds at once.
	const class = "hostpath-provisioner-immediate"
	h.claim("named", "10Mi", ofClass(class), madeOn(nodeB))
	named, node, namedDirectory := h.hostPath("named")
	if node != nodeB {
		t.Errorf("the volume is on %s", node)
	}
	h.refusedClaims(class)

	// Without a pod too, where the class waits for one.
	h.claim("early", "10Mi", ofClass("hostpath-provisioner"), madeOn(nodeA))
	early, node, earlyDirectory := h.hostPath("early")
	if node != nodeA {
		t.Errorf("the volume is on %s", node)
	}
	h.pod("late", with("early", "/data"))
	if pod := h.ready("late"); pod.Spec.NodeName != nodeA {
		t.Errorf("the pod is on %s", pod.Spec.NodeName)
	}
	h.remove("late")

	h.kubectl("delete", "pvc", "-n", h.namespace, "--all")
	h.wantVolumeGone(named.Name, namedDirectory)
	h.wantVolumeGone(early.Name, earlyDirectory)
	for _, pod := range h.provisioners(perNode, len(c.Nodes), true) {
		if pod.Spec.NodeName == nodeB {
			h.wantEndpoints(pod, "", ofClaims...)
		}
	}
	h.refusesPoolOfDriver()
}

// runsExample applies what a user applies, and deletes it again.
func (h *harness) runsExample() {
	h.Helper()
	example := perNode.overlay + "/example"
	h.kubectl("apply", "-n", h.namespace, "-k", example)
	pod := h.ready("hostpath-provisioner-example")
	volume, node, directory := h.hostPath("hostpath-provisioner-example")
	if pod.Spec.NodeName != node || volume.Spec.Capacity.Storage().String() != "100Mi" {
		h.Errorf("the pod is on %s, its volume of %s on %s", pod.Spec.NodeName, volume.Spec.Capacity.Storage(), node)
	}
	h.exampleWrote(directory)
	h.kubectl("delete", "-n", h.namespace, "-k", example)
	h.wantVolumeGone(volume.Name, directory)
}

// exampleWrote waits for the file that the pod of an example writes once it is started.
func (h *harness) exampleWrote(directory string) {
	h.Helper()
	h.until("the pod of the example to write", func(context.Context) (string, error) {
		text, err := os.ReadFile(filepath.Join(directory, "SUCCESS"))
		if errors.Is(err, os.ErrNotExist) || err == nil && string(text) != "Hello\n" {
			return fmt.Sprintf("the file holds %q", text), nil
		}
		return "", err
	})
}

// refusedClaims has claims that no directory can be for, or an abandoned directory.
func (h *harness) refusedClaims(class string) {
	h.Helper()
	h.claim("nowhere", "10Mi", ofClass(class), madeOn("node-z"))
	h.claim("unnamed", "10Mi", ofClass(class))
	h.claim("shared", "10Mi", ofClass(class), madeOn(nodeA), func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	})
	h.claim("disk", "10Mi", ofClass(class), madeOn(nodeA), asBlock)
	h.wantEvent("PersistentVolumeClaim", "nowhere", "ProvisioningFailed", "node-z", "does not exist")
	h.wantEvent("PersistentVolumeClaim", "unnamed", "ProvisioningFailed", "binds immediately")
	h.wantEvent("PersistentVolumeClaim", "shared", "ProvisioningFailed", "ReadWriteMany is not supported")
	h.wantEvent("PersistentVolumeClaim", "disk", "ProvisioningFailed", "does not support block volume")
}

// refusesPoolOfDriver has one more provisioner on a node, whose directory is a pool of the driver: each in its container
// sees the other, and it touches nothing.
func (h *harness) refusesPoolOfDriver() {
	h.Helper()
	set, err := c.Client.AppsV1().DaemonSets(perNode.namespace).Get(h.Context(), "hostpath-provisioner", metav1.GetOptions{})
	must.Succeed(h, err)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "second", Namespace: perNode.namespace}, Spec: set.Spec.Template.Spec}
	pod.Spec.NodeName = nodeA
	container := &pod.Spec.Containers[0]
	for i, e := range container.Env {
		if e.Name == "PV_DIR" {
			container.Env[i].Value = "/var/plain"
		}
	}
	for i, v := range container.VolumeMounts {
		if v.Name == "pool" {
			container.VolumeMounts[i].MountPath = "/var/plain"
		}
	}
	for i, v := range pod.Spec.Volumes {
		if v.Name == "pool" {
			pod.Spec.Volumes[i].HostPath.Path = "/var/plain"
		}
	}
	pods := c.Client.CoreV1().Pods(perNode.namespace)
	_, err = pods.Create(h.Context(), pod, metav1.CreateOptions{})
	must.Succeed(h, err)
	defer func() { must.Succeed(h, pods.Delete(h.Context(), pod.Name, metav1.DeleteOptions{})) }()
	h.until("the second provisioner to refuse", func(ctx context.Context) (string, error) {
		running, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil || running.Status.Phase != corev1.PodRunning {
			return "not running", err
		}
		status, text := h.fetch("http", *running, 9808, "/readyz", "")
		if status == http.StatusServiceUnavailable && strings.Contains(text, "it is served by") {
			return "", nil
		}
		return fmt.Sprintf("%d %q", status, text), nil
	})
}

// wantVolumeEvent waits for an event about a PersistentVolume, which is in no namespace.
func (h *harness) wantVolumeEvent(volume string, words ...string) {
	h.Helper()
	h.until("an event about "+volume, func(ctx context.Context) (string, error) {
		events, err := c.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + volume})
		if err != nil {
			return "", err
		}
		for _, e := range events.Items {
			if hasAll(e.Reason+" "+e.Message, words) {
				return "", nil
			}
		}
		return fmt.Sprintf("%d others", len(events.Items)), nil
	})
}

// Metrics of claims and PersistentVolumes, which are there after the first of each.
var ofClaims = []string{"hostpath_provisioner_persistentvolumeclaim_provision_total", "hostpath_provisioner_persistentvolume_delete_total"}

// wantEndpoints asks a provisioner for its health and its metrics. If it does not serve claims it says why.
func (h *harness) wantEndpoints(pod corev1.Pod, refusal string, more ...string) {
	h.Helper()
	if status, text := h.fetch("http", pod, 9808, "/healthz", ""); status != http.StatusOK || text != "ok\n" {
		h.Errorf("%s: healthz answers %d %q", pod.Name, status, text)
	}
	want := http.StatusOK
	if refusal != "" {
		want = http.StatusServiceUnavailable
	}
	h.until("readyz of "+pod.Name, func(context.Context) (string, error) {
		if status, text := h.fetch("http", pod, 9808, "/readyz", ""); status != want || !strings.Contains(text, refusal) {
			return fmt.Sprintf("%d %q", status, text), nil
		}
		return "", nil
	})
	metrics := h.metricsOf(pod)
	for _, name := range append(more, "hostpath_pool_serving", "hostpath_pool_promised_bytes", "kubevirt_hpp_pool_path_shared_with_os") {
		if !metrics[name] {
			h.Errorf("%s has no metric %s, but %q", pod.Name, name, sorted(metrics))
		}
	}
	// What both programs have has one name, and what only one has says whose it is.
	drivers, err := c.Client.CoreV1().Pods(cluster.Namespace).List(h.Context(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=" + cluster.DaemonSet, FieldSelector: "spec.nodeName=" + pod.Spec.NodeName})
	if err != nil || len(drivers.Items) == 0 {
		h.Fatalf("%d drivers on %s (%v)", len(drivers.Items), pod.Spec.NodeName, err)
	}
	ofDriver := h.metricsOf(drivers.Items[0])
	for name := range metrics {
		if !ofDriver[name] && !slices.Contains(sometimes, name) && !strings.HasPrefix(name, "hostpath_provisioner_") {
			h.Errorf("%s has the metric %s, which the driver has not", pod.Name, name)
		}
	}
}

// fetch asks a pod over HTTP, with a token if that is not empty.
func (h *harness) fetch(scheme string, pod corev1.Pod, port int, path, token string) (status int, text string) {
	h.Helper()
	request, err := http.NewRequestWithContext(h.Context(), http.MethodGet, fmt.Sprintf("%s://%s:%d%s", scheme, pod.Status.PodIP, port, path), nil)
	must.Succeed(h, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	// The certificate is one that the program has made for itself.
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	h.until("an answer of "+pod.Name, func(context.Context) (string, error) {
		response, err := client.Do(request)
		if err != nil {
			return "", err
		}
		status = response.StatusCode
		body, err := io.ReadAll(response.Body)
		text = string(body)
		return "", errors.Join(err, response.Body.Close())
	})
	return status, text
}

// Metrics that there are only after something has happened.
var sometimes = []string{"hostpath_csi_panics_total", "hostpath_pool_last_error_timestamp_seconds", "hostpath_pool_trash_oldest_timestamp_seconds", "hostpath_pool_upstream_snapshots"}

// metricsOf are the names of a pod's metrics.
func (h *harness) metricsOf(pod corev1.Pod) map[string]bool {
	h.Helper()
	_, text := h.fetch("https", pod, 8443, "/metrics", "")
	names := make(map[string]bool)
	for line := range strings.SplitSeq(text, "\n") {
		if words := strings.Fields(line); len(words) == 4 && words[1] == "TYPE" {
			names[words[2]] = true
		}
	}
	return names
}

func TestProvisionerOnSingleNode(t *testing.T) {
	h := begin(t)
	h.install(singleNode)
	example := singleNode.overlay + "/example"

	if len(c.Nodes) > 1 {
		h.refusedOnTwoNodes(example)
	} else {
		h.kubectl("apply", "-n", h.namespace, "-k", example)
	}
	h.ready("hostpath-test-pod")
	pod := h.provisioners(singleNode, 1, true)[0]
	volume, _, directory := h.hostPath("hostpath-test-claim")
	if want := h.namespace + "-hostpath-test-claim-" + volume.Name; filepath.Base(directory) != want {
		t.Errorf("the directory is %s, want %s", filepath.Base(directory), want)
	}
	if volume.Spec.AccessModes[0] != corev1.ReadWriteMany {
		t.Errorf("the access modes are %v", volume.Spec.AccessModes)
	}
	h.exampleWrote(directory)
	h.kubectl("delete", "-n", h.namespace, "-k", example)
	h.wantVolumeGone(volume.Name, directory)
	h.wantEndpoints(pod, "", ofClaims...)
	h.retained()
}

// retained has the program keep what the class would have it delete.
func (h *harness) retained() {
	h.Helper()
	h.kubectl("set", "env", "-n", singleNode.namespace, "deployment/hostpath-provisioner", "PV_RECLAIM_POLICY=Retain")
	h.kubectl("rollout", "status", "-n", singleNode.namespace, "deployment/hostpath-provisioner", "--timeout=2m")
	h.claim("kept", "10Mi", ofClass("hostpath"))
	volume, _, directory := h.hostPath("kept")
	h.kubectl("delete", "pvc", "-n", h.namespace, "kept")
	h.wantVolumeEvent(volume.Name, "VolumeRetained", volume.Spec.HostPath.Path)
	h.kubectl("delete", "pv", volume.Name)
	if _, err := os.Stat(directory); err != nil {
		h.Errorf("a retained directory is gone: %v", err)
	}
	must.Succeed(h, os.Remove(directory)) // it is empty
}

// refusedOnTwoNodes has the example wait until there is one node: of one volume there would be two directories.
func (h *harness) refusedOnTwoNodes(example string) {
	h.Helper()
	pod := h.provisioners(singleNode, 1, false)[0]
	h.wantEndpoints(pod, "node-a, node-b")
	h.kubectl("apply", "-n", h.namespace, "-k", example)
	h.wantEvent("PersistentVolumeClaim", "hostpath-test-claim", "ProvisioningFailed", "node-a, node-b", "PV_DIR_SHARED")
	other := nodeA
	if pod.Spec.NodeName == nodeA {
		other = nodeB
	}
	h.cordon(other, true)
	h.Cleanup(func() { h.cordon(other, false) })
}
