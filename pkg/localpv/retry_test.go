package localpv

import (
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

func TestRetry(t *testing.T) {
	start := time.Now()
	poll := start.Add(5 * time.Minute)
	refused := []devices.Problem{{Path: "/dev/a", Reason: devices.Mounted}}
	var r retry
	if r.due(start) || !r.next(nil, start, poll).Equal(poll) {
		t.Error("without a refusal a retry is due")
	}
	now := start
	var waits []time.Duration
	for now.Before(poll) {
		next := r.next(refused, now, poll)
		waits = append(waits, next.Sub(now))
		if next.Before(poll) && !r.due(next) {
			t.Errorf("no retry is due after %s", next.Sub(start))
		}
		now = next
	}
	// 2, 4, 8 s, and so on; the last one ends with the poll.
	if len(waits) != 8 || waits[0] != firstRetry || waits[3] != 8*firstRetry {
		t.Errorf("it is checked again after %s", waits)
	}
	again := []devices.Problem{refused[0], {Path: "/dev/b", Reason: devices.Mounted}}
	if at := r.next(again, poll, poll.Add(time.Minute)); at.Sub(poll) != firstRetry {
		t.Errorf("a new refusal is checked again after %s, want %s", at.Sub(poll), firstRetry)
	}
}
