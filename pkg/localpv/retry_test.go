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
	if r.due(start) || !r.next(nil, false, start, poll).Equal(poll) {
		t.Error("without a refusal a retry is due")
	}
	now := start
	var waits []time.Duration
	for now.Before(poll) {
		next := r.next(refused, false, now, poll)
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
	if at := r.next(again, false, poll, poll.Add(time.Minute)); at.Sub(poll) != firstRetry {
		t.Errorf("a new refusal is checked again after %s, want %s", at.Sub(poll), firstRetry)
	}
}

// A device that is refused for one reason and then another, in turns, has none of the others be checked again and again: each of them may list
// all volumes of the cluster.
func TestRetryOfDeviceThatIsRefusedInTurns(t *testing.T) {
	now := time.Now()
	poll := now.Add(5 * time.Minute)
	var r retry
	passes := 0
	for ; now.Before(poll); passes++ {
		refused := []devices.Problem{{Path: "/dev/a", Reason: devices.MayBeMissing}}
		switch passes % 3 {
		case 1:
			refused = append(refused, devices.Problem{Path: "/dev/b", Reason: devices.Mounted})
		case 2:
			refused = append(refused, devices.Problem{Path: "/dev/b", Reason: devices.InUse})
		}
		now = r.next(refused, false, now, poll)
	}
	if passes > 30 {
		t.Errorf("there were %d passes in five minutes", passes)
	}
}
