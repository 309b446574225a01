package pool_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// withQuota runs a test on a node whose pool enforces sizes.
func withQuota(t *testing.T, options string, test func(t *testing.T, b *harness)) {
	t.Helper()
	for _, kind := range []quota.Kind{quota.XFS, quota.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				h.Quota = &quotatest.Fake{As: kind}
				h.start(`[{"name":"local","path":"pool","enforcement":"required"` + options + `}]`)
				test(t, h)
			})
		})
	}
}

func (h *harness) open(name string) *dir.Dir {
	h.t.Helper()
	d := must.Value(dir.Open(h.Path("pool", name)))(h.t)
	h.t.Cleanup(func() { _ = d.Close() })
	return d
}

func (h *harness) write(name string, bytes int64) error {
	h.t.Helper()
	return h.Quota.Write(h.open(name), bytes)
}

func TestVolumeWithoutLimitIsReported(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", 10*mib)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.restart(local)
		v := must.Value(h.Volume(t.Context(), id(t, "pvc-1")))(t)
		if v.Enforced || v.Condition.Abnormal || !strings.Contains(v.Condition.Message, "not enforced") {
			t.Errorf("volume %+v, want it in order and not enforced", v)
		}
		h.create("pvc-2", mib)
		h.delete("pvc-1")
		h.wantClean()
	})
}

func TestForeignUseWithQuotas(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(`[{"name":"local","path":"pool","bytesPerInode":0}]`)
		h.create("pvc-1", 100*mib)
		// Others write while the volume is empty: without counts that would be taken
		// for the volume's own.
		must.Succeed(t, os.WriteFile(h.Path("foreign"), make([]byte, 50*mib), 0o644))
		h.later(time.Minute)
		if got := h.capacity(); got > 106*mib || got < 104*mib {
			t.Errorf("capacity %d, want about 106 MiB: 256 less 100 promised and 50 foreign", got)
		}
		// What the volume writes is inside its promise.
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 60*mib), 0o644))
		must.Succeed(t, h.write("pvc-1", 60*mib))
		h.later(time.Minute)
		if got := h.capacity(); got > 106*mib || got < 104*mib {
			t.Errorf("capacity %d after the volume wrote, want about 106 MiB", got)
		}
	})
}

func TestExpandDoesNotOversell(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(local)
		h.create("pvc-1", 100*mib)
		h.create("pvc-2", 100*mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		_, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 200 * mib})
		wantError(t, err, volume.ErrCannotGrow)
		h.wantClean()
		_, err = h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 140 * mib})
		must.Succeed(t, err)
		h.wantClean()
	})
}

func TestPoolsOnOneFilesystemShareNoProjectID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(`[{"name":"one","path":"one"},{"name":"two","path":"two"}]`)
		var calls sync.WaitGroup
		for i := range 60 {
			name := must.Value(volume.ParsePoolName([]string{"one", "two"}[i%2]))(t)
			calls.Go(func() {
				request := pool.Request{ID: id(t, fmt.Sprintf("pvc-%d", i)), Pool: name, Range: volume.Range{Required: mib}}
				if _, err := h.Create(t.Context(), request); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		given := make(map[quota.ID]string)
		for i := range 60 {
			path := h.Path([]string{"one", "two"}[i%2], fmt.Sprintf("pvc-%d", i))
			d, err := dir.Open(path)
			must.Succeed(t, err)
			carried, err := h.Quota.IDOf(d)
			must.Succeed(t, errors.Join(err, d.Close()))
			if other, twice := given[carried]; twice {
				t.Errorf("%s and %s are both counted by %d", other, path, carried)
			}
			given[carried] = path
		}
	})
}

func TestLateNodeDoesNotShrinkExpandedVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		one := newHarness(t, t.TempDir())
		one.Quota = &quotatest.Fake{As: quota.XFS}
		one.start(shared)
		two := &harness{t: t, Node: one.Node}
		two.startNode("node-2", shared)
		one.create("pvc-1", 10*mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		var calls sync.WaitGroup
		for i, b := range []*harness{one, two} {
			calls.Go(func() {
				_, err := b.Expand(t.Context(), id(t, "pvc-1"), one.Target("a"), "", volume.Range{Required: int64(20+10*i) * mib})
				if err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		v := must.Value(one.Volume(t.Context(), id(t, "pvc-1")))(t)
		if v.Bytes != 30*mib || v.Condition.Abnormal {
			t.Errorf("volume %+v, want 30 MiB in order", v)
		}
	})
}

func TestTrashWithProjectIDOfOtherVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(local)
		h.create("pvc-1", 10*mib)
		h.create("pvc-2", 10*mib)
		// The volume is put aside by hand, and that copy is deleted.
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Path("pool", "pvc-1-old")))
		carried, err := h.Quota.IDOf(h.open("pvc-1-old"))
		must.Succeed(t, err)
		h.delete("pvc-1-old")
		h.settled()
		usage, err := h.Quota.Usage(h.open("pvc-2"), carried)
		must.Succeed(t, err)
		if usage.Limit.Bytes != 10*mib {
			t.Errorf("the limit of the id that a record still has is %d, want 10 MiB", usage.Limit.Bytes)
		}
		h.create("pvc-3", 10*mib)
		if id, err := h.Quota.IDOf(h.open("pvc-3")); err != nil || id == carried {
			t.Errorf("the id %d was given again, %v", id, err)
		}
	})
}

// A directory that came from a backup is not counted as its record says: it does not grow, and its pods start all the same, since kubelet mounts
// a volume at its old size only after ErrCannotGrow.
func TestVolumeFromBackupDoesNotGrow(t *testing.T) {
	for _, kind := range []quota.Kind{quota.XFS, quota.Ext4, quota.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			onQuota(t, kind, local, func(t *testing.T, h *harness) {
				h.create("pvc-1", 16*mib)
				must.Succeed(t, h.Quota.Drop(h.open("pvc-1")), h.publish("pvc-1", "a"))
				grow := func(bytes int64) error {
					return must.Err(h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: bytes}))
				}
				for range 2 {
					wantError(t, grow(32*mib), volume.ErrCannotGrow)
				}
				must.Succeed(t, grow(16*mib))
				if got := h.volume("pvc-1").Bytes; got != 16*mib {
					t.Errorf("it has %d MiB, want 16", got/mib)
				}
			})
		})
	}
}
