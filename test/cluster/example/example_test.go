package example_test

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/test/cluster/example"
)

func TestLines(t *testing.T) {
	for name, want := range map[string]struct {
		example.Example
		lines int
	}{
		"pod and claim":              {example.PodAndClaim, 3},
		"write and grow":             {example.WriteAndGrow, 2},
		"prerequisites of snapshots": {example.SnapshotPrerequisites, 3},
		"class that freezes":         {example.FreezeClass, 9},
	} {
		t.Run(name, func(t *testing.T) {
			if lines := want.Lines(t); len(lines) != want.lines {
				t.Errorf("the example is %q, want %d lines", lines, want.lines)
			}
		})
	}
}
