package pool_test

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// onQuota runs a test on a node whose pool is on a tmpfs of 256 MiB and counts as that kind.
func onQuota(t *testing.T, kind quota.Kind, datadir string, test func(t *testing.T, b *bench)) {
	t.Helper()
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.Quota = &quotatest.Fake{As: kind}
		b.start(datadir)
		test(t, b)
	})
}

func (b *bench) wantInodes(name string, want int64) {
	b.t.Helper()
	usage, err := b.Quota.Usage(b.open(name), b.carried(name))
	must.Succeed(b.t, err)
	if usage.Limit.Inodes != want {
		b.t.Errorf("%s may have %d inodes, want %d", name, usage.Limit.Inodes, want)
	}
}

func TestDefaultOfInodes(t *testing.T) {
	for name, c := range map[string]struct {
		kind     quota.Kind
		options  string
		inodes   int64
		capacity int64 // MiB, beside a volume of 100 MiB
	}{
		"XFS":           {quota.XFS, ``, 6401, 147},
		"XFS, no limit": {quota.XFS, `,"bytesPerInode":0`, 0, 156},
		"XFS, option":   {quota.XFS, `,"bytesPerInode":1048576`, 101, 155},
		"ext4":          {quota.Ext4, ``, 0, 156},
	} {
		t.Run(name, func(t *testing.T) {
			datadir := `[{"name":"local","path":"pool"` + c.options + `}]`
			onQuota(t, c.kind, datadir, func(t *testing.T, b *bench) {
				b.create("pvc-1", 100*mib)
				b.wantInodes("pvc-1", c.inodes)
				b.wantCapacity("local", c.capacity, 2)
				b.restart(datadir)
				b.wantInodes("pvc-1", c.inodes)
				b.wantCapacity("local", c.capacity, 2)
				left := b.capacity()
				b.create("pvc-2", left)
				b.wantCapacity("local", 0, 0)
				b.delete("pvc-2")
				b.settled()
				must.Succeed(t, b.publish("pvc-1", "a"))
				if _, err := b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 200 * mib}); err != nil {
					t.Error(err)
				}
				b.wantCapacity("local", c.capacity-100, 2)
			})
		})
	}
}

// A volume from before the default may have more inodes than that allows.
func TestVolumeFromBeforeTheDefaultOfInodesKeepsNone(t *testing.T) {
	onQuota(t, quota.XFS, local, func(t *testing.T, b *bench) {
		b.create("pvc-1", 16*mib)
		b.wantInodes("pvc-1", 1025)
		data, err := os.ReadFile(b.Own("volumes", "pvc-1.json"))
		must.Succeed(t, err)
		must.Succeed(t, b.Close(t.Context()))
		older := bytes.Replace(data, []byte(`,"bytesPerInode":16384`), nil, 1)
		if bytes.Equal(older, data) || !json.Valid(older) {
			t.Fatalf("the record %s has no number of inodes", data)
		}
		must.Succeed(t, os.WriteFile(b.Own("volumes", "pvc-1.json"), older, 0o600))
		must.Succeed(t, b.Quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: 16 * mib}))
		b.start(local)
		b.later(2 * time.Minute)
		b.wantInodes("pvc-1", 0)
		must.Succeed(t, b.publish("pvc-1", "a"))
		_, err = b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 32 * mib})
		must.Succeed(t, err)
		b.wantInodes("pvc-1", 0)
		b.restart(`[{"name":"local","path":"pool","bytesPerInode":16384}]`)
		b.wantInodes("pvc-1", 2049)
	})
}

// On a filesystem whose inodes are larger there are as many fewer, and each counts in full.
func TestLargerInodes(t *testing.T) {
	testenv.NeedRoot(t)
	image, err := loopfs.Format(t.Context(), t.TempDir(), "xfs", 512*mib, "-i", "size=2048")
	must.Succeed(t, err)
	device, err := loopfs.Attach(image)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	root := t.TempDir()
	must.Succeed(t, loopfs.MountDevice(t.Context(), device.Name(), root, "xfs"))
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(root)) })
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.start(local)
		b.create("pvc-1", 128*mib)
		b.wantInodes("pvc-1", 1+128*mib/(64<<10))
		const overhead = (1 + 128*mib/(64<<10)) * (2048 + 32)
		for _, when := range []string{"created", "started again"} {
			if got := b.Overhead(); got != overhead {
				t.Errorf("%s: %d bytes are set aside for inodes, want %d", when, got, overhead)
			}
			b.restart(local)
		}
		b.create("pvc-2", b.capacity())
		b.wantCapacity("local", 0, 0)
	})
}

// A directory that shares blocks may take more than its promise, and what it may take is never sold to another: its
// limit is no higher than what is owed for it, from its first snapshot on, and a snapshot that leaves no room for that is refused.
func TestWhatSharingAddsToLimitsIsOwed(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.LoopFS(t, "xfs", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.Quota = &quotatest.Fake{As: quota.XFS}
		const noInodes = `[{"name":"local","path":"pool","bytesPerInode":0}]`
		b.start(noInodes)
		wantOwed := func(when string, shared ...string) {
			t.Helper()
			var above int64
			for _, name := range shared {
				above += b.limitOf(name) - b.volume(name).Bytes
			}
			if got := b.Overhead(); got != above || above == 0 {
				t.Errorf("%s: %d bytes are set aside besides promises, and limits are %d above them", when, got, above)
			}
		}
		b.create("pvc-1", 64*mib)
		must.Succeed(t, b.snapshot("s-1", "pvc-1"))
		wantOwed("with a snapshot", "pvc-1")
		awaitTick(t, root)
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Pool: poolName(t, "local"), Source: &pool.Source{ID: snapshotID(t, "s-1")}})
		must.Succeed(t, err)
		wantOwed("with a restored volume", "pvc-1", "pvc-2")
		must.Succeed(t, b.publish("pvc-1", "a"))
		_, err = b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 128 * mib})
		must.Succeed(t, err)
		wantOwed("expanded", "pvc-1", "pvc-2")
		b.restart(noInodes)
		wantOwed("started again", "pvc-1", "pvc-2")
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		b.delete("pvc-1")
		wantOwed("deleted", "pvc-2")

		b.create("pvc-3", 64*mib)
		b.create("pvc-rest", b.capacity()-mib)
		wantError(t, b.snapshot("s-2", "pvc-3"), volume.ErrPrecondition)
		if got := b.limitOf("pvc-3"); got != 64*mib {
			t.Errorf("the limit of a volume whose snapshot was refused is %d", got)
		}
		wantOwed("refused", "pvc-2")
	})
}
