package blocks

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A disk is an open device whose reads and writes go past the page cache.
type disk struct {
	t      testing.TB
	file   *os.File
	buffer []byte // aligned, as direct IO wants it
}

const (
	blockBytes  = 4096
	bufferBytes = mib
)

// open opens a device, or the file of a volume, until the test ends or it is closed.
func open(t testing.TB, path string, flags int) *disk {
	t.Helper()
	file, err := os.OpenFile(path, flags|unix.O_DIRECT, 0)
	must.Succeed(t, err)
	buffer, err := unix.Mmap(-1, 0, bufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must.Succeed(t, err)
	d := &disk{t: t, file: file, buffer: buffer}
	t.Cleanup(d.close)
	return d
}

func (d *disk) close() {
	if d.buffer == nil {
		return
	}
	must.Succeed(d.t, errors.Join(d.file.Close(), unix.Munmap(d.buffer)))
	d.buffer = nil
}

// write writes that many bytes from an offset on; what is the generation.
func (d *disk) write(from, length int64, generation uint64) {
	d.t.Helper()
	must.Succeed(d.t, d.tryWrite(from, length, generation))
}

func (d *disk) tryWrite(from, length int64, generation uint64) error {
	for at := from; at < from+length; {
		chunk := d.buffer[:min(bufferBytes, from+length-at)]
		fill(chunk, at, generation)
		n, err := d.file.WriteAt(chunk, at)
		if err != nil {
			return err
		}
		at += int64(n)
	}
	return unix.Fdatasync(int(d.file.Fd()))
}

// want expects what was written there, of that generation.
func (d *disk) want(from, length int64, generation uint64) {
	d.t.Helper()
	expected := make([]byte, bufferBytes)
	for at := from; at < from+length; {
		chunk := d.buffer[:min(bufferBytes, from+length-at)]
		must.Succeed(d.t, must.Err(d.file.ReadAt(chunk, at)))
		fill(expected[:len(chunk)], at, generation)
		if !bytes.Equal(chunk, expected[:len(chunk)]) {
			d.t.Fatalf("%s has lost something between %d and %d", d.file.Name(), at, at+int64(len(chunk)))
		}
		at += int64(len(chunk))
	}
}

// fill makes content that encodes its place and generation: no word is like another.
func fill(chunk []byte, at int64, generation uint64) {
	for i := 0; i < len(chunk); i += 8 {
		word := (uint64(at)+uint64(i))*0x9e3779b97f4a7c15 + generation*0xbf58476d1ce4e5b9
		binary.LittleEndian.PutUint64(chunk[i:], word^word>>29)
	}
}

func (d *disk) size() int64 {
	d.t.Helper()
	bytes := must.Value(unix.IoctlGetInt(int(d.file.Fd()), unix.BLKGETSIZE64))(d.t)
	return int64(bytes)
}

// number is the device number of what is published at a path.
func number(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatalf("%s has mode %o, want a block device", path, st.Mode)
	}
	return st.Rdev
}

// image is the file of a volume.
func (h *harness) image(name string) string { return filepath.Join(h.pool, name, "disk.img") }

// takesImages has a volume made as docs/layout.md says, as of an image of rawfile-localpv (docs/migration.md).
func takesImages(h *harness) {
	const size = 4 * mib
	h.Must(h.Process.Stop())
	brought := filepath.Join(h.mounted, "brought.img")
	h.Must(os.WriteFile(brought, nil, 0o600))
	image := open(h, brought, os.O_RDWR)
	image.write(0, size, 1)
	image.close()
	record := fmt.Sprintf(`{"version":1,"id":"disk","uid":"handmade","mode":"block","bytes":%d,"blockBytes":512,"created":"2026-11-20T18:56:54Z"}`, size)
	h.Must(errors.Join(
		os.Mkdir(filepath.Dir(h.image("disk")), 0o700),
		os.Rename(brought, h.image("disk")),
		os.WriteFile(filepath.Join(h.pool, ".hostpath-provisioner", "volumes", "disk.json"), []byte(record), 0o600),
	))
	h.Must(h.Process.Restart(h.Context()))
	h.AwaitServing()
	h.volumes = append(h.volumes, "disk")
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	if got := d.size(); got != size {
		h.Errorf("the device has %d bytes, want %d", got, size)
	}
	d.want(0, size, 1)
	d.write(0, size, 2)
	d.close()
	h.wantInOrder("disk", "pod", size)
	h.Must(h.expand("disk", "pod", 2*size))
	h.MustUnpublish("disk", "pod")
	open(h, h.image("disk"), os.O_RDONLY).want(0, size, 2)
}

// allocated is the space that a volume's file takes, in bytes.
func (h *harness) allocated(name string) int64 {
	h.Helper()
	// What was written is allocated when it is written back at the latest.
	file := must.Value(os.Open(h.image(name)))(h)
	var st syscall.Stat_t
	h.Must(errors.Join(file.Sync(), syscall.Fstat(int(file.Fd()), &st), file.Close()))
	return st.Blocks * 512
}
