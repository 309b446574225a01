package crash

import (
	"os"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The first start of all makes the pool. Killed in whatever it does, it leaves something
// that the next one makes a pool of, or that is one.
func TestCrashAtEveryStepOfTheFirstStart(t *testing.T) {
	testenv.NeedRoot(t)
	driver, err := node.Binary(t.Context(), t.TempDir())
	drivertest.Must(t, err)
	all := places()
	if testing.Short() {
		all = all[:1]
	}
	for _, p := range all {
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			w := newWorld(t, p, driver)
			for _, o := range others {
				w.unmakeOther(o)
			}
			w.awaitNoTrash()
			drivertest.Must(t, w.Node.Stop())
			every := 1
			if testing.Short() {
				every = (p.every + 1) / 2
			}
			for n := 1; ; n += every {
				drivertest.Must(t, os.RemoveAll(w.pool.Path))
				at, killed := w.crashStart(n)
				if killed {
					t.Logf("step %d: %s", n, at)
					drivertest.Must(t, w.start())
				}
				w.wantNewPool()
				drivertest.Must(t, w.Node.Stop())
				if !killed {
					break
				}
			}
			drivertest.Must(t, w.start())
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
