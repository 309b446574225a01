package sanity

import (
	"slices"
	"strings"
	"testing"
)

const ginkgoReport = `[{
  "SuiteDescription": "CSI Driver Test Suite",
  "SpecialSuiteFailureReasons": ["Interrupted by Timeout"],
  "SpecReports": [
    {"LeafNodeType": "BeforeSuite", "State": "passed"},
    {"LeafNodeType": "AfterSuite", "LeafNodeText": "tidy", "State": "panicked", "Failure": {"Message": "boom"}},
    {"ContainerHierarchyTexts": ["Node Service", "NodeGetInfo"], "LeafNodeType": "It",
     "LeafNodeText": "should work", "State": "passed", "Failure": {}},
    {"ContainerHierarchyTexts": null, "LeafNodeType": "It",
     "LeafNodeText": "should grow", "State": "skipped", "Failure": {"Message": "NodeExpandVolume not supported\n"}}
  ]
}]`

func TestReadReport(t *testing.T) {
	got, err := readReport(strings.NewReader(ginkgoReport))
	want := []spec{
		{"the suite as a whole", "failed", "Interrupted by Timeout"},
		{"tidy", "panicked", "boom"},
		{"Node Service NodeGetInfo should work", "passed", ""},
		{"should grow", "skipped", "NodeExpandVolume not supported"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("readReport = %q, %v; want %q", got, err, want)
	}
	if _, err := readReport(strings.NewReader("[{")); err == nil {
		t.Error("half a report was taken for a whole one")
	}
}

func TestProblems(t *testing.T) {
	good := spec{"a", passed, ""}
	for _, test := range []struct {
		name  string
		specs []spec
		want  string // in the one problem there is, if any
	}{
		{"passed, switched off, or for want of a capability that is not advertised",
			[]spec{good, {"b", pending, ""}, {"c", skipped, "NodeStageVolume not supported"}}, ""},
		{"failed", []spec{good, {"b", "failed", "expected 1, got 2"}}, "b: failed: expected 1, got 2"},
		{"another bad end", []spec{good, {"b", "timedout", ""}}, "b: timedout"},
		{"skipped although advertised", []spec{good, {"b", skipped, "GetCapacity not supported"}},
			"b: skipped for want of controller GET_CAPACITY, which is advertised"},
		{"skipped for another reason", []spec{good, {"b", skipped, "Required bytes not supported"}},
			`b: skipped for a reason that is no capability: "Required bytes not supported"`},
		{"nothing at all", nil, "no spec has passed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := run{specs: test.specs}.problems()
			if len(got) > 1 || !strings.Contains(strings.Join(got, ""), test.want) || (test.want == "") != (len(got) == 0) {
				t.Errorf("problems = %q, want %q", got, test.want)
			}
		})
	}
}

func TestUntried(t *testing.T) {
	r := run{specs: []spec{{"GetSnapshot a", passed, ""}, {"DeleteSnapshot b", skipped, "DeleteSnapshot not supported"}, {"CreateSnapshot c", "failed", ""}}}
	if got, want := r.untried([]string{"CreateSnapshot", "GetSnapshot", "DeleteSnapshot", "clone"}), []string{"CreateSnapshot", "DeleteSnapshot", "clone"}; !slices.Equal(got, want) {
		t.Errorf("untried = %q, want %q", got, want)
	}
}

func TestSummarise(t *testing.T) {
	runs := []run{
		{"ext4 mount", []spec{
			{"create", passed, ""}, {"stage", skipped, "NodeStageVolume not supported"}, {"unstage", skipped, "NodeUnstageVolume not supported"},
			{"pages", pending, ""},
		}},
		{"xfs mount", []spec{
			{"create", "failed", ""}, {"stage", skipped, "NodeStageVolume not supported"}, {"unstage", passed, ""}, {"pages", pending, ""},
			{"odd", skipped, "no reason"},
		}},
	}
	want := `csi-sanity       passed   failed  skipped  pending
ext4 mount            1        0        2        1
xfs mount             1        1        2        1

not run (1): AGAINST THE RULES, skipped for a reason that is no capability: "no reason"
  - odd (only xfs mount)

not run (2): node STAGE_UNSTAGE_VOLUME is not advertised
  - stage
  - unstage (only ext4 mount)

not run (1): switched off by csi-sanity itself
  - pages
`
	if got := summarise(runs); got != want {
		t.Errorf("summarise printed\n%s\nwant\n%s", got, want)
	}
}
