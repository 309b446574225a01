package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// checkout has what a release is made of, with programs and images that are a line of text. What links into it is deploy/ as it is.
func checkout(t *testing.T, at time.Time) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"LICENSE":      "a licence\n",
		"CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n- More\n\n## [1.2.3] - 2026-01-01\n\n### Added\n\n- A [thing](docs/thing.md)\n\n## [1.2.2]\n\n- Old\n\n[1.2.3]: link\n",
	} {
		write(t, filepath.Join(root, name), text)
	}
	for _, program := range programs {
		for _, arch := range []string{"amd64", "arm64"} {
			write(t, filepath.Join(root, "bin", "linux_"+arch, program), program+" for "+arch)
		}
		image, err := os.Create(filepath.Join(mkdir(t, filepath.Join(root, "bin", "image")), program+".tar"))
		succeed(t, err)
		w := tar.NewWriter(image)
		names := []string{"blobs/sha256/", "./index.json", "oci-layout"}
		if at.Second()%2 == 1 { // directories are listed in no order
			slices.Reverse(names)
		}
		for _, name := range names {
			header := &tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: at, Size: 2, Uid: at.Second()}
			if strings.HasSuffix(name, "/") {
				header.Typeflag, header.Size = tar.TypeDir, 0
			}
			succeed(t, w.WriteHeader(header))
			if header.Size > 0 {
				if _, err := w.Write([]byte("{}")); err != nil {
					t.Fatal(err)
				}
			}
		}
		succeed(t, w.Close())
		succeed(t, image.Close())
	}
	for _, program := range programs {
		for _, arch := range []string{"amd64", "arm64"} {
			write(t, filepath.Join(root, "bin", "sbom", program+"-linux-"+arch+".json"), fmt.Sprintf(`{"bomFormat": "CycloneDX", "serialNumber": "urn:uuid:%d",
				"metadata": {"timestamp": %q}, "components": [{"type": "library", "name": "stdlib", "version": "go1.26", "purl": "pkg:golang/stdlib@go1.26"}, {"type": "file", "name": "/program"}]}`, at.UnixNano(), at.Format(time.RFC3339)))
		}
	}
	write(t, filepath.Join(root, "bin", "bundle", "manifests", "csv.yaml"), "kind: ClusterServiceVersion\n")
	for _, p := range platforms {
		write(t, filepath.Join(root, "bin", "plugin", p.os+"_"+p.arch, p.program()), "for "+p.os+" on "+p.arch)
	}
	deploy, err := filepath.Abs("../deploy")
	succeed(t, err)
	succeed(t, os.CopyFS(filepath.Join(root, "deploy"), os.DirFS(deploy)))
	return root
}

func mkdir(t *testing.T, dir string) string {
	t.Helper()
	succeed(t, os.MkdirAll(dir, 0o755))
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	mkdir(t, filepath.Dir(path))
	succeed(t, os.WriteFile(path, []byte(text), 0o600))
}

func made(t *testing.T, root string, more ...string) (out string, err error) {
	t.Helper()
	out = filepath.Join(t.TempDir(), "v1.2.3")
	return out, run(append([]string{"--version", "v1.2.3", "--image-prefix", "registry.example.com/storage/", "--time", "1700000000", "--root", root, "--out", out}, more...))
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(dir)
	succeed(t, err)
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		succeed(t, err)
		all[e.Name()] = string(data)
	}
	return all
}

func TestReleaseIsTheSameTwice(t *testing.T) {
	var all [2]map[string]string
	for i := range all {
		out, err := made(t, checkout(t, time.Unix(int64(1800000000+i), 0)))
		succeed(t, err)
		all[i] = contents(t, out)
	}
	for name, data := range all[0] {
		if all[1][name] != data {
			t.Errorf("%s differs", name)
		}
	}
	// Of programs: images and SBOMs; besides the bundle, archives of programs, plugin with its manifest, notes and sums.
	if want := len(documents) + len(charts) + 3*len(programs) + 1 + 2 + len(platforms) + 1 + 2; len(all[0]) != want || len(all[1]) != want {
		t.Errorf("there are %d and %d files, want %d", len(all[0]), len(all[1]), want)
	}
	for line := range strings.Lines(all[0][sumsName]) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if got := fmt.Sprintf("%x", sha256.Sum256([]byte(all[0][name]))); got != sum {
			t.Errorf("the sum of %s is %s, want %s", name, sum, got)
		}
	}
	if got, want := strings.Count(all[0][sumsName], "\n"), len(all[0])-1; got != want {
		t.Errorf("there are %d sums, want %d", got, want)
	}
	var krew struct {
		Spec struct {
			Version   string
			Platforms []struct{ URI, SHA256, Bin string }
		}
	}
	if err := yaml.Unmarshal([]byte(all[0][krewName]), &krew); err != nil || krew.Spec.Version != "v1.2.3" || len(krew.Spec.Platforms) != len(platforms) {
		t.Errorf("the manifest of krew is %+v, %v", krew, err)
	}
	for _, p := range krew.Spec.Platforms {
		packed, ok := all[0][filepath.Base(p.URI)]
		if sum := fmt.Sprintf("%x", sha256.Sum256([]byte(packed))); !ok || sum != p.SHA256 || strings.Contains(p.URI, "windows") != strings.HasSuffix(p.Bin, ".exe") {
			t.Errorf("krew would install %+v, and the sum is %s", p, sum)
		}
	}
	if got, want := all[0][notesName], "### Added\n\n- A [thing]("+home+"/blob/v1.2.3/docs/thing.md)\n"; got != want {
		t.Errorf("the notes are %q, want %q", got, want)
	}
}

