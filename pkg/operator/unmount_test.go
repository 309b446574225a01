package operator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// claimFor is the claim of a mounter, which has it from now on.
func claimFor(mounter *appsv1.Deployment, modes ...corev1.PersistentVolumeAccessMode) *corev1.PersistentVolumeClaim {
	pod := &mounter.Spec.Template.Spec
	pod.Containers = []corev1.Container{{Name: "mounter", VolumeDevices: []corev1.VolumeDevice{{Name: "claim", DevicePath: "/dev/pool"}}}}
	pod.Volumes = []corev1.Volume{{Name: "claim", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: mounter.Name},
	}}}
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: mounter.Name, Labels: mounter.Labels},
		Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: modes},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
}

// mounterPod is the pod of a mounter, of this version or of the upstream operator.
func mounterPod(mounter *appsv1.Deployment, node string, keeps bool) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: mounter.Name + "-pod", Labels: mounter.Labels},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if keeps {
		pod.Annotations = map[string]string{"hostpathprovisioner.kubevirt.io/keeps": "mounted"}
	}
	return pod
}

// waitsFor is what the object says that it waits for.
func (h *harness) waitsFor() string {
	h.t.Helper()
	object := stored("hpp", 1, false)
	h.has(object)
	if c := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionProgressing); c != nil {
		return c.Message
	}
	return ""
}

func (h *harness) replicas(mounter *appsv1.Deployment) int32 {
	h.t.Helper()
	if !h.has(mounter) {
		h.t.Fatalf("the mounter %s is gone", mounter.Name)
	}
	return *mounter.Spec.Replicas
}

func (h *harness) completed(job *batchv1.Job) {
	h.t.Helper()
	h.has(job)
	job.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
	must.Succeed(h.t, h.Status().Update(h.t.Context(), job))
}

// A mounter whose claim has no other pod is what keeps the disk on the node. It stays while a pod there uses the pool, whether the pool was
// removed or the node left, and whether the node is ready: what runs there goes on.
func TestMounterStaysUnderPods(t *testing.T) {
	for name, tt := range map[string]struct {
		object *hppv1.HostPathProvisioner
		ready  corev1.ConditionStatus
	}{
		"the pool is removed":                 {stored("hpp", 1, false), corev1.ConditionTrue},
		"the node leaves":                     {onClaims(), corev1.ConditionTrue},
		"the object is deleted":               {stored("hpp", 1, true), corev1.ConditionTrue},
		"it is deleted, and the node is down": {stored("hpp", 1, true), corev1.ConditionUnknown},
		"it is removed, and the node is down": {stored("hpp", 1, false), corev1.ConditionUnknown},
		// One that registers again has its pods, as long as the API server has them.
		"it is removed, and the node deleted":  {stored("hpp", 1, false), ""},
		"the clean-up has begun, and the user": {stored("hpp", 1, false), corev1.ConditionTrue},
	} {
		t.Run(name, func(t *testing.T) {
			mounter := mounterOf("local", "there")
			user := podWith("user", "there", claimed("data"))
			claim := claimFor(mounter, corev1.ReadWriteOnce)
			objects := []client.Object{tt.object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), mounter,
				claim, mounterPod(mounter, "there", true), volumeOn("data", "there", inPool("local"))}
			if tt.ready != "" {
				objects = append(objects, nodeThat("there", tt.ready))
			}
			begun := strings.HasPrefix(name, "the clean-up")
			if !begun {
				objects = append(objects, user)
			}
			h := newHarness(t, objects...)
			h.reconcile("hpp")
			if begun {
				must.Succeed(t, h.Create(t.Context(), user))
				must.Succeed(t, h.Create(t.Context(), cleaning(cleanUpOf(mounter), "there")))
			}
			if name == "the node leaves" {
				set := h.rolledOut(1)
				set.Generation = 1
				must.Succeed(t, h.Update(t.Context(), set))
				h.rolledOut(1)
			}
			h.reconcile("hpp")
			if got := h.replicas(mounter); got != 1 {
				t.Errorf("the mounter has %d replicas", got)
			}
			if h.has(cleanUpOf(mounter)) {
				t.Error("there is a clean-up")
			}
			// Also after an operator that removed it too early.
			if !h.has(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}) {
				t.Error("the driver, without which the pod cannot end, is not deployed")
			}
			if said := h.waitsFor(); !strings.Contains(said, "used by pod space/user") {
				t.Errorf("the object waits for %q", said)
			}
		})
	}
}

