package inspect_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	// twoPools are one on a filesystem of its own, mounted at root/disk, and another.
	twoPools     = `[{"name":"legacy","path":"disk","requireMount":true},{"name":"other","path":"other"}]`
	localPool    = `[{"name":"local","path":"pool"}]`
	requiredPool = `[{"name":"local","path":"pool","enforcement":"required"}]`
)

// A harness is a node with pools, and a driver that serves them.
type harness struct {
	*pool.Set
	*pooltest.Node
	t *testing.T
}

func newHarness(t *testing.T, root string) *harness {
	return &harness{t: t, Node: pooltest.New(t, root)}
}

// inBubble runs a test on a node with one pool, named "local", at root/pool.
func inBubble(t *testing.T, test func(t *testing.T, h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.start("node-1", localPool)
		test(t, h)
	})
}

// withQuota is inBubble with a quota of each kind.
func withQuota(t *testing.T, test func(t *testing.T, h *harness)) {
	t.Helper()
	for _, kind := range []quota.Kind{quota.XFS, quota.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				h.Quota = &quotatest.Fake{As: kind}
				h.start("node-1", requiredPool)
				test(t, h)
			})
		})
	}
}

func (h *harness) start(node, datadir string) {
	h.t.Helper()
	h.Set = h.Start(h.Configs(datadir), h.Options(node))
	must.Succeed(h.t, h.Wait(h.t.Context()))
	synctest.Wait()
}

// later lets time pass, so that pools are checked again.
func (h *harness) later(d time.Duration) {
	time.Sleep(d) // the bubble's time
	synctest.Wait()
}

func (h *harness) create(name string, bytes int64) { h.createAs(volume.ModeMount, name, bytes) }

func (h *harness) createAs(mode volume.Mode, name string, bytes int64) {
	h.t.Helper()
	must.Succeed(h.t, must.Err(h.Create(h.t.Context(), pool.Request{ID: pooltest.ID(h.t, name), Range: volume.Range{Required: bytes}, Mode: mode})))
}

func (h *harness) publish(mode volume.Mode, name, target string) {
	h.t.Helper()
	must.Succeed(h.t, h.Publications().Publish(h.t.Context(), pool.Publication{ID: pooltest.ID(h.t, name), Target: h.Target(target), Mode: mode, MultiNode: true}))
}

func (h *harness) open(name string) *dir.Dir {
	h.t.Helper()
	d := must.Value(dir.Open(h.Path("pool", name)))(h.t)
	h.t.Cleanup(func() { _ = d.Close() })
	return d
}

func (h *harness) write(name string, bytes int64) error { return h.Quota.Write(h.open(name), bytes) }

func (h *harness) carried(name string) quota.ID {
	h.t.Helper()
	id := must.Value(h.Quota.IDOf(h.open(name)))(h.t)
	return id
}

// condition is what the driver answers.
func (h *harness) condition(name string) health.Condition {
	h.t.Helper()
	v := must.Value(h.Volume(h.t.Context(), pooltest.ID(h.t, name)))(h.t)
	return v.Condition
}

// see inspects the first pool of a configuration, while the driver of the harness runs.
func (h *harness) see(datadir string) inspect.Pool { return h.seeAs("node-1", datadir) }

func (h *harness) seeAs(node, datadir string) inspect.Pool {
	h.t.Helper()
	o := h.Options(node)
	report := inspect.Run(h.t.Context(), h.Configs(datadir), inspect.Options{
		Node: o.Node, Mounts: h.Mounts, Devices: o.Devices, Dev: o.Dev,
		SystemPath: o.SystemPath, DetectQuota: o.DetectQuota, CountErrors: o.CountErrors,
	})
	return report.Pools[0]
}

// conditionOf is what inspect says of a volume.
func conditionOf(v inspect.Volume) health.Condition {
	return health.Condition{Abnormal: v.Abnormal, Message: v.Condition, Reason: health.Reason(v.Reason)}
}

func only(t *testing.T, p inspect.Pool) inspect.Volume {
	t.Helper()
	if len(p.Volumes) != 1 {
		t.Fatalf("the pool is seen as %+v, want one volume", p)
	}
	return p.Volumes[0]
}

