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
func uid(t *testing.T, b *bench, name string) string {
	t.Helper()
	data, err := os.ReadFile(b.Own("volumes", name+".json"))
	must.Succeed(t, err)
	_, rest, _ := strings.Cut(string(data), `"uid":"`)
	value, _, ok := strings.Cut(rest, `"`)
	if !ok {
		t.Fatalf("the record has no uid: %s", data)
	}
	return value
}

func TestLostVolumeIsNotBeingRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, b.Close(t.Context()))
		// An earlier volume of the same name is still in the trash.
		must.Succeed(t, os.Mkdir(b.Own("trash", "node-1", "pvc-1.0123456789abcdef"), 0o755))
		must.Succeed(t, os.Remove(b.Path("pool", "pvc-1")))
		b.start(local)
		page, _ := b.List(t.Context(), volume.ID{}, 10)
		if len(page) != 1 || !page[0].Lost {
			t.Errorf("list %+v, want the lost volume", page)
		}
	})
}

// Between the names in creating/ and a check at one of them, the call that was making it ends.
func TestSweepOfCreationsWhileCreateEnds(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		both := []string{"pvc-1", "pvc-2"}
		for _, name := range both {
			must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", name), 0o777))
		}
		createOther := func() {
			var first sync.Once
			made := make(chan struct{})
			for _, name := range both {
				go func() {
					unlock, err := b.Lock(id(t, name)) // of the one that is being swept after that
					if err != nil {
						t.Error(err)
						return
					}
					defer unlock()
					first.Do(func() { b.create(name, mib); close(made) })
				}()
			}
			<-made
		}
		f.asked.Store(&createOther)
		b.later(2 * time.Minute)
		if status := b.Status()[0]; status.Err != nil || !status.LastError.IsZero() {
			t.Errorf("the pool failed: %v, at %v", status.Err, status.LastError)
		}
		if got := b.volumes(); len(got) != 1 {
			t.Errorf("volumes %q, want the one that was made", got)
		}
		b.wantClean()
	})
}

func TestLeftoversOfGoneNodeAreRecovered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.every = time.Hour
		b.start(`[{"name":"local","path":"pool","shared":true}]`)
		for _, node := range []string{"alive", "gone"} {
			must.Succeed(t, os.MkdirAll(b.Own("creating", node, "pvc-1"), 0o700))
			must.Succeed(t, os.MkdirAll(b.Own("trash", node, "pvc-2.0123456789abcdef", "data"), 0o700))
		}
		// Whatever its clock says, who is alive changes what others see.
		must.Succeed(t, os.Chtimes(b.Own("trash", "gone"), time.Now(), time.Now().Add(-48*time.Hour)))
		for hour := range 26 {
			must.Succeed(t, os.Chtimes(b.Own("trash", "alive"), time.Now(), time.Unix(int64(hour), 0)))
			b.later(time.Hour)
		}
		for node, want := range map[string]int{"alive": 1, "gone": 0, "node-1": 0} {
			for _, part := range []string{"creating", "trash"} {
				if node == "node-1" && part == "creating" {
					continue
				}
				if got := names(t, b.Own(part, node)); len(got) != want {
					t.Errorf("%s of the node %q has %q, want %d entries", part, node, got, want)
				}
			}
		}
	})
}

func TestStaleMarkIsRemovedWhenPoolReturns(t *testing.T) {
	onPools(t, `[{"name":"local","path":"pool","shared":true}]`, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, os.Rename(b.Path("pool"), b.Path("away")))
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		must.Succeed(t, os.Rename(b.Path("away"), b.Path("pool")))
		b.later(2 * time.Minute)
		if got := names(t, b.Own("published", "node-1")); len(got) > 0 {
			t.Errorf("marks %q, want none", got)
		}
	})
}

func TestMarkOfDeadNodeIsIgnored(t *testing.T) {
	onPools(t, `[{"name":"local","path":"pool","shared":true}]`, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, os.MkdirAll(b.Own("published", "node-9"), 0o700))
		must.Succeed(t, os.WriteFile(b.Own("published", "node-9", "pvc-1"), nil, 0o600))
		b.delete("pvc-1")
	})
}
