package status

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/sets"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

const current = "v1.2.3"

func deployed(status hppv1.HostPathProvisionerStatus) *hppv1.HostPathProvisioner {
	return &hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: "hpp", Generation: 4}, Spec: hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{{Name: "local", Path: "/var/hpvolumes"}}}, Status: status}
}

// nodes is a DaemonSet on so many nodes, of which some have the newest pod and some are ready.
func nodes(desired, updated, ready int32) map[string]*appsv1.DaemonSet {
	tenth := intstr.FromString("10%")
	return map[string]*appsv1.DaemonSet{render.DriverDaemonSet: {
		ObjectMeta: metav1.ObjectMeta{Name: render.DriverDaemonSet, Generation: 2},
		Spec: appsv1.DaemonSetSpec{UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
			Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: &tenth},
		}},
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

// mounterOn is what keeps the pool mounted on a node.
func mounterOn(node string, change ...func(*appsv1.DeploymentStatus)) appsv1.Deployment {
	m := appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "mounter-" + node, Labels: render.PoolLabels("local"), Annotations: map[string]string{"hostpathprovisioner.kubevirt.io/node": node}},
		Status:     appsv1.DeploymentStatus{Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: 1},
	}
	for _, of := range change {
		of(&m.Status)
	}
	return m
}

func unmounted(s *appsv1.DeploymentStatus) { s.ReadyReplicas = 0 }

// replaced has the pod of an earlier version, and surging that beside the next one until this is ready.
func replaced(s *appsv1.DeploymentStatus) { s.UpdatedReplicas = 0 }
func surging(s *appsv1.DeploymentStatus)  { s.Replicas = 2 }

// conditionLetters has a letter for each condition that is true.
func conditionLetters(status hppv1.HostPathProvisionerStatus) string {
	letters := []string{"-", "-", "-", "-"}
	for i, kind := range []string{hppv1.ConditionAvailable, hppv1.ConditionProgressing, hppv1.ConditionDegraded, hppv1.ConditionRolledOut} {
		if meta.IsStatusConditionTrue(status.Conditions, kind) {
			letters[i] = kind[:1]
		}
	}
	return strings.Join(letters, " ")
}

