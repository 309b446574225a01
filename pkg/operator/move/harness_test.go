package move

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const (
	storage = "storage" // the driver's namespace
	space   = "space"   // the user's
	nodeA   = "node-a"
	nodeB   = "node-b"
	nodeC   = "node-c"
)

// A record is what a node has of the volume. The stand-ins of movers keep the rules of pkg/pool/move.go.
type record struct {
	move, role, fence, moved, undone string
	handedOver                       bool
}

// publishes says whether the node would publish the volume.
func (r *record) publishes() bool { return r != nil && r.role == "" }

// has says whether it is, or was until it was confirmed, the whole copy of a source.
func (r *record) has(source *record) bool {
	return r != nil && (r.moved == source.move || r.move == source.move && r.fence == source.fence)
}

// keyAt is the key of the record that a node has of a volume.
func keyAt(node, handle string) string {
	if handle == "pvc-1" {
		return node
	}
	return node + "/" + handle
}

// A harness is a cluster: the API server, kubelets with the movers, and the controllers of volumes and of a StatefulSet.
type harness struct {
	*testing.T
	client.Client
	api      client.Client      // without limits
	records  map[string]*record // by keyAt: of data by node
	logs     map[string]string
	fences   int
	kill     int  // before, or after, which write the operator is killed; 0 for none
	after    bool // the write is made, and the operator does not learn that
	writes   int
	pause    int    // before which write the operator is held up while between is called, and has lost its lease after it; 0 for none
	between  func() // what happens then
	fail     string // which read fails; empty for none
	reads    []string
	killed   bool
	uids     int
	keeps    bool     // disruption budgets
	replicas bool     // the StatefulSet makes its pod again
	also     []string // claims that its pod uses besides data
	looked   int
	evicted  int
	ahead    time.Duration // of the clock of pods that are made, and of the API server
	clock    func() time.Time
	hangs    string          // the node whose driver does not answer
	silent   bool            // no log may be asked for
	unheard  string          // why the logs of movers cannot be read; empty if they can
	lost     string          // what kubelet answers that has no log of a mover
	promised int64           // what the mover of the source reports that the volume is promised; 0 for one that reports nothing
	late     int             // how many looks the controller of volumes may miss
	wasGone  map[string]bool // nodes whose objects were deleted once
	forced   bool            // a VolumeMove was removed by force
	arrived  map[client.ObjectKey]*arrivals
}

// scheme has no other kinds: with each write the fake client lists all that there are.
var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(appsv1.AddToScheme(s), corev1.AddToScheme(s), networkingv1.AddToScheme(s), storagev1.AddToScheme(s), v1alpha1.AddToScheme(s), v1beta1.AddToScheme(s)); err != nil {
		panic(err)
	}
	return s
}()

// every is how many of the steps a test does something at: short runs take some.
func every() int {
	switch {
	case os.Getenv(testenv.UnitVariable) != "":
		return 31
	case testing.Short():
		return 11
	}
	return 1
}

var errKilled = errors.New("killed")

func (h *harness) write(do func() error) error {
	h.writes++
	if h.pause == h.writes {
		h.between()
		_ = do() // which learns nothing any more
		return errKilled
	}
	if h.kill != h.writes {
		return do()
	}
	h.killed = true
	if h.after {
		if err := do(); err != nil {
			return err
		}
	}
	return errKilled
}

