package deploy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// read decodes a file of the repository.
func read[T any](t *testing.T, path string) (into T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err == nil {
		err = yaml.Unmarshal(text, &into)
	}
	succeed(t, err)
	return into
}

// matching are the files of the repository with such a path.
func matching(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, pattern))
	succeed(t, err)
	for i := range files {
		files[i] = strings.TrimPrefix(files[i], root+"/")
	}
	return files
}

// What the workflows run anyone can type, and is written once: in the Makefile.
func TestWorkflowsRunTargets(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	succeed(t, err)
	command := regexp.MustCompile(`^(?:sudo (?:-E )?env "PATH=\$PATH" )?make ([a-z-]+)(?: [A-Z]+="?\$?[A-Za-z_.]+"?)*$`)
	type workflow struct {
		Jobs map[string]struct{ Steps []struct{ Run string } }
	}
	for _, file := range matching(t, ".github/workflows/*.yml") {
		for name, job := range read[workflow](t, file).Jobs {
			for _, step := range job.Steps {
				if step.Run == "" {
					continue
				}
				found := command.FindStringSubmatch(step.Run)
				if found == nil || !strings.Contains(string(makefile), "\n"+found[1]+": ") {
					t.Errorf("%s: job %s runs %q, want one target of the Makefile", file, name, step.Run)
				}
			}
		}
	}
}

func TestDependabotLooksAtEachModule(t *testing.T) {
	type config struct {
		Updates []struct {
			Ecosystem   string `json:"package-ecosystem"`
			Directory   string
			Directories []string
		}
	}
	var looked, modules []string
	for _, update := range read[config](t, ".github/dependabot.yml").Updates {
		if update.Ecosystem == "gomod" {
			looked = append(looked, update.Directories...)
			if update.Directory != "" {
				looked = append(looked, update.Directory)
			}
		}
	}
	for _, pattern := range []string{"go.mod", "*/go.mod", "*/*/go.mod", "*/*/*/go.mod"} {
		for _, file := range matching(t, pattern) {
			if !strings.HasPrefix(file, "bin/") {
				modules = append(modules, filepath.Join("/", filepath.Dir(file)))
			}
		}
	}
	slices.Sort(looked)
	slices.Sort(modules)
	if !slices.Equal(looked, modules) {
		t.Errorf(".github/dependabot.yml has the modules %q, the repository %q", looked, modules)
	}
}
