package sanity

import (
	"strings"
	"testing"
)

// What was not tried must not look like what has passed.
func TestProblems(t *testing.T) {
	with := func(more ...spec) []spec {
		for _, name := range needed {
			more = append(more, spec{name, passed, ""})
		}
		return more
	}
	for name, test := range map[string]struct {
		specs []spec
		want  string // in the one problem there is, if any
	}{
		"passed, switched off, or for want of what the driver lacks": {with(spec{"b", pending, ""}, spec{"c", skipped, lacking[0]}), ""},
		"failed":                    {with(spec{"b", "failed", "expected 1, got 2"}), "b: failed: expected 1, got 2"},
		"timed out":                 {with(spec{"b", "timedout", ""}), "b: timedout"},
		"a capability that is lost": {with(spec{"b", skipped, "GetCapacity not supported"}), "b: skipped: GetCapacity not supported"},
		"health, skipped as what the driver lacks": {with(spec{"NodeGetVolumeHealth b", skipped, lacking[0]}), "NodeGetVolumeHealth b: skipped"},
		"health of pools, switched off":            {with(spec{"NodeGetStorageHealth b", pending, ""}), "NodeGetStorageHealth b: pending"},
		"a snapshot's topology, switched off":      {with(spec{"a snapshot with accessibility requirements", pending, ""}), "pending"},
		"none of what has to be there":             {with()[1:], `no spec of "CreateVolume"`},
	} {
		t.Run(name, func(t *testing.T) {
			got := problems(test.specs)
			if len(got) > 1 || !strings.Contains(strings.Join(got, ""), test.want) || (test.want == "") != (len(got) == 0) {
				t.Errorf("problems = %q, want %q", got, test.want)
			}
		})
	}
}
