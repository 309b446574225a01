package pool_test

import (
	"context"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// wantPrompt expects a call to be answered as soon as a filesystem counts as one that hangs.
func wantPrompt(t *testing.T, call func()) {
	t.Helper()
	began := time.Now()
	call()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the answer took %v, want at most 5 seconds", took)
	}
}

func wantReasons(t *testing.T, of string, found []health.Condition, want ...health.Reason) {
	t.Helper()
	var got []health.Reason
	for _, c := range found {
		got = append(got, c.Reason)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the reasons of %s are %q, want %q", of, got, want)
	}
}

// What the last survey found is read again for a list. A disk that has begun to hang delays it by its limit, or by nine tenths of the
// time that the caller has.
func TestListIllWhileDiskHangs(t *testing.T) {
	for name, patience := range map[string]time.Duration{"kubelet's deadline": 2 * time.Minute, "a short deadline": 3 * time.Second} {
		t.Run(name, func(t *testing.T) {
			withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
				h.create("pvc-1", mib)
				h.create("pvc-2", mib)
				h.Errors.Store(3)
				h.later(2 * time.Minute) // a check, and a survey
				f.hangs.Store(true)
				wantPrompt(t, func() {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					found, _, err := h.ListIll(ctx, volume.ID{}, 10)
					must.Succeed(t, err)
					if len(found) != 2 {
						t.Fatalf("%v are listed, want both volumes", found)
					}
					for _, v := range found {
						wantReasons(t, v.ID.String(), v.Conditions, health.PoolHangs)
					}
				})
				f.hangs.Store(false)
				h.later(2 * time.Hour)
			})
		})
	}
}

// Kubelet asks for one volume after the other.
func TestHealthBesideDiskThatHangs(t *testing.T) {
	const beside = `[{"name":"local","path":"pool"},{"name":"beside","path":"beside","enforcement":"none"}]`
	withFaults(t, beside, func(t *testing.T, h *harness, f *faulty) {
		for name, in := range map[string]string{"pvc-1": "local", "pvc-2": "beside"} {
			must.Succeed(t, must.Err(h.Create(t.Context(), pool.Request{ID: id(t, name), Pool: poolName(t, in), Range: volume.Range{Required: mib}})))
		}
		f.hangs.Store(true)
		began := time.Now()
		hung := make(chan error, 1)
		go func() {
			_, err := h.HealthHere(t.Context(), id(t, "pvc-1"))
			hung <- err
		}()
		synctest.Wait()
		found := must.Value(h.HealthHere(t.Context(), id(t, "pvc-2")))(t)
		wantReasons(t, "the volume of the other pool", found)
		if took := time.Since(began); took > 0 {
			t.Errorf("its answer took %v", took)
		}
		must.Succeed(t, <-hung)
		f.hangs.Store(false)
		h.later(2 * time.Hour)
	})
}

// Memory does not know yet what another node has made.
func TestHealthOfAnotherNodesVolumeWhileDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		f := &faulty{Fake: &quotatest.Fake{As: quota.XFS}}
		one.Quota, one.real = f.Fake, f.detect
		one.start(sharedPool)
		two := one.another("node-2")
		two.create("pvc-1", mib)
		f.hangs.Store(true)
		wantPrompt(t, func() {
			found := must.Value(one.HealthHere(t.Context(), id(t, "pvc-1")))(t)
			wantReasons(t, "the volume", found, health.PoolHangs)
		})
		f.hangs.Store(false)
		one.later(2 * time.Hour)
	})
}

// A quota is not in the volume: what is in there is not lost with it.
func TestQuotaThatDiskRefusesIsNoDataLoss(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		f.refused.Store(true)
		found := must.Value(h.HealthHere(t.Context(), id(t, "pvc-1")))(t)
		wantReasons(t, "the volume", found, health.ReadFailed)
		f.refused.Store(false)
	})
}

