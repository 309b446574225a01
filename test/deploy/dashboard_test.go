package deploy_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// asked are the names of our metrics in an expression.
var asked = regexp.MustCompile(`\b(?:hostpath|kubevirt_hpp|local_pv_provisioner)_\w+`)

// wantDocumented expects our metrics in an expression to be in the tables of a document, which tests of its generator and of pkg/localpv
// keep to what is served.
func wantDocumented(t *testing.T, expr, document string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(docsDir, document))
	succeed(t, err)
	for _, name := range asked.FindAllString(expr, -1) {
		name = regexp.MustCompile("(_seconds)_(bucket|count|sum)$").ReplaceAllString(name, "$1")
		if !strings.Contains(string(page), "\n| `"+name+"`") {
			t.Errorf("there is no metric %s, which %s asks for", name, expr)
		}
	}
}

// Grafana's sidecar takes the dashboard. A panel asks the data source that was chosen, for metrics that there are, and says which alert
// uses the same numbers.
func TestDashboard(t *testing.T) {
	config := manifest.Only[corev1.ConfigMap](t, manifest.Render(t, monitoringDir), "ConfigMap")
	content := config.Data["hostpath-csi.json"]
	if config.Labels["grafana_dashboard"] != "1" || config.Name != "hostpath-csi-dashboard" || len(config.Data) != 1 {
		t.Errorf("the ConfigMap %s has the labels %v and %d files", config.Name, config.Labels, len(config.Data))
	}
	var dashboard struct {
		Panels []struct {
			Type, Title string
			Targets     []struct {
				Expr       string
				Datasource struct{ Type, UID string }
			}
		}
	}
	succeed(t, json.Unmarshal([]byte(content), &dashboard))
	for _, p := range dashboard.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("the panel %s asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			if target.Datasource.Type != "prometheus" || target.Datasource.UID != "${datasource}" {
				t.Errorf("%s asks %v", p.Title, target.Datasource)
			}
			wantDocumented(t, target.Expr, "metrics.md")
		}
	}
	var known []string
	for _, a := range ruleSets[0].alerts(t) {
		known = append(known, a.Alert)
	}
	named := regexp.MustCompile(`HostPath[A-Z][A-Za-z]+`).FindAllString(content, -1)
	if len(named) == 0 {
		t.Error("the dashboard names no alert")
	}
	for _, name := range named {
		if !slices.Contains(known, name) {
			t.Errorf("there is no alert %s", name)
		}
	}
}
