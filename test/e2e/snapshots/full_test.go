package snapshots

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// TestPoolFullOfSnapshotsIsOverwritten promises all of a pool to snapshots of different content, restores and other volumes,
// and then overwrites every block that was promised: each shared one needs a new one. None is
// missing.
func TestPoolFullOfSnapshotsIsOverwritten(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	const bytes = 32 * mib
	for _, fs := range filesystems {
		if fs.copies {
			continue // nothing is shared
		}
		for mode, volumeOf := range map[string]func(string, int64) drivertest.Volume{"directories": directory, "disks": disk} {
			if testing.Short() && mode == "directories" {
				continue
			}
			if mode == "directories" && fs.enforcement == "required" {
				continue // on btrfs a directory near its limit cannot overwrite what it has, also without snapshots
			}
			t.Run(fs.name+", "+mode, func(t *testing.T) {
				h := newHarness(t, driver, fs.mount(t), fs.enforcement)
				reserve := h.MustCapacity("local") - 8*bytes // the rest of a large filesystem
				h.MustCreate(volumeOf("pvc-rest", reserve))
				h.MustCreate(volumeOf("pvc-source", bytes))
				volumes, snapshots := []string{"pvc-source"}, []string{}
				for n := 1; ; n++ {
					h.Must(h.overwrite(volumes[len(volumes)-1], bytes, n)) // what the next snapshot shares with no other
					made, err := h.Snapshot(h.Context(), fmt.Sprint("s-", n), volumes[len(volumes)-1], "")
					if status.Code(err) == codes.FailedPrecondition {
						break
					}
					h.Must(err)
					snapshots = append(snapshots, made.GetSnapshotId())
					restored := fmt.Sprint("pvc-", n)
					_, err = h.Restore(h.Context(), volumeOf(restored, bytes), made.GetSnapshotId())
					if status.Code(err) == codes.ResourceExhausted {
						break
					}
					h.Must(err)
					volumes = append(volumes, restored)
				}
				if len(snapshots) < 2 || h.MustCapacity("local") > 2*bytes {
					t.Fatalf("%d snapshots, and %d bytes are left", len(snapshots), h.MustCapacity("local"))
				}
				if left := h.MustCapacity("local"); left > 0 {
					h.MustCreate(volumeOf("pvc-last", left))
					volumes = append(volumes, "pvc-last")
				}
				for n, id := range volumes {
					if err := h.overwrite(id, 0, 100+n); err != nil {
						t.Errorf("a block that was promised to %s is missing: %v", id, err)
					}
				}
				for _, id := range snapshots {
					h.Must(h.DeleteSnapshot(h.Context(), id))
				}
				h.delete(append(volumes, "pvc-rest")...)
			})
		}
	}
}

// overwrite writes all blocks of a volume anew, on disk: up to that size, or if it is 0 what is there
// of its file.
func (h *harness) overwrite(id string, bytes int64, seed int) (err error) {
	h.Helper()
	name := filepath.Join(h.path(id), "disk.img")
	if _, err := os.Stat(name); err != nil {
		name = filepath.Join(h.path(id), "file")
		bytes = bytes * 7 / 8 // the directory has blocks of its own
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	h.Must(err)
	defer func() { err = errors.Join(err, f.Close()) }()
	if bytes == 0 {
		is, err := f.Stat()
		h.Must(err)
		bytes = is.Size()
	}
	content := pattern(mib, fmt.Sprint(seed))
	for at := int64(0); at < bytes; at += mib {
		if _, err := f.WriteAt(content[:min(mib, bytes-at)], at); err != nil {
			return err
		}
	}
	return f.Sync()
}
