// Package disk is a disk in memory that does wrong what disks do wrong: it forgets what
// was not flushed when the power goes, it fails, it hangs, and it is slow. What is on it, and who
// mounts that, is left to others.
//
// It is a file of a FUSE filesystem, for a loop device: what a filesystem on that sends to
// its disk comes here as a write, before the filesystem gets the answer that it is written, and
// each flush as an fsync, before it gets the answer that all is flushed. The loop driver has no
// forced unit access: the kernel makes a write and a flush of it.
package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A Disk serves requests one after another, so that it is plain which writes were
// answered when a flush came. Those and no others outlive a loss of power; of the rest,
// the disk may have stored any part in any order, in pieces of the smallest unit that
// disks of today write as a whole.
type Disk struct {
	// Path is the file that is the disk.
	Path string
	// Bytes is its size.
	Bytes int64

	server *os.File // of /dev/fuse
	served sync.WaitGroup
	report func(error)

	mu      sync.Mutex
	now     Image // what a read gives
	durable Image // what the last flush has made sure of
	pending []piece
	// flushed is called with each flush.
	flushed func(Image)
	failing []Operation
	failure unix.Errno
	// From slowFrom on, slowRate bytes are written in a second; 0 for as many as can be.
	slowFrom, slowRate int64
	hanging            chan struct{} // closed when that ends; nil if the disk does not hang
	asked              chan struct{} // a test may take note of a request that is not answered
	unwritten          *unwritten    // nil if writes are answered
	forgetful          bool          // it finds no data in its file (lseek(2), SEEK_DATA)
	refused            []byte        // writes that have it fail; nil for none

	serving sync.Mutex // while a request is answered
}

// Unwritten are writes that are not answered yet.
type unwritten struct {
	requests [][]byte
	first    chan struct{} // closed when there is one
}

// unit is what a disk writes as a whole, in bytes.
const unit = 4096

// An Image is the content of a disk by its units; those that are missing are zero. Units
// are never changed once they are in an image.
type Image map[int64][]byte

// A piece is a write within one unit.
type piece struct {
	offset int64
	data   []byte
}

func (i Image) write(p piece) {
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

func (i Image) read(b []byte, offset int64) {
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

// Load reads a file of which most is empty.
func Load(t testing.TB, path string) (content Image, bytes int64) {
	t.Helper()
	f, err := os.Open(path)
	must.Succeed(t, err)
	defer f.Close()
	info, err := f.Stat()
	must.Succeed(t, err)
	content = make(Image)
	for at := int64(0); ; {
		at, err = unix.Seek(int(f.Fd()), at*unit, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // nothing follows
			return content, info.Size()
		}
		must.Succeed(t, err)
		b := make([]byte, unit)
		at /= unit
		_, err = f.ReadAt(b, at*unit)
		must.Succeed(t, err)
		if !empty(b) {
			content[at] = b
		}
		at++
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

// Store writes an image to a file.
func (i Image) Store(t testing.TB, path string, bytes int64) {
	t.Helper()
	f, err := os.Create(path)
	must.Succeed(t, err)
	must.Succeed(t, f.Truncate(bytes))
	for at, b := range i {
		_, err := f.WriteAt(b, at*unit)
		must.Succeed(t, err)
	}
	must.Succeed(t, f.Close())
}

// New is a disk with the content of a file, in an empty directory, until the test ends.
// What is on it has to be unmounted then.
func New(t testing.TB, file, dir string) *Disk {
	t.Helper()
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		testenv.Missing(t, "FUSE: "+err.Error())
	}
	d := &Disk{Path: filepath.Join(dir, name), server: server, asked: make(chan struct{}), report: func(err error) { t.Error(err) }}
	d.now, d.Bytes = Load(t, file)
	d.durable = maps.Clone(d.now)
	must.Succeed(t, unix.Mount("disk", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server.Fd())))
	d.served.Go(d.serve)
	t.Cleanup(func() {
		d.Heal()
		must.Succeed(t, unmount(dir))
		d.served.Wait()
		must.Succeed(t, server.Close())
	})
	must.Succeed(t, d.refusePoll())
	return d
}

// Mount mounts the filesystem of a kind that is on the disk, until the test ends. The kernel asks for no more at a time than the disk is asked
// for at once: where a part of more is refused, the loop device says that all was written.
func (d *Disk) Mount(t testing.TB, at, kind string) {
	t.Helper()
	device, err := loopfs.Attach(d.Path)
	must.Succeed(t, err)
	most := filepath.Join("/sys/block", filepath.Base(device.Name()), "queue/max_sectors_kb")
	before, err := os.ReadFile(most)
	must.Succeed(t, err, os.WriteFile(most, []byte(strconv.Itoa(fuseMaxWrite>>10)), 0o600), loopfs.MountDevice(t.Context(), device.Name(), at, kind), device.Close())
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(at), os.WriteFile(most, before, 0o600)) })
	t.Cleanup(d.Heal) // before anything waits for the disk
}

