package crash

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A disk forgets what was written to it and not flushed, as one with a cache does when
// the power goes. It is a file of a FUSE filesystem, below a loop device: what a
// filesystem on that sends to its disk comes here as a write, before the filesystem is
// told that it is written, and each flush as an fsync, before it is told that all is
// flushed. Requests are served one after another, so that it is plain which writes were
// answered when a flush came. Those and no others outlive it; of the rest, the disk may
// have stored any part in any order, in pieces of the smallest unit that disks of today
// write as a whole.
//
// The loop driver has no forced unit access: the kernel makes a write and a flush of it.
type disk struct {
	server *os.File // of /dev/fuse
	served sync.WaitGroup
	fail   func(error)
	bytes  int64

	mu      sync.Mutex
	now     image // what a read gives
	durable image // what the last flush has made sure of
	pending []piece
	// flushed is told of each flush.
	flushed func(image)
}

// unit is what a disk writes as a whole, in bytes.
const unit = 4096

// An image is the content of a disk by its units; those that are missing are zero. Units
// are never changed once they are in an image.
type image map[int64][]byte

// A piece is a write within one unit.
type piece struct {
	offset int64
	data   []byte
}

func (i image) write(p piece) {
	at, from := p.offset/unit, p.offset%unit
	if len(p.data) == unit {
		i[at] = p.data
		return
	}
	changed := make([]byte, unit)
	copy(changed, i[at])
	copy(changed[from:], p.data)
	i[at] = changed
}

func (i image) read(b []byte, offset int64) {
	for done := 0; done < len(b); {
		at, from := (offset+int64(done))/unit, (offset+int64(done))%unit
		part := b[done:min(len(b), done+unit-int(from))]
		if have := i[at]; have == nil {
			clear(part)
		} else {
			copy(part, have[from:])
		}
		done += len(part)
	}
}

// load reads a file of which most is empty.
func load(t *testing.T, path string) (content image, bytes int64) {
	t.Helper()
	f, err := os.Open(path)
	drivertest.Must(t, err)
	defer f.Close()
	content = make(image)
	for at := int64(0); ; at++ {
		b := make([]byte, unit)
		_, err := io.ReadFull(f, b)
		if errors.Is(err, io.EOF) {
			return content, at * unit
		}
		drivertest.Must(t, err)
		if !empty(b) {
			content[at] = b
		}
	}
}

