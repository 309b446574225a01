package migrate

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// rescued has an administrator keep the data of a migrated claim, and the claim be deleted.
func (r *rig) rescued() *corev1.PersistentVolume {
	r.Helper()
	pv, _ := r.objects()
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	pv.Status.Phase = corev1.VolumeReleased
	must.Succeed(r.T, r.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("persistentvolumes"), pv, ""))
	must.Succeed(r.T, r.client.CoreV1().PersistentVolumeClaims("space").Delete(r.Context(), "data", metav1.DeleteOptions{}))
	r.client.ClearActions()
	return pv
}

// The command is repeated for other claims of the node.
func TestClaimThatWasDeletedAfterItsMigration_staysDeleted(t *testing.T) {
	r := newRig(t, "old")
	must.Succeed(t, r.run(apply))
	pv := r.rescued()
	must.Succeed(t, r.run(apply))
	r.wantNoChange()
	if _, err := r.client.CoreV1().PersistentVolumeClaims("space").Get(t.Context(), "data", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the claim is there (%v):\n%s", err, r.output.String())
	}
	now, err := r.client.CoreV1().PersistentVolumes().Get(t.Context(), pvName, metav1.GetOptions{})
	if err != nil || now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain || now.Spec.ClaimRef.UID != pv.Spec.ClaimRef.UID {
		t.Errorf("%+v (%v)", now, err)
	}
}

// It has a volume of its own, and stops no later run.
func TestClaimThatWasMadeAnewAfterItsMigration_isLeftAlone(t *testing.T) {
	r := newRig(t, "old")
	must.Succeed(t, r.run(apply))
	r.rescued()
	_, claim := pair(r.config.From[0])
	claim.Spec.VolumeName = "pvc-other"
	must.Succeed(t, r.client.Tracker().Add(claim))
	must.Succeed(t, r.run(apply))
	r.wantNoChange()
}

// An undo keeps the policy that an administrator has chosen since.
func TestUndo_keepsThePolicyRetain(t *testing.T) {
	for title, rescue := range map[string]func(*rig){
		"the claim is there": func(r *rig) {
			pv, _ := r.objects()
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			must.Succeed(r.T, r.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("persistentvolumes"), pv, ""))
		},
		"the claim is deleted": func(r *rig) { r.rescued() },
		"the PersistentVolume is deleted": func(r *rig) {
			r.rescued()
			must.Succeed(r.T, r.client.CoreV1().PersistentVolumes().Delete(r.Context(), pvName, metav1.DeleteOptions{}))
		},
	} {
		t.Run(title, func(t *testing.T) {
			r := newRig(t, "old")
			must.Succeed(t, r.run(apply))
			rescue(r)
			for range 2 { // as it is planned, then done
				r.output.Reset()
				must.Succeed(t, r.run(func(c *Config) { c.Undo = true }))
				if strings.Contains(r.output.String(), "back to Delete") {
					t.Errorf("it is planned to have its data deleted:\n%s", r.output.String())
				}
				must.Succeed(t, r.run(func(c *Config) { undo(c); c.Steps = 1 }))
			}
			must.Succeed(t, r.run(undo))
			pv, _ := r.objects()
			if pv.Spec.HostPath == nil || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
				t.Errorf("%+v\n%s", pv.Spec, r.output.String())
			}
			r.wantData(pv.Spec.HostPath.Path)
		})
	}
}

// The driver has the pool of that name elsewhere, and would report none of the volumes, whose objects are deleted by then.
func TestPoolThatTheDriverHasElsewhere_stopsMigration(t *testing.T) {
	for _, directory := range []string{"old", "pool"} {
		t.Run(directory, func(t *testing.T) {
			r := newRig(t, directory)
			r.driver = driver{serve(t, "local", filepath.Join(t.TempDir(), "elsewhere"))}
			r.config.Timeout = time.Millisecond
			r.client.ClearActions()
			if err := r.run(apply); err == nil || !strings.Contains(err.Error(), "does not see what is in "+r.config.Pools[0].Path) {
				t.Errorf("%v\n%s", err, r.output.String())
			}
			r.wantNoChange()
			r.wantData(r.path())
			if left, err := filepath.Glob(filepath.Join(r.config.Pools[0].Path, "migrate-*")); err != nil || len(left) > 0 {
				t.Errorf("left: %q (%v)", left, err)
			}
		})
	}
}
