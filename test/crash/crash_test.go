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

// enumerate has the driver die at every step of a call, and then at every step of the
// start after that, where time is not short.
func (w *world) enumerate(s scenario) {
	w.Helper()
	steps := w.uncrashed(s)
	w.Logf("%d steps:\n%s", len(steps), w.words(steps))
	variants := []scenario{s}
	if s.otherwise != nil {
		variants = append(variants, s.givenUp())
	}
	crashes := 0
	for n := range steps {
		for _, a := range w.place.attacks(n+1, variants) {
			crashes += w.crash(a, steps)
		}
	}
	w.Logf("%d crashes", crashes)
	if !w.Failed() {
		w.end()
	}
}

// An attack kills the driver before a step of a call.
type attack struct {
	scenario
	step int
	starts
}

// starts says how the starts after that end: all the same, or each a step later than the
// one before, until one is through.
type starts int

const (
	well       starts = iota
	oneByOne          // after the same crash of the call each time
	oneByOther        // after one crash of the call
)

// attacks are those of one step of a call. Time is short in the guest, where everything
// takes some twenty times as long, and with -short.
func (p place) attacks(step int, variants []scenario) (all []attack) {
	if testing.Short() {
		if step%p.every != 0 {
			return nil
		}
		how := well
		if step%4 == 0 {
			how = oneByOther
		}
		return []attack{{variants[step/p.every%len(variants)], step, how}}
	}
	how := oneByOne
	if guest() {
		how = oneByOther
	}
	for _, v := range variants {
		all = append(all, attack{v, step, well})
	}
	return append(all, attack{variants[step%len(variants)], step, how})
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

// crash kills the driver before one step of a call, and before those of the starts that
// follow, and expects that what is there then is whole, and that a repeated call ends as if
// nothing had happened. It answers how many it has killed.
func (w *world) crash(a attack, expected []step) (crashes int) {
	w.Helper()
	where, acknowledged := w.crashOnce(a, expected)
	crashes++
	if a.starts == well {
		must(w.T, w.start())
		w.awaitNoTrash()
		w.judge(a.scenario, where, acknowledged)
		return crashes
	}
	for m := 1; ; m++ {
		at, killed := w.crashStart(m)
		if killed {
			crashes++
			where += fmt.Sprintf(", started and killed at step %d, %s", m, at)
			if a.starts == oneByOther {
				continue
			}
			must(w.T, w.start())
			w.awaitNoTrash()
		}
		w.judge(a.scenario, where, acknowledged)
		if !killed {
			return crashes
		}
		where, acknowledged = w.crashOnce(a, expected)
		crashes++
	}
}

// crashOnce makes the call, whose driver dies at the step.
func (w *world) crashOnce(a attack, expected []step) (where string, acknowledged bool) {
	w.Helper()
	w.reach(a.from)
	w.arm(a.step)
	given := a.call(w)
	if given.err == nil && a.reaps {
		w.awaitReaped()
	}
	steps, killed := w.trap.disarm()
	if !killed {
		w.Fatalf("%s: nobody died at step %d: %v; the steps were\n%s\nwant\n%s", a.name, a.step, given.err, w.words(steps), w.words(expected))
	}
	must(w.T, w.node.Kill())
	at := steps[a.step-1]
	where = fmt.Sprintf("%s, killed at step %d of %d, %s", a.name, a.step, len(expected), w.words(steps[a.step-1:]))
	if at.verb() != expected[a.step-1].verb() {
		w.Logf("%s: in the first run it was %s", where, w.words(expected[a.step-1:a.step]))
	}
	return where, given.err == nil
}

// crashStart starts the driver, which dies at a step of that, or of the work in the
// background that follows, if there are as many.
func (w *world) crashStart(step int) (at string, killed bool) {
	w.Helper()
	w.arm(step)
	err := w.start()
	if err == nil {
		w.eventually("the trash is empty", func() bool { return w.trap.hasKilled() || len(w.trash()) == 0 })
	}
	steps, killed := w.trap.disarm()
	if !killed {
		must(w.T, err)
		return "", false
	}
	if err == nil {
		must(w.T, w.node.Kill())
	}
	return w.words(steps[step-1:]), true
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
