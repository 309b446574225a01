package blocks

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

func survivesRestarts(h *harness) {
	const size = 16 * mib
	h.create("disk", size)
	path := h.publish("disk", "pod")
	was := number(h, path)
	held := open(h, path, os.O_RDWR)
	held.write(0, size, 1)
	for generation, end := range []func(){h.Restart, h.Crash, h.Restart, h.Crash} {
		end()
		held.want(0, size, uint64(generation+1))
		// Kubelet asks again after each restart of its own.
		h.publish("disk", "pod")
		if is := number(h, path); is != was {
			h.Fatalf("the device was %d:%d and is now %d:%d", unix.Major(was), unix.Minor(was), unix.Major(is), unix.Minor(is))
		}
		held.write(0, size, uint64(generation+2))
	}
	held.want(0, size, 5)
	held.close()
	h.wantInOrder("disk", "pod", size)
	h.wantDevices(1)
	h.MustUnpublish("disk", "pod")
	h.wantDevices(0)

	open(h, h.image("disk"), os.O_RDONLY).want(0, size, 5)
	again := open(h, h.publish("disk", "another"), os.O_RDONLY)
	again.want(0, size, 5)
	again.close()
	h.MustUnpublish("disk", "another")
}

func refusesWrites(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	writable := open(h, h.publish("disk", "writer"), os.O_RDWR)
	writable.write(0, size, 1)
	h.Must(h.tryPublishReadOnly("disk", "reader"))
	h.wantDevices(2)
	h.wantReadOnly(h.Target("reader"))
	reader := open(h, h.Target("reader"), os.O_RDONLY)
	reader.want(0, size, 1)
	reader.close()
	writable.close()

	h.WantCode("a target that can be written, anew as one that cannot", h.tryPublishReadOnly("disk", "writer"), codes.AlreadyExists)
	h.WantCode("a target that cannot be written, anew as one that can", h.tryPublish("disk", "reader"), codes.AlreadyExists)
	h.Crash()
	h.Must(h.tryPublishReadOnly("disk", "reader"))
	h.wantReadOnly(h.Target("reader"))
	h.wantDevices(2)
	h.MustUnpublish("disk", "writer")
	h.wantReadOnly(h.Target("reader"))
	h.MustUnpublish("disk", "reader")
	h.wantDevices(0)
}

// wantReadOnly expects the kernel to refuse a writer, which before Linux 6.5 it does
// at the write.
func (h *harness) wantReadOnly(path string) {
	h.Helper()
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		defer file.Close()
		_, err = file.Write(make([]byte, blockBytes))
	}
	drivertest.WantErrno(h, "writing to what is published read-only", err, syscall.EROFS, syscall.EACCES, syscall.EPERM)
}

func sharesDevice(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	first, second := h.publish("disk", "first"), h.publish("disk", "second")
	h.publish("disk", "second")
	if number(h, first) != number(h, second) {
		h.Error("two targets have two devices")
	}
	h.wantDevices(1)
	one, other := open(h, first, os.O_RDWR), open(h, second, os.O_RDWR)
	one.write(0, size, 1)
	other.want(0, size, 1)
	one.close()
	h.MustUnpublish("disk", "first")
	h.wantDevices(1)
	other.write(0, size, 2)
	other.want(0, size, 2)
	other.close()
	h.MustUnpublish("disk", "second")
	h.wantDevices(0)
	h.MustUnpublish("disk", "second")
}

func endsAtItsSize(h *harness) {
	const size = 8 * mib
	h.create("disk", size)
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	if got := d.size(); got != size {
		h.Errorf("the device has %d bytes, want %d", got, int64(size))
	}
	d.write(0, size, 1)
	drivertest.WantErrno(h, "writing past the end", d.tryWrite(size, blockBytes, 1), syscall.ENOSPC)
	if n, err := d.file.ReadAt(d.buffer[:blockBytes], size); n != 0 {
		h.Errorf("%d bytes were read past the end, %v", n, err)
	}
	d.want(0, size, 1)
	d.close()
	h.MustUnpublish("disk", "pod")
}

func growsWhileWritten(h *harness) {
	const size, last = 8 * mib, 64 * mib
	h.create("disk", size)
	path := h.publish("disk", "pod")
	d := open(h, path, os.O_RDWR)
	d.write(0, size, 1)

	// The writer goes over the whole disk, again and again, and follows its size.
	stop, done := make(chan struct{}), make(chan error)
	rounds := 0
	go func() {
		defer close(done)
		for generation := uint64(2); ; generation++ {
			if err := d.tryWrite(0, size, generation); err != nil {
				done <- err
				return
			}
			rounds++
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	for bytes := int64(size + 4096); bytes < last; bytes += 7*mib + 4096 {
		h.Must(h.expand("disk", "pod", bytes))
		grown := open(h, path, os.O_RDWR)
		if got := grown.size(); got != bytes {
			h.Errorf("the device has %d bytes, want %d", got, bytes)
		}
		grown.close()
	}
	h.Must(h.expand("disk", "pod", last))
	close(stop)
	h.Must(<-done)
	d.want(0, size, uint64(rounds+1))
	d.write(size, last-size, 1)
	d.want(0, size, uint64(rounds+1))
	d.want(size, last-size, 1)
	if got := h.allocated("disk"); got < last {
		h.Errorf("%d bytes of %d are allocated", got, int64(last))
	}
	h.wantInOrder("disk", "pod", last)
	h.Crash()
	h.publish("disk", "pod")
	d.want(size, last-size, 1)
	d.close()
	h.wantInOrder("disk", "pod", last)
	h.MustUnpublish("disk", "pod")
}
