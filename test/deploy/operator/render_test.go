// Package operator_test compares what the operator deploys with what kustomize renders of deploy/.
package operator_test

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// example is one of deploy/operator.
func example(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile("../../../deploy/operator/example/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// directory is where the operator is built.
var directory string

func TestMain(m *testing.M) {
	var err error
	if directory, err = os.MkdirTemp("", "operator-"); err != nil {
		panic(err)
	}
	status := m.Run()
	if err := os.RemoveAll(directory); err != nil {
		panic(err)
	}
	os.Exit(status)
}

// operator is the program, built once.
var operator = sync.OnceValues(func() (string, error) {
	program := path.Join(directory, "operator")
	build := exec.Command("go", "build", "-gcflags", "all=-dwarf=false", "-o", program, "./cmd/hostpath-provisioner-operator")
	build.Dir = "../../.."
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the operator: %w: %s", err, out)
	}
	return program, nil
})

// operated is what the operator deploys for an object.
func operated(t *testing.T, asked string) manifest.Objects {
	t.Helper()
	program, err := operator()
	if err != nil {
		t.Fatal(err)
	}
	run := exec.CommandContext(t.Context(), program, "render")
	run.Env = []string{"POD_NAMESPACE=hostpath-provisioner", "VERSION=v0.1.0"}
	run.Stdin = strings.NewReader(asked)
	var complaint strings.Builder
	run.Stderr = &complaint
	out, err := run.Output()
	if err != nil {
		t.Fatalf("render: %v: %s", err, &complaint)
	}
	return manifest.Parse(t, string(out))
}

// The operator deploys what kustomize renders of deploy/, but for what it is there to change: names, the pool's directory
// csi, tolerations, and that pools are in a variable and not in a ConfigMap.
func TestOperatorRendersManifestsOfDriver(t *testing.T) {
	plain := example(t, "plain.yaml")
	for name, c := range map[string]struct{ gates, manifests string }{
		"plain":     {"", "../../../deploy/csi/openshift"},
		"snapshots": {"Snapshotting", "testdata/snapshots"},
		"freezing":  {"Snapshotting, Freezing", "testdata/freezing"},
	} {
		t.Run(name, func(t *testing.T) {
			asked := strings.Replace(plain, "\nspec:\n", "\nspec:\n  featureGates: ["+c.gates+"]\n", 1)
			wantDriver(t, manifest.Render(t, c.manifests), operated(t, asked))
		})
	}
}

// wantDriver compares the driver that kustomize renders with that which the operator deploys.
func wantDriver(t *testing.T, byHand, byOperator manifest.Objects) {
	t.Helper()
	want, got := manifest.Only[appsv1.DaemonSet](t, byHand, "DaemonSet").Spec, manifest.Only[appsv1.DaemonSet](t, byOperator, "DaemonSet").Spec
	if diff := cmp.Diff(want.Selector, got.Selector); diff != "" {
		t.Errorf("selector: %s", diff)
	}
	if diff := cmp.Diff(want.UpdateStrategy, got.UpdateStrategy); diff != "" {
		t.Errorf("strategy: %s", diff)
	}
	if diff := cmp.Diff(adapted(want.Template.Spec), adapted(got.Template.Spec)); diff != "" {
		t.Errorf("pod, by hand (-) and by the operator (+): %s", diff)
	}
	if diff := cmp.Diff(manifest.Only[storagev1.CSIDriver](t, byHand, "CSIDriver").Spec, manifest.Only[storagev1.CSIDriver](t, byOperator, "CSIDriver").Spec); diff != "" {
		t.Errorf("CSIDriver: %s", diff)
	}
	var rules []rbacv1.PolicyRule
	for _, role := range manifest.All[rbacv1.ClusterRole](t, byHand, "ClusterRole") {
		rules = append(rules, role.Rules...)
	}
	if diff := cmp.Diff(rules, manifest.Only[rbacv1.ClusterRole](t, byOperator, "ClusterRole").Rules); diff != "" {
		t.Errorf("rights: %s", diff)
	}
}

// For pathConfig the operator deploys what kustomize renders of deploy/provisioner as well.
func TestOperatorRendersManifestsOfProvisioner(t *testing.T) {
	byHand, byOperator := manifest.Render(t, "../../../deploy/provisioner/openshift"), operated(t, example(t, "legacy.yaml"))
	const name = "hostpath-provisioner"
	want, got := manifest.Only[appsv1.DaemonSet](t, byHand, "DaemonSet").Spec, manifest.Named[appsv1.DaemonSet](t, byOperator, "DaemonSet", name).Spec
	if diff := cmp.Diff(want.Selector, got.Selector); diff != "" {
		t.Errorf("selector: %s", diff)
	}
	if diff := cmp.Diff(want.UpdateStrategy, got.UpdateStrategy); diff != "" {
		t.Errorf("strategy: %s", diff)
	}
	if diff := cmp.Diff(adapted(want.Template.Spec), adapted(got.Template.Spec)); diff != "" {
		t.Errorf("pod, by hand (-) and by the operator (+): %s", diff)
	}
	if diff := cmp.Diff(manifest.Only[rbacv1.ClusterRole](t, byHand, "ClusterRole").Rules, manifest.Named[rbacv1.ClusterRole](t, byOperator, "ClusterRole", name).Rules); diff != "" {
		t.Errorf("rights: %s", diff)
	}
	if diff := cmp.Diff(manifest.Only[rbacv1.Role](t, byHand, "Role").Rules, manifest.Named[rbacv1.Role](t, byOperator, "Role", name).Rules); diff != "" {
		t.Errorf("rights in the namespace: %s", diff)
	}
}

// adapted is a pod without what the operator is there to change.
func adapted(pod corev1.PodSpec) corev1.PodSpec {
	pod = *pod.DeepCopy()
	pod.ServiceAccountName, pod.Tolerations = "", nil
	slices.SortFunc(pod.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	for i := range pod.Containers {
		c := &pod.Containers[i]
		c.ImagePullPolicy = ""
		c.Args = slices.DeleteFunc(c.Args, func(a string) bool { return strings.HasPrefix(a, "--metrics-tls-") })
		c.Env = slices.DeleteFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "DATADIR" || e.Name == "SERVICE_NAME" })
		slices.SortFunc(c.VolumeMounts, func(a, b corev1.VolumeMount) int { return strings.Compare(a.MountPath, b.MountPath) })
	}
	return pod
}
