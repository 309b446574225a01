// Package operator tests what the operator makes of VolumeMoves with the real drivers and the real movers of two nodes: it is the
// reconciler of pkg/operator/move. Stand-ins are the API server, kubelet, which runs the pods of movers as processes, and the
// controllers of volumes and of a StatefulSet. What is asked for is deleted at any moment of a move.
package operator

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/move"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

func TestMain(m *testing.M) {
	trap.Launch()
	testenv.Main(m)
}

const (
	mib = 1 << 20

	storage = "storage" // the driver's namespace
	space   = "space"   // the user's
	nodeA   = "node-a"
	nodeB   = "node-b"

	moveLabel = "hostpathprovisioner.kubevirt.io/move"
	// running is what kubelet keeps a pod by until its processes have ended.
	running = "test/running"
)

// A node has a driver with one pool.
type node struct {
	*drivertest.Driver
	name string
	pool *drivertest.Pool
	// socket is what movers take for the driver's.
	socket string
	env    []string
}

// A cluster has two nodes, and a volume that moves from one to the other.
type cluster struct {
	testing.TB
	parent testing.TB
	nodes  map[string]*node
	// programs are those of the movers, by their commands, and of drivers, by their nodes.
	programs map[string]string
	trap     *trap.Trap
	volume   drivertest.Volume
	writer   *drivertest.Writer
	policy   corev1.PersistentVolumeReclaimPolicy

	api      client.WithWatch
	operator *move.Reconciler
	movers   map[types.UID]*mover
	address  string // where the target listens
	replicas bool   // the StatefulSet makes its pod again
	count    int    // of moves
	uids     int
	ahead    time.Duration // of the clock of the API server
	cut      string        // the node whose kubelet hears nothing of the API server

	// writes are those of the operator, and at is the one before which now is called; empty for none.
	writes []string
	seen   map[string]int
	at     string
	now    func()
	// dies has the operator be killed amid its next write; late: that is made. Dead is one that was.
	dies, late, dead bool
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme, v1beta1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return s
}()

// newCluster has a process be trapped: move-out, move-in, or the driver of a node; none for an empty string.
func newCluster(t *testing.T, trapped string) *cluster {
	t.Helper()
	driver := drivertest.Built(t)
	programs := map[string]string{"move-out": driver, "move-in": driver, nodeA: driver, nodeB: driver}
	var traps *trap.Trap
	if trapped != "" {
		traps = trap.New(t, driver)
		programs[trapped] = itself(t)
	}
	c := startCluster(t, programs, nil)
	c.trap = traps
	return c
}

// itself is the program of the tests, which launches what is trapped.
func itself(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	must.Succeed(t, err)
	return self
}

// startCluster has volumes on btrfs, from references of which passes are made, and moves them to ext4. What is added to the environment of
// all programs of a node is by its name.
func startCluster(t *testing.T, programs, env map[string]string) *cluster {
	t.Helper()
	c := &cluster{TB: t, parent: t, programs: programs, nodes: map[string]*node{
		nodeA: newNode(t, nodeA, testenv.CountingBtrfs(t, 512*mib), "required"),
		nodeB: newNode(t, nodeB, testenv.LoopFS(t, "ext4", 512*mib), ""),
	}}
	for name, n := range c.nodes {
		if env[name] != "" {
			n.env = []string{env[name]}
		}
		n.start(t, programs[name])
	}
	return c
}

func newNode(t *testing.T, name, filesystem, enforcement string) *node {
	t.Helper()
	path, err := os.MkdirTemp(filesystem, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must.Succeed(t, err)
	return &node{name: name, pool: &drivertest.Pool{PoolConfig: drivertest.PoolConfig{Name: "local", Path: path, Enforcement: enforcement}}}
}

func (n *node) start(t *testing.T, program string) {
	t.Helper()
	n.Driver = drivertest.Start(t, drivertest.Config{
		Binary: program, Version: driverVersion, Pools: []drivertest.PoolConfig{n.pool.PoolConfig}, Flags: []string{drivertest.ServeMetrics}, Env: n.env,
	})
	n.pool.Driver = n.Driver
	n.socket = n.Process.Endpoint()
}

// begin makes the volume on a node, with its claim and a pod that writes, and asks for its move.
func (c *cluster) begin(policy corev1.PersistentVolumeReclaimPolicy) {
	c.Helper()
	c.count++
	c.volume = drivertest.Volume{ID: fmt.Sprintf("pvc-%d", c.count), Bytes: 16 * mib}
	c.writer, c.policy, c.replicas = &drivertest.Writer{}, policy, true
	c.movers, c.address = map[types.UID]*mover{}, testenv.FreeAddress(c)
	c.at, c.writes, c.seen, c.now = "", nil, map[string]int{}, nil
	_, err := c.nodes[nodeA].Create(c.Context(), c.volume)
	must.Succeed(c, err)
	objects := []client.Object{c.claim(), c.persistentVolume(), driverSet(), appPod()}
	for _, name := range []string{nodeA, nodeB} {
		objects = append(objects, nodeObject(c, name), driverPod(name))
	}
	c.api = interceptor.NewClient(fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.VolumeMove{}).WithObjects(objects...).Build(),
		interceptor.Funcs{Create: c.admit})
	c.runOperator()
	for !c.isRunning() {
		c.live()
	}
	must.Succeed(c, c.api.Create(c.Context(), c.moveObject()))
}

