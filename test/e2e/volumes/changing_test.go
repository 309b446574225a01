package volumes

import (
	"fmt"
	"os"
	"path/filepath"
)

// snapshotsWhileFileChanges makes snapshots of a volume that is full of one file, as the disk of a virtual machine is, which is written
// all the time. For each the file is copied several times, and there is room for one copy.
func snapshotsWhileFileChanges(b *bench) {
	promise := short(64 * mib)
	b.create("busy", promise)
	path := filepath.Join(b.publish("busy", "pod"), "data")
	for n := range 4 {
		w := b.writer(path, nobody)
		size, err := w.write(promise - 4*mib)
		b.Must(err)
		w.close(size)
		stop := b.writeAllTheTime(path)
		made, err := b.Snapshot(b.Context(), fmt.Sprint("s-busy-", n), "busy", "")
		b.Must(stop())
		b.Must(err)
		b.Must(b.DeleteSnapshot(b.Context(), made.GetSnapshotId()))
		b.Must(os.Remove(path))
		b.settle()
	}
	b.unpublish("busy", "pod")
}

// writeAllTheTime writes to blocks of a file until stop is called.
func (b *bench) writeAllTheTime(path string) (stop func() error) {
	b.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	b.Must(err)
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
