package migrate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// rescued has an administrator keep the data of a migrated claim, and the claim be deleted.
func (h *harness) rescued() *corev1.PersistentVolume {
	h.Helper()
	pv, _ := h.objects()
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	pv.Status.Phase = corev1.VolumeReleased
	must.Succeed(h.T, h.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("persistentvolumes"), pv, ""))
	must.Succeed(h.T, h.client.CoreV1().PersistentVolumeClaims("space").Delete(h.Context(), "data", metav1.DeleteOptions{}))
	h.client.ClearActions()
	return pv
}

// The command is repeated for other claims of the node.
func TestClaimThatWasDeletedAfterItsMigration_staysDeleted(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(apply))
	pv := h.rescued()
	must.Succeed(t, h.run(apply))
	h.wantNoChange()
	if _, err := h.client.CoreV1().PersistentVolumeClaims("space").Get(t.Context(), "data", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the claim is there (%v):\n%s", err, h.output.String())
	}
	now, err := h.client.CoreV1().PersistentVolumes().Get(t.Context(), pvName, metav1.GetOptions{})
	if err != nil || now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain || now.Spec.ClaimRef.UID != pv.Spec.ClaimRef.UID {
		t.Errorf("%+v (%v)", now, err)
	}
}

// It has a volume of its own, and stops no later run.
func TestClaimThatWasMadeAnewAfterItsMigration_isLeftAlone(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(apply))
	h.rescued()
	_, claim := pair(h.config.From[0])
	claim.Spec.VolumeName = "pvc-other"
	must.Succeed(t, h.client.Tracker().Add(claim))
	must.Succeed(t, h.run(apply))
	h.wantNoChange()
}

// An undo keeps the policy that an administrator has chosen since.
func TestUndo_keepsThePolicyRetain(t *testing.T) {
	for title, rescue := range map[string]func(*harness){
		"the claim is there": func(h *harness) {
			pv, _ := h.objects()
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			must.Succeed(h.T, h.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("persistentvolumes"), pv, ""))
		},
		"the claim is deleted": func(h *harness) { h.rescued() },
		"the PersistentVolume is deleted": func(h *harness) {
			h.rescued()
			must.Succeed(h.T, h.client.CoreV1().PersistentVolumes().Delete(h.Context(), pvName, metav1.DeleteOptions{}))
		},
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, "old")
			must.Succeed(t, h.run(apply))
			rescue(h)
			for range 2 { // as it is planned, then done
				h.output.Reset()
				must.Succeed(t, h.run(func(c *Config) { c.Undo = true }))
				if strings.Contains(h.output.String(), "back to Delete") {
					t.Errorf("it is planned to have its data deleted:\n%s", h.output.String())
				}
				must.Succeed(t, h.run(func(c *Config) { undo(c); c.Steps = 1 }))
			}
			must.Succeed(t, h.run(undo))
			pv, _ := h.objects()
			if pv.Spec.HostPath == nil || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
				t.Errorf("%+v\n%s", pv.Spec, h.output.String())
			}
			h.wantData(pv.Spec.HostPath.Path)
		})
	}
}

// The driver has the pool of that name elsewhere, and would report none of the volumes, whose objects are deleted by then.
func TestPoolThatTheDriverHasElsewhere_stopsMigration(t *testing.T) {
	for _, directory := range []string{"old", "pool"} {
		t.Run(directory, func(t *testing.T) {
			h := newHarness(t, directory)
			elsewhere := filepath.Join(t.TempDir(), "elsewhere")
			must.Succeed(t, os.MkdirAll(filepath.Join(elsewhere, pvName), 0o700)) // as in a copy of the pool
			h.driver = driver{serve(t, "local", elsewhere)}
			h.config.Timeout = time.Millisecond
			h.client.ClearActions()
			for _, change := range []func(*Config){func(*Config) {}, apply} {
				if err := h.run(change); err == nil || !strings.Contains(err.Error(), "has its pool local in another directory than "+h.config.Pools[0].Path) {
					t.Errorf("%v\n%s", err, h.output.String())
				}
			}
			h.wantNoChange()
			h.wantData(h.path())
		})
	}
}

// The pool is looked at, and nothing is made in it to find out that the driver has it.
func TestNothingIsMadeInThePoolToFindIt(t *testing.T) {
	h := newHarness(t, "pool")
	pool := h.config.Pools[0].Path
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, unix.Close(watch)) }()
	_, err = unix.InotifyAddWatch(watch, pool, unix.IN_CREATE|unix.IN_MOVED_TO)
	must.Succeed(t, err)
	must.Succeed(t, h.run(apply))
	h.wantCSI()
	if n, err := unix.Read(watch, make([]byte, 4096)); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("%d bytes of what was made in the pool (%v)", n, err)
	}
}

// What others have changed of a migrated claim and its PersistentVolume stays, and so do the annotations by which the old provisioner
// knows its volume.
func TestUndo_keepsWhatOthersHaveChanged(t *testing.T) {
	change := func(m *metav1.ObjectMeta) {
		m.Labels = map[string]string{"app": "changed", "tier": "added"}
		delete(m.Annotations, "example.com/note")
		m.Annotations["example.com/later"] = "added"
		m.Annotations["volume.kubernetes.io/storage-provisioner"] = driverName // the controller's
		m.OwnerReferences = append(m.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "second", UID: "second-uid"})
	}
	for title, begin := range map[string]func(*harness){
		"of a complete migration": func(h *harness) {
			must.Succeed(h.T, h.run(apply))
			h.changed(change)
		},
		"of one that was stopped": func(h *harness) {
			must.Succeed(h.T, h.run(func(c *Config) { c.Apply, c.Steps = true, 8 })) // the new objects are there
			h.changed(change)
		},
		"of one whose objects were still the old ones": func(h *harness) {
			must.Succeed(h.T, h.run(func(c *Config) { c.Apply, c.Steps = true, 1 }))
			h.changed(change)
			must.Succeed(h.T, h.run(apply))
		},
	} {
		for _, steps := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s, %d steps at once", title, steps), func(t *testing.T) {
				h := newHarness(t, "old")
				begin(h)
				for range 20 {
					must.Succeed(t, h.run(func(c *Config) { undo(c); c.Steps = steps }))
				}
				pv, claim := h.objects()
				for _, m := range []metav1.ObjectMeta{pv.ObjectMeta, claim.ObjectMeta} {
					if m.Labels["app"] != "changed" || m.Labels["tier"] != "added" || m.Annotations["example.com/later"] != "added" || m.Annotations["example.com/note"] != "" || len(m.OwnerReferences) != 2 {
						t.Errorf("%s: what was changed is lost: %+v", m.Name, m)
					}
				}
				if pv.Spec.HostPath == nil || pv.Annotations[origin.ProvisionedBy] != origin.PerNodeName || pv.Annotations[origin.ProvisionOnNode] != "node-a" {
					t.Errorf("the PersistentVolume is not that of the provisioner: %+v", pv)
				}
				if got := claim.Annotations[provisioner.StorageProvisioner]; got != origin.PerNodeName {
					t.Errorf("the claim is of the provisioner %q", got)
				}
				h.wantData(pv.Spec.HostPath.Path)
			})
		}
	}
}