// No scanner for known vulnerabilities would find it.
func TestPackageWithoutAddressIsRefused(t *testing.T) {
	root := checkout(t, time.Unix(0, 0))
	write(t, filepath.Join(root, "bin", "sbom", programs[0]+"-linux-amd64.json"), `{"bomFormat": "CycloneDX", "components": [{"type": "library", "name": "libc6"}]}`)
	if out, err := made(t, root); err == nil || !strings.Contains(err.Error(), "libc6") || len(contents(t, filepath.Dir(out))) > 0 {
		t.Errorf("the release was made with it: %v", err)
	}
}

var renamed = regexp.MustCompile(`image: ghcr\.io/kubevirt/hostpath-provisioner/([a-z-]+):v0\.1\.0`)

// A document has the objects that kubectl apply -k makes, with images of the release and no other project's but sidecars. The pod of the
// example stands for a user's, whose images are not ours.
func TestDocumentsAreTheKustomizations(t *testing.T) {
	out, err := made(t, checkout(t, time.Unix(0, 0)))
	succeed(t, err)
	for _, d := range documents {
		text, err := os.ReadFile(filepath.Join(out, d.name))
		succeed(t, err)
		for line := range strings.Lines(string(text)) {
			_, image, ok := strings.Cut(line, "image: ")
			image = strings.TrimSpace(image)
			ours := strings.HasPrefix(image, "registry.example.com/storage/") && strings.HasSuffix(image, ":v1.2.3")
			users := d.name == "example.yaml" && image == "docker.io/library/busybox:1.37.0"
			if ok && !ours && !users && !strings.HasPrefix(image, "registry.k8s.io/sig-storage/") {
				t.Errorf("%s has the image %s", d.name, image)
			}
		}
		if len(d.components) > 0 || d.kind != "" {
			continue
		}
		objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join("../deploy", d.resources[0]))
		succeed(t, err)
		rendered, err := objects.AsYaml()
		succeed(t, err)
		want := renamed.ReplaceAllString(string(rendered), "image: registry.example.com/storage/$1:v1.2.3")
		if got := strings.TrimPrefix(string(text), (release{version: "v1.2.3"}).header(d)); got != want {
			t.Errorf("%s is not what deploy/%s is:\n%s", d.name, d.resources[0], got)
		}
	}
}

// An administrator may be the only one who has the right to make definitions, apart from those who install the operator.
func TestDefinitionsAreAFileOfTheirOwn(t *testing.T) {
	out, err := made(t, checkout(t, time.Unix(0, 0)))
	succeed(t, err)
	objects := map[string]map[string]object{}
	for _, name := range []string{"definitions.yaml", "hostpath-provisioner-operator.yaml"} {
		text, err := os.ReadFile(filepath.Join(out, name))
		succeed(t, err)
		objects[name] = map[string]object{}
		succeed(t, addObjects(objects[name], string(text)))
	}
	want := objects["hostpath-provisioner-operator.yaml"]
	maps.DeleteFunc(want, func(_ string, o object) bool { return o["kind"] != "CustomResourceDefinition" })
	if diff := cmp.Diff(want, objects["definitions.yaml"]); diff != "" || len(want) != 2 {
		t.Errorf("there are %d definitions (-operator +file):\n%s", len(want), diff)
	}
}

