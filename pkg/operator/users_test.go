package operator

import (
	"context"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func inPool(pool string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Spec.CSI.VolumeAttributes = map[string]string{render.PoolParameter: pool}
	}
}

// podWith runs on a node and has a volume.
func podWith(name, node string, source corev1.VolumeSource) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{{Name: "data", VolumeSource: source}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

func claimed(name string) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim-of-" + name}}
}

// Only the driver can unpublish the volumes of a pool, and only then can the pool be unmounted. So a deletion leaves the driver there until
// no pod uses a volume of a pool that has to be unmounted.
func TestDeletionLeavesTheDriverToPodsOnClaims(t *testing.T) {
	ended := podWith("ended", "here", claimed("on-claim"))
	ended.Status.Phase = corev1.PodSucceeded
	inline := func(pool string) corev1.VolumeSource {
		return corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: render.DriverName, VolumeAttributes: map[string]string{render.PoolParameter: pool}}}
	}
	ephemeral := corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
	onHost := func(path string) corev1.VolumeSource {
		return corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}
	}
	ofDriver := driverPod("here")
	ofDriver.Spec.Volumes = []corev1.Volume{{Name: "pool", VolumeSource: onHost("/mnt/fast/csi")}}
	through := func(volume corev1.VolumeSource, subPath string) *corev1.Pod {
		pod := podWith("user", "here", volume)
		pod.Spec.Volumes[0].Name = "above"
		pod.Spec.Containers = []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{Name: "above", SubPath: subPath}, {Name: "other", SubPath: "fast"}}}}
		return pod
	}
	above := func(subPath string) *corev1.Pod { return through(onHost("/mnt"), subPath) }
	varies := func(expr string) *corev1.Pod {
		pod := above("")
		pod.Spec.Containers[0].VolumeMounts[0].SubPathExpr = expr
		return pod
	}
	another := podWith("agent", "here", onHost("/mnt/fast/csi"))
	another.Namespace = "storage"
	another.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "agent", UID: "9"}}
	ofMounter := mounterPod(mounterOf("fast", "here"), "here", true)
	ofMounter.Spec.Volumes = []corev1.Volume{{Name: "pool", VolumeSource: onHost("/mnt/fast")}}
	for name, tt := range map[string]struct {
		pod   *corev1.Pod
		waits bool
	}{
		"the pool's path":                                   {podWith("user", "here", onHost("/mnt/fast/")), true},
		"the pool's path, and mounts it":                    {ofMounter, false},
		"a path above, and the pool's in it":                {above("fast"), true},
		"a path above, and another in it":                   {above("slow"), false},
		"a path above":                                      {above(""), false},
		"a claim above, and a volume in it":                 {through(claimed("above"), "fast/csi/pvc-1"), true},
		"a claim above, and another in it":                  {through(claimed("above"), "slow"), false},
		"a path above, and by variables what is below":      {varies("$(WHICH)"), true},
		"a path above, and by variables a volume":           {varies("fast/csi/$(WHICH)"), true},
		"a path above, and by variables what begins so":     {varies("f$(WHICH)"), true},
		"a path above, and by variables one of another":     {varies("slow/$(WHICH)"), false},
		"a path above, and another in it as it could vary":  {varies("slow"), false},
		"the pool's directory":                              {podWith("user", "here", onHost("/mnt/fast/csi/")), true},
		"a volume by its directory":                         {podWith("user", "here", onHost("/mnt/fast/csi/pvc-1")), true},
		"a directory beside it":                             {podWith("user", "here", onHost("/mnt/fast/csi-2")), false},
		"all pools, because it is a driver":                 {ofDriver, false},
		"the pool's directory, and is of another DaemonSet": {another, true},
		"a claim":                            {podWith("user", "here", claimed("on-claim")), true},
		"an ephemeral claim":                 {podWith("claim-of-an", "here", ephemeral), true},
		"an inline volume":                   {podWith("user", "here", inline("fast")), true},
		"an inline volume of the first pool": {podWith("user", "here", inline("")), true},
		"an inline volume of another pool":   {podWith("user", "here", inline("local")), false},
		"a volume of another driver there":   {podWith("user", "here", claimed("by-path")), true},
		"a volume of a pool without a claim": {podWith("user", "here", claimed("plain")), false},
		"a claim, and has ended":             {ended, false},
		"a claim, on a node that is down":    {podWith("user", "down", claimed("on-claim")), true},
	} {
		t.Run("a pod has "+name, func(t *testing.T) {
			object := stored("hpp", 1, true)
			object.Spec.StoragePools = []hppv1.StoragePool{{Name: "fast", Path: "/mnt/fast", PVCTemplate: &hppv1.ClaimTemplate{}}, {Name: "local", Path: "/var/hpvolumes"}}
			set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet, Labels: render.Owned}}
			mounter := mounterOf("fast", "here")
			h := newHarness(t, object, set, nodeThat("here", corev1.ConditionTrue), nodeThat("down", corev1.ConditionUnknown), claimFor(mounter, corev1.ReadWriteOnce), mounter, mounterOf("fast", "down"), tt.pod,
				volumeOn("by-path", "", ofProvisioner("here"), func(v *corev1.PersistentVolume) { v.Spec.HostPath.Path = "/mnt/fast/csi/by-path" }),
				volumeOn("above", "", ofProvisioner("here"), func(v *corev1.PersistentVolume) { v.Spec.HostPath.Path = "/mnt" }),
				volumeOn("on-claim", "here", inPool("fast")), volumeOn("an-data", "here", inPool("fast")), volumeOn("plain", "here", inPool("local")))
			h.reconcile("hpp")
			h.reconcile("hpp")
			began := h.has(cleanUpOf(mounterOf("fast", tt.pod.Spec.NodeName))) || !h.has(mounterOf("fast", tt.pod.Spec.NodeName))
			if began == tt.waits || !h.has(set) {
				t.Fatalf("the pool is being unmounted: %v", began)
			}
			if !tt.waits {
				return
			}
			if _, available := h.status(); !strings.Contains(available.Message, "pool fast on "+tt.pod.Spec.NodeName+": it is used by pod "+tt.pod.Namespace+"/"+tt.pod.Name) {
				t.Errorf("the condition says %q", available.Message)
			}
			must.Succeed(t, h.Delete(t.Context(), tt.pod))
			for range 6 {
				h.reconcile("hpp")
				if job := cleanUpOf(mounter); h.has(job) {
					h.completed(job)
				}
			}
			if h.has(set) {
				t.Error("the driver is there although no pod needs it any more")
			}
		})
	}
}

