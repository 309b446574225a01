package volumes

import (
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// inodesOf is how many inodes a volume of a size has on XFS, its root included.
func inodesOf(bytes int64) int64 { return 1 + bytes/(16<<10) }

// inodesAreBounded fills a volume with empty files. XFS counts what their inodes take in no quota.
func inodesAreBounded(h *harness) {
	promise := short(64 * mib)
	h.create("empty-files", promise)
	path := h.publish("empty-files", "pod")
	var s unix.Statfs_t
	h.Must(unix.Statfs(path, &s))
	if int64(s.Files) != inodesOf(promise) {
		h.Errorf("df shows %d inodes, want %d", s.Files, inodesOf(promise))
	}
	taken := h.beside("empty-files")
	made := int64(1) // the root
	for ; made <= 2*inodesOf(promise); made++ {
		f, err := os.Create(filepath.Join(path, strconv.FormatInt(made, 10)))
		if err != nil {
			drivertest.WantErrno(h, "creating a file too many", err, h.fs.full)
			break
		}
		h.Must(f.Close())
	}
	if made != inodesOf(promise) {
		h.Errorf("%d inodes were made, want %d", made, inodesOf(promise))
	}
	h.Must(unix.Syncfs(h.root.Fd()))
	taken = h.beside("empty-files") - taken
	h.Logf("%d inodes took %d bytes beside the quota", made, taken)
	if share := made * 544; taken > share || taken < made*256 {
		h.Errorf("%d inodes took %d bytes beside the quota, want up to %d", made, taken, share)
	}
	h.MustUnpublish("empty-files", "pod")
}

// beside is what is taken on the filesystem and not counted for a volume, in bytes.
func (h *harness) beside(name string) int64 {
	h.Helper()
	space, err := dir.SpaceOf(h.root)
	h.Must(err)
	d := h.open(name)
	usage, err := h.facility.Usage(d, h.ids[name])
	h.Must(err)
	h.Must(d.Close())
	return space.TakenBytes() - usage.Bytes
}
