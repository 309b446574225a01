// Package load tests the real driver with many callers at once, for as long as it takes to
// see what grows: in the driver's memory, in its descriptors, and in what it leaves on
// the node.
package load

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// seed has a failed run's clients do the same again, as far as the clock lets them.
var seed = flag.Uint64("load.seed", rand.Uint64(), "seed of what the clients do")

const mib = 1 << 20

// An extent is how much is done.
type extent struct {
	callers int
	each    int           // volumes of each
	warm    time.Duration // before the driver is measured for the first time
	during  time.Duration
}

func extentOfRun() extent {
	if testing.Short() {
		return extent{callers: 64, each: 10, warm: time.Second, during: 6 * time.Second}
	}
	if testenv.Guest() {
		return extent{callers: 64, each: 10, warm: 10 * time.Second, during: time.Minute}
	}
	return extent{callers: 64, each: 157, warm: 30 * time.Second, during: 5 * time.Minute}
}

// Clients make calls on volumes that each of them knows everything about, and on some that they share. The driver is
// measured when all is quiet: before, and afterwards with as many volumes.
func TestLoad(t *testing.T) {
	e := extentOfRun()
	h := newHarness(t, drivertest.Built(t), e)
	t.Logf("-load.seed=%d", *seed)
	h.quiet()
	h.load(e.warm)
	h.quiet()
	before := h.settled()

	h.load(e.during)
	h.check()
	h.quiet()
	h.wantFlat(before, h.settled())

	h.lap("restarted", h.Restart)
	h.check()
	h.lap("all deleted", h.all((*client).deleteAll))
	h.check()
	h.Must(h.Process.Stop())
	h.wantNoRace()
}