func TestAssess(t *testing.T) {
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "in words"}}
	}
	stale := nodes(2, 2, 2)
	stale[render.DriverDaemonSet].Generation = 3
	running := hppv1.HostPathProvisionerStatus{ObservedVersion: current, ObservedGeneration: 3}
	older := hppv1.HostPathProvisionerStatus{ObservedVersion: "v1.0.0", ObservedGeneration: 3}
	rolledOut := func(status hppv1.HostPathProvisionerStatus, available, rolledOut metav1.ConditionStatus) hppv1.HostPathProvisionerStatus {
		status.Conditions = []metav1.Condition{
			{Type: hppv1.ConditionAvailable, Status: available, Reason: "Before"}, {Type: hppv1.ConditionRolledOut, Status: rolledOut, Reason: "Before"},
		}
		return status
	}
	settled, rolling := rolledOut(running, "True", "True"), rolledOut(running, "True", "False")
	upstream := hppv1.HostPathProvisionerStatus{ObservedVersion: "v0.23.0", Conditions: []metav1.Condition{{Type: hppv1.ConditionAvailable, Status: "True"}}}
	failing := []corev1.Pod{podOn("node-b", waiting("CrashLoopBackOff"))}
	starting := []corev1.Pod{podOn("node-b", waiting("ContainerCreating"))}
	nowhere := map[string]Service{"local": {Asked: true, NotServing: sets.New("node-a", "node-b")}}
	somewhere := map[string]Service{"local": {Asked: true, Serving: sets.New("node-a"), NotServing: sets.New("node-b")}}
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "roles"}, "hpp", errors.New("it was changed"))
	busy := errors.Join(apierrors.NewServerTimeout(schema.GroupResource{}, "patch", 1), apierrors.NewTooManyRequests("", 1),
		apierrors.NewServiceUnavailable("starting"), apierrors.NewTimeoutError("slow", 1))
	tests := map[string]struct {
		status hppv1.HostPathProvisionerStatus
		seen   Observed
		// Available, Progressing, Degraded and RolledOut, and the version that is observed then
		want    string
		version string
		words   string
	}{
		"first install":                       {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 0)}, "- P - -", "", "0 of 2 nodes are ready"},
		"first install, on one node":          {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 1)}, "- P - -", "", "1 of 2 nodes are ready"},
		"not there yet":                       {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: map[string]*appsv1.DaemonSet{render.DriverDaemonSet: nil}}, "- P - -", "", "does not exist yet"},
		"all is well":                         {running, Observed{DaemonSets: nodes(2, 2, 2)}, "A - - R", current, "Application Available"},
		"no node matches":                     {running, Observed{DaemonSets: nodes(0, 0, 0)}, "- - D -", current, "no node"},
		"no node matches from the beginning":  {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(0, 0, 0)}, "- - D -", "", "no node"},
		"change is not taken up":              {older, Observed{DaemonSets: stale}, "A P - -", "v1.0.0", "Application Available"},
		"upgrade under way":                   {older, Observed{DaemonSets: nodes(2, 1, 2)}, "A P - -", "v1.0.0", "Application Available"},
		"upgrade, one pod is being replaced":  {older, Observed{DaemonSets: nodes(2, 1, 1), Pods: starting}, "A P - -", "v1.0.0", "Application Available"},
		"upgrade, the last pod is starting":   {older, Observed{DaemonSets: nodes(2, 2, 1), Pods: starting}, "A P - -", "v1.0.0", "Application Available"},
		"upgrade, more than a tenth is away":  {older, Observed{DaemonSets: nodes(30, 10, 26)}, "- P - -", "v1.0.0", "26 of 30 nodes are ready"},
		"upgrade, all nodes are away":         {older, Observed{DaemonSets: nodes(1, 1, 0), Pods: starting}, "- P - -", "v1.0.0", "0 of 1 nodes are ready"},
		"upgrade, the new version fails":      {older, Observed{DaemonSets: nodes(2, 1, 1), Pods: failing}, "- P D -", "v1.0.0", "CrashLoopBackOff"},
		"upgrade is done":                     {older, Observed{DaemonSets: nodes(2, 2, 2)}, "A - - R", current, "Application Available"},
		"takeover begins":                     {upstream, Observed{DaemonSets: nodes(2, 0, 2)}, "A P - -", "", "Application Available"},
		"takeover, one pod is being replaced": {upstream, Observed{DaemonSets: nodes(2, 1, 1), Pods: starting}, "A P - -", "", "Application Available"},
		"takeover is done":                    {upstream, Observed{DaemonSets: nodes(2, 2, 2)}, "A - - R", current, "Application Available"},
		"a node fails":                        {settled, Observed{DaemonSets: nodes(2, 2, 1), Pods: failing}, "- - D R", current, "node-b: pod driver-node-b: container driver: CrashLoopBackOff: in words"},
		"a node starts anew":                  {settled, Observed{DaemonSets: nodes(2, 2, 1), Pods: starting}, "- - - R", current, "1 of 2 nodes are ready"},
		"a node is added":                     {settled, Observed{DaemonSets: nodes(3, 2, 2), Pods: starting}, "A P - -", current, "Application Available"},
		"the added node is starting":          {rolling, Observed{DaemonSets: nodes(3, 3, 2), Pods: starting}, "A P - -", current, "Application Available"},
		"a node fails in the first rollout":   {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 1), Pods: failing}, "- P D -", "", "CrashLoopBackOff"},
		"an object cannot be applied":         {running, Observed{DaemonSets: nodes(2, 2, 2), Problems: []error{errors.New("no right")}}, "A P D -", current, ""},
		"the driver cannot be applied":        {older, Observed{DaemonSets: nodes(2, 0, 2), Outdated: sets.New(render.DriverDaemonSet), Problems: []error{errors.New("no right")}}, "- P D -", "v1.0.0", "not what it should be"},
		"another client was faster":           {settled, Observed{DaemonSets: nodes(2, 2, 2), Problems: []error{fmt.Errorf("apply: %w", errors.Join(conflict))}}, "A P - -", current, "Application Available"},
		"the API server is busy":              {settled, Observed{DaemonSets: nodes(2, 2, 2), Problems: []error{busy, errors.Join(context.DeadlineExceeded)}}, "A P - -", current, "Application Available"},
		"the driver is not applied at once":   {older, Observed{DaemonSets: nodes(2, 0, 2), Outdated: sets.New(render.DriverDaemonSet), Problems: []error{busy}}, "A P - -", "v1.0.0", "Application Available"},
		"one error of two does not pass":      {settled, Observed{DaemonSets: nodes(2, 2, 2), Problems: []error{errors.Join(conflict, errors.New("no right"))}}, "A P D -", current, ""},
		"snapshots are asked for":             {running, Observed{DaemonSets: nodes(2, 2, 2), Notices: []string{"no snapshots"}}, "A - - R", current, "no snapshots"},
		"a pool is still to be unmounted":     {settled, Observed{DaemonSets: nodes(2, 2, 2), Leaving: []string{"fast on node-a"}}, "A P - R", current, "Application Available"},
		"a pool serves on no node":            {settled, Observed{DaemonSets: nodes(2, 2, 2), Services: nowhere}, "- - D R", current, "pool local: serves on no node"},
		"a pool serves on no node at first":   {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 2), Services: nowhere}, "- - D R", current, "pool local: serves on no node"},
		"a pool serves on one node":           {settled, Observed{DaemonSets: nodes(2, 2, 2), Services: somewhere}, "A - - R", current, "Application Available"},
		"a deleted node has left a volume":    {settled, Observed{DaemonSets: nodes(2, 2, 2), DeletedNodes: []hppv1.DeletedNode{{Node: "gone", PersistentVolumes: 1}}}, "A - - R", current, "has left 1 PersistentVolume:"},
		"a deleted node has left volumes":     {settled, Observed{DaemonSets: nodes(2, 2, 2), DeletedNodes: []hppv1.DeletedNode{{Node: "gone", PersistentVolumes: 2}}}, "A - - R", current, "has left 2 PersistentVolumes:"},
		"no capacity is published yet":        {hppv1.HostPathProvisionerStatus{}, Observed{DaemonSets: nodes(2, 2, 2), Services: map[string]Service{"local": {Asked: true}}}, "A P - -", "", "Application Available"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := Assess(deployed(tt.status), current, tt.seen)
			if conditions := conditionLetters(got); conditions != tt.want {
				t.Errorf("the conditions are %q, want %q: %+v", conditions, tt.want, got.Conditions)
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
			if diff := cmp.Diff(got, Assess(again, current, tt.seen)); diff != "" {
				t.Errorf("a second check changes the status: %s", diff)
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
		"of the upstream operator":  {"v0.25.2", 0, "v0.1.0", false},
		"a version that is none":    {"latest", 1, "v0.1.0", false},
		"to a version that is none": {"v1.2.3", 1, "dev", false},
		"nothing before":            {"", 1, "v0.1.0", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status := hppv1.HostPathProvisionerStatus{ObservedVersion: tt.before, ObservedGeneration: tt.generation}
			if got := Downgrades(status, tt.to); got != tt.want {
				t.Errorf("downgrades() = %v, want %v", got, tt.want)
			}
		})
	}
}

