package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/inspect"
)

// environment is what a process gets, by the names of the variables.
func environment(variables map[string]string) func(string) string {
	return func(name string) string { return variables[name] }
}

func TestInspectTellsAllThatIsWrongWithItsFlags(t *testing.T) {
	var stdout, stderr bytes.Buffer
	status := runInspect([]string{
		"--colour=red", "--datadir=pool", "--nodeid=/", "--volume=..", "--output=xml", "--endpoint=tcp://x", "more",
	}, environment(nil), &stdout, &stderr)
	if status != 1 || stdout.Len() > 0 {
		t.Errorf("it ends with %d and prints %q, want 1 and nothing", status, stdout.String())
	}
	for _, words := range []string{"-colour", "--datadir", "--nodeid", "--volume", "--output", "--endpoint", `"more"`} {
		if !strings.Contains(stderr.String(), words) {
			t.Errorf("%q does not say %q", stderr.String(), words)
		}
	}
}

func TestInspectAsksWhichPools(t *testing.T) {
	for name, c := range map[string]struct {
		args        []string
		environment map[string]string
		says        string
	}{
		"without any":              {nil, nil, "which pools?"},
		"of an unknown name":       {[]string{"--pool=fast"}, map[string]string{"DATADIR": `[{"name":"local","path":"/nowhere"}]`}, `no pool is named "fast"`},
		"with pools that are none": {nil, map[string]string{"DATADIR": `{}`}, "JSON array"},
		"without its device nodes": {[]string{"--device-nodes=/no/such"}, map[string]string{"DATADIR": `[{"name":"local","path":"/nowhere"}]`}, "--device-nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if status := runInspect(c.args, environment(c.environment), &stdout, &stderr); status != 1 || !strings.Contains(stderr.String(), c.says) {
				t.Errorf("it ends with %d and says %q, want 1 and %q", status, stderr.String(), c.says)
			}
		})
	}
}

func TestInspectTakesItsDefaultsFromTheEnvironment(t *testing.T) {
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
		"all of them":             {nil, "node-a", []string{"/a", "/b"}},
		"flags count more":        {[]string{"--nodeid=node-b", `--datadir=[{"name":"c","path":"` + root + `/c"}]`}, "node-b", []string{"/c"}},
		"one pool of them":        {[]string{"--pool=b"}, "node-a", []string{"/b"}},
		"a volume that may be in": {[]string{"--volume=pvc-1"}, "node-a", []string{"/a", "/b"}},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			// No pool is there, which is not in order.
			if status := runInspect(append(c.args, "--output=json"), environment(variables), &stdout, &stderr); status != 2 {
				t.Fatalf("it ends with %d: %s", status, stderr.String())
			}
			var report inspect.Report
			must(t, json.Unmarshal(stdout.Bytes(), &report))
			var paths []string
			for _, p := range report.Pools {
				paths = append(paths, strings.TrimPrefix(p.Path, root))
			}
			if report.Node != c.node || strings.Join(paths, " ") != strings.Join(c.paths, " ") {
				t.Errorf("it looks at %q of %s, want %q of %s", paths, report.Node, c.paths, c.node)
			}
			if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
				t.Errorf("it made %v (%v)", left, err)
			}
		})
	}
}

func TestInspectPrintsItsFlags(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if status := runInspect([]string{"--help"}, environment(nil), &stdout, &stderr); status != 0 || !strings.Contains(stdout.String(), "-volume") {
		t.Errorf("it ends with %d and prints %q", status, stdout.String())
	}
}

func TestInspectSaysThatAVolumeIsNowhere(t *testing.T) {
	p := newPlace(t)
	must(t, os.MkdirAll(filepath.Join(p.pool, ".hostpath-provisioner", "volumes"), 0o700))
	must(t, os.WriteFile(filepath.Join(p.pool, ".hostpath-provisioner", "format"), []byte(`{"version":1,"uuid":"u"}`), 0o600))
	var stdout, stderr bytes.Buffer
	status := runInspect([]string{`--datadir=[{"name":"local","path":"` + p.pool + `"}]`, "--volume=pvc-1"}, environment(nil), &stdout, &stderr)
	if status != 1 || !strings.Contains(stderr.String(), "no pool has a volume pvc-1") {
		t.Errorf("it ends with %d and says %q", status, stderr.String())
	}
}
