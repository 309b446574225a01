package move

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// The API server does not reach the kubelet of the source, as with its port closed or its certificate expired: no log can be read, and all
// else works.
const unreachable = `Get "https://10.0.0.1:10250/containerLogs/": remote error: tls: internal error`

// A mover that cannot be heard fences nothing: pods of the source go on, and may be made again there.
func TestNothingIsFencedUnheard(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.unheard = unreachable
	for look := range 100 {
		if look%30 == 29 {
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))))
		}
		h.reconcile("m")
		h.live()
	}
	m, pod := h.move("m"), appPod("data-0", false)
	if !h.has(pod) || pod.Status.Phase != corev1.PodRunning || h.fences > 0 || h.evicted > 0 {
		t.Errorf("the pod is %+v, there were %d fences and %d evictions", pod.Status, h.fences, h.evicted)
	}
	if says := h.says("m"); m.Status.Phase != v1alpha1.Copying || fencedSince(m) != nil || !strings.Contains(says, "pods go on") || !strings.Contains(says, unreachable) {
		t.Errorf("the move is %s, fenced since %v, and says %q", m.Status.Phase, fencedSince(m), says)
	}
	h.unheard = ""
	h.run("m")
	h.wantOn(nodeB)
}

// When a mover has leave to fence it may have done so, heard or not: its pods are evicted once, and it counts as fenced from then on. One
// that is made anew has the leave of before, and needs none where it is not of the source.
func TestFencedUnheard(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	now := time.Now()
	h.clock = func() time.Time { return now }
	for h.move("m").Status.MayFenceTime == nil {
		h.reconcile("m")
		h.live()
	}
	if h.fences > 0 {
		t.Fatal("it was fenced before leave was written")
	}
	h.unheard, h.ahead = unreachable, 2*fences
	for look := range 50 {
		if look == 1 {
			must.Succeed(t, h.api.Delete(t.Context(), &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleOut))}))
		}
		h.reconcile("m")
		h.live()
		now = now.Add(idle)
		m := h.move("m")
		if says := h.says("m"); m.Status.Phase != v1alpha1.Fenced || fencedSince(m) == nil || strings.Contains(says, "pods go on") {
			t.Fatalf("the move is %s, fenced since %v, and says %q", m.Status.Phase, fencedSince(m), says)
		}
	}
	pod := appPod("data-0", false)
	if !h.has(pod) || pod.Status.Phase == corev1.PodRunning || h.fences != 1 || h.evicted != 1 {
		t.Errorf("the pod is %+v, there were %d fences and %d evictions", pod.Status, h.fences, h.evicted)
	}
	if says := h.says("m"); !strings.Contains(says, unreachable) || !strings.Contains(says, "may have fenced") {
		t.Errorf("it says %q", says)
	}
	in := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleIn))}
	if h.has(in); in.Annotations[mayFenceAnnotation] != "" {
		t.Error("the target may fence")
	}
	h.unheard = ""
	h.run("m")
	h.wantOn(nodeB)
}

// A mover that has leave may not get to its fence for long: one that was made anew copies all first, and the driver may refuse it. Pods that run then
// are evicted once, in case it has: those that are made after that and run show that it has not.
func TestNotFencedUnheard(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	now := time.Now()
	h.clock = func() time.Time { return now }
	for h.move("m").Status.MayFenceTime == nil {
		h.reconcile("m")
		h.live()
	}
	h.unheard, h.hangs = unreachable, nodeA
	for range 60 {
		h.ahead = time.Until(now) + time.Second
		h.reconcile("m")
		h.live()
		now = now.Add(idle)
	}
	pod := appPod("data-0", false)
	if !h.has(pod) || pod.Status.Phase != corev1.PodRunning || h.fences != 0 || h.evicted != 1 {
		t.Errorf("the pod is %+v, there were %d fences and %d evictions", pod.Status, h.fences, h.evicted)
	}
	h.unheard, h.hangs, h.ahead = "", "", 0
	h.run("m")
	h.wantOn(nodeB)
}

// An operator from before leave has seen the fence.
func TestFencedByEarlierOperatorUnheard(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	for h.move("m").Status.FencedTime == nil {
		h.reconcile("m")
		h.live()
	}
	m := h.move("m")
	m.Status.MayFenceTime = nil
	must.Succeed(t, h.api.Status().Update(t.Context(), m))
	h.unheard = unreachable
	h.reconcile("m")
	if says := h.says("m"); strings.Contains(says, "pods go on") || h.evicted == 0 {
		t.Errorf("%d pods are evicted, and it says %q", h.evicted, says)
	}
}

// Kubelet removes the containers of movers that have ended where its disk is full, and their logs with them: the next mover says the fence again.
func TestLogOfMoverThatHasEndedIsGone(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	ended := types.UID("")
	h.run("m", func(int) {
		switch out := h.moverOf(roleOut); {
		case out == nil, ended != "" && out.UID != ended:
			h.lost = ""
		case out.Status.Phase == corev1.PodSucceeded:
			ended, h.lost = out.UID, "unable to retrieve container logs for containerd://1234"
		}
	})
	if ended == "" {
		t.Error("nothing was tested")
	}
	h.wantOn(nodeB)
}

// While no log can be read at all, what was handed over stays so.
func TestHandedOverUnheard(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	for range 100 {
		h.reconcile("m")
		h.live()
		if h.records[nodeA].handedOver {
			h.unheard = unreachable
		}
	}
	if m := h.move("m"); m.Status.Phase != v1alpha1.Fenced || !strings.Contains(h.says("m"), unreachable) {
		t.Errorf("the move is %s, and says %q", m.Status.Phase, h.says("m"))
	}
	h.unheard = ""
	h.run("m")
	h.wantOn(nodeB)
}
