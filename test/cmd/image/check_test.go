package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

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
	must.Succeed(t, binary.Write(&b, binary.LittleEndian, header))
	for _, kind := range segments {
		must.Succeed(t, binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(kind)}))
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
		must.Succeed(t, w.WriteHeader(header))
		_, err := w.Write(f.content[:header.Size])
		must.Succeed(t, err)
	}
	must.Succeed(t, w.Close())
	return b.Bytes()
}

const program = "hostpath-csi-driver"

// plain is an image of the program alone.
var plain = image{mostBytes: 1000}

// A fakeImage is what goes into an archive.
type fakeImage struct {
	layers [][]file
	config config
	zipped bool
}

func good(t *testing.T) fakeImage {
	c := config{OS: "linux", Architecture: "amd64"}
	c.Config.User, c.Config.Entrypoint = "0:0", []string{"/hostpath-csi-driver"}
	return fakeImage{layers: [][]file{{{name: program, content: executable(t, elf.EM_X86_64, elf.PT_LOAD)}}}, config: c}
}

// write makes an archive with an index in an index, as for several architectures, of which others may follow.
func (i fakeImage) write(t *testing.T, others ...fakeImage) (path string) {
	t.Helper()
	var parts []file
	blob := func(kind string, content []byte) descriptor {
		sum := fmt.Sprintf("%x", sha256.Sum256(content))
		parts = append(parts, file{name: "blobs/sha256/" + sum, content: content})
		return descriptor{MediaType: "application/vnd.oci.image." + kind + ".v1+json", Digest: "sha256:" + sum}
	}
	encode := func(v any) []byte {
		content, err := json.Marshal(v)
		must.Succeed(t, err)
		return content
	}
	manifest := func(i fakeImage) descriptor {
		var layers []descriptor
		for _, files := range i.layers {
			layer := tarOf(t, files)
			if i.zipped {
				var b bytes.Buffer
				w := gzip.NewWriter(&b)
				_, err := w.Write(layer)
				must.Succeed(t, err)
				must.Succeed(t, w.Close())
				layer = b.Bytes()
			}
			layers = append(layers, blob("layer", layer))
		}
		return blob("manifest", encode(map[string]any{"config": blob("config", encode(i.config)), "layers": layers}))
	}
	manifests := []descriptor{manifest(i)}
	for _, other := range others {
		manifests = append(manifests, manifest(other))
	}
	index := blob("index", encode(map[string]any{"manifests": manifests}))
	parts = append(parts, file{name: "index.json", content: encode(map[string]any{"manifests": []descriptor{index}})})
	path = filepath.Join(t.TempDir(), "image.tar")
	must.Succeed(t, os.WriteFile(path, tarOf(t, parts), 0o600))
	return path
}

func TestImageWithProgramOnly(t *testing.T) {
	for _, zipped := range []bool{false, true} {
		i := good(t)
		i.zipped = zipped
		i.config.Config.Env = []string{"PATH=/bin"}
		if found, err := check(i.write(t), program, plain); err != nil || !slices.Equal(found, []string{"amd64"}) {
			t.Errorf("found %q, %v; want it good for amd64", found, err)
		}
	}
}

// The order is that of the names, so that each build gives the same archive.
func TestOrderOfArchitectures(t *testing.T) {
	arm := good(t)
	arm.config.Architecture = "arm64"
	arm.layers[0][0].content = executable(t, elf.EM_AARCH64, elf.PT_LOAD)
	if found, err := check(good(t).write(t, arm), program, plain); err != nil || !slices.Equal(found, []string{"amd64", "arm64"}) {
		t.Errorf("found %q, %v", found, err)
	}
	if found, err := check(arm.write(t, good(t)), program, plain); err == nil || !strings.Contains(err.Error(), "arm64, amd64") {
		t.Errorf("found %q, %v; want the order refused", found, err)
	}
}

