package operator

import (
	"context"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// The pods of a mounter of the upstream operator had only the label of its selector before v0.18.0 (storagePoolDeploymentByNode of its
// pkg/controller/hostpathprovisioner/storagepool.go). A pool is not unmounted while one of them runs, which would mount it again.
func TestCleanUpWaitsForUpstreamMounterToStop(t *testing.T) {
	mounter := mounterOf("local", "node-a")
	mounter.Spec.Selector.MatchLabels = map[string]string{"hpp-pool": "local-hpp"}
	mounter.Spec.Replicas = new(int32)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "mounter", Labels: mounter.Spec.Selector.MatchLabels}, Spec: corev1.PodSpec{NodeName: "node-a"}}
	elsewhere := pod.DeepCopy()
	elsewhere.Name, elsewhere.Spec.NodeName = "elsewhere", "node-b"
	h := newHarness(t, stored("hpp", 1, true), nodeThat("node-a", corev1.ConditionTrue), mounter, pod, elsewhere)
	// The cache of the manager has only pods with the label k8s-app.
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*corev1.PodList); ok {
				return nil
			}
			return api.List(ctx, list, options...)
		},
	})
	h.reconcile("hpp")
	if h.has(cleanUpOf(mounter)) {
		t.Fatal("the pool is unmounted beside its mounter")
	}
	must.Succeed(t, h.Delete(t.Context(), pod))
	h.reconcile("hpp")
	if !h.has(cleanUpOf(mounter)) {
		t.Error("the pool is not unmounted")
	}
}

// Why a pool is not unmounted is in the status, in the words of the program that tried. It tries again in the same pod, which has the claim.
func TestStatusSaysWhyPoolIsNotUnmounted(t *testing.T) {
	mounter := mounterOf("old", "node-a")
	mounter.Spec.Replicas = new(int32)
	job := cleanUpOf(mounter)
	try := func(second int64, message string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: message, FinishedAt: metav1.Unix(second, 0)}}
	}
	pod := cleaning(job, "node-a")
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{LastTerminationState: try(2, "a line of the log\npool is in use: /x\n")}, {State: try(1, "something else\n")}}
	h := newHarness(t, stored("hpp", 1, false), nodeThat("node-a", corev1.ConditionTrue), mounter, job, pod)
	h.reconcile("hpp")
	h.rolledOut(0)
	h.reconcile("hpp")
	object := stored("hpp", 1, false)
	h.has(object)
	progressing := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionProgressing)
	if want := "pool old at /mnt/old on node-a: it is being unmounted: pool is in use: /x"; progressing == nil || !strings.Contains(progressing.Message, want) {
		t.Errorf("the condition is %+v, want %q", progressing, want)
	}
	if !h.has(job) {
		t.Error("the clean-up is gone, and with it the claim")
	}
}

// cleaning is the pod of a clean-up at work.
func cleaning(job *batchv1.Job, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: job.Namespace, Name: job.Name + "-x", Labels: map[string]string{"job-name": job.Name}},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// What keeps the pod of a clean-up from starting is in the status, also of a deletion, which waits for it. Once that is corrected, there
// is another clean-up.
func TestCleanUpThatDoesNotStart(t *testing.T) {
	const mounterImage = "ghcr.io/kubevirt/hostpath-provisioner/pool-mounter"
	mounter := mounterOf("old", "node-a")
	mounter.Spec.Replicas = new(int32)
	for name, deleted := range map[string]bool{"the pool is removed": false, "the object is deleted": true} {
		t.Run(name, func(t *testing.T) {
			object, job := stored("hpp", 1, deleted), cleanUpOf(mounter)
			h := newHarness(t, object, nodeThat("node-a", corev1.ConditionTrue), mounter.DeepCopy())
			h.reconciler.Config.Images = map[string]string{mounterImage: "wrong"}
			h.reconcile("hpp")
			h.has(job)
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: job.Name + "-x", Labels: map[string]string{"job-name": job.Name}},
				Spec:       corev1.PodSpec{NodeName: "node-a"},
				Status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{Name: "mounter", State: corev1.ContainerState{
					Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"},
				}}}},
			}
			must.Succeed(t, h.Create(t.Context(), pod))
			h.reconcile("hpp")
			h.has(object)
			progressing := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionProgressing)
			want := "pool old at /mnt/old on node-a: it is being unmounted: pod " + pod.Name + ": container mounter: ImagePullBackOff: no such image"
			if progressing == nil || !strings.Contains(progressing.Message, want) {
				t.Errorf("the condition is %+v, want %q", progressing, want)
			}
			if before := job.ResourceVersion; !h.has(job) || job.ResourceVersion != before {
				t.Fatal("the clean-up is made anew without a reason")
			}

			h.reconciler.Config.Images[mounterImage] = "right"
			h.reconcile("hpp")
			h.reconcile("hpp")
			if !h.has(job) || job.Spec.Template.Spec.Containers[0].Image != "right" {
				t.Errorf("the clean-up has the image %q", job.Spec.Template.Spec.Containers[0].Image)
			}
		})
	}
}

