package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestForgetPool(t *testing.T) {
	state, pool := t.TempDir(), poolOf(t, "u2")
	for _, p := range []served.Entry{{Name: "old", Path: "/old", UUID: "u1"}, {Name: "local", Path: pool, UUID: "u2"}} {
		n := served.Note{Memory: served.In(state)}
		must.Succeed(t, n.Write(p, func() []string { return []string{"pvc-" + p.Name} }))
	}
	env := map[string]string{"DATADIR": `[{"name":"local","path":"` + pool + `"}]`, "STATE_DIR": state}
	run := func(args ...string) (status int, said string) {
		var out strings.Builder
		command := runForgetPool
		if len(args) == 0 {
			command = runInspect
		}
		status = command(args, func(name string) string { return env[name] }, &out, &out)
		return status, out.String()
	}
	if status, said := run(); status != abnormal || !strings.Contains(said, "pool old at /old: ABNORMAL: it is not configured any more, not mounted, or below another mount, and had 1 volume,") {
		t.Errorf("inspect: %d, %s", status, said)
	}
	for _, name := range []string{"local", "other", ""} {
		if status, said := run("--pool=" + name); status != failed {
			t.Errorf("forget %q: %d, %s", name, status, said)
		}
	}
	if status, said := run("--pool=old"); status != healthy || !strings.Contains(said, "forgot pool old at /old") {
		t.Errorf("forget: %d, %s", status, said)
	}
	if _, err := os.Stat(filepath.Join(state, "pools", "u2.json")); err != nil {
		t.Error(err)
	}
	if _, said := run(); strings.Contains(said, "pool old") {
		t.Errorf("inspect shows %s", said)
	}
}

// poolOf is a directory that a driver has made a pool.
func poolOf(t *testing.T, uuid string) string {
	t.Helper()
	path := t.TempDir()
	own := filepath.Join(path, ".hostpath-provisioner")
	must.Succeed(t, os.MkdirAll(filepath.Join(own, "volumes"), 0o700), os.WriteFile(filepath.Join(own, "format"), []byte(`{"version":1,"uuid":"`+uuid+`"}`), 0o600))
	return path
}

// What is at the path of a pool may be the directory below its filesystem.
func TestForgetPoolThatIsNotMounted(t *testing.T) {
	state, pool := t.TempDir(), t.TempDir()
	n := served.Note{Memory: served.In(state)}
	must.Succeed(t, n.Write(served.Entry{Name: "local", Path: pool, UUID: "u1"}, func() []string { return []string{"pvc-1"} }))
	for _, required := range []string{"true", "false"} {
		var out strings.Builder
		status := runForgetPool([]string{
			"--pool=local", "--state-dir=" + state, "--endpoint=unix://" + state + "/csi.sock",
			`--datadir=[{"name":"local","path":"` + pool + `","requireMount":` + required + `}]`,
		}, func(string) string { return "" }, &out, &out)
		if forgot := status == healthy; forgot != (required == "false") {
			t.Errorf("requireMount %s: %d, %s", required, status, out.String())
		}
	}
}

// The pools that are not inspected are configured all the same.
func TestInspectOfOnePoolShowsNoOtherAsOutOfUse(t *testing.T) {
	state, pool, other := t.TempDir(), t.TempDir(), poolOf(t, "u1")
	n := served.Note{Memory: served.In(state)}
	must.Succeed(t, n.Write(served.Entry{Name: "other", Path: other, UUID: "u1"}, func() []string { return []string{"pvc-1"} }))
	var out strings.Builder
	runInspect([]string{
		"--pool=local", "--state-dir=" + state, `--datadir=[{"name":"local","path":"` + pool + `"},{"name":"other","path":"` + other + `"}]`,
	}, func(string) string { return "" }, &out, &out)
	if strings.Contains(out.String(), "not configured any more") {
		t.Error(out.String())
	}
}
