// Package cpio writes archives in the format "newc", from which Linux makes its
// first root filesystem. Everything in them belongs to root.
package cpio

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// The types of an entry, as in st_mode.
const (
	directory = 0o040000
	device    = 0o020000
	file      = 0o100000
	symlink   = 0o120000
)

// end is the name of the entry that closes an archive.
const end = "TRAILER!!!"

// A Writer writes an archive. Paths are absolute; the directories on the way to
// an entry are written before it, once.
type Writer struct {
	to    io.Writer
	inode int
	made  map[string]bool
}

// NewWriter returns a Writer to w, which is better buffered.
func NewWriter(w io.Writer) *Writer {
	return &Writer{to: w, made: map[string]bool{"/": true}}
}

// Directory writes a directory, unless it is there.
func (w *Writer) Directory(name string) error {
	name = path.Clean(name)
	if w.made[name] {
		return nil
	}
	w.made[name] = true
	return w.entry(name, directory|0o755, 0, nil, 0, 0)
}

// Text writes a small file that everybody may read.
func (w *Writer) Text(name, content string) error {
	return w.File(name, 0o644, int64(len(content)), strings.NewReader(content))
}

// File writes a file of that many bytes.
func (w *Writer) File(name string, permissions fs.FileMode, size int64, content io.Reader) error {
	return w.entry(name, file|uint32(permissions.Perm()), size, content, 0, 0)
}

// Symlink writes a symbolic link.
func (w *Writer) Symlink(name, target string) error {
	return w.entry(name, symlink|0o777, int64(len(target)), strings.NewReader(target), 0, 0)
}

// CharDevice writes a character device that everybody may use.
func (w *Writer) CharDevice(name string, major, minor uint32) error {
	return w.entry(name, device|0o666, 0, nil, major, minor)
}

// Copy writes a file or a directory of this machine, with all that is in it.
// Links are followed where source itself is one, and kept below it.
func (w *Writer) Copy(name, source string) error {
	source, err := filepath.EvalSymlinks(source)
	if err != nil {
		return err
	}
	return filepath.WalkDir(source, func(found string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(source, found)
		if err != nil {
			return err
		}
		return w.copyOne(path.Join(name, below), found)
	})
}

func (w *Writer) copyOne(name, source string) error {
	info, err := os.Lstat(source)
	if err != nil {
		return err
	}
	switch info.Mode().Type() {
	case fs.ModeDir:
		return w.Directory(name)
	case fs.ModeSymlink:
		target, err := os.Readlink(source)
		if err != nil {
			return err
		}
		return w.Symlink(name, target)
	case 0:
		content, err := os.Open(source)
		if err != nil {
			return err
		}
		defer content.Close()
		return w.File(name, info.Mode(), info.Size(), content)
	}
	return fmt.Errorf("put %s into an archive: neither a file nor a directory nor a link", source)
}

// Close writes the end of the archive.
func (w *Writer) Close() error {
	return w.header(end, 0, 0, 0, 0)
}

func (w *Writer) entry(name string, mode uint32, size int64, content io.Reader, major, minor uint32) error {
	name = path.Clean(name)
	if !path.IsAbs(name) || name == "/" {
		return fmt.Errorf("write %q to an archive: not a path below /", name)
	}
	if size > math.MaxUint32 {
		return fmt.Errorf("write %s to an archive: %d bytes are too many for this format", name, size)
	}
	if err := w.Directory(path.Dir(name)); err != nil {
		return err
	}
	if err := w.header(strings.TrimPrefix(name, "/"), mode, size, major, minor); err != nil || size == 0 {
		return err
	}
	// A file that changes its size meanwhile must not shift what follows.
	if _, err := io.CopyN(w.to, content, size); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("write %s to an archive: %w", name, err)
	}
	return w.pad(size)
}

// header writes an entry's thirteen numbers of eight hexadecimal digits, and its
// name; see cpio(5).
func (w *Writer) header(name string, mode uint32, size int64, major, minor uint32) error {
	w.inode++
	const links = 1
	var b bytes.Buffer
	b.WriteString("070701")
	for _, number := range []int64{
		int64(w.inode), int64(mode), 0, 0, links, 0, size,
		0, 0, int64(major), int64(minor), int64(len(name) + 1), 0,
	} {
		fmt.Fprintf(&b, "%08x", number)
	}
	b.WriteString(name + "\x00")
	length := int64(b.Len())
	if _, err := w.to.Write(b.Bytes()); err != nil {
		return err
	}
	return w.pad(length)
}

// pad fills up to a multiple of four bytes.
func (w *Writer) pad(written int64) error {
	_, err := w.to.Write(make([]byte, -written&3))
	return err
}