func TestImageWithUnexpectedContents(t *testing.T) {
	inLayer := func(change func(*tar.Header)) func(*fakeImage) {
		return func(i *fakeImage) { i.layers[0][0].change = change }
	}
	for name, c := range map[string]struct {
		change func(*fakeImage)
		says   string
	}{
		"a shell":         {func(i *fakeImage) { i.layers[0] = append(i.layers[0], file{name: "bin/sh"}) }, "bin/sh"},
		"another layer":   {func(i *fakeImage) { i.layers = append(i.layers, []file{{name: "etc/passwd"}}) }, "etc/passwd"},
		"nothing":         {func(i *fakeImage) { i.layers = nil }, "no /hostpath-csi-driver"},
		"the same twice":  {func(i *fakeImage) { i.layers = append(i.layers, i.layers[0]) }, "twice"},
		"a directory":     {inLayer(func(h *tar.Header) { h.Typeflag, h.Size = tar.TypeDir, 0; h.Name = "tmp/" }), "tmp"},
		"a setuid bit":    {inLayer(func(h *tar.Header) { h.Mode = 0o4755 }), "too many rights"},
		"another owner":   {inLayer(func(h *tar.Header) { h.Uid = 1000 }), "1000:0"},
		"a capability":    {inLayer(func(h *tar.Header) { h.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "x"} }), "security.capability"},
		"a dynamic one":   {func(i *fakeImage) { i.layers[0][0].content = executable(t, elf.EM_X86_64, elf.PT_INTERP) }, "not static"},
		"another machine": {func(i *fakeImage) { i.layers[0][0].content = executable(t, elf.EM_AARCH64) }, "EM_AARCH64"},
		"a script":        {func(i *fakeImage) { i.layers[0][0].content = []byte("#!/bin/sh\n") }, "the program"},
		"another user":    {func(i *fakeImage) { i.config.Config.User = "" }, "user"},
		"another entry":   {func(i *fakeImage) { i.config.Config.Entrypoint = []string{"/bin/sh", "-c"} }, "entrypoint"},
		"an argument":     {func(i *fakeImage) { i.config.Config.Cmd = []string{"--help"} }, "command"},
		"a volume":        {func(i *fakeImage) { i.config.Config.Volumes = map[string]struct{}{"/data": {}} }, "volumes"},
		"a port":          {func(i *fakeImage) { i.config.Config.ExposedPorts = map[string]struct{}{"80/tcp": {}} }, "ports"},
		"a variable":      {func(i *fakeImage) { i.config.Config.Env = []string{"LD_PRELOAD=/x"} }, "LD_PRELOAD"},
		"another system":  {func(i *fakeImage) { i.config.OS = "windows" }, "windows"},
		"too much":        {func(i *fakeImage) { f := &i.layers[0][0]; f.content = append(f.content, make([]byte, 1000)...) }, "may have 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			i := good(t)
			c.change(&i)
			if found, err := check(i.write(t), program, plain); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("found %q, %v; want it to name %q", found, err, c.says)
			}
		})
	}
}

// debian is an image with a program and a library of Debian's.
var debian = image{mostBytes: 1000, debian: map[string][]string{"util-linux": {"/usr/sbin/wipefs"}}}

func goodDebian(t *testing.T) fakeImage {
	t.Helper()
	i := good(t)
	i.layers = append(i.layers, []file{
		{name: "usr/sbin/", change: func(h *tar.Header) { h.Typeflag = tar.TypeDir }},
		{name: "usr/sbin/wipefs", content: executable(t, elf.EM_X86_64)},
		{name: "usr/lib/x86_64-linux-gnu/libblkid.so.1", content: executable(t, elf.EM_X86_64)},
		{name: "usr/share/doc/util-linux/copyright", change: func(h *tar.Header) { h.Mode = 0o644 }},
		{name: "var/lib/dpkg/status.d/util-linux", change: func(h *tar.Header) { h.Mode = 0o644 }},
	})
	return i
}

func TestImageWithDebianPrograms(t *testing.T) {
	if found, err := check(goodDebian(t).write(t), program, debian); err != nil || !slices.Equal(found, []string{"amd64"}) {
		t.Errorf("found %q, %v; want it good for amd64", found, err)
	}
	const wipefs, library = 1, 2
	for name, c := range map[string]struct {
		change func(files []file) []file
		says   string
	}{
		"a shell":          {func(f []file) []file { return append(f, file{name: "usr/bin/dash"}) }, "usr/bin/dash"},
		"a configuration":  {func(f []file) []file { return append(f, file{name: "etc/passwd"}) }, "etc/passwd"},
		"no program":       {func(f []file) []file { return slices.Delete(f, wipefs, wipefs+1) }, "no /usr/sbin/wipefs"},
		"another machine":  {func(f []file) []file { f[library].content = executable(t, elf.EM_AARCH64); return f }, "EM_AARCH64"},
		"a script":         {func(f []file) []file { f[wipefs].content = []byte("#!/bin/sh"); return f }, "wipefs"},
		"writable by all":  {func(f []file) []file { f[wipefs].change = func(h *tar.Header) { h.Mode = 0o777 }; return f }, "rights"},
		"a setgid program": {func(f []file) []file { f[wipefs].change = func(h *tar.Header) { h.Mode = 0o2755 }; return f }, "rights"},
	} {
		t.Run(name, func(t *testing.T) {
			i := goodDebian(t)
			i.layers[1] = c.change(i.layers[1])
			if found, err := check(i.write(t), program, debian); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("found %q, %v; want it to name %q", found, err, c.says)
			}
		})
	}
}

