package pool_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const localPool = `[{"name":"local","path":"pool"}]`

// see looks at the first pool of a configuration, beside the driver of the bench.
func (b *bench) see(datadir string) pool.View { return b.seeAs("node-1", datadir) }

func (b *bench) seeAs(name, datadir string) pool.View {
	b.t.Helper()
	return b.seeAll(name, datadir)[0]
}

func (b *bench) seeAll(name, datadir string) []pool.View {
	b.t.Helper()
	configs, err := poolconfig.Parse(datadir, b.root)
	must(b.t, err)
	node, err := volume.ParseNodeID(name)
	must(b.t, err)
	return pool.See(b.t.Context(), configs, pool.Options{Node: node, Mounts: b.mounts, Devices: b.allDevices(), Dev: b.dev, SystemPath: b.root, DetectQuota: b.detect, CountErrors: b.countErrors, SinceBoot: b.sinceBoot})
}

func only(t *testing.T, v pool.View) pool.VolumeView {
	t.Helper()
	if len(v.Volumes) != 1 {
		t.Fatalf("the pool is seen as %+v, want one volume", v)
	}
	return v.Volumes[0]
}

func TestViewMatchesDriver(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		b.create("pvc-2", 20*mib)
		must(t, b.write("pvc-1", 3*mib))
		must(t, b.publish("pvc-1", "a"))
		must(t, os.Mkdir(b.path("pool", "by-hand"), 0o755))
		b.later(time.Minute)

		v := b.see(`[{"name":"local","path":"pool","enforcement":"required"}]`)
		if v.Err != nil || v.Condition.Abnormal || v.Quota != b.quota.Kind() || v.UUID == "" {
			t.Errorf("the pool is seen as %+v, want it in order and enforced", v)
		}
		if v.Promised != 30*mib || v.Available != b.capacity() {
			t.Errorf("%d bytes are seen as promised and %d as available, want %d and %d", v.Promised, v.Available, 30*mib, b.capacity())
		}
		page, _ := b.List(t.Context(), volume.ID{}, 10)
		var seen []pool.Volume
		for _, volume := range v.Volumes {
			seen = append(seen, volume.Volume)
		}
		if diff := cmp.Diff(page, seen, cmp.AllowUnexported(volume.ID{}, volume.PoolName{}, volume.NodeID{})); diff != "" {
			t.Errorf("a view differs from a list (-list +view):\n%s", diff)
		}
		first := v.Volumes[1]
		if first.LimitBytes != 10*mib || first.UsedBytes < 3*mib || first.UsedBytes > 4*mib || first.Carried != b.carried("pvc-1") {
			t.Errorf("the volume is seen as %+v, want its limit, use and id", first)
		}
		if len(first.Published) != 1 || first.Published[0].Path != b.path("pods", "a") {
			t.Errorf("the volume is seen as published at %+v", first.Published)
		}
		if hand := v.Volumes[0]; hand.Recorded || hand.Condition.Abnormal || !strings.Contains(hand.Condition.Message, "without a record") {
			t.Errorf("a directory without a record is seen as %+v", hand)
		}
	})
}

// wrong are ways in which a volume pvc-1 is not in order.
var wrong = map[string]func(t *testing.T, b *bench){
	"its directory is lost": func(t *testing.T, b *bench) {
		must(t, os.Rename(b.path("pool", "pvc-1"), b.path("aside")))
	},
	"its limit is another": func(t *testing.T, b *bench) {
		must(t, b.quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: 3 * mib}))
	},
	"its record is torn": func(t *testing.T, b *bench) {
		must(t, os.WriteFile(b.own("volumes", "pvc-1.json"), []byte(`{"version":1,"id":"pvc`), 0o600))
	},
	"its record is of a newer version": func(t *testing.T, b *bench) {
		must(t, os.WriteFile(b.own("volumes", "pvc-1.json"), []byte(`{"version":7}`), 0o600))
	},
	"it is full": func(t *testing.T, b *bench) { must(t, b.write("pvc-1", mib)) },
}

func TestViewReportsProblemsLikeDriver(t *testing.T) {
	for name, spoil := range wrong {
		t.Run(name, func(t *testing.T) {
			withQuota(t, "", func(t *testing.T, b *bench) {
				b.create("pvc-1", mib)
				b.create("pvc-2", mib)
				spoil(t, b)
				v := b.see(localPool)
				if len(v.Volumes) != 2 || !v.Volumes[0].Condition.Abnormal || v.Volumes[1].Condition.Abnormal {
					t.Fatalf("the pool is seen as %+v, want pvc-1 abnormal and pvc-2 in order", v)
				}
				if diff := cmp.Diff(b.volume("pvc-1").Condition, v.Volumes[0].Condition); diff != "" {
					t.Errorf("the driver says something else (-driver +view):\n%s", diff)
				}
			})
		})
	}
}

