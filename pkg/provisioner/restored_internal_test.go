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
	recorded := func(r *rig) {
		_, _, err := r.Provision(r.Context(), request())
		must.Succeed(r.T, err)
	}
	bound := func(r *rig) {
		pv := own(r.T, r.config.Path)
		pv.Status.Phase = corev1.VolumeBound
		r.bound.see(pv)
	}
	without := func(*rig) {}
	for title, c := range map[string]struct {
		before func(r *rig)
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
			r := newRig(t, Config{Mode: PerNode})
			c.before(r)
			pv := own(t, r.config.Path)
			pv.CreationTimestamp = metav1.NewTime(c.made)
			pv.Status.LastPhaseTransitionTime = new(metav1.NewTime(c.made.Add(c.had)))
			if err := r.Delete(t.Context(), pv); (err != nil) != c.kept || (len(r.directories()) == 1) != c.kept {
				t.Errorf("%v, and left are %v; want it kept: %t", err, r.directories(), c.kept)
			}
		})
	}
}

// By which PersistentVolume a claim had a directory is on the disk: how long Kubernetes takes to see that a claim is not there says nothing.
func TestDirectoryHasTheIdentityOfItsPersistentVolume(t *testing.T) {
	for title, c := range map[string]struct {
		last  func(r *rig, pv *corev1.PersistentVolume) // what is seen before it is deleted
		other types.UID
		kept  bool
	}{
		"it is that":                        {func(*rig, *corev1.PersistentVolume) {}, "", false},
		"it was made anew":                  {func(*rig, *corev1.PersistentVolume) {}, "anew", true},
		"it was made anew, and looked at":   {func(r *rig, pv *corev1.PersistentVolume) { r.looked(pv) }, "anew", true},
		"it was made anew, and has a claim": {func(r *rig, pv *corev1.PersistentVolume) { r.looked(bound(pv)) }, "anew", false},
		"another directory of it has its claim": {func(r *rig, pv *corev1.PersistentVolume) {
			pv = bound(pv)
			pv.Spec.HostPath.Path = filepath.Join(r.config.Path, "claim-"+name)
			r.looked(pv)
		}, "anew", true},
	} {
		t.Run(title, func(t *testing.T) {
			r := newRig(t, Config{Mode: PerNode})
			_, _, err := r.Provision(t.Context(), request())
			must.Succeed(t, err)
			pv := own(t, r.config.Path)
			pv.UID, pv.CreationTimestamp = "first", metav1.Now()
			r.looked(bound(pv))
			if c.other != "" {
				pv.UID = c.other
			}
			c.last(r, pv)
			pv.Status.LastPhaseTransitionTime = new(metav1.NewTime(time.Now().Add(24 * time.Hour)))
			if err := r.Delete(t.Context(), pv); (err != nil) != c.kept || (len(r.directories()) == 1) != c.kept {
				t.Errorf("%v, and left are %v; want it kept: %t", err, r.directories(), c.kept)
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
func (r *rig) looked(pv *corev1.PersistentVolume) {
	r.Helper()
	must.Succeed(r.T, r.instance.volumes.GetIndexer().Add(pv))
	r.checkTwice()
}

func TestPersistentVolumesOfClaims_areKnownUntilTheyAreGone(t *testing.T) {
	pv := own(t, t.TempDir())
	pv.UID, pv.Status.Phase = "bound", corev1.VolumeBound
	free := pv.DeepCopy()
	free.Name, free.UID, free.Status.Phase = "pvc-99999999-2222-3333-4444-555555555555", "free", corev1.VolumeAvailable
	r := newRig(t, Config{Mode: PerNode}, pv, free)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	var run sync.WaitGroup
	run.Go(func() { r.instance.volumes.RunWithContext(ctx) })
	defer run.Wait()
	defer cancel()
	until := func(had bool) {
		t.Helper()
		if !cache.WaitForCacheSync(ctx.Done(), func() bool { return r.bound.had(pv) == had }) {
			t.Fatalf("that a claim has %s is known: %t", pv.Name, !had)
		}
	}
	until(true)
	if r.bound.had(free) {
		t.Errorf("%s has no claim", origin.Path(free))
	}
	must.Succeed(t, r.client.CoreV1().PersistentVolumes().Delete(ctx, pv.Name, metav1.DeleteOptions{}))
	until(false)
}
