package moves

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A mob kills processes at random moments.
type mob struct {
	*rand.Rand
	left int // kills, in this move
	all  int
	next time.Time
}

// mostWait is how long a mob waits at most between two kills: about as long as a move takes.
const mostWait = 500 * time.Millisecond

func (m *mob) rest() { m.next = time.Now().Add(time.Duration(m.Int64N(int64(mostWait)))) }

// strike kills a driver or one of the movers, if it is time to.
func (w *world) strike(movers ...*moverProcess) {
	w.Helper()
	if w.mob == nil || w.mob.left == 0 || time.Now().Before(w.mob.next) {
		return
	}
	w.mob.rest()
	w.mob.left--
	w.mob.all++
	switch victim := w.mob.IntN(2 + len(movers)); victim {
	case 0:
		must.Succeed(w, w.from.Process.Signal(os.Kill))
	case 1:
		must.Succeed(w, w.to.Process.Signal(os.Kill))
	default:
		movers[victim-2].kill()
	}
}

// A hundred moves of a volume that is written to, with drivers and movers killed several times in each, at random moments.
func TestHundredMovesWithRandomKills(t *testing.T) {
	count, all := 50, ways()
	if testing.Short() {
		count, all = 2, all[:1]
	}
	for _, way := range all {
		t.Run(way.String(), func(t *testing.T) {
			w := newWorld(t, way, none)
			seed := rand.Uint64()
			t.Logf("the seed is %d", seed)
			w.mob = &mob{Rand: rand.New(rand.NewPCG(seed, 0))}
			for n := range count {
				w.mob.left = 1 + w.mob.IntN(6)
				w.mob.rest()
				w.begin()
				w.move()
				w.mob.left = 0
				w.end()
				if t.Failed() {
					t.Fatalf("in move %d", n)
				}
			}
			if w.mob.all < count {
				t.Errorf("%d kills in %d moves", w.mob.all, count)
			}
			t.Logf("%d kills in %d moves", w.mob.all, count)
		})
	}
}

// The filesystem of the target is filled by others after the room was promised. The source is as it was, and the move goes on when there is
// room again.
func TestTargetFillsUp(t *testing.T) {
	w := newWorld(t, ways()[0], none)
	w.begin()
	state, err := w.from.moves.Call(t.Context(), moves.State, moves.Request{Volume: w.volume.ID})
	w.from.Must(err)
	_, err = w.to.moves.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: w.volume.ID, Move: "move-1", Peer: w.to.peer, Shape: state.Shape})
	w.to.Must(err)
	filler := filepath.Join(filepath.Dir(w.to.pool.Path), "filler")
	must.Succeed(t, fillUp(filler))
	in := w.start("move-in", "copy")
	if last := w.once("move-out", "copy"); last.Event != "failed" || !in.running() {
		t.Errorf("it ends with %+v", last)
	}
	w.from.Must(w.from.Publish(t.Context(), w.volume, "another"))
	w.unpublish(w.from, "another")
	in.kill()
	must.Succeed(t, os.Remove(filler))
	w.move()
	w.end()
}

// fillUp makes a file of all the space that a filesystem has.
func fillUp(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	end := int64(0)
	for step := int64(256 * mib); step >= 4096; {
		if unix.Fallocate(int(f.Fd()), 0, end, step) == nil {
			end += step
		} else {
			step /= 2
		}
	}
	return f.Close()
}

// A volume that has the name on the target stays as it is, and so does the source.
func TestNameIsTaken(t *testing.T) {
	w := newWorld(t, ways()[0], none)
	w.begin()
	other := drivertest.Volume{ID: w.volume.ID, Bytes: mib}
	_, err := w.to.Create(t.Context(), other)
	w.to.Must(err)
	in := w.start("move-in", "copy")
	if last := w.once("move-out", "copy"); last.Event != "failed" {
		t.Errorf("it ends with %+v", last)
	}
	in.kill()
	w.run("move-in", "abort")
	w.check(w.to, []drivertest.Kept{{Volume: other}})
	w.from.Must(w.from.Publish(t.Context(), w.volume, "another"))
	w.unpublish(w.from, "another")
	w.to.Must(w.to.Delete(t.Context(), other.ID))
	w.to.pool.AwaitErased()
	w.move()
	w.end()
}
