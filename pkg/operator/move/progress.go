package move

import (
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

// fenced says whether the source refuses the volume, and the copy is none yet, as far as the operator has seen.
func fenced(m *v1alpha1.VolumeMove) bool {
	return m.Underway() && m.Status.FencedTime != nil && m.Status.Phase != v1alpha1.Removing
}

// noteProgress notes that a move is further than before.
func (m moving) noteProgress(before v1alpha1.VolumeMoveStatus) {
	switch {
	case !m.Underway():
		delete(m.heard, client.ObjectKeyFromObject(m))
	case m.Status.LastProgressTime == nil || markOf(&before) != markOf(&m.Status):
		m.noteNow()
	}
}

func (m moving) noteNow() {
	if last := m.Status.LastProgressTime; last == nil || m.now().Sub(last.Time) >= noted || last.After(m.now()) {
		now := metav1.NewTime(m.now())
		m.Status.LastProgressTime = &now
	}
}

// noteFence notes when the fence was seen first.
func (m moving) noteFence(report progress) {
	if (report.fenced || report.fence != "") && m.Status.FencedTime == nil {
		now := metav1.NewTime(m.now())
		m.Status.FencedTime = &now
	}
}

// hear notes progress for a mover that reports that it works: one that reads what has not changed, or compares, sends nothing. The first
// report that an operator reads may be an old one.
func (m moving) hear(report progress, movers ...*corev1.Pod) {
	key := client.ObjectKeyFromObject(m)
	last, known := m.heard[key]
	if m.heard == nil {
		m.heard = map[client.ObjectKey]string{}
	}
	m.heard[key] = report.at
	if known && last != report.at && !failsAgain(movers) {
		m.noteNow()
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
