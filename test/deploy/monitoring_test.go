package deploy_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/prometheus/promql/parser"
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

// dashboardJSON is the one in the ConfigMap that Grafana's sidecar takes.
func dashboardJSON(t *testing.T) []byte {
	t.Helper()
	config := manifest.Only[corev1.ConfigMap](t, manifest.Render(t, monitoringDir), "ConfigMap")
	if config.Labels["grafana_dashboard"] != "1" {
		t.Errorf("Grafana's sidecar does not take a ConfigMap with the labels %v", config.Labels)
	}
	if config.Name != "hostpath-csi-dashboard" || len(config.Data) != 1 {
		t.Fatalf("the ConfigMap %s has %d files, want one", config.Name, len(config.Data))
	}
	content := []byte(config.Data["hostpath-csi.json"])
	if !json.Valid(content) {
		t.Fatal("the dashboard is not JSON")
	}
	return content
}

// documented are the metrics of docs/metrics.md, which a test of its generator keeps
// to what the driver serves, and those of the library, which it only mentions.
func documented(t *testing.T) []string {
	t.Helper()
	names := documentedIn(t, "metrics.md")
	if len(names) < 10 {
		t.Fatalf("docs/metrics.md has only the metrics %q", names)
	}
	return names
}

// documentedIn are the metrics in the tables of a document, and those of the library.
func documentedIn(t *testing.T, document string) []string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(docsDir, document))
	succeed(t, err)
	var names []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)`").FindAllStringSubmatch(string(content), -1) {
		names = append(names, m[1])
	}
	if len(names) == 0 {
		t.Fatalf("docs/%s has no metrics", document)
	}
	library := prometheus.NewPedanticRegistry()
	library.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	families, err := library.Gather()
	succeed(t, err)
	for _, family := range families {
		names = append(names, family.GetName())
	}
	return names
}

// metricsOf are the metrics that an expression asks for, by the names under which
// they are documented.
func metricsOf(t *testing.T, expr string) []string {
	t.Helper()
	parsed, err := parser.ParseExpr(expr)
	if err != nil {
		t.Errorf("%s: %v", expr, err)
		return nil
	}
	var names []string
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			names = append(names, regexp.MustCompile("(_seconds)_(bucket|count|sum)$").ReplaceAllString(selector.Name, "$1"))
		}
		return nil
	})
	return names
}

// wantExisting expects an expression to ask for documented metrics, or what
// Prometheus makes itself.
func wantExisting(t *testing.T, expr string, documented []string) {
	t.Helper()
	names := metricsOf(t, expr)
	if len(names) == 0 {
		t.Errorf("%s asks for no metric", expr)
	}
	known := slices.Concat(documented, []string{"up", "ALERTS"})
	for _, name := range names {
		if !slices.Contains(known, name) {
			t.Errorf("there is no metric %s, which %s asks for", name, expr)
		}
	}
}
