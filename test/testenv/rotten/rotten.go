// Package rotten makes filesystems a piece of which is not on the disk any more as it was
// written. Nothing is wrong with them until that piece is read.
package rotten

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// Kinds are the filesystems that notice: ext4 by the checksum of a directory, and btrfs by
// that of a file's content.
func Kinds() []string { return []string{"btrfs", "ext4"} }

// A Filesystem is one that is rotten.
type Filesystem struct {
	// Path is where it is mounted.
	Path  string
	kind  string
	piece string // the path of what cannot be read
}

// Volume is a directory of the filesystem below which something is rotten, itself not.
const Volume = "pool/came"

const (
	bytesOnDisk = 128 << 20
	block       = 4096
)

// New makes a filesystem and mounts it, with options of mount(8), until the test ends.
func New(t testing.TB, kind string, options ...string) *Filesystem {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "mkfs."+kind, "mount", "debugfs")
	dir := t.TempDir()
	image := filepath.Join(dir, "image")
	f := &Filesystem{Path: filepath.Join(dir, "fs"), kind: kind}
	must.Succeed(t, os.Mkdir(f.Path, 0o755))
	file, err := os.Create(image)
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(file.Truncate(bytesOnDisk), file.Close()))
	run(t, "mkfs."+kind, "-q", image)

	must.Succeed(t, loopfs.MountImage(t.Context(), image, f.Path, kind))
	content := f.fill(t)
	must.Succeed(t, loopfs.Unmount(f.Path))

	f.rot(t, image, content)
	must.Succeed(t, loopfs.MountImage(t.Context(), image, f.Path, kind, options...))
	t.Cleanup(func() {
		if err := loopfs.Unmount(f.Path); err != nil {
			t.Error(err)
		}
	})
	return f
}

// fill writes what is to rot, and answers what it looks like.
func (f *Filesystem) fill(t testing.TB) []byte {
	t.Helper()
	f.piece = filepath.Join(f.Path, Volume, "piece")
	must.Succeed(t, os.MkdirAll(filepath.Dir(f.piece), 0o755))
	if f.kind == "ext4" {
		must.Succeed(t, os.Mkdir(f.piece, 0o755))
		return nil
	}
	content := bytes.Repeat([]byte("rotten  "), block/8)
	must.Succeed(t, os.WriteFile(f.piece, bytes.Repeat(content, 16), 0o644))
	return content
}

// rot overwrites a block behind the filesystem's back.
func (f *Filesystem) rot(t testing.TB, image string, content []byte) {
	t.Helper()
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer file.Close()
	at := f.find(t, file, content)
	_, err = file.WriteAt(bytes.Repeat([]byte{0xff}, block), at)
	must.Succeed(t, err)
}

// find is where on the disk the piece is.
func (f *Filesystem) find(t testing.TB, image *os.File, content []byte) int64 {
	t.Helper()
	if f.kind == "ext4" {
		return blockOf(t, image.Name(), strings.TrimPrefix(f.piece, f.Path+"/"))
	}
	got := make([]byte, block)
	for at := int64(0); at < bytesOnDisk; at += block {
		_, err := image.ReadAt(got, at)
		must.Succeed(t, err)
		if bytes.Equal(got, content) {
			return at
		}
	}
	t.Fatal("what was written is not on the disk")
	return 0
}

func blockSize(t testing.TB, image string) int64 {
	t.Helper()
	for line := range strings.Lines(string(run(t, "debugfs", "-R", "stats -h", image))) {
		if size, ok := strings.CutPrefix(line, "Block size:"); ok {
			parsed, err := strconv.ParseInt(strings.TrimSpace(size), 10, 64)
			must.Succeed(t, err)
			return parsed
		}
	}
	t.Fatal("debugfs reports no size of blocks")
	return 0
}

// Touch reads what is rotten, which fails.
func (f *Filesystem) Touch(t testing.TB) {
	t.Helper()
	read := func() error { _, err := os.ReadFile(f.piece); return err }
	if f.kind == "ext4" {
		read = func() error { _, err := os.ReadDir(f.piece); return err }
	}
	if err := read(); !errors.Is(err, syscall.EIO) && !errors.Is(err, unix.EBADMSG) {
		t.Fatalf("what is rotten on the disk was read: %v", err)
	}
}

func run(t testing.TB, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatal(fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, stderr.String()))
	}
	return output
}
