package move

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A PersistentVolume that was to be replaced is whole again after the move was undone, also one with the policy Retain: one that is being
// deleted would go with the claim, and its data would be found by nothing.
func TestRetainedVolumeIsPutBack(t *testing.T) {
	for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimRetain, corev1.PersistentVolumeReclaimDelete} {
		t.Run(string(policy), func(t *testing.T) {
			h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.PersistentVolumeReclaimPolicy = policy })(h)
			gone := false
			h.run("m", func(int) {
				if volume := volumeOf("pv"); h.has(volume) && volume.DeletionTimestamp != nil && !gone {
					h.goes(nodeB)
					gone = true
				}
			})
			volume := volumeOf("pv")
			if !h.has(volume) || volume.DeletionTimestamp != nil || volume.Spec.PersistentVolumeReclaimPolicy != policy || place.NodeOfVolume(volume) != nodeA {
				t.Errorf("after the move was undone the PersistentVolume is %+v", volume)
			}
			if !gone || h.move("m").Status.Phase != v1alpha1.Failed || !h.publishes(nodeA) {
				t.Errorf("the target went: %v; the move is %s, the source has %+v", gone, h.move("m").Status.Phase, h.records[nodeA])
			}
		})
	}
}

// A status that another program has written leads to no volume but that of the claim.
func TestStatusIsNotTrusted(t *testing.T) {
	victim := func() *corev1.PersistentVolume {
		v := volumeOf("victim")
		v.UID, v.Spec.CSI.VolumeHandle = "victim's", "pvc-2"
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "other", Name: "data", UID: "other claim"}
		return v
	}
	forged := func(s v1alpha1.VolumeMoveStatus) *v1alpha1.VolumeMove {
		m := moveOf("m")
		m.Status, m.Finalizers = s, []string{v1alpha1.Finalizer}
		return m
	}
	own := v1alpha1.VolumeMoveStatus{
		SourceNode: nodeA, TargetNode: nodeB, Volume: "pv", VolumeUID: "volume before", VolumeHandle: "pvc-1", ClaimUID: "claim data", Fence: "f",
	}
	handle, object := own, own
	handle.Phase, handle.VolumeHandle = v1alpha1.Copying, "pvc-2"
	object.Phase, object.Volume, object.VolumeUID = v1alpha1.Switching, "victim", "victim's"
	for name, status := range map[string]v1alpha1.VolumeMoveStatus{"its handle": handle, "its object": object} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, victim(), forged(status), appPod("data-0", false))
			if status.Phase == v1alpha1.Switching {
				h.records[nodeB] = &record{moved: "move-m"}
				delete(h.records, nodeA)
			}
			for range long {
				h.reconcile("m")
				h.live()
				pods := &corev1.PodList{}
				must.Succeed(t, h.api.List(t.Context(), pods, client.MatchingLabels{roleLabel: string(roleOut)}))
				for i := range pods.Items {
					if argsOf(&pods.Items[i])["volume"] == "pvc-2" {
						t.Fatal("the volume of another claim is copied")
					}
				}
			}
			if v := victim(); !h.has(v) || v.UID != "victim's" || v.DeletionTimestamp != nil || place.NodeOfVolume(v) != nodeA {
				t.Errorf("the volume of another claim is %+v", v)
			}
		})
	}
}

