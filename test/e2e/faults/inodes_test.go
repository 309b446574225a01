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
			h := newHarness(t, driver, newMount(t, fs))
			giveBack := h.takeInodes()
			// A volume that cannot be made is none that could be promised.
			if got := h.MustCapacity("local"); got != 0 {
				t.Errorf("the capacity is %d bytes", got)
			}
			h.wantListed("without inodes", func(v drivertest.Volume) bool { return !v.Block })
			h.wantAnswers("without inodes", answers{
				"create":           codes.ResourceExhausted,
				"create disk":      codes.ResourceExhausted,
				"expand":           codes.FailedPrecondition,
				"expand disk":      codes.FailedPrecondition,
				"delete published": codes.FailedPrecondition,
			})
			h.wantAlive("without inodes")
			h.wantKept("without inodes")
			h.takeInodes() // what deletions have given back
			h.Crash()
			h.wantKept("without inodes, started again")
			giveBack()

			// A volume wants some, and may find fewer.
			for left := range 6 {
				giveBack := h.takeInodes()
				h.leaveInodes(left)
				for _, block := range []bool{false, true} {
					v := volume("pvc-some", block)
					err := h.create(v)
					h.wantFits(fmt.Sprintf("create of block %v with %d inodes left", block, left), err, codes.ResourceExhausted)
					h.wantKept(fmt.Sprintf("with %d inodes left", left))
					if err == nil {
						h.Must(h.delete(v))
						h.wantKept(fmt.Sprintf("with %d inodes left, deleted", left))
					}
				}
				giveBack()
			}
			h.end()
		})
	}
}

// takeInodes has others make as many files as they can, and returns what removes them.
func (h *harness) takeInodes() (giveBack func()) {
	h.Helper()
	fulldisk.Small(h, h.mount.foreign(), 0)
	h.Must(h.pool.Settle())
	return h.giveBack
}

// leaveInodes gives some back.
func (h *harness) leaveInodes(count int) {
	h.Helper()
	for i := range count {
		h.Must(os.Remove(filepath.Join(h.mount.foreign(), fulldisk.SmallName(0, i))))
	}
	h.Must(h.pool.Settle())
}