func empty(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// store writes an image to a file.
func (i image) store(t *testing.T, path string, bytes int64) {
	t.Helper()
	f, err := os.Create(path)
	drivertest.Must(t, err)
	drivertest.Must(t, f.Truncate(bytes))
	for at, b := range i {
		_, err := f.WriteAt(b, at*unit)
		drivertest.Must(t, err)
	}
	drivertest.Must(t, f.Close())
}

// newDisk serves the content of a file as dir/disk, until the test ends.
func newDisk(t *testing.T, file, dir string) *disk {
	t.Helper()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		testenv.Missing(t, "FUSE: "+err.Error())
	}
	d := &disk{server: server, fail: func(err error) { t.Error(err) }}
	d.now, d.bytes = load(t, file)
	d.durable = maps.Clone(d.now)
	drivertest.Must(t, unix.Mount("disk", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	d.served.Go(d.serve)
	t.Cleanup(func() {
		drivertest.Must(t, loopfs.Unmount(dir))
		d.served.Wait()
		drivertest.Must(t, server.Close())
	})
	return d
}

// afterPowerLoss is what the disk may have when the power goes now. Of what was written
// and not flushed it has what keep says.
func (d *disk) afterPowerLoss(keep func() bool) image {
	d.mu.Lock()
	defer d.mu.Unlock()
	left := maps.Clone(d.durable)
	for _, p := range d.pending {
		if keep() {
			left.write(p)
		}
	}
	return left
}

// onFlush has f be told of what is durable at each flush; nil for nobody.
func (d *disk) onFlush(f func(image)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flushed = f
}

func (d *disk) write(data []byte, offset int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(data) > 0 {
		n := min(len(data), unit-int(offset%unit))
		p := piece{offset, append([]byte(nil), data[:n]...)}
		d.now.write(p)
		d.pending = append(d.pending, p)
		data, offset = data[n:], offset+int64(n)
	}
}

func (d *disk) flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pending {
		d.durable.write(p)
	}
	d.pending = nil
	if d.flushed != nil {
		d.flushed(maps.Clone(d.durable))
	}
}

func (d *disk) read(b []byte, offset int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now.read(b, offset)
}

// Numbers of linux/fuse.h.
const (
	fuseLookup      = 1
	fuseForget      = 2
	fuseGetattr     = 3
	fuseOpen        = 14
	fuseRead        = 15
	fuseWrite       = 16
	fuseRelease     = 18
	fuseFsync       = 20
	fuseFlush       = 25
	fuseInit        = 26
	fuseInterrupt   = 36
	fuseBatchForget = 42

	fuseInHeader  = 40
	fuseOutHeader = 16
	fuseWriteIn   = 40
	fuseMaxWrite  = 128 << 10

	rootNode, diskNode = 1, 2
)

// serve answers until the filesystem is unmounted.
func (d *disk) serve() {
	request := make([]byte, fuseMaxWrite+4096)
	for {
		n, err := unix.Read(int(d.server.Fd()), request)
		switch {
		case errors.Is(err, unix.ENODEV):
			return
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue // ENOENT: the request was taken back
		case err != nil:
			d.fail(fmt.Errorf("read from /dev/fuse: %w", err))
			return
		}
		body, errno, answered := d.answer(binary.NativeEndian.Uint32(request[4:]), binary.NativeEndian.Uint64(request[16:]), request[fuseInHeader:n])
		if !answered {
			continue
		}
		reply := make([]byte, fuseOutHeader, fuseOutHeader+len(body))
		reply = append(reply, body...)
		binary.NativeEndian.PutUint32(reply, uint32(len(reply)))
		binary.NativeEndian.PutUint32(reply[4:], uint32(-int32(errno)))
		copy(reply[8:16], request[8:16])
		if _, err := unix.Write(int(d.server.Fd()), reply); err != nil && !errors.Is(err, unix.ENOENT) {
			d.fail(fmt.Errorf("answer request %d of FUSE: %w", binary.NativeEndian.Uint32(request[4:]), err))
			return
		}
	}
}

func (d *disk) answer(operation uint32, node uint64, in []byte) (body []byte, errno unix.Errno, answered bool) {
	switch operation {
	case fuseForget, fuseBatchForget, fuseInterrupt:
		return nil, 0, false
	case fuseInit:
		return words(7, 31, fuseMaxWrite, 0, 0, fuseMaxWrite, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0), 0, true
	case fuseLookup:
		if node != rootNode || string(in) != "disk\x00" {
			return nil, unix.ENOENT, true
		}
		return append(words(diskNode, 0, 0, 0, 3600, 0, 3600, 0, 0, 0), d.attributes(diskNode)...), 0, true
	case fuseGetattr:
		return append(words(3600, 0, 0, 0), d.attributes(node)...), 0, true
	case fuseOpen:
		const directIO = 1 // nothing is kept in the page cache, and so nothing twice
		return words(0, 0, directIO, 0), 0, true
	case fuseRead:
		b := make([]byte, min(int64(binary.NativeEndian.Uint32(in[16:])), d.bytes-int64(binary.NativeEndian.Uint64(in[8:]))))
		d.read(b, int64(binary.NativeEndian.Uint64(in[8:])))
		return b, 0, true
	case fuseWrite:
		size := binary.NativeEndian.Uint32(in[16:])
		d.write(in[fuseWriteIn:fuseWriteIn+size], int64(binary.NativeEndian.Uint64(in[8:])))
		return words(size, 0), 0, true
	case fuseFsync:
		d.flush()
		return nil, 0, true
	case fuseFlush, fuseRelease:
		return nil, 0, true
	}
	return nil, unix.ENOSYS, true
}

// attributes is struct fuse_attr.
func (d *disk) attributes(node uint64) []byte {
	var a [11]uint64
	mode, size := uint32(unix.S_IFDIR|0o755), uint64(0)
	if node == diskNode {
		mode, size = unix.S_IFREG|0o600, uint64(d.bytes)
	}
	a[0], a[1], a[2] = node, size, size/512
	body := make([]byte, 0, 8*len(a))
	for _, v := range a {
		body = binary.NativeEndian.AppendUint64(body, v)
	}
	binary.NativeEndian.PutUint32(body[60:], mode)
	binary.NativeEndian.PutUint32(body[64:], 1)    // links
	binary.NativeEndian.PutUint32(body[80:], unit) // block
	return body
}

func words(all ...uint32) []byte {
	var b []byte
	for _, w := range all {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// mountImage has a filesystem mounted, in a file or on a disk, while a function works.
func mountImage(t *testing.T, kind, options, file string, work func(mounted string)) {
	t.Helper()
	mounted := filepath.Join(t.TempDir(), "fs")
	drivertest.Must(t, os.Mkdir(mounted, 0o755))
	if kind == "btrfs" {
		// The kernel remembers the newest state of each filesystem that it has seen, and
		// refuses to mount an older one.
		run(t, "btrfs", "device", "scan", "--forget")
	}
	run(t, "mount", "-t", kind, "-o", options+"loop", file, mounted)
	t.Cleanup(func() {
		if mounts(t, mounted) > 0 {
			drivertest.Must(t, loopfs.Unmount(mounted))
		}
	})
	work(mounted)
	drivertest.Must(t, loopfs.Unmount(mounted))
}
