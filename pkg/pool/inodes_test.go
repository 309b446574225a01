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
func onQuota(t *testing.T, kind quota.Kind, datadir string, test func(t *testing.T, b *harness)) {
	t.Helper()
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: kind}
		h.start(datadir)
		test(t, h)
	})
}

func (h *harness) wantInodes(name string, want int64) {
	h.t.Helper()
	usage := must.Value(h.Quota.Usage(h.open(name), h.carried(name)))(h.t)
	if usage.Limit.Inodes != want {
		h.t.Errorf("%s may have %d inodes, want %d", name, usage.Limit.Inodes, want)
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
			onQuota(t, c.kind, datadir, func(t *testing.T, h *harness) {
				h.create("pvc-1", 100*mib)
				h.wantInodes("pvc-1", c.inodes)
				h.wantCapacity("local", c.capacity, 2)
				h.restart(datadir)
				h.wantInodes("pvc-1", c.inodes)
				h.wantCapacity("local", c.capacity, 2)
				left := h.capacity()
				h.create("pvc-2", left)
				h.wantCapacity("local", 0, 0)
				h.delete("pvc-2")
				h.settled()
				must.Succeed(t, h.publish("pvc-1", "a"))
				if _, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 200 * mib}); err != nil {
					t.Error(err)
				}
				h.wantCapacity("local", c.capacity-100, 2)
			})
		})
	}
}

// A volume from before the default may have more inodes than that allows.
func TestVolumeFromBeforeTheDefaultOfInodesKeepsNone(t *testing.T) {
	onQuota(t, quota.XFS, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		h.wantInodes("pvc-1", 1025)
		data, err := os.ReadFile(h.Own("volumes", "pvc-1.json"))
		must.Succeed(t, err)
		must.Succeed(t, h.Close(t.Context()))
		older := bytes.Replace(data, []byte(`,"bytesPerInode":16384`), nil, 1)
		if bytes.Equal(older, data) || !json.Valid(older) {
			t.Fatalf("the record %s has no number of inodes", data)
		}
		must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), older, 0o600))
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: 16 * mib}))
		h.start(local)
		h.later(2 * time.Minute)
		h.wantInodes("pvc-1", 0)
		must.Succeed(t, h.publish("pvc-1", "a"))
		_, err = h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 32 * mib})
		must.Succeed(t, err)
		h.wantInodes("pvc-1", 0)
		h.restart(`[{"name":"local","path":"pool","bytesPerInode":16384}]`)
		h.wantInodes("pvc-1", 2049)
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
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(local)
		h.create("pvc-1", 128*mib)
		h.wantInodes("pvc-1", 1+128*mib/(64<<10))
		const overhead = (1 + 128*mib/(64<<10)) * (2048 + 32)
		for _, when := range []string{"created", "started again"} {
			if got := h.Overhead(); got != overhead {
				t.Errorf("%s: %d bytes are set aside for inodes, want %d", when, got, overhead)
			}
			h.restart(local)
		}
		h.create("pvc-2", h.capacity())
		h.wantCapacity("local", 0, 0)
	})
}

// A directory that shares blocks may take more than its promise, and what it may take is never sold to another: its
// limit is no higher than what is owed for it, from its first snapshot on, and a snapshot that leaves no room for that is refused.
func TestWhatSharingAddsToLimitsIsOwed(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.LoopFS(t, "xfs", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		const noInodes = `[{"name":"local","path":"pool","bytesPerInode":0}]`
		h.start(noInodes)
		wantOwed := func(when string, shared ...string) {
			t.Helper()
			var above int64
			for _, name := range shared {
				above += h.limitOf(name) - h.volume(name).Bytes
			}
			if got := h.Overhead(); got != above || above == 0 {
				t.Errorf("%s: %d bytes are set aside besides promises, and limits are %d above them", when, got, above)
			}
		}
		h.create("pvc-1", 64*mib)
		must.Succeed(t, h.snapshot("s-1", "pvc-1"))
		wantOwed("with a snapshot", "pvc-1")
		awaitTick(t, root)
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Pool: poolName(t, "local"), Source: &pool.Source{ID: snapshotID(t, "s-1")}})
		must.Succeed(t, err)
		wantOwed("with a restored volume", "pvc-1", "pvc-2")
		must.Succeed(t, h.publish("pvc-1", "a"))
		_, err = h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 128 * mib})
		must.Succeed(t, err)
		wantOwed("expanded", "pvc-1", "pvc-2")
		h.restart(noInodes)
		wantOwed("started again", "pvc-1", "pvc-2")
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
		wantOwed("deleted", "pvc-2")

		h.create("pvc-3", 64*mib)
		h.create("pvc-rest", h.capacity()-mib)
		h.promiseRest()
		wantError(t, h.snapshot("s-2", "pvc-3"), volume.ErrPrecondition)
		if got := h.limitOf("pvc-3"); got != 64*mib {
			t.Errorf("the limit of a volume whose snapshot was refused is %d", got)
		}
		wantOwed("refused", "pvc-2")
	})
}