// clock is that of the API server, and so that of the operator.
func (c *cluster) clock() time.Time { return time.Now().Add(c.ahead) }

// admit is what the API server does to each new object, and kubelet to each new pod.
func (c *cluster) admit(ctx context.Context, api client.WithWatch, o client.Object, options ...client.CreateOption) error {
	if o.GetUID() == "" {
		c.uids++
		o.SetUID(types.UID(fmt.Sprintf("uid-%d-%d", c.count, c.uids)))
	}
	o.SetCreationTimestamp(metav1.NewTime(c.clock()))
	if _, is := o.(*corev1.Pod); is {
		o.SetFinalizers([]string{running})
	}
	return api.Create(ctx, o, options...)
}

// watched is the client of the operator.
func (c *cluster) watched() client.Client {
	return interceptor.NewClient(c.api, interceptor.Funcs{
		Create: func(ctx context.Context, api client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return c.write("create", o, func() error { return api.Create(ctx, o, opts...) })
		},
		Update: func(ctx context.Context, api client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			return c.write("update", o, func() error { return api.Update(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, api client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return c.write("patch", o, func() error { return api.Patch(ctx, o, p, opts...) })
		},
		Delete: func(ctx context.Context, api client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return c.write("delete", o, func() error { return api.Delete(ctx, o, opts...) })
		},
		SubResourceUpdate: func(ctx context.Context, api client.Client, kind string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return c.write("update the "+kind+" of", o, func() error { return api.SubResource(kind).Update(ctx, o, opts...) })
		},
		SubResourceCreate: func(ctx context.Context, api client.Client, kind string, o, sub client.Object, opts ...client.SubResourceCreateOption) error {
			return c.write("create the "+kind+" of", o, func() error { return api.SubResource(kind).Create(ctx, o, sub, opts...) })
		},
	})
}

// write makes a write of the operator, unless that is killed.
func (c *cluster) write(verb string, o client.Object, do func() error) error {
	c.note(verb, o)
	if !c.dies {
		return do()
	}
	if c.late && !c.dead {
		if err := do(); err != nil {
			return err
		}
	}
	c.dead = true
	return errKilled
}

// note is before each write of the operator. How many there are depends on how often it looks; which there are, and the first few of each, do
// not.
func (c *cluster) note(verb string, o client.Object) {
	words := fmt.Sprintf("%s %T %s", verb, o, strings.TrimPrefix(o.GetName(), "volumemove-"+string(c.uid("move"))))
	if m, is := o.(*v1alpha1.VolumeMove); is {
		words += " " + string(m.Status.Phase)
	}
	const few = 3
	if c.seen[words]++; c.seen[words] > few {
		return
	}
	words = fmt.Sprintf("%s, %d", words, c.seen[words])
	c.writes = append(c.writes, words)
	if words == c.at {
		c.now()
	}
}

// uid is that of an object of this move.
func (c *cluster) uid(kind string) types.UID { return types.UID(fmt.Sprintf("%s-%d", kind, c.count)) }

func (c *cluster) claim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "data", UID: c.uid("claim"), Finalizers: []string{"kubernetes.io/pvc-protection"}},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv", StorageClassName: ptr.To("local")},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
}

func (c *cluster) persistentVolume() *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: "pv", UID: c.uid("volume"), Finalizers: []string{"external-provisioner.volume.kubernetes.io/finalizer", "kubernetes.io/pv-protection"},
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": render.DriverName},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(c.volume.Bytes, resource.BinarySI)},
			StorageClassName:              "local",
			PersistentVolumeReclaimPolicy: c.policy,
			ClaimRef:                      &corev1.ObjectReference{Namespace: space, Name: "data", UID: c.uid("claim")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: render.DriverName, VolumeHandle: c.volume.ID,
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: place.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{nodeA}}},
			}}}},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
}

