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
			w := newWorld(t, driver, newMount(t, fs))
			// The kernel does not let a filesystem be read-only that has a file open for
			// writing, such as that of a device. See TestFailingDisk for those.
			w.Must(w.unpublish(raw))
			w.wantWhole("before")
			w.mount.remount(unix.MS_RDONLY)
			if got := w.capacity(); got != 0 {
				t.Errorf("the capacity is %d bytes", got)
			}
			w.wantListed("read-only", all)
			w.wantAnswers("read-only", answers{
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
			w.Must(w.PublishReadOnly(w.Context(), spare, spare.ID))
			w.Must(w.stats(spare))
			w.Must(w.unpublish(spare))
			w.Must(w.unpublish(tree))
			w.Must(w.publish(tree))
			w.Must(w.holds(tree))
			w.wantAlive("read-only")
			w.awaitServing(true)

			w.Crash()
			w.Must(w.publish(idle))
			w.Must(w.unpublish(idle))
			w.mount.remount(0)
			// An ext4 has its quotas off while it is read-only, and the next check sees them again.
			w.Eventually("a volume can be made", func() bool { return w.create(late) == nil })
			w.wantListed("read-write again", none)
			w.end()
		})
	}
}
