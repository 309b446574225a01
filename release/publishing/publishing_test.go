// Package publishing_test publishes a release as the workflow does, to a registry on this machine, and compares what that then has with
// the files of the release. It needs the release, and the programs of bin/release-tools: make test-publish has both.
package publishing_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	files   = flag.String("release", "", "directory of the release, named as its version")
	tools   = flag.String("tools", "../../bin/release-tools", "directory with cosign, helm, krew and registry")
	publish = flag.String("publish", "../publish", "the program that publishes")
	pin     = flag.String("pin", "../pin", "the program that pins sidecars")
	sign    = flag.String("sign", "../sign", "the program that signs the checksums")
)

const (
	user, password = "publisher", "secret"
	// accounts is of bcrypt, as htpasswd writes it.
	accounts = user + ":$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
)

func succeed(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// A registry is one on this machine, and what publishes to it.
type registry struct {
	address          string
	release, version string
	tools            string
	dir              string
	// env is what programs that publish and verify have.
	env []string
}

// begin starts a registry that takes only its account.
func begin(t *testing.T) *registry {
	t.Helper()
	release, err := filepath.Abs(*files)
	succeed(t, err)
	programs, err := filepath.Abs(*tools)
	succeed(t, err)
	r := &registry{release: release, version: filepath.Base(release), tools: programs, dir: t.TempDir()}
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	succeed(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	succeed(t, listener.Close())
	r.address = fmt.Sprintf("localhost:%d", port)
	config := fmt.Sprintf(`version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: %s/data}}
http: {addr: "127.0.0.1:%d"}
auth: {htpasswd: {realm: test, path: %s/accounts}}
`, r.dir, port, r.dir)
	succeed(t, os.WriteFile(r.dir+"/accounts", []byte(accounts), 0o600), os.WriteFile(r.dir+"/config.yaml", []byte(config), 0o600))
	var said bytes.Buffer
	server := exec.CommandContext(context.Background(), filepath.Join(programs, "registry"), "serve", r.dir+"/config.yaml")
	server.Env, server.Stdout, server.Stderr = append(os.Environ(), "OTEL_TRACES_EXPORTER=none"), &said, &said
	succeed(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		if t.Failed() {
			t.Logf("the registry says: %s", said.String())
		}
	})
	for begun := time.Now(); ; {
		if status, _ := r.get(t, "", ""); status == http.StatusOK {
			break
		}
		if time.Since(begun) > time.Minute {
			t.Fatalf("the registry does not answer: %s", said.String())
		}
	}
	r.env = append(os.Environ(), "PATH="+r.dir+":"+os.Getenv("PATH"), "COSIGN_PASSWORD=", "GH_TOKEN="+password, "REGISTRY_USER="+user, "KEY="+r.dir+"/cosign.key")
	return r
}

// get reads of the registry.
func (r *registry) get(t *testing.T, path, accept string) (status int, body []byte) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.address+"/v2/"+path, http.NoBody)
	succeed(t, err)
	request.SetBasicAuth(user, password)
	request.Header.Set("Accept", accept)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil
	}
	body, err = io.ReadAll(response.Body)
	succeed(t, err, response.Body.Close())
	return response.StatusCode, body
}

func (r *registry) run(t *testing.T, program string, arguments ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, arguments...)
	cmd.Dir, cmd.Env = r.dir, r.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", program, strings.Join(arguments, " "), err, out)
	}
	return string(out)
}

// An index lists the manifests of an image, and a manifest its layers (OCI image specification).
type index struct {
	Manifests []struct {
		Digest   string
		Platform struct{ Architecture string }
	}
	Layers []struct{ Digest, MediaType string }
}

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	chartType    = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// indexOf is the digest of the one image of an archive.
func indexOf(t *testing.T, archive string) string {
	t.Helper()
	f, err := os.Open(archive)
	succeed(t, err)
	defer func() { succeed(t, f.Close()) }()
	for entries := tar.NewReader(f); ; {
		header, err := entries.Next()
		succeed(t, err)
		if header.Name != "index.json" {
			continue
		}
		var i index
		succeed(t, json.NewDecoder(entries).Decode(&i))
		if len(i.Manifests) != 1 {
			t.Fatalf("%s has %d images", archive, len(i.Manifests))
		}
		return i.Manifests[0].Digest
	}
}

