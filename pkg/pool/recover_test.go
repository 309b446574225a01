package pool_test

import (
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const local = `[{"name":"local","path":"pool"}]`

// uid is the record's own name of a volume.
func uid(t *testing.T, h *harness, name string) string {
	t.Helper()
	data := must.Value(os.ReadFile(h.Own("volumes", name+".json")))(t)
	_, rest, _ := strings.Cut(string(data), `"uid":"`)
	value, _, ok := strings.Cut(rest, `"`)
	if !ok {
		t.Fatalf("the record has no uid: %s", data)
	}
	return value
}

func TestLostVolumeIsNotBeingRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		// An earlier volume of the same name is still in the trash.
		must.Succeed(t, os.Mkdir(h.Own("trash", "node-1", "pvc-1.0123456789abcdef"), 0o755))
		must.Succeed(t, os.Remove(h.Path("pool", "pvc-1")))
		h.start(local)
		page, _ := h.List(t.Context(), volume.ID{}, 10)
		if len(page) != 1 || !page[0].Lost {
			t.Errorf("list %+v, want the lost volume", page)
		}
	})
}

// Between the names in creating/ and a check at one of them, the call that was making it ends.
func TestSweepOfCreationsWhileCreateEnds(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		both := []string{"pvc-1", "pvc-2"}
		for _, name := range both {
			must.Succeed(t, os.Mkdir(h.Own("creating", "node-1", name), 0o777))
		}
		createOther := func() {
			var first sync.Once
			made := make(chan struct{})
			for _, name := range both {
				go func() {
					unlock, err := h.Lock(id(t, name)) // of the one that is being swept after that
					if err != nil {
						t.Error(err)
						return
					}
					defer unlock()
					first.Do(func() { h.create(name, mib); close(made) })
				}()
			}
			<-made
		}
		f.asked.Store(&createOther)
		h.later(2 * time.Minute)
		if status := h.Status()[0]; status.Err != nil || !status.LastError.IsZero() {
			t.Errorf("the pool failed: %v, at %v", status.Err, status.LastError)
		}
		if got := h.volumes(); len(got) != 1 {
			t.Errorf("volumes %q, want the one that was made", got)
		}
		h.wantClean()
	})
}

func TestLeftoversOfGoneNodeAreRecovered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.every = 20 * time.Second
		h.start(`[{"name":"local","path":"pool","shared":true}]`)
		for _, node := range []string{"alive", "gone"} {
			must.Succeed(t, os.MkdirAll(h.Own("creating", node, "pvc-1"), 0o700))
			must.Succeed(t, os.MkdirAll(h.Own("trash", node, "pvc-2.0123456789abcdef", "data"), 0o700))
		}
		// Whatever its clock says, who is alive changes what others see.
		must.Succeed(t, os.Chtimes(h.Own("trash", "gone"), time.Now(), time.Now().Add(-48*time.Hour)))
		for hour := range 26 {
			must.Succeed(t, os.Chtimes(h.Own("trash", "alive"), time.Now(), time.Unix(int64(hour), 0)))
			h.later(time.Hour)
		}
		for node, want := range map[string]int{"alive": 1, "gone": 0, "node-1": 0} {
			for _, part := range []string{"creating", "trash"} {
				if node == "node-1" && part == "creating" {
					continue
				}
				if got := names(t, h.Own(part, node)); len(got) != want {
					t.Errorf("%s of the node %q has %q, want %d entries", part, node, got, want)
				}
			}
		}
	})
}

func TestStaleMarkIsRemovedWhenPoolReturns(t *testing.T) {
	onPools(t, `[{"name":"local","path":"pool","shared":true}]`, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		must.Succeed(t, os.Rename(h.Path("pool"), h.Path("away")))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		must.Succeed(t, os.Rename(h.Path("away"), h.Path("pool")))
		h.later(2 * time.Minute)
		if got := names(t, h.Own("published", "node-1")); len(got) > 0 {
			t.Errorf("marks %q, want none", got)
		}
	})
}
