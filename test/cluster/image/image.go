// Package image writes container images without a registry and without a tool:
// one layer with the files that are asked for, in the archive format that
// containerd imports.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"strings"
)

// An Image is what to put into an archive.
type Image struct {
	// Name is what pods call it, with a tag.
	Name string
	// Files are programs of this machine by their path in the image. Links are
	// symbolic. Texts are small files by their content. Dirs may be written by all.
	Files, Links, Texts map[string]string
	Dirs                []string
	Entrypoint, Command []string
}

// Write writes the image to a file.
func (i Image) Write(to string) (err error) {
	layer, err := i.layer()
	if err != nil {
		return fmt.Errorf("make the image %s: %w", i.Name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       map[string]any{"Entrypoint": i.Entrypoint, "Cmd": i.Command, "Env": []string{"PATH=/bin"}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config":   digest(config) + ".json",
		"RepoTags": []string{i.Name},
		"Layers":   []string{digest(layer) + ".tar"},
	}})
	if err != nil {
		return err
	}
	file, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	archive := tar.NewWriter(file)
	for _, part := range []struct {
		name    string
		content []byte
	}{{digest(config) + ".json", config}, {digest(layer) + ".tar", layer}, {"manifest.json", manifest}} {
		if err := add(archive, tar.Header{Name: part.name, Mode: 0o644}, part.content); err != nil {
			return err
		}
	}
	return archive.Close()
}

func (i Image) layer() ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, dir := range i.Dirs {
		if err := add(w, tar.Header{Typeflag: tar.TypeDir, Name: inside(dir) + "/", Mode: 0o1777}, nil); err != nil {
			return nil, err
		}
	}
	for name, source := range i.Files {
		content, err := os.ReadFile(source)
		if err != nil {
			return nil, err
		}
		if err := add(w, tar.Header{Name: inside(name), Mode: 0o755}, content); err != nil {
			return nil, err
		}
	}
	for name, text := range i.Texts {
		if err := add(w, tar.Header{Name: inside(name), Mode: 0o644}, []byte(text)); err != nil {
			return nil, err
		}
	}
	for name, target := range i.Links {
		if err := add(w, tar.Header{Typeflag: tar.TypeSymlink, Name: inside(name), Linkname: target, Mode: 0o777}, nil); err != nil {
			return nil, err
		}
	}
	return layer.Bytes(), w.Close()
}

// inside is a path as archives have it.
func inside(name string) string { return strings.TrimPrefix(path.Clean(name), "/") }

func add(to *tar.Writer, header tar.Header, content []byte) error {
	header.Size = int64(len(content))
	if err := to.WriteHeader(&header); err != nil {
		return err
	}
	_, err := io.Copy(to, bytes.NewReader(content))
	return err
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}
