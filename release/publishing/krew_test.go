package publishing_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// A krewManifest is what is used here of the manifest of a plugin.
type krewManifest struct {
	Spec struct {
		Version   string
		Platforms []struct {
			Selector struct{ MatchLabels map[string]string }
			URI, Bin string
		}
	}
}

// krew installs the plugin for one platform below a directory, without a network.
func krew(t *testing.T, root, manifest, archive string, labels map[string]string) (string, error) {
	t.Helper()
	program, err := filepath.Abs(filepath.Join(*tools, "krew"))
	succeed(t, err)
	cmd := exec.CommandContext(t.Context(), program, "install", "--manifest="+manifest, "--archive="+archive)
	cmd.Env = []string{"HOME=" + root, "PATH=" + os.Getenv("PATH"), "KREW_ROOT=" + root, "KREW_OS=" + labels["os"], "KREW_ARCH=" + labels["arch"], "KREW_NO_UPGRADE_CHECK=1"}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// krew takes the manifest for a valid one, and installs what the release has for each platform that it names.
func TestKrewInstallsThePlugin(t *testing.T) {
	release, err := filepath.Abs(*files)
	succeed(t, err)
	path := filepath.Join(release, "hostpath.yaml")
	text, err := os.ReadFile(path)
	succeed(t, err)
	var manifest krewManifest
	succeed(t, yaml.Unmarshal(text, &manifest))
	if manifest.Spec.Version != filepath.Base(release) || len(manifest.Spec.Platforms) < 6 {
		t.Errorf("the manifest is %+v", manifest.Spec)
	}
	for _, p := range manifest.Spec.Platforms {
		labels, archive := p.Selector.MatchLabels, filepath.Join(release, filepath.Base(p.URI))
		t.Run(labels["os"]+" "+labels["arch"], func(t *testing.T) {
			root := t.TempDir()
			if out, err := krew(t, root, path, archive, labels); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if _, err := os.Stat(filepath.Join(root, "store", "hostpath", manifest.Spec.Version, p.Bin)); err != nil {
				t.Error(err)
			}
			if labels["os"] == runtime.GOOS && labels["arch"] == runtime.GOARCH {
				out, err := exec.CommandContext(t.Context(), filepath.Join(root, "bin", "kubectl-hostpath"), "version").CombinedOutput()
				if got := strings.TrimSpace(string(out)); err != nil || got != manifest.Spec.Version {
					t.Errorf("the plugin that was installed is %q, %v", got, err)
				}
			}
			packed, err := os.ReadFile(archive)
			succeed(t, err)
			changed := filepath.Join(t.TempDir(), filepath.Base(archive))
			succeed(t, os.WriteFile(changed, bytes.Replace(packed, packed[:1], []byte{packed[0] + 1}, 1), 0o600))
			if out, err := krew(t, t.TempDir(), path, changed, labels); err == nil || !strings.Contains(out, "checksum") {
				t.Errorf("an archive that was changed is installed: %v: %s", err, out)
			}
		})
	}
}