// linked is an image whose program has another name in PATH.
var linked = image{mostBytes: 1000, links: []string{"/usr/bin/" + program}}

func TestImageWithLinksToTheProgram(t *testing.T) {
	good := func(t *testing.T) fakeImage {
		dir := filepath.Join(t.TempDir(), "root")
		must.Succeed(t, linked.root(t.Context(), program, "amd64", dir))
		target, err := os.Readlink(filepath.Join(dir, "usr/bin", program))
		must.Succeed(t, err)
		i := good(t)
		i.layers = append(i.layers, []file{
			{name: "usr/bin/", change: func(h *tar.Header) { h.Typeflag = tar.TypeDir }},
			{name: "usr/bin/" + program, change: symlink(target)},
		})
		return i
	}
	if found, err := check(good(t).write(t), program, linked); err != nil || !slices.Equal(found, []string{"amd64"}) {
		t.Errorf("found %q, %v; want it good for amd64", found, err)
	}
	const link = 1
	for name, c := range map[string]struct {
		change func(files []file) []file
		says   string
	}{
		"no link":           {func(f []file) []file { return f[:link] }, "no /usr/bin/" + program},
		"one elsewhere":     {func(f []file) []file { f[link].change = symlink("/bin/sh"); return f }, "not a link to the program"},
		"a program instead": {func(f []file) []file { f[link].change = nil; return f }, "not a link to the program"},
		"another directory": {func(f []file) []file { f[0].name = "usr/sbin/"; return f }, "usr/sbin"},
		"another file":      {func(f []file) []file { return append(f, file{name: "usr/bin/sh"}) }, "usr/bin/sh"},
	} {
		t.Run(name, func(t *testing.T) {
			i := good(t)
			i.layers[1] = c.change(i.layers[1])
			if found, err := check(i.write(t), program, linked); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("found %q, %v; want it to name %q", found, err, c.says)
			}
		})
	}
}

func symlink(target string) func(*tar.Header) {
	return func(h *tar.Header) { h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, target, 0o777 }
}

// What a program links is found and taken, here of this machine's own system: it runs with nothing else.
func TestProgramIncludesLibraries(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "wipefs")
	if _, err := os.Stat("/usr/sbin/wipefs"); err != nil || machines[runtime.GOARCH] == 0 {
		testenv.Missing(t, "a merged Debian system")
	}
	r := root{arch: runtime.GOARCH, tree: "/", to: t.TempDir(), taken: make(map[string]bool)}
	must.Succeed(t, errors.Join(r.links(), r.take("/usr/sbin/wipefs"), r.take("/usr/sbin/blkid")))
	cmd := exec.CommandContext(t.Context(), "/usr/sbin/wipefs", "--version")
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: r.to}
	if output, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(output), "util-linux") {
		t.Errorf("wipefs --version = %q, %v", output, err)
	}
	if err := r.take("/usr/share/doc/util-linux/copyright"); err == nil {
		t.Error("a file that is no program was taken")
	}
}

func TestInvalidArchive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image.tar")
	for name, content := range map[string][]byte{
		"an archive without an index": tarOf(t, []file{{name: "manifest.json"}}),
		"an archive without an image": tarOf(t, []file{{name: "index.json", content: []byte("{}")}}),
		"a lost part":                 tarOf(t, []file{{name: "index.json", content: []byte(`{"manifests":[{"digest":"sha256:0"}]}`)}}),
		"no archive":                  bytes.Repeat([]byte("x"), 2048),
	} {
		must.Succeed(t, os.WriteFile(path, content, 0o600))
		if found, err := check(path, program, plain); err == nil {
			t.Errorf("%s: found %q", name, found)
		}
	}
}
