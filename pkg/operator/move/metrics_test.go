package move

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// closed is what an operator that moves volumes has.
func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// shows are the series of one metric, without their names and the labels that all have, and with whole numbers.
func shows(t *testing.T, c prometheus.Collector, metric string) map[string]int {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	must.Succeed(t, registry.Register(c))
	families, err := registry.Gather()
	must.Succeed(t, err)
	found := map[string]int{}
	for _, family := range families {
		if family.GetName() != "kubevirt_hpp_volume_"+metric {
			continue
		}
		for _, m := range family.GetMetric() {
			var labels []string
			for _, label := range m.GetLabel() {
				labels = append(labels, label.GetValue())
			}
			found[strings.Join(labels, " ")] = int(m.GetGauge().GetValue())
		}
	}
	return found
}

// A clock is one that a test sets.
type clock struct{ time.Time }

func (c *clock) now() time.Time { return c.Time }

func (c *clock) pass(d time.Duration) { c.Time = c.Add(d) }

// A watched is a harness with one operator, and what it shows of the moves.
type watched struct {
	*harness
	*clock
	operator *Reconciler
	metrics  prometheus.Collector
}

func watch(t *testing.T, h *harness) *watched {
	t.Helper()
	c := &clock{time.Now().Truncate(time.Second)}
	return &watched{
		h, c,
		&Reconciler{Client: h.Client, APIReader: h.api, Reports: h, DriverNamespace: storage, Now: c.now},
		Metrics(h.api, closed(), c.now),
	}
}

func (w *watched) look() {
	w.Helper()
	_, err := w.operator.Reconcile(w.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: "m"}})
	must.Succeed(w, err)
}

const ofM = "m space node-a node-b"

func (w *watched) want(metric, labels string, want int) {
	w.Helper()
	if got, has := shows(w.T, w.metrics, metric)[labels]; !has || got != want {
		w.Errorf("%s{%s} is %d, shown %t, want %d", metric, labels, got, has, want)
	}
}

func (w *watched) wantNone(metric string) {
	w.Helper()
	if got := shows(w.T, w.metrics, metric); len(got) > 0 {
		w.Errorf("%s is %v, want none", metric, got)
	}
}

// Each look of a whole move is 10 s after the one before. The metrics say what is.
func TestMetricsOfMove(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m"), appPod("data-0", false)))
	w.want("moves", "Pending", 1)
	w.wantNone("move_idle_seconds")
	seen := map[v1alpha1.Phase]bool{}
	for range 60 {
		w.look()
		w.live()
		m := w.move("m")
		phase := m.Status.Phase
		seen[phase] = true
		w.want("moves", string(phase), 1)
		up := phase == v1alpha1.Fenced || phase == v1alpha1.Switching
		if got, has := shows(t, w.metrics, "move_fenced_seconds")[ofM]; has != up {
			t.Fatalf("in the phase %s the fence is shown: %t (%d s)", phase, has, got)
		}
		if _, has := shows(t, w.metrics, "move_idle_seconds")[ofM]; has != m.Underway() {
			t.Fatalf("in the phase %s the progress is shown: %t", phase, has)
		}
		if m.Ended() {
			break
		}
		w.pass(10 * time.Second)
	}
	if len(seen) < 5 || !seen[v1alpha1.Succeeded] {
		t.Fatalf("the phases were %v", seen)
	}
	must.Succeed(t, w.api.Delete(t.Context(), w.move("m")))
	w.run("m")
	w.want("moves", "Succeeded", 0)
	w.wantNone("move_remaining_bytes")
}

// A fence grows old while a pod is not ended, and nothing gets further.
func TestMetricsOfFenceThatWaits(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m", func(m *v1alpha1.VolumeMove) { m.Spec.When = v1alpha1.WhenUnpublished }), appPod("data-0", false)))
	for range 12 {
		w.look()
		w.live()
	}
	w.want("moves", "Fenced", 1)
	w.want("move_fenced_seconds", ofM, 0)
	w.want("move_remaining_bytes", ofM, 1<<20)
	for range 2 {
		w.pass(10 * time.Minute)
		w.look()
		w.live()
	}
	w.want("move_fenced_seconds", ofM, 20*60)
	w.want("move_idle_seconds", ofM, 20*60)
	// Undone, the fence is there until the source is told.
	must.Succeed(t, w.api.Delete(t.Context(), w.move("m")))
	w.look()
	w.want("moves", "Undoing", 1)
	w.want("move_fenced_seconds", ofM, 20*60)
	w.run("m")
	w.wantNone("move_fenced_seconds")
	w.wantNone("move_idle_seconds")
}

