package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// notFinal are the codes after which external-provisioner repeats CreateVolume on this node, and kubelet takes the volume
// for one that may be published. After all others both assume that there is nothing. RESOURCE_EXHAUSTED is final for
// external-provisioner, which has the scheduler choose another node.
var notFinal = []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted}

// Each system call of a creation fails in turn. A final error means that there is no volume: otherwise it would stay, and
// another node would make a second one.
func TestFinalErrorLeavesNoVolume(t *testing.T) {
	driver := drivertest.Built(t)
	for i, p := range places() {
		errnos := []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EIO}
		if testing.Short() && (i != 1 || testenv.Guest()) {
			errnos = errnos[:1] // what an error becomes is the same everywhere, and the steps differ
		}
		fails := func(int) bool { return true }
		if testing.Short() && testenv.Guest() {
			fails = func(step int) bool { return step%2 == i } // an emulated processor takes minutes for all, which the host has
		}
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			failCreations(t, newHarness(t, p, driver), p.scenarios(), errnos, fails)
		})
	}
}

// TestFinalErrorLeavesNoCopy is the same for what is made from a snapshot or another volume. What comes before the record puts
// nothing into the pool.
func TestFinalErrorLeavesNoCopy(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	p := place{name: "xfs", mount: onLoop("xfs")}
	p.mounted = p.mount(t)
	h := newHarness(t, p, driver)
	for _, c := range snapshotCalls {
		if c.made != "volume" {
			continue
		}
		for _, block := range []bool{mountMode, blockMode} {
			if block && testing.Short() {
				continue
			}
			t.Run(fmt.Sprintf("%s, block is %v", c.name, block), func(t *testing.T) {
				h.TB = t
				h.failEachOfCopy(c, block)
			})
		}
	}
	h.TB = t
	h.now = state{}
	h.end()
}

func (h *harness) failEachOfCopy(c snapshotCall, block bool) {
	h.Helper()
	h.prepareCopy(c, block)
	h.arm(0)
	h.Must(c.call(h, block))
	steps, _ := h.trap.Disarm()
	h.clearCopies()
	for n := h.lastRecord(steps); n < len(steps); n++ {
		alone := func(number int, _ trap.Step) bool { return number == n+1 }
		onward := func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }
		for how, fails := range map[string]func(int, trap.Step) bool{"alone": alone, "and each fsync after it": onward} {
			h.prepareCopy(c, block)
			h.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: fails})
			where := fmt.Sprintf("ENOSPC of %s %s", h.words(steps[n:n+1]), how)
			h.wantFinalWithoutCopy(where, func() error { return c.call(h, block) })
			h.trap.Disarm()
			h.awaitNoTrash() // until then it is ABORTED
			h.Must(c.call(h, block))
			h.awaitNoTrash()
			h.wantCopied(where+", called again", c, block, true)
			h.clearCopies()
		}
	}
}

// lastRecord is the first step at the record of the copy.
func (h *harness) lastRecord(steps []trap.Step) int {
	h.Helper()
	n := slices.IndexFunc(steps, func(s trap.Step) bool { return strings.Contains(h.words([]trap.Step{s}), copied+".json") })
	if n < 0 {
		h.Fatalf("no step at the record:\n%s", h.words(steps))
	}
	return n
}

func (h *harness) wantFinalWithoutCopy(where string, call func() error) {
	h.Helper()
	for range 2 {
		err := call()
		if err != nil && !slices.Contains(notFinal, status.Code(err)) && h.there(copied) {
			h.Errorf("%s: the volume is there after the final error %v", where, err)
		}
	}
}

func failCreations(t *testing.T, h *harness, all []scenario, errnos []unix.Errno, fails func(step int) bool) {
	t.Helper()
	for _, s := range all {
		if s.from != (state{}) {
			continue
		}
		for _, errno := range errnos {
			t.Run(fmt.Sprintf("%s, %s", s.name, unix.ErrnoName(errno)), func(t *testing.T) {
				h.TB = t
				h.failEach(s, errno, fails)
			})
		}
	}
	h.TB = t
	if !t.Failed() {
		h.end()
	}
}

