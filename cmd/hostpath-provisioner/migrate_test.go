package main

import (
	"io"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// variables are those that deploy/migrate sets.
var variables = map[string]string{"NODE_NAME": "node-a", "DATADIR": `[{"name":"local","path":"/var/hpvolumes/csi"}]`, "TO_CLASS": "hostpath-csi", "FROM_DIR": "/var/hpvolumes/"}

func TestParseMigration(t *testing.T) {
	getenv := func(name string) string { return variables[name] }
	c, err := parseMigration([]string{"--claim=a/b", "--claim=c/d", "--namespace=e", "--from-class=f", "--apply", "--steps=2"}, getenv, io.Discard)
	must.Succeed(t, err)
	if want := []types.NamespacedName{{Namespace: "a", Name: "b"}, {Namespace: "c", Name: "d"}}; !slices.Equal(c.Chosen.Claims, want) {
		t.Errorf("claims %v", c.Chosen.Claims)
	}
	if c.Chosen.Namespace != "e" || c.Chosen.Class != "f" || c.Chosen.All || !c.Apply || c.Undo || c.Steps != 2 {
		t.Errorf("%+v", c.Config)
	}
	if c.Node != "node-a" || c.Class != "hostpath-csi" || !slices.Equal(c.From, []string{"/var/hpvolumes"}) || c.Pools[0].Path != "/var/hpvolumes/csi" {
		t.Errorf("%+v", c.Config)
	}
}

func TestParseMigrationReportsAllProblems(t *testing.T) {
	_, err := parseMigration([]string{"--claim=b", "--from-dir=relative", "--steps=-1", "argument"}, func(string) string { return "" }, io.Discard)
	for _, word := range []string{"no claims are chosen", "namespace/name", "relative", "--datadir", "--node-name", "--to-class", "--steps", "argument"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %q", err, word)
		}
	}
	// The way back needs no class and no pool.
	if _, err := parseMigration([]string{"--all", "--undo", "--node-name=node-a"}, func(string) string { return "" }, io.Discard); err != nil {
		t.Error(err)
	}
}
