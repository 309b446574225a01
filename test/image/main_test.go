package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A file is one of a layer.
type file struct {
	name    string
	content []byte
	change  func(*tar.Header)
}

// executable is the least that is a program for a machine, with a segment of each kind.
func executable(t *testing.T, machine elf.Machine, segments ...elf.ProgType) []byte {
	t.Helper()
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Phentsize: 56, Phnum: uint16(len(segments)),
	}
	var b bytes.Buffer
	must(t, binary.Write(&b, binary.LittleEndian, header))
	for _, kind := range segments {
		must(t, binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(kind)}))
	}
	return b.Bytes()
}

func tarOf(t *testing.T, files []file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: 0o755, Size: int64(len(f.content)), Typeflag: tar.TypeReg}
		if f.change != nil {
			f.change(header)
		}
		must(t, w.WriteHeader(header))
		_, err := w.Write(f.content[:header.Size])
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

// An image is what goes into an archive.
type image struct {
	layers [][]file
	config config
	zipped bool
}

func good(t *testing.T) image {
	c := config{OS: "linux", Architecture: "amd64"}
	c.Config.User, c.Config.Entrypoint = "0:0", []string{"/hostpath-csi-driver"}
	return image{layers: [][]file{{{name: program, content: executable(t, elf.EM_X86_64, elf.PT_LOAD)}}}, config: c}
}

// write makes an archive with an index in an index, as for several architectures.
func (i image) write(t *testing.T) (path string) {
	t.Helper()
	var parts []file
	blob := func(kind string, content []byte) descriptor {
		sum := fmt.Sprintf("%x", sha256.Sum256(content))
		parts = append(parts, file{name: "blobs/sha256/" + sum, content: content})
		return descriptor{MediaType: "application/vnd.oci.image." + kind + ".v1+json", Digest: "sha256:" + sum}
	}
	encode := func(v any) []byte {
		content, err := json.Marshal(v)
		must(t, err)
		return content
	}
	var layers []descriptor
	for _, files := range i.layers {
		layer := tarOf(t, files)
		if i.zipped {
			var b bytes.Buffer
			w := gzip.NewWriter(&b)
			_, err := w.Write(layer)
			must(t, err)
			must(t, w.Close())
			layer = b.Bytes()
		}
		layers = append(layers, blob("layer", layer))
	}
	manifest := blob("manifest", encode(map[string]any{"config": blob("config", encode(i.config)), "layers": layers}))
	index := blob("index", encode(map[string]any{"manifests": []descriptor{manifest}}))
	parts = append(parts, file{name: "index.json", content: encode(map[string]any{"manifests": []descriptor{index}})})
	path = filepath.Join(t.TempDir(), "image.tar")
	must(t, os.WriteFile(path, tarOf(t, parts), 0o600))
	return path
}

func TestAnImageThatHoldsTheProgramAlone(t *testing.T) {
	for _, zipped := range []bool{false, true} {
		i := good(t)
		i.zipped = zipped
		i.config.Config.Env = []string{"PATH=/bin"}
		if found, err := check(i.write(t)); err != nil || !slices.Equal(found, []string{"amd64"}) {
			t.Errorf("found %q, %v; want it good for amd64", found, err)
		}
	}
}

func TestImagesThatHoldMoreOrOther(t *testing.T) {
	inLayer := func(change func(*tar.Header)) func(*image) {
		return func(i *image) { i.layers[0][0].change = change }
	}
	for name, c := range map[string]struct {
		change func(*image)
		says   string
	}{
		"a shell":         {func(i *image) { i.layers[0] = append(i.layers[0], file{name: "bin/sh"}) }, "bin/sh"},
		"another layer":   {func(i *image) { i.layers = append(i.layers, []file{{name: "etc/passwd"}}) }, "etc/passwd"},
		"nothing":         {func(i *image) { i.layers = nil }, "0 files"},
		"the same twice":  {func(i *image) { i.layers = append(i.layers, i.layers[0]) }, "2 files"},
		"a directory":     {inLayer(func(h *tar.Header) { h.Typeflag, h.Size = tar.TypeDir, 0; h.Name = "tmp/" }), "tmp"},
		"a setuid bit":    {inLayer(func(h *tar.Header) { h.Mode = 0o4755 }), "urwxr-xr-x"},
		"another owner":   {inLayer(func(h *tar.Header) { h.Uid = 1000 }), "1000:0"},
		"a capability":    {inLayer(func(h *tar.Header) { h.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "x"} }), "security.capability"},
		"a dynamic one":   {func(i *image) { i.layers[0][0].content = executable(t, elf.EM_X86_64, elf.PT_INTERP) }, "not static"},
		"another machine": {func(i *image) { i.layers[0][0].content = executable(t, elf.EM_AARCH64) }, "EM_AARCH64"},
		"a script":        {func(i *image) { i.layers[0][0].content = []byte("#!/bin/sh\n") }, "the program"},
		"another user":    {func(i *image) { i.config.Config.User = "" }, "user"},
		"another entry":   {func(i *image) { i.config.Config.Entrypoint = []string{"/bin/sh", "-c"} }, "entrypoint"},
		"an argument":     {func(i *image) { i.config.Config.Cmd = []string{"--help"} }, "command"},
		"a volume":        {func(i *image) { i.config.Config.Volumes = map[string]struct{}{"/data": {}} }, "volumes"},
		"a port":          {func(i *image) { i.config.Config.ExposedPorts = map[string]struct{}{"80/tcp": {}} }, "ports"},
		"a variable":      {func(i *image) { i.config.Config.Env = []string{"LD_PRELOAD=/x"} }, "LD_PRELOAD"},
		"another system":  {func(i *image) { i.config.OS = "windows" }, "windows"},
	} {
		t.Run(name, func(t *testing.T) {
			i := good(t)
			c.change(&i)
			if found, err := check(i.write(t)); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("found %q, %v; want it to tell of %q", found, err, c.says)
			}
		})
	}
}

func TestWhatIsNoArchive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image.tar")
	for name, content := range map[string][]byte{
		"an archive without an index": tarOf(t, []file{{name: "manifest.json"}}),
		"an archive without an image": tarOf(t, []file{{name: "index.json", content: []byte("{}")}}),
		"a lost part":                 tarOf(t, []file{{name: "index.json", content: []byte(`{"manifests":[{"digest":"sha256:0"}]}`)}}),
		"no archive":                  bytes.Repeat([]byte("x"), 2048),
	} {
		must(t, os.WriteFile(path, content, 0o600))
		if found, err := check(path); err == nil {
			t.Errorf("%s: found %q", name, found)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
