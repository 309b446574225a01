package blocks

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// fillUp has others use all that is free outside the pool, and returns what gives it
// back.
func (h *harness) fillUp() (giveBack func()) {
	h.Helper()
	giveBack = func() { _ = os.Remove(filepath.Join(h.mounted, "large")) } // once more at the end
	h.Cleanup(giveBack)
	fulldisk.Large(h, h.mounted, 0)
	var fs unix.Statfs_t
	h.Must(unix.Statfs(h.mounted, &fs))
	h.Logf("%d KiB left for anybody", int64(fs.Bavail)*fs.Bsize>>10)
	return giveBack
}

func keepsItsSpace(h *harness) {
	const size = 64 * mib
	h.create("disk", size)
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	if got := h.allocated("disk"); got < size {
		h.Errorf("%d bytes of %d are allocated", got, int64(size))
	}
	// A part has been written, and nothing of it can be given back.
	d.write(0, size/4, 1)
	area := [2]uint64{0, size}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&area))); errno == 0 {
		h.Error("a thick disk can be discarded")
	}
	if err := unix.Fallocate(int(d.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size); err == nil {
		h.Error("holes can be made in a thick disk")
	}
	if got := h.allocated("disk"); got < size {
		h.Errorf("%d bytes of %d are allocated after discards", got, int64(size))
	}

	giveBack := h.fillUp()
	for _, index := range rand.New(rand.NewPCG(1, 1)).Perm(size / mib) {
		d.write(int64(index)*mib, mib, 2)
	}
	d.want(0, size, 2)
	h.wantInOrder("disk", "pod", size)
	d.close()
	h.Crash()
	again := open(h, h.publish("disk", "pod"), os.O_RDWR)
	again.write(0, size, 3)
	again.want(0, size, 3)
	again.close()
	h.MustUnpublish("disk", "pod")
	giveBack()
}

func takesWhatIsWritten(h *harness) {
	const size = 256 * mib
	const slack = 2 * mib // in what units the filesystem allocates
	h.create("disk", size)
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	if got := h.allocated("disk"); got > slack {
		h.Errorf("%d bytes are allocated for a new thin disk", got)
	}
	d.write(size-16*mib, 16*mib, 1)
	if got := h.allocated("disk"); got < 16*mib || got > 16*mib+slack {
		h.Errorf("%d bytes are allocated for 16 MiB", got)
	}
	h.Must(h.expand("disk", "pod", 2*size))
	if got := h.allocated("disk"); got > 16*mib+slack {
		h.Errorf("%d bytes are allocated for 16 MiB, after the disk has grown", got)
	}
	d.want(size-16*mib, 16*mib, 1)
	area := [2]uint64{size - 16*mib, 8 * mib}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&area)))
	switch got := h.allocated("disk"); {
	case h.onBtrfs(): // which would keep the whole extent
		if errno != unix.EOPNOTSUPP {
			h.Errorf("a discard on btrfs is answered with %v", errno)
		}
	case errno != 0:
		h.Errorf("a thin disk cannot be discarded: %v", errno)
	case got > 8*mib+slack:
		h.Errorf("%d bytes are allocated for the 8 MiB that were not discarded", got)
	}
	d.want(size-8*mib, 8*mib, 1)
	h.wantInOrder("disk", "pod", 2*size)
	d.close()
	h.MustUnpublish("disk", "pod")
}

// takesWritesAfterDiscards discards all but a little of each part after it was written, another one each time. The space that a filesystem keeps of
// these parts leaves room for the next writes within the volume's limit.
func takesWritesAfterDiscards(h *harness) {
	const size, part, left = 64 * mib, 8 * mib, 4096
	h.create("disk", size)
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	for n := range int64(4) {
		for at := n * left; at < size; at += part {
			d.write(at, part-n*left, uint64(n))
		}
		h.Must(d.file.Sync())
		for at := (n + 1) * left; at < size; at += part {
			area := [2]uint64{uint64(at), uint64(part - (n+1)*left)}
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&area)))
			if errno != 0 && errno != unix.EOPNOTSUPP {
				h.Errorf("a discard: %v", errno)
			}
		}
	}
	area := [2]uint64{0, size}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), unix.BLKZEROOUT, uintptr(unsafe.Pointer(&area))); errno != 0 {
		h.Errorf("zeroing a disk: %v", errno)
	}
	h.wantInOrder("disk", "pod", size)
	d.close()
	h.MustUnpublish("disk", "pod")
}

func (h *harness) onBtrfs() bool {
	h.Helper()
	var fs unix.Statfs_t
	h.Must(unix.Statfs(h.mounted, &fs))
	return fs.Type == unix.BTRFS_SUPER_MAGIC
}

// takesWritesInAnyOrder splits what was allocated at once into as many pieces as can
// be. The filesystem keeps track of them within the volume's limit.
func takesWritesInAnyOrder(h *harness) {
	size := int64(64 * mib)
	if testing.Short() && testenv.Guest() {
		size = 16 * mib
	}
	h.create("disk", size)
	d := open(h, h.publish("disk", "pod"), os.O_RDWR)
	for i, index := range rand.New(rand.NewPCG(2, 2)).Perm(int(size / blockBytes)) {
		at := int64(index) * blockBytes
		fill(d.buffer[:blockBytes], at, 1)
		if _, err := d.file.WriteAt(d.buffer[:blockBytes], at); err != nil {
			h.Fatalf("the write number %d, at %d: %v", i, at, err)
		}
		if i%(1<<10) == 0 {
			h.Must(d.file.Sync())
		}
	}
	h.Must(d.file.Sync())
	h.wantInOrder("disk", "pod", size)
	d.want(0, size, 1)
	d.write(0, size, 2)
	h.wantInOrder("disk", "pod", size)
	d.close()
	h.MustUnpublish("disk", "pod")
	open(h, h.image("disk"), os.O_RDONLY).want(0, size, 2)
}