// The old copy is not removed if the target has lost its own: a node that was set up anew has the name, and answers.
func TestTargetSetUpAnew(t *testing.T) {
	for name, away := range map[string]bool{"at once": false, "while the source does not answer": true} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			answers := func(is corev1.ConditionStatus) {
				change(node(nodeA), func(n *corev1.Node) { n.Status.Conditions[0].Status = is })(h)
			}
			removing := 0
			h.run("m", func(int) {
				if h.move("m").Status.Phase != v1alpha1.Removing {
					return
				}
				switch removing++; {
				case removing == 1 && away:
					answers(corev1.ConditionUnknown)
				case removing == 1 || removing == 5:
					delete(h.records, nodeB)
				case removing == 6:
					answers(corev1.ConditionTrue)
				case removing == long:
					if h.records[nodeA] == nil || !strings.Contains(h.says("m"), "node node-b") {
						t.Fatalf("the last copy is gone: %q", h.says("m"))
					}
					h.replicas = false
					must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))))
					must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
				}
			})
			if removing < long {
				t.Errorf("the move ended after %d looks, and the source has %+v", removing, h.records[nodeA])
			}
		})
	}
}

// A claim that is deleted leaves a volume with the policy Retain behind: its last copy is not removed before the PersistentVolume is deleted.
func TestRetainedVolumeOutlivesItsClaim(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	change(volumeOf("pv"), func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	})(h)
	removing := 0
	h.run("m", func(int) {
		if h.move("m").Status.Phase != v1alpha1.Removing {
			return
		}
		switch removing++; removing {
		case 1:
			delete(h.records, nodeB) // its disk is lost
			h.replicas = false
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))))
			must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
		case long:
			if h.records[nodeA] == nil {
				t.Fatal("the last copy of a retained volume is gone")
			}
			change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Finalizers = nil })(h)
			must.Succeed(t, h.api.Delete(t.Context(), volumeOf("pv")))
		}
	})
	if removing < long {
		t.Errorf("the move ended after %d looks, and the source has %+v", removing, h.records[nodeA])
	}
	h.wantNothingLeft()
}

// The same while a move is undone: a copy that is whole is not removed before the source answers.
func TestRetainedVolumeIsUndone(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	change(volumeOf("pv"), func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	})(h)
	h.replicas, h.keeps = false, true
	h.run("m", func(look int) {
		switch look {
		case 12:
			h.goes(nodeA)
			must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
		case 12 + long:
			if h.records[nodeA] == nil || h.records[nodeB] == nil || !strings.Contains(h.says("m"), "node node-a is gone") {
				t.Errorf("the nodes have %+v, and the move says %q", h.records, h.says("m"))
			}
			h.comes(nodeA)
		}
	})
	if !h.records[nodeA].publishes() || h.records[nodeB] != nil {
		t.Errorf("the nodes have %+v", h.records)
	}
}

// A target that has lost the copy before that is the volume gets another, or if the move is to be undone, the volume is used on the source again.
func TestCopyIsLostBeforeConfirm(t *testing.T) {
	for name, deleted := range map[string]bool{"it is copied again": false, "it is undone": true} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			lost := false
			h.run("m", func(int) {
				if m := h.move("m"); m.Status.Phase == v1alpha1.Switching && !lost {
					lost = true
					delete(h.records, nodeB)
					if deleted {
						must.Succeed(t, h.api.Delete(t.Context(), m))
					}
				}
			})
			if !lost {
				t.Error("nothing was tested")
			}
			h.wantOn(map[bool]string{false: nodeB, true: nodeA}[deleted])
		})
	}
}

// A pod that is made during the fence waits: one that is evicted would be made again, and again, as long as another takes to end.
func TestPodsThatComeToFence(t *testing.T) {
	slow := appPod("slow", false)
	slow.Finalizers = []string{"example.com/slow"}
	h := newHarness(t, moveOf("m"), slow)
	h.ahead = time.Minute
	h.run("m", func(look int) {
		if look == 2*long {
			change(appPod("slow", false), func(p *corev1.Pod) { p.Finalizers = nil })(h)
		}
	})
	if h.evicted > 3 {
		t.Errorf("pods are evicted %d times", h.evicted)
	}
	h.wantOn(nodeB)
}

// The clock of the API server that makes pods is ahead of that of the operator's.
func TestClocksOfAPIServersAreApart(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.ahead = 5 * time.Minute
	h.run("m")
	h.live()
	pod := appPod("data-0", false)
	if h.has(pod); pod.Spec.NodeName != nodeB {
		t.Errorf("the pod waits on %s: %s", pod.Spec.NodeName, h.says("m"))
	}
}

