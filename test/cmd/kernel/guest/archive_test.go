package guest

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestPackUnpack(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "new")
	if err := os.MkdirAll(filepath.Join(from, "a/empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "a/file"), []byte("content"), 0o750); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := Pack(&archive, from); err != nil {
		t.Fatal(err)
	}
	if err := Unpack(&archive, to); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(filepath.Join(to, "a/file")); err != nil || string(content) != "content" {
		t.Errorf("the file has %q, %v", content, err)
	}
	if info, err := os.Stat(filepath.Join(to, "a/empty")); err != nil || !info.IsDir() {
		t.Errorf("the empty directory: %v, %v", info, err)
	}
}

func TestArchivePathEscapeIsRefused(t *testing.T) {
	for what, header := range map[string]tar.Header{
		"upwards":  {Name: "../file", Typeflag: tar.TypeReg},
		"absolute": {Name: "/file", Typeflag: tar.TypeReg},
		"a link":   {Name: "link", Typeflag: tar.TypeSymlink, Linkname: "/"},
	} {
		t.Run(what, func(t *testing.T) {
			var archive bytes.Buffer
			w := tar.NewWriter(&archive)
			if err := w.WriteHeader(&header); err != nil {
				t.Fatal(err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if err := Unpack(&archive, t.TempDir()); err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestTruncatedArchiveIsRefused(t *testing.T) {
	from := t.TempDir()
	if err := os.WriteFile(filepath.Join(from, "file"), make([]byte, 4096), 0o644); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := Pack(&archive, from); err != nil {
		t.Fatal(err)
	}
	archive.Truncate(2048)
	if err := Unpack(&archive, t.TempDir()); err == nil {
		t.Error("no error")
	}
}
