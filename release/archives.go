package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// A file is an entry of an archive.
type file struct {
	name string
	mode int64
	data []byte
}

// writePrograms packs the programs of each architecture, with the licence.
func (r release) writePrograms() error {
	licence, err := os.ReadFile(filepath.Join(r.root, "LICENSE"))
	if err != nil {
		return err
	}
	for _, arch := range r.arches {
		name := fmt.Sprintf("hostpath-provisioner-%s-linux-%s", r.version, arch)
		files := []file{{name: name + "/LICENSE", mode: 0o644, data: licence}}
		for _, program := range programs {
			built, err := os.ReadFile(filepath.Join(r.root, "bin", "linux_"+arch, program))
			if err != nil {
				return err
			}
			files = append(files, file{name: name + "/" + program, mode: 0o755, data: built})
		}
		if err := r.writeTo(name+".tar.gz", func(w io.Writer) error { return r.packed(w, files) }); err != nil {
			return err
		}
	}
	return nil
}

// packed writes a compressed archive. Its header has no time and no name of a system (RFC 1952).
func (r release) packed(w io.Writer, files []file) error {
	compressed, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	return errors.Join(r.archive(compressed, files), compressed.Close())
}

// archive writes files in the order of their names, all of root and of the time of the commit.
func (r release) archive(w io.Writer, files []file) error {
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	archive := tar.NewWriter(w)
	for _, f := range files {
		header := tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: r.made, Format: tar.FormatPAX}
		if err := archive.WriteHeader(&header); err != nil {
			return err
		}
		if _, err := archive.Write(f.data); err != nil {
			return err
		}
	}
	return archive.Close()
}

// writeImages packs the images anew: the programs that made their archives gave the files in them the time of day.
func (r release) writeImages() error {
	for _, program := range programs {
		files, err := filesOf(filepath.Join(r.root, "bin", "image", program+".tar"))
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s-%s.oci.tar", program, r.version)
		if err := r.writeTo(name, func(w io.Writer) error { return r.archive(w, files) }); err != nil {
			return err
		}
	}
	return nil
}

// filesOf are the files of an OCI archive. Its directories are in their names.
func filesOf(path string) (files []file, err error) {
	packed, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	archive := tar.NewReader(bytes.NewReader(packed))
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		switch header.Typeflag {
		case tar.TypeDir:
			continue
		case tar.TypeReg:
		default:
			return nil, fmt.Errorf("%s: %s is neither a file nor a directory", path, header.Name)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", path, header.Name, err)
		}
		files = append(files, file{name: filepath.Clean(header.Name), mode: 0o644, data: data})
	}
}

func (r release) writeTo(name string, write func(io.Writer) error) error {
	f, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