// A disk that refuses the pool's own files too has failed as a whole: of what is in its volumes nothing is known to be lost.
func TestDiskThatFailsAsAWholeIsNoDataLoss(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		format := h.Path("pool", ".hostpath-provisioner", "format")
		fails := func() { must.Succeed(t, os.Rename(format, format+".away")) }
		f.asked.Store(&fails)
		f.refusedID.Store(true)
		found := must.Value(h.HealthHere(t.Context(), id(t, "pvc-1")))(t)
		if len(found) == 0 || !found[0].Reason.OfPool() || found[0].Reason.Status() != health.Inaccessible {
			t.Errorf("the conditions are %v, want the pool's", found)
		}
		f.refusedID.Store(false)
		must.Succeed(t, os.Rename(format+".away", format))
	})
}

// Its id stands for one volume: a list has it once, and all say that it cannot be used.
func TestVolumeInTwoPoolsIsReportedOnce(t *testing.T) {
	onPools(t, aPoolAndAnother, func(t *testing.T, h *harness) {
		h.createIn("legacy", "pvc-1", mib)
		h.createIn("other", "pvc-2", mib)
		must.Succeed(t, os.Mkdir(h.Path("other", "pvc-1"), 0o755))
		h.later(2 * time.Minute) // a check, and a survey
		h.wantVolumes("pvc-1", "pvc-2")
		page, _ := h.List(t.Context(), volume.ID{}, 1)
		wantReasons(t, "the volume in a list", page[0].Conditions, health.ReadFailed)
		wantReasons(t, "the volume", h.volume("pvc-1").Conditions, health.ReadFailed)
		found, err := h.Health(t.Context(), id(t, "pvc-1"))
		must.Succeed(t, err)
		wantReasons(t, "the health", found, health.ReadFailed)
		stats, err := h.Publications().Stats(t.Context(), id(t, "pvc-1"), h.Target("a"))
		must.Succeed(t, err)
		wantReasons(t, "the usage", []health.Condition{stats.Condition}, health.ReadFailed)
		ill, _, err := h.ListIll(t.Context(), volume.ID{}, 10)
		must.Succeed(t, err)
		if len(ill) != 1 {
			t.Fatalf("%v are listed as abnormal, want the one volume", ill)
		}
		wantReasons(t, "the volume in a list of abnormal ones", ill[0].Conditions, health.ReadFailed)
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrAmbiguous)
		must.Succeed(t, os.Remove(h.Path("other", "pvc-1")))
		h.later(2 * time.Minute)
		wantReasons(t, "the volume afterwards", h.volume("pvc-1").Conditions)
		ill, _, err = h.ListIll(t.Context(), volume.ID{}, 10)
		must.Succeed(t, err)
		if len(ill) != 0 {
			t.Errorf("%v are listed as abnormal afterwards", ill)
		}
	})
}

// The log has the reasons too, for each once and not with each survey.
func TestLogOfAbnormalVolumes(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		said := h.restartSaying(local)
		h.create("pvc-1", mib)
		h.create("pvc-2", mib)
		for _, name := range []string{"pvc-1", "pvc-2"} {
			must.Succeed(t, os.Rename(h.Path("pool", name), h.Path("pool", "."+name)))
		}
		h.later(5 * time.Minute)
		must.Succeed(t, os.Rename(h.Path("pool", ".pvc-1"), h.Path("pool", "pvc-1")))
		h.later(5 * time.Minute)
		const changed = "The number of abnormal volumes has changed"
		for _, words := range []string{`"volumes"=2 "before"=0`, `"volumes"=1 "before"=2`} {
			if n := said.count(changed, `"reason"="DirectoryMissing" `+words); n != 1 {
				t.Errorf("%d lines have %s, want one", n, words)
			}
		}
		if n := said.count(changed); n != 2 {
			t.Errorf("%d lines report a change, want 2", n)
		}
	})
}
