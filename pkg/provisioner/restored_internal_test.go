package provisioner

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Where a backup is applied object by object, Kubernetes takes the claim of a PersistentVolume for deleted until it is there.
func TestDeleteKeepsTheDirectoryOfARestoredPersistentVolume(t *testing.T) {
	now := time.Now()
	recorded := func(h *harness) {
		_, _, err := h.Provision(h.Context(), request())
		must.Succeed(h.T, err)
	}
	bound := func(h *harness) {
		pv := own(h.T, h.config.Path)
		pv.Status.Phase = corev1.VolumeBound
		h.bound.see(pv)
	}
	without := func(*harness) {}
	for title, c := range map[string]struct {
		before func(h *harness)
		made   time.Time
		had    time.Duration
		kept   bool
	}{
		"made anew, and released at once":                               {without, now.Add(time.Hour), time.Second, true},
		"made anew, and released once Kubernetes got to it":             {without, now.Add(time.Hour), 10 * time.Minute, true},
		"made anew, and released by its claim":                          {without, now.Add(time.Hour), 2 * time.Hour, false},
		"made anew, right after its directory was copied from a backup": {without, now, time.Second, true},
		"made anew for a directory that has its record":                 {recorded, now.Add(time.Hour), time.Second, true},
		"made with its directory, for a short one":                      {recorded, now, time.Second, false},
		"seen with its claim, on a node whose clock is wrong":           {bound, now.Add(time.Hour), time.Second, false},
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			c.before(h)
			pv := own(t, h.config.Path)
			pv.CreationTimestamp = metav1.NewTime(c.made)
			pv.Status.LastPhaseTransitionTime = new(metav1.NewTime(c.made.Add(c.had)))
			if err := h.Delete(t.Context(), pv); (err != nil) != c.kept || (len(h.directories()) == 1) != c.kept {
				t.Errorf("%v, and left are %v; want it kept: %t", err, h.directories(), c.kept)
			}
		})
	}
}

// By which PersistentVolume a claim had a directory is on the disk: how long Kubernetes takes to see that a claim is not there says nothing.
func TestDirectoryHasTheIdentityOfItsPersistentVolume(t *testing.T) {
	for title, c := range map[string]struct {
		last  func(h *harness, pv *corev1.PersistentVolume) // what is seen before it is deleted
		other types.UID
		kept  bool
	}{
		"it is that":                        {func(*harness, *corev1.PersistentVolume) {}, "", false},
		"it was made anew":                  {func(*harness, *corev1.PersistentVolume) {}, "anew", true},
		"it was made anew, and looked at":   {func(h *harness, pv *corev1.PersistentVolume) { h.looked(pv) }, "anew", true},
		"it was made anew, and has a claim": {func(h *harness, pv *corev1.PersistentVolume) { h.looked(bound(pv)) }, "anew", false},
		"another directory of it has its claim": {func(h *harness, pv *corev1.PersistentVolume) {
			pv = bound(pv)
			pv.Spec.HostPath.Path = filepath.Join(h.config.Path, "claim-"+name)
			h.looked(pv)
		}, "anew", true},
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			_, _, err := h.Provision(t.Context(), request())
			must.Succeed(t, err)
			pv := own(t, h.config.Path)
			pv.UID, pv.CreationTimestamp = "first", metav1.Now()
			h.looked(bound(pv))
			if c.other != "" {
				pv.UID = c.other
			}
			c.last(h, pv)
			pv.Status.LastPhaseTransitionTime = new(metav1.NewTime(time.Now().Add(24 * time.Hour)))
			if err := h.Delete(t.Context(), pv); (err != nil) != c.kept || (len(h.directories()) == 1) != c.kept {
				t.Errorf("%v, and left are %v; want it kept: %t", err, h.directories(), c.kept)
			}
		})
	}
}

func bound(pv *corev1.PersistentVolume) *corev1.PersistentVolume {
	pv = pv.DeepCopy()
	pv.Status.Phase = corev1.VolumeBound
	return pv
}

// looked has a process that ends after that have looked for what is abandoned while there is a PersistentVolume.
func (h *harness) looked(pv *corev1.PersistentVolume) {
	h.Helper()
	must.Succeed(h.T, h.instance.volumes.GetIndexer().Add(pv))
	h.checkTwice()
}

func TestPersistentVolumesOfClaims_areKnownUntilTheyAreGone(t *testing.T) {
	pv := own(t, t.TempDir())
	pv.UID, pv.Status.Phase = "bound", corev1.VolumeBound
	free := pv.DeepCopy()
	free.Name, free.UID, free.Status.Phase = "pvc-99999999-2222-3333-4444-555555555555", "free", corev1.VolumeAvailable
	h := newHarness(t, Config{Mode: PerNode}, pv, free)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	var run sync.WaitGroup
	run.Go(func() { h.instance.volumes.RunWithContext(ctx) })
	defer run.Wait()
	defer cancel()
	until := func(had bool) {
		t.Helper()
		if !cache.WaitForCacheSync(ctx.Done(), func() bool { return h.bound.had(pv) == had }) {
			t.Fatalf("that a claim has %s is known: %t", pv.Name, !had)
		}
	}
	until(true)
	if h.bound.had(free) {
		t.Errorf("%s has no claim", origin.Path(free))
	}
	must.Succeed(t, h.client.CoreV1().PersistentVolumes().Delete(ctx, pv.Name, metav1.DeleteOptions{}))
	until(false)
}
