package move

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const gib = 1 << 30

func sizeOf(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

// ofUpstream makes the volume one of the upstream driver, whose PersistentVolume has the size of the disk whatever the claim asks for.
func (w *world) ofUpstream(disk, request string) {
	w.Helper()
	claim, volume := claimOf("data"), volumeOf("pv")
	if !w.has(claim) || !w.has(volume) {
		w.Fatal("there is no volume")
	}
	volume.Spec.Capacity, claim.Status.Capacity = sizeOf(disk), sizeOf(disk)
	claim.Spec.Resources.Requests = sizeOf(request)
	w.update(volume)
	w.update(claim)
}

// A volume of the upstream driver goes where its claim has room, is promised what that asks for, or what it holds if that is more, and the
// objects say so: whenever the controller of volumes sees that the PersistentVolume is replaced.
func TestVolumeOfUpstreamDriver(t *testing.T) {
	for _, late := range []int{0, 2} {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		w.promised, w.late = 25*gib, late
		w.ofUpstream("1Ti", "20Gi")
		bytes := ""
		w.run("m", func(int) {
			if pod := w.moverOf(roleOut); pod != nil {
				bytes = argsOf(pod)["bytes"]
			}
		})
		w.wantOn(nodeB)
		if want := fmt.Sprint(20 * gib); bytes != want {
			t.Errorf("the mover is to promise %s bytes, want %s", bytes, want)
		}
		volume, claim := volumeOf("pv"), claimOf("data")
		if w.has(volume); volume.Spec.Capacity.Storage().Value() != w.promised {
			t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
		}
		if w.has(claim); claim.Status.Capacity.Storage().Value() != w.promised {
			t.Errorf("the claim has %s", claim.Status.Capacity.Storage())
		}
		if got := w.move("m").Status.PromisedBytes; got != w.promised {
			t.Errorf("the move says that %d bytes are promised", got)
		}
	}
}

// A volume that grows meanwhile keeps the size that it is to get: kubelet makes it so large where it is next used.
func TestGrowthIsKept(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.promised = 10 * gib
	volume := volumeOf("pv")
	w.has(volume)
	volume.Annotations[preResize] = "10Gi"
	volume.Spec.Capacity = sizeOf("20Gi")
	w.update(volume)
	w.run("m")
	w.wantOn(nodeB)
	if w.has(volume); volume.Spec.Capacity.Storage().Value() != 20*gib || volume.Annotations[preResize] != "10Gi" {
		t.Errorf("the PersistentVolume is %+v", volume)
	}
}

// A volume whose move is undone before its PersistentVolume was replaced has the size that it had.
func TestSizeAfterUndo(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.promised = 25 * gib
	w.ofUpstream("1Ti", "20Gi")
	w.run("m", func(int) {
		if m := w.move("m"); m != nil && m.Status.Fence != "" && m.DeletionTimestamp == nil && w.has(volumeOf("pv")) {
			must.Succeed(w, w.api.Delete(w.Context(), m))
		}
	})
	w.wantOn(nodeA)
	if volume := volumeOf("pv"); !w.has(volume) || volume.Spec.Capacity.Storage().Value() != 1<<40 {
		t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
	}
}

// That of one which is undone amid the replacement has, too.
func TestSizeAfterUndoAmidReplacement(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.promised = 25 * gib
	w.ofUpstream("1Ti", "20Gi")
	w.run("m", func(int) {
		if m := w.move("m"); m != nil && m.Status.Phase == v1alpha1.Switching && !w.has(volumeOf("pv")) && len(w.wasGone) == 0 {
			w.goes(nodeB)
		}
	})
	if len(w.wasGone) == 0 {
		t.Error("nothing was tested")
	}
	delete(w.records, nodeB) // which is gone
	w.wantOn(nodeA)
	if volume := volumeOf("pv"); !w.has(volume) || volume.Spec.Capacity.Storage().Value() != 1<<40 {
		t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
	}
}

// moverOf is the pod of a role; nil if there is none.
func (w *world) moverOf(r role) *corev1.Pod {
	w.Helper()
	pods := &corev1.PodList{}
	must.Succeed(w, w.api.List(w.Context(), pods, client.InNamespace(storage)))
	for _, pod := range pods.Items {
		if pod.Labels[roleLabel] == string(r) {
			return &pod
		}
	}
	return nil
}
