package blocks

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

func survivesRestarts(b *bench) {
	const size = 16 * mib
	b.create("disk", size)
	path := b.publish("disk", "pod")
	was := number(b, path)
	held := open(b, path, os.O_RDWR)
	held.write(0, size, 1)
	for generation, end := range []func(){b.Restart, b.Crash, b.Restart, b.Crash} {
		end()
		held.want(0, size, uint64(generation+1))
		// Kubelet asks again after each restart of its own.
		b.publish("disk", "pod")
		if is := number(b, path); is != was {
			b.Fatalf("the device was %d:%d and is now %d:%d", unix.Major(was), unix.Minor(was), unix.Major(is), unix.Minor(is))
		}
		held.write(0, size, uint64(generation+2))
	}
	held.want(0, size, 5)
	held.close()
	b.wantInOrder("disk", "pod", size)
	b.wantDevices(1)
	b.unpublish("disk", "pod")
	b.wantDevices(0)

	open(b, b.image("disk"), os.O_RDONLY).want(0, size, 5)
	again := open(b, b.publish("disk", "another"), os.O_RDONLY)
	again.want(0, size, 5)
	again.close()
	b.unpublish("disk", "another")
}

func refusesWrites(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	writable := open(b, b.publish("disk", "writer"), os.O_RDWR)
	writable.write(0, size, 1)
	b.Must(b.tryPublishReadOnly("disk", "reader"))
	b.wantDevices(2)
	b.wantReadOnly(b.Target("reader"))
	reader := open(b, b.Target("reader"), os.O_RDONLY)
	reader.want(0, size, 1)
	reader.close()
	writable.close()

	b.WantCode("a target that can be written, anew as one that cannot", b.tryPublishReadOnly("disk", "writer"), codes.AlreadyExists)
	b.WantCode("a target that cannot be written, anew as one that can", b.tryPublish("disk", "reader"), codes.AlreadyExists)
	b.Crash()
	b.Must(b.tryPublishReadOnly("disk", "reader"))
	b.wantReadOnly(b.Target("reader"))
	b.wantDevices(2)
	b.unpublish("disk", "writer")
	b.wantReadOnly(b.Target("reader"))
	b.unpublish("disk", "reader")
	b.wantDevices(0)
}

// wantReadOnly expects the kernel to refuse a writer, which before Linux 6.5 it does
// at the write.
func (b *bench) wantReadOnly(path string) {
	b.Helper()
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		defer file.Close()
		_, err = file.Write(make([]byte, blockBytes))
	}
	drivertest.WantErrno(b, "writing to what is published read-only", err, syscall.EROFS, syscall.EACCES, syscall.EPERM)
}

func sharesDevice(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	first, second := b.publish("disk", "first"), b.publish("disk", "second")
	b.publish("disk", "second")
	if number(b, first) != number(b, second) {
		b.Error("two targets have two devices")
	}
	b.wantDevices(1)
	one, other := open(b, first, os.O_RDWR), open(b, second, os.O_RDWR)
	one.write(0, size, 1)
	other.want(0, size, 1)
	one.close()
	b.unpublish("disk", "first")
	b.wantDevices(1)
	other.write(0, size, 2)
	other.want(0, size, 2)
	other.close()
	b.unpublish("disk", "second")
	b.wantDevices(0)
	b.unpublish("disk", "second")
}

func endsAtItsSize(b *bench) {
	const size = 8 * mib
	b.create("disk", size)
	d := open(b, b.publish("disk", "pod"), os.O_RDWR)
	if got := d.size(); got != size {
		b.Errorf("the device has %d bytes, want %d", got, int64(size))
	}
	d.write(0, size, 1)
	drivertest.WantErrno(b, "writing past the end", d.tryWrite(size, blockBytes, 1), syscall.ENOSPC)
	if n, err := d.file.ReadAt(d.buffer[:blockBytes], size); n != 0 {
		b.Errorf("%d bytes were read past the end, %v", n, err)
	}
	d.want(0, size, 1)
	d.close()
	b.unpublish("disk", "pod")
}

func growsWhileWritten(b *bench) {
	const size, last = 8 * mib, 64 * mib
	b.create("disk", size)
	path := b.publish("disk", "pod")
	d := open(b, path, os.O_RDWR)
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
		b.Must(b.expand("disk", "pod", bytes))
		grown := open(b, path, os.O_RDWR)
		if got := grown.size(); got != bytes {
			b.Errorf("the device has %d bytes, want %d", got, bytes)
		}
		grown.close()
	}
	b.Must(b.expand("disk", "pod", last))
	close(stop)
	b.Must(<-done)
	d.want(0, size, uint64(rounds+1))
	d.write(size, last-size, 1)
	d.want(0, size, uint64(rounds+1))
	d.want(size, last-size, 1)
	if got := b.allocated("disk"); got < last {
		b.Errorf("%d bytes of %d are allocated", got, int64(last))
	}
	b.wantInOrder("disk", "pod", last)
	b.Crash()
	b.publish("disk", "pod")
	d.want(size, last-size, 1)
	d.close()
	b.wantInOrder("disk", "pod", last)
	b.unpublish("disk", "pod")
}
