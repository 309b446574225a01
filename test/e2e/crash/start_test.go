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
			w := newWorld(t, p, driver)
			for _, o := range others {
				w.unmakeOther(o)
			}
			w.awaitNoTrash()
			must.Succeed(t, w.Process.Stop())

			must.Succeed(t, os.RemoveAll(w.pool.Path))
			steps := w.restart()
			w.wantNewPool()
			every := 1
			if testing.Short() && (i > 0 || testenv.Guest()) {
				every = 3 * p.every
			}
			for n := 1; n <= steps; n += every {
				must.Succeed(t, w.Process.Stop())
				must.Succeed(t, os.RemoveAll(w.pool.Path))
				taken, killed := w.crashStart(n)
				if !killed {
					t.Fatalf("no process died at step %d of %d", n, steps)
				}
				t.Logf("step %d: %s", n, w.words(taken[n-1:]))
				w.restart()
				w.wantNewPool()
			}
		})
	}
}

// wantNewPool expects an empty pool in which volumes can be made.
func (w *world) wantNewPool() {
	w.Helper()
	info, err := os.Stat(w.pool.Path)
	w.Must(err)
	if info.Mode().Perm() != 0o750 {
		w.Errorf("the mode of the pool is %v", info.Mode())
	}
	if err := w.pool.Holds(nil); err != nil {
		w.Error(err)
	}
	w.Must(w.create(victim, false, small).err)
	w.Must(w.delete().err)
	w.awaitNoTrash()
}