func newHarness(t *testing.T, more ...client.Object) *harness {
	t.Helper()
	h := &harness{T: t, records: map[string]*record{nodeA: {}}, logs: map[string]string{}, replicas: true, wasGone: map[string]bool{}, arrived: map[client.ObjectKey]*arrivals{}}
	objects := append([]client.Object{claimOf("data"), volumeOf("pv"), driverSet(), class()}, more...)
	for _, name := range []string{nodeA, nodeB, nodeC} {
		objects = append(objects, node(name), driverPod(name), capacity(name, map[string]string{nodeA: "0", nodeB: "100Gi", nodeC: "50Gi"}[name]))
	}
	inner := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.VolumeMove{}).WithObjects(objects...).Build()
	h.api = interceptor.NewClient(inner, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if o.GetUID() == "" {
				h.uids++
				o.SetUID(types.UID(fmt.Sprintf("uid-%d", h.uids)))
			}
			return c.Create(ctx, o, opts...)
		},
	})
	h.Client = interceptor.NewClient(h.api.(client.WithWatch), interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return h.write(func() error { return c.Create(ctx, o, opts...) })
		},
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			return h.write(func() error { return c.Update(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return h.write(func() error { return c.Patch(ctx, o, p, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return h.write(func() error { return c.Delete(ctx, o, opts...) })
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, kind string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return h.write(func() error { return c.SubResource(kind).Update(ctx, o, opts...) })
		},
		SubResourceCreate: func(ctx context.Context, c client.Client, kind string, o, sub client.Object, opts ...client.SubResourceCreateOption) error {
			h.evicted++
			if h.keeps {
				return apierrors.NewTooManyRequests("the disruption budget", 1)
			}
			return h.write(func() error { return c.SubResource(kind).Create(ctx, o, sub, opts...) })
		},
	})
	return h
}

func claimOf(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: name, UID: types.UID("claim " + name)},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv", StorageClassName: ptr.To("local")},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
}

func volumeOf(name string) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: "volume before", Finalizers: slices.Clone(ownFinalizers),
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": render.DriverName},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("10Gi")},
			StorageClassName:              "local",
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			ClaimRef:                      &corev1.ObjectReference{Namespace: space, Name: "data", UID: "claim data", ResourceVersion: "5"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: render.DriverName, VolumeHandle: "pvc-1", VolumeAttributes: map[string]string{render.PoolParameter: "fast"},
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: place.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{nodeA}}},
			}}}},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
	return v
}

func class() *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "local"}, Provisioner: render.DriverName}
}

func driverSet() *appsv1.DaemonSet {
	labels := map[string]string{"app": "driver"}
	hostPath := func(name, path string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}
	}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: storage, Name: "driver"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			ServiceAccountName: "driver",
			Containers: []corev1.Container{
				{Name: "sidecar", Image: "sidecar:v1"},
				{
					Name: "driver", Image: "driver:v1", Args: []string{"--drivername=" + render.DriverName, "--endpoint=unix:///csi/csi.sock", "--datadir=$(DATADIR)", "--v=2"},
					Env: []corev1.EnvVar{{Name: "DATADIR", Value: "[]"}},
					VolumeMounts: []corev1.VolumeMount{
						{Name: "socket", MountPath: "/csi"},
						{Name: "kubelet", MountPath: "/var/lib/kubelet/pods", MountPropagation: ptr.To(corev1.MountPropagationBidirectional)},
						{Name: "pool", MountPath: "/pool", MountPropagation: ptr.To(corev1.MountPropagationHostToContainer)},
						{Name: "token", MountPath: "/var/run/secrets"},
					},
				},
			},
			Volumes: []corev1.Volume{hostPath("socket", "/plugins/driver"), hostPath("kubelet", "/var/lib/kubelet/pods"), hostPath("pool", "/pool"), {Name: "token"}},
		}}},
	}
}

func driverPod(on string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: storage, Name: "driver-" + on, Labels: map[string]string{"app": "driver"}},
		Spec:       corev1.PodSpec{NodeName: on},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

func node(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name), Labels: map[string]string{"kubernetes.io/hostname": name}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

func capacity(on, room string) *storagev1.CSIStorageCapacity {
	return &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{Namespace: storage, Name: "capacity-" + on},
		StorageClassName: "local", NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{place.TopologyKey: on}},
		Capacity: ptr.To(resource.MustParse(room)),
	}
}

func moveOf(name string, change ...func(*v1alpha1.VolumeMove)) *v1alpha1.VolumeMove {
	m := &v1alpha1.VolumeMove{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: name, UID: types.UID("move-" + name), Generation: 1},
		Spec: v1alpha1.VolumeMoveSpec{
			ClaimName: "data", Snapshots: v1alpha1.RefuseSnapshots, When: v1alpha1.WhenEvict, Verify: v1alpha1.VerifyChanged,
		},
	}
	for _, do := range change {
		do(m)
	}
	return m
}

// madeFor is what is made for a move.
func madeFor(name string) objects { return objects{move: moveOf(name), namespace: storage} }

// appPod uses the claim. That of the StatefulSet has a controller.
func appPod(name string, bare bool) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: name, UID: types.UID(name)},
		Spec: corev1.PodSpec{NodeName: nodeA, Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"},
		}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if !bare {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "data", UID: "set", Controller: ptr.To(true)}}
	}
	return pod
}

