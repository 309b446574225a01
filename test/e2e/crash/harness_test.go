package crash

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

const mib = 1 << 20

// A harness is a driver with one pool, and what of it is in use.
type harness struct {
	*drivertest.Driver
	place place
	pool  *drivertest.Pool
	trap  *trap.Trap

	now        state  // of the victim
	answer     answer // of a call without a crash
	capacities map[state]int64
	learnt     []trap.Step // of the call at hand, without a crash
	steps      int         // of all calls so far
	filled     bool        // something is written in the victim
	// reapedBefore is how much the reaper had done when the trap was armed.
	reapedBefore int
}

// An answer is what a call came to.
type answer struct {
	message proto.Message
	err     error
}

func (a answer) diff(b answer) string { return cmp.Diff(a.message, b.message, protocmp.Transform()) }

// newHarness starts a driver on a pool in which there are volumes of others.
func newHarness(t *testing.T, p place, driver string) *harness {
	t.Helper()
	w := &harness{place: p, pool: p.pool(drivertest.NewPool(t, p.mounted)), capacities: make(map[state]int64)}
	w.trap = trap.New(t, driver)
	self, err := os.Executable() // which launches the driver
	must.Succeed(t, err)
	w.run(t, self)
	for _, v := range others {
		w.makeOther(v)
	}
	return w
}

// pool is one at that path.
func (p place) pool(path string) *drivertest.Pool {
	pool := drivertest.PoolConfig{Name: "local", Path: path, Shared: p.shared}
	if p.enforced {
		pool.Enforcement = "required"
	}
	if p.thin {
		pool.Allocation = "thin"
	}
	return &drivertest.Pool{PoolConfig: pool, Largest: large}
}

// run runs a program as the driver for the first time.
func (h *harness) run(t *testing.T, program string) {
	t.Helper()
	h.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{h.pool.PoolConfig}, Flags: []string{"--v=4", drivertest.ServeMetrics}})
	h.pool.Driver = h.Driver
}

// start runs the driver again after it ended.
func (h *harness) start() error { return h.Process.Restart(h.Context()) }

// kill ends the driver at once. A device that it has told to go may stay for an instant, because another process that lists
// devices has it open: the next start would tell it again.
func (h *harness) kill() {
	h.Helper()
	h.Must(h.Process.Kill())
	h.Eventually("devices that end have ended", func() bool {
		attached := must.Value(h.pool.Attached())(h)
		return !slices.ContainsFunc(attached, func(d drivertest.Device) bool {
			ends, err := os.ReadFile("/sys/block/" + d.Name + "/loop/autoclear")
			return err == nil && strings.TrimSpace(string(ends)) == "1"
		})
	})
}

// end stops the driver and expects it to leave nothing.
func (h *harness) end() {
	h.Helper()
	h.reach(state{})
	for _, v := range others {
		h.unmakeOther(v)
	}
	h.awaitNoTrash()
	h.wantNothingLeft()
	h.Must(h.Process.Stop())
}

func (h *harness) trash() []string {
	h.Helper()
	names := must.Value(drivertest.Names(h.pool.Own("trash", drivertest.NodeName)))(h)
	return names
}

// awaitNoTrash waits until the reaper is done with all that was removed, and would take no step in the call that comes next.
func (h *harness) awaitNoTrash() {
	h.Helper()
	h.pool.AwaitErased()
}

// awaitReaped waits until the reaper has done its work for a call, or was killed at it.
func (h *harness) awaitReaped() {
	h.Helper()
	h.Eventually("what was removed is gone", func() bool {
		return h.trap.HasKilled() || h.reaped() > h.reapedBefore && len(h.trash()) == 0
	})
}

// reaped is how often the driver has logged that the reaper is done with something.
func (h *harness) reaped() int { return strings.Count(h.Process.Log(), "Removed trash") }

// arm counts the driver's steps from here on.
func (h *harness) arm(killAt int) {
	h.reapedBefore = h.reaped()
	h.trap.Arm(killAt)
}
