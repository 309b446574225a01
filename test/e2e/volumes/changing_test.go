package volumes

import (
	"fmt"
	"os"
	"path/filepath"
)

// snapshotsWhileFileChanges makes snapshots of a volume that is full of one file, as the disk of a virtual machine is, which is written
// all the time. For each the file is copied several times, and there is room for one copy.
func snapshotsWhileFileChanges(h *harness) {
	promise := short(64 * mib)
	h.create("busy", promise)
	path := filepath.Join(h.publish("busy", "pod"), "data")
	for n := range 4 {
		w := h.writer(path, nobody)
		size, err := w.write(promise - 4*mib)
		h.Must(err)
		w.close(size)
		stop := h.writeAllTheTime(path)
		made, err := h.Snapshot(h.Context(), fmt.Sprint("s-busy-", n), "busy", "")
		h.Must(stop())
		h.Must(err)
		h.Must(h.DeleteSnapshot(h.Context(), made.GetSnapshotId()))
		h.Must(os.Remove(path))
		h.settle()
	}
	h.MustUnpublish("busy", "pod")
}

// writeAllTheTime writes to blocks of a file until stop is called.
func (h *harness) writeAllTheTime(path string) (stop func() error) {
	h.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	h.Must(err)
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for at := int64(0); ; at = (at + 1) % mib {
			select {
			case <-end:
				ended <- f.Close()
				return
			default:
			}
			if _, err := f.WriteAt([]byte{1}, at); err != nil {
				ended <- err
				return
			}
		}
	}()
	return func() error { close(end); return <-ended }
}
