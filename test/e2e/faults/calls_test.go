package faults

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// bound is what any call may take during a fault. The driver finds a hang within 15
// seconds: that of its check every 10, and the 5 after which one that gets no answer counts.
// The rest is for machines that are slow.
func bound() time.Duration {
	if testenv.Guest() {
		return 3 * time.Minute
	}
	return time.Minute
}

// Answers are what calls have to be answered during a fault. A call that is missing has
// to succeed.
type answers map[string]codes.Code

// A call is one that kubelet or a sidecar makes.
type call struct {
	name string
	make func(w *world) error
}

// calls are all, in an order in which each can succeed.
var calls = []call{
	{"create", func(w *world) error { return w.create(late) }},
	{"create disk", func(w *world) error { return w.create(lateDisk) }},
	{"create again", func(w *world) error { return w.create(idle) }},
	{"create disk again", func(w *world) error { return w.create(spare) }},
	{"publish", func(w *world) error { return w.publish(idle) }},
	{"publish again", func(w *world) error { return w.publish(tree) }},
	{"publish disk", func(w *world) error { return w.publish(spare) }},
	{"publish disk again", func(w *world) error { return w.publish(raw) }},
	{"stats", func(w *world) error { return w.stats(tree) }},
	{"stats of disk", func(w *world) error { return w.stats(raw) }},
	{"get", func(w *world) error { return w.get(idle) }},
	{"expand", func(w *world) error { return w.expand(tree) }},
	{"expand disk", func(w *world) error { return w.expand(raw) }},
	{"unpublish", func(w *world) error { return w.unpublish(idle) }},
	{"unpublish disk", func(w *world) error { return w.unpublish(spare) }},
	{"delete published", func(w *world) error { return w.delete(tree) }},
	{"delete", func(w *world) error { return w.delete(doomed) }},
	{"delete disk", func(w *world) error { return w.delete(doomedDisk) }},
	{"delete nothing", func(w *world) error { return w.Delete(w.Context(), "pvc-nothing") }},
}

// wantAnswers makes every call.
func (w *world) wantAnswers(during string, want answers) {
	w.Helper()
	for name := range want {
		if !slices.ContainsFunc(calls, func(c call) bool { return c.name == name }) {
			w.Fatalf("no call is named %q", name)
		}
	}
	for _, c := range calls {
		w.wantAnswer(during, c, want[c.name])
	}
}

// wantAnswer makes a call. The answer to one that fails has to name the pool, or the
// volume, so that a person knows where to search.
func (w *world) wantAnswer(during string, c call, want codes.Code) {
	w.Helper()
	began := time.Now()
	err := c.make(w)
	took := time.Since(began)
	if got := status.Code(err); got != want {
		w.Errorf("%s, %s: %v, want %v", during, c.name, err, want)
	}
	if took > bound() {
		w.Errorf("%s, %s: the answer took %v, at most %v are allowed", during, c.name, took, bound())
	}
	if words := status.Convert(err).Message(); err != nil && !strings.Contains(words, `"local"`) && !strings.Contains(words, "pvc-") {
		w.Errorf("%s, %s: %q names neither pool nor volume", during, c.name, words)
	}
}

func (w *world) stats(v drivertest.Volume) error {
	got, err := w.Stats(w.Context(), v.ID, v.ID)
	if err == nil && len(got.GetUsage()) == 0 && !oldcsi.Condition(got).GetAbnormal() {
		return fmt.Errorf("stats of %s: %v", v.ID, got)
	}
	return err
}

func (w *world) get(v drivertest.Volume) error {
	_, err := w.Get(w.Context(), v.ID)
	return err
}

// wantListed expects all that was acknowledged to be listed, and of each that list, get
// and stats say whether it is in order.
func (w *world) wantListed(during string, abnormal func(v drivertest.Volume) bool) {
	w.Helper()
	entries, err := w.List(w.Context(), 0)
	w.Must(err)
	listed := make(map[string]*oldcsi.VolumeCondition)
	for _, e := range entries {
		listed[e.GetVolume().GetVolumeId()] = oldcsi.Condition(e.GetStatus())
	}
	for _, v := range w.acknowledged {
		condition, ok := listed[v.ID]
		if !ok || condition.GetAbnormal() != abnormal(v.Volume) {
			w.Errorf("%s, list: %s is listed: %v, with %v; want it abnormal: %v", during, v.ID, ok, condition, abnormal(v.Volume))
		}
		got, err := w.Get(w.Context(), v.ID)
		if is := oldcsi.Condition(got.GetStatus()); err != nil || is.GetAbnormal() != condition.GetAbnormal() {
			w.Errorf("%s, get: %s is reported with %v, %v; listed with %v", during, v.ID, is, err, condition)
		}
		if len(v.Pods) == 0 {
			continue
		}
		stats, err := w.Stats(w.Context(), v.ID, v.ID)
		if is := oldcsi.Condition(stats); err != nil || is.GetAbnormal() != condition.GetAbnormal() {
			w.Errorf("%s, stats: %s is reported with %v, %v; listed with %v", during, v.ID, is, err, condition)
		}
	}
}

func all(drivertest.Volume) bool  { return true }
func none(drivertest.Volume) bool { return false }

// wantAlive expects what has nothing to do with the pool to work.
func (w *world) wantAlive(during string) {
	w.Helper()
	for name, ask := range map[string]func(){
		"Probe": func() {
			answer, err := w.Identity().Probe(w.Context(), &csi.ProbeRequest{})
			if err != nil || !answer.GetReady().GetValue() {
				w.Errorf("%s: Probe answers %v, %v", during, answer, err)
			}
		},
		"the metrics":                         func() { w.Metric("hostpath_pool_serving", "other") },
		"the life of volumes in another pool": func() { w.wantWork("other") },
		"the list": func() {
			_, err := w.List(w.Context(), 0)
			w.Must(err)
		},
		"the capacity of another pool": func() {
			got, err := w.Capacity(w.Context(), "other")
			if err != nil || got == 0 {
				w.Errorf("%s: the other pool has %d bytes, %v", during, got, err)
			}
		},
		"the capacity": func() { w.capacity() },
	} {
		began := time.Now()
		ask()
		took := time.Since(began)
		if took > bound() {
			w.Errorf("%s: %s took %v, at most %v are allowed", during, name, took, bound())
		}
		w.Logf("%s: %s took %v", during, name, took.Round(time.Millisecond))
	}
}

// serving expects the metric to say so, or not, within some seconds.
func (w *world) awaitServing(serving bool) {
	w.Helper()
	w.Eventually(fmt.Sprintf("the metric reports that the pool serves: %v", serving), func() bool {
		return w.Metric("hostpath_pool_serving", "local") == map[bool]float64{true: 1}[serving]
	})
}
