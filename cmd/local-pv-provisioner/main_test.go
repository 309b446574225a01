package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/localpv"
)

func TestCommandLine(t *testing.T) {
	defaults := localpv.Options{Node: "n1", Namespace: "ns", MetricsAddress: ":8080", PollingInterval: 5 * time.Minute, NewDeviceDelay: 5 * time.Minute, RecordDir: "/var/lib/local-pv-provisioner"}
	all := localpv.Options{Node: "n2", Namespace: "ns2", MetricsAddress: ":9090", PollingInterval: 10 * time.Second, NewDeviceDelay: time.Hour, RecordDir: "/records", DefaultConfigMap: "map"}
	for name, c := range map[string]struct {
		args, env string
		want      localpv.Options
	}{
		"only flags":     {"--node-name=n1 --namespace-name=ns", "", defaults},
		"variables":      {"", "LP_NODE_NAME=n2 LP_NAMESPACE_NAME=ns2 LP_METRICS_ADDR=:9090 LP_POLLING_INTERVAL=10s LP_NEW_DEVICE_DELAY=1h LP_RECORD_DIR=/records LP_DEFAULT_PV_SPEC_CONFIGMAP=map LP_DEVELOPMENT=true", all},
		"flags first":    {"--node-name=n1 --namespace-name ns --metrics-addr=:8080 --polling-interval=5m --record-dir=/var/lib/local-pv-provisioner", "LP_NODE_NAME=n2 LP_METRICS_ADDR=:9090 LP_POLLING_INTERVAL=10s", defaults},
		"of the loggers": {"--node-name=n1 --namespace-name=ns --development --v=2 --zap-log-level=debug", "", defaults},
	} {
		t.Run(name, func(t *testing.T) {
			got, log, err := parse(strings.Fields(c.args), environment(c.env), io.Discard)
			if err != nil || got != c.want {
				t.Errorf("parsed %+v, %v; want %+v", got, err, c.want)
			}
			if log.Development != strings.Contains(c.args+c.env, "evelopment") && log.Development != strings.Contains(c.env, "DEVELOPMENT") {
				t.Errorf("development is %v", log.Development)
			}
		})
	}
}

func environment(text string) func(string) string {
	return func(name string) string {
		for field := range strings.FieldsSeq(text) {
			if value, ok := strings.CutPrefix(field, name+"="); ok {
				return value
			}
		}
		return ""
	}
}

func TestCommandLineReportsAllProblems(t *testing.T) {
	_, _, err := parse([]string{"--polling-interval=5", "--new-device-delay=-1s", "--development=perhaps", "--record-dir=records", "more"}, environment(""), io.Discard)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"--polling-interval", "--new-device-delay", "-development", "--record-dir", "--node-name", "--namespace-name", "more"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want it to name %s", err, want)
		}
	}
}