func (c *cluster) moveObject() *v1alpha1.VolumeMove {
	return &v1alpha1.VolumeMove{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "m", UID: c.uid("move"), Generation: 1},
		Spec:       v1alpha1.VolumeMoveSpec{ClaimName: "data", Snapshots: v1alpha1.RefuseSnapshots, When: v1alpha1.WhenEvict, Verify: v1alpha1.VerifyAll},
	}
}

// appPod is the pod of a StatefulSet, which uses the claim.
func appPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: space, Name: "data-0", UID: "first", Finalizers: []string{running},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "data", UID: "set", Controller: ptr.To(true)}},
		},
		Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"},
		}}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

const (
	driverImage   = "driver:v2"
	driverVersion = "v1.2.3"
)

func driverSet() *appsv1.DaemonSet {
	labels := map[string]string{"app": "driver"}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: storage, Name: "driver"},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{Spec: driverContainers(driverImage)}},
	}
}

func driverContainers(image string) corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{
		Name: "driver", Image: image, Args: []string{"--drivername=" + render.DriverName, "--endpoint=unix:///csi/csi.sock", "--datadir=$(DATADIR)"},
	}}}
}

func driverPod(on string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: storage, Name: "driver-" + on, Labels: map[string]string{"app": "driver"}},
		Spec:       driverContainers(driverImage),
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	pod.Spec.NodeName = on
	return pod
}

func nodeObject(t testing.TB, name string) *corev1.Node {
	t.Helper()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id") // as kubelet does
	must.Succeed(t, err)
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		NodeInfo:   corev1.NodeSystemInfo{BootID: strings.TrimSpace(string(boot))},
	}}
}

// has reads an object.
func (c *cluster) has(o client.Object) bool {
	c.Helper()
	err := c.api.Get(c.Context(), client.ObjectKeyFromObject(o), o)
	must.Succeed(c, client.IgnoreNotFound(err))
	return err == nil
}

// status writes that of an object that was read. What changed it meanwhile goes first.
func (c *cluster) status(o client.Object) {
	c.Helper()
	must.Succeed(c, lateIsNone(c.api.Status().Update(c.Context(), o)))
}

// lateIsNone is no error for an object that was changed or deleted: it is looked at again.
func lateIsNone(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// drop takes a finalizer off an object.
func (c *cluster) drop(o client.Object, finalizer string) {
	c.Helper()
	before := o.DeepCopyObject().(client.Object)
	o.SetFinalizers(slices.DeleteFunc(slices.Clone(o.GetFinalizers()), func(f string) bool { return f == finalizer }))
	must.Succeed(c, lateIsNone(c.api.Patch(c.Context(), o, client.MergeFrom(before))))
}

func (c *cluster) delete(o client.Object) {
	c.Helper()
	must.Succeed(c, client.IgnoreNotFound(c.api.Delete(c.Context(), o)))
}

// reconcile has the operator look at the move.
func (c *cluster) reconcile() {
	c.Helper()
	_, err := c.operator.Reconcile(c.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: "m"}})
	if c.dead {
		c.runOperator()
		return
	}
	must.Succeed(c, lateIsNone(err))
}

// often is how often each part of the cluster looks at what there is. It is more than they do, who wait for changes.
const often = 10 * time.Millisecond

// run has the operator at work until the move has ended, or is gone.
func (c *cluster) run(meanwhile func()) {
	c.Helper()
	again := time.NewTicker(often)
	defer again.Stop()
	for began := time.Now(); ; <-again.C {
		meanwhile()
		c.reconcile()
		c.live()
		m := c.moveObject()
		if !c.has(m) || m.Ended() && len(m.Finalizers) == 0 {
			return
		}
		if time.Since(began) > drivertest.Patience {
			c.Fatalf("the move does not end: %+v\n%s", m.Status, c.output())
		}
	}
}

// until has all but the operator at work.
func (c *cluster) until(what string, done func() bool) {
	c.Helper()
	c.nodes[nodeA].Eventually(what, func() bool {
		c.live()
		return done()
	})
}

// live has all of the cluster but the operator do its part once.
func (c *cluster) live() {
	c.Helper()
	for _, n := range c.nodes {
		c.awake(n)
	}
	c.runMovers()
	c.bind()
	c.protect()
	c.provision()
	c.schedule()
	c.runPod()
}