// A clean-up at work goes on when something changes.
func TestCleanUpAtWorkIsNotReplaced(t *testing.T) {
	mounter := mounterOf("old", "node-a")
	mounter.Spec.Replicas = new(int32)
	job := cleanUpOf(mounter)
	h := newHarness(t, stored("hpp", 1, false), nodeThat("node-a", corev1.ConditionTrue), mounter, job, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: job.Name + "-x", Labels: map[string]string{"job-name": job.Name}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	})
	h.reconcile("hpp")
	if !h.has(job) {
		t.Error("it is removed")
	}
}

// A pool that was removed and is back under the same name with another path is mounted there only once it is unmounted where it was, also if the operator
// has not seen it removed. Nothing else would unmount it.
func TestPoolWithAnotherPathIsUnmountedFirst(t *testing.T) {
	for name, replicas := range map[string]int32{"not seen removed": 1, "being cleaned up": 0} {
		t.Run(name, func(t *testing.T) {
			mounter := mounterOf("local", "node-a")
			mounter.Spec.Replicas = &replicas
			object := onClaims()
			object.Spec.StoragePools[0].Path = "/mnt/other"
			h := newHarness(t, object, nodeThat("node-a", corev1.ConditionTrue), driverPod("node-a"), mounter)
			h.reconcile("hpp")
			h.rolledOut(1)
			h.reconcile("hpp")
			job := cleanUpOf(mounter)
			if !h.has(mounter) || *mounter.Spec.Replicas != 0 || render.LeftoverOf(mounter).Path != "/mnt/local" {
				t.Fatalf("the mounter has %d replicas for %s", *mounter.Spec.Replicas, render.LeftoverOf(mounter).Path)
			}
			if !h.has(job) || job.Spec.Template.Spec.Volumes[0].HostPath.Path != "/mnt/local" {
				t.Fatalf("the old path is not unmounted: %+v", job.Spec.Template.Spec.Volumes)
			}
			h.reconcile("hpp")
			if before := job.ResourceVersion; !h.has(job) || job.ResourceVersion != before {
				t.Fatal("the clean-up is dropped")
			}
			h.has(object)
			progressing := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionProgressing)
			if want := "pool local at /mnt/local on node-a: it is being unmounted"; !strings.Contains(progressing.Message, want) {
				t.Errorf("the condition is %+v, want %q", progressing, want)
			}

			job.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
			must.Succeed(t, h.Status().Update(t.Context(), job))
			h.reconcile("hpp")
			h.reconcile("hpp")
			if !h.has(mounter) || *mounter.Spec.Replicas != 1 || render.LeftoverOf(mounter).Path != "/mnt/other" || h.has(job) {
				t.Errorf("the pool is not mounted at its new path, or its clean-up is left over: %s", render.LeftoverOf(mounter).Path)
			}
		})
	}
}

// A pool that was removed and is back on another claim, or as it cannot be mounted from its claim, would have the mounter end before the next one
// may have a claim that is for one pod, with the disk under what uses the pool. It is mounted anew once it is unmounted.
func TestPoolOnAnotherClaimIsUnmountedFirst(t *testing.T) {
	for name, tt := range map[string]struct {
		mode  corev1.PersistentVolumeAccessMode
		claim string
		block corev1.PersistentVolumeMode
		back  bool
	}{
		"its own instead of that of all nodes": {corev1.ReadWriteMany, "hpp-pool-local-shared", corev1.PersistentVolumeFilesystem, true},
		"a device as a directory":              {corev1.ReadWriteOncePod, "hpp-pool-local-here", corev1.PersistentVolumeBlock, false},
	} {
		t.Run(name, func(t *testing.T) {
			object := onClaims()
			object.Spec.StoragePools[0].PVCTemplate.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
			mounter, user := mounterOf("local", "here"), podWith("user", "here", claimed("data"))
			claim := claimFor(mounter, tt.mode)
			claim.Name, claim.Spec.VolumeMode = tt.claim, &tt.block
			mounter.Spec.Template.Spec.Volumes[0].PersistentVolumeClaim.ClaimName = tt.claim
			h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), mounter, claim, mounterPod(mounter, "here", true),
				volumeOn("data", "here", inPool("local")), user)
			for range 2 {
				h.attempt("hpp")
			}
			if has := render.LeftoverOf(mounter); h.replicas(mounter) != 1 || has.Claim != tt.claim || len(mounter.Spec.Template.Spec.Containers[0].VolumeDevices) != 1 {
				t.Fatalf("the mounter under a pod has become %+v", mounter.Spec)
			}
			must.Succeed(t, h.Delete(t.Context(), user))
			must.Succeed(t, h.Delete(t.Context(), mounterPod(mounter, "here", true)))
			h.attempt("hpp")
			if h.replicas(mounter) > 0 { // it does not end before the clean-up has the claim
				h.startsCleaning(cleanUpOf(mounter), "here")
			}
			h.attempt("hpp")
			h.completed(cleanUpOf(mounter))
			h.attempt("hpp")
			h.attempt("hpp")
			if back := h.has(mounter) && render.LeftoverOf(mounter).Claim == mounter.Name; back != tt.back {
				t.Errorf("the pool is mounted from its claim: %v, want %v; the object waits for %q", back, tt.back, h.waitsFor())
			}
		})
	}
}