// tree is all that can be seen of the files below a directory, but for the times of reading.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	must.Succeed(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		err = syscall.Lstat(path, &st)
		all[path] = fmt.Sprintf("inode %d, mode %o, %d links, owner %d:%d, %d bytes, modified %d, changed %d",
			st.Ino, st.Mode, st.Nlink, st.Uid, st.Gid, st.Size, st.Mtim.Nano(), st.Ctim.Nano())
		return err
	}))
	return all
}

func (h *harness) uid(name string) string {
	h.t.Helper()
	data := must.Value(os.ReadFile(h.Own("volumes", name+".json")))(h.t)
	var record struct{ UID string }
	must.Succeed(h.t, json.Unmarshal(data, &record))
	return record.UID
}

func TestInspect_agreesWithDriver(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", 10*mib)
		h.create("pvc-2", 20*mib)
		must.Succeed(t, h.write("pvc-1", 3*mib))
		h.publish(volume.ModeMount, "pvc-1", "a")
		must.Succeed(t, os.Mkdir(h.Path("pool", "by-hand"), 0o755))
		h.later(time.Minute)

		v := h.see(requiredPool)
		if v.Abnormal || v.Quota != string(h.Quota.Kind()) || v.UUID == "" || len(v.Volumes) != 3 {
			t.Errorf("the pool is seen as %+v, want it in order and enforced", v)
		}
		capacity := must.Value(h.Capacity(t.Context(), volume.PoolName{}, false))(t)
		if *v.PromisedBytes != 30*mib || *v.AvailableBytes != capacity {
			t.Errorf("%d bytes are seen as promised and %d as available, want %d and %d", *v.PromisedBytes, *v.AvailableBytes, 30*mib, capacity)
		}
		page, _ := h.List(t.Context(), volume.ID{}, 10)
		for i, listed := range page {
			seen := v.Volumes[i]
			if seen.ID != listed.ID.String() || seen.Mode != string(listed.Mode) || seen.Enforced != listed.Enforced || seen.Lost != listed.Lost ||
				conditionOf(seen) != listed.Condition || !slices.EqualFunc(seen.Nodes, listed.Nodes, func(a string, b volume.NodeID) bool { return a == b.String() }) ||
				seen.PromisedBytes != nil && *seen.PromisedBytes != listed.Bytes {
				t.Errorf("seen as %+v, listed as %+v", seen, listed)
			}
		}
		first := v.Volumes[1]
		if *first.LimitBytes != 10*mib || *first.UsedBytes < 3*mib || *first.UsedBytes > 4*mib || first.QuotaID != uint64(h.carried("pvc-1")) {
			t.Errorf("the volume is seen as %+v, want its limit, use and id", first)
		}
		if len(first.Published) != 1 || first.Published[0].Path != h.Path("pods", "a") {
			t.Errorf("the volume is seen as published at %+v", first.Published)
		}
		if hand := v.Volumes[0]; hand.Recorded || hand.Abnormal || !strings.Contains(hand.Condition, "has no record") {
			t.Errorf("a directory without a record is seen as %+v", hand)
		}
	})
}

// wrong are ways in which a volume pvc-1 is not in order.
var wrong = map[string]func(t *testing.T, h *harness){
	"its directory is lost": func(t *testing.T, h *harness) {
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Path("aside")))
	},
	"its limit is another": func(t *testing.T, h *harness) {
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: 3 * mib}))
	},
	"its record is torn": func(t *testing.T, h *harness) {
		must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), []byte(`{"version":1,"id":"pvc`), 0o600))
	},
	"its record is of a newer version": func(t *testing.T, h *harness) {
		must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), []byte(`{"version":7}`), 0o600))
	},
	"it is full": func(t *testing.T, h *harness) { must.Succeed(t, h.write("pvc-1", mib)) },
}

