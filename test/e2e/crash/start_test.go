package crash

import (
	"os"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The first start of all makes the pool. Killed in whatever it does, it leaves something
// that the next one makes a pool of, or that is one.
func TestCrashDuringFirstStart(t *testing.T) {
	driver := drivertest.Built(t)
	for i, p := range places() {
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			h := newHarness(t, p, driver)
			for _, o := range others {
				h.unmakeOther(o)
			}
			h.awaitNoTrash()
			must.Succeed(t, h.Process.Stop())

			must.Succeed(t, os.RemoveAll(h.pool.Path))
			steps := h.restart()
			h.wantNewPool()
			every := 1
			if testing.Short() && (i > 0 || testenv.Guest()) {
				every = 3 * p.every
			}
			for n := 1; n <= steps; n += every {
				must.Succeed(t, h.Process.Stop())
				must.Succeed(t, os.RemoveAll(h.pool.Path))
				taken, killed := h.crashStart(n)
				if !killed {
					t.Fatalf("no process died at step %d of %d", n, steps)
				}
				t.Logf("step %d: %s", n, h.words(taken[n-1:]))
				h.restart()
				h.wantNewPool()
			}
		})
	}
}

// wantNewPool expects an empty pool in which volumes can be made.
func (h *harness) wantNewPool() {
	h.Helper()
	info := must.Value(os.Stat(h.pool.Path))(h)
	if info.Mode().Perm() != 0o750 {
		h.Errorf("the mode of the pool is %v", info.Mode())
	}
	if err := h.pool.Holds(nil); err != nil {
		h.Error(err)
	}
	h.Must(h.create(victim, false, small).err)
	h.Must(h.delete().err)
	h.awaitNoTrash()
}