func digestOf(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

func TestPublishedIsWhatWasReleased(t *testing.T) {
	r := begin(t)
	// gh is not let at GitHub: it keeps the words that it is called by, if the real one knows their flags.
	gh, err := exec.LookPath("gh")
	succeed(t, err)
	succeed(t, os.WriteFile(r.dir+"/gh", fmt.Appendf(nil, "#!/bin/sh\nprintf '%%s\\n' \"$@\" >%s/offered\nexec %s release create --help \"$3\" \"$4\" \"$5\" \"$6\" \"$7\" \"$8\" >/dev/null\n", r.dir, gh), 0o700))
	r.run(t, filepath.Join(r.tools, "cosign"), "generate-key-pair")

	archives, err := filepath.Glob(r.release + "/*.oci.tar")
	succeed(t, err)
	charts, err := filepath.Glob(r.release + "/*-" + strings.TrimPrefix(r.version, "v") + ".tgz")
	succeed(t, err)
	if len(archives) == 0 || len(charts) == 0 {
		t.Fatalf("%s has %d images and %d charts", r.release, len(archives), len(charts))
	}
	program, err := filepath.Abs(*publish)
	succeed(t, err)
	arguments := []string{r.release, r.version, r.address + "/storage/"}
	for _, archive := range archives {
		arguments = append(arguments, strings.TrimSuffix(filepath.Base(archive), "-"+r.version+".oci.tar"))
	}
	r.run(t, program, arguments...)

	for _, archive := range archives {
		name := strings.TrimSuffix(filepath.Base(archive), "-"+r.version+".oci.tar")
		r.wantImage(t, name, indexOf(t, archive))
	}
	for _, chart := range charts {
		r.wantChart(t, chart)
	}
	r.wantOffered(t)
}

// TestSumsAreSigned verifies the files of the release as docs/security.md says, with a key in place of the workflow's certificate.
func TestSumsAreSigned(t *testing.T) {
	r := begin(t)
	r.run(t, filepath.Join(r.tools, "cosign"), "generate-key-pair")
	dir := t.TempDir()
	sums, err := os.ReadFile(r.release + "/SHA256SUMS")
	succeed(t, err, os.WriteFile(dir+"/SHA256SUMS", sums, 0o600))
	program, err := filepath.Abs(*sign)
	succeed(t, err)
	r.run(t, program, dir)

	verify := func() error {
		cmd := exec.CommandContext(t.Context(), filepath.Join(r.tools, "cosign"), "verify-blob", "--key="+r.dir+"/cosign.pub", "--insecure-ignore-tlog", "--bundle=SHA256SUMS.sigstore.json", "SHA256SUMS")
		cmd.Dir, cmd.Env = dir, r.env
		return cmd.Run()
	}
	succeed(t, verify())
	r.run(t, "sh", "-ec", `cd "$1"; sha256sum --check --strict --quiet SHA256SUMS`, "sh", r.release)
	succeed(t, os.WriteFile(dir+"/SHA256SUMS", append(sums, '\n'), 0o600))
	if verify() == nil {
		t.Error("other sums have the signature too")
	}
}

// The registry is asked for the sidecars that registry.k8s.io has.
func TestSidecarsGetTheDigestsOfTheRegistry(t *testing.T) {
	r := begin(t)
	archives, err := filepath.Glob(r.release + "/*.oci.tar")
	succeed(t, err)
	if len(archives) == 0 {
		t.Fatalf("%s has no images", r.release)
	}
	const sidecar = "registry.k8s.io/sig-storage/csi-resizer"
	// skopeo 1.9, that of Debian 12, finds its configuration in the home directory alone.
	config := r.dir + "/.config/containers"
	r.env = append(r.env, "REGISTRY_AUTH_FILE="+r.dir+"/auth.json", "HOME="+r.dir)
	succeed(t, os.MkdirAll(config, 0o700), os.WriteFile(config+"/registries.conf", fmt.Appendf(nil, "[[registry]]\nprefix = \"registry.k8s.io\"\nlocation = %q\ninsecure = true\n", r.address), 0o600))
	r.run(t, "skopeo", "login", "--tls-verify=false", "--username", user, "--password", password, r.address)
	r.run(t, "skopeo", "copy", "--all", "--dest-tls-verify=false", "oci-archive:"+archives[0], "docker://"+r.address+"/sig-storage/csi-resizer:v2.3.0")

	file := r.dir + "/kustomization.yaml"
	succeed(t, os.WriteFile(file, []byte("images:\n- name: "+sidecar+"\n  newTag: v2.3.0\n"), 0o600))
	pin, err := filepath.Abs(*pin)
	succeed(t, err)
	r.run(t, pin, file)
	text, err := os.ReadFile(file)
	succeed(t, err)
	if want := "  newTag: v2.3.0\n  digest: " + indexOf(t, archives[0]) + "\n"; !strings.HasSuffix(string(text), want) {
		t.Errorf("the kustomization ends with %q, want %q", text, want)
	}
}

// wantImage checks that an image is what the archive has, for each architecture and signed.
func (r *registry) wantImage(t *testing.T, name, digest string) {
	t.Helper()
	status, body := r.get(t, "storage/"+name+"/manifests/"+r.version, indexType)
	if status != http.StatusOK || digestOf(body) != digest {
		t.Errorf("%s is %s with status %d, and %s in the release", name, digestOf(body), status, digest)
	}
	var i index
	succeed(t, json.Unmarshal(body, &i))
	var arches []string
	for _, m := range i.Manifests {
		arches = append(arches, m.Platform.Architecture)
		if status, body := r.get(t, "storage/"+name+"/manifests/"+m.Digest, manifestType); status != http.StatusOK || digestOf(body) != m.Digest {
			t.Errorf("the image of %s for %s has the status %d", name, m.Platform.Architecture, status)
		}
	}
	if slices.Sort(arches); !slices.Equal(arches, []string{"amd64", "arm64"}) {
		t.Errorf("%s is for %q", name, arches)
	}
	r.wantSigned(t, "storage/"+name+"@"+digest)
}

// wantChart checks that a chart is the file of the release, and signed.
func (r *registry) wantChart(t *testing.T, chart string) {
	t.Helper()
	version := strings.TrimPrefix(r.version, "v")
	name := strings.TrimSuffix(filepath.Base(chart), "-"+version+".tgz")
	status, body := r.get(t, "storage/charts/"+name+"/manifests/"+version, manifestType)
	if status != http.StatusOK {
		t.Fatalf("the chart %s has the status %d: %s", name, status, body)
	}
	var i index
	succeed(t, json.Unmarshal(body, &i))
	packed, err := os.ReadFile(chart)
	succeed(t, err)
	if len(i.Layers) != 1 || i.Layers[0].MediaType != chartType || i.Layers[0].Digest != digestOf(packed) {
		t.Errorf("the chart %s is %+v, want %s", name, i.Layers, digestOf(packed))
	}
	r.wantSigned(t, "storage/charts/"+name+"@"+digestOf(body))
}

// wantSigned checks the signature with the public key.
func (r *registry) wantSigned(t *testing.T, image string) {
	t.Helper()
	arguments := []string{"verify", "--key", r.dir + "/cosign.pub", "--insecure-ignore-tlog", "--registry-username", user, "--registry-password", password, r.address + "/" + image}
	r.run(t, filepath.Join(r.tools, "cosign"), arguments...)
}

// wantOffered checks that each file of the release is offered, in the version's name.
func (r *registry) wantOffered(t *testing.T) {
	t.Helper()
	said, err := os.ReadFile(r.dir + "/offered")
	succeed(t, err)
	words := strings.Fields(string(said))
	at := slices.Index(words, "--")
	if at < 0 || !slices.Equal(words[:3], []string{"release", "create", r.version}) {
		t.Fatalf("gh is called with %q", words)
	}
	entries, err := os.ReadDir(r.release)
	succeed(t, err)
	for _, e := range entries {
		if !slices.Contains(words[at+1:], e.Name()) {
			t.Errorf("%s is not offered", e.Name())
		}
	}
}