func TestInspect_conditionIsThatOfDriver(t *testing.T) {
	for name, spoil := range wrong {
		t.Run(name, func(t *testing.T) {
			withQuota(t, func(t *testing.T, h *harness) {
				h.create("pvc-1", mib)
				h.create("pvc-2", mib)
				spoil(t, h)
				v := h.see(localPool)
				if len(v.Volumes) != 2 || !v.Volumes[0].Abnormal || v.Volumes[1].Abnormal {
					t.Fatalf("the pool is seen as %+v, want pvc-1 abnormal and pvc-2 in order", v)
				}
				if diff := cmp.Diff(h.condition("pvc-1"), conditionOf(v.Volumes[0])); diff != "" {
					t.Errorf("the driver says something else (-driver +view):\n%s", diff)
				}
			})
		})
	}
}

func TestInspect_errorsOfTheFilesystem(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		h.Errors.Store(3)
		h.later(10 * time.Second) // the next check
		p := h.see(localPool)
		if p.Reason != string(health.FilesystemErrors) || conditionOf(only(t, p)) != h.condition("pvc-1") {
			t.Errorf("seen as %+v, want the condition of pool and volume to report the errors", p)
		}
	})
}

func TestInspect_unreadablePool(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, h *harness)
		says string
	}{
		"a path that does not exist": {func(*testing.T, *harness) {}, "no such file"},
		"a bare directory":           {func(t *testing.T, h *harness) { must.Succeed(t, os.Mkdir(h.Path("pool"), 0o755)) }, "no driver has served it yet"},
		"a layout without its format": {func(t *testing.T, h *harness) {
			must.Succeed(t, os.MkdirAll(h.Own("volumes"), 0o700))
		}, "no driver has served it yet"},
		"an unknown format": {func(t *testing.T, h *harness) {
			must.Succeed(t, os.MkdirAll(h.Own("volumes"), 0o700))
			must.Succeed(t, os.WriteFile(h.Own("format"), []byte(`{"version":9}`), 0o600))
		}, "has version 9"},
		"a torn format": {func(t *testing.T, h *harness) {
			must.Succeed(t, os.MkdirAll(h.Own("volumes"), 0o700))
			must.Succeed(t, os.WriteFile(h.Own("format"), []byte(`{"ver`), 0o600))
		}, "is unreadable"},
		"a link in the place of the layout": {func(t *testing.T, h *harness) {
			must.Succeed(t, os.MkdirAll(h.Path("pool"), 0o700))
			must.Succeed(t, os.Symlink("/", h.Own()))
		}, "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				c.make(t, h)
				before := tree(t, h.Root)
				v := h.see(localPool)
				if v.Readable || !health.Reason(v.Reason).OfPool() || !strings.Contains(v.Condition, c.says) {
					t.Errorf("the condition is %+v, want it to say %q", v.Condition, c.says)
				}
				if diff := cmp.Diff(before, tree(t, h.Root)); diff != "" {
					t.Errorf("inspecting changed (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestInspect_changesNothing(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		h.createAs(volume.ModeBlock, "disk-1", 4*mib)
		h.publish(volume.ModeBlock, "disk-1", "d")
		h.create("pvc-2", mib)
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-2"), h.Path("aside")))
		must.Succeed(t, h.Close(t.Context())) // so that nothing else does
		must.Succeed(t, os.RemoveAll(h.Own("trash", "node-1")))
		must.Succeed(t, os.MkdirAll(h.Own("creating", "node-1", "pvc-9"), 0o700))
		must.Succeed(t, os.MkdirAll(h.Own("trash", "node-2", "pvc-8.abc"), 0o700))
		must.Succeed(t, os.WriteFile(h.Own("volumes", ".new-pvc-7.json"), []byte("{"), 0o600))
		before := tree(t, h.Root)
		if v := h.see(localPool); health.Reason(v.Reason).OfPool() || len(v.Volumes) != 3 || len(v.Creating) != 1 || len(v.Trash) != 1 {
			t.Errorf("the pool is seen as %+v, want three volumes, and one entry in creating/ and in trash/", v)
		}
		if diff := cmp.Diff(before, tree(t, h.Root)); diff != "" {
			t.Errorf("inspecting changed (-before +after):\n%s", diff)
		}
	})
}

// What another process is about to make or to remove has its record before and after
// its directory.
func TestInspect_volumeBeingMadeOrRemoved(t *testing.T) {
	for name, half := range map[string]func(t *testing.T, h *harness){
		"being made": func(t *testing.T, h *harness) {
			must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Own("creating", "node-1", "pvc-1")))
		},
		"being made by another node": func(t *testing.T, h *harness) {
			must.Succeed(t, os.MkdirAll(h.Own("creating", "node-2"), 0o700))
			must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Own("creating", "node-2", "pvc-1")))
		},
		"being removed": func(t *testing.T, h *harness) {
			must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Own("trash", "node-1", "pvc-1."+h.uid("pvc-1"))))
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, h *harness) {
				h.create("pvc-1", mib)
				must.Succeed(t, h.Close(t.Context()))
				half(t, h)
				v := h.see(localPool)
				if len(v.Volumes) > 0 || len(v.Creating)+len(v.Trash) != 1 {
					t.Fatalf("the pool is seen as %+v, want no volume and one leftover", v)
				}
				for _, l := range append(v.Creating, v.Trash...) {
					if l.Abnormal {
						t.Errorf("%+v is seen as abnormal", l)
					}
				}
				// After so long it is not about to happen any more. The bubble's clock
				// begins before the times of files.
				time.Sleep(time.Until(changed(t, h.Own())) + 25*time.Hour + time.Minute)
				v = h.see(localPool)
				for _, l := range append(v.Creating, v.Trash...) {
					if !l.Abnormal || !strings.HasPrefix(l.Condition, "unchanged for 25h") {
						t.Errorf("%+v is not seen as abnormal", l)
					}
				}
			})
		})
	}
}