func TestFilesystemErrorsAreReportedForAllVolumes(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		if since := b.Status()[0].LastError; !since.IsZero() {
			t.Errorf("there was an error at %v", since)
		}
		b.errors.Store(3)
		b.later(10 * time.Second) // the next check
		status := b.Status()[0]
		if status.Errors != 3 || status.Err != nil || !status.LastError.Equal(time.Now()) {
			t.Errorf("status %+v, want 3 errors just now, and that it serves", status)
		}
		v := b.see(localPool)
		if v.Condition.Reason != health.FilesystemErrors || only(t, v).Condition != b.volume("pvc-1").Condition {
			t.Errorf("seen as %+v, want the pool's and the volume's condition to tell of the errors", v)
		}
		b.later(time.Minute)
		if diff := cmp.Diff(reasons(map[health.Reason]int{health.FilesystemErrors: 1}), b.Status()[0].Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		b.create("pvc-2", mib) // it is served all the same
		b.errors.Store(0)
		b.later(10 * time.Second)
		if c := b.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("condition %+v after the count was reset", c)
		}
	})
}

func TestViewOfOtherDirectory(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, b *bench)
		says string
	}{
		"a path that does not exist": {func(*testing.T, *bench) {}, "no such file"},
		"a bare directory":           {func(t *testing.T, b *bench) { must(t, os.Mkdir(b.path("pool"), 0o755)) }, "no driver has served it yet"},
		"a layout without its format": {func(t *testing.T, b *bench) {
			must(t, os.MkdirAll(b.own("volumes"), 0o700))
		}, "no driver has served it yet"},
		"an unknown format": {func(t *testing.T, b *bench) {
			must(t, os.MkdirAll(b.own("volumes"), 0o700))
			must(t, os.WriteFile(b.own("format"), []byte(`{"version":9}`), 0o600))
		}, "has version 9"},
		"a torn format": {func(t *testing.T, b *bench) {
			must(t, os.MkdirAll(b.own("volumes"), 0o700))
			must(t, os.WriteFile(b.own("format"), []byte(`{"ver`), 0o600))
		}, "is unreadable"},
		"a link in the place of the layout": {func(t *testing.T, b *bench) {
			must(t, os.MkdirAll(b.path("pool"), 0o700))
			must(t, os.Symlink("/", b.own()))
		}, "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir())
				c.make(t, b)
				before := tree(t, b.root)
				v := b.see(localPool)
				wantError(t, v.Err, volume.ErrUnavailable)
				if !v.Condition.Abnormal || !strings.Contains(v.Condition.Message, c.says) {
					t.Errorf("the condition is %+v, want it to say %q", v.Condition, c.says)
				}
				if diff := cmp.Diff(before, tree(t, b.root)); diff != "" {
					t.Errorf("looking changed (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestViewIsReadOnly(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		b.createBlock("disk-1", 4*mib)
		must(t, b.publishBlock("disk-1", "d"))
		b.create("pvc-2", mib)
		must(t, os.Rename(b.path("pool", "pvc-2"), b.path("aside")))
		must(t, b.Close(t.Context())) // so that nothing else does
		must(t, os.RemoveAll(b.own("trash", "node-1")))
		must(t, os.MkdirAll(b.own("staging", "node-1", "pvc-9"), 0o700))
		must(t, os.MkdirAll(b.own("trash", "node-2", "pvc-8.abc"), 0o700))
		must(t, os.WriteFile(b.own("volumes", ".new-pvc-7.json"), []byte("{"), 0o600))
		before := tree(t, b.root)
		if v := b.see(localPool); v.Err != nil || len(v.Volumes) != 3 || len(v.Staging) != 1 || len(v.Trash) != 1 {
			t.Errorf("the pool is seen as %+v, want three volumes, and one entry in staging and in trash", v)
		}
		if diff := cmp.Diff(before, tree(t, b.root)); diff != "" {
			t.Errorf("looking changed (-before +after):\n%s", diff)
		}
	})
}

// What another process is about to make or to remove has its record before and after
// its directory.
func TestViewOfVolumesInWork(t *testing.T) {
	for name, half := range map[string]func(t *testing.T, b *bench){
		"being made": func(t *testing.T, b *bench) {
			must(t, os.Rename(b.path("pool", "pvc-1"), b.own("staging", "node-1", "pvc-1")))
		},
		"being made by another node": func(t *testing.T, b *bench) {
			must(t, os.MkdirAll(b.own("staging", "node-2"), 0o700))
			must(t, os.Rename(b.path("pool", "pvc-1"), b.own("staging", "node-2", "pvc-1")))
		},
		"being removed": func(t *testing.T, b *bench) {
			must(t, os.Rename(b.path("pool", "pvc-1"), b.own("trash", "node-1", "pvc-1."+uid(t, b, "pvc-1"))))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bench) {
				b.create("pvc-1", mib)
				must(t, b.Close(t.Context()))
				half(t, b)
				v := b.see(localPool)
				if len(v.Volumes) > 0 || len(v.Staging)+len(v.Trash) != 1 {
					t.Fatalf("the pool is seen as %+v, want no volume and one leftover", v)
				}
				for _, l := range append(v.Staging, v.Trash...) {
					if l.Condition.Abnormal {
						t.Errorf("%+v is seen as abnormal", l)
					}
				}
				// After so long it is not about to happen any more. The bubble's clock
				// begins before the times of files.
				time.Sleep(time.Until(changed(t, b.own())) + 25*time.Hour + time.Minute)
				v = b.see(localPool)
				for _, l := range append(v.Staging, v.Trash...) {
					if !l.Condition.Abnormal || !strings.HasPrefix(l.Condition.Message, "unchanged for 25h") {
						t.Errorf("%+v is not seen as abnormal", l)
					}
				}
			})
		})
	}
}

