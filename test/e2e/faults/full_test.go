package faults

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// A disk that others have filled takes no new volume, and hinders none that is there.
func TestFullPool(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range filesystems() {
		t.Run(fs.kind, func(t *testing.T) {
			w := newWorld(t, driver, newMount(t, fs))
			giveBack := w.fillUp(0)
			full := answers{
				"create":           codes.ResourceExhausted,
				"create disk":      codes.ResourceExhausted,
				"expand":           codes.FailedPrecondition,
				"expand disk":      codes.FailedPrecondition,
				"delete published": codes.FailedPrecondition,
			}
			if got := w.capacity(); got != 0 {
				t.Errorf("the capacity is %d bytes", got)
			}
			// A disk has its space; of a directory none is left.
			w.wantListed("full", func(v drivertest.Volume) bool { return !v.Block })
			w.wantAnswers("full", full)
			w.wantAlive("full")
			w.wantKept("full")

			// The start does what it has to do without any space.
			refill := w.fillUp(0)
			w.Crash()
			w.wantKept("full, started again")
			w.Must(w.create(idle)) // is there
			w.Must(w.publish(idle))
			w.Must(w.unpublish(idle))
			refill()
			giveBack()
			w.end()
		})
	}
}

// However little is left, a volume is made in full or not at all, and so it grows.
func TestNearlyFullPool(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range someFilesystems(1) {
		t.Run(fs.kind, func(t *testing.T) {
			w := newWorld(t, driver, newMount(t, fs))
			made, refused := 0, 0
			count := func(err error) {
				if err == nil {
					made++
				} else {
					refused++
				}
			}
			for _, left := range leftOver() {
				giveBack := w.fillUp(left)
				for _, block := range []bool{false, true} {
					v := volume("pvc-late", block)
					v.Bytes = 64 * kib
					err := w.create(v)
					count(err)
					w.wantFits(fmt.Sprintf("create of block %v with %d KiB left", block, left/kib), err, codes.ResourceExhausted)
					if err == nil {
						w.Must(w.publish(v))
						v.Bytes += 64 * kib
						_, err := w.Expand(w.Context(), v, v.ID)
						count(err)
						w.wantFits(fmt.Sprintf("expand of block %v with %d KiB left", block, left/kib), err, codes.FailedPrecondition)
						if err == nil {
							w.find(v.ID).Bytes = v.Bytes
						}
						w.wantKept(fmt.Sprintf("with %d KiB left, made", left/kib))
						w.Must(w.unpublish(v))
						w.Must(w.delete(v))
					}
					w.wantKept(fmt.Sprintf("with %d KiB left", left/kib))
				}
				giveBack()
			}
			t.Logf("%d calls were answered well, %d were refused", made, refused)
			if made == 0 || refused == 0 {
				t.Error("what was left was never at the edge")
			}
			w.end()
		})
	}
}

// leftOver are amounts of free space, in bytes, around what small volumes need.
func leftOver() (all []int64) {
	step := int64(16)
	if testing.Short() {
		step = 64
	}
	for left := int64(0); left <= 512; left += step {
		all = append(all, left*kib)
	}
	return append(all, 2*mib, 16*mib)
}

func (w *world) wantFits(what string, err error, refused ...codes.Code) {
	w.Helper()
	if err == nil {
		return
	}
	for _, code := range refused {
		if status.Code(err) == code {
			return
		}
	}
	w.Errorf("%s: %v, want success or one of %v", what, err, refused)
}

// fillUp has others use all that is free except the driver's volumes, but for so many
// bytes, and returns what gives it back.
func (w *world) fillUp(left int64) (giveBack func()) {
	w.Helper()
	file, err := os.CreateTemp(w.mount.foreign(), "large-")
	w.Must(err)
	size := int64(0)
	for step := int64(64 * mib); step >= 4*kib; {
		err := unix.Fallocate(int(file.Fd()), 0, size, step)
		switch {
		case err == nil:
			size += step
		case errors.Is(err, unix.ENOSPC):
			step /= 2
		case !errors.Is(err, unix.EINTR):
			w.Fatal(err)
		}
	}
	w.Must(errors.Join(file.Truncate(max(0, size-left)), file.Sync(), file.Close()))
	w.Must(w.pool.Settle())
	if left == 0 {
		w.fillWithFiles()
	}
	return func() {
		w.Helper()
		w.Must(os.Remove(file.Name()))
		w.removeSmall()
	}
}

// fillWithFiles takes what is left for small files and what keeps track of them, which
// btrfs has apart from the rest.
func (w *world) fillWithFiles() {
	w.Helper()
	for i, full := 0, 0; full < 3; i++ {
		err := os.WriteFile(w.small(i), make([]byte, 2*kib), 0o600)
		switch {
		case err == nil:
			full = 0
		case errors.Is(err, unix.ENOSPC):
			full++ // btrfs may find more after it said so
		default:
			w.Fatal(err)
		}
	}
}

// small is a small file of others.
func (w *world) small(i int) string {
	return filepath.Join(w.mount.foreign(), fmt.Sprintf("small-%d", i))
}

func (w *world) removeSmall() {
	w.Helper()
	files, err := filepath.Glob(filepath.Join(w.mount.foreign(), "small-*"))
	w.Must(err)
	for _, file := range files {
		w.Must(os.Remove(file))
	}
	w.Must(w.pool.Settle())
}