// The pool that a volume names is where it was made. An administrator may have moved it since, and the driver finds it by its handle. So where the
// node cannot say that the pool is unused before its mounter ends, any pod with a volume of the driver may use it, but for those that mount pools.
func TestVolumeThatNamesAnotherPoolKeepsTheMounter(t *testing.T) {
	for name, tt := range map[string]struct {
		deleted bool
		ready   corev1.ConditionStatus
		mode    corev1.PersistentVolumeAccessMode
		keeps   bool
		used    bool
	}{
		"the object is deleted, and the node is down": {true, corev1.ConditionUnknown, corev1.ReadWriteOnce, true, true},
		"the pool is removed, and the node is down":   {false, corev1.ConditionUnknown, corev1.ReadWriteOnce, true, true},
		"only one pod may have the claim":             {false, corev1.ConditionTrue, corev1.ReadWriteOncePod, true, true},
		"the mounter is of the upstream operator":     {false, corev1.ConditionTrue, corev1.ReadWriteOnce, false, true},
		"the clean-up can look beside the mounter":    {false, corev1.ConditionTrue, corev1.ReadWriteOnce, true, false},
	} {
		for _, pool := range []string{"local", "gone"} {
			t.Run(name+", and it names "+pool, func(t *testing.T) {
				mounter := mounterOf("old", "there")
				own := mounterPod(mounter, "there", tt.keeps)
				own.Spec.Volumes = []corev1.Volume{{Name: "claim", VolumeSource: claimed("of-the-pool")}}
				user := podWith("user", "there", claimed("data"))
				h := newHarness(t, stored("hpp", 1, tt.deleted), nodeThat("here", corev1.ConditionTrue), driverPod("here"), nodeThat("there", tt.ready), claimFor(mounter, tt.mode), mounter, own,
					volumeOn("data", "there", inPool(pool)), volumeOn("of-the-pool", "there", inPool(pool)), user)
				for range 3 {
					h.reconcile("hpp")
				}
				if began := h.has(cleanUpOf(mounter)); h.replicas(mounter) != 1 || began == tt.used {
					t.Errorf("the mounter has %d replicas, the clean-up has begun: %v", h.replicas(mounter), began)
				}
				if said := h.waitsFor(); strings.Contains(said, "used by pod space/user (its volumes may be in this pool)") != tt.used {
					t.Errorf("the object waits for %q", said)
				}
				must.Succeed(t, h.Delete(t.Context(), user))
				for range 3 {
					h.reconcile("hpp")
				}
				if said := h.waitsFor(); strings.Contains(said, "used by") {
					t.Errorf("without the pod the object waits for %q", said)
				}
			})
		}
	}
}

// A clean-up that finds the pool used says so, and the mounter goes on beside it.
func TestMounterGoesOnWhileTheCleanUpLooks(t *testing.T) {
	mounter := mounterOf("old", "here")
	job := cleanUpOf(mounter)
	looks := cleaning(job, "here")
	looks.Status = corev1.PodStatus{Phase: corev1.PodPending, InitContainerStatuses: []corev1.ContainerStatus{{LastTerminationState: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "pool is in use: its volumes are published at /x", FinishedAt: metav1.Unix(1, 0)},
	}}}}
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), claimFor(mounter, corev1.ReadWriteOnce), mounter, mounterPod(mounter, "here", true))
	h.reconcile("hpp")
	h.reconcile("hpp")
	must.Succeed(t, h.Create(t.Context(), looks))
	for range 2 {
		h.reconcile("hpp")
	}
	if said := h.waitsFor(); h.replicas(mounter) != 1 || !h.has(job) || !strings.Contains(said, "it is being unmounted: pool is in use: its volumes are published at /x") {
		t.Errorf("the mounter has %d replicas, the clean-up is there: %v, the object waits for %q", h.replicas(mounter), h.has(job), said)
	}
}