// awake runs a driver again that was killed.
func (c *cluster) awake(n *node) {
	c.Helper()
	if n.Process.Running() {
		return
	}
	must.Succeed(c, n.Process.Kill())
	for try := 0; ; try++ {
		err := n.Process.Restart(c.Context())
		if err == nil {
			n.AwaitServing()
			return
		}
		if try == 3 { // it may have been killed at its start
			c.Fatal(err)
		}
	}
}

// bind is the controller of volumes.
func (c *cluster) bind() {
	c.Helper()
	claim, volume := c.claim(), c.persistentVolume()
	hasClaim, hasVolume := c.has(claim), c.has(volume)
	if hasVolume {
		is := corev1.VolumeReleased
		if hasClaim && volume.Spec.ClaimRef.UID == claim.UID {
			is = corev1.VolumeBound
		}
		if volume.Status.Phase != is {
			volume.Status.Phase = is
			c.status(volume)
		}
	}
	if hasClaim {
		is := corev1.ClaimLost
		if hasVolume && volume.Spec.ClaimRef.UID == claim.UID {
			is = corev1.ClaimBound
		}
		if claim.Status.Phase != is {
			claim.Status.Phase = is
			c.status(claim)
		}
	}
}

// protect lets objects go that were deleted and are not in use.
func (c *cluster) protect() {
	c.Helper()
	claim, pod := c.claim(), appPod()
	if c.has(claim) && claim.DeletionTimestamp != nil && (!c.has(pod) || pod.Spec.NodeName == "") {
		c.drop(claim, "kubernetes.io/pvc-protection")
	}
	if volume := c.persistentVolume(); c.has(volume) && volume.DeletionTimestamp != nil && volume.Status.Phase != corev1.VolumeBound {
		c.drop(volume, "kubernetes.io/pv-protection")
	}
}

// provision is the external-provisioner beside each driver: it deletes volumes that were released.
func (c *cluster) provision() {
	c.Helper()
	const finalizer = "external-provisioner.volume.kubernetes.io/finalizer"
	volume := c.persistentVolume()
	if !c.has(volume) || volume.Status.Phase != corev1.VolumeReleased || volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete ||
		volume.DeletionTimestamp != nil && !slices.Contains(volume.Finalizers, finalizer) {
		return
	}
	n := c.nodes[place.NodeOfVolume(volume)]
	if n.Delete(c.Context(), volume.Spec.CSI.VolumeHandle) != nil {
		return // it is tried again
	}
	c.delete(volume)
	if c.has(volume) {
		c.drop(volume, finalizer)
	}
}

// schedule is the StatefulSet and the scheduler.
func (c *cluster) schedule() {
	c.Helper()
	pod, claim, volume := appPod(), c.claim(), c.persistentVolume()
	if !c.has(pod) {
		if c.replicas {
			pod = appPod()
			pod.UID = ""
			must.Succeed(c, c.api.Create(c.Context(), pod))
		}
		return
	}
	if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && c.has(claim) && claim.DeletionTimestamp == nil && claim.Status.Phase == corev1.ClaimBound && c.has(volume) {
		pod.Spec.NodeName = place.NodeOfVolume(volume)
		must.Succeed(c, lateIsNone(c.api.Update(c.Context(), pod)))
	}
}

// runPod is what the kubelets do with the pod.
func (c *cluster) runPod() {
	c.Helper()
	pod, claim, volume := appPod(), c.claim(), c.persistentVolume()
	if !c.has(pod) {
		return
	}
	n := c.nodes[pod.Spec.NodeName]
	switch {
	case pod.DeletionTimestamp != nil:
		if n != nil {
			must.Succeed(c, c.writer.Stop())
			if drivertest.Repeat(c.Context(), func() error { return n.Unpublish(c.Context(), c.volume.ID, podName(pod)) }) != nil {
				return // it is tried again
			}
		}
		c.drop(pod, running)
	case n == nil || pod.Status.Phase == corev1.PodRunning:
	case c.has(claim) && claim.DeletionTimestamp == nil && claim.Status.Phase == corev1.ClaimBound && c.has(volume) && place.NodeOfVolume(volume) == n.name:
		if n.Publish(c.Context(), c.volume, podName(pod)) != nil {
			return // it is tried again
		}
		must.Succeed(c, c.writer.IsAt(n.Target(podName(pod))))
		c.writer.Start(n.Target(podName(pod)))
		pod.Status.Phase = corev1.PodRunning
		c.status(pod)
	}
}

