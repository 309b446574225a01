package move

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// twoOfOnePod is a pod that uses data and logs, of which both have a VolumeMove.
func twoOfOnePod(t *testing.T, more ...client.Object) *harness {
	t.Helper()
	h := newHarness(t, append(append(withLogs(nodeA), using(appPod("data-0", false), "logs"), moveOf("m"), ofLogs()), more...)...)
	h.also, h.records[keyAt(nodeA, "pvc-logs")] = []string{"logs"}, &record{}
	return h
}

// status changes the status of the VolumeMove of logs.
func (h *harness) status(do func(*v1alpha1.VolumeMove)) {
	h.Helper()
	logs := h.move("logs")
	do(logs)
	must.Succeed(h, h.api.Status().Update(h.Context(), logs))
}

// The pod of two volumes goes on until both are copied, however late the second begins, and whichever is looked at first. Then both are fenced, and the
// pod runs on the target.
func TestVolumesOfOnePodAreFencedTogether(t *testing.T) {
	for _, order := range [][]string{{"m", "logs"}, {"logs", "m"}} {
		for _, late := range []int{0, 12} {
			t.Run(fmt.Sprintf("%s, %d looks later", order[1], late), func(t *testing.T) {
				h := twoOfOnePod(t)
				for look := range 100 {
					if h.reconcile(order[0]); look >= late {
						h.reconcile(order[1])
					}
					h.live()
					one, two := h.move(order[0]), h.move(order[1])
					if h.evicted > 0 && (one.Status.MayFenceTime == nil || two.Status.MayFenceTime == nil) {
						t.Fatalf("look %d: a pod is evicted for one that is %s, and one that is %s", look, one.Status.Phase, two.Status.Phase)
					}
					if look < late && (one.Status.Phase != v1alpha1.Copying || look > late/2 && !one.Status.Copied) {
						t.Fatalf("look %d: the first is %s, and says %q", look, one.Status.Phase, h.says(order[0]))
					}
				}
				h.wantOn(nodeB)
				if v := volumeOf("pv-logs"); !h.has(v) || place.NodeOfVolume(v) != nodeB || h.move("logs").Status.Phase != v1alpha1.Succeeded {
					t.Errorf("logs is on %s: %s", place.NodeOfVolume(v), h.says("logs"))
				}
			})
		}
	}
}

// The second of two volumes whose copy is refused keeps the first from being fenced: the pod goes on, with both.
func TestRefusedCopyKeepsVolumesOfOnePodTogether(t *testing.T) {
	h := twoOfOnePod(t)
	h.records[keyAt(nodeB, "pvc-logs")] = &record{} // another volume has the name there
	for range 30 {
		h.reconcile("m")
		h.reconcile("logs")
		h.live()
	}
	if m := h.move("m"); m.Status.Phase != v1alpha1.Copying || h.evicted > 0 || h.fences > 0 || !strings.Contains(h.says("logs"), "the volume exists there") {
		t.Errorf("the first is %s, there are %d evictions, %d fences, and the second says %q", m.Status.Phase, h.evicted, h.fences, h.says("logs"))
	}
	if says := h.says("m"); !strings.Contains(says, "it waits for the VolumeMove space/logs of the claim logs, which pods use too: it copies") {
		t.Errorf("the first says %q", says)
	}
	delete(h.records, keyAt(nodeB, "pvc-logs"))
	for range 100 {
		h.reconcile("m")
		h.reconcile("logs")
		h.live()
	}
	h.wantOn(nodeB)
}