// A move needs the driver and the pools on both nodes until it has ended: without them it can neither go on nor be undone, and no pod can start
// with the volume. No pod has the volume then, and a mover has the pool by a directory above it, if there is one at all.
func TestRemovalWaitsForMoves(t *testing.T) {
	for _, phase := range movev1.Phases {
		t.Run(string(phase), func(t *testing.T) {
			waits := phase != movev1.Pending && phase != movev1.Succeeded && phase != movev1.Failed
			object := stored("hpp", 1, false)
			set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
			move := underway("data", "there", "here", phase)
			h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), nodeThat("there", corev1.ConditionTrue), move, volumeOn("data", "there", inPool("local")))
			h.reconcile("hpp")
			must.Succeed(t, h.Delete(t.Context(), object))
			h.reconcile("hpp")
			if h.has(set) != waits || h.has(stored("hpp", 1, true)) != waits {
				t.Fatalf("the driver is there: %v, the object: %v; want %v", h.has(set), h.has(stored("hpp", 1, true)), waits)
			}
			if !waits {
				return
			}
			if said := h.waitsFor(); !strings.Contains(said, "VolumeMove space/move-of-data, which is "+string(phase)) {
				t.Errorf("the object waits for %q", said)
			}
			move.Status.Phase = movev1.Failed
			must.Succeed(t, h.Update(t.Context(), move))
			h.reconcile("hpp")
			if h.has(set) || h.has(stored("hpp", 1, true)) {
				t.Error("the driver or the object is there, although the move has ended")
			}
		})
	}
}

// A cluster whose definitions are those of an earlier operator has no VolumeMoves, and nothing waits for them.
func TestRemovalWithoutDefinitionOfMoves(t *testing.T) {
	for name, missing := range map[string]error{
		"it never was there": &meta.NoKindMatchError{GroupKind: movev1.GroupVersion.WithKind("VolumeMove").GroupKind(), SearchedVersions: []string{movev1.GroupVersion.Version}},
		"it was deleted":     apierrors.NewNotFound(movev1.GroupVersion.WithResource("volumemoves").GroupResource(), ""),
	} {
		t.Run(name, func(t *testing.T) {
			object := stored("hpp", 1, false)
			h := newHarness(t, object, nodeThat("there", corev1.ConditionTrue))
			h.reconciler.APIReader = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
				List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
					if _, of := list.(*movev1.VolumeMoveList); of {
						return missing
					}
					return api.List(ctx, list, options...)
				},
			})
			h.reconcile("hpp")
			must.Succeed(t, h.Delete(t.Context(), object))
			h.reconcile("hpp")
			if h.has(stored("hpp", 1, true)) {
				t.Error("the object is there still")
			}
			if users, err := h.reconciler.cluster().users(t.Context(), []leftover{{}}, func(*corev1.Pod) bool { return true }); err != nil || len(users) > 0 {
				t.Errorf("the pools have the users %v, %v", users, err)
			}
		})
	}
}

