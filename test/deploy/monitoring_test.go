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

// A monitor selects the service of its program, and gives its targets the labels that alerts and dashboard go by.
func TestMonitors(t *testing.T) {
	for job, of := range map[string]struct{ service, monitor string }{
		"hostpath-csi-driver":  {csiDir, monitoringDir},
		"local-pv-provisioner": {deployDir + "devices", deployDir + "devices/monitoring"},
	} {
		t.Run(job, func(t *testing.T) {
			service := manifest.Render(t, of.service)
			svc, set := manifest.Only[corev1.Service](t, service, "Service"), manifest.Only[appsv1.DaemonSet](t, service, "DaemonSet")
			monitor := manifest.Only[monitoringv1.ServiceMonitor](t, manifest.Render(t, of.monitor), "ServiceMonitor")
			selected, pods := labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels), labels.SelectorFromSet(svc.Spec.Selector)
			if selected.Empty() || !selected.Matches(labels.Set(svc.Labels)) || pods.Empty() || !pods.Matches(labels.Set(set.Spec.Template.Labels)) {
				t.Errorf("the monitor selects %s, and the service, with %v, %s", selected, svc.Labels, pods)
			}
			if got := svc.Labels[monitor.Spec.JobLabel]; got != job {
				t.Errorf("the label job will be %q", got)
			}
			endpoint, labelled := monitor.Spec.Endpoints[0], map[string]string{}
			for _, r := range endpoint.RelabelConfigs {
				if len(r.SourceLabels) > 0 {
					labelled[r.TargetLabel] = string(r.SourceLabels[0])
				}
			}
			const node = "__meta_kubernetes_pod_node_name"
			if endpoint.Port != svc.Spec.Ports[0].Name || labelled["node"] != node || labelled["instance"] != node {
				t.Errorf("the endpoint is %+v", endpoint)
			}
			// Its metrics have a label "node" of their own, which would become "exported_node".
			if job == "local-pv-provisioner" && !endpoint.HonorLabels {
				t.Error("the own label of the agent is replaced")
			}
		})
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
