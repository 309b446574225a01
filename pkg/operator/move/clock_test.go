package move

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// clockOf is that of an API server whose clock is ahead of this one's.
func clockOf(t *testing.T, ahead time.Duration) *Clock {
	t.Helper()
	clock := &Clock{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(ahead).UTC().Format(http.TimeFormat))
	}))
	defer server.Close()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, http.NoBody)
	must.Succeed(t, err)
	answer, err := (&http.Client{Transport: clock.Wrap(http.DefaultTransport)}).Do(request)
	must.Succeed(t, err)
	must.Succeed(t, answer.Body.Close())
	return clock
}

func TestClock(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, 0, time.Hour} {
		clock := clockOf(t, ahead)
		if is := time.Until(clock.Now()) - ahead; is < -exact || is > exact {
			t.Errorf("the clock of a server that is %v ahead is off by %v", ahead, is)
		}
	}
}

// Whether a pod came before the fence, or after the switch, is known although the clocks of the operator and of the API server are an hour
// apart: one that came to the fence is evicted on the source, one that never started is too, and neither again and again.
func TestClockOfOperatorIsAnother(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		waiting := appPod("waiting", false) // for its image, with the volume
		waiting.CreationTimestamp.Time = time.Now().Add(ahead - 10*time.Minute)
		h := newHarness(t, moveOf("m"), appPod("data-0", false), waiting)
		h.ahead, h.clock = ahead, clockOf(t, ahead).Now
		change(waiting, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending })(h)
		h.run("m")
		if h.has(waiting) || h.evicted > 6 {
			t.Errorf("by a clock that is %v ahead pods were evicted %d times; the one that waits is there: %v", ahead, h.evicted, h.has(waiting))
		}
		h.wantOn(nodeB)
	}
}