// An object that is refused has conditions that the API server takes, whatever the upstream operator has left in them. It is available while
// what was rolled out serves, and none says that all is well.
func TestRefuse(t *testing.T) {
	for _, reason := range []string{ReasonDowngrade, ReasonPools, ReasonSecond} {
		for _, before := range []metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse, ""} {
			object := deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: "v0.23.0"})
			if before != "" {
				object.Status.Conditions = []metav1.Condition{{Type: hppv1.ConditionAvailable, Status: before, Message: "Application Available"}}
			}
			serves := before != metav1.ConditionTrue
			var seen *Observed
			if serves {
				seen = new(Observed)
			}
			got := Refuse(object, current, reason, "so it is", seen)
			for _, condition := range got.Conditions {
				if condition.Reason == "" || condition.ObservedGeneration != 4 || !strings.Contains(condition.Message, "so it is") {
					t.Errorf("refused for %s, and %q before: %+v", reason, before, condition)
				}
			}
			if meta.IsStatusConditionTrue(got.Conditions, hppv1.ConditionAvailable) != serves {
				t.Errorf("refused for %s, and %q before: Available is not %v", reason, before, serves)
			}
		}
	}
}

// An object that is not reconciled lists nothing that was seen before: a node of which it said that it was deleted may be back.
func TestListsAreOfWhatIsSeenNow(t *testing.T) {
	object := deployed(hppv1.HostPathProvisionerStatus{
		ObservedVersion: current, DeletedNodes: []hppv1.DeletedNode{{Node: "gone"}}, NodeStatuses: []hppv1.NodeStatus{{Node: "down"}},
		StoragePoolStatuses: []hppv1.StoragePoolStatus{{Name: "local"}},
	})
	for what, status := range map[string]hppv1.HostPathProvisionerStatus{
		"refused": Refuse(object, current, ReasonDowngrade, "so it is", new(Observed)), "deleted": Deleting(object, current, []string{"pod writer"}, 1, 0),
	} {
		if len(status.DeletedNodes)+len(status.NodeStatuses)+len(status.StoragePoolStatuses) > 0 {
			t.Errorf("%s: it lists %+v, %+v, %+v", what, status.DeletedNodes, status.NodeStatuses, status.StoragePoolStatuses)
		}
	}
}