// A volume that is copied gets leave to be fenced, or says what of its pods' other volumes it waits for.
func TestLeave(t *testing.T) {
	in := func(phase v1alpha1.Phase, change ...func(*v1alpha1.VolumeMove)) func(h *harness) {
		return func(h *harness) {
			h.status(func(logs *v1alpha1.VolumeMove) {
				begun(logs, nodeB).Status.Phase = phase
				for _, do := range change {
					do(logs)
				}
			})
		}
	}
	copied := func(m *v1alpha1.VolumeMove) { m.Status.Copied = true }
	deleted := func(h *harness) {
		logs := h.move("logs")
		logs.Finalizers = []string{v1alpha1.Finalizer}
		h.update(logs)
		must.Succeed(h, h.api.Delete(h.Context(), logs))
	}
	adds := func(objects ...client.Object) func(h *harness) {
		return func(h *harness) {
			for _, o := range objects {
				must.Succeed(h, h.api.Create(h.Context(), o))
			}
		}
	}
	local := func(v *corev1.PersistentVolume) {
		v.Spec.CSI.Driver = "other.example.com"
	}
	const ofLogsSays = "the VolumeMove space/logs of the claim logs, which pods use too: "
	for name, tt := range map[string]struct {
		then []func(h *harness)
		want string // what is said; empty for leave
	}{
		"the other has not begun":       {nil, "the VolumeMove space/logs of the claim logs, which pods use too"},
		"the other copies":              {[]func(*harness){in(v1alpha1.Copying)}, ofLogsSays + "it copies"},
		"the other has copied":          {[]func(*harness){in(v1alpha1.Copying, copied)}, ""},
		"the other may fence":           {[]func(*harness){in(v1alpha1.Fenced)}, ""},
		"the other switches":            {[]func(*harness){in(v1alpha1.Switching)}, ""},
		"the other is there":            {[]func(*harness){change(volumeOf("pv-logs"), func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = onNode(nodeB) })}, ""},
		"the other has failed":          {[]func(*harness){in(v1alpha1.Failed)}, "a VolumeMove of the claim logs, which pods use too, and which is on node node-a: make it, or delete this one"},
		"the other's move was deleted":  {[]func(*harness){func(h *harness) { must.Succeed(h, h.api.Delete(h.Context(), ofLogs())) }}, "a VolumeMove of the claim logs"},
		"the other is undone":           {[]func(*harness){in(v1alpha1.Undoing)}, ofLogsSays + "it is undone"},
		"the other is deleted":          {[]func(*harness){in(v1alpha1.Copying, copied), deleted}, ofLogsSays + "it is undone"},
		"the other is deleted, fenced":  {[]func(*harness){in(v1alpha1.Fenced), deleted}, ofLogsSays + "it is undone"},
		"the other goes elsewhere":      {[]func(*harness){in(v1alpha1.Copying, copied, func(m *v1alpha1.VolumeMove) { m.Status.TargetNode = nodeC })}, ofLogsSays + "it goes to node node-c"},
		"the other cannot move":         {[]func(*harness){in(v1alpha1.Copying, copied), adds(withLogs(nodeA, alsoNamed("pv-2"))[1])}, ofLogsSays + "the PersistentVolume pv-2 leads"},
		"a third copies":                {[]func(*harness){in(v1alpha1.Copying, copied), adds(append(withClaim("third", nodeA), using(more("third-0"), "logs", "third"))...)}, "a VolumeMove of the claim third"},
		"a third copies, the other not": {[]func(*harness){in(v1alpha1.Fenced), adds(append(withClaim("third", nodeA), using(more("third-0"), "logs", "third"))...)}, ""},
		"the target does not reach a third": {
			[]func(*harness){in(v1alpha1.Copying, copied), adds(append(withClaim("third", nodeA, local), using(more("third-0"), "logs", "third"))...)},
			"the volume pv-third, which pods use too, and which node node-b does not reach",
		},
		"the target reaches a third": {
			[]func(*harness){in(v1alpha1.Copying, copied), adds(append(withClaim("third", nodeA, local, everywhere), using(more("third-0"), "logs", "third"))...)}, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := twoOfOnePod(t)
			h.reconcile("m")
			for _, do := range tt.then {
				do(h)
			}
			for range 10 {
				if h.move("m").Status.MayFenceTime == nil {
					h.reconcile("m")
					h.live()
				}
			}
			m := h.move("m")
			switch may := m.Status.MayFenceTime != nil; {
			case may != (tt.want == "") || may == m.Status.Copied || may != (m.Status.Phase == v1alpha1.Fenced):
				t.Errorf("the move is %s, copied: %v, may fence: %v, and says %q", m.Status.Phase, m.Status.Copied, may, h.says("m"))
			case !may && (!strings.Contains(h.says("m"), "it waits for "+tt.want) || h.evicted > 0 || h.fences > 0):
				t.Errorf("there are %d evictions, %d fences, and it says %q, want %q", h.evicted, h.fences, h.says("m"), tt.want)
			}
		})
	}
}

// A pod that came after the moves have begun is one that uses their volumes together.
func TestLeaveCountsPodsThatCameLater(t *testing.T) {
	h := newHarness(t, append(withLogs(nodeA), appPod("data-0", false), moveOf("m"))...)
	h.reconcile("m")
	must.Succeed(t, h.api.Create(t.Context(), using(appPod("later-0", false), "logs")))
	for range 20 {
		h.reconcile("m")
		h.live()
	}
	if h.evicted > 0 || !strings.Contains(h.says("m"), "a VolumeMove of the claim logs") {
		t.Errorf("%d pods are evicted, and it says %q", h.evicted, h.says("m"))
	}
	must.Succeed(t, h.api.Delete(t.Context(), appPod("later-0", false)))
	h.run("m")
	h.wantOn(nodeB)
}

// What was copied counts for as long as its movers work, and can be heard, also when a long pass has filled what is read of the log.
func TestCopiedWhileMoversWork(t *testing.T) {
	h := twoOfOnePod(t)
	wantCopied := func(want bool, when string) {
		t.Helper()
		if h.reconcile("m"); h.move("m").Status.Copied != want {
			t.Errorf("%s it is copied: %v, and says %q", when, !want, h.says("m"))
		}
	}
	for range 10 {
		h.reconcile("m")
		h.live()
	}
	wantCopied(true, "at first")
	out := h.moverOf(roleOut)
	h.logs[out.Name] = "{\"event\":\"passing\",\"bytes\":1}\n"
	wantCopied(true, "amid a long pass")
	fails := func(p *corev1.Pod) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "{}\nno room\n"}}}}
	}
	change(out, fails)(h)
	wantCopied(false, "when its mover fails")
	change(out, func(p *corev1.Pod) { p.Status.ContainerStatuses = nil })(h)
	wantCopied(false, "when that was started again")
	h.logs[out.Name] = "{\"event\":\"copied\"}\n"
	wantCopied(true, "when that has copied")
	h.unheard = unreachable
	wantCopied(false, "unheard")
	h.unheard = ""
	wantCopied(true, "when it is heard again")
	change(node(nodeA), func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })(h)
	wantCopied(false, "when its node does not answer")
	if h.evicted > 0 || h.fences > 0 {
		t.Errorf("%d pods are evicted, and there are %d fences", h.evicted, h.fences)
	}
}