// has reads an object.
func (h *harness) has(o client.Object) bool {
	h.Helper()
	err := h.api.Get(h.Context(), client.ObjectKeyFromObject(o), o)
	must.Succeed(h, client.IgnoreNotFound(err))
	return err == nil
}

// update writes all of an object, if it is there.
func (h *harness) update(o client.Object) {
	h.Helper()
	with := o.DeepCopyObject().(client.Object)
	err := h.api.Update(h.Context(), o)
	if err == nil {
		with.SetResourceVersion(o.GetResourceVersion())
		err = h.api.Status().Update(h.Context(), with) // not every kind has one
	}
	must.Succeed(h, client.IgnoreNotFound(err))
	h.has(o)
}

func (h *harness) move(name string) *v1alpha1.VolumeMove {
	h.Helper()
	m := moveOf(name)
	if !h.has(m) {
		return nil
	}
	return m
}

// reconcile has an operator look at a move, which is killed if the limit says so.
func (h *harness) reconcile(name string) {
	h.Helper()
	h.serve(ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: name}})
}

// look has an operator look for what was made late, and do what is next of that.
func (h *harness) look() {
	h.Helper()
	(&Reconciler{APIReader: h.reader(), DriverNamespace: storage}).lookForForsaken(h.Context(), h.serve)
}

func (h *harness) serve(request ctrl.Request) {
	h.Helper()
	r := &Reconciler{Client: h.Client, APIReader: h.reader(), Reports: h, DriverNamespace: storage, Now: h.clock, reported: map[client.ObjectKey]string{}, arrived: h.arrived}
	_, err := r.Reconcile(h.Context(), request)
	if err != nil && !errors.Is(err, errKilled) && !apierrors.IsConflict(err) {
		h.Fatal(err)
	}
}

// reader reads for the operator, but for the read that fails.
func (h *harness) reader() client.Reader {
	read := func(name string, of any, do func() error) error {
		phase := v1alpha1.Phase("")
		if m := h.move("m"); m != nil {
			phase = m.Status.Phase
		}
		name = fmt.Sprintf("read the %T %s in the phase %s", of, name, phase)
		if !slices.Contains(h.reads, name) {
			if h.reads = append(h.reads, name); name == h.fail {
				return errKilled
			}
		}
		return do()
	}
	return interceptor.NewClient(h.api.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			return read(key.Name, o, func() error { return c.Get(ctx, key, o, opts...) })
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			return read("", list, func() error { return c.List(ctx, list, opts...) })
		},
	})
}

// Lines are what the stand-in of a mover reported.
func (h *harness) Lines(_ context.Context, _, pod string) (string, error) {
	if h.silent {
		h.Error("a log is asked for")
	}
	if h.unheard != "" {
		return "", errors.New(h.unheard)
	}
	if h.lost != "" {
		return "", apierrors.NewBadRequest(h.lost)
	}
	return h.logs[pod], nil
}

// run reconciles until a move has ended, or is gone.
func (h *harness) run(name string, meanwhile ...func(look int)) {
	h.Helper()
	for h.looked = range 200 {
		for _, do := range meanwhile {
			do(h.looked)
		}
		h.reconcile(name)
		h.live()
		if m := h.move(name); m == nil || m.Ended() && len(m.Finalizers) == 0 {
			return
		}
	}
	h.Fatalf("the move does not end: %+v", h.move(name).Status)
}

// live has the rest of the cluster do its part.
func (h *harness) live() {
	h.Helper()
	h.collectPods()
	pods := &corev1.PodList{}
	must.Succeed(h, h.api.List(h.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
	for i := range pods.Items {
		h.mover(&pods.Items[i], pods.Items)
	}
	h.bindClaims()
	h.schedule()
	if h.publishes(nodeA) && h.publishes(nodeB) {
		h.Fatal("both nodes publish the volume")
	}
}

// publishes says whether a node would publish the volume. What is left on one that was given up, or of a move that is undone, is not asked
// for while the PersistentVolume is on another.
func (h *harness) publishes(on string) bool {
	h.Helper()
	volume := volumeOf("pv")
	m := h.move("m")
	givenUp := h.forced || h.wasGone[on] || m != nil && m.Status.Phase == v1alpha1.Undoing
	return h.records[on].publishes() && (!givenUp || h.has(volume) && place.NodeOfVolume(volume) == on && h.has(node(on)))
}

// goes deletes the object of a node, and comes makes it again.
func (h *harness) goes(name string) {
	h.Helper()
	h.wasGone[name] = true
	must.Succeed(h, h.api.Delete(h.Context(), node(name)))
}

func (h *harness) comes(name string) {
	h.Helper()
	must.Succeed(h, h.api.Create(h.Context(), node(name)))
}

// collectPods removes the pods of nodes that are gone, as Kubernetes does.
func (h *harness) collectPods() {
	h.Helper()
	if len(h.wasGone) == 0 {
		return
	}
	pods := &corev1.PodList{}
	must.Succeed(h, h.api.List(h.Context(), pods))
	for i := range pods.Items {
		if pod := &pods.Items[i]; !h.has(node(pod.Spec.NodeName)) {
			must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), pod)))
		}
	}
}