// The clock of the API server is a quarter of an hour ahead when the move begins, and is set right while the volume is fenced. Pods that came to
// the fence before that seem to have been made long after the switch.
func TestClockIsSetRight(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.ahead = 15 * time.Minute
	h.clock = func() time.Time { return time.Now().Add(h.ahead) }
	h.run("m", func(int) {
		if pod := appPod("data-0", false); h.move("m").Status.Phase == v1alpha1.Switching && h.has(pod) && pod.Status.Phase == corev1.PodPending {
			h.ahead = 0
		}
	})
	if h.ahead != 0 {
		t.Error("nothing was tested")
	}
	h.wantOn(nodeB)
}

// What waits on the source is evicted also when the Node of the target is gone.
func TestStuckPodsAreEvictedWithoutTheTarget(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	m := h.move("m")
	m.Status.SourceNode, m.Status.TargetNode, m.Status.ClaimUID = nodeA, "gone", claimOf("data").UID
	ending, stuck, err := users{move: m, api: apiServer{writer: h.Client, reader: h.api}, arrived: h.arrived}.freeStuck(t.Context())
	if must.Succeed(t, err); len(ending) != 1 || len(stuck) > 0 {
		t.Errorf("evicted are %q, and left %q", ending, stuck)
	}
}

// Pods that are bound to the source by its name, and are made again there, hold up no move, and are not evicted for ever.
func TestPodsBoundToSource(t *testing.T) {
	for name, tt := range map[string]struct {
		bind func(*corev1.Pod)
		want int // of them are made
	}{
		"by a label of their template": {func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: nodeA} }, 1},
		"by the name in it":            {func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(time.Now().Add(time.Hour)) }, 1 + fewReturns},
	} {
		t.Run(name, func(t *testing.T) { podsBoundToSource(t, tt.bind, tt.want) })
	}
}

func podsBoundToSource(t *testing.T, bind func(*corev1.Pod), want int) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	made := 0
	h.run("m", func(int) {
		pod := appPod(fmt.Sprint("bound-", made), false)
		if h.move("m").Status.Phase != v1alpha1.Removing || made > 0 && h.has(appPod(fmt.Sprint("bound-", made-1), false)) {
			return
		}
		made++
		pod.Status.Phase = corev1.PodPending
		bind(pod)
		must.Succeed(t, h.api.Create(t.Context(), pod))
	})
	if made != want || !strings.Contains(h.says("m"), fmt.Sprint("pod bound-", made-1)) {
		t.Errorf("it was made %d times, and the move says %q", made, h.says("m"))
	}
}

// What is saved of a PersistentVolume is what kubectl takes, on the node that has the volume.
func TestSavedVolumeCanBeApplied(t *testing.T) {
	for _, undone := range []bool{false, true} {
		h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		looked, want := 0, nodeB
		if undone {
			want = nodeA
		}
		h.run("m", func(int) {
			volume := volumeOf("pv")
			if there := h.has(volume); there && volume.DeletionTimestamp != nil && undone && len(h.wasGone) == 0 {
				h.goes(nodeB)
			} else if !there {
				looked++
				secret := &corev1.Secret{ObjectMeta: madeFor("m").meta("")}
				h.has(secret)
				saved := &corev1.PersistentVolume{}
				must.Succeed(t, json.Unmarshal(secret.Data[volumeFile], saved))
				if saved.Kind != "PersistentVolume" || saved.APIVersion != "v1" || place.NodeOfVolume(saved) != want || saved.Spec.ClaimRef.UID != "claim data" {
					t.Errorf("saved is %+v", saved)
				}
			}
		})
		if looked == 0 {
			t.Error("nothing was tested")
		}
	}
}
