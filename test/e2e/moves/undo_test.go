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
func (w *world) sourceCall(name, id string) error {
	_, err := w.from.moves.Repeat(w.Context(), name, moves.Request{Volume: w.volume.ID, Move: id, Peer: "target-node", TargetAborted: true})
	return err
}

// wantRecorded compares what the source has recorded with the volume.
func (w *world) wantRecorded(step trap.Step, move string) {
	w.Helper()
	is, err := w.from.moves.Repeat(w.Context(), moves.State, moves.Request{Volume: w.volume.ID})
	if err != nil || !is.Recorded || is.Bytes != w.volume.Bytes || is.Move != move {
		w.Fatalf("%s: the source has %+v (%v)", step, is, err)
	}
}

// Each step of an undo finds no room, and each flush after it: the volume keeps its record.
func TestUndoFindsNoRoomAtAnyStep(t *testing.T) {
	w := newWorld(t, way{onBtrfs, onExt4, true}, sourceDriver)
	_, err := w.from.Create(t.Context(), w.volume)
	w.from.Must(err)
	w.from.Must(w.sourceCall(moves.Fence, "steps"))
	w.trap.Arm(0)
	w.from.Must(w.sourceCall(moves.Unfence, "steps"))
	steps, _ := w.trap.Disarm()
	for n, step := range steps {
		for _, and := range []string{"alone", "with-flushes"} {
			id := strconv.Itoa(n) + "-" + and
			w.from.Must(w.sourceCall(moves.Fence, id))
			w.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: func(number int, s trap.Step) bool {
				return number == n+1 || number > n && s.Verb() == "fsync" && and != "alone"
			}})
			_, failed := w.from.moves.Call(t.Context(), moves.Unfence, moves.Request{Volume: w.volume.ID, Move: id, Peer: "target-node", TargetAborted: true})
			w.trap.Disarm()
			t.Logf("%s, %s: %v", step, and, failed)
			w.from.Crash()
			w.from.AwaitServing()
			w.from.Must(w.sourceCall(moves.Unfence, id))
			w.wantRecorded(step, "")
		}
	}
}

// A volume whose record lies beside its name, since btrfs had no room to rename it, moves again. The driver is killed before each step of the
// fence, and goes on.
func TestFenceOfRecordBesideItsName(t *testing.T) {
	w := newWorld(t, way{onBtrfs, onExt4, false}, sourceDriver)
	_, err := w.from.Create(t.Context(), w.volume)
	w.from.Must(err)
	undone := 0
	// With a move of its own each time: what was undone does not fence again.
	beside := func() {
		undone++
		id := "undone-" + strconv.Itoa(undone)
		w.from.Must(w.sourceCall(moves.Fence, id))
		w.trap.ArmToFail(trap.Failure{Errno: unix.ENOSPC, Fails: func(_ int, s trap.Step) bool { return s.Verb() == "renameat" }})
		w.from.Must(w.sourceCall(moves.Unfence, id))
		w.trap.Disarm()
		if _, err := os.Stat(w.from.pool.Own("volumes", w.volume.ID+".json")); err == nil {
			t.Fatal("the record has its name")
		}
	}
	beside()
	w.trap.Arm(0)
	w.from.Must(w.sourceCall(moves.Fence, "steps"))
	steps, _ := w.trap.Disarm()
	w.from.Must(w.sourceCall(moves.Unfence, "steps"))
	for n, step := range steps {
		beside()
		id := strconv.Itoa(n)
		w.trap.Arm(n + 1)
		_, killed := w.from.moves.Call(t.Context(), moves.Fence, moves.Request{Volume: w.volume.ID, Move: id, Peer: "target-node"})
		w.trap.Disarm()
		t.Logf("killed before %s: %v", step, killed)
		w.from.Crash()
		w.from.AwaitServing()
		w.from.Must(w.sourceCall(moves.Fence, id))
		w.wantRecorded(step, id)
		w.from.Must(w.sourceCall(moves.Unfence, id))
	}
}
