// Package moves tests that a volume moves between nodes whole: two drivers on two filesystems, and the movers of both. Any of the
// four processes is killed before each system call by which it changes anything, and run again, as kubelet does. At every look at
// most one node publishes the volume, and what the pod has written and synced is in the copy that can be written to.
package moves

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

func TestMain(m *testing.M) {
	trap.Launch()
	testenv.Main(m)
}

const mib = 1 << 20

// A place is a kind of filesystem.
type place struct {
	name        string
	enforcement string
	mount       func(t *testing.T) string
	shares      bool // blocks
}

var (
	onBtrfs = place{"btrfs", "required", func(t *testing.T) string { return testenv.CountingBtrfs(t, 512*mib) }, true}
	onExt4  = place{"ext4", "", func(t *testing.T) string { return testenv.LoopFS(t, "ext4", 512*mib) }, false}
	onXFS   = place{"xfs", "", func(t *testing.T) string { return testenv.LoopFS(t, "xfs", 512*mib) }, true}
)

// A way is from one filesystem to another.
type way struct {
	from, to place
	block    bool
}

func ways() []way {
	return []way{
		{onBtrfs, onExt4, false},
		{onExt4, onBtrfs, true},
	}
}

func (w way) reverse() way { return way{w.to, w.from, w.block} }

func (w way) String() string {
	kind := "directory"
	if w.block {
		kind = "block"
	}
	return fmt.Sprintf("%s from %s to %s", kind, w.from.name, w.to.name)
}

func TestMove(t *testing.T) {
	for _, way := range append(ways(), way{onXFS, onExt4, true}, way{onBtrfs, onBtrfs, false}) {
		t.Run(way.String(), func(t *testing.T) {
			w := newWorld(t, way, none)
			for range 2 {
				w.begin()
				size := w.size(w.from, "pod")
				w.move()
				w.to.Must(w.to.Publish(t.Context(), w.volume, "another"))
				if got := w.size(w.to, "another"); got != size && (way.block || way.from.enforcement == way.to.enforcement) {
					t.Errorf("it has %d bytes, and had %d", got, size)
				}
				w.unpublish(w.to, "another")
				w.end()
				if w.last.Based != way.from.shares {
					t.Errorf("the last pass is %+v: whether it has a base is up to the filesystem of the source\n%s", w.last, w.said)
				}
			}
		})
	}
}

// Any process is killed at each of its steps.
func TestKillAtEveryStep(t *testing.T) {
	for _, way := range ways() {
		for victim := sourceDriver; victim <= targetMover; victim++ {
			t.Run(way.String()+"/"+victim.String(), func(t *testing.T) {
				w := newWorld(t, way, victim)
				w.begin()
				w.trap.Arm(0)
				w.move()
				steps, _ := w.trap.Disarm()
				w.end()
				if len(steps) < 5 {
					t.Fatalf("the %s has only the steps %q", victim, steps)
				}
				// A move has a few steps more or less each time, and many more on a busy machine: writes of the pod, and of the trash.
				every, kills, fewest := 1, 0, len(steps)
				if testing.Short() {
					every = 1 + len(steps)/3
				}
				for n := 1; n <= len(steps); n += every {
					w.begin()
					w.trap.Arm(n)
					w.move()
					if all, killed := w.trap.Disarm(); killed {
						kills++
					} else {
						fewest = min(fewest, len(all))
					}
					w.end()
					if t.Failed() {
						t.Fatalf("after a kill before step %d of %d, %s", n, len(steps), steps[n-1])
					}
				}
				if kills*every*2 < fewest {
					t.Errorf("%d kills in %d steps", kills, fewest)
				}
				t.Logf("%d kills in %d to %d steps", kills, fewest, len(steps))
			})
		}
	}
}

// A move that is undone leaves the source as it was, and nothing on the target.
func TestUndo(t *testing.T) {
	for _, way := range ways() {
		t.Run(way.String(), func(t *testing.T) {
			w := newWorld(t, way, none)
			w.begin()
			out, in := w.start("move-out", "copy"), w.start("move-in", "copy")
			out.await("waiting")
			// The pod still has the volume, and another cannot get it. Neither driver gives it away.
			w.wantRefused(w.from)
			w.wantRefused(w.to)
			for _, n := range []*node{w.from, w.to} {
				err := drivertest.Repeat(t.Context(), func() error { return n.Delete(t.Context(), w.volume.ID) })
				n.WantCode("delete a volume that moves", err, codes.FailedPrecondition)
			}
			out.kill()
			in.kill()
			w.run("move-out", "undo")
			w.run("move-in", "abort")
			w.look()
			w.stopWriter()
			w.wantContent(w.from)
			w.check(w.to, nil)
			w.check(w.from, []drivertest.Kept{{Volume: w.volume}})
			w.from.Must(w.from.Delete(t.Context(), w.volume.ID))
			w.from.pool.AwaitErased()
			w.check(w.from, nil)
		})
	}
}