// bindClaims is the controller of volumes.
func (h *harness) bindClaims() {
	h.Helper()
	h.bindClaim("data", "pv")
	for _, name := range h.also {
		h.bindClaim(name, "pv-"+name)
	}
}

func (h *harness) bindClaim(name, of string) {
	h.Helper()
	claim, volume := claimOf(name), volumeOf(of)
	if !h.has(claim) {
		return
	}
	there := h.has(volume)
	if !there && h.late > 0 {
		h.late--
		return
	}
	was := claim.Status.Phase
	claim.Status.Phase = corev1.ClaimLost
	if there && volume.Spec.ClaimRef.UID == claim.UID {
		claim.Status.Phase = corev1.ClaimBound
		if was != claim.Status.Phase {
			claim.Status.Capacity = volume.Spec.Capacity
		}
		if volume.Status.Phase != corev1.VolumeBound {
			volume.Status.Phase = corev1.VolumeBound
			h.update(volume)
		}
	}
	if was != claim.Status.Phase {
		h.update(claim)
	}
}

// schedule is the StatefulSet, the scheduler and kubelet.
func (h *harness) schedule() {
	h.Helper()
	pod := appPod("data-0", false)
	volume := volumeOf("pv")
	if !h.has(pod) {
		if !h.replicas || !h.has(volume) || !h.has(node(place.NodeOfVolume(volume))) {
			return
		}
		pod = using(appPod("data-0", false), h.also...)
		h.uids++
		pod.CreationTimestamp = metav1.NewTime(time.Now().Add(h.ahead))
		pod.UID, pod.Spec.NodeName, pod.Status.Phase = types.UID(fmt.Sprintf("data-0 %d", h.uids)), place.NodeOfVolume(volume), corev1.PodPending
		status := pod.Status
		must.Succeed(h, h.api.Create(h.Context(), pod))
		pod.Status = status
		h.update(pod)
	}
	if pod.Status.Phase == corev1.PodPending && h.starts(pod, "pv") && !slices.ContainsFunc(h.also, func(name string) bool { return !h.starts(pod, "pv-"+name) }) {
		pod.Status.Phase = corev1.PodRunning
		h.update(pod)
	}
}

// starts says whether kubelet publishes a volume for a pod: not one whose affinity is for another node.
func (h *harness) starts(pod *corev1.Pod, name string) bool {
	h.Helper()
	volume := volumeOf(name)
	return h.has(volume) && place.NodeOfVolume(volume) == pod.Spec.NodeName && h.records[keyAt(pod.Spec.NodeName, volume.Spec.CSI.VolumeHandle)].publishes()
}

// used says whether a pod on a node has the volume.
func (h *harness) used(on string) bool {
	h.Helper()
	pods := &corev1.PodList{}
	must.Succeed(h, h.api.List(h.Context(), pods, client.InNamespace(space)))
	return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == on && p.Status.Phase == corev1.PodRunning })
}

// argsOf are the flags of a mover.
func argsOf(pod *corev1.Pod) map[string]string {
	flags := map[string]string{}
	for _, arg := range pod.Spec.Containers[0].Args[1:] {
		name, value, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		flags[name] = value
	}
	return flags
}

