package cases_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	operatorDir = "../../../deploy/operator"
	crdFile     = operatorDir + "/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml"
)

var provisioners = schema.GroupVersionResource{Group: "hostpathprovisioner.kubevirt.io", Version: "v1beta1", Resource: "hostpathprovisioners"}

// withAPI installs the definition of HostPathProvisioner and returns a client of its objects.
func (h *harness) withAPI(file string) dynamic.ResourceInterface {
	h.Helper()
	h.kubectl("apply", "--server-side", "--force-conflicts", "-f", file)
	must.Succeed(h, c.Established(h.Context(), "-f", file))
	client, err := dynamic.NewForConfig(c.Config)
	must.Succeed(h, err)
	return client.Resource(provisioners)
}

// provisioner is an object with a spec in YAML.
func provisioner(t *testing.T, name, spec string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "hostpathprovisioner.kubevirt.io/v1beta1",
		"kind":       "HostPathProvisioner",
		"metadata":   map[string]any{"name": name},
	}}
	var parsed map[string]any
	must.Succeed(t, yaml.Unmarshal([]byte(spec), &parsed))
	object.Object["spec"] = parsed
	return object
}

// onePool is a spec with one pool that has some more fields.
func onePool(more string) string {
	return "storagePools: [{name: local, path: /var/hpvolumes" + more + "}]"
}

// The API server refuses by itself what can be known to be wrong without checking anything else, and says what to
// change. The upstream operator accepts all of them but the first three.
func TestObjectValidation(t *testing.T) {
	h := begin(t)
	client := h.withAPI(crdFile)
	pools := func(pools string) string { return "storagePools: [" + pools + "]" }
	path := func(path string) string { return pools("{name: local, path: " + path + "}") }
	tests := []struct{ name, spec, want string }{
		{"no spec", "", "spec: Required value"},
		{"neither pools nor pathConfig", "{}", "set either storagePools or the deprecated pathConfig"},
		{"both pools and pathConfig", onePool("") + "\npathConfig: {path: /var/other}", "set either storagePools or the deprecated pathConfig"},
		{"no pools in the list", "storagePools: []", "set either storagePools or the deprecated pathConfig"},
		{"relative path", path("var/hpvolumes"), "must be a clean absolute path"},
		{"root directory", path("/"), "must be a clean absolute path"},
		{"path that climbs", path("/var/../etc"), "must be a clean absolute path"},
		{"path with a slash at its end", path("/var/hpvolumes/"), "must be a clean absolute path"},
		{"path with two slashes", path("/var//hpvolumes"), "must be a clean absolute path"},
		{"directory of the system", path("/var/lib"), "must not be a directory of the system"},
		{"in a directory of the system", path("/etc/pool"), "must not lie in a directory of the system"},
		{"kubelet's directory", path("/var/lib/kubelet"), "must not lie in a directory of the system"},
		{"kubelet's directory in pathConfig", "pathConfig: {path: /var/lib/kubelet/pool}", "must not lie in a directory of the system"},
		{"where the driver's socket is", path("/csi"), "where the driver's containers have mounts"},
		{"in the directory of the driver's socket", path("/csi/pool"), "where the driver's containers have mounts"},
		{"above the devices of the driver", path("/host"), "where the driver's containers have mounts"},
		{"a mount of the pre-CSI provisioner", "pathConfig: {path: /system}", "where the provisioner's container has mounts"},
		{"pools with one path", pools("{name: a, path: /x}, {name: b, path: /x}"), "none may lie inside another"},
		{"nested pools", pools("{name: a, path: /x}, {name: b, path: /x/csi}"), "none may lie inside another"},
		{"pools with one name", pools("{name: a, path: /x}, {name: a, path: /y}"), "Duplicate value"},
		{"name that no volume of a pod can have", pools("{name: Local_Pool, path: /x}"), "should match"},
		{"name that is too long", pools("{name: " + strings.Repeat("x", 51) + ", path: /x}"), "50"},
		{"provider of snapshots that is not known", onePool(", snapshotProvider: kopia"), "Unsupported value"},
		{"pull policy that is not known", onePool("") + "\nimagePullPolicy: Sometimes", "Unsupported value"},
		{"feature gate that is not known", onePool("") + "\nfeatureGates: [Snapshots]", "Unsupported value"},
		{"reserve that is not a size", onePool(", reserve: much"), "should match"},
		{"enforcement that is not known", onePool(", enforcement: maybe"), "Unsupported value"},
		{"in another directory of kubelet", onePool("") + "\nkubeletDirectory: /var/hpvolumes", "must not lie in kubeletDirectory"},
		{"in another directory of kubelet with pathConfig", "pathConfig: {path: /data/kubelet/pool}\nkubeletDirectory: /data/kubelet", "must not lie in kubeletDirectory"},
		{"kubelet directory that climbs", onePool("") + "\nkubeletDirectory: /var/../etc", "must be a clean absolute path"},
		{"a device for all nodes", pools("{name: a, path: /x, pvcTemplate: {volumeMode: Block, accessModes: [ReadWriteOnce, ReadWriteMany]}}"), "each node would format the device"},
		{"unknown filesystem", onePool(", fsType: btrfs"), "Unsupported value"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := client.Create(t.Context(), provisioner(t, "refused", tt.spec), metav1.CreateOptions{DryRun: []string{"All"}})
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want it refused with %q", err, tt.want)
			}
		})
	}
}

