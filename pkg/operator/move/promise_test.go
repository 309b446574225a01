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
func (h *harness) ofUpstream(disk, request string) {
	h.Helper()
	claim, volume := claimOf("data"), volumeOf("pv")
	if !h.has(claim) || !h.has(volume) {
		h.Fatal("there is no volume")
	}
	volume.Spec.Capacity, claim.Status.Capacity = sizeOf(disk), sizeOf(disk)
	claim.Spec.Resources.Requests = sizeOf(request)
	h.update(volume)
	h.update(claim)
}

// A volume of the upstream driver goes where its claim has room, is promised what that asks for, or what it holds if that is more, and the
// objects say so: whenever the controller of volumes sees that the PersistentVolume is replaced.
func TestVolumeOfUpstreamDriver(t *testing.T) {
	for _, late := range []int{0, 2} {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		h.promised, h.late = 25*gib, late
		h.ofUpstream("1Ti", "20Gi")
		bytes := ""
		h.run("m", func(int) {
			if pod := h.moverOf(roleOut); pod != nil {
				bytes = argsOf(pod)["bytes"]
			}
		})
		h.wantOn(nodeB)
		if want := fmt.Sprint(20 * gib); bytes != want {
			t.Errorf("the mover is to promise %s bytes, want %s", bytes, want)
		}
		volume, claim := volumeOf("pv"), claimOf("data")
		if h.has(volume); volume.Spec.Capacity.Storage().Value() != h.promised {
			t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
		}
		if h.has(claim); claim.Status.Capacity.Storage().Value() != h.promised {
			t.Errorf("the claim has %s", claim.Status.Capacity.Storage())
		}
		if got := h.move("m").Status.PromisedBytes; got != h.promised {
			t.Errorf("the move says that %d bytes are promised", got)
		}
	}
}

// A volume that grows meanwhile keeps the size that it is to get: kubelet makes it so large where it is next used.
func TestGrowthIsKept(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.promised = 10 * gib
	volume := volumeOf("pv")
	h.has(volume)
	volume.Annotations[preResize] = "10Gi"
	volume.Spec.Capacity = sizeOf("20Gi")
	h.update(volume)
	h.run("m")
	h.wantOn(nodeB)
	if h.has(volume); volume.Spec.Capacity.Storage().Value() != 20*gib || volume.Annotations[preResize] != "10Gi" {
		t.Errorf("the PersistentVolume is %+v", volume)
	}
}

// A volume whose move is undone before its PersistentVolume was replaced has the size that it had.
func TestSizeAfterUndo(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.promised = 25 * gib
	h.ofUpstream("1Ti", "20Gi")
	h.run("m", func(int) {
		if m := h.move("m"); m != nil && m.Status.Fence != "" && m.DeletionTimestamp == nil && h.has(volumeOf("pv")) {
			must.Succeed(h, h.api.Delete(h.Context(), m))
		}
	})
	h.wantOn(nodeA)
	if volume := volumeOf("pv"); !h.has(volume) || volume.Spec.Capacity.Storage().Value() != 1<<40 {
		t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
	}
}

// That of one which is undone amid the replacement has, too.
func TestSizeAfterUndoAmidReplacement(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.promised = 25 * gib
	h.ofUpstream("1Ti", "20Gi")
	h.run("m", func(int) {
		if m := h.move("m"); m != nil && m.Status.Phase == v1alpha1.Switching && !h.has(volumeOf("pv")) && len(h.wasGone) == 0 {
			h.goes(nodeB)
		}
	})
	if len(h.wasGone) == 0 {
		t.Error("nothing was tested")
	}
	delete(h.records, nodeB) // which is gone
	h.wantOn(nodeA)
	if volume := volumeOf("pv"); !h.has(volume) || volume.Spec.Capacity.Storage().Value() != 1<<40 {
		t.Errorf("the PersistentVolume has %s", volume.Spec.Capacity.Storage())
	}
}

// moverOf is the pod of a role; nil if there is none.
func (h *harness) moverOf(r role) *corev1.Pod {
	h.Helper()
	pods := &corev1.PodList{}
	must.Succeed(h, h.api.List(h.Context(), pods, client.InNamespace(storage)))
	for _, pod := range pods.Items {
		if pod.Labels[roleLabel] == string(r) {
			return &pod
		}
	}
	return nil
}
