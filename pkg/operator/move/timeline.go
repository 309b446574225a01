package move

import (
	"cmp"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

const (
	// noted is how old the time of the last progress gets before it is written again: each write is one to the API server.
	noted = time.Minute
	// fewRestarts are those of a mover after which reports alone are no progress any more: a mover that fails again and again where it
	// failed before reports that it works too.
	fewRestarts = 3
)

// A mark is how far a move is. It never comes again.
type mark struct {
	phase  v1alpha1.Phase
	passes int32
	sent   int64
	still  bool
}

func markOf(s *v1alpha1.VolumeMoveStatus) mark {
	return mark{s.Phase, s.Passes, s.BytesSent, s.Standstill != nil}
}

// fencedSince is since when the source refuses the volume, or may, and the copy is none yet; nil for a source that cannot.
func fencedSince(m *v1alpha1.VolumeMove) *metav1.Time {
	if !m.Underway() || m.Status.Phase == v1alpha1.Removing {
		return nil
	}
	return cmp.Or(m.Status.MayFenceTime, m.Status.FencedTime)
}

// A timeline is the times in the status of a move.
type timeline struct {
	move     *v1alpha1.VolumeMove
	now      func() time.Time
	reported map[client.ObjectKey]string // when the mover of the source reported last, by its own clock
}

// noteProgress notes that a move is further than before.
func (t timeline) noteProgress(before v1alpha1.VolumeMoveStatus) {
	switch {
	case !t.move.Underway():
		delete(t.reported, client.ObjectKeyFromObject(t.move))
	case t.move.Status.LastProgressTime == nil || markOf(&before) != markOf(&t.move.Status):
		t.noteNow()
	}
}

func (t timeline) noteNow() {
	if last := t.move.Status.LastProgressTime; last == nil || t.now().Sub(last.Time) >= noted || last.After(t.now()) {
		now := metav1.NewTime(t.now())
		t.move.Status.LastProgressTime = &now
	}
}

// begun notes when the move began.
func (t timeline) begun() {
	now := metav1.NewTime(t.now())
	t.move.Status.BegunTime = &now
}

// mayFence notes leave to fence, which the mover gets once that is written: it may hand the volume over while it is not heard.
func (t timeline) mayFence() {
	if t.move.Status.MayFenceTime == nil {
		now := metav1.NewTime(t.now())
		t.move.Status.MayFenceTime = &now
	}
}

// fenced notes when the fence was seen first.
func (t timeline) fenced(report progress) {
	if (report.fenced || report.fence != "") && t.move.Status.FencedTime == nil {
		now := metav1.NewTime(t.now())
		t.move.Status.FencedTime = &now
	}
}

// heard notes progress for a mover that reports that it works: one that reads what has not changed, or compares, sends nothing. The first
// report that an operator reads may be an old one.
func (t timeline) heard(report progress, movers ...*corev1.Pod) {
	key := client.ObjectKeyFromObject(t.move)
	last, known := t.reported[key]
	t.reported[key] = report.at
	if known && last != report.at && !failsAgain(movers) {
		t.noteNow()
	}
}

func failsAgain(movers []*corev1.Pod) bool {
	for _, pod := range movers {
		for _, c := range pod.Status.ContainerStatuses {
			if c.RestartCount >= fewRestarts {
				return true
			}
		}
	}
	return false
}

// unused notes when no pod used the volume any more.
func (t timeline) unused(report progress) {
	if (report.unused || report.fence != "") && t.move.Status.Standstill == nil {
		t.move.Status.Standstill = &v1alpha1.Standstill{Since: metav1.NewTime(t.now())}
	}
}

// switched notes that pods may use the volume again.
func (t timeline) switched() {
	if s := t.move.Status.Standstill; s != nil && s.Seconds == nil {
		seconds := int64(t.now().Sub(s.Since.Time).Round(time.Second) / time.Second)
		s.Seconds = &seconds
	}
}
