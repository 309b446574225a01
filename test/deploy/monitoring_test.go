package deploy_test

import (
	"os"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	monitoringDir = "../../deploy/monitoring"
	docsDir       = "../../docs"
)

// A case of the cluster has the monitor of the driver.
func TestDevicesMonitor(t *testing.T) {
	svc := manifest.Only[corev1.Service](t, manifest.Render(t, deployDir+"devices"), "Service")
	monitor := manifest.Only[monitoringv1.ServiceMonitor](t, manifest.Render(t, deployDir+"devices/monitoring"), "ServiceMonitor")
	selected, pods := labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels), labels.SelectorFromSet(svc.Spec.Selector)
	set := manifest.Only[appsv1.DaemonSet](t, manifest.Render(t, deployDir+"devices"), "DaemonSet")
	if selected.Empty() || !selected.Matches(labels.Set(svc.Labels)) || pods.Empty() || !pods.Matches(labels.Set(set.Spec.Template.Labels)) {
		t.Errorf("the monitor selects %s, and the service, with %v, %s", selected, svc.Labels, pods)
	}
	if got := svc.Labels[monitor.Spec.JobLabel]; got != "local-pv-provisioner" {
		t.Errorf("the label job will be %q", got)
	}
	endpoint := monitor.Spec.Endpoints[0]
	if r := endpoint.RelabelConfigs[0]; endpoint.Port != svc.Spec.Ports[0].Name || !endpoint.HonorLabels || r.TargetLabel != "node" || r.SourceLabels[0] != "__meta_kubernetes_pod_node_name" {
		t.Errorf("the endpoint is %+v", endpoint)
	}
}

// The example in the comment of a kustomization is what people copy.
func TestMonitoringKustomizationExample(t *testing.T) {
	objs := overlay(t, map[string]string{"kustomization.yaml": commentedExample(t, monitoringDir+"/kustomization.yaml", "../monitoring", "$csi/../monitoring")})
	monitor := manifest.Only[monitoringv1.ServiceMonitor](t, objs, "ServiceMonitor")
	for _, o := range objs {
		if o.Labels["release"] == "" {
			t.Errorf("%s has no label release", o)
		}
	}
	config := ptr(monitor.Spec.Endpoints[0].TLSConfig)
	svc := manifest.Only[corev1.Service](t, manifest.Render(t, csiDir), "Service")
	if want := svc.Name + "." + svc.Namespace + ".svc"; ptr(config.ServerName) != want {
		t.Errorf("the certificate is checked for %q, want %q", ptr(config.ServerName), want)
	}
	if ptr(config.InsecureSkipVerify) || config.CA.ConfigMap == nil {
		t.Errorf("the certificate is not checked: %+v", config)
	}
}

// commentedExample is the kustomization in the comment at the head of a file: what is
// indented by three blanks and lies between others that are not.
func commentedExample(t *testing.T, file, was, is string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	succeed(t, err)
	_, example, found := strings.Cut(string(content), "looks like this:\n#\n")
	if !found {
		t.Fatalf("%s has no example", file)
	}
	var lines []string
	for line := range strings.Lines(example) {
		rest, indented := strings.CutPrefix(line, "#   ")
		if !indented {
			break
		}
		lines = append(lines, rest)
	}
	return strings.ReplaceAll(strings.Join(lines, ""), was, is)
}
