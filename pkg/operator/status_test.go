package operator

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const current = "v1.2.3"

func deployed(status hppv1.HostPathProvisionerStatus) *hppv1.HostPathProvisioner {
	return &hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: "hpp", Generation: 4}, Spec: onePoolSpec(), Status: status}
}

// nodes is a DaemonSet on so many nodes, of which some have the newest pod and some are ready.
func nodes(desired, updated, ready int32) map[string]*appsv1.DaemonSet {
	return map[string]*appsv1.DaemonSet{driverDaemonSet: {
		ObjectMeta: metav1.ObjectMeta{Name: driverDaemonSet, Generation: 2},
		Status: appsv1.DaemonSetStatus{
			ObservedGeneration: 2, DesiredNumberScheduled: desired, UpdatedNumberScheduled: updated, NumberReady: ready,
		},
	}}
}

func podOn(node string, state corev1.ContainerState) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "driver-" + node},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "driver", State: state}}},
	}
}

func TestAssess(t *testing.T) {
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "in words"}}
	}
	stale := nodes(2, 2, 2)
	stale[driverDaemonSet].Generation = 3
	running := hppv1.HostPathProvisionerStatus{ObservedVersion: current, ObservedGeneration: 3}
	older := hppv1.HostPathProvisionerStatus{ObservedVersion: "v1.0.0", ObservedGeneration: 3}
	tests := map[string]struct {
		status hppv1.HostPathProvisionerStatus
		seen   Observed
		// available, progressing and degraded, and the version that is observed then
		want    [3]bool
		version string
		words   string
	}{
		"first install":                     {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 0)}, [3]bool{false, true, false}, "", "0 of 2 nodes are ready"},
		"not there yet":                     {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: map[string]*appsv1.DaemonSet{driverDaemonSet: nil}}, [3]bool{false, true, false}, "", "does not exist yet"},
		"all is well":                       {running, Observed{DaemonSets: nodes(2, 2, 2)}, [3]bool{true, false, false}, current, "Application Available"},
		"no node matches":                   {running, Observed{DaemonSets: nodes(0, 0, 0)}, [3]bool{true, false, false}, current, "Application Available"},
		"change is not taken up":            {older, Observed{DaemonSets: stale}, [3]bool{false, true, false}, "v1.0.0", "not taken up yet"},
		"upgrade under way":                 {older, Observed{DaemonSets: nodes(2, 1, 2)}, [3]bool{false, true, false}, "v1.0.0", "1 of 2 nodes are updated"},
		"upgrade is done":                   {older, Observed{DaemonSets: nodes(2, 2, 2)}, [3]bool{true, false, false}, current, "Application Available"},
		"a node fails":                      {running, Observed{DaemonSets: nodes(2, 2, 1), Pods: []corev1.Pod{podOn("node-b", waiting("CrashLoopBackOff"))}}, [3]bool{false, true, true}, current, "node-b: container driver of pod driver-node-b: CrashLoopBackOff: in words"},
		"a node fails in the first rollout": {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 1), Pods: []corev1.Pod{podOn("node-b", waiting("ImagePullBackOff"))}}, [3]bool{false, true, true}, "", "ImagePullBackOff"},
		"a pod is only starting":            {older, Observed{DaemonSets: nodes(2, 2, 1), Pods: []corev1.Pod{podOn("node-b", waiting("ContainerCreating"))}}, [3]bool{false, true, false}, "v1.0.0", "1 of 2 nodes are ready"},
		"an object cannot be applied":       {running, Observed{DaemonSets: nodes(2, 2, 2), Problems: []error{errors.New("no right")}}, [3]bool{true, true, true}, current, ""},
		"snapshots are asked for":           {running, Observed{DaemonSets: nodes(2, 2, 2), Notices: []string{"no snapshots"}}, [3]bool{true, false, false}, current, "no snapshots"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := assess(deployed(tt.status), current, tt.seen)
			is := func(kind string) bool { return meta.IsStatusConditionTrue(got.Conditions, kind) }
			if values := [3]bool{is(hppv1.ConditionAvailable), is(hppv1.ConditionProgressing), is(hppv1.ConditionDegraded)}; values != tt.want {
				t.Errorf("available, progressing, degraded are %v, want %v: %+v", values, tt.want, got.Conditions)
			}
			if got.ObservedVersion != tt.version {
				t.Errorf("the observed version is %q, want %q", got.ObservedVersion, tt.version)
			}
			if message := meta.FindStatusCondition(got.Conditions, hppv1.ConditionAvailable).Message; !strings.Contains(message, tt.words) {
				t.Errorf("the message is %q, want %q in it", message, tt.words)
			}
			for _, condition := range got.Conditions {
				if condition.ObservedGeneration != 4 || condition.Reason == "" || strings.Contains(condition.Reason, " ") {
					t.Errorf("the condition %+v is not usable", condition)
				}
			}
			// Seen once more, nothing changes: no write.
			again := deployed(got)
			if diff := cmp.Diff(got, assess(again, current, tt.seen)); diff != "" {
				t.Errorf("a second look changes the status: %s", diff)
			}
		})
	}
}