// What is released without another prefix has the names that deploy/ has.
func TestDefaultImagesAreThoseOfDeploy(t *testing.T) {
	for repository, want := range map[string]string{home: builtPrefix, "https://github.com/example/storage": "ghcr.io/example/storage/"} {
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "--no-print-directory", "-C", "..", "--eval=print-prefix: ; @echo $(IMAGE_PREFIX)", "print-prefix", "REPOSITORY="+repository)
		if got, err := cmd.Output(); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("the images of %s begin with %q (%v), want %s", repository, got, err, want)
		}
	}
	out, err := made(t, checkout(t, time.Unix(0, 0)), "--image-prefix", builtPrefix)
	succeed(t, err)
	text, err := os.ReadFile(filepath.Join(out, "hostpath-csi-driver.yaml"))
	succeed(t, err)
	if image := "image: " + builtPrefix + "hostpath-csi-driver:v1.2.3\n"; !strings.Contains(string(text), image) {
		t.Errorf("there is no %q in %s", image, text)
	}
}

// Programs know the registry and the repository of their release: what the operator deploys is there, and so are its runbooks.
func TestProgramsAreLinkedForTheirRelease(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "make", "-C", "..", "--no-print-directory", "-n", "cross-amd64",
		"VERSION=v1.2.3", "IMAGE_PREFIX=registry.example.com/storage/", "REPOSITORY=https://git.example.com/storage/hostpath").Output()
	succeed(t, err)
	variables, err := os.ReadFile("../pkg/version/version.go")
	succeed(t, err)
	for name, value := range map[string]string{"built": "v1.2.3", "images": "registry.example.com/storage/", "repository": "https://git.example.com/storage/hostpath"} {
		if flag := " -X kubevirt.io/hostpath-provisioner/pkg/version." + name + "=" + value; !strings.Contains(string(out), flag) {
			t.Errorf("the linker does not get%s:\n%s", flag, out)
		}
		if !regexp.MustCompile(`(?m)^var (\w+, )*` + name + `(, \w+)* string$`).Match(variables) {
			t.Errorf("pkg/version has no variable %s", name)
		}
	}
	for _, text := range []string{"\tDefaultImages     = \"" + builtPrefix + "\"\n", "\tDefaultRepository = \"" + home + "\"\n"} {
		if !strings.Contains(string(variables), text) {
			t.Errorf("pkg/version does not have %s", text)
		}
	}
}

// What is downloaded, and read about a release, is in the repository that made it.
func TestReleaseNamesItsRepository(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	succeed(t, err)
	if !strings.Contains(string(makefile), "\nexport REPOSITORY ?= "+home+"\n") {
		t.Errorf("REPOSITORY in the Makefile is not %s", home)
	}
	const other = "https://git.example.com/storage/hostpath"
	out, err := made(t, checkout(t, time.Unix(0, 0)), "--repository", other)
	succeed(t, err)
	texts := contents(t, out)
	for _, name := range slices.Collect(maps.Keys(texts)) {
		if !strings.HasSuffix(name, ".tgz") {
			continue
		}
		chart, err := loader.LoadFile(filepath.Join(out, name))
		succeed(t, err)
		if chart.Metadata.Home != other || !slices.Equal(chart.Metadata.Sources, []string{other}) {
			t.Errorf("%s is of %s, with its source in %q", name, chart.Metadata.Home, chart.Metadata.Sources)
		}
		for _, f := range chart.Raw {
			texts[name+"/"+f.Name] = string(f.Data)
		}
	}
	for name, text := range texts {
		if strings.Contains(text, home) {
			t.Errorf("%s names %s", name, home)
		}
	}
	for name, want := range map[string]string{
		krewName:          "uri: " + other + "/releases/download/v1.2.3/" + plugin + "-v1.2.3-linux-amd64.tar.gz\n",
		notesName:         "](" + other + "/blob/v1.2.3/docs/thing.md)",
		"monitoring.yaml": "runbook_url: " + other + "/blob/main/docs/runbooks/",
	} {
		if !strings.Contains(texts[name], want) {
			t.Errorf("%s does not have %q", name, want)
		}
	}
}