// A copy of a large volume takes longer than any call.
func TestInspect_longCopy(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, os.MkdirAll(h.Own("creating", "node-1", "~daily", "a", "b"), 0o700))
		time.Sleep(time.Until(changed(t, h.Own("creating", "node-1", "~daily"))) + time.Hour)
		if l := h.see(localPool).Creating; len(l) != 1 || !l[0].Abnormal {
			t.Errorf("a copy that has stopped is seen as %+v, want it to be abnormal", l)
		}
		// The clock that gives files their ctime is not that of the bubble: see from there.
		must.Succeed(t, os.WriteFile(h.Own("creating", "node-1", "~daily", "a", "b", "file"), []byte("x"), 0o600))
		was := changed(t, h.Own("creating", "node-1", "~daily", "a", "b", "file"))
		if l := h.see(localPool).Creating; len(l) != 1 || l[0].Changed.Before(was) {
			t.Errorf("a copy that goes on is seen as %+v, want it to have changed at %v", l, was)
		}
	})
}

// Snapshots are reported, and not as volumes.
func TestInspect_snapshots(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		h.createAs(volume.ModeBlock, "disk-1", 4*mib)
		made := make(map[string]pool.Snapshot)
		for name, of := range map[string]string{"daily": "pvc-1", "image": "disk-1", "lost": "pvc-1", "torn": "pvc-1", "short": "disk-1"} {
			id, err := volume.ParseSnapshot(name)
			must.Succeed(t, err)
			made[name], err = h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: id, Source: pooltest.ID(h.t, of)})
			must.Succeed(t, err)
		}
		must.Succeed(t, os.Rename(h.Own("snapshots", "~lost"), h.Path("aside")))
		must.Succeed(t, os.WriteFile(h.Own("volumes", "~torn.json"), []byte("{"), 0o600))
		must.Succeed(t, os.Truncate(h.Own("snapshots", "~short", "disk.img"), mib))
		p := h.see(localPool)
		if len(p.Volumes) != 2 || len(p.Snapshots) != 5 {
			t.Fatalf("%d volumes and %d snapshots are seen, want 2 and 5", len(p.Volumes), len(p.Snapshots))
		}
		for i, want := range []struct{ name, reason, source, mode string }{
			{"daily", "", "pvc-1", "mount"}, {"image", "", "disk-1", "block"}, {"lost", "DirectoryMissing", "pvc-1", "mount"},
			{"short", "FileShort", "disk-1", "block"}, {"torn", "RecordUnreadable", "", ""},
		} {
			s := p.Snapshots[i]
			if s.Name != want.name || s.Reason != want.reason || s.Abnormal != (want.reason != "") || s.Source != want.source || s.Mode != want.mode || s.Lost != (want.name == "lost") {
				t.Errorf("a snapshot is seen as %+v, want %+v", s, want)
			}
			if m := made[want.name]; want.source != "" && (*s.SizeBytes != m.Origin.Bytes || *s.HeldBytes != m.Promised || s.Method != string(m.Origin.Method) ||
				s.Consistency != string(m.Origin.Consistency) || !s.Cut.Equal(m.Origin.Cut) || *s.TookMillis != m.Origin.TookMillis || *s.StallMillis != m.Origin.StallMillis) {
				t.Errorf("a snapshot is seen as %+v, want %+v", s, m)
			}
		}
	})
}

