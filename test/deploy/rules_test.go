package deploy_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	runbooks   = docsDir + "/runbooks"
	runbookURL = "https://github.com/kubevirt/hostpath-provisioner/blob/main/docs/runbooks/"
)

// A ruleSet is the alerts of one program, and where they are described and tested.
type ruleSet struct {
	dir    string // of the kustomization
	prefix string // of the names; the dashboard counts the driver's alerts by theirs
	doc    string // with the table of alerts
	series string // the document with the table of metrics
	tests  string // for promtool
}

var ruleSets = []ruleSet{
	{monitoringDir, "HostPath", "monitoring.md", "metrics.md", "testdata/alerts.yaml"},
	{deployDir + "devices/monitoring", "LocalPV", "devices.md", "devices.md", "testdata/devices-alerts.yaml"},
}

// forRules runs a test for each set of rules.
func forRules(t *testing.T, test func(t *testing.T, set ruleSet)) {
	t.Helper()
	for _, set := range ruleSets {
		t.Run(set.prefix, func(t *testing.T) { test(t, set) })
	}
}

func (s ruleSet) alerts(t *testing.T) []monitoringv1.Rule {
	t.Helper()
	var found []monitoringv1.Rule
	for _, group := range s.rules(t).Groups {
		for _, rule := range group.Rules {
			if rule.Alert == "" {
				t.Errorf("the group %s has a rule without an alert: %v", group.Name, rule)
			}
			found = append(found, rule)
		}
	}
	return found
}

func TestAlertLabelsAndAnnotations(t *testing.T) {
	forRules(t, func(t *testing.T, set ruleSet) {
		names := map[string]bool{}
		for _, a := range set.alerts(t) {
			t.Run(a.Alert, func(t *testing.T) {
				if names[a.Alert] {
					t.Error("the name is there twice")
				}
				names[a.Alert] = true
				set.checkAlert(t, a)
			})
		}
	})
}

func (s ruleSet) checkAlert(t *testing.T, a monitoringv1.Rule) {
	t.Helper()
	if !strings.HasPrefix(a.Alert, s.prefix) {
		t.Errorf("the name does not begin with %s", s.prefix)
	}
	if severity := a.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info"}, severity) {
		t.Errorf("the severity is %q", severity)
	}
	if summary := a.Annotations["summary"]; !strings.HasSuffix(summary, ".") || strings.Contains(summary, "{{") {
		t.Errorf("the summary %q is not a sentence that alerts of all nodes share", summary)
	}
	description := a.Annotations["description"]
	if !strings.Contains(description, "{{ $labels.node }}") && a.Alert != "HostPathDriverMissing" {
		t.Errorf("the description does not name the node: %s", description)
	}
	if strings.HasPrefix(a.Alert, "HostPathPool") && !strings.Contains(description, "{{ $labels.pool }}") {
		t.Errorf("the description does not name the pool: %s", description)
	}
	if want := runbookURL + a.Alert + ".md"; a.Annotations["runbook_url"] != want {
		t.Errorf("the runbook is at %s, want %s", a.Annotations["runbook_url"], want)
	}
	wantDocumented(t, a.Expr.String(), s.series)
}

func TestAlertsMatchRunbooks(t *testing.T) {
	var want []string
	for _, set := range ruleSets {
		for _, a := range set.alerts(t) {
			want = append(want, filepath.Join(runbooks, a.Alert+".md"))
		}
	}
	got, err := filepath.Glob(runbooks + "/*.md")
	succeed(t, err)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the runbooks are %q, want %q", got, want)
	}
}

func TestAlertsAreDocumented(t *testing.T) {
	forRules(t, func(t *testing.T, set ruleSet) {
		content, err := os.ReadFile(filepath.Join(docsDir, set.doc))
		succeed(t, err)
		var got, want []string
		for _, m := range regexp.MustCompile(`(?m)^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (\w+) \| .+\.? \|$`).FindAllStringSubmatch(string(content), -1) {
			if m[1] != m[2] {
				t.Errorf("%s is linked to the runbook of %s", m[1], m[2])
			}
			got = append(got, m[1]+" "+m[3])
		}
		for _, a := range set.alerts(t) {
			want = append(want, a.Alert+" "+a.Labels["severity"])
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("docs/%s has the alerts %q, want %q", set.doc, got, want)
		}
	})
}

// promtool is that of Debian, which test/tools/install-deps puts into bin/tools, or one
// on the PATH.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	program, err := filepath.Abs("../../bin/tools/promtool")
	succeed(t, err)
	if _, err := os.Stat(program); err != nil {
		if program, err = exec.LookPath("promtool"); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal("promtool is missing, and CI is set")
			}
			t.Skip("promtool is missing: test/tools/install-deps test brings it")
		}
	}
	if output, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, output)
	}
}

func (s ruleSet) rules(t *testing.T) monitoringv1.PrometheusRuleSpec {
	t.Helper()
	return manifest.Only[monitoringv1.PrometheusRule](t, manifest.Render(t, s.dir), "PrometheusRule").Spec
}

// ruleFile has rules as Prometheus reads them.
func ruleFile(t *testing.T, rules monitoringv1.PrometheusRuleSpec) string {
	t.Helper()
	groups, err := yaml.Marshal(rules)
	succeed(t, err)
	file := filepath.Join(t.TempDir(), "rules.yaml")
	succeed(t, os.WriteFile(file, groups, 0o600))
	return file
}

func TestRulesAreValid(t *testing.T) {
	forRules(t, func(t *testing.T, set ruleSet) {
		promtool(t, "check", "rules", "--lint-fatal", ruleFile(t, set.rules(t)))
	})
}

// alertTests is the part of a file of promtool's tests that is checked here.
type alertTests struct {
	Tests []struct {
		Name           string `json:"name"`
		AlertRuleTests []struct {
			AlertName string            `json:"alertname"`
			Expected  []json.RawMessage `json:"exp_alerts"`
		} `json:"alert_rule_test"`
	} `json:"tests"`
}

func TestAlertsFire(t *testing.T) {
	forRules(t, checkFiring)
}

func checkFiring(t *testing.T, set ruleSet) {
	t.Helper()
	content, err := os.ReadFile(set.tests)
	succeed(t, err)
	var file alertTests
	succeed(t, yaml.Unmarshal(content, &file))
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		for _, a := range test.AlertRuleTests {
			if len(a.Expected) > 0 {
				fires[a.AlertName] = true
			} else {
				quiet[a.AlertName] = true
			}
		}
	}
	for _, a := range set.alerts(t) {
		if !fires[a.Alert] || !quiet[a.Alert] {
			t.Errorf("%s: it is tested that %s fires: %t, and that it does not: %t", set.tests, a.Alert, fires[a.Alert], quiet[a.Alert])
		}
	}

	tried := set.rules(t)
	for _, group := range tried.Groups {
		for _, rule := range group.Rules {
			// Which have no variables, and would have to be in the tests as they are.
			delete(rule.Annotations, "summary")
			delete(rule.Annotations, "runbook_url")
		}
	}
	// promtool searches for the rules next to its tests.
	tests := filepath.Join(filepath.Dir(ruleFile(t, tried)), "alerts.yaml")
	succeed(t, os.WriteFile(tests, content, 0o600))
	promtool(t, "test", "rules", tests)
}