// Pinned again, an image has the new digest only, and a release names both tag and digest.
func TestSidecarsArePinned(t *testing.T) {
	root := checkout(t, time.Unix(0, 0))
	files := []string{filepath.Join(root, "deploy/csi/base/kustomization.yaml"), filepath.Join(root, "deploy/csi/snapshots/kustomization.yaml")}
	bin := t.TempDir()
	pin := func(answer string, arguments ...string) (string, error) {
		write(t, filepath.Join(bin, "skopeo"), "#!/bin/sh\n"+answer)
		succeed(t, os.Chmod(filepath.Join(bin, "skopeo"), 0o700))
		cmd := exec.CommandContext(t.Context(), "./pin", append(arguments, files...)...)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, index := range []string{"the first", "the second"} {
		if out, err := pin("printf %s '" + index + "'"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	pinned, err := os.ReadFile(files[0])
	succeed(t, err)
	for _, want := range []string{"unreachable", "Try again where registry.k8s.io can be reached"} {
		if out, err := pin("echo unreachable >&2; exit 1"); err == nil || !strings.Contains(out, want) {
			t.Errorf("without a registry it ends with %v: %s", err, out)
		}
	}
	if after, err := os.ReadFile(files[0]); err != nil || !bytes.Equal(after, pinned) {
		t.Errorf("without a registry the file is %s, %v", after, err)
	}
	if out, err := pin("exit 1", "--check"); err != nil {
		t.Errorf("the check of pinned images: %v: %s", err, out)
	}

	out, err := made(t, root)
	succeed(t, err)
	text, err := os.ReadFile(filepath.Join(out, "hostpath-csi-driver-snapshots.yaml"))
	succeed(t, err)
	digest := fmt.Sprintf("@sha256:%x\n", sha256.Sum256([]byte("the second")))
	named := 0
	for line := range strings.Lines(string(text)) {
		if _, image, ok := strings.Cut(line, "image: registry.k8s.io/"); ok {
			named++
			if name, _, _ := strings.Cut(image, "@"); !strings.HasSuffix(image, digest) || !strings.Contains(name, ":v") {
				t.Errorf("the release names %q, want a tag and %q", image, digest)
			}
		}
	}
	if named < 5 {
		t.Errorf("the release has %d sidecars: %s", named, text)
	}
}

func TestImageWithoutDigestIsFound(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kustomization.yaml")
	write(t, file, "images:\n- name: registry.k8s.io/sig-storage/a\n  newTag: v1\n  digest: sha256:0\n- name: registry.k8s.io/sig-storage/b\n  newTag: v2\n- name: ours\n  newTag: v3\n")
	out, err := exec.CommandContext(t.Context(), "./pin", "--check", file).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "sig-storage/b:v2 has no digest") || strings.Contains(string(out), "/a:v1") || strings.Contains(string(out), "ours") {
		t.Errorf("it ends with %v: %s", err, out)
	}
}

func TestEachKustomizationIsReleased(t *testing.T) {
	released := map[string]bool{}
	for _, d := range documents {
		for _, dir := range append(d.resources, d.components...) {
			released[dir] = true
		}
	}
	// Parts of others, examples, and what a user fills in.
	for _, dir := range []string{
		"csi/base", "csi/example/block", "csi/freeze", "csi/without-health-monitor", "devices/base", "migrate", "migrate/base",
		"migrate/openshift", "operator/restores", "operator/webhook", "provisioner/base", "provisioner/example",
		"single-node/base", "single-node/example",
	} {
		released[dir] = true
	}
	err := filepath.WalkDir("../deploy", func(path string, _ os.DirEntry, err error) error {
		if dir, err := filepath.Rel("../deploy", filepath.Dir(path)); err == nil && filepath.Base(path) == "kustomization.yaml" && !released[dir] {
			t.Errorf("deploy/%s is in no document", dir)
		}
		return err
	})
	succeed(t, err)
}

func TestBadArgumentsLeaveNothing(t *testing.T) {
	root := checkout(t, time.Unix(0, 0))
	for _, more := range [][]string{
		{"--version", "0.1.0"},
		{"--version", "v1.2.3+meta"},
		{"--image-prefix", "registry.example.com/storage"},
		{"--image-prefix", "registry.example.com/"},
		{"--repository", "git.example.com/storage/hostpath"},
		{"--repository", "https://git.example.com/storage/hostpath/"},
		{"--arches", "riscv64"},
		{"more"},
	} {
		out, err := made(t, root, more...)
		if err == nil {
			t.Errorf("%q was taken", more)
		}
		if left := contents(t, filepath.Dir(out)); len(left) > 0 {
			t.Errorf("%q left %v", more, left)
		}
	}
	if out, err := made(t, root, "--check"); err != nil || len(contents(t, filepath.Dir(out))) > 0 {
		t.Errorf("a check wrote something, or failed: %v", err)
	}
	out := t.TempDir()
	if _, err := made(t, root, "--out", out); err == nil {
		t.Error("a directory that was there was taken")
	}
}

// succeed ends the test if there are errors.
func succeed(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