// stepsOf are those of a call that does not fail.
func (h *harness) stepsOf(s scenario) []trap.Step {
	h.Helper()
	h.reach(s.from)
	h.arm(0)
	h.Must(s.call(h).err)
	steps, _ := h.trap.Disarm()
	h.now = s.to
	return steps
}

// failEach has each step of a call fail that is to, alone and together with every fsync(2) after it.
func (h *harness) failEach(s scenario, errno unix.Errno, fails func(step int) bool) {
	h.Helper()
	for n, at := range h.stepsOf(s) {
		if !fails(n) {
			continue
		}
		alone := func(number int, _ trap.Step) bool { return number == n+1 }
		h.failOnce(s, fmt.Sprintf("%s of %s alone", errno, h.words([]trap.Step{at})), trap.Failure{Errno: errno, Fails: alone})
		if at.Verb() != "fsync" {
			continue
		}
		onward := func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }
		h.failOnce(s, fmt.Sprintf("%s of %s and each fsync after it", errno, h.words([]trap.Step{at})), trap.Failure{Errno: errno, Fails: onward})
	}
}

func (h *harness) failOnce(s scenario, where string, f trap.Failure) {
	h.Helper()
	h.reach(s.from)
	h.trap.ArmToFail(f)
	for range 2 {
		err := s.call(h).err
		if err != nil && !slices.Contains(notFinal, status.Code(err)) && h.there(victim) {
			h.Errorf("%s: the volume is there after the final error %v", where, err)
		}
	}
	h.trap.Disarm()
	h.Must(s.call(h).err)
	h.awaitNoTrash() // of the creations that were undone
	h.now = s.to
	if err := h.pool.Problems(h.expected(s.to)); err != nil {
		h.Errorf("%s, called again: %v", where, err)
	}
}

// there reports whether the volume has a directory in the pool.
func (h *harness) there(id string) bool {
	h.Helper()
	_, err := os.Lstat(filepath.Join(h.pool.Path, id))
	if !errors.Is(err, os.ErrNotExist) {
		h.Must(err)
	}
	return err == nil
}

// What succeeded is durable, also where a repeated call finds it done: as long as no fsync(2) succeeds, no call does.
func TestNothingSucceedsUnlessDurable(t *testing.T) {
	driver := drivertest.Built(t)
	p := place{name: "ext4", mount: onLoop("ext4"), modes: []bool{mountMode, blockMode}}
	p.mounted = p.mount(t)
	h := newHarness(t, p, driver)
	for _, s := range p.scenarios() {
		if s.to.bytes <= s.from.bytes || s.to.inline {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			h.TB = t
			h.failEachSync(s)
		})
	}
	for name, leave := range map[string]func() error{
		"delete without record": func() error { return os.Remove(h.pool.Own("volumes", victim+".json")) },
		"delete lost":           func() error { return os.RemoveAll(filepath.Join(h.pool.Path, victim)) },
	} {
		t.Run(name, func(t *testing.T) {
			h.TB = t
			h.reach(state{bytes: small})
			h.Must(leave())
			h.trap.ArmToFail(trap.Failure{Errno: unix.EIO, Fails: func(_ int, s trap.Step) bool { return s.Verb() == "fsync" }})
			for range 2 {
				if h.delete().err == nil {
					t.Error("the call succeeded, and each fsync of it failed")
				}
			}
			h.trap.Disarm()
			h.Must(h.delete().err)
			h.Must(errors.Join(h.Process.Stop(), h.start())) // or the trash waits for the check of each minute
			h.awaitNoTrash()
			h.now = state{}
		})
	}
	h.TB = t
	if !t.Failed() {
		h.end()
	}
}

// failEachSync has each fsync(2) of a call fail, with all after it, also those of the repeated call.
func (h *harness) failEachSync(s scenario) {
	h.Helper()
	for n, at := range h.stepsOf(s) {
		if at.Verb() != "fsync" {
			continue
		}
		h.reach(s.from)
		h.trap.ArmToFail(trap.Failure{Errno: unix.EIO, Fails: func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }})
		for range 2 {
			if s.call(h).err == nil {
				h.Errorf("the call succeeded, and %s and each fsync after it failed", h.words([]trap.Step{at}))
			}
		}
		h.trap.Disarm()
		h.Must(s.call(h).err)
		h.awaitNoTrash() // of the creations that were undone
		h.now = s.to
	}
}
