package volumes

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// overwritesSharedBlocks fills a volume, makes a snapshot, and overwrites what the volume has: each shared
// block needs a new one before the old one is released. With a limit at the promise that is
// refused, with that of the driver it is not: neither through the page cache nor past it.
func overwritesSharedBlocks(b *bench) {
	const promise = 16 * mib
	b.create("full", promise)
	path := filepath.Join(b.publish("full", "pod"), "data")
	w := b.writer(path, nobody)
	size := b.fill(w, promise)
	w.close(size)
	b.snapshot("s-1", "full")

	d := b.open("full")
	b.Must(b.facility.Limit(d, b.ids["full"], quota.Limit{Bytes: promise, Inodes: inodesOf(promise)}))
	b.Must(d.Close())
	drivertest.WantErrno(b, "overwriting shared blocks without more of a limit", b.overwrite(path, size, 0), b.fs.full)
	b.Restart() // which puts the limit back
	b.Must(b.overwrite(path, size, 0))

	b.snapshot("s-2", "full")
	b.Must(b.overwrite(path, size, unix.O_DIRECT))
	b.unpublish("full", "pod")
	for _, name := range []string{"s-1", "s-2"} {
		b.Must(b.DeleteSnapshot(b.Context(), name+"@"+drivertest.NodeName))
	}
}

func (b *bench) snapshot(name, of string) {
	b.Helper()
	b.settle()
	_, err := b.Snapshot(b.Context(), name, of, "")
	b.Must(err)
}

// overwrite writes each whole chunk of a file anew, and has it on the disk.
func (b *bench) overwrite(path string, size int64, flags int) error {
	b.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|flags, 0)
	b.Must(err)
	defer f.Close()
	chunk, err := unix.Mmap(-1, 0, chunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned, as direct IO wants it
	b.Must(err)
	defer func() { b.Must(unix.Munmap(chunk)) }()
	for at := int64(0); at+chunkSize <= size; at += chunkSize {
		copy(chunk, content(at+1, chunkSize))
		if _, err := f.WriteAt(chunk, at); err != nil {
			return err
		}
	}
	return f.Sync()
}

// writesAtRandomWhileSharing writes each block of a disk that shares all of them with a snapshot, past the page cache,
// far apart and several at once: XFS takes 128 KiB for each, and keeps what is over for later writes.
func writesAtRandomWhileSharing(b *bench) {
	const (
		promise = 64 * mib
		block   = 4 << 10
		apart   = 128 << 10
		writers = 8
	)
	disk := drivertest.Volume{ID: "disk", Pool: "local", Block: true, Bytes: promise}
	_, err := b.Create(b.Context(), disk)
	b.Must(err)
	b.ids["disk"] = b.idOf("disk")
	path := filepath.Join(b.pool, "disk", "disk.img")
	b.Must(b.overwrite(path, promise, 0))
	b.snapshot("s-disk", "disk")
	ended := make(chan error, writers)
	for n := range writers {
		go func() { ended <- writeApart(path, int64(n*block), promise, apart, writers*block) }()
	}
	for range writers {
		b.Must(<-ended)
	}
	b.Must(b.DeleteSnapshot(b.Context(), "s-disk@"+drivertest.NodeName))
}

// writeApart writes a block at each step of a file, then the next one at each, until all were written of which
// the first is one.
func writeApart(path string, first, bytes, apart, next int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	block, err := unix.Mmap(-1, 0, 4<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(block) }()
	for ; first < apart; first += next {
		for at := first; at < bytes; at += apart {
			if _, err := f.WriteAt(block, at); err != nil {
				return err
			}
		}
	}
	return f.Sync()
}
