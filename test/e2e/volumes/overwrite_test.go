package volumes

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

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

// writesAtRandomWhileSharing writes each block of a disk that shares all of them with a snapshot.
func writesAtRandomWhileSharing(b *bench) {
	promise := short(64 * mib)
	disk := drivertest.Volume{ID: "disk", Pool: "local", Block: true, Bytes: promise}
	_, err := b.Create(b.Context(), disk)
	b.Must(err)
	b.ids["disk"] = b.idOf("disk")
	path := filepath.Join(b.pool, "disk", "disk.img")
	b.Must(b.overwrite(path, promise, 0))
	b.snapshot("s-disk", "disk")
	b.writeAtRandom(path, promise)
	b.Must(b.DeleteSnapshot(b.Context(), "s-disk@"+drivertest.NodeName))
}

// writesAtRandomInSharingDirectory writes each block of a file that fills its volume and shares all blocks with a snapshot: in
// the volume, and in a clone of it. Each block is an extent of its own then.
func writesAtRandomInSharingDirectory(b *bench) {
	promise := int64(256 * mib)
	if testing.Short() {
		promise = 8 * mib
	}
	b.create("shared", promise)
	path := filepath.Join(b.publish("shared", "pod"), "data")
	w := b.writer(path, nobody)
	size := b.fill(w, promise)
	w.close(size)
	b.snapshot("s-shared", "shared")
	b.unpublish("shared", "pod")
	_, err := b.Restore(b.Context(), volume("restored", promise), "s-shared@"+drivertest.NodeName)
	b.Must(err)
	b.ids["restored"] = b.idOf("restored")
	for _, name := range []string{"shared", "restored"} {
		b.writeAtRandom(filepath.Join(b.pool, name, "data"), size/apart*apart)
	}
	b.Must(b.DeleteSnapshot(b.Context(), "s-shared@"+drivertest.NodeName))
}

// apart is how much XFS allocates for a block that is shared, unless it is told otherwise.
const apart = 128 << 10

// writeAtRandom writes each block of a file past the page cache, far apart and several at once.
func (b *bench) writeAtRandom(path string, bytes int64) {
	b.Helper()
	const (
		block   = 4 << 10
		writers = 8
	)
	ended := make(chan error, writers)
	for n := range writers {
		go func() { ended <- writeApart(path, int64(n*block), bytes, writers*block) }()
	}
	var failed error
	for range writers {
		failed = errors.Join(failed, <-ended)
	}
	b.Must(failed)
}

// writeApart writes a block at each step of a file, then the next one at each, until all were written of which
// the first is one.
func writeApart(path string, first, bytes, next int64) error {
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