// A pool with the same path is mounted again at once, however the path is written.
func TestPoolThatIsBackIsMountedAgain(t *testing.T) {
	mounter := mounterOf("local", "node-a")
	mounter.Spec.Replicas = new(int32)
	object := onClaims()
	object.Spec.StoragePools[0].Path = "/mnt/local/"
	h := newHarness(t, object, nodeThat("node-a", corev1.ConditionTrue), driverPod("node-a"), mounter, cleanUpOf(mounter))
	h.reconcile("hpp")
	if !h.has(mounter) || *mounter.Spec.Replicas != 1 || h.has(cleanUpOf(mounter)) {
		t.Error("the mounter has ended, or its clean-up goes on")
	}
}

// A pod of the driver that does not end, on a node that does not answer, keeps the pools of its own node, and no others. Kubernetes counts it
// whether its node left or an upgrade has deleted it.
func TestNodeThatDoesNotAnswerDoesNotKeepOthers(t *testing.T) {
	for name, of := range map[string]struct{ desired, misscheduled int32 }{
		"it left too":                {1, 1},
		"an upgrade deleted its pod": {2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			left, stuck := mounterOf("local", "left"), mounterOf("local", "stuck")
			ending := driverPod("stuck")
			now := metav1.Now()
			ending.DeletionTimestamp, ending.Finalizers = &now, []string{"example.com/not-done"}
			h := newHarness(t, onClaims(), nodeThat("here", corev1.ConditionTrue), nodeThat("left", corev1.ConditionTrue), nodeThat("stuck", corev1.ConditionUnknown),
				driverPod("here"), ending, left, stuck)
			h.reconcile("hpp")
			h.scheduled(of.desired, of.misscheduled)
			h.reconcile("hpp")
			if h.replicas(left) != 0 {
				t.Errorf("the mounter on the node that left goes on; the object waits for %q", h.waitsFor())
			}
			if h.replicas(stuck) != 1 {
				t.Error("the mounter on the node whose driver has not ended has")
			}
		})
	}
}

// One that has ended, and whose deletion its node has not confirmed, is not counted by Kubernetes.
func TestPodThatHasEndedDoesNotKeepOthers(t *testing.T) {
	left, stuck := mounterOf("local", "left"), mounterOf("local", "stuck")
	ended := driverPod("stuck")
	now := metav1.Now()
	ended.DeletionTimestamp, ended.Finalizers, ended.Status.Phase = &now, []string{"example.com/not-done"}, corev1.PodFailed
	h := newHarness(t, onClaims(), nodeThat("here", corev1.ConditionTrue), nodeThat("left", corev1.ConditionTrue), driverPod("here"), ended, left, stuck)
	h.reconcile("hpp")
	h.scheduled(1, 0)
	h.reconcile("hpp")
	if h.replicas(left) != 0 || h.replicas(stuck) != 1 {
		t.Errorf("the mounter on the node that left has %d replicas, that beside the pod %d", h.replicas(left), h.replicas(stuck))
	}
}

// The cache of the manager may have a clean-up yet that was removed because the pool was mounted again after it. What has mounted it since is not
// forgotten before it is unmounted.
func TestCleanUpThatWasRemovedDoesNotCount(t *testing.T) {
	mounter := mounterOf("old", "here")
	mounter.Spec.Replicas = new(int32)
	job := cleanUpOf(mounter)
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter, corev1.ReadWriteOnce), job)
	h.completed(job)
	before := empty(batchv1.SchemeGroupVersion.WithKind("Job"))
	must.Succeed(t, h.Get(t.Context(), client.ObjectKeyFromObject(job), before))
	must.Succeed(t, h.Delete(t.Context(), job))
	api := h.reconciler.Client
	h.reconciler.Client = interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			if cached, is := object.(*unstructured.Unstructured); is && cached.GetKind() == "Job" && key == client.ObjectKeyFromObject(job) {
				before.DeepCopyInto(cached)
				return nil
			}
			return api.Get(ctx, key, object, options...)
		},
	})
	h.reconcile("hpp")
	if !h.has(mounter) {
		t.Fatal("the mounter is forgotten, and with it that its pool is mounted")
	}
	h.reconciler.Client = api
	h.reconcile("hpp")
	if !h.has(job) {
		t.Error("the pool is not unmounted")
	}
	h.completed(job)
	h.reconcile("hpp")
	if h.has(job) || h.has(mounter) {
		t.Error("the mounter or its clean-up is left over")
	}
}
