package operator_test

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// Where network policies are enforced, everybody reaches of each pod what serves metrics or webhooks, and nothing else, and pods that
// need no network have none.
func TestNetworkPolicies(t *testing.T) {
	installed := manifest.Render(t, "../../../deploy/operator")
	policies := manifest.All[networkingv1.NetworkPolicy](t, installed, "NetworkPolicy")
	deployed := operated(t, example(t, "legacy.yaml"))
	set := func(name string) corev1.PodTemplateSpec {
		return manifest.Named[appsv1.DaemonSet](t, deployed, "DaemonSet", name).Spec.Template
	}
	for name, c := range map[string]struct {
		pod    corev1.PodTemplateSpec
		egress bool
	}{
		"the operator":            {manifest.Only[appsv1.Deployment](t, installed, "Deployment").Spec.Template, true},
		"the driver":              {set("hostpath-provisioner-csi"), true},
		"the pre-CSI provisioner": {set("hostpath-provisioner"), true},
		"a mounter":               {template[appsv1.Deployment](t, "mounter/deployment.yaml").Spec.Template, false},
		"an unmount":              {template[batchv1.Job](t, "mounter/unmount.yaml").Spec.Template, false},
	} {
		t.Run(name, func(t *testing.T) {
			var want []int32
			for _, container := range c.pod.Spec.Containers {
				for _, port := range container.Ports {
					if port.Name == "metrics" || port.Name == "webhook" {
						want = append(want, port.ContainerPort)
					}
				}
			}
			ingress, egress := allowed(t, policies, c.pod.Labels)
			if diff := cmp.Diff(want, ingress); diff != "" {
				t.Errorf("ports that are served (-) and let through (+): %s", diff)
			}
			if egress != c.egress {
				t.Errorf("connections of the pod are let through: %v, want %v", egress, c.egress)
			}
		})
	}
}

// allowed are the ports of a pod that the policies let everybody at, and whether they let the pod out. Without any policy
// for it, that is an error.
func allowed(t *testing.T, policies []networkingv1.NetworkPolicy, pod map[string]string) (ingress []int32, egress bool) {
	t.Helper()
	isolated, egress := false, true
	for _, policy := range policies {
		selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
		if err != nil {
			t.Fatal(err)
		}
		if !selector.Matches(labels.Set(pod)) {
			continue
		}
		isolated = isolated || slices.Contains(policy.Spec.PolicyTypes, networkingv1.PolicyTypeIngress)
		egress = egress && !slices.Contains(policy.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		if len(policy.Spec.Egress) > 0 {
			t.Errorf("%s lets pods out by rules, which this test does not know", policy.Name)
		}
		for _, rule := range policy.Spec.Ingress {
			if len(rule.Ports) == 0 {
				t.Errorf("%s lets everybody at all ports", policy.Name)
			}
			for _, port := range rule.Ports {
				ingress = append(ingress, port.Port.IntVal)
			}
		}
	}
	if !isolated {
		t.Error("no policy is for the pod: everybody reaches it")
	}
	return ingress, egress
}

// template is one that the operator fills in.
func template[T any](t *testing.T, file string) T {
	t.Helper()
	text, err := os.ReadFile("../../../deploy/operator/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var decoded T
	if err := yaml.UnmarshalStrict(text, &decoded); err != nil {
		t.Fatal(err)
	}
	return decoded
}
