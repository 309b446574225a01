package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// A workflow has what is read of one of .github/workflows.
type workflow struct {
	Permissions map[string]string
	Jobs        map[string]struct{ Steps []struct{ Uses, Run string } }
}

var (
	pinnedAction = regexp.MustCompile(`^actions/[a-z-]+@[0-9a-f]{40}$`)
	// called is a target of the Makefile in a step, with sudo where it needs root.
	called = regexp.MustCompile(`^(sudo (-E )?env "PATH=\$PATH" )?make ([a-z-]+)( VERSION="\$VERSION")?$`)
)

// A workflow does nothing that cannot be run elsewhere: its steps are targets of the Makefile and actions that do not change.
func TestWorkflowsCallTheMakefile(t *testing.T) {
	files, err := filepath.Glob("../.github/workflows/*.yml")
	succeed(t, err)
	makefile, err := os.ReadFile("../Makefile")
	succeed(t, err)
	steps := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		succeed(t, err)
		var w workflow
		succeed(t, yaml.Unmarshal(text, &w))
		if diff := cmp.Diff(map[string]string{"contents": "read"}, w.Permissions); diff != "" {
			t.Errorf("%s has other rights where a job names none (-want +got):\n%s", file, diff)
		}
		for _, job := range w.Jobs {
			for _, step := range job.Steps {
				steps++
				target := called.FindStringSubmatch(step.Run)
				switch {
				case step.Uses != "" && !pinnedAction.MatchString(step.Uses):
					t.Errorf("%s: %s may change", file, step.Uses)
				case step.Uses == "" && target == nil:
					t.Errorf("%s runs %q, and not a target of the Makefile", file, step.Run)
				case target != nil && !strings.Contains(string(makefile), "\n"+target[3]+": "):
					t.Errorf("%s runs make %s, which is not in the Makefile", file, target[3])
				}
			}
		}
	}
	if len(files) < 4 || steps < 15 {
		t.Errorf("there are %d workflows with %d steps", len(files), steps)
	}
}

// kept is the module whose versions are to stay as old as they are.
const kept = "/test/cluster/oldest"

// Each other module gets the new versions of what it needs.
func TestDependabotKnowsEachModule(t *testing.T) {
	text, err := os.ReadFile("../.github/dependabot.yml")
	succeed(t, err)
	var dependabot struct {
		Updates []struct {
			Ecosystem   string `json:"package-ecosystem"`
			Directories []string
		}
	}
	succeed(t, yaml.Unmarshal(text, &dependabot))
	listed, err := exec.CommandContext(t.Context(), "git", "ls-files", "..").Output()
	succeed(t, err)
	var modules []string
	for name := range strings.Lines(string(listed)) {
		if dir, ok := strings.CutSuffix(strings.TrimSpace(name), "go.mod"); ok {
			modules = append(modules, filepath.Join("/release", dir))
		}
	}
	slices.Sort(modules)
	others := slices.DeleteFunc(slices.Clone(modules), func(dir string) bool { return dir == kept })
	if len(others) != len(modules)-1 {
		t.Errorf("%s is no module", kept)
	}
	for _, u := range dependabot.Updates {
		if u.Ecosystem == "gomod" {
			if diff := cmp.Diff(others, u.Directories); diff != "" {
				t.Errorf("the modules (-there +updated):\n%s", diff)
			}
		}
	}
}