// mover does what the mover in a pod does in a while.
func (h *harness) mover(pod *corev1.Pod, all []corev1.Pod) {
	h.Helper()
	if pod.Status.Phase == corev1.PodSucceeded {
		return
	}
	flags := argsOf(pod)
	at := keyAt(pod.Spec.NodeName, flags["volume"])
	own := h.records[at]
	before := pod.DeepCopy()
	pod.Status.Phase, pod.Status.PodIP = corev1.PodRunning, "192.0.2."+map[string]string{nodeA: "1", nodeB: "2"}[pod.Spec.NodeName]
	if pod.Spec.NodeName == h.hangs {
		h.update(pod)
		return
	}
	mine := own != nil && own.move == flags["move"]
	problem, listens := "", false
	switch role(pod.Labels[roleLabel]) {
	case roleOut:
		problem = h.copyOut(pod, flags, all)
	case roleConfirm, roleAssure:
		switch {
		case own != nil && own.moved == flags["move"]:
		case !mine || own.role != "target" || own.fence != flags["fence"]:
			problem = "the copy is not whole"
		default:
			h.records[at] = &record{moved: own.move}
		}
	case roleRemove:
		address, asks := flags["address"]
		switch {
		case asks && !h.vouches(address, flags["move"], all):
			problem = "nothing vouches for the volume"
		case own == nil:
		case !mine || !own.handedOver:
			problem = "it was not handed over"
		default:
			delete(h.records, at)
		}
	case roleAbort, roleAbortUndone:
		_, even := flags["even-confirmed"]
		confirmed := own != nil && own.moved == flags["move"]
		listens = role(pod.Labels[roleLabel]) == roleAbortUndone && (confirmed || mine && own.fence != "")
		switch {
		case listens:
		case confirmed && !even:
			problem = "it was confirmed"
		case mine || confirmed:
			delete(h.records, at)
		}
	case roleUndo, roleTell, roleGiveUp:
		switch {
		case mine:
			h.records[at] = &record{undone: own.move, moved: own.moved}
		case own != nil && own.role == "":
			own.undone = flags["move"]
		case own == nil && role(pod.Labels[roleLabel]) != roleGiveUp:
			problem = "this node has nothing to undo"
		}
		if problem == "" && role(pod.Labels[roleLabel]) == roleTell {
			problem = h.tell(pod, flags, all)
		}
	}
	if r := role(pod.Labels[roleLabel]); problem == "" && !listens && r != roleOut && r != roleIn && r != roleVouch {
		pod.Status.Phase = corev1.PodSucceeded
	}
	for i := range pod.Status.ContainerStatuses { // how it ended before is kept
		pod.Status.ContainerStatuses[i].State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	}
	if problem != "" {
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{LastTerminationState: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "{}\n" + problem + "\n"},
		}}}
	}
	if !equal(before, pod) {
		h.update(pod)
	}
}

// vouches says whether a mover that listens at an address answers that its node has the volume by a move.
func (h *harness) vouches(address, move string, all []corev1.Pod) bool {
	return slices.ContainsFunc(all, func(p corev1.Pod) bool {
		has := h.records[keyAt(p.Spec.NodeName, argsOf(&p)["volume"])]
		return p.Labels[roleLabel] == string(roleVouch) && strings.HasPrefix(address, p.Status.PodIP+":") && has != nil && has.moved == move
	})
}

// tell has the mover that listens at an address remove its copy.
func (h *harness) tell(pod *corev1.Pod, flags map[string]string, all []corev1.Pod) (problem string) {
	i := slices.IndexFunc(all, func(p corev1.Pod) bool {
		return isPeer(&p, pod, roleAbortUndone) && p.Status.PodIP != "" && strings.HasPrefix(flags["address"], p.Status.PodIP+":") && p.Spec.NodeName != h.hangs
	})
	if i < 0 {
		return "nothing listens"
	}
	delete(h.records, keyAt(all[i].Spec.NodeName, flags["volume"]))
	return ""
}

// isPeer says that a pod has a role in the move of another.
func isPeer(p, of *corev1.Pod, r role) bool {
	return p.Labels[roleLabel] == string(r) && p.Labels[moveLabel] == of.Labels[moveLabel]
}

func equal(a, b *corev1.Pod) bool { return fmt.Sprint(a.Status) == fmt.Sprint(b.Status) }

