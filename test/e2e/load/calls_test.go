package load

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A recorder notes how long calls take and how they end. Times are those of the caller.
type recorder struct {
	mu    sync.Mutex
	phase *phase
}

// A phase is a time whose calls are noted together: those that begin and end in it.
type phase struct {
	methods map[string]*measured
	// wide phases also have the calls that are only in part in them: those that something
	// holds up until the phase ends are the ones of interest.
	wide bool
}

type measured struct {
	took  []time.Duration
	codes map[codes.Code]int
}

func newPhase() *phase { return &phase{methods: make(map[string]*measured)} }

func newRecorder() *recorder { return &recorder{phase: newPhase()} }

// enter begins or goes on with a phase, and ends the one before; nil for none.
func (r *recorder) enter(p *phase) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.phase = p
}

func (r *recorder) now() *phase {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.phase
}

// intercept is a grpc.UnaryClientInterceptor.
func (r *recorder) intercept(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	in, began := r.now(), time.Now()
	err := invoke(ctx, method, request, reply, conn, options...)
	r.note(in, path.Base(method), status.Code(err), time.Since(began))
	return err
}

func (r *recorder) note(in *phase, method string, code codes.Code, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch ended := r.phase; {
	case in != nil && in.wide:
	case ended != nil && ended.wide:
		in = ended
	case in != ended:
		in = nil
	}
	if in == nil {
		return
	}
	m := in.methods[method]
	if m == nil {
		m = &measured{codes: make(map[codes.Code]int)}
		in.methods[method] = m
	}
	m.took = append(m.took, took)
	m.codes[code]++
}

// count is how many calls the phase has.
func (r *recorder) count() (calls int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.phase.methods {
		calls += len(m.took)
	}
	return calls
}

// least is the number of calls of the method that has the fewest, of some.
func (r *recorder) least(p *phase, methods []string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	fewest := -1
	for _, method := range methods {
		calls := 0
		if m := p.methods[method]; m != nil {
			calls = len(m.took)
		}
		if fewest < 0 || calls < fewest {
			fewest = calls
		}
	}
	return fewest
}

// quantile is the time that the given part of the calls took at most. They have to be sorted.
func quantile(sorted []time.Duration, part float64) time.Duration {
	return sorted[min(int(part*float64(len(sorted))), len(sorted)-1)]
}

// table summarises a phase that has ended, by method.
func (p *phase) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-28s %8s %10s %10s %10s  %s\n", "method", "calls", "p50", "p99", "max", "answers")
	for _, method := range slices.Sorted(maps.Keys(p.methods)) {
		m := p.methods[method]
		slices.Sort(m.took)
		var answers []string
		for _, code := range slices.Sorted(maps.Keys(m.codes)) {
			answers = append(answers, fmt.Sprintf("%s %d", code, m.codes[code]))
		}
		fmt.Fprintf(&b, "%-28s %8d %10v %10v %10v  %s\n", method, len(m.took), round(quantile(m.took, 0.5)), round(quantile(m.took, 0.99)),
			round(quantile(m.took, 1)), strings.Join(answers, ", "))
	}
	return b.String()
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }

func TestCallsAreCountedPerPhase(t *testing.T) {
	narrow, other, wide := newPhase(), newPhase(), newPhase()
	wide.wide = true
	for _, test := range []struct{ began, ended, want *phase }{
		{narrow, narrow, narrow},
		{narrow, nil, nil},
		{narrow, other, nil},
		{nil, narrow, nil},
		{nil, nil, nil},
		{wide, wide, wide},
		{wide, nil, wide},
		{wide, narrow, wide},
		{nil, wide, wide},
		{narrow, wide, wide},
	} {
		for _, p := range []*phase{narrow, other, wide} {
			clear(p.methods)
		}
		r := newRecorder()
		r.enter(test.ended)
		r.note(test.began, "Probe", codes.OK, time.Second)
		for _, p := range []*phase{narrow, other, wide} {
			if noted := r.least(p, []string{"Probe"}) == 1; noted != (p == test.want) {
				t.Errorf("began %v, ended %v: noted in %v: %v", test.began, test.ended, p, noted)
			}
		}
	}
}

func TestQuantile(t *testing.T) {
	var all []time.Duration
	for i := range 200 {
		all = append(all, time.Duration(i))
	}
	for part, want := range map[float64]time.Duration{0: 0, 0.5: 100, 0.99: 198, 1: 199} {
		if got := quantile(all, part); got != want {
			t.Errorf("quantile %v of 0 to 199 is %d, want %d", part, got, want)
		}
	}
}
