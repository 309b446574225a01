package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
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
		if p.shared {
			continue // a removal that fails there is finished by the check a minute later, and until then the volume is lost
		}
		errnos := []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EIO}
		if testing.Short() && i != 1 {
			errnos = errnos[:1] // what an error becomes is the same everywhere, and the steps differ
		}
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			failCreations(t, newWorld(t, p, driver), p.scenarios(), errnos)
		})
	}
}

func failCreations(t *testing.T, w *world, all []scenario, errnos []unix.Errno) {
	t.Helper()
	for _, s := range all {
		if s.from != (state{}) {
			continue
		}
		for _, errno := range errnos {
			t.Run(fmt.Sprintf("%s, %s", s.name, unix.ErrnoName(errno)), func(t *testing.T) {
				w.TB = t
				w.failEach(s, errno)
			})
		}
	}
	w.TB = t
	if !t.Failed() {
		w.end()
	}
}

// failEach has each step of a call fail, alone and together with every fsync(2) after it.
func (w *world) failEach(s scenario, errno unix.Errno) {
	w.Helper()
	w.reach(s.from)
	w.arm(0)
	w.Must(s.call(w).err)
	steps, _ := w.trap.Disarm()
	w.now = s.to
	for n, at := range steps {
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
		if err != nil && !slices.Contains(notFinal, status.Code(err)) && w.there() {
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
func (w *world) there() bool {
	w.Helper()
	_, err := os.Lstat(filepath.Join(w.pool.Path, victim))
	if !errors.Is(err, os.ErrNotExist) {
		w.Must(err)
	}
	return err == nil
}