func podName(pod *corev1.Pod) string { return "pod-" + string(pod.UID) }

// isRunning says whether the pod is.
func (c *cluster) isRunning() bool {
	c.Helper()
	pod := appPod()
	return c.has(pod) && pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil
}

// says is what the condition of the move says.
func (c *cluster) says() string {
	c.Helper()
	m := c.moveObject()
	if !c.has(m) {
		return ""
	}
	if condition := meta.FindStatusCondition(m.Status.Conditions, v1alpha1.ConditionComplete); condition != nil {
		return condition.Message
	}
	return ""
}

// wantNothingMade expects nothing of moves in the driver's namespace.
func (c *cluster) wantNothingMade() {
	c.Helper()
	for _, list := range []client.ObjectList{&corev1.PodList{}, &corev1.SecretList{}, &networkingv1.NetworkPolicyList{}} {
		must.Succeed(c, c.api.List(c.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
		if n := meta.LenList(list); n > 0 {
			c.Errorf("%d of %T are left: %+v", n, list, list)
		}
	}
	for _, m := range c.movers {
		if m.runs() {
			c.Errorf("%s runs after the move", m.command)
		}
	}
}

// wantVolume expects a node to have the volume, and the other nothing.
func (c *cluster) wantVolume(on string, pods ...string) {
	c.Helper()
	for name, n := range c.nodes {
		var kept []drivertest.Kept
		promised := 0.0
		if name == on {
			kept, promised = []drivertest.Kept{{Volume: c.volume, Pods: pods}}, float64(c.volume.Bytes)
		}
		for _, snapshot := range n.pool.Snapshots {
			record, err := n.pool.Record("~" + snapshot)
			must.Succeed(c, err)
			promised += float64(record.Bytes)
		}
		n.pool.AwaitErased()
		if err := n.pool.Problems(kept); err != nil {
			c.Errorf("node %s: %v", name, err)
		}
		// Not GetCapacity: a driver sees within a minute what others have freed.
		if got := n.Metric("hostpath_pool_promised_bytes", n.pool.Name); got != promised {
			c.Errorf("node %s has promised %g bytes, want %g", name, got, promised)
		}
	}
}

// end expects one copy, or none of a volume that is to go with its claim, and then removes what is left.
func (c *cluster) end() {
	c.Helper()
	c.wantNothingMade()
	volume, claim := c.persistentVolume(), c.claim()
	if c.has(claim) && claim.DeletionTimestamp == nil {
		c.until("the pod runs", c.isRunning)
	}
	if pod := appPod(); c.isRunning() && c.has(pod) {
		c.wantPolicy(pod.Spec.NodeName)
		c.wantVolume(pod.Spec.NodeName, podName(pod))
	}
	// What was asked for is deleted now, if it was not.
	c.replicas = false
	c.delete(appPod())
	c.delete(c.claim())
	c.until("the claim is gone", func() bool { return !c.has(c.claim()) && !c.has(appPod()) })
	if c.policy == corev1.PersistentVolumeReclaimRetain {
		if !c.has(volume) {
			c.Fatal("the PersistentVolume is gone")
		}
		n := c.nodes[place.NodeOfVolume(volume)]
		c.wantPolicy(n.name)
		c.wantVolume(n.name)
		must.Succeed(c, n.Publish(c.Context(), c.volume, "kept"), c.writer.IsAt(n.Target("kept")), n.Unpublish(c.Context(), c.volume.ID, "kept"))
		volume.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
		must.Succeed(c, c.api.Update(c.Context(), volume))
	}
	c.until("the volume is gone", func() bool { return !c.has(c.persistentVolume()) })
	c.wantVolume("")
	c.wantNothingMade()
}

// wantPolicy expects the object of the volume on a node, with the policy that it had.
func (c *cluster) wantPolicy(on string) {
	c.Helper()
	volume := c.persistentVolume()
	c.has(volume)
	if place.NodeOfVolume(volume) != on || volume.Spec.PersistentVolumeReclaimPolicy != c.policy || volume.DeletionTimestamp != nil || len(volume.Finalizers) != 2 {
		c.Errorf("the PersistentVolume of a volume on node %s is %+v", on, volume)
	}
}

// output is what movers have said.
func (c *cluster) output() string {
	var all strings.Builder
	for _, m := range c.movers {
		fmt.Fprintf(&all, "%s %s:\n%s\n%s\n", m.command, m.pod, m.said(), m.failed())
	}
	return all.String()
}