// A process that is no pod's is known to the clean-up only. The driver, without which nothing that it serves can end, is deployed again until
// the clean-up is done.
func TestDeletionWhereOnlyTheCleanUpFindsTheUser(t *testing.T) {
	mounter := mounterOf("old", "here")
	mounter.Spec.Replicas = new(int32)
	job := cleanUpOf(mounter)
	pod := cleaning(job, "here")
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{LastTerminationState: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "pool is in use: /mnt/old/csi", FinishedAt: metav1.Unix(1, 0)},
	}}}
	h := newHarness(t, stored("hpp", 1, true), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter, corev1.ReadWriteOnce), job, pod)
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	for range 3 {
		h.reconcile("hpp")
		if said := h.waitsFor(); !h.has(set) || !h.has(job) || !strings.Contains(said, "pool old at /mnt/old on here: it is being unmounted: pool is in use: /mnt/old/csi") {
			t.Fatalf("the driver is there: %v, the clean-up: %v, the object waits for %q", h.has(set), h.has(job), said)
		}
	}
	must.Succeed(t, h.Delete(t.Context(), pod))
	h.completed(job)
	for range 2 {
		h.reconcile("hpp")
	}
	if h.has(set) || h.has(job) || h.has(mounter) || h.has(stored("hpp", 1, true)) {
		t.Error("something is left over, although nothing uses the pool any more")
	}
}

// A pod that starts after it was looked for users, and before the pool is unmounted, has it stay mounted and served.
func TestPodThatStartsWhileADeletionBegins(t *testing.T) {
	mounter := mounterOf("local", "here")
	h := newHarness(t, stored("hpp", 1, true), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter, corev1.ReadWriteOnce),
		mounterPod(mounter, "here", true), volumeOn("data", "here", inPool("local")))
	user, looked := podWith("user", "here", claimed("data")), 0
	h.reconciler.APIReader = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			err := api.List(ctx, list, options...)
			ofNamespace := func(o client.ListOption) bool { _, is := o.(client.InNamespace); return is }
			if _, pods := list.(*corev1.PodList); !pods || looked == 2 || slices.ContainsFunc(options, ofNamespace) {
				return err
			}
			if looked++; looked == 2 { // the deletion has looked, and then the clean-up
				err = errors.Join(err, api.Create(ctx, user))
			}
			return err
		},
	})
	h.reconcile("hpp")
	job := cleanUpOf(mounter)
	if looked != 2 || !h.has(job) || !h.has(user) {
		t.Fatalf("it was looked for users %d times, the clean-up is there: %v, the pod: %v", looked, h.has(job), h.has(user))
	}
	must.Succeed(t, h.Create(t.Context(), cleaning(job, "here")))
	h.reconcile("hpp")
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	if said := h.waitsFor(); h.replicas(mounter) != 1 || !h.has(set) || h.has(job) || !strings.Contains(said, "used by pod space/user") {
		t.Errorf("the mounter has %d replicas, the driver is there: %v, the clean-up: %v, the object waits for %q", h.replicas(mounter), h.has(set), h.has(job), said)
	}
}

// A claim whose label a user has taken off is not in the cache of the manager. Without it the mounter would end first, and the disk go with what
// pods wrote last.
func TestClaimWithoutItsLabelHasAPodUntilItIsUnmounted(t *testing.T) {
	mounter := mounterOf("old", "here")
	claim := claimFor(mounter, corev1.ReadWriteOnce)
	claim.Labels = nil
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claim, mounterPod(mounter, "here", true))
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			if _, is := object.(*corev1.PersistentVolumeClaim); is {
				return apierrors.NewNotFound(corev1.Resource("persistentvolumeclaims"), key.Name)
			}
			return api.Get(ctx, key, object, options...)
		},
	})
	h.reconcile("hpp")
	h.reconcile("hpp")
	if began := h.has(cleanUpOf(mounter)); !began || h.replicas(mounter) != 1 {
		t.Errorf("the clean-up has begun: %v, the mounter has %d pods", began, h.replicas(mounter))
	}
}