// The claim grows while the volume is copied: the copy grows with it.
func TestGrowthMeanwhile(t *testing.T) {
	for _, way := range ways() {
		t.Run(way.String(), func(t *testing.T) {
			w := newWorld(t, way, none)
			w.begin()
			grown := w.volume
			grown.Bytes += 16 * mib
			// The target is there first, so that the copy has the earlier size.
			state, err := w.from.moves.Call(t.Context(), moves.State, moves.Request{Volume: w.volume.ID})
			w.from.Must(err)
			_, err = w.to.moves.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: w.volume.ID, Move: "move-1", Peer: w.to.peer, Shape: state.Shape})
			w.to.Must(err)
			_, err = w.from.Expand(t.Context(), grown, "pod")
			w.from.Must(err)
			w.volume = grown
			w.from.pool.Largest, w.to.pool.Largest = grown.Bytes, grown.Bytes
			w.move()
			w.end()
		})
	}
}

// One of two moves of a volume has it; the other changes nothing.
func TestTwoMovesOfOneVolume(t *testing.T) {
	w := newWorld(t, ways()[0], none)
	w.begin()
	out, in := w.start("move-out", "copy"), w.start("move-in", "copy")
	out.await("waiting")
	// Movers ask their drivers meanwhile.
	_, err := w.from.moves.Repeat(t.Context(), moves.Fence, moves.Request{Volume: w.volume.ID, Move: "other", Peer: w.from.peer})
	w.from.WantCode("fence for another move", err, codes.FailedPrecondition)
	for n, call := range map[*node]string{w.from: moves.Unfence, w.to: moves.AbortTarget} {
		_, err := n.moves.Repeat(t.Context(), call, moves.Request{Volume: w.volume.ID, Move: "other", Peer: n.peer, TargetAborted: true})
		n.WantCode(call+" by another move", err, codes.FailedPrecondition)
	}
	out.kill()
	in.kill()
	w.move()
	w.end()
}

// A volume without a limit may hold more than it is promised. Where sizes are enforced that is refused, before the fence, in words that say
// what to do.
func TestVolumeAboveItsSize(t *testing.T) {
	w := newWorld(t, ways()[0].reverse(), none)
	w.begin()
	w.from.Must(os.WriteFile(filepath.Join(w.from.Target("pod"), "large"), bytes.Repeat([]byte("x"), int(w.volume.Bytes)), 0o600))
	in := w.start("move-in", "copy")
	last := w.once("move-out", "copy")
	if last.Event != "failed" || !strings.Contains(last.Error, "holds more than it is promised") {
		t.Errorf("it ends with %+v", last)
	}
	in.kill()
	w.from.Must(w.from.Publish(t.Context(), w.volume, "another"))
	w.unpublish(w.from, "another")
	w.abort()
	w.from.Must(os.Remove(filepath.Join(w.from.Target("pod"), "large")))
	w.move()
	w.end()
}

// abort removes the copy of a move that goes on, as a user may by hand: the driver does not take part in one that it was told to abort.
func (w *world) abort() {
	w.Helper()
	w.run("move-in", "abort")
	must.Succeed(w, w.to.Process.Stop(), w.to.Process.Restart(w.Context()))
	w.to.AwaitServing()
}

// A copy that the target loses after the hand-over, and before it is confirmed, is made again from the source, which has everything.
func TestCopyIsLostAfterHandOver(t *testing.T) {
	w := newWorld(t, ways()[0], none)
	w.begin()
	copyAll := func() (fence string) {
		out, in := w.start("move-out", "copy"), w.start("move-in", "copy")
		out.await("waiting")
		w.stopWriter()
		fence = out.await("handed-over").Fence
		in.await("ended")
		return fence
	}
	fence := copyAll()
	w.abort()
	if last := w.once("move-in", "confirm", "--fence="+fence); last.Event != "failed" {
		t.Errorf("a copy that is gone is confirmed: %+v", last)
	}
	w.wantRefused(w.from)
	fence = copyAll()
	w.run("move-in", "confirm", "--fence="+fence)
	w.run("move-out", "remove")
	w.end()
}
