package localpv

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// A cluster is an API in memory, and a controller on a node with real disks.
type cluster struct {
	*controller
	*devicestest.Harness
	said    *events.FakeRecorder
	changed chan struct{}
	logged  strings.Builder
}

const node = "n1"

func newCluster(t *testing.T, o Options) *cluster {
	t.Helper()
	o.Node, o.Namespace = node, "ns"
	if o.PollingInterval == 0 {
		o.PollingInterval = time.Minute
	}
	c := &cluster{Harness: devicestest.New(t), said: events.NewFakeRecorder(100), changed: make(chan struct{}, 1000)}
	api := fake.NewClientBuilder().WithScheme(scheme.Scheme).WithStatusSubresource(&corev1.PersistentVolume{}).
		WithIndex(&corev1.Node{}, metav1.ObjectNameField, func(o client.Object) []string { return []string{o.GetName()} }).
		WithObjects(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "node-uid", Labels: map[string]string{corev1.LabelHostname: node}}}).Build()
	changed := func() { c.changed <- struct{}{} }
	log := funcr.New(func(_, args string) { fmt.Fprintln(&c.logged, args) }, funcr.Options{})
	watcher, err := newWatcher(log, changed)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, watcher.inotify.Close()) })
	c.controller = &controller{Options: o, Client: api, fresh: api, events: c.said, metrics: newMetrics(prometheus.NewRegistry(), node),
		watcher: watcher, log: log, reported: make(map[string]string), annotated: make(map[string]time.Time)}
	c.agent = devices.NewAgent(devices.Options{Node: node, Records: c.Records, API: c.controller, Log: log, Settle: o.NewDeviceDelay, View: devicestest.View(), Changed: changed, Wiped: func(int64) {}})
	t.Cleanup(c.agent.Close)
	return c
}

// configure writes the ConfigMap "map", for the directory of the disks.
func (c *cluster) configure(data map[string]string) {
	c.Helper()
	if data[devices.KeyDeviceDir] == "" {
		data[devices.KeyDeviceDir] = c.Dir
	}
	if data[devices.KeyFilter] == "" {
		data[devices.KeyFilter] = "^disk"
	}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "map"}, Data: data}
	_ = c.Delete(c.Context(), &corev1.ConfigMap{ObjectMeta: object.ObjectMeta}) // there may be none yet
	must.Succeed(c.Harness, c.Create(c.Context(), object))
}

// pass reconciles once, as at a poll.
func (c *cluster) pass() reconcile.Result {
	c.Helper()
	c.nextPoll = time.Time{}
	result, err := c.Reconcile(c.Context(), reconcile.Request{})
	must.Succeed(c.Harness, err)
	return result
}

// until reconciles each time when something has changed, the volumes included, until that is the case.
func (c *cluster) until(what string, is func() bool) {
	c.Helper()
	late := time.After(time.Minute)
	c.pass()
	for before := -1; !is(); {
		if n := len(c.volumes()); n == before {
			select {
			case <-c.changed:
			case <-late:
				c.Fatalf("%s: volumes %+v, log:\n%s", what, c.volumes(), c.logged.String())
			}
		} else {
			before = n
		}
		_, err := c.Reconcile(c.Context(), reconcile.Request{})
		must.Succeed(c.Harness, err)
	}
}

func (c *cluster) volumes() []corev1.PersistentVolume {
	c.Helper()
	var list corev1.PersistentVolumeList
	must.Succeed(c.Harness, c.List(context.Background(), &list))
	return list.Items
}

// awaitVolumes waits until there are so many volumes.
func (c *cluster) awaitVolumes(n int) []corev1.PersistentVolume {
	c.Helper()
	c.until(fmt.Sprintf("%d volumes", n), func() bool { return len(c.volumes()) == n })
	return c.volumes()
}

