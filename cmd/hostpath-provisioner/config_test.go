package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
)

func parseQuietly(t *testing.T, environment map[string]string, args ...string) (config, error) {
	t.Helper()
	state := klog.CaptureState()
	t.Cleanup(state.Restore)
	return parse(args, func(name string) string { return environment[name] }, io.Discard)
}

func TestParse(t *testing.T) {
	tests := map[string]struct {
		environment map[string]string
		args        []string
		want        provisioner.Config
	}{
		"the environment of today": {
			map[string]string{"NODE_NAME": "node-a", "PV_DIR": "/var/hpvolumes/", "USE_NAMING_PREFIX": "True", "POD_NAMESPACE": "space"}, nil,
			provisioner.Config{Mode: provisioner.PerNode, Node: "node-a", Namespace: "space", Path: "/var/hpvolumes", NamePrefix: true},
		},
		"flags win": {
			map[string]string{"NODE_NAME": "node-a", "PV_DIR": "/var/hpvolumes"}, []string{"--node-name=node-b", "--pv-dir=/pool"},
			provisioner.Config{Mode: provisioner.PerNode, Node: "node-b", Path: "/pool"},
		},
		"single node": {
			map[string]string{"NODE_NAME": "node-a", "PV_DIR": "/pool", "PV_RECLAIM_POLICY": "Retain", "PV_DIR_SHARED": "true"}, []string{"--mode=single-node"},
			provisioner.Config{Mode: provisioner.SingleNode, Node: "node-a", Path: "/pool", ReclaimPolicy: corev1.PersistentVolumeReclaimRetain, Shared: true},
		},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			c, err := parseQuietly(t, tt.environment, tt.args...)
			if err != nil || c.provisioner != tt.want {
				t.Errorf("%+v, %v; want %+v", c.provisioner, err, tt.want)
			}
			if c.pool.Except != provisioner.CSIDirectory {
				t.Errorf("%q is not a volume", c.pool.Except)
			}
		})
	}
}

func TestParseReportsAllProblemsAndTouchesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pool")
	_, err := parseQuietly(t, map[string]string{"PV_DIR": dir, "USE_NAMING_PREFIX": "maybe", "PV_RECLAIM_POLICY": "Recycle", "POD_NAMESPACE": "Not One"},
		"--mode=both", "--pv-dir-shared=true", `--pool-options={"snapshotPath":"/x"}`, "--metrics-tls-version=2", "--health-address=x", "--state-dir="+dir+"/state", "--unknown", "argument")
	for _, word := range []string{"--mode", "--node-name", "--use-naming-prefix", "--pv-reclaim-policy", "--pod-namespace", "--pv-dir-shared",
		"snapshotPath", "--metrics-tls-version", "--health-address", "--state-dir", "unknown", "argument"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %q", err, word)
		}
	}
	// Of the options too, whatever is wrong with the directory.
	_, err = parseQuietly(t, map[string]string{"NODE_NAME": "node-a"}, `--pool-options={"snapshotPath":"/x","reserve":"much","overprovision":-1}`, "--device-nodes=dev", "--state-dir=state")
	for _, words := range []string{"--pv-dir: is missing", "--pool-options: ", "snapshotPath", "reserve", "overprovision", "--device-nodes", "--state-dir"} {
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v does not say %q", err, words)
		}
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s was made (%v)", dir, err)
	}
}