func TestDowngrades(t *testing.T) {
	tests := map[string]struct {
		before     string
		generation int64
		to         string
		want       bool
	}{
		"older":                     {"v1.2.3", 1, "v1.2.2", true},
		"newer":                     {"v1.2.3", 1, "v1.3.0", false},
		"the same":                  {"v1.2.3", 1, "v1.2.3", false},
		"of the earlier operator":   {"v0.25.2", 0, "v0.1.0", false},
		"a version that is none":    {"latest", 1, "v0.1.0", false},
		"to a version that is none": {"v1.2.3", 1, "dev", false},
		"nothing before":            {"", 1, "v0.1.0", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status := hppv1.HostPathProvisionerStatus{ObservedVersion: tt.before, ObservedGeneration: tt.generation}
			if got := downgrades(status, tt.to); got != tt.want {
				t.Errorf("downgrades() = %v, want %v", got, tt.want)
			}
		})
	}
}

// Pods are listed in any order, and the status is the same: else it would be written again and again.
func TestAssessDoesNotDependOnOrder(t *testing.T) {
	crashing := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	pods := []corev1.Pod{podOn("node-a", crashing), podOn("node-b", crashing), podOn("node-c", crashing)}
	object := deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current})
	object.Status = assess(object, current, Observed{DaemonSets: nodes(3, 3, 0), Pods: pods})
	slices.Reverse(pods)
	if diff := cmp.Diff(object.Status, assess(object, current, Observed{DaemonSets: nodes(3, 3, 0), Pods: pods})); diff != "" {
		t.Error(diff)
	}
}

// The oldest object counts, whatever the order in which they are listed.
func TestActiveOf(t *testing.T) {
	made := func(name string, second int64) hppv1.HostPathProvisioner {
		return hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(second, 0)}}
	}
	if got := activeOf([]hppv1.HostPathProvisioner{made("b", 2), made("c", 1), made("a", 3)}).Name; got != "c" {
		t.Errorf("%s counts, want c", got)
	}
	if got := activeOf([]hppv1.HostPathProvisioner{made("b", 2), made("a", 2)}).Name; got != "a" {
		t.Errorf("%s counts, want a", got)
	}
}

// A node is reported once it has been gone for long enough, and not any more when it is back.
func TestGoneNodes(t *testing.T) {
	volume := func(name, node string) corev1.PersistentVolume {
		return corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: topologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}}},
		}}
	}
	volumes := []corev1.PersistentVolume{volume("pv-2", "gone"), volume("pv-1", "gone"), volume("pv-3", "here"), {}}
	left := volumesOfGone(volumes, sets.New("here"))
	g := &goneNodes{}
	now := time.Now()
	if found := g.report(left, now); len(found) > 0 {
		t.Errorf("reported at once: %v", found)
	}
	want := []hppv1.DeletedNode{{Node: "gone", PersistentVolumes: 2, Command: cleanUp([]string{"pv-1", "pv-2"})}}
	if diff := cmp.Diff(want, g.report(left, now.Add(goneAfter))); diff != "" {
		t.Error(diff)
	}
	if found := g.report(nil, now.Add(goneAfter)); len(found) > 0 {
		t.Errorf("reported although it is back: %v", found)
	}
	if found := g.report(left, now.Add(goneAfter)); len(found) > 0 {
		t.Errorf("the time that it was gone before counts: %v", found)
	}
}