// The claim of a pool that is unmounted always has a pod: that of the mounter until that of the clean-up has started, and then the latter.
// Where only one pod may have the claim, or the mounter would mount again what is unmounted, the mounter ends first.
func TestClaimHasAPodUntilItIsUnmounted(t *testing.T) {
	for name, tt := range map[string]struct {
		mode   corev1.PersistentVolumeAccessMode
		keeps  bool
		beside bool
	}{
		"one node":                          {corev1.ReadWriteOnce, true, true},
		"many nodes":                        {corev1.ReadWriteMany, true, true},
		"one pod":                           {corev1.ReadWriteOncePod, true, false},
		"a mounter of the upstream version": {corev1.ReadWriteOnce, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			mounter := mounterOf("old", "here")
			claim, pod, job := claimFor(mounter, tt.mode), mounterPod(mounter, "here", tt.keeps), cleanUpOf(mounter)
			h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claim, pod)
			h.reconcile("hpp")
			h.reconcile("hpp")
			if began, runs := h.has(job), h.replicas(mounter) == 1; began != tt.beside || runs != tt.beside {
				t.Fatalf("the clean-up has begun: %v, the mounter runs: %v; want %v", began, runs, tt.beside)
			}
			if tt.beside {
				must.Succeed(t, h.Create(t.Context(), cleaning(job, "here")))
				h.reconcile("hpp")
				if h.replicas(mounter) != 0 {
					t.Fatal("the mounter goes on, although the clean-up has the claim")
				}
			}
			must.Succeed(t, h.Delete(t.Context(), pod))
			h.reconcile("hpp")
			spec := &job.Spec.Template.Spec
			if !h.has(job) || !slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool {
				return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim.Name
			}) || len(spec.Containers[0].VolumeDevices) != 1 {
				t.Fatalf("the clean-up does not have the claim: %+v", spec)
			}
			h.completed(job)
			h.reconcile("hpp")
			if h.has(job) || h.has(mounter) {
				t.Error("the mounter or its clean-up is left over")
			}
		})
	}
}

// A claim that was deleted keeps no pod from starting: the pool is unmounted without it.
func TestPoolIsUnmountedWithoutItsClaim(t *testing.T) {
	mounter := mounterOf("old", "here")
	claimFor(mounter)
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter)
	h.reconcile("hpp")
	h.reconcile("hpp")
	job := cleanUpOf(mounter)
	if !h.has(job) || slices.ContainsFunc(job.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool { return v.PersistentVolumeClaim != nil }) {
		t.Errorf("the clean-up is %+v", job.Spec.Template.Spec)
	}
}

// A mounter that the garbage collector removes is a leftover like any other, and what its clean-up is for is known when it has gone.
func TestMounterThatIsBeingDeletedIsCleanedUp(t *testing.T) {
	mounter := mounterOf("old", "here")
	now := metav1.Now()
	mounter.DeletionTimestamp, mounter.Finalizers = &now, []string{metav1.FinalizerDeleteDependents}
	h := newHarness(t, stored("hpp", 1, true), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter))
	h.reconcile("hpp")
	job := cleanUpOf(mounter)
	if !h.has(job) {
		t.Fatal("it has no clean-up")
	}
	h.has(mounter)
	mounter.Finalizers = nil
	must.Succeed(t, h.Update(t.Context(), mounter))
	h.reconcile("hpp")
	if said := h.waitsFor(); !h.has(job) || !strings.Contains(said, "pool old at /mnt/old on here: it is being unmounted") {
		t.Fatalf("the object waits for %q", said)
	}
	h.completed(job)
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(job) || h.has(stored("hpp", 1, true)) {
		t.Error("the clean-up or the object is left over")
	}
}

// What the upstream operator or an earlier version has given an owner loses it, so that no deletion in the foreground takes it from under
// pods.
func TestOwnersAreTakenOff(t *testing.T) {
	object := onClaims()
	owners := []metav1.OwnerReference{
		{APIVersion: hppv1.GroupVersion.String(), Kind: hppv1.Kind, Name: "hpp", UID: object.UID},
		{APIVersion: "v1", Kind: "ConfigMap", Name: "of-a-user", UID: "other"},
	}
	wanted, left := mounterOf("local", "here"), mounterOf("old", "here")
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet, Labels: render.Owned}}
	claim := claimFor(wanted)
	all := []client.Object{wanted, left, set, claim}
	for _, o := range all {
		o.SetOwnerReferences(owners)
	}
	h := newHarness(t, append(all, object, nodeThat("here", corev1.ConditionUnknown), driverPod("here"))...)
	h.reconcile("hpp")
	for _, o := range all {
		if !h.has(o) || len(o.GetOwnerReferences()) != 1 || o.GetOwnerReferences()[0].Kind != "ConfigMap" {
			t.Errorf("%s has the owners %v", o.GetName(), o.GetOwnerReferences())
		}
	}
}

