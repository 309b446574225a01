// Package deploy_test renders what users apply from deploy/, with kustomize as
// a library, and checks the objects that come out: that they agree with each
// other, and that nothing in the pod can do more than it has to. It is a module
// of its own, so that neither kustomize nor the Kubernetes API is in the
// product's go.mod.
package deploy_test

import (
	"os"
	"path/filepath"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	driverName = "kubevirt.io.hostpath-provisioner"
	namespace  = "hostpath-provisioner"

	csiDir       = "../../deploy/csi"
	openshiftDir = "../../deploy/csi/openshift"
	exampleDir   = "../../deploy/csi/example"
)

// kinds are the kinds that deploy/ may have, with the type that one decodes
// into and whether it lives in a namespace.
var kinds = map[string]struct {
	decode     func([]byte) error
	namespaced bool
}{
	"v1 Namespace":                                    {strictly[corev1.Namespace], false},
	"v1 ServiceAccount":                               {strictly[corev1.ServiceAccount], true},
	"v1 ConfigMap":                                    {strictly[corev1.ConfigMap], true},
	"v1 Service":                                      {strictly[corev1.Service], true},
	"v1 PersistentVolumeClaim":                        {strictly[corev1.PersistentVolumeClaim], true},
	"v1 Pod":                                          {strictly[corev1.Pod], true},
	"apps/v1 DaemonSet":                               {strictly[appsv1.DaemonSet], true},
	"apps/v1 Deployment":                              {strictly[appsv1.Deployment], true},
	"rbac.authorization.k8s.io/v1 Role":               {strictly[rbacv1.Role], true},
	"rbac.authorization.k8s.io/v1 RoleBinding":        {strictly[rbacv1.RoleBinding], true},
	"rbac.authorization.k8s.io/v1 ClusterRole":        {strictly[rbacv1.ClusterRole], false},
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": {strictly[rbacv1.ClusterRoleBinding], false},
	"admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy":        {strictly[admissionv1.ValidatingAdmissionPolicy], false},
	"admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding": {strictly[admissionv1.ValidatingAdmissionPolicyBinding], false},
	"storage.k8s.io/v1 CSIDriver":                                      {strictly[storagev1.CSIDriver], false},
	"storage.k8s.io/v1 StorageClass":                                   {strictly[storagev1.StorageClass], false},
	"security.openshift.io/v1 SecurityContextConstraints":              {strictly[securityContextConstraints], false},
	"snapshot.storage.k8s.io/v1 VolumeSnapshotClass":                   {strictly[volumeSnapshotClass], false},
	"monitoring.coreos.com/v1 ServiceMonitor":                          {strictly[monitoringv1.ServiceMonitor], true},
	"monitoring.coreos.com/v1 PrometheusRule":                          {strictly[monitoringv1.PrometheusRule], true},
}

// strictly decodes as kubectl validates: an unknown or repeated field is an error.
func strictly[T any](b []byte) error {
	var v T
	return yaml.UnmarshalStrict(b, &v)
}

// overlay renders a kustomization of a user's own, made of the given files.
// The variable $csi in them stands for the way to deploy/csi.
func overlay(t *testing.T, files map[string]string) manifest.Objects {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	csi, err := filepath.Abs(csiDir)
	if err != nil {
		t.Fatal(err)
	}
	// Kustomize takes no absolute paths.
	csi, err = filepath.Rel(dir, csi)
	if err != nil {
		t.Fatal(err)
	}
	expand := func(variable string) string {
		if variable == "csi" {
			return csi
		}
		return "$" + variable
	}
	for name, content := range files {
		content = os.Expand(content, expand)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return manifest.Render(t, dir)
}

func TestObjectsDecodeStrictly(t *testing.T) {
	for _, dir := range []string{csiDir, openshiftDir, exampleDir, blockExampleDir, monitoringDir} {
		for _, o := range manifest.Render(t, dir) {
			t.Run(o.String(), func(t *testing.T) {
				k, ok := kinds[o.APIVersion+" "+o.Kind]
				if !ok {
					t.Fatalf("%s of %s is not expected here", o.Kind, o.APIVersion)
				}
				if err := k.decode(o.YAML); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestObjectNamespaces(t *testing.T) {
	made := manifest.Only[corev1.Namespace](t, manifest.Render(t, csiDir+"/namespace"), "Namespace").Name
	if made != namespace {
		t.Errorf("the namespace is %q, want %q", made, namespace)
	}
	for _, dir := range []string{csiDir, openshiftDir, monitoringDir} {
		for _, o := range manifest.Render(t, dir) {
			want := ""
			if kinds[o.APIVersion+" "+o.Kind].namespaced {
				want = made
			}
			if o.Namespace != want {
				t.Errorf("%s is in namespace %q, want %q", o, o.Namespace, want)
			}
		}
	}
}

// The operator has the same namespace, with the claims of its pools: what removes deploy/csi leaves it.
func TestNamespaceOutlivesTheDriver(t *testing.T) {
	for _, dir := range []string{csiDir, openshiftDir, monitoringDir} {
		for _, o := range manifest.Render(t, dir) {
			if o.Kind == "Namespace" {
				t.Errorf("%s has the namespace %s", dir, o.Name)
			}
		}
	}
}

func TestNamespaceAdmitsPrivilegedPods(t *testing.T) {
	ns := manifest.Only[corev1.Namespace](t, manifest.Render(t, csiDir+"/namespace"), "Namespace")
	if got := ns.Labels["pod-security.kubernetes.io/enforce"]; got != "privileged" {
		t.Errorf("pod security is enforced at %q, want privileged", got)
	}
}

func TestOverlayChangesNamespace(t *testing.T) {
	objs := overlay(t, map[string]string{"kustomization.yaml": `
namespace: elsewhere
resources: [$csi/openshift]
`})
	for _, o := range objs {
		if kinds[o.APIVersion+" "+o.Kind].namespaced && o.Namespace != "elsewhere" {
			t.Errorf("%s is in namespace %q", o, o.Namespace)
		}
	}
	for _, b := range bindings(t, objs) {
		for _, s := range b.subjects {
			if s.Namespace != "elsewhere" {
				t.Errorf("%s gives rights to %s in namespace %q", b.name, s.Name, s.Namespace)
			}
		}
	}
}