// release has the claim of a volume be deleted.
func (c *cluster) release(pv *corev1.PersistentVolume) {
	c.Helper()
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
	must.Succeed(c.Harness, c.Update(c.Context(), pv))
	pv.Status.Phase = corev1.VolumeReleased
	must.Succeed(c.Harness, c.Status().Update(c.Context(), pv))
}

// wantEvent wants one of the events, all of which are then forgotten, to have these words.
func (c *cluster) wantEvent(words ...string) {
	c.Helper()
	var all []string
	for len(c.said.Events) > 0 {
		all = append(all, <-c.said.Events)
	}
	for _, e := range all {
		must.SayOnce(c.Harness, e)
		has := true
		for _, word := range words {
			has = has && strings.Contains(e, word)
		}
		if has {
			return
		}
	}
	c.Errorf("the events are %q, want one with %q", all, words)
}

// value is the sum of a metric.
func value(metric prometheus.Collector) (sum float64) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(metric)
	families, err := registry.Gather()
	if err != nil {
		panic(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

func (c *cluster) wantMetric(metric prometheus.Collector, want float64) {
	c.Helper()
	if got := value(metric); got != want {
		c.Errorf("the metric is %v, want %v", got, want)
	}
}

func block() map[string]string { return map[string]string{devices.KeyVolumeMode: devices.Block} }

func TestNothingIsOfferedWithoutConfigMap(t *testing.T) {
	c := newCluster(t, Options{})
	c.Blank("disk", 8*mib).Untouched()
	c.configure(block())
	c.pass()
	c.pass()
	if n := len(c.volumes()); n > 0 || strings.Count(c.logged.String(), "nothing is offered") != 1 {
		t.Errorf("%d volumes, and the log is %s", n, c.logged.String())
	}
}

func TestConfigMapOfAnnotationComesFirst(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "none"})
	c.Blank("disk", 8*mib)
	c.configure(block())
	var n corev1.Node
	must.Succeed(t, c.Get(t.Context(), client.ObjectKey{Name: node}, &n))
	n.Annotations = map[string]string{configAnnotation: "map"}
	must.Succeed(t, c.Update(t.Context(), &n))
	c.awaitVolumes(1)
}