// The claims of a pool may be volumes of the driver itself. It is there until what has mounted them has ended, which it could not
// otherwise; and a pool in such a pool goes first.
func TestDriverOutlivesPoolsInItsOwnVolumes(t *testing.T) {
	object := stored("hpp", 1, true)
	template := &hppv1.ClaimTemplate{}
	object.Spec.StoragePools = []hppv1.StoragePool{{Name: "outer", Path: "/mnt/outer", PVCTemplate: template}, {Name: "inner", Path: "/mnt/inner", PVCTemplate: template}}
	outer, inner := mounterOf("outer", "here"), mounterOf("inner", "here")
	claim := claimFor(inner, corev1.ReadWriteOnce)
	volume := volumeOn("inner", "here", inPool("outer"))
	volume.Spec.ClaimRef.Namespace, volume.Spec.ClaimRef.Name = claim.Namespace, claim.Name
	pod := mounterPod(inner, "here", true)
	pod.Spec.Volumes = inner.Spec.Template.Spec.Volumes
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), outer, claimFor(outer, corev1.ReadWriteOnce), inner, claim, volume, pod)
	h.reconcile("hpp")
	job := cleanUpOf(inner)
	if !h.has(job) || h.has(cleanUpOf(outer)) {
		t.Fatal("the pool in the volume of the other one is not unmounted first")
	}
	cleaner := h.startsCleaning(job, "here")
	h.reconcile("hpp")
	if !h.has(job) || h.replicas(inner) != 0 {
		t.Fatal("what unmounts a pool is taken for one who uses the pool that its claim is in, and nothing ends")
	}
	must.Succeed(t, h.Delete(t.Context(), pod))
	h.reconcile("hpp")
	h.completed(cleanUpOf(inner))
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(inner) || h.has(cleanUpOf(outer)) {
		t.Fatal("the pool is not forgotten, or the other one is unmounted before what has a volume in it has ended")
	}
	must.Succeed(t, h.Delete(t.Context(), cleaner))
	h.reconcile("hpp")
	if !h.has(cleanUpOf(outer)) {
		t.Fatal("the other pool is not unmounted")
	}
	cleaner = h.startsCleaning(cleanUpOf(outer), "here")
	h.reconcile("hpp")
	h.completed(cleanUpOf(outer))
	h.reconcile("hpp")
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	h.reconcile("hpp")
	if said := h.waitsFor(); !h.has(set) || !strings.Contains(said, "pod "+cleaner.Name+" on here") {
		t.Fatalf("the driver is gone while a pod has its volume; the object waits for %q", said)
	}
	must.Succeed(t, h.Delete(t.Context(), cleaner))
	h.reconcile("hpp")
	if h.has(set) || h.has(stored("hpp", 1, true)) {
		t.Error("the driver or the object is left over")
	}
}

// startsCleaning has a clean-up that is there get the pod that it is made for.
func (h *harness) startsCleaning(job *batchv1.Job, node string) *corev1.Pod {
	h.t.Helper()
	if !h.has(job) {
		h.t.Fatalf("the clean-up %s is not there", job.Name)
	}
	pod := cleaning(job, node)
	maps.Copy(pod.Labels, job.Spec.Template.Labels)
	pod.Spec.Volumes = job.Spec.Template.Spec.Volumes
	must.Succeed(h.t, h.Create(h.t.Context(), pod))
	return pod
}

// A claim for all nodes that is a device would be formatted by each of them. The definition does not let one in; an object from before
// changes nothing.
func TestSharedDeviceIsRefused(t *testing.T) {
	object := onClaims()
	block := corev1.PersistentVolumeBlock
	*object.Spec.StoragePools[0].PVCTemplate = hppv1.ClaimTemplate{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, VolumeMode: &block}
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	h.reconcile("hpp")
	if found := h.owned(); len(found) > 0 {
		t.Errorf("it has deployed %d objects", len(found))
	}
	h.has(object)
	if c := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionDegraded); c == nil || c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, "pool local") {
		t.Errorf("the condition Degraded is %+v", c)
	}
}

