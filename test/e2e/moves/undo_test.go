package moves

import (
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// sourceCall has the source do a step of a move.
func (h *harness) sourceCall(name, id string) error {
	_, err := h.from.moves.Repeat(h.Context(), name, moves.Request{Volume: h.volume.ID, Move: id, Peer: "target-node", TargetAborted: true})
	return err
}

// wantRecorded compares what the source has recorded with the volume.
func (h *harness) wantRecorded(step trap.Step, move string) {
	h.Helper()
	is, err := h.from.moves.Repeat(h.Context(), moves.State, moves.Request{Volume: h.volume.ID})
	if err != nil || !is.Recorded || is.Bytes != h.volume.Bytes || is.Move != move {
		h.Fatalf("%s: the source has %+v (%v)", step, is, err)
	}
}

// Each step of an undo finds no room, and each flush after it: the volume keeps its record.
func TestUndoFindsNoRoomAtAnyStep(t *testing.T) {
	h := newHarness(t, way{onBtrfs, onExt4, true}, sourceDriver)
	_, err := h.from.Create(t.Context(), h.volume)
	h.from.Must(err)
	h.from.Must(h.sourceCall(moves.Fence, "steps"))
	h.trap.Arm(0)
	h.from.Must(h.sourceCall(moves.Unfence, "steps"))
	steps, _ := h.trap.Disarm()
	for n, step := range steps {
		for _, and := range []string{"alone", "with-flushes"} {
			id := strconv.Itoa(n) + "-" + and
			h.from.Must(h.sourceCall(moves.Fence, id))
			h.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: func(number int, s trap.Step) bool {
				return number == n+1 || number > n && s.Verb() == "fsync" && and != "alone"
			}})
			_, failed := h.from.moves.Call(t.Context(), moves.Unfence, moves.Request{Volume: h.volume.ID, Move: id, Peer: "target-node", TargetAborted: true})
			h.trap.Disarm()
			t.Logf("%s, %s: %v", step, and, failed)
			h.from.Crash()
			h.from.Must(h.sourceCall(moves.Unfence, id))
			h.wantRecorded(step, "")
		}
	}
}

// A volume whose record lies beside its name, since btrfs had no room to rename it, moves again. The driver is killed before each step of the
// fence, and goes on.
func TestFenceOfRecordBesideItsName(t *testing.T) {
	h := newHarness(t, way{onBtrfs, onExt4, false}, sourceDriver)
	_, err := h.from.Create(t.Context(), h.volume)
	h.from.Must(err)
	undone := 0
	// With a move of its own each time: what was undone does not fence again.
	beside := func() {
		undone++
		id := "undone-" + strconv.Itoa(undone)
		h.from.Must(h.sourceCall(moves.Fence, id))
		h.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: func(_ int, s trap.Step) bool { return s.Verb() == "renameat" }})
		h.from.Must(h.sourceCall(moves.Unfence, id))
		h.trap.Disarm()
		if _, err := os.Stat(h.from.pool.Own("volumes", h.volume.ID+".json")); err == nil {
			t.Fatal("the record has its name")
		}
	}
	beside()
	h.trap.Arm(0)
	h.from.Must(h.sourceCall(moves.Fence, "steps"))
	steps, _ := h.trap.Disarm()
	h.from.Must(h.sourceCall(moves.Unfence, "steps"))
	for n, step := range steps {
		beside()
		id := strconv.Itoa(n)
		h.trap.Arm(n + 1)
		_, killed := h.from.moves.Call(t.Context(), moves.Fence, moves.Request{Volume: h.volume.ID, Move: id, Peer: "target-node"})
		h.trap.Disarm()
		t.Logf("killed before %s: %v", step, killed)
		h.from.Crash()
		h.from.Must(h.sourceCall(moves.Fence, id))
		h.wantRecorded(step, id)
		h.from.Must(h.sourceCall(moves.Unfence, id))
	}
}