// Nothing is changed by a wrong ConfigMap, and all that is wrong is said at once.
func TestWrongConfigMap(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d, missing := c.Blank("disk", 8*mib), c.Blank("disk-missing", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(2)[0]
	c.release(&pv)
	must.Succeed(t, os.Remove(missing.Path))
	c.configure(map[string]string{devices.KeyVolumeMode: "Raw", devices.KeyDeviceDir: "/no/such/directory", devices.KeyFilter: "("})
	before := d.Sum()
	c.Blank("disk-2", 16*mib)
	c.pass()
	c.pass()
	if len(c.volumes()) != 2 || d.Sum() != before {
		t.Errorf("volumes %+v, or the disk was written to", c.volumes())
	}
	// What is the case is measured all the same.
	c.wantMetric(c.metrics.available, 0)
	c.wantMetric(c.metrics.missing, 1)
	c.wantMetric(c.metrics.errors, 1)
	c.wantMetric(c.metrics.uncleaned, 1)
	c.wantEvent("InvalidPVSpecConfigMap", `volumeMode is "Raw"`, "there is no /no/such/directory", `deviceNameFilter is "("`)
	c.wantMetric(c.metrics.config.WithLabelValues(invalid), 1)
	if n := strings.Count(c.logged.String(), "The ConfigMap cannot be used"); n != 1 {
		t.Errorf("the log has it %d times", n)
	}
	c.configure(block())
	c.until("the released volume to be made anew, and one of the other disk", func() bool {
		now := c.volumes()
		return len(now) == 3 && now[0].Spec.ClaimRef == nil
	})
	c.wantMetric(c.metrics.config.WithLabelValues(invalid), 0)
}

// A volume is for the node that has its label: without a label there is none to be written.
func TestNodeWithoutHostnameLabel(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk", 8*mib).Untouched()
	label := func(labels map[string]string) {
		t.Helper()
		var n corev1.Node
		must.Succeed(t, c.Get(t.Context(), client.ObjectKey{Name: node}, &n))
		n.Labels = labels
		must.Succeed(t, c.Update(t.Context(), &n))
	}
	label(nil)
	c.configure(block())
	c.pass()
	c.wantEvent("NoHostnameLabel", corev1.LabelHostname)
	c.wantMetric(c.metrics.config.WithLabelValues(conflict), 1)
	if n := len(c.volumes()); n > 0 {
		t.Errorf("%d volumes", n)
	}
}

func TestChangedConfigMapWaitsForVolumes(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	c.configure(map[string]string{devices.KeyVolumeMode: devices.Filesystem, devices.KeyFSType: "xfs"})
	c.Blank("disk-2", 8*mib)
	c.pass()
	c.pass()
	c.wantEvent("PVSpecConflict", pv.Name, `volumeMode "Block", not "Filesystem"`)
	c.wantMetric(c.metrics.config.WithLabelValues(conflict), 1)
	if n := len(c.volumes()); n != 1 {
		t.Errorf("%d volumes, want the old one", n)
	}
	must.Succeed(t, c.Delete(t.Context(), &pv))
	c.until("volumes of the new configuration", func() bool {
		now := c.volumes()
		return len(now) == 2 && *now[0].Spec.VolumeMode == corev1.PersistentVolumeFilesystem && *now[0].Spec.Local.FSType == "xfs"
	})
	c.wantMetric(c.metrics.config.WithLabelValues(conflict), 0)
}

// madeByHand is a volume of a disk that an administrator has made.
func madeByHand(d *devicestest.Disk) *corev1.PersistentVolume {
	on := nodeMetadata(node)
	on.Labels = map[string]string{corev1.LabelHostname: node}
	pv := newVolume(on, devices.Config{VolumeMode: devices.Block, Filter: regexp.MustCompile("")}, devices.Offer{Name: "by-hand", Path: d.Node, Bytes: 8 * mib})
	pv.Labels, pv.Annotations, pv.OwnerReferences = nil, nil, nil
	return pv
}

// A volume that was made by hand after its device was checked, and that no cache has, is found right before the device is offered.
func TestAPIIsAskedRightBeforeAVolumeIsMade(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 8*mib)
	var asked atomic.Int32
	api := c.Client.(client.WithWatch)
	c.fresh = interceptor.NewClient(api, interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, volumes := list.(*corev1.PersistentVolumeList); volumes && asked.Add(1) == 2 {
				must.Succeed(t, api.Create(ctx, madeByHand(d)))
			}
			return api.List(ctx, list, options...)
		},
	})
	c.configure(block())
	c.until("a refusal, or a volume", func() bool {
		return value(c.metrics.errors) == 1 || len(c.volumes()) > 1 || asked.Load() < 2 && len(c.volumes()) > 0
	})
	if now := c.volumes(); len(now) != 1 || now[0].Name != "by-hand" {
		t.Fatalf("%d volumes after %d questions, want the one that was made by hand", len(now), asked.Load())
	}
	c.wantEvent("DeviceForeignVolume", d.Path, "by-hand")
}

// A volume that an administrator has made by hand has no label of ours.
func TestDeviceOfVolumeMadeByHandIsNotOffered(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 8*mib)
	d.Untouched()
	must.Succeed(t, c.Create(t.Context(), madeByHand(d)))
	c.configure(block())
	c.until("an error device", func() bool { return value(c.metrics.errors) == 1 })
	c.wantEvent("DeviceForeignVolume", d.Path, "by-hand")
	if n := len(c.volumes()); n != 1 {
		t.Errorf("%d volumes, want the one that was there", n)
	}
}

