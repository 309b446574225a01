// Package crash tests that nothing is ever half done: the real driver is killed before
// every system call by which it changes anything, started again, and asked again. A
// seccomp filter tells of those calls one by one, so that each run dies where it is told
// to, and not where the clock had it.
//
// What a kernel keeps when the power goes, and not only the process, is tested here too:
// see power_test.go.
package crash

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(socketVariable); socket != "" {
		fmt.Fprintln(os.Stderr, launch(socket)) // there is no error but this, and no return
		os.Exit(1)
	}
	testenv.Main(m)
}

func TestCrashAtEveryStep(t *testing.T) {
	testenv.NeedRoot(t)
	driver, err := node.Binary(t.Context(), t.TempDir())
	must(t, err)
	for _, p := range places() {
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			for _, s := range p.scenarios() {
				t.Run(s.name, func(t *testing.T) {
					w := newWorld(t, p, driver)
					w.enumerate(s)
				})
			}
		})
	}
}

// enumerate has the driver die at every step of a call, or at some of them where time is
// short.
func (w *world) enumerate(s scenario) {
	w.Helper()
	steps := w.uncrashed(s)
	w.Logf("%d steps:\n%s", len(steps), w.words(steps))
	for n := 1; n <= len(steps); n++ {
		w.crash(s, n, steps)
	}
	if s.otherwise != nil {
		for n := 1; n <= len(steps); n++ {
			w.crash(s.givenUp(), n, steps)
		}
	}
	if w.Failed() {
		return
	}
	w.end()
}

// uncrashed learns what a call does and answers if nobody dies.
func (w *world) uncrashed(s scenario) []step {
	w.Helper()
	w.reach(s.from)
	w.capacityOf(s.from)
	w.arm(0)
	w.answer = w.attempt(s, s.call)
	steps, _ := w.trap.disarm()
	w.now = s.to
	w.wantState("without a crash", s.to)
	w.capacityOf(s.to)
	return steps
}

// attempt makes a call that succeeds.
func (w *world) attempt(s scenario, call func(*world) answer) answer {
	w.Helper()
	a := call(w)
	must(w.T, a.err)
	if s.reaps {
		w.awaitReaped()
	}
	return a
}

// crash kills the driver before one step, and expects that what is there then is whole,
// and that a repeated call ends as if nothing had happened.
func (w *world) crash(s scenario, n int, expected []step) {
	w.Helper()
	w.reach(s.from)
	w.arm(n)
	a := s.call(w)
	if a.err == nil && s.reaps {
		w.awaitReaped()
	}
	steps, killed := w.trap.disarm()
	if !killed {
		w.Errorf("%s: at step %d nobody died; the steps were\n%s\nwant\n%s", s.name, n, w.words(steps), w.words(expected))
		must(w.T, a.err)
		w.now = s.to
		return
	}
	where := fmt.Sprintf("%s, killed at step %d of %d, %s", s.name, n, len(expected), w.words(steps[n-1:]))
	if steps[n-1].verb() != expected[n-1].verb() {
		w.Logf("%s: in the first run it was %s", where, w.words(expected[n-1:n]))
	}
	w.restart()
	w.judge(s, where, a.err == nil)
}

// judge looks at what a driver has made of a crash, and asks it again.
func (w *world) judge(s scenario, where string, acknowledged bool) {
	w.Helper()
	possible := append([]state{s.to, s.from}, s.between...)
	if acknowledged {
		possible = possible[:1]
	}
	w.wantState(where+", started again", possible...)
	next, to := s.call, s.to
	if s.gaveUp {
		next, to = s.otherwise, s.otherwiseTo(w.now)
	}
	repeated := next(w)
	if repeated.err != nil {
		w.Fatalf("%s: the repeated call: %v", where, repeated.err)
	}
	if diff := w.answer.diff(repeated); diff != "" && !s.gaveUp {
		w.Errorf("%s: the repeated call answered otherwise (-want +got):\n%s", where, diff)
	}
	w.awaitNoTrash()
	w.wantState(where+", asked again", to)
	if w.Failed() {
		w.FailNow() // what follows would start from what is wrong
	}
}

// words are steps without what makes their paths long.
func (w *world) words(steps []step) string {
	var lines []string
	for _, s := range steps {
		lines = append(lines, string(s))
	}
	return strings.NewReplacer(w.own(), "OWN", w.pool, "POOL", w.targets, "TARGETS").Replace(strings.Join(lines, "\n"))
}