// Pods are listed in any order, and the status is the same: else it would be written again and again.
func TestAssessDoesNotDependOnOrder(t *testing.T) {
	crashing := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	pods := []corev1.Pod{podOn("node-a", crashing), podOn("node-b", crashing), podOn("node-c", crashing)}
	object := deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current})
	object.Status = Assess(object, current, Observed{DaemonSets: nodes(3, 3, 0), Pods: pods})
	slices.Reverse(pods)
	if diff := cmp.Diff(object.Status, Assess(object, current, Observed{DaemonSets: nodes(3, 3, 0), Pods: pods})); diff != "" {
		t.Error(diff)
	}
}

// A pool whose claims are not bound, or that is mounted on some nodes only, is not ready, and neither is the object. One that an earlier version keeps
// mounted is not ready in this one, and available.
func TestStatusOfPoolsOnClaims(t *testing.T) {
	object := deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current})
	object.Spec.StoragePools = []hppv1.StoragePool{{Name: "local", Path: "/mnt/local", PVCTemplate: &hppv1.ClaimTemplate{}}}
	claim := func(phase corev1.PersistentVolumeClaimPhase) corev1.PersistentVolumeClaim {
		return corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "hpp-pool-local-node-a", Labels: render.PoolLabels("local")},
			Status: corev1.PersistentVolumeClaimStatus{Phase: phase}}
	}
	tests := map[string]struct {
		claims   []corev1.PersistentVolumeClaim
		mounters []appsv1.Deployment
		phase    hppv1.StoragePoolPhase
		words    string
	}{
		"claim is lost":                {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimLost)}, nil, hppv1.StoragePoolPreparing, "hpp-pool-local-node-a is Lost"},
		"none is mounted":              {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimBound)}, []appsv1.Deployment{mounterOn("a", unmounted), mounterOn("b", unmounted)}, hppv1.StoragePoolMounting, "usable on 0 of 2"},
		"one is mounted":               {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimBound)}, []appsv1.Deployment{mounterOn("a", unmounted), mounterOn("b")}, hppv1.StoragePoolMounting, "usable on 1 of 2 nodes, and not mounted on a"},
		"both are mounted":             {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimBound)}, []appsv1.Deployment{mounterOn("a"), mounterOn("b")}, hppv1.StoragePoolReady, ""},
		"one is of an earlier version": {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimBound)}, []appsv1.Deployment{mounterOn("a"), mounterOn("b", replaced)}, hppv1.StoragePoolMounting, "usable on 1 of 2"},
		"one is being replaced":        {[]corev1.PersistentVolumeClaim{claim(corev1.ClaimBound)}, []appsv1.Deployment{mounterOn("a"), mounterOn("b", surging)}, hppv1.StoragePoolMounting, "usable on 1 of 2"},
		"claim of another one":         {[]corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Labels: render.PoolLabels("local-fast")}}}, []appsv1.Deployment{mounterOn("a"), mounterOn("b")}, hppv1.StoragePoolReady, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status := Assess(object, current, Observed{DaemonSets: nodes(2, 2, 2), Claims: tt.claims, Mounters: tt.mounters})
			pool := status.StoragePoolStatuses[0]
			if pool.Phase != tt.phase || !strings.Contains(pool.Message, tt.words) {
				t.Errorf("the pool is %s: %q, want %s: %q", pool.Phase, pool.Message, tt.phase, tt.words)
			}
			ready := tt.phase == hppv1.StoragePoolReady || strings.HasPrefix(name, "one is of an") || strings.HasPrefix(name, "one is being")
			for _, c := range status.Conditions {
				if c.Type == hppv1.ConditionAvailable && (c.Status == metav1.ConditionTrue) != ready {
					t.Errorf("Available is %s: %s", c.Status, c.Message)
				}
			}
		})
	}
}