// Nor does one that is deleted have more nodes mount it while it waits.
func TestSharedDeviceIsNotMountedByADeletion(t *testing.T) {
	object := onClaims()
	block, now := corev1.PersistentVolumeBlock, metav1.Now()
	object.DeletionTimestamp = &now
	*object.Spec.StoragePools[0].PVCTemplate = hppv1.ClaimTemplate{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, VolumeMode: &block}
	was := mounterOf("local", "here")
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), nodeThat("there", corev1.ConditionTrue), driverPod("here"), driverPod("there"), was, claimFor(was, corev1.ReadWriteMany),
		podWith("user", "here", claimed("data")), volumeOn("data", "here", inPool("local")))
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(mounterOf("local", "there")) {
		t.Error("another node mounts it")
	}
	if said := h.waitsFor(); h.replicas(was) != 1 || !strings.Contains(said, "used by pod space/user") || !h.has(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}) {
		t.Errorf("the mounter has %d replicas, the object waits for %q", h.replicas(was), said)
	}
}

// A claim that grows with its template costs money or space: an event says so, also where a takeover brings the larger template.
func TestGrowthOfAClaimIsSaid(t *testing.T) {
	size := func(size string) corev1.VolumeResourceRequirements {
		return corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}}
	}
	object, mounter := onClaims(), mounterOf("local", "here")
	object.Spec.StoragePools[0].PVCTemplate.Resources = size("2Gi")
	claim := claimFor(mounter, corev1.ReadWriteOnce)
	claim.Spec.Resources = size("1Gi")
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), mounter, claim)
	recorder := events.NewFakeRecorder(1000)
	h.reconciler.Recorder = recorder
	h.reconcile("hpp")
	if h.has(claim); claim.Spec.Resources.Requests.Storage().String() != "2Gi" {
		t.Fatalf("the claim is %s large", claim.Spec.Resources.Requests.Storage())
	}
	for said := range recorder.Events {
		if strings.Contains(said, "ClaimGrown") && strings.Contains(said, claim.Name) {
			return
		}
		if len(recorder.Events) == 0 {
			t.Fatal("no event says so")
		}
	}
}

// A mounter that fails at each start leaves its lock free, and the clean-up beside it is done before it is ever seen at work. The mounter
// ends all the same, and the pool is unmounted once more after it.
func TestCleanUpBesideMounterThatFailsEnds(t *testing.T) {
	mounter := mounterOf("old", "here")
	claim, pod, job := claimFor(mounter, corev1.ReadWriteOnce), mounterPod(mounter, "here", true), cleanUpOf(mounter)
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claim, pod)
	for range 5 {
		h.reconcile("hpp")
		if !h.has(mounter) {
			t.Fatal("the mounter is removed while it has a pod")
		}
		if h.has(job) {
			h.completed(job)
		}
	}
	if h.replicas(mounter) != 0 {
		t.Fatal("the mounter goes on for ever")
	}
	must.Succeed(t, h.Delete(t.Context(), pod))
	if h.has(job) {
		must.Succeed(t, h.Delete(t.Context(), job))
	}
	h.reconcile("hpp")
	if !h.has(job) {
		t.Fatal("it is not unmounted after the mounter has ended")
	}
	h.completed(job)
	h.reconcile("hpp")
	if h.has(mounter) || h.has(job) {
		t.Error("the mounter or its clean-up is left over")
	}
}

// A pod that uses the pool again after its clean-up was done has the mounter run, which mounts the pool. That it ended before it was seen does not
// make the clean-up one of what it has mounted. Such is a claim that is not bound any more: no clean-up can begin beside the mounter.
func TestPoolThatWasMountedAfterItsCleanUpIsUnmounted(t *testing.T) {
	mounter := mounterOf("old", "here")
	mounter.Spec.Replicas = new(int32)
	job := cleanUpOf(mounter)
	job.Labels, job.Annotations = mounter.Labels, map[string]string{
		"hostpathprovisioner.kubevirt.io/mounter": mounter.Name, "hostpathprovisioner.kubevirt.io/node": "here", "hostpathprovisioner.kubevirt.io/path": "/mnt/old",
	}
	user := podWith("user", "here", claimed("data"))
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, job, user, volumeOn("data", "here", inPool("old")))
	h.completed(job)
	h.reconcile("hpp")
	if h.replicas(mounter) != 1 {
		t.Fatal("the mounter does not run for the pod")
	}
	must.Succeed(t, h.Delete(t.Context(), user))
	h.reconcile("hpp")
	if h.replicas(mounter) != 0 || h.has(job) {
		t.Fatalf("the mounter has %d replicas, its earlier clean-up is there: %v", *mounter.Spec.Replicas, h.has(job))
	}
	h.reconcile("hpp")
	if !h.has(job) || !h.has(mounter) {
		t.Error("what it has mounted is not unmounted")
	}
}

