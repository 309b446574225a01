package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// A filesystem that can hold no more files takes no volume, however much space it has.
func TestPoolWithoutFreeInodes(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range filesystems() {
		switch {
		case fs.kind == "ext4":
			fs.mkfs = append(fs.mkfs, "-N", "512")
		case fs.kind == "xfs" && !testing.Short():
			fs.mkfs = append(fs.mkfs, "-i", "maxpct=1")
		default:
			continue // btrfs makes inodes as long as it has space
		}
		t.Run(fs.kind, func(t *testing.T) {
			w := newWorld(t, driver, newMount(t, fs))
			giveBack := w.takeInodes()
			// A volume that cannot be made is none that could be promised.
			if got := w.capacity(); got != 0 {
				t.Errorf("the capacity is %d bytes", got)
			}
			w.wantListed("without inodes", func(v drivertest.Volume) bool { return !v.Block })
			w.wantAnswers("without inodes", answers{
				"create":           codes.ResourceExhausted,
				"create disk":      codes.ResourceExhausted,
				"expand":           codes.FailedPrecondition,
				"expand disk":      codes.FailedPrecondition,
				"delete published": codes.FailedPrecondition,
			})
			w.wantAlive("without inodes")
			w.wantKept("without inodes")
			w.takeInodes() // what deletions have given back
			w.Crash()
			w.wantKept("without inodes, started again")
			giveBack()

			// A volume wants some, and may find fewer.
			for left := range 6 {
				giveBack := w.takeInodes()
				w.leaveInodes(left)
				for _, block := range []bool{false, true} {
					v := volume("pvc-some", block)
					err := w.create(v)
					w.wantFits(fmt.Sprintf("create of block %v with %d inodes left", block, left), err, codes.ResourceExhausted)
					w.wantKept(fmt.Sprintf("with %d inodes left", left))
					if err == nil {
						w.Must(w.delete(v))
						w.wantKept(fmt.Sprintf("with %d inodes left, deleted", left))
					}
				}
				giveBack()
			}
			w.end()
		})
	}
}

// takeInodes has others make as many files as they can, and returns what removes them.
func (w *world) takeInodes() (giveBack func()) {
	w.Helper()
	fulldisk.Small(w, w.mount.foreign(), 0)
	w.Must(w.pool.Settle())
	return w.giveBack
}

// leaveInodes gives some back.
func (w *world) leaveInodes(count int) {
	w.Helper()
	for i := range count {
		w.Must(os.Remove(filepath.Join(w.mount.foreign(), fulldisk.SmallName(0, i))))
	}
	w.Must(w.pool.Settle())
}
