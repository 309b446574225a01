// Command image looks whether an archive of the driver's image holds what it should, for
// each architecture: one static program and nothing else, so that there is no shell and
// no library in it, run by root without arguments of its own.
//
// usage: image ARCHIVE (of the format oci-archive)
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: image ARCHIVE")
		os.Exit(2)
	}
	found, err := check(os.Args[1])
	if err != nil {
		fmt.Fprintf(os.Stderr, "image: %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
	fmt.Printf("%s holds the driver and nothing else, for %s\n", os.Args[1], strings.Join(found, ", "))
}

const program = "hostpath-csi-driver"

// machines are what the program of an architecture is for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// A descriptor names another part of the archive (OCI image specification).
type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
}

// A config is what of an image's configuration concerns how it runs.
type config struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Config       struct {
		User         string              `json:"User"`
		Entrypoint   []string            `json:"Entrypoint"`
		Cmd          []string            `json:"Cmd"`
		Env          []string            `json:"Env"`
		Volumes      map[string]struct{} `json:"Volumes"`
		ExposedPorts map[string]struct{} `json:"ExposedPorts"`
	} `json:"config"`
}

// An archive has the parts of images by their names, such as index.json.
type archive map[string][]byte

// check answers the architectures that the archive has an image for.
func check(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	parts, err := untar(f)
	if err != nil {
		return nil, err
	}
	found, err := archive(parts).index(parts["index.json"])
	if err == nil && len(found) == 0 {
		err = errors.New("it has no image")
	}
	slices.Sort(found)
	return found, err
}

// untar answers the content of all regular files, by their names.
func untar(r io.Reader) (map[string][]byte, error) {
	files := make(map[string][]byte)
	for t := tar.NewReader(r); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(t)
		if err != nil {
			return nil, err
		}
		files[strings.TrimPrefix(header.Name, "./")] = content
	}
}

func (a archive) blob(d descriptor) ([]byte, error) {
	content, ok := a["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
	if !ok {
		return nil, fmt.Errorf("there is no %s", d.Digest)
	}
	return content, nil
}

// index checks all images of an index, which may hold other indexes.
func (a archive) index(content []byte) (found []string, err error) {
	var index struct {
		Manifests []descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(content, &index); err != nil {
		return nil, fmt.Errorf("read an index: %v", err)
	}
	for _, d := range index.Manifests {
		content, err := a.blob(d)
		if err != nil {
			return nil, err
		}
		var below []string
		if strings.Contains(d.MediaType, ".index.") {
			below, err = a.index(content)
		} else {
			below, err = a.image(content)
		}
		if err != nil {
			return nil, err
		}
		found = append(found, below...)
	}
	return found, nil
}

// image checks one image, and answers its architecture.
func (a archive) image(content []byte) ([]string, error) {
	var manifest struct {
		Config descriptor   `json:"config"`
		Layers []descriptor `json:"layers"`
	}
	if err := json.Unmarshal(content, &manifest); err != nil {
		return nil, fmt.Errorf("read a manifest: %v", err)
	}
	content, err := a.blob(manifest.Config)
	if err != nil {
		return nil, err
	}
	var c config
	if err := json.Unmarshal(content, &c); err != nil {
		return nil, fmt.Errorf("read a configuration: %v", err)
	}
	problems := []error{c.check()}
	var files int
	for _, d := range manifest.Layers {
		layer, err := a.blob(d)
		if err != nil {
			return nil, err
		}
		n, err := checkLayer(layer, c.Architecture)
		problems = append(problems, err)
		files += n
	}
	if files != 1 {
		problems = append(problems, fmt.Errorf("there are %d files, want the program alone", files))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("the image for %s: %w", c.Architecture, err)
	}
	return []string{c.Architecture}, nil
}

func (c config) check() error {
	var problems []error
	want := func(what string, ok bool, is any) {
		if !ok {
			problems = append(problems, fmt.Errorf("its %s is %v", what, is))
		}
	}
	run := c.Config
	want("operating system", c.OS == "linux", c.OS)
	want("user", run.User == "0:0", run.User)
	want("entrypoint", slices.Equal(run.Entrypoint, []string{"/" + program}), run.Entrypoint)
	want("command", len(run.Cmd) == 0, run.Cmd)
	want("list of volumes", len(run.Volumes) == 0, run.Volumes)
	want("list of ports", len(run.ExposedPorts) == 0, run.ExposedPorts)
	for _, e := range run.Env {
		want("environment", strings.HasPrefix(e, "PATH="), e) // which the format wants
	}
	return errors.Join(problems...)
}

// checkLayer answers how many entries a layer has.
func checkLayer(layer []byte, architecture string) (entries int, err error) {
	r := io.Reader(bytes.NewReader(layer))
	if bytes.HasPrefix(layer, []byte{0x1f, 0x8b}) {
		if r, err = gzip.NewReader(r); err != nil {
			return 0, err
		}
	}
	var problems []error
	for t := tar.NewReader(r); ; entries++ {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return entries, errors.Join(problems...)
		}
		if err == nil {
			err = checkEntry(header)
		}
		if err != nil {
			problems = append(problems, err)
			return entries, errors.Join(problems...)
		}
		content, err := io.ReadAll(t)
		if err != nil {
			return entries, err
		}
		problems = append(problems, checkProgram(content, architecture))
	}
}

func checkEntry(h *tar.Header) error {
	mode := h.FileInfo().Mode()
	if strings.TrimPrefix(h.Name, "./") != program || mode != 0o755 || h.Uid != 0 || h.Gid != 0 {
		return fmt.Errorf("it holds %s, %v, of %d:%d; want %s, a file of root that all may execute", h.Name, mode, h.Uid, h.Gid, program)
	}
	for name := range h.PAXRecords {
		if strings.HasPrefix(name, "SCHILY.xattr.") { // where capabilities of files are
			return fmt.Errorf("%s has the attribute %s", h.Name, name)
		}
	}
	return nil
}

// checkProgram looks for what a program would need besides itself.
func checkProgram(content []byte, architecture string) error {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("the program: %v", err)
	}
	defer func() { _ = f.Close() }()
	if f.Machine != machines[architecture] {
		return fmt.Errorf("the program is for %v", f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			return errors.New("the program is not static")
		}
	}
	return nil
}
