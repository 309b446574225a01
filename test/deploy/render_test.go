// Package deploy_test renders what users apply from deploy/, with kustomize as
// a library, and checks the objects that come out: that they agree with each
// other, and that nothing in the pods can do more than it has to. It is a module
// of its own, so that neither kustomize nor the Kubernetes API is in the
// product's go.mod.
package deploy_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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

	deployDir    = "../../deploy/"
	csiDir       = deployDir + "csi"
	openshiftDir = deployDir + "csi/openshift"
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
	succeed(t, err)
	csi, err := filepath.Abs(csiDir)
	succeed(t, err)
	// Kustomize takes no absolute paths.
	csi, err = filepath.Rel(dir, csi)
	succeed(t, err)
	for name, content := range files {
		content = strings.ReplaceAll(content, "$csi", csi)
		succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return manifest.Render(t, dir)
}

// ptr is what p points to, or the zero value.
func ptr[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// What the cases of the cluster apply has been decoded there too, but for that of OpenShift.
func TestObjectsDecodeStrictly(t *testing.T) {
	for dir, wantNamespace := range map[string]string{
		"csi": namespace, "csi/openshift": namespace, "monitoring": namespace, "csi/example": "", "csi/example/block": "",
		"devices": "local-pv-provisioner", "devices/monitoring": "local-pv-provisioner", "devices/openshift": "local-pv-provisioner",
		"provisioner": "kubevirt-hostpath-provisioner", "provisioner/openshift": "kubevirt-hostpath-provisioner", "provisioner/example": "",
		"single-node": "hostpath-provisioner-single-node", "single-node/openshift": "hostpath-provisioner-single-node", "single-node/example": "",
		"migrate": "hostpath-migrate", "migrate/openshift": "hostpath-migrate",
	} {
		for _, o := range manifest.Render(t, deployDir+dir) {
			t.Run(dir+" "+o.String(), func(t *testing.T) {
				k, ok := kinds[o.APIVersion+" "+o.Kind]
				if !ok {
					t.Fatalf("%s of %s is not expected here", o.Kind, o.APIVersion)
				}
				if err := k.decode(o.YAML); err != nil {
					t.Error(err)
				}
				if k.namespaced && o.Namespace != wantNamespace {
					t.Errorf("it is in namespace %q, want %q", o.Namespace, wantNamespace)
				}
			})
		}
	}
}

func TestNamespacesAdmitThePods(t *testing.T) {
	for _, dir := range []string{"csi/namespace", "devices", "provisioner", "single-node", "migrate"} {
		ns := manifest.Only[corev1.Namespace](t, manifest.Render(t, deployDir+dir), "Namespace")
		// OpenShift's default node selector would keep the pods off some nodes.
		selector, ok := ns.Annotations["openshift.io/node-selector"]
		if ns.Labels["pod-security.kubernetes.io/enforce"] != "privileged" || !ok || selector != "" {
			t.Errorf("%s has the labels %v and the annotations %v", ns.Name, ns.Labels, ns.Annotations)
		}
	}
}

// The namespace has the claims of pools, and Kubernetes deletes their data with it. The operator and deploy/csi have the same: what is
// deleted to remove one of them does not have it.
func TestNamespaceOutlivesDriverAndOperator(t *testing.T) {
	for _, dir := range []string{"csi", "csi/openshift", "monitoring", "operator", "operator/webhook", "operator/restores"} {
		for _, o := range manifest.Render(t, deployDir+dir) {
			if o.Kind == "Namespace" {
				t.Errorf("deploy/%s has the namespace %s", dir, o.Name)
			}
		}
	}
}

func TestOverlayChangesNamespace(t *testing.T) {
	objs := overlay(t, map[string]string{"kustomization.yaml": "namespace: elsewhere\nresources: [$csi/openshift, $csi/../monitoring]\n"})
	for _, o := range objs {
		if kinds[o.APIVersion+" "+o.Kind].namespaced && o.Namespace != "elsewhere" {
			t.Errorf("%s is in namespace %q", o, o.Namespace)
		}
	}
	for _, b := range bindings(t, objs) {
		if b.subjects[0].Namespace != "elsewhere" {
			t.Errorf("%s gives rights to %+v", b.name, b.subjects)
		}
	}
}

// For those who apply it by URL, as they did the manifests of the earlier provisioner.
func TestSingleNodeManifestIsCurrent(t *testing.T) {
	text, err := os.ReadFile(deployDir + "single-node/install.yaml")
	succeed(t, err)
	if diff := cmp.Diff(byName(manifest.Render(t, deployDir+"single-node")), byName(manifest.Parse(t, string(text)))); diff != "" {
		t.Errorf("run kubectl kustomize deploy/single-node > deploy/single-node/install.yaml (- want, + got):\n%s", diff)
	}
}

// byName are objects as text.
func byName(objects manifest.Objects) map[string]string {
	all := map[string]string{}
	for _, o := range objects {
		all[o.String()] = strings.TrimSpace(string(o.YAML))
	}
	return all
}

// succeed ends the test if there are errors.
func succeed(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
