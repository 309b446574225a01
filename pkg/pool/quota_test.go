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
func withQuota(t *testing.T, options string, test func(t *testing.T, b *bench)) {
	t.Helper()
	for _, kind := range []quota.Kind{quota.XFS, quota.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir())
				b.Quota = &quotatest.Fake{As: kind}
				b.start(`[{"name":"local","path":"pool","enforcement":"required"` + options + `}]`)
				test(t, b)
			})
		})
	}
}

func (b *bench) open(name string) *dir.Dir {
	b.t.Helper()
	d, err := dir.Open(b.Path("pool", name))
	must.Succeed(b.t, err)
	b.t.Cleanup(func() { _ = d.Close() })
	return d
}

func (b *bench) write(name string, bytes int64) error {
	b.t.Helper()
	return b.Quota.Write(b.open(name), bytes)
}

func TestVolumeWithoutLimitIsReported(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.restart(local)
		v, err := b.Volume(t.Context(), id(t, "pvc-1"))
		must.Succeed(t, err)
		if v.Enforced || v.Condition.Abnormal || !strings.Contains(v.Condition.Message, "not enforced") {
			t.Errorf("volume %+v, want it in order and not enforced", v)
		}
		b.create("pvc-2", mib)
		b.delete("pvc-1")
		b.wantClean()
	})
}

func TestForeignUseWithQuotas(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(`[{"name":"local","path":"pool","bytesPerInode":0}]`)
		b.create("pvc-1", 100*mib)
		// Others write while the volume is empty: without counts that would be taken
		// for the volume's own.
		must.Succeed(t, os.WriteFile(b.Path("foreign"), make([]byte, 50*mib), 0o644))
		b.later(time.Minute)
		if got := b.capacity(); got > 106*mib || got < 104*mib {
			t.Errorf("capacity %d, want about 106 MiB: 256 less 100 promised and 50 foreign", got)
		}
		// What the volume writes is inside its promise.
		must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", "data"), make([]byte, 60*mib), 0o644))
		must.Succeed(t, b.write("pvc-1", 60*mib))
		b.later(time.Minute)
		if got := b.capacity(); got > 106*mib || got < 104*mib {
			t.Errorf("capacity %d after the volume wrote, want about 106 MiB", got)
		}
	})
}

func TestExpandDoesNotOversell(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(local)
		b.create("pvc-1", 100*mib)
		b.create("pvc-2", 100*mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		_, err := b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 200 * mib})
		wantError(t, err, volume.ErrCannotGrow)
		b.wantClean()
		_, err = b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 140 * mib})
		must.Succeed(t, err)
		b.wantClean()
	})
}

func TestPoolsOnOneFilesystemShareNoProjectID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(`[{"name":"one","path":"one"},{"name":"two","path":"two"}]`)
		var calls sync.WaitGroup
		for i := range 60 {
			name, err := volume.ParsePoolName([]string{"one", "two"}[i%2])
			must.Succeed(t, err)
			calls.Go(func() {
				request := pool.Request{ID: id(t, fmt.Sprintf("pvc-%d", i)), Pool: name, Range: volume.Range{Required: mib}}
				if _, err := b.Create(t.Context(), request); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		given := make(map[quota.ID]string)
		for i := range 60 {
			path := b.Path([]string{"one", "two"}[i%2], fmt.Sprintf("pvc-%d", i))
			d, err := dir.Open(path)
			must.Succeed(t, err)
			carried, err := b.Quota.IDOf(d)
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
		one := newBench(t, t.TempDir())
		one.Quota = &quotatest.Fake{As: quota.XFS}
		one.start(shared)
		two := &bench{t: t, Node: one.Node}
		two.startNode("node-2", shared)
		one.create("pvc-1", 10*mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		var calls sync.WaitGroup
		for i, b := range []*bench{one, two} {
			calls.Go(func() {
				_, err := b.Expand(t.Context(), id(t, "pvc-1"), one.Target("a"), "", volume.Range{Required: int64(20+10*i) * mib})
				if err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		v, err := one.Volume(t.Context(), id(t, "pvc-1"))
		must.Succeed(t, err)
		if v.Bytes != 30*mib || v.Condition.Abnormal {
			t.Errorf("volume %+v, want 30 MiB in order", v)
		}
	})
}

func TestTrashWithProjectIDOfOtherVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(local)
		b.create("pvc-1", 10*mib)
		b.create("pvc-2", 10*mib)
		// The volume is put aside by hand, and that copy is deleted.
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Path("pool", "pvc-1-old")))
		carried, err := b.Quota.IDOf(b.open("pvc-1-old"))
		must.Succeed(t, err)
		b.delete("pvc-1-old")
		b.settled()
		usage, err := b.Quota.Usage(b.open("pvc-2"), carried)
		must.Succeed(t, err)
		if usage.Limit.Bytes != 10*mib {
			t.Errorf("the limit of the id that a record still has is %d, want 10 MiB", usage.Limit.Bytes)
		}
		b.create("pvc-3", 10*mib)
		if id, err := b.Quota.IDOf(b.open("pvc-3")); err != nil || id == carried {
			t.Errorf("the id %d was given again, %v", id, err)
		}
	})
}