// Snapshots of the upstream KubeVirt driver have no records.
func TestInspect_upstreamSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const inside = `[{"name":"local","path":"pool","snapshotPath":"pool/snapshots","snapshotProvider":"reflink"}]`
		h := newHarness(t, t.TempDir())
		h.start("node-1", inside)
		h.create("pvc-1", mib)
		if p := h.see(inside); len(p.Snapshots) > 0 || p.SnapshotsError != "" {
			t.Errorf("before the upstream driver made one the pool is seen as %+v", p)
		}
		for _, name := range []string{"snapshot-1/data", "snapshot-1/pvc-1", "half/data"} {
			must.Succeed(t, os.MkdirAll(h.Path("pool", "snapshots", name), 0o755))
		}
		p := h.see(inside)
		if len(p.Snapshots) != 2 || len(p.Volumes) != 1 {
			t.Fatalf("the pool is seen as %+v, want two snapshots and a volume", p)
		}
		if s := p.Snapshots[0]; !s.Abnormal || !s.Upstream || s.Name != "half" || !strings.Contains(s.Condition, "did not finish") {
			t.Errorf("half of a snapshot is seen as %+v", s)
		}
		if s := p.Snapshots[1]; s.Abnormal || !s.Upstream || s.Name != "snapshot-1" || s.Source != "pvc-1" || s.Consistency != "unverified" || s.HeldBytes != nil || s.SizeBytes != nil {
			t.Errorf("a snapshot is seen as %+v", s)
		}
		if p := h.see(`[{"name":"local","path":"pool","snapshotPath":"away"}]`); !strings.Contains(p.SnapshotsError, "snapshotPath") {
			t.Errorf("without its snapshotPath the pool is seen as %+v", p)
		}
	})
}

func changed(t *testing.T, path string) time.Time {
	t.Helper()
	var st syscall.Stat_t
	must.Succeed(t, syscall.Stat(path, &st))
	return time.Unix(st.Ctim.Unix())
}

// A large volume can take hours to erase, and those behind it are in order.
func TestInspect_trashThatWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		for _, name := range []string{"pvc-1.abc", "pvc-2.abc"} {
			must.Succeed(t, os.MkdirAll(h.Own("trash", "node-1", name, "data"), 0o700))
		}
		wantTrash := func(abnormal bool, says ...string) {
			t.Helper()
			seen := h.see(localPool).Trash
			if len(seen) != len(says) {
				t.Fatalf("%d pieces of trash are seen, want %d", len(seen), len(says))
			}
			for i, l := range seen {
				if l.Abnormal != abnormal || !strings.HasPrefix(l.Condition, says[i]) {
					t.Errorf("%s is seen as %+v, want it to be %q", l.Name, l.Condition, says[i])
				}
			}
		}
		// The bubble's clock begins before the times of files.
		time.Sleep(time.Until(changed(t, h.Own("trash", "node-1"))) + time.Minute)
		wantTrash(false, "being erased", "being erased")
		time.Sleep(2 * time.Hour)
		wantTrash(true, "unchanged for 2h", "unchanged for 2h")
		now := time.Now()
		must.Succeed(t, os.Chtimes(h.Own("trash", "node-1"), now, now)) // as when a piece is gone
		wantTrash(false, "waits to be erased", "waits to be erased")
		time.Sleep(2 * time.Hour)
		wantTrash(true, "unchanged for 4h", "unchanged for 4h")
	})
}