// rolledOutBefore is the status of an object of which a version was rolled out on an earlier generation.
func rolledOutBefore(version string) hppv1.HostPathProvisionerStatus {
	return hppv1.HostPathProvisionerStatus{ObservedVersion: version, ObservedGeneration: 3, Conditions: []metav1.Condition{
		{Type: hppv1.ConditionAvailable, Status: "True", Reason: "Before"}, {Type: hppv1.ConditionRolledOut, Status: "True", Reason: "Before"},
	}}
}

// An upgrade ends when what mounts a pool works. Until then the pool is not available where it is not mounted, however often that is looked at.
func TestPoolThatIsNotMountedAfterAnUpgrade(t *testing.T) {
	failing := podOn("node-a", corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "device is not blank"}})
	failing.Labels = render.PoolLabels("local")
	claim := corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Labels: render.PoolLabels("local")}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimLost}}
	mounters := func(change ...func(*appsv1.DeploymentStatus)) []appsv1.Deployment {
		return []appsv1.Deployment{mounterOn("a", change...), mounterOn("b", change...), mounterOn("c", change...)}
	}
	for name, tt := range map[string]struct {
		seen Observed
		want string
	}{
		"the mounters fail":                 {Observed{Mounters: mounters(unmounted), Pods: []corev1.Pod{failing}}, "- P D -"},
		"the claim is lost":                 {Observed{Mounters: mounters(), Claims: []corev1.PersistentVolumeClaim{claim}}, "- P - -"},
		"there is none at all":              {Observed{}, "- P - -"},
		"an earlier version has it mounted": {Observed{Mounters: mounters(), Replaced: sets.New("mounter-a", "mounter-b", "mounter-c")}, "A P - -"},
		"it is mounted":                     {Observed{Mounters: mounters()}, "A - - R"},
	} {
		t.Run(name, func(t *testing.T) {
			object := deployed(rolledOutBefore("v1.0.0"))
			object.Spec.StoragePools[0].PVCTemplate = &hppv1.ClaimTemplate{}
			tt.seen.DaemonSets = nodes(3, 3, 3)
			for range 3 {
				object.Status = Assess(object, current, tt.seen)
			}
			if got := conditionLetters(object.Status); got != tt.want {
				t.Errorf("the conditions are %q, want %q: %+v", got, tt.want, object.Status.Conditions)
			}
		})
	}
}

