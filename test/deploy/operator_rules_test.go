package deploy_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const operatorDir = "../../deploy/operator"

// The object of the upstream operator is checked with this definition under another group, which the one command of upgrade.md makes of it.
func TestDefinitionOfTheCheckBeforeAnUpgrade(t *testing.T) {
	steps, err := os.ReadFile("../../docs/upgrade.md")
	succeed(t, err)
	line := regexp.MustCompile(`check\(\) \{ (sed '[^']*'); \}`).FindSubmatch(steps)
	if line == nil {
		t.Fatal("upgrade.md has no function check")
	}
	definition, err := os.ReadFile(operatorDir + "/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml")
	succeed(t, err)
	run := exec.CommandContext(t.Context(), "sh", "-c", string(line[1]))
	run.Stdin = bytes.NewReader(definition)
	changed, err := run.Output()
	succeed(t, err)
	var got struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Group string `json:"group"`
			Names struct {
				Plural string `json:"plural"`
			} `json:"names"`
		} `json:"spec"`
	}
	succeed(t, yaml.Unmarshal(changed, &got))
	// The API server takes no definition with another name, and would replace the installed one with the same.
	if want := "check.hostpathprovisioner.kubevirt.io"; got.Spec.Group != want || got.Metadata.Name != got.Spec.Names.Plural+"."+want {
		t.Errorf("the definition %s is of the group %s", got.Metadata.Name, got.Spec.Group)
	}
}

// The alerts of the operator have names and labels that users have from upstream, and not those of ruleSets.
func TestOperatorAlertsFire(t *testing.T) {
	content, err := os.ReadFile(operatorDir + "/monitoring/prometheusrule.yaml")
	succeed(t, err)
	var rule monitoringv1.PrometheusRule
	succeed(t, yaml.UnmarshalStrict(content, &rule))
	rules := ruleFile(t, rule.Spec)
	promtool(t, "check", "rules", "--lint-fatal", "--lint=duplicate-rules", rules)
	tests, err := os.ReadFile("testdata/operator-alerts.yaml")
	succeed(t, err)
	file := filepath.Join(filepath.Dir(rules), "tests.yaml")
	succeed(t, os.WriteFile(file, tests, 0o600))
	promtool(t, "test", "rules", file)
}

// The operator is what HPPOperatorDown looks for, and its metrics ask for a token.
func TestOperatorServiceMonitor(t *testing.T) {
	content, err := os.ReadFile(operatorDir + "/monitoring/servicemonitor.yaml")
	succeed(t, err)
	var monitor monitoringv1.ServiceMonitor
	succeed(t, yaml.UnmarshalStrict(content, &monitor))
	content, err = os.ReadFile(operatorDir + "/monitoring/metrics-service.yaml")
	succeed(t, err)
	service, endpoint := manifest.Only[corev1.Service](t, manifest.Parse(t, string(content)), "Service"), monitor.Spec.Endpoints[0]
	for key, value := range monitor.Spec.Selector.MatchLabels {
		if service.Labels[key] != value {
			t.Errorf("the Service has the labels %v, want %s=%s", service.Labels, key, value)
		}
	}
	token := endpoint.BearerTokenFile //nolint:staticcheck // what replaces it wants a Secret; this is Prometheus' own token
	if endpoint.Port != service.Spec.Ports[0].Name || token == "" {
		t.Errorf("the endpoint %+v is not the port %+v, with a token", endpoint, service.Spec.Ports[0])
	}
}

// The unit in the MachineConfig is that of deploy/provisioner, without comments.
func TestOperatorMachineConfig(t *testing.T) {
	unit, err := os.ReadFile("../../deploy/provisioner/host/hostpath-provisioner-selinux.service")
	succeed(t, err)
	content, err := os.ReadFile(operatorDir + "/example/machineconfig-selinux.yaml")
	succeed(t, err)
	var machineConfig struct {
		Spec struct {
			Config struct {
				Systemd struct {
					Units []struct{ Contents string } `json:"units"`
				} `json:"systemd"`
			} `json:"config"`
		} `json:"spec"`
	}
	succeed(t, yaml.Unmarshal(content, &machineConfig))
	want := regexp.MustCompile("(?m)^#.*\n").ReplaceAllString(string(unit), "")
	if got := machineConfig.Spec.Config.Systemd.Units[0].Contents; got != want {
		t.Errorf("the unit is\n%s\nwant\n%s", got, want)
	}
}