// refusePoll has the kernel ask once whether the file can be polled, and never again once
// it gets the answer that it cannot (ENOSYS). Go would ask by opening the file, in a call of which
// its scheduler knows nothing (epoll_ctl): should the collector of garbage stop all
// goroutines just then, the one that answers were stopped, and both would wait for ever.
func (d *Disk) refusePoll() error {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
	return errors.Join(err, unix.Close(fd))
}

// unmount is loopfs.Unmount, but waits for those who ask all loop devices of the machine what
// their file is, and had to wait for this disk.
func unmount(dir string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 1000 {
		if err := unix.Unmount(dir, 0); !errors.Is(err, unix.EBUSY) {
			return err
		}
		<-tick.C
	}
	return loopfs.Unmount(dir)
}

// AfterPowerLoss is what the disk may have when the power goes now. Of what was written
// and not flushed it has what keep says.
func (d *Disk) AfterPowerLoss(keep func() bool) Image {
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

// OnFlush has f called with what is durable at each flush; nil for none.
func (d *Disk) OnFlush(f func(Image)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flushed = f
}

// An Operation is what a disk is asked for.
type Operation uint32

// The operations, by their numbers in linux/fuse.h.
const (
	Read  Operation = fuseRead
	Write Operation = fuseWrite
	Flush Operation = fuseFsync
	Stat  Operation = fuseGetattr
)

// Fail answers these operations with EIO from now on.
func (d *Disk) Fail(operations ...Operation) { d.FailWith(unix.EIO, operations...) }

// FailWith is Fail with another error.
func (d *Disk) FailWith(errno unix.Errno, operations ...Operation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failing, d.failure = operations, errno
}

// RefuseWritesOf fails writes that have a text with EIO: those of what a file has, and none of what its filesystem keeps of it.
func (d *Disk) RefuseWritesOf(text []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refused = text
}

// FindNoData has it say that there is none in its file, wherever it is asked (lseek(2), SEEK_DATA), as ZFS does now and then of what was just
// written. It has to be the first to be asked.
func (d *Disk) FindNoData() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forgetful = true
}

// seeks is the answer to lseek(2): that this disk does not know, unless it is forgetful.
func (d *Disk) seeks() unix.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.forgetful {
		return unix.ENXIO
	}
	return unix.ENOSYS
}

// Hang answers nothing from now on.
func (d *Disk) Hang() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hanging == nil {
		d.hanging = make(chan struct{})
	}
}

// HangWrites answers no write from now on, and all else: so does a disk that has much to write. The channel is closed once it is asked for one.
// Reads do not wait behind writes only if the loop device passes them on as they come (LOOP_SET_DIRECT_IO).
func (d *Disk) HangWrites() (asked <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unwritten = &unwritten{first: make(chan struct{})}
	return d.unwritten.first
}

// keeps takes a request that is not to be answered yet.
func (d *Disk) keeps(request []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unwritten == nil || binary.NativeEndian.Uint32(request[4:]) != fuseWrite {
		return false
	}
	d.unwritten.requests = append(d.unwritten.requests, slices.Clone(request))
	if len(d.unwritten.requests) == 1 {
		close(d.unwritten.first)
	}
	return true
}

// Slow has writes at this offset and behind it take their time. All else is answered in between.
func (d *Disk) Slow(from, bytesPerSecond int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.slowFrom, d.slowRate = from, bytesPerSecond
}

func (d *Disk) writeTakes(offset, bytes int64) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.slowRate == 0 || offset < d.slowFrom {
		return 0
	}
	return time.Duration(bytes) * time.Second / time.Duration(d.slowRate)
}

// Heal has the disk answer everything again, what it was asked meanwhile included.
func (d *Disk) Heal() {
	d.mu.Lock()
	d.failing, d.refused = nil, nil
	d.slowRate = 0
	if d.hanging != nil {
		close(d.hanging)
		d.hanging = nil
	}
	d.mu.Unlock()
	d.serving.Lock()
	defer d.serving.Unlock()
	d.mu.Lock()
	late := d.unwritten
	d.unwritten = nil
	d.mu.Unlock()
	if late == nil {
		return
	}
	for _, request := range late.requests {
		if err := d.reply(request); err != nil {
			d.report(err)
		}
	}
}

// AwaitHanging waits until the disk, which is to hang, is asked for something.
func (d *Disk) AwaitHanging() { <-d.asked }

// hang waits as long as the disk hangs.
func (d *Disk) hang() {
	d.mu.Lock()
	hanging := d.hanging
	d.mu.Unlock()
	if hanging == nil {
		return
	}
	select {
	case d.asked <- struct{}{}:
		<-hanging
	case <-hanging:
	}
}

// fails is the error that an operation fails with; 0 for none.
func (d *Disk) fails(o Operation) unix.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Contains(d.failing, o) {
		return 0
	}
	return d.failure
}