// A Deployment can be deleted without its pods. As long as one is left it may mount the pool again.
func TestCleanUpIsNotDoneBesidePodOfDeletedMounter(t *testing.T) {
	mounter := mounterOf("old", "here")
	job, pod := cleanUpOf(mounter), mounterPod(mounter, "here", false)
	pod.Labels = map[string]string{"hpp-pool": "old-hpp"}
	job.Labels, job.Annotations = mounter.Labels, map[string]string{
		"hostpathprovisioner.kubevirt.io/mounter": mounter.Name, "hostpathprovisioner.kubevirt.io/node": "here", "hostpathprovisioner.kubevirt.io/path": "/mnt/old",
	}
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), job, pod)
	h.completed(job)
	h.reconcile("hpp")
	if said := h.waitsFor(); !h.has(job) || !strings.Contains(said, "is left: "+pod.Name) {
		t.Fatalf("the clean-up is there: %v, the object waits for %q", h.has(job), said)
	}
	must.Succeed(t, h.Delete(t.Context(), pod))
	h.reconcile("hpp")
	if h.has(job) {
		t.Error("the clean-up is left over")
	}
}

// Labels and annotations are written by any user who may make a Deployment or a Job in the namespace. What they name is unmounted only where the
// object has, or had, that pool, and under the name that a mounter has there.
func TestNothingIsUnmountedWhereNoPoolWas(t *testing.T) {
	planted := func(change func(*appsv1.Deployment)) client.Object {
		mounter := mounterOf("old", "here")
		change(mounter)
		return mounter
	}
	job := cleanUpOf(mounterOf("old", "here"))
	job.Labels = mounterOf("old", "here").Labels
	job.Annotations = map[string]string{
		"hostpathprovisioner.kubevirt.io/mounter": "hpp-pool-old-here", "hostpathprovisioner.kubevirt.io/node": "here", "hostpathprovisioner.kubevirt.io/path": "/etc",
	}
	for name, object := range map[string]client.Object{
		"another path": planted(func(d *appsv1.Deployment) { d.Annotations["hostpathprovisioner.kubevirt.io/path"] = "/var/lib/kubelet" }),
		"another name": planted(func(d *appsv1.Deployment) { d.Name = "hpp-pool-mine" }),
		"another node": planted(func(d *appsv1.Deployment) { d.Annotations["hostpathprovisioner.kubevirt.io/node"] = "there" }),
		"another pool": planted(func(d *appsv1.Deployment) { d.Labels[render.PoolLabel] = "mine-hpp" }),
		"a Job":        job,
	} {
		for _, deleted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, deleted %v", name, deleted), func(t *testing.T) {
				planted := object.DeepCopyObject().(client.Object)
				h := newHarness(t, stored("hpp", 1, deleted), nodeThat("here", corev1.ConditionTrue), nodeThat("there", corev1.ConditionTrue), planted)
				for range 3 {
					h.reconcile("hpp")
				}
				jobs := &batchv1.JobList{}
				must.Succeed(t, h.List(t.Context(), jobs))
				jobs.Items = slices.DeleteFunc(jobs.Items, func(j batchv1.Job) bool { return len(j.Spec.Template.Spec.Containers) == 0 })
				if len(jobs.Items) > 0 {
					t.Errorf("there is the clean-up %+v", jobs.Items[0].Spec.Template.Spec.Volumes)
				}
				if mounter, ok := planted.(*appsv1.Deployment); ok && h.replicas(mounter) != 1 {
					t.Error("what was planted is scaled")
				}
				if said := h.waitsFor(); !strings.Contains(said, "nothing is unmounted") {
					t.Errorf("the object waits for %q", said)
				}
			})
		}
	}
}

