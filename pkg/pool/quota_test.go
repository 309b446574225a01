package pool_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
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

func TestVolumeSizeIsEnforced(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		v := b.create("pvc-1", 10*mib)
		if !v.Enforced {
			t.Error("the volume is not said to be enforced")
		}
		must.Succeed(t, b.write("pvc-1", 9*mib))
		if err := b.write("pvc-1", 2*mib); !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			t.Errorf("writing beyond the promise: %v", err)
		}
		b.create("pvc-2", 10*mib)
		must.Succeed(t, b.write("pvc-2", 9*mib))
	})
}

func TestStatsWithQuota(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, b.write("pvc-1", 4*mib))
		stats, err := b.Stats(t.Context(), id(t, "pvc-1"), b.Target("a"))
		must.Succeed(t, err)
		s := stats.Space
		if s.SizeBytes != 10*mib || s.UsedBytes < 4*mib || s.UsedBytes > 5*mib || s.FreeBytes != s.SizeBytes-s.UsedBytes {
			t.Errorf("space %+v, want 4 MiB of 10 in use", s)
		}
		if stats.Condition.Abnormal || strings.Contains(stats.Condition.Message, "not enforced") {
			t.Errorf("condition %+v, want it in order", stats.Condition)
		}
	})
}

func TestInodeLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.Ext4}
		b.start(`[{"name":"local","path":"pool","bytesPerInode":16384}]`)
		b.create("pvc-1", mib)
		id, err := b.Quota.IDOf(b.open("pvc-1"))
		must.Succeed(t, err)
		usage, err := b.Quota.Usage(b.open("pvc-1"), id)
		must.Succeed(t, err)
		if want := (quota.Limit{Bytes: mib, Inodes: 65}); usage.Limit != want {
			t.Errorf("limit %+v, want %+v", usage.Limit, want)
		}
	})
}

func TestProjectIDIsReleasedAfterErase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(local)
		ids := make(map[quota.ID]bool)
		for i := range 20 {
			name := fmt.Sprintf("pvc-%d", i)
			b.create(name, mib)
			id, err := b.Quota.IDOf(b.open(name))
			must.Succeed(t, err)
			ids[id] = true
			if i%2 == 0 {
				b.delete(name)
				b.settled()
			}
		}
		// Ten live on. Each id that came back was given to the next volume.
		if len(ids) != 10 {
			t.Errorf("%d ids were used, want 10", len(ids))
		}
		b.wantClean()
	})
}

func TestLostLimitsAreRestoredAtStart(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		d := b.open("pvc-1")
		carried, err := b.Quota.IDOf(d)
		must.Succeed(t, err)
		must.Succeed(t, b.Quota.Limit(d, carried, quota.Limit{Bytes: 20 * mib}))
		v, err := b.Volume(t.Context(), id(t, "pvc-1"))
		must.Succeed(t, err)
		if !v.Condition.Abnormal || !strings.Contains(v.Condition.Message, "limit") {
			t.Errorf("condition %+v, want it to report the limit", v.Condition)
		}
		b.restart(local)
		usage, err := b.Quota.Usage(d, carried)
		must.Succeed(t, err)
		if usage.Limit.Bytes != 10*mib {
			t.Errorf("the limit is %d after a restart, want 10 MiB", usage.Limit.Bytes)
		}
		if v, err := b.Volume(t.Context(), id(t, "pvc-1")); err != nil || v.Condition.Abnormal {
			t.Errorf("condition %+v, %v; want it in order", v.Condition, err)
		}
	})
}