// A volume that cannot be made is an error like any other, and is tried again.
func TestVolumeThatCannotBeMade(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk", 8*mib)
	c.configure(block())
	refuses, tries, api := true, 0, c.Client
	c.Client = interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{
		Create: func(ctx context.Context, client client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if tries++; refuses {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumes"}, object.GetName(), errors.New("a webhook refuses"))
			}
			return client.Create(ctx, object, options...)
		},
	})
	c.until("an error device", func() bool { return value(c.metrics.errors) == 1 })
	c.wantEvent("DeviceNotOffered", "a webhook refuses")
	for range 5 { // whatever else happens, it has to wait
		_, err := c.Reconcile(t.Context(), reconcile.Request{})
		must.Succeed(t, err)
		c.wantMetric(c.metrics.errors, 1)
	}
	if tries != 1 {
		t.Errorf("it was tried %d times at once", tries)
	}
	refuses = false
	c.awaitVolumes(1)
	c.wantMetric(c.metrics.errors, 0)
}

// What the API server refuses for long delays nothing else: a reconciler that fails is called less and less often, whatever is to be done.
func TestVolumeThatCannotBeDeletedDelaysNoPoll(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	refused := 0
	c.Client = interceptor.NewClient(c.Client.(client.WithWatch), interceptor.Funcs{
		Delete: func(context.Context, client.WithWatch, client.Object, ...client.DeleteOption) error {
			refused++
			return apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumes"}, pv.Name, errors.New("a webhook refuses"))
		},
	})
	c.release(&pv)
	c.until("a refusal", func() bool { return refused > 0 })
	if after := c.pass().RequeueAfter; after <= 0 || after > time.Minute {
		t.Errorf("the next pass is after %s", after)
	}
	if !strings.Contains(c.logged.String(), "a webhook refuses") {
		t.Errorf("the log is %s", c.logged.String())
	}
}

// A volume whose device cannot be cleaned stays, and says why. It is tried again at each poll.
func TestVolumeIsNotDeletedBeforeItsDeviceIsClean(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	c.release(&pv)
	devicestest.Run(t, "blockdev", "--setro", d.Node)
	c.until("an error device", func() bool { return value(c.metrics.errors) == 1 })
	c.wantEvent("DeviceReadOnly")
	c.wantMetric(c.metrics.uncleaned, 1)
	if now := c.volumes(); len(now) != 1 || now[0].UID != pv.UID || now[0].Status.Phase != corev1.VolumeReleased {
		t.Errorf("the volumes are %+v, want the released one", now)
	}
	devicestest.Run(t, "blockdev", "--setrw", d.Node)
	c.until("the volume made anew", func() bool {
		now := c.volumes()
		return len(now) == 1 && now[0].Spec.ClaimRef == nil
	})
	c.wantEvent("DeviceCleaned")
	c.wantMetric(c.metrics.errors, 0)
}

func TestDeviceStillInUseAfterRelease_isCleanedSoon(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map", PollingInterval: time.Hour})
	d := c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	c.release(&pv)
	user, err := os.OpenFile(d.Node, os.O_RDWR|syscall.O_EXCL, 0)
	must.Succeed(t, err)
	c.until("an error device", func() bool { return value(c.metrics.errors) == 1 })
	must.Succeed(t, user.Close())
	late := time.After(time.Minute)
	for {
		result, err := c.Reconcile(t.Context(), reconcile.Request{})
		must.Succeed(t, err)
		if len(c.volumes()) == 0 { // it is made anew when the API server says that it is gone
			return
		}
		select {
		case <-c.changed:
		case <-time.After(result.RequeueAfter):
		case <-late:
			t.Fatalf("the volumes are %+v, log:\n%s", c.volumes(), c.logged.String())
		}
	}
}

