package serve

import (
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func TestCopiesAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c copies
		want := func(running int, byReference, byCopy CopySum) {
			t.Helper()
			got, done := c.counted()
			if got != running || done[volume.ByReference] != byReference || done[volume.ByCopy] != byCopy {
				t.Errorf("%d run, done are %v, want %d, %v and %v", got, done, running, byReference, byCopy)
			}
		}
		want(0, CopySum{}, CopySum{})
		first, second, third := c.begin(volume.ByReference), c.begin(volume.ByCopy), c.begin(volume.ByReference)
		want(3, CopySum{}, CopySum{})
		time.Sleep(time.Second) // the bubble's
		first(250*time.Millisecond, nil)
		time.Sleep(time.Second)
		second(time.Minute, volume.ErrNoSpace)
		third(500*time.Millisecond, nil)
		want(0, CopySum{Count: 2, Took: 3 * time.Second, Stalled: 750 * time.Millisecond}, CopySum{Failed: 1})
	})
}