// A change that only mounters get is rolled out once all of them have it. One that fails then does not change that.
func TestChangeOfMountersIsRolledOut(t *testing.T) {
	for name, tt := range map[string]struct {
		mounters []appsv1.Deployment
		replaced sets.Set[string]
		want     string
	}{
		"none is applied":        {[]appsv1.Deployment{mounterOn("a")}, sets.New("mounter-a"), "A P - -"},
		"its pod is old":         {[]appsv1.Deployment{mounterOn("a", replaced)}, nil, "A P - -"},
		"its pod is beside one":  {[]appsv1.Deployment{mounterOn("a", surging)}, nil, "A P - -"},
		"it is not there":        {nil, nil, "- P - -"},
		"it is done":             {[]appsv1.Deployment{mounterOn("a")}, nil, "A - - R"},
		"it is done, and failed": {[]appsv1.Deployment{mounterOn("a", unmounted)}, nil, "- - D R"},
	} {
		t.Run(name, func(t *testing.T) {
			object := deployed(rolledOutBefore(current))
			object.Spec.StoragePools[0].PVCTemplate = &hppv1.ClaimTemplate{}
			for range 2 {
				object.Status = Assess(object, current, Observed{DaemonSets: nodes(1, 1, 1), Mounters: tt.mounters, Replaced: tt.replaced})
			}
			if got := conditionLetters(object.Status); got != tt.want {
				t.Errorf("the conditions are %q, want %q: %+v", got, tt.want, object.Status.Conditions)
			}
		})
	}
}

// What keeps the pods of many nodes from being ready is said once, with the nodes.
func TestOneCauseOnManyNodes(t *testing.T) {
	seen := Observed{DaemonSets: nodes(3, 3, 0)}
	for _, node := range []string{"node-b", "node-a", "node-c"} {
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "driver-" + node}, Spec: corev1.PodSpec{NodeName: node}}
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "driver", State: corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"},
		}}}
		seen.Pods = append(seen.Pods, pod)
	}
	status := Assess(deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current}), current, seen)
	for _, kind := range []string{hppv1.ConditionAvailable, hppv1.ConditionDegraded} {
		message := meta.FindStatusCondition(status.Conditions, kind).Message
		if !strings.Contains(message, "node-a, node-b, node-c: container driver: ImagePullBackOff: no such image") || strings.Count(message, "ImagePull") != 1 {
			t.Errorf("%s says %q, want the cause once", kind, message)
		}
	}
	if len(status.NodeStatuses) != 3 {
		t.Errorf("the nodes are %+v, want three", status.NodeStatuses)
	}
}

// What kubelet says of an image changes while it tries again, and differs from node to node.
func TestOneImageOnManyNodes(t *testing.T) {
	const why = `failed to pull and unpack image "example.com/driver:v1": not found`
	seen := Observed{DaemonSets: nodes(3, 3, 0)}
	for node, waiting := range map[string]corev1.ContainerStateWaiting{
		"node-a": {Reason: "ErrImagePull", Message: why},
		"node-b": {Reason: "ImagePullBackOff", Message: `Back-off pulling image "example.com/driver:v1": ErrImagePull: ` + why},
		"node-c": {Reason: "ImagePullBackOff", Message: `Back-off pulling image "example.com/driver:v1"`},
	} {
		pod := podOn(node, corev1.ContainerState{Waiting: &waiting})
		pod.Status.ContainerStatuses[0].Image = "example.com/driver:v1"
		seen.Pods = append(seen.Pods, pod)
	}
	status := Assess(deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current}), current, seen)
	for _, kind := range []string{hppv1.ConditionAvailable, hppv1.ConditionDegraded} {
		message := meta.FindStatusCondition(status.Conditions, kind).Message
		if !strings.Contains(message, "node-a, node-b, node-c: container driver: ") || strings.Count(message, why) != 1 || strings.Count(message, "container driver") != 1 {
			t.Errorf("%s says %q, want the image once", kind, message)
		}
	}
}

// A pod that waits for its node is a problem of that node, and of nothing else.
func TestUnscheduledPod(t *testing.T) {
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "driver-b"}, Status: corev1.PodStatus{
		Phase:      corev1.PodPending,
		Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no room"}},
	}}
	pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{"node-b"},
		}}}},
	}}}
	status := Assess(deployed(hppv1.HostPathProvisionerStatus{ObservedVersion: current}), current, Observed{DaemonSets: nodes(2, 2, 1), Pods: []corev1.Pod{pod}})
	if len(status.NodeStatuses) != 1 || status.NodeStatuses[0].Node != "node-b" || !strings.Contains(status.NodeStatuses[0].Message, "no room") {
		t.Errorf("the nodes are %+v", status.NodeStatuses)
	}
}