// write is refused as a whole.
func (d *Disk) write(data []byte, offset int64) unix.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refused != nil && bytes.Contains(data, d.refused) {
		return unix.EIO
	}
	for len(data) > 0 {
		n := min(len(data), unit-int(offset%unit))
		p := piece{offset, append([]byte(nil), data[:n]...)}
		d.now.write(p)
		d.pending = append(d.pending, p)
		data, offset = data[n:], offset+int64(n)
	}
	return 0
}

func (d *Disk) flush() {
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

func (d *Disk) read(b []byte, offset int64) {
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
	fuseStatfs      = 17
	fuseRelease     = 18
	fuseFsync       = 20
	fuseFlush       = 25
	fuseInit        = 26
	fuseInterrupt   = 36
	fuseBatchForget = 42
	fuseLseek       = 46

	fuseInHeader  = 40
	fuseOutHeader = 16
	fuseWriteIn   = 40
	fuseMaxWrite  = 128 << 10

	rootNode, diskNode = 1, 2

	name = "disk"
)

// serve answers until the filesystem is unmounted.
func (d *Disk) serve() {
	request := make([]byte, fuseMaxWrite+4096)
	for {
		n, err := unix.Read(int(d.server.Fd()), request)
		switch {
		case errors.Is(err, unix.ENODEV):
			return
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue // ENOENT: the request was taken back
		case err != nil:
			d.report(fmt.Errorf("read from /dev/fuse: %w", err))
			return
		}
		d.hang()
		if err := d.handle(request[:n]); err != nil {
			d.report(err)
			return
		}
	}
}

func (d *Disk) handle(request []byte) error {
	d.serving.Lock()
	defer d.serving.Unlock()
	if d.keeps(request) {
		return nil
	}
	return d.reply(request)
}

func (d *Disk) reply(request []byte) error {
	body, errno, answered := d.answer(binary.NativeEndian.Uint32(request[4:]), binary.NativeEndian.Uint64(request[16:]), request[fuseInHeader:])
	if !answered {
		return nil
	}
	reply := make([]byte, fuseOutHeader, fuseOutHeader+len(body))
	reply = append(reply, body...)
	binary.NativeEndian.PutUint32(reply, uint32(len(reply)))
	binary.NativeEndian.PutUint32(reply[4:], uint32(-int32(errno)))
	copy(reply[8:16], request[8:16])
	if _, err := unix.Write(int(d.server.Fd()), reply); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("answer request %d of FUSE: %w", binary.NativeEndian.Uint32(request[4:]), err)
	}
	return nil
}

func (d *Disk) answer(operation uint32, node uint64, in []byte) (body []byte, errno unix.Errno, answered bool) {
	if errno := d.fails(Operation(operation)); errno != 0 {
		return nil, errno, true
	}
	switch operation {
	case fuseForget, fuseBatchForget, fuseInterrupt:
		return nil, 0, false
	case fuseInit:
		const asyncDirectIO, background = 1 << 15, 1<<16 - 1 // with as many requests at a time as can be
		return words(7, 31, fuseMaxWrite, asyncDirectIO, background<<16|background, fuseMaxWrite, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0), 0, true
	case fuseLookup:
		if node != rootNode || string(in) != name+"\x00" {
			return nil, unix.ENOENT, true
		}
		return append(words(diskNode, 0, 0, 0, 3600, 0, 0, 0, 0, 0), d.attributes(diskNode)...), 0, true
	case fuseGetattr:
		// For no time: a disk that hangs reports nothing of its file either, as a dead NFS.
		return append(words(0, 0, 0, 0), d.attributes(node)...), 0, true
	case fuseOpen:
		const directIO = 1 // nothing is kept in the page cache, and so nothing twice
		return words(0, 0, directIO, 0), 0, true
	case fuseRead:
		b := make([]byte, min(int64(binary.NativeEndian.Uint32(in[16:])), d.Bytes-int64(binary.NativeEndian.Uint64(in[8:]))))
		d.read(b, int64(binary.NativeEndian.Uint64(in[8:])))
		return b, 0, true
	case fuseWrite:
		size, offset := binary.NativeEndian.Uint32(in[16:]), int64(binary.NativeEndian.Uint64(in[8:]))
		time.Sleep(d.writeTakes(offset, int64(size)))
		if errno := d.write(in[fuseWriteIn:fuseWriteIn+size], offset); errno != 0 {
			return nil, errno, true
		}
		return words(size, 0), 0, true
	case fuseFsync:
		d.flush()
		return nil, 0, true
	case fuseFlush, fuseRelease:
		return nil, 0, true
	case fuseStatfs:
		return make([]byte, 80), 0, true // nothing asks how much is free
	case fuseLseek:
		return nil, d.seeks(), true
	}
	return nil, unix.ENOSYS, true
}

// attributes is struct fuse_attr.
func (d *Disk) attributes(node uint64) []byte {
	var a [11]uint64
	mode, size := uint32(unix.S_IFDIR|0o755), uint64(0)
	if node == diskNode {
		mode, size = unix.S_IFREG|0o600, uint64(d.Bytes)
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
