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
