package cases_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const monitoringDir = "../../../deploy/monitoring"

// What users apply is taken by the definitions of the Prometheus operator, and by it and
// by Prometheus too: every node is asked, and the alerts work on what it answers.
func TestMonitoringWithPrometheusOperator(t *testing.T) {
	needTime(t)
	s := begin(t)
	s.installOperator()
	s.apply("-k", monitoringDir)
	s.apply("-k", "../overlay/monitoring")
	p := s.startPrometheus("release=kube-prometheus-stack", 1)

	s.wantDriversWatched(p)
	s.wantMetrics(p)
	s.wantQuietAlerts(p, monitoringDir+"/prometheusrule.yaml")

	const sick = "HostPathPoolReadOnly"
	s.readOnly(nodeB, "/var/plain", true)
	t.Cleanup(func() { s.readOnly(nodeB, "/var/plain", false) })
	s.wantAlerts(p, sick, map[string]string{
		"alertname": sick, "severity": "critical", "namespace": cluster.Namespace, "job": cluster.DaemonSet,
		"service": "hostpath-csi-metrics", "node": nodeB, "instance": nodeB, "pool": "plain",
	})
	s.readOnly(nodeB, "/var/plain", false)
	s.wantAlerts(p, sick)
}

// wantDriversWatched waits until each node is a target that answers, and no other.
func (s *scene) wantDriversWatched(p prometheus) {
	s.Helper()
	want := map[string]string{}
	for node := range c.Nodes {
		want[fmt.Sprint(s.targetLabels(node))] = "1"
	}
	s.until("every driver to be watched", func(ctx context.Context) (string, error) {
		up, err := p.query(ctx, "up")
		got := map[string]string{}
		for _, sample := range up {
			delete(sample.Metric, "__name__")
			got[fmt.Sprint(sample.Metric)] = fmt.Sprint(sample.Value[1])
		}
		return cmp.Diff(want, got), err
	})
}

// targetLabels are those that all series of a node have, as docs/monitoring.md says.
func (s *scene) targetLabels(node string) map[string]string {
	return map[string]string{
		"job": cluster.DaemonSet, "namespace": cluster.Namespace, "service": "hostpath-csi-metrics", "node": node, "instance": node,
	}
}

// Metrics that there are only after something has happened.
var sometimes = []string{"hostpath_csi_panics_total", "hostpath_pool_last_error_timestamp_seconds", "hostpath_pool_trash_oldest_timestamp_seconds", "hostpath_pool_upstream_snapshots"}

// wantMetrics says that what alerts and dashboard ask for has come, with the labels by
// which they ask.
func (s *scene) wantMetrics(p prometheus) {
	s.Helper()
	var known []string
	must.Succeed(s, p.get(s.Context(), "/api/v1/label/__name__/values", &known))
	for _, file := range []string{"prometheusrule.yaml", "dashboard.json"} {
		text, err := os.ReadFile(filepath.Join(monitoringDir, file))
		must.Succeed(s, err)
		asked := regexp.MustCompile(`\bhostpath_\w+`).FindAllString(string(text), -1)
		if len(asked) == 0 {
			s.Errorf("%s asks for no metric", file)
		}
		slices.Sort(asked)
		for _, name := range slices.Compact(asked) {
			if !slices.Contains(known, name) && !slices.Contains(sometimes, name) {
				s.Errorf("%s asks for %s, which Prometheus does not have", file, name)
			}
		}
	}

	series, err := p.query(s.Context(), "hostpath_pool_serving")
	must.Succeed(s, err)
	want, got := map[string]bool{}, map[string]bool{}
	for node := range c.Nodes {
		for _, pool := range []string{"local", "plain"} {
			labels := s.targetLabels(node)
			labels["__name__"], labels["pool"] = "hostpath_pool_serving", pool
			want[fmt.Sprint(labels)] = true
		}
	}
	for _, sample := range series {
		got[fmt.Sprint(sample.Metric)] = sample.Value[1] == "1"
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.Errorf("the pools are other ones (-want +got):\n%s", diff)
	}
}

// wantQuietAlerts waits until all rules of some manifests have been worked out without an
// error. On a cluster with which nothing is wrong no alert fires.
func (s *scene) wantQuietAlerts(p prometheus, manifests ...string) {
	s.Helper()
	want := map[string]string{}
	for _, manifest := range manifests {
		text, err := os.ReadFile(manifest)
		must.Succeed(s, err)
		found := regexp.MustCompile(`(?m)^    - (?:alert|record): (\S+)$`).FindAllStringSubmatch(string(text), -1)
		for _, name := range found {
			want[name[1]] = "ok"
		}
		if len(found) < strings.Count(string(text), "expr:") {
			s.Fatalf("not all rules of %s are found: %v", manifest, slices.Sorted(maps.Keys(want)))
		}
	}
	var rules map[string]rule
	s.until("all rules to be worked out", func(ctx context.Context) (_ string, err error) {
		rules, err = p.rules(ctx)
		got := map[string]string{}
		for name, r := range rules {
			got[name] = strings.TrimSpace(r.Health + " " + r.LastError)
		}
		return cmp.Diff(want, got), err
	})
	for name, r := range rules {
		if r.State == "firing" {
			s.Errorf("%s fires: %v", name, r.Alerts)
		}
	}
}

// wantAlerts waits until an alert is pending or fires for these labels, and for no others.
func (s *scene) wantAlerts(p prometheus, name string, labels ...map[string]string) {
	s.Helper()
	s.until(fmt.Sprintf("%d alerts %s", len(labels), name), func(ctx context.Context) (string, error) {
		rules, err := p.rules(ctx)
		if err != nil {
			return "", err
		}
		var got []map[string]string
		for _, alert := range rules[name].Alerts {
			got = append(got, alert.Labels)
		}
		return cmp.Diff(labels, got), nil
	})
}

// readOnly has the filesystem of a pool refuse writes, or take them again.
func (s *scene) readOnly(node, pool string, on bool) {
	s.Helper()
	mode := "rw"
	if on {
		mode = "ro"
	}
	if out, err := c.Nodes[node].Command(context.Background(), "mount", "-o", "remount,"+mode, pool).CombinedOutput(); err != nil {
		s.Fatalf("mount %s of %s %s: %v: %s", pool, node, mode, err, out)
	}
}
