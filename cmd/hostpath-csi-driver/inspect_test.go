package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// environment is a getenv of these variables.
func environment(variables map[string]string) func(string) string {
	return func(name string) string { return variables[name] }
}

func TestInspectReportsAllBadFlags(t *testing.T) {
	var stdout, stderr bytes.Buffer
	status := runInspect([]string{
		"--colour=red", "--datadir=pool", "--nodeid=/", "--volume=..", "--output=xml", "--endpoint=tcp://x", "more",
	}, environment(nil), &stdout, &stderr)
	if status != 1 || stdout.Len() > 0 {
		t.Errorf("exit status %d, stdout %q, want 1 and nothing", status, stdout.String())
	}
	for _, words := range []string{"-colour", "--datadir", "--nodeid", "--volume", "--output", "--endpoint", `"more"`} {
		if !strings.Contains(stderr.String(), words) {
			t.Errorf("stderr %q lacks %q", stderr.String(), words)
		}
	}
}

func TestInspectBadPools(t *testing.T) {
	for name, c := range map[string]struct {
		args        []string
		environment map[string]string
		says        string
	}{
		"no --datadir":              {nil, nil, "--datadir: required"},
		"unknown --pool":            {[]string{"--pool=fast"}, map[string]string{"DATADIR": `[{"name":"local","path":"/nowhere"}]`}, `no pool is named "fast"`},
		"--datadir is not an array": {nil, map[string]string{"DATADIR": `{}`}, "JSON array"},
		"missing --device-nodes":    {[]string{"--device-nodes=/no/such"}, map[string]string{"DATADIR": `[{"name":"local","path":"/nowhere"}]`}, "--device-nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if status := runInspect(c.args, environment(c.environment), &stdout, &stderr); status != 1 || !strings.Contains(stderr.String(), c.says) {
				t.Errorf("exit status %d, stderr %q; want 1 and %q", status, stderr.String(), c.says)
			}
		})
	}
}

func TestInspectDefaultsFromEnvironment(t *testing.T) {
	root := t.TempDir()
	variables := map[string]string{
		"DATADIR":      `[{"name":"a","path":"` + root + `/a"},{"name":"b","path":"` + root + `/b"}]`,
		"NODE_NAME":    "node-a",
		"DEVICE_NODES": "/dev",
	}
	for name, c := range map[string]struct {
		args  []string
		node  string
		paths []string
	}{
		"no flags":       {nil, "node-a", []string{"/a", "/b"}},
		"flags override": {[]string{"--nodeid=node-b", `--datadir=[{"name":"c","path":"` + root + `/c"}]`}, "node-b", []string{"/c"}},
		"one pool":       {[]string{"--pool=b"}, "node-a", []string{"/b"}},
		"one volume":     {[]string{"--volume=pvc-1"}, "node-a", []string{"/a", "/b"}},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			// No pool exists, so the report is abnormal.
			if status := runInspect(append(c.args, "--output=json"), environment(variables), &stdout, &stderr); status != 2 {
				t.Fatalf("exit status %d: %s", status, stderr.String())
			}
			var report inspect.Report
			must.Succeed(t, json.Unmarshal(stdout.Bytes(), &report))
			var paths []string
			for _, p := range report.Pools {
				paths = append(paths, strings.TrimPrefix(p.Path, root))
			}
			if report.Node != c.node || strings.Join(paths, " ") != strings.Join(c.paths, " ") {
				t.Errorf("inspected %q of %s, want %q of %s", paths, report.Node, c.paths, c.node)
			}
			if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
				t.Errorf("inspect created %v (%v)", left, err)
			}
		})
	}
}

func TestInspectHelp(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if status := runInspect([]string{"--help"}, environment(nil), &stdout, &stderr); status != 0 || !strings.Contains(stdout.String(), "-volume") {
		t.Errorf("exit status %d, stdout %q", status, stdout.String())
	}
}

func TestInspectUnknownVolume(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, os.MkdirAll(filepath.Join(h.pool, ".hostpath-provisioner", "volumes"), 0o700))
	must.Succeed(t, os.WriteFile(filepath.Join(h.pool, ".hostpath-provisioner", "format"), []byte(`{"version":1,"uuid":"u"}`), 0o600))
	var stdout, stderr bytes.Buffer
	status := runInspect([]string{`--datadir=[{"name":"local","path":"` + h.pool + `"}]`, "--volume=pvc-1"}, environment(nil), &stdout, &stderr)
	if status != 1 || !strings.Contains(stderr.String(), "no pool has volume pvc-1") {
		t.Errorf("exit status %d, stderr %q", status, stderr.String())
	}
}

func TestTakeSecond(t *testing.T) {
	for args, want := range map[string]string{
		"--diff a b":               "--diff a, b",
		"-diff=a b --pool=local":   "-diff=a --pool=local, b",
		"--pool local --diff a b":  "--pool local --diff a, b",
		"--diff a --output json":   "--diff a --output json, ",
		"--diff a":                 "--diff a, ",
		"--diff":                   "--diff, ",
		"--diff=a":                 "--diff=a, ",
		"--different a b":          "--different a b, ",
		"--volume pvc-1 unrelated": "--volume pvc-1 unrelated, ",
	} {
		rest, second := takeSecond(strings.Fields(args))
		if got := strings.Join(rest, " ") + ", " + second; got != want {
			t.Errorf("of %q the second is taken as %q, want %q", args, got, want)
		}
	}
}
