package cases_test

import (
	"context"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

const (
	operatorDir = "../../../deploy/operator"
	crdFile     = operatorDir + "/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml"
)

var provisioners = schema.GroupVersionResource{Group: "hostpathprovisioner.kubevirt.io", Version: "v1beta1", Resource: "hostpathprovisioners"}

// withAPI installs the definition of HostPathProvisioner and returns a client of its objects.
func (s *scene) withAPI(file string) dynamic.ResourceInterface {
	s.Helper()
	if out, err := c.Kubectl(s.Context(), "apply", "--server-side", "--force-conflicts", "-f", file); err != nil {
		s.Fatal(out, err)
	}
	if out, err := c.Kubectl(s.Context(), "wait", "--for=condition=Established", "--timeout=30s", "-f", file); err != nil {
		s.Fatal(out, err)
	}
	client, err := dynamic.NewForConfig(c.Config)
	if err != nil {
		s.Fatal(err)
	}
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
	if err := yaml.Unmarshal([]byte(spec), &parsed); err != nil {
		t.Fatal(err)
	}
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
	s := begin(t)
	client := s.withAPI(crdFile)
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
		{"kubelet directory that climbs", onePool("") + "\nkubeletDirectory: /var/../etc", "must be a clean absolute path"},
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
	s := begin(t)
	client := s.withAPI(crdFile)
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
		{"pool is added", onePool(""), "storagePools: [{name: local, path: /var/hpvolumes}, {name: fast, path: /var/fast}]", ""},
		{"from pathConfig to pools", "pathConfig: {path: /var/hpvolumes}", "storagePools: [{name: legacy, path: /var/hpvolumes}]", ""},
		{"options of a pool", onePool(""), onePool(", reserve: 5%, overprovision: '1.5', enforcement: required, allocation: thin"), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			made, err := client.Create(t.Context(), provisioner(t, "changed", tt.before), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.removeProvisioner("changed") })
			after := provisioner(t, "changed", tt.after)
			after.SetResourceVersion(made.GetResourceVersion())
			_, err = client.Update(t.Context(), after, metav1.UpdateOptions{})
			if tt.want == "" && err != nil || tt.want != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// An object that the upstream operator has stored is read, its removed fields are dropped, and it can be changed although
// its old conditions are not what they have to be now.
func TestUpstreamObjectIsRead(t *testing.T) {
	s := begin(t)
	s.withAPI("testdata/upstream-crd.yaml")
	if out, err := c.Kubectl(t.Context(), "apply", "-f", "testdata/upstream-provisioner.yaml"); err != nil {
		t.Fatal(out, err)
	}
	client := s.withAPI(crdFile)
	t.Cleanup(func() { s.removeProvisioner("earlier") })
	patch := []byte(`{"spec":{"storagePools":[{"name":"local","path":"/var/hpvolumes","reserve":"5%"}]}}`)
	// The definition is taken up in a moment.
	deadline := time.Now().Add(30 * time.Second)
	for {
		changed, err := client.Patch(t.Context(), "earlier", types.MergePatchType, patch, metav1.PatchOptions{})
		if err == nil {
			if value, _, _ := unstructured.NestedString(changed.Object, "spec", "kubeletDirectory"); value == "/var/lib/kubelet" {
				if _, found, _ := unstructured.NestedBool(changed.Object, "spec", "disableCSI"); found {
					t.Error("a removed field is still there")
				}
				if version, _, _ := unstructured.NestedString(changed.Object, "status", "observedVersion"); version != "v0.25.2" {
					t.Errorf("the version that was observed is %q", version)
				}
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the object cannot be changed: %v, %v", changed, err)
		}
	}
}

func (s *scene) removeProvisioner(name string) {
	// At the end of a test its context has ended.
	out, err := c.Kubectl(context.Background(), "delete", "hostpathprovisioner", name, "--ignore-not-found", "--wait=true", "--timeout=60s")
	if err != nil {
		s.Error(out, err)
	}
}