// A pool stays mounted on the two nodes of a move, whether it is removed or a node leaves, and whichever pool the volume names.
func TestPoolIsUsedByMoves(t *testing.T) {
	for name, tt := range map[string]struct{ volume, pool string }{
		"the volume names its own": {"data", "old"},
		"the volume names none":    {"data", ""},
		"the volume names another": {"data", "local"},
		"it is replaced, and an earlier one of the claim names another": {"earlier", "local"},
	} {
		t.Run(name, func(t *testing.T) {
			volume := volumeOn(tt.volume, "there", inPool(tt.pool))
			volume.Spec.ClaimRef.Name = "claim-of-data"
			from, to, beside := mounterOf("old", "there"), mounterOf("old", "here"), mounterOf("old", "beside")
			h := newHarness(t, stored("hpp", 1, false), from, to, beside, nodeThat("here", corev1.ConditionTrue), nodeThat("there", corev1.ConditionTrue), nodeThat("beside", corev1.ConditionTrue),
				underway("data", "there", "here", movev1.Copying), volume)
			h.reconcile("hpp")
			h.reconcile("hpp")
			for _, at := range []*appsv1.Deployment{from, to, beside} {
				uses := at != beside
				if began := h.has(cleanUpOf(at)) || h.replicas(at) == 0; began == uses {
					t.Errorf("%s is being unmounted: %v", at.Name, began)
				}
			}
			if said := h.waitsFor(); !strings.Contains(said, "it is used by VolumeMove space/move-of-data") {
				t.Errorf("the object waits for %q", said)
			}
		})
	}
}

// A claim that was made anew by its name, as that of a StatefulSet, has the volume that it had before beside its own, if that is retained. Which
// of the two a pod has is not known by the claim's name: both pools stay mounted.
func TestVolumeOfAnEarlierClaimDoesNotHideAUser(t *testing.T) {
	for name, change := range map[string]func(*corev1.PersistentVolume){
		"in another pool": inPool("local"),
		"in a directory": func(v *corev1.PersistentVolume) {
			v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/data"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, earlier := range []string{"a", "z"} { // in the order in which they are listed
				mounter := mounterOf("old", "here")
				now, before := volumeOn("m", "here", inPool("old")), volumeOn(earlier, "here", change, released)
				if name == "in a directory" {
					now = volumeOn("m", "here", func(v *corev1.PersistentVolume) {
						v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/mnt/old/csi/m"}}
					})
				}
				before.Spec.ClaimRef = now.Spec.ClaimRef
				h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), mounter, claimFor(mounter, corev1.ReadWriteOncePod),
					mounterPod(mounter, "here", true), now, before, podWith("user", "here", claimed("m")))
				h.reconcile("hpp")
				h.reconcile("hpp")
				if h.replicas(mounter) != 1 || !strings.Contains(h.waitsFor(), "used by pod space/user") {
					t.Errorf("beside volume %s the mounter is ended under the pod; the object waits for %q", earlier, h.waitsFor())
				}
			}
		})
	}
}

// forsaken is what there is of a move whose VolumeMove was removed by force.
func forsaken(volume, from, to string) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{
		Namespace: "storage", Name: "volumemove-uid", Labels: map[string]string{"hostpathprovisioner.kubevirt.io/move": "uid"},
		Annotations: map[string]string{
			"hostpathprovisioner.kubevirt.io/move-of": "space/move-of-" + volume,
			"hostpathprovisioner.kubevirt.io/move-begun": fmt.Sprintf(`{"spec":{"claimName":"claim-of-%[1]s"},"status":{"sourceNode":%[2]q,"targetNode":%[3]q,"volume":%[1]q,"volumeHandle":%[1]q}}`,
				volume, from, to),
		},
	}}
}

// So does one whose VolumeMove was removed by force, until it is ended.
func TestRemovalWaitsForForsakenMoves(t *testing.T) {
	object := stored("hpp", 1, false)
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	left := forsaken("data", "there", "here")
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), nodeThat("there", corev1.ConditionTrue), left, volumeOn("data", "there", inPool("local")))
	h.reconcile("hpp")
	must.Succeed(t, h.Delete(t.Context(), object))
	h.reconcile("hpp")
	if !h.has(set) || !h.has(stored("hpp", 1, true)) || !strings.Contains(h.waitsFor(), "VolumeMove space/move-of-data, which is Undoing") {
		t.Fatalf("the driver is there: %v, and the object waits for %q", h.has(set), h.waitsFor())
	}
	must.Succeed(t, h.Delete(t.Context(), left))
	h.reconcile("hpp")
	if h.has(set) || h.has(stored("hpp", 1, true)) {
		t.Error("the driver or the object is there, although the move has ended")
	}
}