func changed(t *testing.T, path string) time.Time {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	return time.Unix(st.Ctim.Unix())
}

// A large volume can take hours to erase, and those behind it are in order.
func TestViewOfWaitingTrash(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		must(t, b.Close(t.Context()))
		for _, name := range []string{"pvc-1.abc", "pvc-2.abc"} {
			must(t, os.MkdirAll(b.own("trash", "node-1", name, "data"), 0o700))
		}
		wantTrash := func(abnormal bool, says ...string) {
			t.Helper()
			seen := b.see(localPool).Trash
			if len(seen) != len(says) {
				t.Fatalf("%d pieces of trash are seen, want %d", len(seen), len(says))
			}
			for i, l := range seen {
				if l.Condition.Abnormal != abnormal || !strings.HasPrefix(l.Condition.Message, says[i]) {
					t.Errorf("%s is seen as %+v, want it to be %q", l.Name, l.Condition, says[i])
				}
			}
		}
		// The bubble's clock begins before the times of files.
		time.Sleep(time.Until(changed(t, b.own("trash", "node-1"))) + time.Minute)
		wantTrash(false, "being erased", "being erased")
		time.Sleep(2 * time.Hour)
		wantTrash(true, "unchanged for 2h", "unchanged for 2h")
		now := time.Now()
		must(t, os.Chtimes(b.own("trash", "node-1"), now, now)) // as when a piece is gone
		wantTrash(false, "waits to be erased", "waits to be erased")
		time.Sleep(2 * time.Hour)
		wantTrash(true, "unchanged for 4h", "unchanged for 4h")
	})
}

// There a node's directory changes because the node is alive.
func TestViewOfStuckTrashInSharedPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		b := newBench(t, t.TempDir())
		b.start(shared)
		must(t, b.Close(t.Context()))
		must(t, os.Mkdir(b.own("trash", "node-1", "pvc-1.abc"), 0o700))
		time.Sleep(time.Until(changed(t, b.own("trash", "node-1"))) + 2*time.Hour)
		now := time.Now()
		must(t, os.Chtimes(b.own("trash", "node-1"), now, now))
		if seen := b.seeAs("node-1", shared).Trash; len(seen) != 1 || !seen[0].Condition.Abnormal {
			t.Errorf("the trash is seen as %+v, want it to be abnormal", seen)
		}
	})
}

// A removal that was done under another uid is none of this volume.
func TestViewOfLostVolumeWithTrashOfSameName(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must(t, b.Close(t.Context()))
		must(t, os.Rename(b.path("pool", "pvc-1"), b.own("trash", "node-1", "pvc-1.ofanearlierone")))
		if v := only(t, b.see(localPool)); !v.Lost || !v.Condition.Abnormal {
			t.Errorf("the volume is seen as %+v, want it lost", v)
		}
	})
}

func TestViewOfBlockVolumes(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.createBlock("disk-1", 4*mib)
		must(t, b.publishBlock("disk-1", "d"))
		device := b.attached(1)[0]
		v := only(t, b.see(localPool))
		if v.Condition.Abnormal || v.FileBytes != 4*mib || v.AllocatedBytes < 4*mib {
			t.Errorf("the volume is seen as %+v, want it in order, with its file", v)
		}
		if len(v.Devices) != 1 || v.Devices[0].Name != device.Name || len(v.Published) != 1 || v.Published[0].Path != b.path("pods", "d") {
			t.Errorf("the volume is seen as %+v, want it published as %s", v, device.Name)
		}
		if len(v.Nodes) != 1 || v.Nodes[0].String() != "node-1" {
			t.Errorf("the volume is seen on the nodes %v", v.Nodes)
		}
		must(t, os.Truncate(b.path("pool", "disk-1", "disk.img"), mib))
		if v := only(t, b.see(localPool)); v.Condition != b.volume("disk-1").Condition || !v.Condition.Abnormal {
			t.Errorf("a file that is too small is seen as %+v", v.Condition)
		}
	})
}