// What a backup brings back carries no project id, and is no subvolume: nothing is wrong
// with the disk.
func TestVolumeRestoredFromBackupHasNoLimit(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Path("pool", ".old")))
		must.Succeed(t, os.Mkdir(b.Path("pool", "pvc-1"), 0o777))
		for range 2 {
			if c := b.volume("pvc-1").Condition; c.Reason != health.LimitDiffers {
				t.Errorf("the condition is %+v, want that of a limit that is missing", c)
			}
			if c := b.seen(local); c.Reason != health.LimitDiffers {
				t.Errorf("from outside the condition is %+v, want that of a limit that is missing", c)
			}
			must.Succeed(t, b.publish("pvc-1", "a"))
			stats, err := b.Stats(t.Context(), id(t, "pvc-1"), b.Target("a"))
			must.Succeed(t, err)
			if stats.Condition.Reason != health.LimitDiffers {
				t.Errorf("the statistics have the condition %+v, want that of a limit that is missing", stats.Condition)
			}
			b.restart(local)
		}
	})
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

func TestMissingRequiredQuotasAreExplained(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.restart(`[{"name":"local","path":"pool","enforcement":"required"}]`)
		if err := b.Status()[0].Err; !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), "ask for another filesystem") {
			t.Errorf("error %v, want one that says what to do", err)
		}
		must.Succeed(t, b.Close(t.Context()))
		b.Quota = &quotatest.Fake{As: quota.Ext4}
		b.start(`[{"name":"local","path":"pool","enforcement":"required"}]`)
		b.create("pvc-1", mib)
		if !b.Status()[0].Enforced {
			t.Error("the pool is not said to be enforced")
		}
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

func TestExpand(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		expand := func(r volume.Range) (int64, error) {
			return b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", r)
		}
		_, err := expand(volume.Range{Required: 20 * mib})
		wantError(t, err, volume.ErrNotFound) // not published there
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, b.write("pvc-1", 9*mib))

		for range 2 {
			bytes, err := expand(volume.Range{Required: 20*mib - 1})
			must.Succeed(t, err)
			if bytes != 20*mib {
				t.Errorf("expanded to %d, want 20 MiB", bytes)
			}
		}
		must.Succeed(t, b.write("pvc-1", 10*mib))
		if bytes, err := expand(volume.Range{Required: 5 * mib}); err != nil || bytes != 20*mib {
			t.Errorf("asked for less: %d, %v; want it to stay", bytes, err)
		}
		for _, c := range []struct {
			asked volume.Range
			want  error
		}{
			{volume.Range{Required: 5 * mib, Limit: 10 * mib}, volume.ErrOutOfRange},
			{volume.Range{Required: 3, Limit: 2}, volume.ErrOutOfRange},
			{volume.Range{Required: 1 << 50}, volume.ErrCannotGrow},
			{volume.Range{Required: math.MaxInt64}, volume.ErrCannotGrow},
		} {
			_, err := expand(c.asked)
			wantError(t, err, c.want)
		}
		b.wantClean()
		b.restart(local)
		if v, err := b.Volume(t.Context(), id(t, "pvc-1")); err != nil || v.Bytes != 20*mib || v.Condition.Abnormal {
			t.Errorf("after a restart: %+v, %v; want 20 MiB in order", v, err)
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

func TestCrashBetweenRecordAndLimit(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		record := b.Own("volumes", "pvc-1.json")
		data, err := os.ReadFile(record)
		must.Succeed(t, err)
		must.Succeed(t, b.Close(t.Context()))
		must.Succeed(t, os.WriteFile(record, []byte(strings.Replace(string(data), `"bytes":10485760`, `"bytes":20971520`, 1)), 0o600))
		b.start(local)
		must.Succeed(t, b.write("pvc-1", 19*mib))
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

func TestPoolOpensWithUncountableVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(local)
		b.create("pvc-1", mib)
		record := b.Own("volumes", "pvc-1.json")
		data, err := os.ReadFile(record)
		must.Succeed(t, err)
		// An id that is not the driver's to count by.
		must.Succeed(t, os.WriteFile(record, regexp.MustCompile(`"projectID":\d+`).ReplaceAll(data, []byte(`"projectID":7`)), 0o600))
		b.restart(local)
		b.create("pvc-2", mib)
		wantError(t, b.publish("pvc-1", "a"), volume.ErrDamagedRecord)
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
