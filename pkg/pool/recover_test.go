package pool_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const local = `[{"name":"local","path":"pool"}]`

// Each case is what a crash between two steps leaves on disk.
func TestRecoveryAfterCrash(t *testing.T) {
	for name, c := range map[string]struct {
		// crash changes a pool in which pvc-1 and pvc-2 exist, pvc-1 holding data.
		crash func(t *testing.T, b *bench)
		want  []string
	}{
		"nothing": {func(*testing.T, *bench) {}, []string{"pvc-1", "pvc-2"}},
		"create, after the directory was made aside": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", "pvc-3"), 0o777))
		}, []string{"pvc-1", "pvc-2"}},
		"create, while the record was written": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", "pvc-3"), 0o777))
			must.Succeed(t, os.WriteFile(b.Own("volumes", ".new-pvc-3.json"), []byte(`{"vers`), 0o600))
		}, []string{"pvc-1", "pvc-2"}},
		"create, after the record was written": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Rename(b.Path("pool", "pvc-2"), b.Own("creating", "node-1", "pvc-2")))
		}, []string{"pvc-1"}},
		"create, after its last step": {func(*testing.T, *bench) {}, []string{"pvc-1", "pvc-2"}},
		"a creation that failed and whose remains were being thrown away": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Mkdir(b.Own("trash", "node-1", "pvc-3.0123456789abcdef"), 0o777))
		}, []string{"pvc-1", "pvc-2"}},
		"delete, after the directory was thrown away": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Own("trash", "node-1", "pvc-1."+uid(t, b, "pvc-1"))))
		}, []string{"pvc-2"}},
		"delete, after its last step": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Own("trash", "node-1", "pvc-1."+uid(t, b, "pvc-1"))))
			must.Succeed(t, os.Remove(b.Own("volumes", "pvc-1.json")))
		}, []string{"pvc-2"}},
		"delete of a volume without a record": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.Mkdir(b.Own("trash", "node-1", "pvc-old.0123456789abcdef"), 0o755))
		}, []string{"pvc-1", "pvc-2"}},
		"a reaper in the middle of a deep tree": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.MkdirAll(b.Own("trash", "node-1", ".new-deep-7", "a", "b"), 0o755))
		}, []string{"pvc-1", "pvc-2"}},
		"the first start, after the layout's directory": {func(t *testing.T, b *bench) {
			must.Succeed(t, os.RemoveAll(b.Own()))
			must.Succeed(t, os.Mkdir(b.Own(), 0o700))
		}, []string{"pvc-1", "pvc-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bench) {
				b.create("pvc-1", mib)
				must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", "data"), nil, 0o644))
				b.create("pvc-2", mib)
				must.Succeed(t, b.Close(t.Context()))
				c.crash(t, b)
				b.start(local)
				b.wantVolumes(c.want...)
				b.wantClean()
				// The repeated call gives the answer of an undisturbed run.
				b.create("pvc-2", mib)
				for _, name := range []string{"pvc-1", "pvc-2", "pvc-3"} {
					if err := b.Delete(t.Context(), id(t, name)); err != nil {
						wantError(t, err, volume.ErrNotFound)
					}
				}
				b.wantVolumes()
				b.wantClean()
			})
		})
	}
}

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

func TestDirectoriesMovedInByHandAreServed(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, os.Mkdir(b.Path("pool", "moved-in"), 0o755))
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Path("moved-out")))
		b.later(2 * time.Minute)
		b.wantVolumes("moved-in", "pvc-1")
		page, _ := b.List(t.Context(), volume.ID{}, 10)
		if page[0].Lost || !page[1].Lost {
			t.Errorf("list %+v, want only pvc-1 to be lost", page)
		}
	})
}

func TestStaleCreationsAreRemoved(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Own("creating", "node-1", "pvc-1")))
		must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", ".odd"), 0o755))
		// A check that meets another at the volume leaves it to the next.
		b.later(5 * time.Minute)
		b.wantVolumes()
		b.wantClean()
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

func TestNameInTwoPoolsIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		must.Succeed(t, os.MkdirAll(b.Path("a", "pvc-1"), 0o755))
		must.Succeed(t, os.MkdirAll(b.Path("b", "pvc-1"), 0o755))
		b.start(`[{"name":"a","path":"a"},{"name":"b","path":"b"}]`)
		err := b.Delete(t.Context(), id(t, "pvc-1"))
		wantError(t, err, volume.ErrAmbiguous)
		if got := err.Error(); got != `volume pvc-1 exists in several pools: "a" and "b"; move one of the two away` {
			t.Errorf("the error is %q", got)
		}
		name, err := volume.ParsePoolName("b")
		must.Succeed(t, err)
		must.Succeed(t, b.Publish(t.Context(), pool.Publication{ID: id(t, "pvc-1"), Pool: name, Target: b.Target("x")}))
	})
}

func TestSharedPoolCountsPromisesOfOtherNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		one := newBench(t, t.TempDir())
		one.start(shared)
		two := &bench{t: t, Node: one.Node}
		two.startNode("node-2", shared)

		before := two.capacity()
		one.create("pvc-1", 512*mib)
		if got := before - two.capacity(); got < 448*mib || got > 1024*mib {
			t.Errorf("a promise of 512 MiB by the other node took %d here", got)
		}
		two.wantVolumes("pvc-1")
		two.create("pvc-1", 512*mib)
		// creating/ and trash/ of the other node are not touched by a restart.
		must.Succeed(t, os.Mkdir(one.Own("creating", "node-1", "pvc-2"), 0o777))
		must.Succeed(t, two.Close(t.Context()))
		two.startNode("node-2", shared)
		if _, err := os.Stat(one.Own("creating", "node-1", "pvc-2")); err != nil {
			t.Error(err)
		}
		two.delete("pvc-1")
		one.wantVolumes()
	})
}

// A driver on another node that hangs keeps the whole pool locked.
func TestPoolLockWaitIsCanceled(t *testing.T) {
	onPools(t, `[{"name":"legacy","path":"pool","shared":true},{"name":"other","path":"other"}]`, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		own, err := dir.Open(b.Own())
		must.Succeed(t, err)
		defer func() { must.Succeed(t, own.Close()) }()
		unlock, err := own.Lock(t.Context(), "lock")
		must.Succeed(t, err)
		inTime := func(call func(context.Context) error) error {
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			defer stop()
			return call(ctx)
		}
		for name, call := range map[string]func(context.Context) error{
			"create": func(ctx context.Context) error {
				_, err := b.Create(ctx, pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
				return err
			},
			"publish": func(ctx context.Context) error {
				return b.Publish(ctx, pool.Publication{ID: id(t, "pvc-1"), Target: b.Target("a")})
			},
			"delete": func(ctx context.Context) error { return b.Delete(ctx, id(t, "pvc-1")) },
		} {
			if err := inTime(call); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, want the end of its time", name, err)
			}
		}
		_, err = b.Create(t.Context(), pool.Request{ID: id(t, "pvc-3"), Pool: poolName(t, "other"), Range: volume.Range{Required: mib}})
		must.Succeed(t, err)
		unlock()
		b.delete("pvc-1")
		b.create("pvc-2", mib)
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

func TestPublishedMarksAfterNodeRestart(t *testing.T) {
	const shared = `[{"name":"local","path":"pool","shared":true}]`
	onPools(t, shared, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		b.create("pvc-2", mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, b.publish("pvc-2", "b"))
		must.Succeed(t, b.Mounts.Unpublish(b.Target("a"), nil)) // as a reboot does
		b.restart(shared)
		if got := names(t, b.Own("published", "node-1")); len(got) != 1 || got[0] != "pvc-2" {
			t.Errorf("marks %q, want only that of pvc-2", got)
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