// The driver makes limit and file larger before the record.
func TestViewOfBlockVolumeDuringExpand(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.createBlock("disk-1", 4*mib)
		must(t, b.quota.Limit(b.open("disk-1"), b.carried("disk-1"), quota.Limit{Bytes: 64 * mib}))
		must(t, os.Truncate(b.path("pool", "disk-1", "disk.img"), 8*mib))
		if v := only(t, b.see(localPool)); v.Condition.Abnormal {
			t.Errorf("the volume is seen as %+v", v.Condition)
		}
	})
}

// An expansion writes the record first. What is so for a moment only is no news.
func TestViewChecksProblemsTwice(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must(t, b.quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: mib / 2}))
		done := make(chan pool.View, 1)
		go func() { done <- b.see(localPool) }()
		synctest.Wait() // it has looked once, and waits
		must(t, b.quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: mib}))
		if v := only(t, <-done); v.Condition.Abnormal {
			t.Errorf("the volume is seen as %+v", v.Condition)
		}
	})
}

// A slow disk can hold an expansion up between its record and its limit.
func TestViewWaitsForExpand(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must(t, b.Close(t.Context()))
		must(t, b.quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: mib / 2}))
		// The bubble's clock begins before the times of files.
		time.Sleep(time.Until(changed(t, b.own("volumes", "pvc-1.json"))) + 10*time.Second)
		if v := only(t, b.see(localPool)); v.Condition.Abnormal {
			t.Errorf("10 s after its record was written the volume is seen as %+v", v.Condition)
		}
		time.Sleep(time.Minute)
		if v := only(t, b.see(localPool)); !v.Condition.Abnormal {
			t.Errorf("a minute later the volume is seen as %+v", v.Condition)
		}
	})
}

func TestViewOfSharedPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		root := t.TempDir()
		one := newBench(t, root)
		one.start(shared)
		two := &bench{t: t, root: root, mounts: &bindtest.Fake{}, labels: one.labels, loops: looptest.NewFake(one.dev), dev: one.dev}
		t.Cleanup(func() { must(t, two.mounts.Close()) })
		two.startNode("node-2", shared)
		one.create("pvc-1", mib)
		must(t, one.publish("pvc-1", "a"))
		must(t, two.publish("pvc-1", "b"))
		two.create("pvc-2", mib)
		two.delete("pvc-2")
		for name, c := range map[string]struct {
			seen pool.View
			at   string
		}{
			"node-1": {one.seeAs("node-1", shared), "a"},
			"node-2": {two.seeAs("node-2", shared), "b"},
		} {
			v := only(t, c.seen)
			if len(v.Nodes) != 2 || v.Nodes[0].String() != name || len(v.Published) != 1 || filepath.Base(v.Published[0].Path) != c.at {
				t.Errorf("%s sees %+v, want both nodes, itself first, and its own mount", name, v)
			}
		}
	})
}

func TestViewOfHungPool(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	release := testenv.Hang(t, filepath.Join(root, "pool"))
	configs, err := poolconfig.Parse(localPool, root)
	must(t, err)
	mounts := &bindtest.Fake{}
	defer func() { must(t, mounts.Close()) }()
	v := pool.See(t.Context(), configs, pool.Options{Mounts: mounts, HangAfter: time.Second})[0]
	wantError(t, v.Err, volume.ErrUnavailable)
	if !strings.Contains(v.Condition.Message, "no answer for 1s") {
		t.Errorf("the condition is %+v, want it to tell of the hang", v.Condition)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, pool.See(ctx, configs, pool.Options{Mounts: mounts, HangAfter: time.Hour})[0].Err, context.Canceled)
	release()
}

func TestViewOfReadOnlyPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		must(t, os.Mkdir(b.path("disk"), 0o755))
		disk(t, b)
		b.start(twoPools)
		b.create("pvc-1", mib)
		must(t, syscall.Mount("", b.path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		v := b.see(twoPools)
		if v.Available != 0 || !strings.Contains(v.Condition.Message, "read-only") || v.Volumes[0].Condition != b.volume("pvc-1").Condition {
			t.Errorf("the pool is seen as %+v", v)
		}
		must(t, syscall.Unmount(b.path("disk"), syscall.MNT_DETACH))
		v = b.see(twoPools)
		if !strings.Contains(v.Condition.Message, "requireMount") || len(v.Volumes) > 0 {
			t.Errorf("a pool that is not mounted is seen as %+v", v)
		}
	})
}