// What would leave volumes behind cannot be changed; the rest can.
func TestImmutableFields(t *testing.T) {
	h := begin(t)
	client := h.withAPI(crdFile)
	template := func(mode, size, more string) string {
		return onePool(", pvcTemplate: {accessModes: [" + mode + "], resources: {requests: {storage: " + size + "}}" + more + "}")
	}
	tests := []struct{ name, before, after, want string }{
		{"path of a pool", onePool(""), "storagePools: [{name: local, path: /var/other}]", "path must not change"},
		{"path of pathConfig", "pathConfig: {path: /var/hpvolumes}", "pathConfig: {path: /var/other}", "must not change"},
		{"template is added", onePool(""), template("ReadWriteOnce", "1Gi", ""), "pvcTemplate must not be added or removed"},
		{"template is removed", template("ReadWriteOnce", "1Gi", ""), onePool(""), "pvcTemplate must not be added or removed"},
		{"pool becomes shared", template("ReadWriteOnce", "1Gi", ""), template("ReadWriteMany", "1Gi", ""), "between shared and not shared"},
		{"volume mode", template("ReadWriteOnce", "1Gi", ""), template("ReadWriteOnce", "1Gi", ", volumeMode: Block"), "volumeMode must not change"},
		{"template grows", template("ReadWriteOnce", "1Gi", ""), template("ReadWriteOnce", "2Gi", ""), ""},
		{"path next to a mount of the driver", onePool(""), "storagePools: [{name: local, path: /var/hpvolumes}, {name: a, path: /csi-pools}, {name: b, path: /host/pool}, {name: c, path: /system}]", ""},
		{"pool is added", onePool(""), "storagePools: [{name: local, path: /var/hpvolumes}, {name: fast, path: /var/fast}]", ""},
		{"from pathConfig to pools", "pathConfig: {path: /var/hpvolumes}", "storagePools: [{name: legacy, path: /var/hpvolumes}]", ""},
		{"from pathConfig to pools of other names", "pathConfig: {path: /var/hpvolumes}", onePool(""), ""},
		{"from pathConfig to a pool with another path", "pathConfig: {path: /var/hpvolumes}", "storagePools: [{name: legacy, path: /var/other}]", "must have its path"},
		{"from pathConfig to a pool with a template", "pathConfig: {path: /var/hpvolumes}", "storagePools: [{name: legacy, path: /var/hpvolumes, pvcTemplate: {}}]", "no pvcTemplate"},
		{"from pools to pathConfig", "storagePools: [{name: legacy, path: /var/hpvolumes}]", "pathConfig: {path: /var/hpvolumes}", ""},
		{"from pools of other names to pathConfig", onePool(""), "pathConfig: {path: /var/other}", ""},
		{"from a pool with another path to pathConfig", "storagePools: [{name: legacy, path: /var/hpvolumes}]", "pathConfig: {path: /var/other}", "must have its path"},
		{"from a pool with a template to pathConfig", "storagePools: [{name: legacy, path: /var/hpvolumes, pvcTemplate: {}}]", "pathConfig: {path: /var/hpvolumes}", "no pvcTemplate"},
		{"options of a pool", onePool(""), onePool(", reserve: 5%, overprovision: '1.5', enforcement: required, allocation: thin"), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			made, err := client.Create(t.Context(), provisioner(t, "changed", tt.before), metav1.CreateOptions{})
			must.Succeed(t, err)
			t.Cleanup(func() { h.endProvisioner("changed") })
			after := provisioner(t, "changed", tt.after)
			after.SetResourceVersion(made.GetResourceVersion())
			_, err = client.Update(t.Context(), after, metav1.UpdateOptions{})
			if tt.want == "" && err != nil || tt.want != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// An object of the upstream operator that breaks rules of today is served: its status is written, the rest of its spec can be changed, and it
// can be deleted.
func TestUpstreamObjectThatBreaksRules(t *testing.T) {
	const name = "lenient"
	h := begin(t)
	client := h.withAPI("testdata/upstream-crd.yaml")
	object := provisioner(t, name, "imagePullPolicy: Sometimes\nfeatureGates: [Other]\nstoragePools: [{name: Local_Pool, path: /var/hpvolumes/}, {name: outer, path: /mnt}, {name: inner, path: /mnt/inner}, {name: socket, path: /csi}, {name: device, path: /var/device, pvcTemplate: {volumeMode: Block, accessModes: [ReadWriteMany]}}]")
	object.SetFinalizers([]string{"finalizer.delete.hostpath-provisioner"})
	h.until("the object to be made", func(ctx context.Context) (string, error) {
		// The definition is taken up in a moment, and until then the rules of that before it hold.
		_, err := client.Create(ctx, object, metav1.CreateOptions{})
		if apierrors.IsInvalid(err) || apierrors.IsNotFound(err) {
			return err.Error(), nil
		}
		return "", err
	})
	t.Cleanup(func() {
		// Also after a failure: no operator removes the finalizer.
		_, _ = client.Patch(context.Background(), name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		h.removeProvisioner(name)
	})
	h.withAPI(crdFile)
	status := []byte(`{"status":{"observedGeneration":1,"conditions":[{"type":"Available","status":"True","reason":"Complete","message":"","lastTransitionTime":"2026-08-01T10:00:00Z"}]}}`)
	h.until("the status to be written", func(ctx context.Context) (string, error) {
		// The definition, and the status apart from the rest, are taken up in a moment.
		_, err := client.Patch(ctx, name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
		if apierrors.IsNotFound(err) {
			return err.Error(), nil
		}
		return "", err
	})
	change := func(what, patch string) {
		if _, err := client.Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	change("its labels", `{"metadata":{"labels":{"example.com/of":"a-user"}}}`)
	change("another field of its spec", `{"spec":{"logLevel":3}}`)
	must.Succeed(t, client.Delete(t.Context(), name, metav1.DeleteOptions{}))
	change("its finalizer", `{"metadata":{"finalizers":null}}`)
	if _, err := client.Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("it is still there: %v", err)
	}
}

// What kubectl get shows of an object, with -o wide and without, is in its status.
func TestColumns(t *testing.T) {
	h := begin(t)
	client := h.withAPI(crdFile)
	object, err := client.Create(t.Context(), provisioner(t, "shown", onePool("")), metav1.CreateOptions{})
	must.Succeed(t, err)
	t.Cleanup(func() { h.endProvisioner("shown") })
	condition := func(kind, status, message string) any {
		return map[string]any{"type": kind, "status": status, "reason": "Test", "message": message, "lastTransitionTime": "2024-01-01T00:00:00Z"}
	}
	object.Object["status"] = map[string]any{"observedVersion": "v1.2.3", "conditions": []any{
		condition("Degraded", "Unknown", "degraded"), condition("Progressing", "True", "progressing"), condition("Available", "False", "available"),
	}}
	if _, err := client.UpdateStatus(t.Context(), object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}

	var table metav1.Table
	path := "/apis/" + provisioners.GroupVersion().String() + "/" + provisioners.Resource + "/shown"
	if err := c.Client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").
		Do(t.Context()).Into(&table); err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != 1 || len(table.Rows[0].Cells) != len(table.ColumnDefinitions) {
		t.Fatalf("rows %v of the columns %v", table.Rows, table.ColumnDefinitions)
	}
	var got []string
	for i, column := range table.ColumnDefinitions {
		cell := table.Rows[0].Cells[i]
		if column.Name == "Age" {
			cell = cell != nil && cell != "<unknown>"
		}
		got = append(got, fmt.Sprintf("%s %d: %v", column.Name, column.Priority, cell))
	}
	want := []string{"Name 0: shown", "Available 0: False", "Progressing 0: True", "Degraded 0: Unknown", "Version 0: v1.2.3", "Age 0: true", "Message 1: available"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("columns with priority and content, want (-), got (+): %s", diff)
	}
}

// A webhook that is down, and whose failure counts, keeps no client from writing the status, labels and finalizers, nor from deleting.
func TestWebhookIsAskedAboutTheSpecAlone(t *testing.T) {
	h := begin(t)
	client := h.withAPI(crdFile)
	object := provisioner(t, "asked", onePool(""))
	object.SetFinalizers([]string{"example.com/test"})
	if _, err := client.Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.endProvisioner("asked") })
	text, err := os.ReadFile(operatorDir + "/webhook/validatingwebhookconfiguration.yaml")
	must.Succeed(t, err)
	var config admissionv1.ValidatingWebhookConfiguration
	must.Succeed(t, yaml.UnmarshalStrict(text, &config))
	config.Webhooks[0].FailurePolicy = pointer(admissionv1.Fail)
	webhooks := c.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	if _, err := webhooks.Create(t.Context(), &config, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := webhooks.Delete(context.Background(), config.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	patch := func(text string, subresources ...string) error {
		_, err := client.Patch(t.Context(), "asked", types.MergePatchType, []byte(text), metav1.PatchOptions{}, subresources...)
		return err
	}
	// The configuration is taken up in a moment.
	h.until("the webhook to be asked about the spec", func(context.Context) (string, error) {
		if err := patch(fmt.Sprintf(`{"spec":{"priorityClassName":"test-%d"}}`, time.Now().UnixNano())); !apierrors.IsInternalError(err) {
			return "changes are accepted", err
		}
		return "", nil
	})
	if _, err := client.Create(t.Context(), provisioner(t, "second", onePool("")), metav1.CreateOptions{DryRun: []string{"All"}}); !apierrors.IsInternalError(err) {
		t.Errorf("a new object: %v, want that the webhook cannot be asked", err)
	}
	if err := patch(`{"status":{"observedVersion":"v1.2.3"}}`, "status"); err != nil {
		t.Error("the status:", err)
	}
	if err := patch(`{"metadata":{"labels":{"example.com/test":"new"}}}`); err != nil {
		t.Error("a label:", err)
	}
	if err := client.Delete(t.Context(), "asked", metav1.DeleteOptions{}); err != nil {
		t.Error("deletion:", err)
	}
	if err := patch(`{"metadata":{"finalizers":null}}`); err != nil {
		t.Error("the finalizer:", err)
	}
}

// A namespace with restricted pods admits the operator, though its own is privileged for the driver. Without any of the fields
// that are for this it would be refused.
func TestOperatorIsAdmittedWherePodsAreRestricted(t *testing.T) {
	h := begin(t)
	text, err := os.ReadFile(operatorDir + "/deployment.yaml")
	must.Succeed(t, err)
	var deployment appsv1.Deployment
	must.Succeed(t, yaml.UnmarshalStrict(text, &deployment))
	create := func(change func(*corev1.PodSpec)) error {
		template := deployment.Spec.Template.DeepCopy()
		pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
		pod.Name = deployment.Name
		// Its own is not in this namespace.
		pod.Spec.ServiceAccountName = "default"
		change(&pod.Spec)
		_, err := c.Client.CoreV1().Pods(h.namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{"All"}})
		return err
	}
	h.kubectl("label", "namespace", h.namespace, "pod-security.kubernetes.io/enforce=restricted")
	// The label is taken up in a moment.
	h.until("pods to be restricted", func(context.Context) (string, error) {
		if err := create(func(spec *corev1.PodSpec) { spec.HostNetwork = true }); !apierrors.IsForbidden(err) {
			return "one on the network of its node is admitted", err
		}
		return "", nil
	})
	if err := create(func(*corev1.PodSpec) {}); err != nil {
		t.Error(err)
	}
	for without, change := range map[string]func(*corev1.PodSpec){
		"runAsNonRoot":                    func(spec *corev1.PodSpec) { spec.SecurityContext.RunAsNonRoot = nil },
		"seccompProfile":                  func(spec *corev1.PodSpec) { spec.SecurityContext.SeccompProfile = nil },
		"allowPrivilegeEscalation: false": func(spec *corev1.PodSpec) { spec.Containers[0].SecurityContext.AllowPrivilegeEscalation = nil },
		"dropped capabilities":            func(spec *corev1.PodSpec) { spec.Containers[0].SecurityContext.Capabilities = nil },
	} {
		if err := create(change); !apierrors.IsForbidden(err) {
			t.Errorf("without %s: %v, want it refused", without, err)
		}
	}
}

func (h *harness) removeProvisioner(name string) {
	// At the end of a test its context has ended.
	out, err := c.Kubectl(context.Background(), "delete", "hostpathprovisioner", name, "--ignore-not-found", "--wait=true", "--timeout=60s")
	if err != nil {
		h.Error(out, err)
	}
}

// endProvisioner removes an object at the end of a test, if it is there still: after the volumes, which a driver whose pools are
// others refuses to delete.
func (h *harness) endProvisioner(name string) {
	out, err := c.Kubectl(context.Background(), "get", "hostpathprovisioner", name, "--ignore-not-found", "-o", "jsonpath={.metadata.name} {.metadata.deletionTimestamp}")
	if err != nil {
		h.Error(out, err)
	}
	if strings.TrimSpace(out) == name {
		h.clear("the volumes to be deleted", h.volumesOf(h.namespace))
	}
	h.removeProvisioner(name)
}
