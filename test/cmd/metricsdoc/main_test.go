package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestDocumentIsCurrent(t *testing.T) {
	has, err := os.ReadFile("../../../docs/metrics.md")
	must.Succeed(t, err)
	var want strings.Builder
	must.Succeed(t, write(&want))
	if diff := cmp.Diff(want.String(), string(has)); diff != "" {
		t.Errorf("docs/metrics.md is out of date, run make docs (-want +got):\n%s", diff)
	}
}

func TestEachMetricIsInOneSection(t *testing.T) {
	families, err := examples().Gather()
	must.Succeed(t, err)
	var document strings.Builder
	must.Succeed(t, write(&document))
	for _, family := range families {
		name := family.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		if got := strings.Count(document.String(), "\n| `"+name+"` |"); got != 1 {
			t.Errorf("%s has %d lines, want one", name, got)
		}
		if !strings.HasSuffix(family.GetHelp(), ".") {
			t.Errorf("the help of %s is no sentence: %q", name, family.GetHelp())
		}
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("against the conventions: %v, %v", problems, err)
	}
}

// A metric that is registered and missing in the example would be missing in the document.
func TestExampleHasAllMetrics(t *testing.T) {
	var document strings.Builder
	must.Succeed(t, write(&document))
	for _, name := range registered(t, examples()) {
		if !strings.Contains(document.String(), "| `"+name+"` |") && !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			t.Errorf("%s is registered and not described", name)
		}
	}
}

// registered are the names of all descriptors, also of those that have no value.
func registered(t *testing.T, all prometheus.Gatherers) (names []string) {
	t.Helper()
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		for _, one := range all {
			one.(prometheus.Collector).Describe(described)
		}
	}()
	name := regexp.MustCompile(`fqName: "([^"]+)"`)
	for desc := range described {
		found := name.FindStringSubmatch(desc.String())
		if found == nil {
			t.Fatalf("%s has no name", desc)
		}
		names = append(names, found[1])
	}
	return names
}
