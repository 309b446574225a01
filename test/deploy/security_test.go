package deploy_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

const root = "../.."

// securityText is docs/security.md.
func securityText(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	succeed(t, err)
	return string(text)
}

// rows are those of the table in a chapter, each by its cells, without the marks of code.
func rows(t *testing.T, text, chapter string) [][]string {
	t.Helper()
	_, after, found := strings.Cut(text, "\n## "+chapter+"\n")
	if !found {
		t.Fatalf("there is no chapter %q", chapter)
	}
	chapterText, _, _ := strings.Cut(after, "\n## ")
	var all [][]string
	for line := range strings.Lines(chapterText) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "|") {
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.ReplaceAll(strings.TrimSpace(cells[i]), "`", "")
			}
			all = append(all, cells)
		}
	}
	if len(all) < 3 {
		t.Fatalf("the chapter %q has no table", chapter)
	}
	return all[2:]
}

func TestDocumentedMountsAreCurrent(t *testing.T) {
	pod := driverPod(t)
	written, given := map[string]string{}, map[string]string{}
	for _, row := range rows(t, securityText(t), "Mounts and devices") {
		written[row[0]] = strings.Join(row[1:4], " ")
	}
	for _, m := range container(t, pod, "driver").VolumeMounts {
		v := volume(pod, m.Name)
		access, propagation := "write", corev1.MountPropagationNone
		if m.ReadOnly {
			access = "read"
		}
		if m.MountPropagation != nil {
			propagation = *m.MountPropagation
		}
		given[m.Name] = fmt.Sprintf("%s %s %s", ptr(v.HostPath).Path, access, propagation)
	}
	if diff := cmp.Diff(written, given); diff != "" {
		t.Errorf("(- written, + given)\n%s", diff)
	}
}

func TestDocumentedPortsAreCurrent(t *testing.T) {
	pod := driverPod(t)
	var written, open []string
	for _, row := range rows(t, securityText(t), "Network") {
		for port := range strings.SplitSeq(row[0], ",") {
			written = append(written, strings.TrimSpace(port))
		}
	}
	for _, c := range pod.Containers {
		for _, flag := range []string{"http-endpoint", "metrics-address"} {
			if address, ok := argsOf(c)[flag]; ok {
				open = append(open, strings.TrimPrefix(address, ":"))
			}
		}
	}
	slices.Sort(open)
	if slices.Sort(written); !slices.Equal(written, open) {
		t.Errorf("written down are the ports %q, open are %q", written, open)
	}
}

var (
	testName = regexp.MustCompile("`(Test[A-Za-z0-9]+)`")
	testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9]+)\(`)
)

// A promise names the test that shows it.
func TestDocumentedTestsExist(t *testing.T) {
	exist := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range testFunc.FindAllSubmatch(text, -1) {
			exist[string(match[1])] = true
		}
		return err
	})
	succeed(t, err)
	named := testName.FindAllStringSubmatch(securityText(t), -1)
	if len(named) == 0 {
		t.Error("no test is named")
	}
	for _, match := range named {
		if !exist[match[1]] {
			t.Errorf("there is no %s", match[1])
		}
	}
}