// There a node's directory changes because the node is alive.
func TestInspect_stuckTrashOfSharedPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		h := newHarness(t, t.TempDir())
		h.start("node-1", shared)
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, os.Mkdir(h.Own("trash", "node-1", "pvc-1.abc"), 0o700))
		time.Sleep(time.Until(changed(t, h.Own("trash", "node-1"))) + 2*time.Hour)
		now := time.Now()
		must.Succeed(t, os.Chtimes(h.Own("trash", "node-1"), now, now))
		if seen := h.seeAs("node-1", shared).Trash; len(seen) != 1 || !seen[0].Abnormal {
			t.Errorf("the trash is seen as %+v, want it to be abnormal", seen)
		}
	})
}

// A removal that was done under another uid is none of this volume.
func TestInspect_lostVolumeBesideTrashOfEarlierOne(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Own("trash", "node-1", "pvc-1.ofanearlierone")))
		if v := only(t, h.see(localPool)); !v.Lost || !v.Abnormal {
			t.Errorf("the volume is seen as %+v, want it lost", v)
		}
	})
}

func TestInspect_blockVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createAs(volume.ModeBlock, "disk-1", 4*mib)
		h.publish(volume.ModeBlock, "disk-1", "d")
		attached := must.Value(h.Loops.Attached())(t)
		if len(attached) != 1 {
			t.Fatalf("%d devices are attached, want 1", len(attached))
		}
		device := attached[0]
		v := only(t, h.see(localPool))
		if v.Abnormal || *v.FileBytes != 4*mib || *v.AllocatedBytes < 4*mib {
			t.Errorf("the volume is seen as %+v, want it in order, with its file", v)
		}
		if len(v.Devices) != 1 || v.Devices[0].Name != device.Name || len(v.Published) != 1 || v.Published[0].Path != h.Path("pods", "d") {
			t.Errorf("the volume is seen as %+v, want it published as %s", v, device.Name)
		}
		if len(v.Nodes) != 1 || v.Nodes[0] != "node-1" {
			t.Errorf("the volume is seen on the nodes %v", v.Nodes)
		}
		must.Succeed(t, os.Truncate(h.Path("pool", "disk-1", "disk.img"), mib))
		if v := only(t, h.see(localPool)); conditionOf(v) != h.condition("disk-1") || !v.Abnormal {
			t.Errorf("a file that is too small is seen as %+v", v.Condition)
		}
	})
}

// The driver makes limit and file larger before the record.
func TestInspect_growingBlockVolume(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.createAs(volume.ModeBlock, "disk-1", 4*mib)
		must.Succeed(t, h.Quota.Limit(h.open("disk-1"), h.carried("disk-1"), quota.Limit{Bytes: 64 * mib}))
		must.Succeed(t, os.Truncate(h.Path("pool", "disk-1", "disk.img"), 8*mib))
		if v := only(t, h.see(localPool)); v.Abnormal {
			t.Errorf("the volume is seen as %+v", v.Condition)
		}
	})
}

// An expansion writes the record first. What is so for a moment only is no news.
func TestInspect_readsAbnormalVolumeAgain(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		made := must.Value(h.Quota.Usage(h.open("pvc-1"), h.carried("pvc-1")))(t)
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: mib / 2}))
		done := make(chan inspect.Pool, 1)
		go func() { done <- h.see(localPool) }()
		synctest.Wait() // it has checked once, and waits
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), made.Limit))
		if v := only(t, <-done); v.Abnormal {
			t.Errorf("the volume is seen as %+v", v.Condition)
		}
	})
}

