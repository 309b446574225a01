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
func overwritesSharedBlocks(h *harness) {
	const promise = 16 * mib
	h.create("full", promise)
	path := filepath.Join(h.publish("full", "pod"), "data")
	w := h.writer(path, nobody)
	size := h.fill(w, promise)
	w.close(size)
	h.snapshot("s-1", "full")

	d := h.open("full")
	h.Must(h.facility.Limit(d, h.ids["full"], quota.Limit{Bytes: promise, Inodes: inodesOf(promise)}))
	h.Must(d.Close())
	drivertest.WantErrno(h, "overwriting shared blocks without more of a limit", h.overwrite(path, size, 0), h.fs.full)
	h.Restart() // which puts the limit back
	h.Must(h.overwrite(path, size, 0))

	h.snapshot("s-2", "full")
	h.Must(h.overwrite(path, size, unix.O_DIRECT))
	h.MustUnpublish("full", "pod")
	for _, name := range []string{"s-1", "s-2"} {
		h.Must(h.DeleteSnapshot(h.Context(), name+"@"+drivertest.NodeName))
	}
}

func (h *harness) snapshot(name, of string) {
	h.Helper()
	h.settle()
	_, err := h.Snapshot(h.Context(), name, of, "")
	h.Must(err)
}

// overwrite writes each whole chunk of a file anew, and has it on the disk.
func (h *harness) overwrite(path string, size int64, flags int) error {
	h.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|flags, 0)
	h.Must(err)
	defer f.Close()
	chunk, err := unix.Mmap(-1, 0, chunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned, as direct IO wants it
	h.Must(err)
	defer func() { h.Must(unix.Munmap(chunk)) }()
	for at := int64(0); at+chunkSize <= size; at += chunkSize {
		copy(chunk, content(at+1, chunkSize))
		if _, err := f.WriteAt(chunk, at); err != nil {
			return err
		}
	}
	return f.Sync()
}

// writesAtRandomWhileSharing writes each block of a disk that shares all of them with a snapshot.
func writesAtRandomWhileSharing(h *harness) {
	promise := short(64 * mib)
	disk := drivertest.Volume{ID: "disk", Pool: "local", Block: true, Bytes: promise}
	_, err := h.Create(h.Context(), disk)
	h.Must(err)
	h.ids["disk"] = h.idOf("disk")
	path := filepath.Join(h.pool, "disk", "disk.img")
	h.Must(h.overwrite(path, promise, 0))
	h.snapshot("s-disk", "disk")
	h.writeAtRandom(path, promise)
	h.Must(h.DeleteSnapshot(h.Context(), "s-disk@"+drivertest.NodeName))
}

// writesAtRandomInSharingDirectory writes each block of a file that fills its volume and shares all blocks with a snapshot: in
// the volume, and in a clone of it. Each block is an extent of its own then.
func writesAtRandomInSharingDirectory(h *harness) {
	promise := int64(256 * mib)
	if testing.Short() {
		promise = 8 * mib
	}
	h.create("shared", promise)
	path := filepath.Join(h.publish("shared", "pod"), "data")
	w := h.writer(path, nobody)
	size := h.fill(w, promise)
	w.close(size)
	h.snapshot("s-shared", "shared")
	h.MustUnpublish("shared", "pod")
	_, err := h.Restore(h.Context(), volume("restored", promise), "s-shared@"+drivertest.NodeName)
	h.Must(err)
	h.ids["restored"] = h.idOf("restored")
	for _, name := range []string{"shared", "restored"} {
		h.writeAtRandom(filepath.Join(h.pool, name, "data"), size/apart*apart)
	}
	h.Must(h.DeleteSnapshot(h.Context(), "s-shared@"+drivertest.NodeName))
}

// apart is how much XFS allocates for a block that is shared, unless it is told otherwise.
const apart = 128 << 10

// writeAtRandom writes each block of a file past the page cache, far apart and several at once.
func (h *harness) writeAtRandom(path string, bytes int64) {
	h.Helper()
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
	h.Must(failed)
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
