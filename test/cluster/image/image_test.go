package image_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/cluster/image"
)

// An archive names its config and its layer by what they are, as the importer
// checks.
func TestWrite(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("runs"), 0o600); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	if err := (image.Image{
		Name:       "localhost/example:test",
		Files:      map[string]string{"/bin/program": program},
		Links:      map[string]string{"/bin/other": "program"},
		Texts:      map[string]string{"/etc/passwd": "root"},
		Dirs:       []string{"/tmp"},
		Entrypoint: []string{"/bin/program"},
	}).Write(archive); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	parts, _ := untar(t, file)

	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(parts["manifest.json"], &manifest); err != nil || len(manifest) != 1 || len(manifest[0].Layers) != 1 {
		t.Fatalf("the manifest is %s, %v", parts["manifest.json"], err)
	}
	if diff := cmp.Diff([]string{"localhost/example:test"}, manifest[0].RepoTags); diff != "" {
		t.Error(diff)
	}
	layer := parts[manifest[0].Layers[0]]
	var config struct {
		Config struct{ Entrypoint []string }
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(parts[manifest[0].Config], &config); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(layer)
	if diff := cmp.Diff([]string{"sha256:" + hex.EncodeToString(sum[:])}, config.RootFS.DiffIDs); diff != "" {
		t.Errorf("the config does not have the digest of the layer: %s", diff)
	}
	if diff := cmp.Diff([]string{"/bin/program"}, config.Config.Entrypoint); diff != "" {
		t.Error(diff)
	}

	files, headers := untar(t, bytes.NewReader(layer))
	if got := string(files["bin/program"]); got != "runs" || headers["bin/program"].Mode != 0o755 {
		t.Errorf("the program is %q with mode %o", got, headers["bin/program"].Mode)
	}
	if got := headers["bin/other"].Linkname; got != "program" {
		t.Errorf("the link leads to %q", got)
	}
	if got := headers["tmp/"].Mode; got != 0o1777 {
		t.Errorf("/tmp has mode %o", got)
	}
	if got := string(files["etc/passwd"]); got != "root" {
		t.Errorf("the text is %q", got)
	}
}

func TestWriteWithoutProgram(t *testing.T) {
	missing := image.Image{Files: map[string]string{"/program": filepath.Join(t.TempDir(), "missing")}}
	if err := missing.Write(filepath.Join(t.TempDir(), "image.tar")); err == nil {
		t.Error("an image was made of a file that is not there")
	}
}

func untar(t *testing.T, from io.Reader) (map[string][]byte, map[string]*tar.Header) {
	t.Helper()
	files, headers := map[string][]byte{}, map[string]*tar.Header{}
	for archive := tar.NewReader(from); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, headers
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
		headers[header.Name] = header
	}
}
