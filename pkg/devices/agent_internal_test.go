package devices

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
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

// What is reported of a job is how it is at one time: it may end while it is looked at.
func TestJobThatEndsWhileItIsLookedAt(t *testing.T) {
	records, err := OpenRecords(t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, records.Close()) }()
	a := NewAgent(Options{Records: records, Log: logr.Discard(), Changed: func() {}})
	defer a.Close()
	number := blockdev.Number{Major: 7, Minor: 1 << 19}
	ending := &job{number: number, path: "/dev/x", cancel: func() {}, done: make(chan struct{})}
	a.jobs[number] = ending
	p := &pass{Agent: a}
	ending.mu.Lock()
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		p.follow(number, &job{path: "/dev/x"})
	}()
	for stacks := make([]byte, 1<<20); !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*job).status("); {
		runtime.Gosched()
	}
	ending.err = context.Canceled
	close(ending.done)
	ending.mu.Unlock()
	<-followed
	if len(p.report.Problems) > 0 || len(p.report.Wiping) > 0 || a.jobs[number] == ending {
		t.Errorf("found %+v; want what ended without a result to be begun anew", p.report)
	}
}

// That a device was in use, or was only looked at, is not forgotten if it is found out while a pass is there.
func TestLookThatEndsDuringAPass(t *testing.T) {
	records, err := OpenRecords(t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, records.Close()) }()
	a := NewAgent(Options{Records: records, Log: logr.Discard(), Changed: func() {}, Settle: time.Hour})
	defer a.Close()
	f := Found{blockdev.Number{Major: 7, Minor: 1<<19 + 1}, "/dev/x"}
	facts := blockdev.Facts{Number: f.Number, SizeBytes: 1}
	a.sightings[f.Number] = sighting{as: appearance(facts), written: facts.Written(), since: time.Now().Add(-2 * time.Hour)}
	ending := &job{number: f.Number, path: f.Path, cancel: func() {}, done: make(chan struct{})}
	a.jobs[f.Number] = ending
	p := &pass{Agent: a, Request: Request{Offer: &Config{}, Retry: true}}
	ending.mu.Lock()
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		p.candidate(f, facts)
	}()
	for stacks := make([]byte, 1<<20); !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*job).status("); {
		runtime.Gosched()
	}
	ending.err = ending.refuse(InUse, "it is open")
	close(ending.done)
	ending.mu.Unlock()
	<-followed
	p.candidate(f, facts)
	if j := a.jobs[f.Number]; j == ending || !j.onlyLook {
		t.Error("it is taken at once, and not looked at until it has been unused for a while")
	}
}
