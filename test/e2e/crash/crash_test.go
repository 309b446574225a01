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
			h := newHarness(t, p, driver)
			for _, s := range p.scenarios() {
				t.Run(s.name, func(t *testing.T) {
					h.TB = t
					h.enumerate(s)
				})
				if h.TB = t; t.Failed() {
					return // the others would start from what is wrong
				}
			}
			h.Must(h.Process.Stop())
			h.restart()
			h.end()
		})
	}
}

// enumerate has the driver die at every step of a call, and then at every step of the
// start after that, where time is not short.
func (h *harness) enumerate(s scenario) {
	h.Helper()
	h.learn(s)
	variants := []scenario{s}
	if s.otherwise != nil {
		variants = append(variants, s.givenUp())
	}
	crashes := 0
	for n := 1; n <= len(h.learnt); n++ {
		for _, a := range h.attacks(n, variants) {
			crashes += h.crashAll(a)
		}
	}
	h.Logf("%d crashes in %d steps:\n%s", crashes, len(h.learnt), h.words(h.learnt))
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
func (h *harness) attacks(step int, variants []scenario) (all []attack) {
	h.steps++
	if testing.Short() {
		if h.steps%h.place.every != 0 {
			return nil
		}
		tried := h.steps / h.place.every
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
	case h.steps%4 == 0:
		all = append(all, attack{alternating, step, oneByOther})
	}
	return all
}

// learn learns what a call does and answers if no process dies.
func (h *harness) learn(s scenario) {
	h.Helper()
	h.reach(s.from)
	h.capacityOf(s.from)
	if s.from == (state{}) {
		h.filled = false
	}
	h.arm(0)
	h.answer = h.attempt(s, s.call)
	h.learnt, _ = h.trap.Disarm()
	h.now = s.to
	h.wantState("without a crash", s.to)
	h.capacityOf(s.to)
}

// attempt makes a call that succeeds.
func (h *harness) attempt(s scenario, call func(*harness) answer) answer {
	h.Helper()
	a := call(h)
	h.Must(a.err)
	if s.reaps {
		h.awaitReaped()
	}
	return a
}

// crashAll kills the driver before one step of a call, and before those of the starts that
// follow, each time anew or one after another, and expects that what is there then is whole, and that a repeated call ends as if
// nothing had happened. It answers how many it has killed.
func (h *harness) crashAll(a attack) (crashes int) {
	h.Helper()
	for m := 1; ; m++ {
		c, died := h.crashOnce(a)
		if !died {
			return crashes
		}
		crashes++
		killed := 0
		if a.starts == well {
			h.restart()
		} else {
			killed = h.crashStarts(&c, m, a.starts)
		}
		crashes += killed
		h.judge(a.scenario, c)
		if a.starts != oneByOne || killed == 0 {
			return crashes
		}
	}
}

// restart starts the driver, waits until it has nothing left to do, and returns how many steps that took.
func (h *harness) restart() int {
	h.Helper()
	h.arm(0)
	h.Must(h.start())
	h.AwaitServing()
	h.awaitNoTrash()
	steps, _ := h.trap.Disarm()
	return len(steps)
}

// A crash is what is known of one.
type crash struct {
	where        string
	acknowledged bool // the call was answered before that
}

// crashStarts starts the driver until one start is through. The first dies at a step, or
// each at one that is later by one.
func (h *harness) crashStarts(c *crash, step int, how starts) (killed int) {
	h.Helper()
	for ; ; step++ {
		steps, died := h.crashStart(step)
		if !died {
			return killed
		}
		killed++
		c.where += fmt.Sprintf(", started and killed at step %d, %s", step, h.words(steps[step-1:]))
		if how == oneByOne {
			h.Must(h.start())
			h.awaitNoTrash()
			return killed
		}
	}
}

// crashOnce makes the call, whose driver dies at the step. There may be a step less than
// was learnt: a loop device that was free can be as it has to be already. There may be
// more of them less, if another process took or held a loop device while they were learnt;
// then they are learnt again, once.
func (h *harness) crashOnce(a attack) (c crash, died bool) {
	h.Helper()
	given, steps, killed := h.strike(a)
	if !killed && given.err == nil && a.step < len(h.learnt) {
		h.learn(a.scenario)
		if a.step <= len(h.learnt) {
			given, steps, killed = h.strike(a)
		}
	}
	if !killed && given.err == nil && a.step >= len(h.learnt) {
		return c, false
	}
	if !killed {
		h.Fatalf("%s: no process died at step %d: %v; the steps were\n%s\nwant\n%s", a.name, a.step, given.err, h.words(steps), h.words(h.learnt))
	}
	h.kill()
	at, expected := steps[a.step-1], h.learnt[a.step-1]
	c.where = fmt.Sprintf("%s, killed at step %d of %d, %s", a.name, a.step, len(h.learnt), h.words(steps[a.step-1:]))
	if at.Verb() != expected.Verb() {
		h.Logf("%s: in the first run it was %s", c.where, h.words([]trap.Step{expected}))
	}
	c.acknowledged = given.err == nil
	return c, true
}

// strike makes the call of an attack.
func (h *harness) strike(a attack) (given answer, steps []trap.Step, killed bool) {
	h.Helper()
	h.reach(a.from)
	h.arm(a.step)
	given = a.call(h)
	if given.err == nil && a.reaps {
		h.awaitReaped()
	}
	if steps, killed = h.trap.Disarm(); !killed && given.err == nil {
		h.now = a.to
	}
	return given, steps, killed
}

// crashStart starts the driver, which dies at a step of that, or of the work in the
// background that follows, if there are as many.
func (h *harness) crashStart(at int) (steps []trap.Step, killed bool) {
	h.Helper()
	h.arm(at)
	err := h.start()
	if err == nil {
		h.Eventually("the trash is empty", func() bool { return h.trap.HasKilled() || len(h.trash()) == 0 })
	}
	if steps, killed = h.trap.Disarm(); !killed {
		h.Must(err)
		return nil, false
	}
	if err == nil {
		h.kill()
	}
	return steps, true
}

// judge checks what a driver has made of a crash, and asks it again.
func (h *harness) judge(s scenario, c crash) {
	h.Helper()
	where := c.where
	possible := append([]state{s.to, s.from}, s.between...)
	if left := h.observe(); s.to.block && s.from.bytes < left.bytes && left.bytes < s.to.bytes {
		// A signal had interrupted fallocate(2): the file has grown by less, and is served as it is.
		partly := s.to
		partly.bytes = left.bytes
		possible = append(possible, partly)
	}
	if c.acknowledged {
		possible = possible[:1]
	}
	h.wantState(where+", started again", possible...)
	next, to := s.call, s.to
	if s.gaveUp {
		next, to = s.otherwise, s.otherwiseTo(h.now)
	}
	repeated := next(h)
	if repeated.err != nil {
		h.Fatalf("%s: the repeated call: %v", where, repeated.err)
	}
	if diff := h.answer.diff(repeated); diff != "" && !s.gaveUp {
		h.Errorf("%s: the repeated call answered otherwise (-want +got):\n%s", where, diff)
	}
	h.awaitNoTrash()
	h.wantState(where+", asked again", to)
	if h.Failed() {
		h.FailNow() // what follows would start from what is wrong
	}
}

// words are steps without what makes their paths long.
func (h *harness) words(steps []trap.Step) string {
	var lines []string
	for _, s := range steps {
		lines = append(lines, string(s))
	}
	return strings.NewReplacer(h.pool.Own(), "OWN", h.pool.Path, "POOL", h.Targets, "TARGETS").Replace(strings.Join(lines, "\n"))
}