// Once the source publishes the volume again there is no fence, also while the target does not answer.
func TestMetricsOfFenceUndoneWithoutTarget(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m"), appPod("data-0", false)))
	w.keeps = true
	for range 12 {
		w.look()
		w.live()
	}
	w.want("move_fenced_seconds", ofM, 0)
	down := node(nodeB)
	w.has(down)
	down.Status.Conditions[0].Status = corev1.ConditionUnknown
	w.update(down)
	must.Succeed(t, w.api.Delete(t.Context(), w.move("m")))
	for range 6 {
		w.look()
		pods := &corev1.PodList{}
		must.Succeed(t, w.api.List(t.Context(), pods, client.MatchingLabels{roleLabel: string(roleUndo)}))
		for i := range pods.Items {
			w.mover(&pods.Items[i], nil)
		}
	}
	if w.want("moves", "Undoing", 1); !w.records[nodeA].publishes() {
		t.Fatal("the source does not publish the volume")
	}
	w.wantNone("move_fenced_seconds")
}

// An operator that was away while the fence went up and all was handed over has seen a fence.
func TestMetricsOfFenceUnseen(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m"), appPod("data-0", false)))
	w.replicas = false
	for range 6 {
		w.look()
		w.live()
	}
	must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))))
	for range 10 {
		w.live()
	}
	w.look()
	w.want("moves", "Switching", 1)
	w.want("move_fenced_seconds", ofM, 0)
}

// report has the mover of the source say something.
func (w *watched) report(line string) {
	w.Helper()
	w.logs["volumemove-move-m-out"] += line + "\n"
	w.look()
}

// A mover that works gets further, also while it sends nothing. One that fails again and again does not, unless it gets further than before.
func TestProgress(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m"), appPod("data-0", false)))
	for range 4 {
		w.look()
		w.live()
	}
	w.want("moves", "Copying", 1)
	passing := func(bytes int) {
		w.Helper()
		w.report(fmt.Sprintf(`{"time":%q,"event":"passing","bytes":%d}`, w.now().Format(time.RFC3339), bytes))
	}
	for i := range 10 {
		w.pass(10 * time.Minute)
		passing(1000 * i)
		w.want("move_idle_seconds", ofM, 0)
	}
	for range 3 { // it reads what is there already
		w.pass(10 * time.Minute)
		passing(9000)
		w.want("move_idle_seconds", ofM, 0)
	}
	w.pass(10 * time.Minute)
	w.look()
	w.want("move_idle_seconds", ofM, 600)
	// Another operator does not know whether that report is new.
	w.operator = &Reconciler{Client: w.Client, APIReader: w.api, Reports: w, DriverNamespace: storage, Now: w.now}
	w.look()
	w.want("move_idle_seconds", ofM, 600)
	passing(9000)

	w.restarts(fewRestarts)
	w.pass(10 * time.Minute)
	passing(10)
	w.want("move_idle_seconds", ofM, 600)
	w.pass(10 * time.Minute)
	passing(20_000)
	w.want("move_idle_seconds", ofM, 0)
}

// restarts has the movers have been restarted.
func (w *watched) restarts(times int32) {
	w.Helper()
	pods := &corev1.PodList{}
	must.Succeed(w, w.api.List(w.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
	for i := range pods.Items {
		pods.Items[i].Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: times}}
		w.update(&pods.Items[i])
	}
}

// The API server is not written to for each report.
func TestProgressIsWrittenOnceAMinute(t *testing.T) {
	w := watch(t, newHarness(t, moveOf("m"), appPod("data-0", false)))
	for range 4 {
		w.look()
		w.live()
	}
	w.report(`{"time":"0","event":"passing","bytes":9000}`)
	before := w.writes
	for i := range 12 {
		w.pass(10 * time.Second)
		w.report(fmt.Sprintf(`{"time":"%d","event":"passing","bytes":9000}`, i+1))
	}
	if writes := w.writes - before; writes < 1 || writes > 3 {
		t.Errorf("%d writes in two minutes, want 2", writes)
	}
}

// Of several operators one shows moves. One that cannot list them shows nothing, and the rest of a scrape is answered.
func TestMetricsNotKnown(t *testing.T) {
	h := newHarness(t, moveOf("m"))
	if got := shows(t, Metrics(h.api, make(chan struct{}), time.Now), "moves"); len(got) > 0 {
		t.Errorf("an operator that is not elected shows %v", got)
	}
	failing := interceptor.NewClient(h.api.(client.WithWatch), interceptor.Funcs{
		List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
			return errors.New("there is no such kind")
		},
	})
	if got := shows(t, Metrics(failing, closed(), time.Now), "moves"); len(got) > 0 {
		t.Errorf("of what is not known it shows %v", got)
	}
	// A move of the version before has no times.
	old := moveOf("old", func(m *v1alpha1.VolumeMove) { m.Status.Phase = v1alpha1.Fenced })
	if got := measured(old, time.Now()); got.Idle != nil || got.Fenced != nil || !got.Running {
		t.Errorf("it is measured as %+v", got)
	}
	// The clock may be set back.
	ahead := metav1.NewTime(time.Now().Add(time.Hour))
	old.Status.FencedTime, old.Status.LastProgressTime = &ahead, &ahead
	if got := measured(old, time.Now()); *got.Idle != 0 || *got.Fenced != 0 {
		t.Errorf("it is measured as %+v", got)
	}
}
