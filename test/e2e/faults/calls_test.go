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
	make func(w *harness) error
}

// calls are all, in an order in which each can succeed.
var calls = []call{
	{"create", func(h *harness) error { return h.create(late) }},
	{"create disk", func(h *harness) error { return h.create(lateDisk) }},
	{"create again", func(h *harness) error { return h.create(idle) }},
	{"create disk again", func(h *harness) error { return h.create(spare) }},
	{"publish", func(h *harness) error { return h.publish(idle) }},
	{"publish again", func(h *harness) error { return h.publish(tree) }},
	{"publish disk", func(h *harness) error { return h.publish(spare) }},
	{"publish disk again", func(h *harness) error { return h.publish(raw) }},
	{"stats", func(h *harness) error { return h.stats(tree) }},
	{"stats of disk", func(h *harness) error { return h.stats(raw) }},
	{"get", func(h *harness) error { return h.get(idle) }},
	{"expand", func(h *harness) error { return h.expand(tree) }},
	{"expand disk", func(h *harness) error { return h.expand(raw) }},
	{"unpublish", func(h *harness) error { return h.unpublish(idle) }},
	{"unpublish disk", func(h *harness) error { return h.unpublish(spare) }},
	{"delete published", func(h *harness) error { return h.delete(tree) }},
	{"delete", func(h *harness) error { return h.delete(doomed) }},
	{"delete disk", func(h *harness) error { return h.delete(doomedDisk) }},
	{"delete nothing", func(h *harness) error { return h.Delete(h.Context(), "pvc-nothing") }},
}

// wantAnswers makes every call.
func (h *harness) wantAnswers(during string, want answers) {
	h.Helper()
	for name := range want {
		if !slices.ContainsFunc(calls, func(c call) bool { return c.name == name }) {
			h.Fatalf("no call is named %q", name)
		}
	}
	for _, c := range calls {
		h.wantAnswer(during, c, want[c.name])
	}
}

// wantAnswer makes a call. The answer to one that fails has to name the pool, or the
// volume, so that a person knows where to search.
func (h *harness) wantAnswer(during string, c call, want codes.Code) {
	h.Helper()
	began := time.Now()
	err := c.make(h)
	took := time.Since(began)
	if got := status.Code(err); got != want {
		h.Errorf("%s, %s: %v, want %v", during, c.name, err, want)
	}
	if took > bound() {
		h.Errorf("%s, %s: the answer took %v, at most %v are allowed", during, c.name, took, bound())
	}
	if words := status.Convert(err).Message(); err != nil && !strings.Contains(words, `"local"`) && !strings.Contains(words, "pvc-") {
		h.Errorf("%s, %s: %q names neither pool nor volume", during, c.name, words)
	}
}

func (h *harness) stats(v drivertest.Volume) error {
	got, err := h.Stats(h.Context(), v.ID, v.ID)
	if err == nil && len(got.GetUsage()) == 0 && !oldcsi.Condition(got).GetAbnormal() {
		return fmt.Errorf("stats of %s: %v", v.ID, got)
	}
	return err
}

func (h *harness) get(v drivertest.Volume) error {
	_, err := h.Get(h.Context(), v.ID)
	return err
}

// wantListed expects all that was acknowledged to be listed, and of each that list, get
// and stats say whether it is in order.
func (h *harness) wantListed(during string, abnormal func(v drivertest.Volume) bool) {
	h.Helper()
	entries, err := h.List(h.Context(), 0)
	h.Must(err)
	listed := make(map[string]*oldcsi.VolumeCondition)
	for _, e := range entries {
		listed[e.GetVolume().GetVolumeId()] = oldcsi.Condition(e.GetStatus())
	}
	for _, v := range h.acknowledged {
		condition, ok := listed[v.ID]
		if !ok || condition.GetAbnormal() != abnormal(v.Volume) {
			h.Errorf("%s, list: %s is listed: %v, with %v; want it abnormal: %v", during, v.ID, ok, condition, abnormal(v.Volume))
		}
		got, err := h.Get(h.Context(), v.ID)
		if is := oldcsi.Condition(got.GetStatus()); err != nil || is.GetAbnormal() != condition.GetAbnormal() {
			h.Errorf("%s, get: %s is reported with %v, %v; listed with %v", during, v.ID, is, err, condition)
		}
		if len(v.Pods) == 0 {
			continue
		}
		stats, err := h.Stats(h.Context(), v.ID, v.ID)
		if is := oldcsi.Condition(stats); err != nil || is.GetAbnormal() != condition.GetAbnormal() {
			h.Errorf("%s, stats: %s is reported with %v, %v; listed with %v", during, v.ID, is, err, condition)
		}
	}
}

func all(drivertest.Volume) bool  { return true }
func none(drivertest.Volume) bool { return false }

// wantAlive expects what has nothing to do with the pool to work.
func (h *harness) wantAlive(during string) {
	h.Helper()
	for name, ask := range map[string]func(){
		"Probe": func() {
			answer, err := h.Identity().Probe(h.Context(), &csi.ProbeRequest{})
			if err != nil || !answer.GetReady().GetValue() {
				h.Errorf("%s: Probe answers %v, %v", during, answer, err)
			}
		},
		"the metrics":                         func() { h.Metric("hostpath_pool_serving", "other") },
		"the life of volumes in another pool": func() { h.wantWork("other") },
		"the list": func() {
			_, err := h.List(h.Context(), 0)
			h.Must(err)
		},
		"the capacity of another pool": func() {
			got, err := h.Capacity(h.Context(), "other")
			if err != nil || got == 0 {
				h.Errorf("%s: the other pool has %d bytes, %v", during, got, err)
			}
		},
		"the capacity": func() { h.MustCapacity("local") },
	} {
		began := time.Now()
		ask()
		took := time.Since(began)
		if took > bound() {
			h.Errorf("%s: %s took %v, at most %v are allowed", during, name, took, bound())
		}
		h.Logf("%s: %s took %v", during, name, took.Round(time.Millisecond))
	}
}

// serving expects the metric to say so, or not, within some seconds.
func (h *harness) awaitServing(serving bool) {
	h.Helper()
	h.Eventually(fmt.Sprintf("the metric reports that the pool serves: %v", serving), func() bool {
		return h.Metric("hostpath_pool_serving", "local") == map[bool]float64{true: 1}[serving]
	})
}
