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
			failCreations(t, newWorld(t, p, driver), p.scenarios(), errnos, fails)
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
	w := newWorld(t, p, driver)
	for _, c := range snapshotCalls {
		if c.made != "volume" {
			continue
		}
		for _, block := range []bool{mountMode, blockMode} {
			if block && testing.Short() {
				continue
			}
			t.Run(fmt.Sprintf("%s, block is %v", c.name, block), func(t *testing.T) {
				w.TB = t
				w.failEachOfCopy(c, block)
			})
		}
	}
	w.TB = t
	w.now = state{}
	w.end()
}

func (w *world) failEachOfCopy(c snapshotCall, block bool) {
	w.Helper()
	w.prepareCopy(c, block)
	w.arm(0)
	w.Must(c.call(w, block))
	steps, _ := w.trap.Disarm()
	w.clearCopies()
	for n := w.lastRecord(steps); n < len(steps); n++ {
		alone := func(number int, _ trap.Step) bool { return number == n+1 }
		onward := func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }
		for how, fails := range map[string]func(int, trap.Step) bool{"alone": alone, "and each fsync after it": onward} {
			w.prepareCopy(c, block)
			w.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: fails})
			where := fmt.Sprintf("ENOSPC of %s %s", w.words(steps[n:n+1]), how)
			w.wantFinalWithoutCopy(where, func() error { return c.call(w, block) })
			w.trap.Disarm()
			w.awaitNoTrash() // until then it is ABORTED
			w.Must(c.call(w, block))
			w.awaitNoTrash()
			w.wantCopied(where+", called again", c, block, true)
			w.clearCopies()
		}
	}
}

// lastRecord is the first step at the record of the copy.
func (w *world) lastRecord(steps []trap.Step) int {
	w.Helper()
	n := slices.IndexFunc(steps, func(s trap.Step) bool { return strings.Contains(w.words([]trap.Step{s}), copied+".json") })
	if n < 0 {
		w.Fatalf("no step at the record:\n%s", w.words(steps))
	}
	return n
}

func (w *world) wantFinalWithoutCopy(where string, call func() error) {
	w.Helper()
	for range 2 {
		err := call()
		if err != nil && !slices.Contains(notFinal, status.Code(err)) && w.there(copied) {
			w.Errorf("%s: the volume is there after the final error %v", where, err)
		}
	}
}

func failCreations(t *testing.T, w *world, all []scenario, errnos []unix.Errno, fails func(step int) bool) {
	t.Helper()
	for _, s := range all {
		if s.from != (state{}) {
			continue
		}
		for _, errno := range errnos {
			t.Run(fmt.Sprintf("%s, %s", s.name, unix.ErrnoName(errno)), func(t *testing.T) {
				w.TB = t
				w.failEach(s, errno, fails)
			})
		}
	}
	w.TB = t
	if !t.Failed() {
		w.end()
	}
}

// failEach has each step of a call fail that is to, alone and together with every fsync(2) after it.
func (w *world) failEach(s scenario, errno unix.Errno, fails func(step int) bool) {
	w.Helper()
	w.reach(s.from)
	w.arm(0)
	w.Must(s.call(w).err)
	steps, _ := w.trap.Disarm()
	w.now = s.to
	for n, at := range steps {
		if !fails(n) {
			continue
		}
		alone := func(number int, _ trap.Step) bool { return number == n+1 }
		w.failOnce(s, fmt.Sprintf("%s of %s alone", errno, w.words([]trap.Step{at})), trap.Failure{Errno: errno, Fails: alone})
		if at.Verb() != "fsync" {
			continue
		}
		onward := func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }
		w.failOnce(s, fmt.Sprintf("%s of %s and each fsync after it", errno, w.words([]trap.Step{at})), trap.Failure{Errno: errno, Fails: onward})
	}
}

func (w *world) failOnce(s scenario, where string, f trap.Failure) {
	w.Helper()
	w.reach(s.from)
	w.trap.ArmToFail(f)
	for range 2 {
		err := s.call(w).err
		if err != nil && !slices.Contains(notFinal, status.Code(err)) && w.there(victim) {
			w.Errorf("%s: the volume is there after the final error %v", where, err)
		}
	}
	w.trap.Disarm()
	w.Must(s.call(w).err)
	w.awaitNoTrash() // of the creations that were undone
	w.now = s.to
	if err := w.pool.Problems(w.expected(s.to)); err != nil {
		w.Errorf("%s, called again: %v", where, err)
	}
}

// there reports whether the volume has a directory in the pool.
func (w *world) there(id string) bool {
	w.Helper()
	_, err := os.Lstat(filepath.Join(w.pool.Path, id))
	if !errors.Is(err, os.ErrNotExist) {
		w.Must(err)
	}
	return err == nil
}

// What succeeded is durable, also where a repeated call finds it done: as long as no fsync(2) succeeds, no call does.
func TestNothingSucceedsUnlessDurable(t *testing.T) {
	driver := drivertest.Built(t)
	p := place{name: "ext4", mount: onLoop("ext4"), modes: []bool{mountMode, blockMode}}
	p.mounted = p.mount(t)
	w := newWorld(t, p, driver)
	for _, s := range p.scenarios() {
		if s.to.bytes <= s.from.bytes || s.to.inline {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			w.TB = t
			w.failEachSync(s)
		})
	}
	for name, leave := range map[string]func() error{
		"delete without record": func() error { return os.Remove(w.pool.Own("volumes", victim+".json")) },
		"delete lost":           func() error { return os.RemoveAll(filepath.Join(w.pool.Path, victim)) },
	} {
		t.Run(name, func(t *testing.T) {
			w.TB = t
			w.reach(state{bytes: small})
			w.Must(leave())
			w.trap.ArmToFail(trap.Failure{Errno: unix.EIO, Fails: func(_ int, s trap.Step) bool { return s.Verb() == "fsync" }})
			for range 2 {
				if w.delete().err == nil {
					t.Error("the call succeeded, and each fsync of it failed")
				}
			}
			w.trap.Disarm()
			w.Must(w.delete().err)
			w.Must(errors.Join(w.Process.Stop(), w.start())) // or the trash waits for the check of each minute
			w.awaitNoTrash()
			w.now = state{}
		})
	}
	w.TB = t
	if !t.Failed() {
		w.end()
	}
}

// failEachSync has each fsync(2) of a call fail, with all after it, also those of the repeated call.
func (w *world) failEachSync(s scenario) {
	w.Helper()
	w.reach(s.from)
	w.arm(0)
	w.Must(s.call(w).err)
	steps, _ := w.trap.Disarm()
	w.now = s.to
	for n, at := range steps {
		if at.Verb() != "fsync" {
			continue
		}
		w.reach(s.from)
		w.trap.ArmToFail(trap.Failure{Errno: unix.EIO, Fails: func(number int, s trap.Step) bool { return number > n && s.Verb() == "fsync" }})
		for range 2 {
			if s.call(w).err == nil {
				w.Errorf("the call succeeded, and %s and each fsync after it failed", w.words([]trap.Step{at}))
			}
		}
		w.trap.Disarm()
		w.Must(s.call(w).err)
		w.awaitNoTrash() // of the creations that were undone
		w.now = s.to
	}
}
