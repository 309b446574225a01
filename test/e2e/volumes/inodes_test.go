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
func inodesAreBounded(b *bench) {
	promise := short(64 * mib)
	b.create("empty-files", promise)
	path := b.publish("empty-files", "pod")
	var s unix.Statfs_t
	b.Must(unix.Statfs(path, &s))
	if int64(s.Files) != inodesOf(promise) {
		b.Errorf("df shows %d inodes, want %d", s.Files, inodesOf(promise))
	}
	taken := b.beside("empty-files")
	made := int64(1) // the root
	for ; made <= 2*inodesOf(promise); made++ {
		f, err := os.Create(filepath.Join(path, strconv.FormatInt(made, 10)))
		if err != nil {
			drivertest.WantErrno(b, "creating a file too many", err, b.fs.full)
			break
		}
		b.Must(f.Close())
	}
	if made != inodesOf(promise) {
		b.Errorf("%d inodes were made, want %d", made, inodesOf(promise))
	}
	b.Must(unix.Syncfs(b.root.Fd()))
	taken = b.beside("empty-files") - taken
	b.Logf("%d inodes took %d bytes beside the quota", made, taken)
	if share := made * 544; taken > share || taken < made*256 {
		b.Errorf("%d inodes took %d bytes beside the quota, want up to %d", made, taken, share)
	}
	b.unpublish("empty-files", "pod")
}

// beside is what is taken on the filesystem and not counted for a volume, in bytes.
func (b *bench) beside(name string) int64 {
	b.Helper()
	space, err := dir.SpaceOf(b.root)
	b.Must(err)
	d := b.open(name)
	usage, err := b.facility.Usage(d, b.ids[name])
	b.Must(err)
	b.Must(d.Close())
	return space.TakenBytes() - usage.Bytes
}
