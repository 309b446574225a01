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

// ways are, where this kernel has project quotas, from one filesystem with them to another.
func ways() []way {
	if testenv.Guest() {
		xfs := place{"xfs", "required", func(t *testing.T) string { return testenv.LoopFS(t, "xfs", 512*mib, "prjquota") }, true}
		ext4 := place{"ext4", "required", func(t *testing.T) string {
			return testenv.MountMade(t, "ext4", 512*mib, []string{"-O", "quota,project", "-E", "quotatype=prjquota"}, "prjquota")
		}, false}
		return []way{{xfs, ext4, false}, {ext4, xfs, true}, {ext4, xfs, false}}
	}
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
	all := ways()
	if !testenv.Guest() {
		all = append(all, way{onXFS, onExt4, true}, way{onBtrfs, onBtrfs, false})
	}
	for _, way := range all {
		t.Run(way.String(), func(t *testing.T) {
			h := newHarness(t, way, none)
			for range 2 {
				h.begin()
				size := h.size(h.from, "pod")
				h.move()
				h.to.Must(h.to.Publish(t.Context(), h.volume, "another"))
				if got := h.size(h.to, "another"); got != size && (way.block || way.from.enforcement == way.to.enforcement) {
					t.Errorf("it has %d bytes, and had %d", got, size)
				}
				h.unpublish(h.to, "another")
				h.end()
				if h.last.Based != way.from.shares {
					t.Errorf("the last pass is %+v: whether it has a base is up to the filesystem of the source\n%s", h.last, h.said)
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
				h := newHarness(t, way, victim)
				h.begin()
				h.trap.Arm(0)
				h.move()
				steps, _ := h.trap.Disarm()
				h.end()
				if len(steps) < 5 {
					t.Fatalf("the %s has only the steps %q", victim, steps)
				}
				// A move has a few steps more or less each time, and many more on a busy machine: writes of the pod, and of the trash.
				every, kills, fewest := 1, 0, len(steps)
				if testing.Short() {
					every = 1 + len(steps)/3
				}
				for n := 1; n <= len(steps); n += every {
					h.begin()
					h.trap.Arm(n)
					h.move()
					if all, killed := h.trap.Disarm(); killed {
						kills++
					} else {
						fewest = min(fewest, len(all))
					}
					h.end()
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
			h := newHarness(t, way, none)
			h.begin()
			out, in := h.start("move-out", "copy"), h.start("move-in", "copy")
			out.await("waiting")
			// The pod still has the volume, and another cannot get it. Neither driver gives it away.
			h.wantRefused(h.from)
			h.wantRefused(h.to)
			for _, n := range []*node{h.from, h.to} {
				err := drivertest.Repeat(t.Context(), func() error { return n.Delete(t.Context(), h.volume.ID) })
				n.WantCode("delete a volume that moves", err, codes.FailedPrecondition)
			}
			out.kill()
			in.kill()
			h.run("move-out", "undo")
			h.run("move-in", "abort")
			h.look()
			h.stopWriter()
			h.wantContent(h.from)
			h.check(h.to, nil)
			h.check(h.from, []drivertest.Kept{{Volume: h.volume}})
			h.from.Must(h.from.Delete(t.Context(), h.volume.ID))
			h.from.pool.AwaitErased()
			h.check(h.from, nil)
		})
	}
}

// The claim grows while the volume is copied: the copy grows with it.
func TestGrowthMeanwhile(t *testing.T) {
	for _, way := range ways() {
		t.Run(way.String(), func(t *testing.T) {
			h := newHarness(t, way, none)
			h.begin()
			grown := h.volume
			grown.Bytes += 16 * mib
			// The target is there first, so that the copy has the earlier size.
			state, err := h.from.moves.Call(t.Context(), moves.State, moves.Request{Volume: h.volume.ID})
			h.from.Must(err)
			_, err = h.to.moves.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: h.volume.ID, Move: "move-1", Peer: h.to.peer, Shape: state.Shape})
			h.to.Must(err)
			_, err = h.from.Expand(t.Context(), grown, "pod")
			h.from.Must(err)
			h.volume = grown
			h.from.pool.Largest, h.to.pool.Largest = grown.Bytes, grown.Bytes
			h.move()
			h.end()
		})
	}
}

// One of two moves of a volume has it; the other changes nothing.
func TestTwoMovesOfOneVolume(t *testing.T) {
	h := newHarness(t, ways()[0], none)
	h.begin()
	out, in := h.start("move-out", "copy"), h.start("move-in", "copy")
	out.await("waiting")
	// Movers ask their drivers meanwhile.
	_, err := h.from.moves.Repeat(t.Context(), moves.Fence, moves.Request{Volume: h.volume.ID, Move: "other", Peer: h.from.peer})
	h.from.WantCode("fence for another move", err, codes.FailedPrecondition)
	for n, call := range map[*node]string{h.from: moves.Unfence, h.to: moves.AbortTarget} {
		_, err := n.moves.Repeat(t.Context(), call, moves.Request{Volume: h.volume.ID, Move: "other", Peer: n.peer, TargetAborted: true})
		n.WantCode(call+" by another move", err, codes.FailedPrecondition)
	}
	out.kill()
	in.kill()
	h.move()
	h.end()
}

// A volume without a limit may hold more than it is promised. Where sizes are enforced that is refused, before the fence, in words that say
// what to do.
func TestVolumeAboveItsSize(t *testing.T) {
	h := newHarness(t, ways()[0].reverse(), none)
	h.begin()
	h.from.Must(os.WriteFile(filepath.Join(h.from.Target("pod"), "large"), bytes.Repeat([]byte("x"), int(h.volume.Bytes)), 0o600))
	in := h.start("move-in", "copy")
	last := h.once("move-out", "copy")
	if last.Event != "failed" || !strings.Contains(last.Error, "holds more than it is promised") {
		t.Errorf("it ends with %+v", last)
	}
	in.kill()
	h.from.Must(h.from.Publish(t.Context(), h.volume, "another"))
	h.unpublish(h.from, "another")
	h.abort()
	h.from.Must(os.Remove(filepath.Join(h.from.Target("pod"), "large")))
	h.move()
	h.end()
}

// abort removes the copy of a move that goes on, as a user may by hand: the driver does not take part in one that it was told to abort.
func (h *harness) abort() {
	h.Helper()
	h.run("move-in", "abort")
	must.Succeed(h, h.to.Process.Stop(), h.to.Process.Restart(h.Context()))
	h.to.AwaitServing()
}

// A copy that the target loses after the hand-over, and before it is confirmed, is made again from the source, which has everything.
func TestCopyIsLostAfterHandOver(t *testing.T) {
	h := newHarness(t, ways()[0], none)
	h.begin()
	copyAll := func() (fence string) {
		out, in := h.start("move-out", "copy"), h.start("move-in", "copy")
		out.await("waiting")
		h.stopWriter()
		fence = out.await("handed-over").Fence
		in.await("ended")
		return fence
	}
	fence := copyAll()
	h.abort()
	if last := h.once("move-in", "confirm", "--fence="+fence); last.Event != "failed" {
		t.Errorf("a copy that is gone is confirmed: %+v", last)
	}
	h.wantRefused(h.from)
	fence = copyAll()
	h.run("move-in", "confirm", "--fence="+fence)
	h.run("move-out", "remove")
	h.end()
}