func TestVolumeOfMissingDeviceIsNotDeleted(t *testing.T) {
	for _, phase := range []corev1.PersistentVolumePhase{corev1.VolumeAvailable, corev1.VolumeBound, corev1.VolumeReleased} {
		t.Run(string(phase), func(t *testing.T) {
			c := newCluster(t, Options{DefaultConfigMap: "map"})
			d := c.Blank("disk", 8*mib)
			c.configure(block())
			pv := c.awaitVolumes(1)[0]
			if phase != corev1.VolumeAvailable {
				c.release(&pv)
				pv.Status.Phase = phase
				must.Succeed(t, c.Status().Update(t.Context(), &pv))
			}
			must.Succeed(t, os.Remove(d.Path))
			c.pass()
			c.wantEvent("DeviceGone", d.Path)
			c.wantMetric(c.metrics.missing, 1)
			if now := c.volumes(); len(now) != 1 || now[0].DeletionTimestamp != nil {
				t.Errorf("the volumes are %+v, want the one that was there", now)
			}
		})
	}
}

// Released volumes are checked each hour, however long the polling interval is.
func TestPollingInterval(t *testing.T) {
	for interval, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, 24 * time.Hour: time.Hour} {
		c := newCluster(t, Options{DefaultConfigMap: "map", PollingInterval: interval})
		c.configure(block())
		if after := c.pass().RequeueAfter; after > want+time.Second || after < want-10*time.Second {
			t.Errorf("with an interval of %s the next pass is after %s, want %s", interval, after, want)
		}
	}
}

func TestNothingIsWrittenInSteadyState(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk-1", 8*mib)
	refused := c.Blank("disk-2", 8*mib)
	devicestest.Run(t, "mkswap", refused.Node)
	c.configure(block())
	c.awaitVolumes(1)
	c.until("an error device", func() bool { return value(c.metrics.errors) == 1 })
	c.wantEvent("DeviceHasSignature", refused.Path, "swap")
	writes, said := value(c.metrics.writes.WithLabelValues("create")), len(c.said.Events)
	for range 5 {
		c.pass()
		c.wantMetric(c.metrics.errors, 1)
	}
	c.wantMetric(c.metrics.writes.WithLabelValues("create"), writes)
	if n := value(c.metrics.writes); n != writes || len(c.said.Events) != said {
		t.Errorf("%v writes, of which %v made volumes, %d events after %d", n, writes, len(c.said.Events), said)
	}
}

func TestProgressAnnotation(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	annotation := func(done int64) string {
		t.Helper()
		must.Succeed(t, c.annotate(t.Context(), &pv, devices.Progress{Done: done, Total: 100}))
		return c.volumes()[0].Annotations[progressAnnotation]
	}
	if got := annotation(10); got != "" {
		t.Errorf("at once it is %q: a short one needs none", got)
	}
	c.annotated[pv.Name] = time.Now().Add(-progressEvery)
	if got := annotation(20); got != "20%" {
		t.Errorf("after %s it is %q, want 20%%", progressEvery, got)
	}
	if got := annotation(21); got != "20%" {
		t.Errorf("right after that it is %q", got)
	}
}

// An agent is ready when it was through once.
func TestReadiness(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	status := func() int {
		answer := httptest.NewRecorder()
		c.ServeHTTP(answer, httptest.NewRequest("GET", readyPath, nil))
		return answer.Code
	}
	if got := status(); got != 503 {
		t.Errorf("before the first pass it is %d", got)
	}
	c.pass() // whose ConfigMap is missing
	if got := status(); got != 200 {
		t.Errorf("after the first pass it is %d", got)
	}
}

// Two installations, or an agent that outlives its container: each would undo what the other has noted.
func TestSecondAgentOfNodeDoesNothing(t *testing.T) {
	o := Options{Node: node, RecordDir: t.TempDir(), MetricsAddress: "0"}
	first, err := devices.OpenRecords(o.RecordDir)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, first.Close()) })
	release, err := first.Own(t.Context(), func() { t.Error("it waits, and there is no other one") })
	must.Succeed(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	nowhere := &rest.Config{Host: "127.0.0.1:1"}
	must.ErrorIs(t, Run(ended, nowhere, o), context.Canceled)
	release()
	if err := Run(ended, nowhere, o); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("when the first one has ended: %v, want it to look for the API server", err)
	}
}
