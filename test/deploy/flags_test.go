package deploy_test

import (
	"os/exec"
	"regexp"
	"slices"
	"testing"
)

var flagLine = regexp.MustCompile(`(?m)^  -([a-z_-]+)`)

// The list of the driver's flags is that of the program itself.
func TestDocumentedFlagsAreCurrent(t *testing.T) {
	command := exec.CommandContext(t.Context(), "go", "run", "./cmd/hostpath-csi-driver", "--help")
	command.Dir = "../.."
	help, err := command.Output()
	if err != nil {
		t.Fatalf("ask the driver for its flags: %v", err)
	}
	var has []string
	for _, m := range flagLine.FindAllSubmatch(help, -1) {
		has = append(has, string(m[1]))
	}
	for _, name := range flags[driver] {
		if !slices.Contains(has, name) {
			t.Errorf("the driver has no flag --%s", name)
		}
	}
}