// A slow disk can hold an expansion up between its record and its limit.
func TestInspect_expansionUnderWay(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: mib / 2}))
		// The bubble's clock begins before the times of files.
		time.Sleep(time.Until(changed(t, h.Own("volumes", "pvc-1.json"))) + 10*time.Second)
		if v := only(t, h.see(localPool)); v.Abnormal {
			t.Errorf("10 s after its record was written the volume is seen as %+v", v.Condition)
		}
		time.Sleep(time.Minute)
		if v := only(t, h.see(localPool)); !v.Abnormal {
			t.Errorf("a minute later the volume is seen as %+v", v.Condition)
		}
	})
}

func TestInspect_sharedPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		one := newHarness(t, t.TempDir())
		one.start("node-1", shared)
		two := &harness{t: t, Node: one.Beside()}
		two.start("node-2", shared)
		one.create("pvc-1", mib)
		one.publish(volume.ModeMount, "pvc-1", "a")
		two.publish(volume.ModeMount, "pvc-1", "b")
		two.create("pvc-2", mib)
		must.Succeed(t, two.Delete(t.Context(), pooltest.ID(t, "pvc-2")))
		for name, c := range map[string]struct {
			seen inspect.Pool
			at   string
		}{
			"node-1": {one.seeAs("node-1", shared), "a"},
			"node-2": {two.seeAs("node-2", shared), "b"},
		} {
			v := only(t, c.seen)
			if len(v.Nodes) != 2 || v.Nodes[0] != name || len(v.Published) != 1 || filepath.Base(v.Published[0].Path) != c.at {
				t.Errorf("%s sees %+v, want both nodes, itself first, and its own mount", name, v)
			}
		}
	})
}

func TestInspect_poolThatHangs(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	release := testenv.Hang(t, filepath.Join(root, "pool"))
	configs := must.Value(poolconfig.Parse(localPool, root))(t)
	mounts := &bindtest.Fake{}
	defer func() { must.Succeed(t, mounts.Close()) }()
	v := inspect.Run(t.Context(), configs, inspect.Options{Devices: &looptest.Fake{}, Mounts: mounts, HangAfter: time.Second}).Pools[0]
	if v.Readable || v.Reason != string(health.PoolHangs) || !strings.Contains(v.Condition, "no answer for 1s") {
		t.Errorf("the condition is %+v, want it to report the hang", v.Condition)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	v = inspect.Run(ctx, configs, inspect.Options{Devices: &looptest.Fake{}, Mounts: mounts, HangAfter: time.Hour}).Pools[0]
	if v.Readable || !strings.Contains(v.Condition, context.Canceled.Error()) {
		t.Errorf("the condition is %+v, want it to say that the caller ended", v.Condition)
	}
	release()
}

func TestInspect_readOnlyPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		must.Succeed(t, syscall.Mount("tmpfs", h.Path("disk"), "tmpfs", 0, "size=64m"))
		t.Cleanup(func() { _ = syscall.Unmount(h.Path("disk"), syscall.MNT_DETACH) })
		h.start("node-1", twoPools)
		h.create("pvc-1", mib)
		must.Succeed(t, syscall.Mount("", h.Path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		v := h.see(twoPools)
		if *v.AvailableBytes != 0 || !strings.Contains(v.Condition, "read-only") || conditionOf(v.Volumes[0]) != h.condition("pvc-1") {
			t.Errorf("the pool is seen as %+v", v)
		}
		must.Succeed(t, syscall.Unmount(h.Path("disk"), syscall.MNT_DETACH))
		v = h.see(twoPools)
		if !strings.Contains(v.Condition, "requireMount") || len(v.Volumes) > 0 {
			t.Errorf("a pool that is not mounted is seen as %+v", v)
		}
	})
}

// What is set aside for inodes makes the sum of promises and capacity whole.
func TestInspect_inodesBesideQuota(t *testing.T) {
	withQuota(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		want := map[quota.Kind]int64{quota.XFS: 1025 * 544, quota.Btrfs: 0}[h.Quota.Kind()]
		if got := h.see(localPool); got.SetAsideBytes == nil || *got.SetAsideBytes != want || *got.PromisedBytes != 16*mib {
			t.Errorf("the pool is seen as %+v, want %d bytes for inodes and 16 MiB promised", got, want)
		}
	})
}
