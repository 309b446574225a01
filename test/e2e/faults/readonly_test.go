package faults

import (
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// What is on a filesystem that takes no writes can still be read, and pods can end.
func TestPoolTurnsReadOnly(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range someFilesystems(2, 2) {
		t.Run(fs.kind, func(t *testing.T) {
			h := newHarness(t, driver, newMount(t, fs))
			// The kernel does not let a filesystem be read-only that has a file open for
			// writing, such as that of a device. See TestFailingDisk for those.
			h.Must(h.unpublish(raw))
			h.wantWhole("before")
			h.mount.remount(unix.MS_RDONLY)
			if got := h.MustCapacity("local"); got != 0 {
				t.Errorf("the capacity is %d bytes", got)
			}
			h.wantListed("read-only", all)
			h.wantAnswers("read-only", answers{
				"create":             codes.ResourceExhausted,
				"create disk":        codes.ResourceExhausted,
				"publish disk":       codes.Unavailable,
				"publish disk again": codes.Unavailable,
				"stats of disk":      codes.NotFound,
				"expand":             codes.FailedPrecondition,
				"expand disk":        codes.NotFound,
				"delete published":   codes.FailedPrecondition,
				"delete":             codes.Unavailable,
				"delete disk":        codes.Unavailable,
			})
			h.Must(h.PublishReadOnly(h.Context(), spare, spare.ID))
			h.Must(h.stats(spare))
			h.Must(h.unpublish(spare))
			h.Must(h.unpublish(tree))
			h.Must(h.publish(tree))
			h.Must(h.holds(tree))
			h.wantAlive("read-only")
			h.awaitServing(true)

			h.Crash()
			h.Must(h.publish(idle))
			h.Must(h.unpublish(idle))
			h.mount.remount(0)
			// An ext4 has its quotas off while it is read-only, and the next check sees them again.
			h.Eventually("a volume can be made", func() bool { return h.create(late) == nil })
			h.wantListed("read-write again", none)
			h.end()
		})
	}
}
