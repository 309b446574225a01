package move

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What waits for others may wait for ever, and does not ask without a pause: all moves share the requests that the API server answers.
func TestWaitForOthersHasPauses(t *testing.T) {
	guarded := func(v *corev1.PersistentVolume) {
		v.Finalizers = append(slices.Clone(ownFinalizers), "example.com/keep")
	}
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	r := &Reconciler{Client: h.Client, APIReader: h.api, Reports: h, DriverNamespace: storage}
	looks := 0
	h.run("m", func(look int) {
		if look == 5 {
			change(volumeOf("pv"), guarded)(h)
		}
		if !strings.Contains(h.says("m"), "example.com/keep") {
			return
		}
		result := must.Value(r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: "m"}}))(t)
		if looks++; result.RequeueAfter < poll {
			t.Errorf("it looks again after %v", result.RequeueAfter)
		}
		if looks == 3 {
			change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Finalizers = slices.Clone(ownFinalizers) })(h)
		}
	})
	if looks == 0 {
		t.Error("it has waited for nothing")
	}
	if m := h.move("m"); m.Status.Phase != v1alpha1.Succeeded {
		t.Errorf("the move is %s", m.Status.Phase)
	}
}
