package move

import (
	"cmp"
	"context"
	"encoding/json"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// Reports read what a mover has reported so far.
type Reports interface {
	Lines(ctx context.Context, namespace, pod string) (string, error)
}

// Logs are the logs of pods.
type Logs struct{ Pods kubernetes.Interface }

// mostLines is more than a mover reports but for its progress, which is one line a second.
const mostLines = 500

// Lines are the last of the container that runs now, or ran last.
func (l Logs) Lines(ctx context.Context, namespace, pod string) (string, error) {
	text, err := l.Pods.CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Container: container, TailLines: ptr.To(int64(mostLines))}).DoRaw(ctx)
	return string(text), err
}

// What movers report, of pkg/mover. That package is not linked: the operator has nothing to do with disks.
const (
	eventPassing    = "passing"
	eventPassed     = "passed"
	eventCopied     = "copied"
	eventFenced     = "fenced"
	eventUnused     = "unused"
	eventHandedOver = "handed-over"
)

type event struct {
	Time  string `json:"time"`
	Event string `json:"event"`
	Pass  int32  `json:"pass"`
	Last  bool   `json:"last"`
	Bytes int64  `json:"bytes"`
	Fence string `json:"fence"`

	PromisedBytes int64 `json:"promisedBytes"`
}

// A progress is what the events of a source say together.
type progress struct {
	passes         int32
	sent           int64
	passing        *int64 // bytes of the pass that goes on
	difference     *int64 // bytes of the last pass
	copied         bool   // it waits for leave to fence
	fenced, unused bool
	fence          string // of a source that is handed over
	promised       int64  // bytes, of the same; 0 for a mover of an earlier version
	at             string // when the last event was, by the clock of the node
}

// parseReport reads events. Lines that are none are of the logs of the same container.
func parseReport(text string) (p progress) {
	for line := range strings.Lines(text) {
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		p.at = e.Time
		switch e.Event {
		case eventPassing:
			p.passing = &e.Bytes
		case eventPassed:
			p.passes, p.difference, p.passing = max(p.passes, e.Pass), &e.Bytes, nil
			p.sent += e.Bytes
		case eventCopied:
			p.copied = true
		case eventFenced:
			p.fenced = true
		case eventUnused:
			p.unused = true
		case eventHandedOver:
			p.fence, p.promised = e.Fence, e.PromisedBytes
		}
	}
	if p.passing != nil {
		p.sent += *p.passing
	}
	return p
}

// hasReported says whether a text has an event: a mover reports at least that it has failed.
func hasReported(text string) bool {
	for line := range strings.Lines(text) {
		if json.Unmarshal([]byte(line), &event{}) == nil {
			return true
		}
	}
	return false
}

// show has the status show a progress. A mover that was started anew reports from the beginning.
func (p progress) show(s *v1alpha1.VolumeMoveStatus) {
	s.Passes, s.BytesSent = max(s.Passes, p.passes), max(s.BytesSent, p.sent)
	if p.difference != nil {
		s.LastDifference = p.difference
		s.BytesToGo = ptr.To(max(0, *p.difference-ptr.Deref(p.passing, 0)))
	}
	if p.fence != "" {
		s.BytesToGo = ptr.To[int64](0)
		s.PromisedBytes = cmp.Or(p.promised, s.PromisedBytes)
	}
}
