package pool_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
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

// What the last survey found is read again for a list. A disk that has begun to hang delays it by its limit.
func TestListIllWhileDiskHangs(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		b.create("pvc-2", mib)
		b.Errors.Store(3)
		b.later(2 * time.Minute) // a check, and a survey
		f.hangs.Store(true)
		wantPrompt(t, func() {
			found, _, err := b.ListIll(t.Context(), volume.ID{}, 10)
			must.Succeed(t, err)
			if len(found) != 2 {
				t.Fatalf("%v are listed, want both volumes", found)
			}
			for _, v := range found {
				wantReasons(t, v.ID.String(), v.Conditions, health.PoolHangs)
			}
		})
		f.hangs.Store(false)
		b.later(2 * time.Hour)
	})
}

// Memory does not know yet what another node has made.
func TestHealthOfAnotherNodesVolumeWhileDiskHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newBench(t, t.TempDir())
		f := &faulty{Fake: &quotatest.Fake{As: quota.XFS}}
		one.Quota, one.real = f.Fake, f.detect
		one.start(sharedPool)
		two := one.another("node-2")
		two.create("pvc-1", mib)
		f.hangs.Store(true)
		wantPrompt(t, func() {
			found, err := one.HealthHere(t.Context(), id(t, "pvc-1"))
			must.Succeed(t, err)
			wantReasons(t, "the volume", found, health.PoolHangs)
		})
		f.hangs.Store(false)
		one.later(2 * time.Hour)
	})
}
