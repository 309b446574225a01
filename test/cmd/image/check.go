package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

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

// A checker checks an archive of a program's images.
type checker struct {
	archive archive
	program string
	image   image
}

// check answers the architectures that the archive has an image for.
func check(path, program string, i image) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	parts, err := untar(f)
	if err != nil {
		return nil, err
	}
	c := checker{archive(parts), program, i}
	found, err := c.index(parts["index.json"])
	switch {
	case err != nil:
	case len(found) == 0:
		err = errors.New("it has no image")
	case !slices.IsSorted(found):
		err = fmt.Errorf("its images are for %s: each build has to give them in the same order, by their names", strings.Join(found, ", "))
	}
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
func (c checker) index(content []byte) (found []string, err error) {
	var index struct {
		Manifests []descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(content, &index); err != nil {
		return nil, fmt.Errorf("read an index: %v", err)
	}
	for _, d := range index.Manifests {
		content, err := c.archive.blob(d)
		if err != nil {
			return nil, err
		}
		var below []string
		if strings.Contains(d.MediaType, ".index.") {
			below, err = c.index(content)
		} else {
			below, err = c.single(content)
		}
		if err != nil {
			return nil, err
		}
		found = append(found, below...)
	}
	return found, nil
}

// single checks one image, and answers its architecture.
func (c checker) single(content []byte) ([]string, error) {
	var manifest struct {
		Config descriptor   `json:"config"`
		Layers []descriptor `json:"layers"`
	}
	if err := json.Unmarshal(content, &manifest); err != nil {
		return nil, fmt.Errorf("read a manifest: %v", err)
	}
	content, err := c.archive.blob(manifest.Config)
	if err != nil {
		return nil, err
	}
	var configured config
	if err := json.Unmarshal(content, &configured); err != nil {
		return nil, fmt.Errorf("read a configuration: %v", err)
	}
	problems := []error{configured.check(c.program, c.image)}
	files := contents{checker: c, arch: configured.Architecture, seen: make(map[string]bool)}
	for _, d := range manifest.Layers {
		layer, err := c.archive.blob(d)
		if err != nil {
			return nil, err
		}
		problems = append(problems, files.layer(layer))
	}
	problems = append(problems, files.missing())
	if files.bytes > c.image.mostBytes {
		problems = append(problems, fmt.Errorf("its files have %d bytes, and may have %d", files.bytes, c.image.mostBytes))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("the image for %s: %w", configured.Architecture, err)
	}
	return []string{configured.Architecture}, nil
}

func (c config) check(program string, i image) error {
	var problems []error
	want := func(what string, ok bool, is any) {
		if !ok {
			problems = append(problems, fmt.Errorf("its %s is %v", what, is))
		}
	}
	run := c.Config
	want("operating system", c.OS == "linux", c.OS)
	want("user", run.User == cmp.Or(i.user, "0:0"), run.User)
	want("entrypoint", slices.Equal(run.Entrypoint, []string{"/" + program}), run.Entrypoint)
	want("command", len(run.Cmd) == 0, run.Cmd)
	want("list of volumes", len(run.Volumes) == 0, run.Volumes)
	want("list of ports", len(run.ExposedPorts) == 0, run.ExposedPorts)
	for _, e := range run.Env {
		want("environment", strings.HasPrefix(e, "PATH="), e) // which the format wants
	}
	return errors.Join(problems...)
}

// contents are the files of one image.
type contents struct {
	checker
	arch string
	// seen are the entries that are no directories, by their path; loaded is what programs load.
	seen   map[string]bool
	loaded []string
	// bytes are those of all files.
	bytes int64
}

// layer checks the entries of a layer.
func (c *contents) layer(layer []byte) (err error) {
	r := io.Reader(bytes.NewReader(layer))
	if bytes.HasPrefix(layer, []byte{0x1f, 0x8b}) {
		if r, err = gzip.NewReader(r); err != nil {
			return err
		}
	}
	var problems []error
	for t := tar.NewReader(r); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return errors.Join(problems...)
		}
		if err != nil {
			return errors.Join(append(problems, err)...)
		}
		content, err := io.ReadAll(t)
		if err != nil {
			return err
		}
		c.bytes += int64(len(content))
		if err := c.entry(header, content); err != nil {
			problems = append(problems, fmt.Errorf("%s, %v, of %d:%d: %v", header.Name, header.FileInfo().Mode(), header.Uid, header.Gid, err))
		}
	}
}