// copyOut is one step of move-out.
func (h *harness) copyOut(pod *corev1.Pod, flags map[string]string, all []corev1.Pod) (problem string) {
	h.Helper()
	at := slices.IndexFunc(all, func(p corev1.Pod) bool {
		return isPeer(&p, pod, roleIn) && strings.HasPrefix(flags["address"], p.Status.PodIP+":") && p.Status.Phase == corev1.PodRunning
	})
	own := h.records[keyAt(nodeA, flags["volume"])]
	if own == nil {
		return "the volume is gone"
	}
	report := func(text string) { h.logs[pod.Name] += text + "\n" }
	end := func() {
		report(fmt.Sprintf(`{"event":"handed-over","fence":%q,"promisedBytes":%d}`, own.fence, h.promised))
		pod.Status.Phase = corev1.PodSucceeded
		if at >= 0 {
			all[at].Status.Phase = corev1.PodSucceeded
			h.update(&all[at])
		}
	}
	target := h.records[keyAt(nodeB, flags["volume"])]
	switch {
	case own.undone == flags["move"]:
		return "the move was undone"
	case own.handedOver && own.move == flags["move"] && (at < 0 || target.has(own)):
		end()
	case at < 0:
		return "nothing listens"
	case target != nil && target.move != flags["move"]:
		return "the volume exists there"
	case target == nil:
		h.records[keyAt(nodeB, flags["volume"])] = &record{move: flags["move"], role: "target"}
		report(`{"event":"passing","bytes":3}`)
	case own.role == "" && pod.Annotations[mayFenceAnnotation] != flags["move"]:
		report(`{"event":"passed","pass":1,"bytes":1048576}`)
		report(`{"event":"copied"}`)
	case own.role == "":
		h.fences++
		*own = record{move: flags["move"], role: "source", undone: own.undone, moved: own.moved, fence: fmt.Sprint("fence-", h.fences)}
		report(`{"event":"fenced"}`)
	case own.move != flags["move"]:
		return "another move has it"
	case h.used(nodeA):
		h.logs[pod.Name] = "{\"event\":\"fenced\"}\n{\"event\":\"waiting\"}\n"
	case target.fence != own.fence:
		report(`{"event":"unused"}`)
		report(`{"event":"passed","pass":2,"last":true,"bytes":1000}`)
		target.fence = own.fence
	default:
		own.handedOver = true
		end()
	}
	return ""
}

// wantNothingLeft expects nothing of moves in the driver's namespace.
func (h *harness) wantNothingLeft() {
	h.Helper()
	for _, list := range []client.ObjectList{&corev1.PodList{}, &corev1.SecretList{}, &networkingv1.NetworkPolicyList{}} {
		must.Succeed(h, h.api.List(h.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
		if n := meta.LenList(list); n > 0 {
			h.Errorf("%d of %T are left: %+v", n, list, list)
		}
	}
}

// wantOn expects the volume to be on one node alone, whole, with its object, its claim and the pod.
func (h *harness) wantOn(name string) {
	h.Helper()
	h.live()
	h.live()
	h.wantNothingLeft()
	for _, other := range []string{nodeA, nodeB} {
		if has := h.records[other] != nil; has != (other == name) || has && !h.records[other].publishes() {
			h.Errorf("the record on %s is %+v; the volume should be on %s", other, h.records[other], name)
		}
	}
	volume, claim, pod := volumeOf("pv"), claimOf("data"), appPod("data-0", false)
	if !h.has(volume) || place.NodeOfVolume(volume) != name || volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete ||
		volume.DeletionTimestamp != nil || len(volume.Finalizers) != 2 || volume.Annotations["pv.kubernetes.io/provisioned-by"] != render.DriverName ||
		volume.Annotations[reclaimPolicy] != "" || volume.Spec.ClaimRef.UID != "claim data" {
		h.Errorf("the PersistentVolume is %+v", volume)
	}
	if !h.has(claim) || claim.Status.Phase != corev1.ClaimBound {
		h.Errorf("the claim is %+v", claim.Status)
	}
	if h.replicas && (!h.has(pod) || pod.Spec.NodeName != name || pod.Status.Phase != corev1.PodRunning) {
		h.Errorf("the pod is %s on %s", pod.Status.Phase, pod.Spec.NodeName)
	}
}

// says is what the condition of a move says.
func (h *harness) says(name string) string {
	h.Helper()
	c := meta.FindStatusCondition(h.move(name).Status.Conditions, v1alpha1.ConditionComplete)
	if c == nil {
		return ""
	}
	return c.Message
}

// later is a time after that of another move.
func later(m *v1alpha1.VolumeMove) { m.CreationTimestamp = metav1.NewTime(time.Unix(1<<31, 0)) }
