package devices

import (
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// Its progress stays visible, so that one can see that there is none.
func TestHungDeviceIsReportedWithProgress(t *testing.T) {
	number := blockdev.Number{Major: 7, Minor: 1}
	hanging := &job{number: number, path: "/dev/x", volume: Volume{Name: "pv"}, cancel: func() {}, done: make(chan struct{}),
		now: status{progress: Progress{Done: 1, Total: 4}, moved: time.Now().Add(-time.Hour)}}
	p := &pass{Agent: &Agent{jobs: map[blockdev.Number]*job{number: hanging}}}
	p.follow(number, &job{path: "/dev/x", volume: Volume{Name: "pv"}})
	if w := p.report.Wiping; len(w) != 1 || w[0].Volume != "pv" || w[0].Progress != hanging.now.progress {
		t.Errorf("being cleaned: %+v", w)
	}
	if found := p.report.Problems; len(found) != 1 || found[0].Reason != Hangs {
		t.Errorf("problems: %v", found)
	}
}