// entry checks one entry: all are root's, no other user writes them, and none gives more rights than its caller has.
func (c *contents) entry(h *tar.Header, content []byte) error {
	name := inUsr(h.Name)
	mode := h.FileInfo().Mode()
	if h.Uid != 0 || h.Gid != 0 {
		return errors.New("not root's")
	}
	for attribute := range h.PAXRecords {
		if strings.HasPrefix(attribute, "SCHILY.xattr.") { // where capabilities of files are
			return fmt.Errorf("it has the attribute %s", attribute)
		}
	}
	if mode&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky) != 0 || mode&fs.ModeSymlink == 0 && mode&0o022 != 0 {
		return errors.New("too many rights")
	}
	switch {
	case c.seen[name]:
		return errors.New("it is there twice")
	case name == c.program:
		c.seen[name] = true
		return c.static(mode, content)
	case slices.Contains(c.image.links, "/"+name):
		c.seen[name] = true
		if mode&fs.ModeSymlink == 0 || h.Linkname != "/"+c.program {
			return errors.New("it is not a link to the program")
		}
		return nil
	case len(c.image.debian) == 0 && (!mode.IsDir() || !c.image.above(name)):
		return errors.New("the image is to hold only the program")
	case mode.IsDir():
		return nil
	}
	c.seen[name] = true
	return c.debian(name, mode, content)
}

// debian checks what is from Debian: a program that is asked for, a library, or what describes its package.
func (c *contents) debian(name string, mode fs.FileMode, content []byte) error {
	switch {
	case mode&fs.ModeSymlink != 0:
		return nil // only to what is there, or it fails to load
	case strings.HasPrefix(name, "var/lib/dpkg/status.d/"),
		strings.HasPrefix(name, "usr/share/doc/") && path.Base(name) == "copyright":
		return nil
	case name == osRelease:
		if string(content) != osReleaseIs {
			return errors.New("it does not say of which Debian the packages are")
		}
		return nil
	case !strings.HasPrefix(name, "usr/lib") && !slices.Contains(c.image.programs(), "/"+name):
		return errors.New("the image is not to hold that")
	}
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	found, err := needs(file, machines[c.arch])
	c.loaded = append(c.loaded, found...)
	return err
}

// static checks the program.
func (c *contents) static(mode fs.FileMode, content []byte) error {
	if mode != 0o755 {
		return errors.New("not a file that all may execute")
	}
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("the program: %v", err)
	}
	defer func() { _ = f.Close() }()
	if f.Machine != machines[c.arch] {
		return fmt.Errorf("the program is for %v", f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			return errors.New("the program is not static")
		}
	}
	return nil
}

// missing reports what has to be there and is not.
func (c *contents) missing() error {
	var problems []error
	want := slices.Concat([]string{"/" + c.program}, c.image.programs(), c.image.links)
	if len(c.image.debian) > 0 {
		want = append(want, osRelease)
	}
	for _, library := range c.loaded {
		if !path.IsAbs(library) {
			library = path.Join("/usr/lib", tuples[c.arch], library)
		}
		want = append(want, library)
	}
	slices.Sort(want)
	for _, name := range slices.Compact(want) {
		if !c.seen[inUsr(name)] {
			problems = append(problems, fmt.Errorf("it has no %s", name))
		}
	}
	return errors.Join(problems...)
}
