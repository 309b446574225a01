// Package crash tests that nothing is ever half done: the real driver is killed before
// every system call by which it changes anything, started again, and asked again. A
// seccomp filter reports those calls one by one, so that each run is killed at a chosen one,
// and not at a random time.
//
// What a kernel keeps when the power goes, and not only the process, is tested here too:
// see power_test.go.
package crash

import (
	"fmt"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

func TestMain(m *testing.M) {
	trap.Launch()
	testenv.Main(m)
}

func TestCrashAtEveryStep(t *testing.T) {
	driver := drivertest.Built(t)
	for _, p := range places() {
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			w := newWorld(t, p, driver)
			for _, s := range p.scenarios() {
				t.Run(s.name, func(t *testing.T) {
					w.TB = t
					w.enumerate(s)
				})
				if w.TB = t; t.Failed() {
					return // the others would start from what is wrong
				}
			}
			w.Must(w.Process.Stop())
			w.restart()
			w.end()
		})
	}
}

// enumerate has the driver die at every step of a call, and then at every step of the
// start after that, where time is not short.
func (w *world) enumerate(s scenario) {
	w.Helper()
	w.learn(s)
	variants := []scenario{s}
	if s.otherwise != nil {
		variants = append(variants, s.givenUp())
	}
	crashes := 0
	for n := 1; n <= len(w.learnt); n++ {
		for _, a := range w.attacks(n, variants) {
			crashes += w.crashAll(a)
		}
	}
	w.Logf("%d crashes in %d steps:\n%s", crashes, len(w.learnt), w.words(w.learnt))
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

// attacks are those of one step of a call. With -short only some of all steps are tried,
// and with few of them the starts. In the guest all takes some twenty times as long.
func (w *world) attacks(step int, variants []scenario) (all []attack) {
	w.steps++
	if testing.Short() {
		if w.steps%w.place.every != 0 {
			return nil
		}
		tried := w.steps / w.place.every
		all = append(all, attack{variants[tried%len(variants)], step, well})
		if tried%16 == 1 {
			all = append(all, attack{variants[tried%len(variants)], step, oneByOther})
		}
		return all
	}
	for _, v := range variants {
		all = append(all, attack{v, step, well})
	}
	switch alternating := variants[step%len(variants)]; {
	case !testenv.Guest():
		all = append(all, attack{alternating, step, oneByOne})
	case w.steps%4 == 0:
		all = append(all, attack{alternating, step, oneByOther})
	}
	return all
}

// learn learns what a call does and answers if no process dies.
func (w *world) learn(s scenario) {
	w.Helper()
	w.reach(s.from)
	w.capacityOf(s.from)
	if s.from == (state{}) {
		w.filled = false
	}
	w.arm(0)
	w.answer = w.attempt(s, s.call)
	w.learnt, _ = w.trap.Disarm()
	w.now = s.to
	w.wantState("without a crash", s.to)
	w.capacityOf(s.to)
}

// attempt makes a call that succeeds.
func (w *world) attempt(s scenario, call func(*world) answer) answer {
	w.Helper()
	a := call(w)
	w.Must(a.err)
	if s.reaps {
		w.awaitReaped()
	}
	return a
}

// crashAll kills the driver before one step of a call, and before those of the starts that
// follow, each time anew or one after another, and expects that what is there then is whole, and that a repeated call ends as if
// nothing had happened. It answers how many it has killed.
func (w *world) crashAll(a attack) (crashes int) {
	w.Helper()
	for m := 1; ; m++ {
		c, died := w.crashOnce(a)
		if !died {
			return crashes
		}
		crashes++
		killed := 0
		if a.starts == well {
			w.restart()
		} else {
			killed = w.crashStarts(&c, m, a.starts)
		}
		crashes += killed
		w.judge(a.scenario, c)
		if a.starts != oneByOne || killed == 0 {
			return crashes
		}
	}
}

// restart starts the driver, waits until it has nothing left to do, and returns how many steps that took.
func (w *world) restart() int {
	w.Helper()
	w.arm(0)
	w.Must(w.start())
	w.AwaitServing()
	w.awaitNoTrash()
	steps, _ := w.trap.Disarm()
	return len(steps)
}

// A crash is what is known of one.
type crash struct {
	where        string
	acknowledged bool // the call was answered before that
}

// crashStarts starts the driver until one start is through. The first dies at a step, or
// each at one that is later by one.
func (w *world) crashStarts(c *crash, step int, how starts) (killed int) {
	w.Helper()
	for ; ; step++ {
		steps, died := w.crashStart(step)
		if !died {
			return killed
		}
		killed++
		c.where += fmt.Sprintf(", started and killed at step %d, %s", step, w.words(steps[step-1:]))
		if how == oneByOne {
			w.Must(w.start())
			w.awaitNoTrash()
			return killed
		}
	}
}

// crashOnce makes the call, whose driver dies at the step. There may be a step less than
// was learnt: a loop device that was free can be as it has to be already. There may be
// more of them less, if another process took or held a loop device while they were learnt;
// then they are learnt again, once.
func (w *world) crashOnce(a attack) (c crash, died bool) {
	w.Helper()
	given, steps, killed := w.strike(a)
	if !killed && given.err == nil && a.step < len(w.learnt) {
		w.learn(a.scenario)
		if a.step <= len(w.learnt) {
			given, steps, killed = w.strike(a)
		}
	}
	if !killed && given.err == nil && a.step >= len(w.learnt) {
		return c, false
	}
	if !killed {
		w.Fatalf("%s: no process died at step %d: %v; the steps were\n%s\nwant\n%s", a.name, a.step, given.err, w.words(steps), w.words(w.learnt))
	}
	w.kill()
	at, expected := steps[a.step-1], w.learnt[a.step-1]
	c.where = fmt.Sprintf("%s, killed at step %d of %d, %s", a.name, a.step, len(w.learnt), w.words(steps[a.step-1:]))
	if at.Verb() != expected.Verb() {
		w.Logf("%s: in the first run it was %s", c.where, w.words([]trap.Step{expected}))
	}
	c.acknowledged = given.err == nil
	return c, true
}

// strike makes the call of an attack.
func (w *world) strike(a attack) (given answer, steps []trap.Step, killed bool) {
	w.Helper()
	w.reach(a.from)
	w.arm(a.step)
	given = a.call(w)
	if given.err == nil && a.reaps {
		w.awaitReaped()
	}
	if steps, killed = w.trap.Disarm(); !killed && given.err == nil {
		w.now = a.to
	}
	return given, steps, killed
}

// crashStart starts the driver, which dies at a step of that, or of the work in the
// background that follows, if there are as many.
func (w *world) crashStart(at int) (steps []trap.Step, killed bool) {
	w.Helper()
	w.arm(at)
	err := w.start()
	if err == nil {
		w.Eventually("the trash is empty", func() bool { return w.trap.HasKilled() || len(w.trash()) == 0 })
	}
	if steps, killed = w.trap.Disarm(); !killed {
		w.Must(err)
		return nil, false
	}
	if err == nil {
		w.kill()
	}
	return steps, true
}

// judge checks what a driver has made of a crash, and asks it again.
func (w *world) judge(s scenario, c crash) {
	w.Helper()
	where := c.where
	possible := append([]state{s.to, s.from}, s.between...)
	if left := w.observe(); s.to.block && s.from.bytes < left.bytes && left.bytes < s.to.bytes {
		// A signal had interrupted fallocate(2): the file has grown by less, and is served as it is.
		partly := s.to
		partly.bytes = left.bytes
		possible = append(possible, partly)
	}
	if c.acknowledged {
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
func (w *world) words(steps []trap.Step) string {
	var lines []string
	for _, s := range steps {
		lines = append(lines, string(s))
	}
	return strings.NewReplacer(w.pool.Own(), "OWN", w.pool.Path, "POOL", w.Targets, "TARGETS").Replace(strings.Join(lines, "\n"))
}