// Where a pool on claims was mounted is known when it has left the object, until it is unmounted.
func TestPlaceOfARemovedPoolIsRemembered(t *testing.T) {
	object := onClaims()
	object.Status.MountedPools = nil
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	h.reconcile("hpp")
	mounter := mounterOf("local", "here")
	if !h.has(mounter) {
		t.Fatal("it has no mounter")
	}
	h.has(object)
	object.Spec.StoragePools = []hppv1.StoragePool{{Name: "other", Path: "/mnt/other"}}
	must.Succeed(t, h.Update(t.Context(), object))
	h.reconcile("hpp")
	h.reconcile("hpp")
	job := cleanUpOf(mounter)
	if !h.has(job) || job.Spec.Template.Spec.Volumes[0].HostPath.Path != "/mnt/local" {
		t.Fatal("it is not unmounted")
	}
	h.completed(job)
	must.Succeed(t, h.Delete(t.Context(), mounter))
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(object); len(object.Status.MountedPools) != 0 {
		t.Errorf("it remembers %v", object.Status.MountedPools)
	}
}

// A pool that has the path of one that is being removed, on a claim or not, comes once that is unmounted everywhere: until then the driver would
// make its volumes on the other one's claim, where they are not found afterwards.
func TestPoolAtThePathOfARemovedOneWaits(t *testing.T) {
	for name, pool := range map[string]hppv1.StoragePool{
		"on a claim":     {Name: "local", Path: "/mnt/old", PVCTemplate: &hppv1.ClaimTemplate{}},
		"in a directory": {Name: "local", Path: "/mnt/old"},
		"inside":         {Name: "local", Path: "/mnt/old/csi/local"},
		"in a directory, with the name of the removed one": {Name: "old", Path: "/mnt/old"},
	} {
		t.Run(name, func(t *testing.T) {
			object, mounter := onClaims(), mounterOf("old", "here")
			object.Spec.StoragePools = []hppv1.StoragePool{pool, {Name: "other", Path: "/mnt/older"}}
			h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), mounter)
			serves := func() (pools string) {
				set := h.rolledOut(1)
				for _, v := range set.Spec.Template.Spec.Containers[0].Env {
					if v.Name == "DATADIR" {
						pools = v.Value
					}
				}
				return pools
			}
			h.reconcile("hpp")
			h.reconcile("hpp")
			job, next := cleanUpOf(mounter), mounterOf(pool.Name, "here")
			if !h.has(job) || pool.Name != "old" && h.has(next) {
				t.Fatalf("the clean-up has begun: %v, the next mounter is there: %v", h.has(job), h.has(next))
			}
			of := `"name":"` + pool.Name
			if pools := serves(); strings.Contains(pools, of) || !strings.Contains(pools, "other") {
				t.Fatalf("the driver has %s", pools)
			}
			h.reconcile("hpp")
			if said := h.waitsFor(); !strings.Contains(said, "pool "+pool.Name+": it comes once pool old at /mnt/old on here is unmounted") {
				t.Errorf("the object waits for %q", said)
			}
			h.completed(job)
			h.reconcile("hpp")
			h.reconcile("hpp")
			if pools := serves(); h.has(mounter) || h.has(next) != (pool.PVCTemplate != nil) || !strings.Contains(pools, of) {
				t.Errorf("the first mounter is there: %v, the next one: %v, the driver has %s", h.has(mounter), h.has(next), pools)
			}
		})
	}
}

// A clean-up was done before its mounter was started again, which may have mounted the pool since. It goes on until the next clean-up has looked whether
// that is used, and has the claim.
func TestMounterThatWasStartedAgainIsLookedAtFirst(t *testing.T) {
	mounter := mounterOf("old", "here")
	own, job := mounterPod(mounter, "here", true), cleanUpOf(mounter)
	own.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter, corev1.ReadWriteOnce), own)
	h.reconcile("hpp")
	h.reconcile("hpp")
	h.completed(job)
	h.reconcile("hpp")
	if h.has(job) || h.replicas(mounter) != 1 {
		t.Errorf("the old clean-up is left over: %v, the mounter has %d replicas", h.has(job), h.replicas(mounter))
	}
	h.reconcile("hpp")
	if !h.has(job) || h.replicas(mounter) != 1 {
		t.Errorf("the next clean-up has begun: %v, the mounter has %d replicas", h.has(job), h.replicas(mounter))
	}
	must.Succeed(t, h.Create(t.Context(), cleaning(job, "here")))
	h.reconcile("hpp")
	if h.replicas(mounter) != 0 {
		t.Error("the mounter goes on, although the next clean-up has the claim")
	}
}
