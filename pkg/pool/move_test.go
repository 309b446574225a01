package pool_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A move is one of pvc-1 between two nodes, each with a pool of its own.
type move struct {
	t        *testing.T
	from, to *harness
	out, in  pool.Move
}

// moving runs a test on two nodes, of which the first has the volume pvc-1.
func moving(t *testing.T, mode volume.Mode, test func(t *testing.T, m *move)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		m := &move{t: t}
		for node, b := range map[string]**harness{"node-1": &m.from, "node-2": &m.to} {
			must.Succeed(t, os.Mkdir(filepath.Join(root, node), 0o755))
			*b = newHarness(t, filepath.Join(root, node))
			(*b).startNode(node, local)
		}
		if mode == volume.ModeBlock {
			m.from.createBlock("pvc-1", mib)
		} else {
			m.from.create("pvc-1", mib)
		}
		m.out, m.in = m.of("move-1")
		test(t, m)
	})
}

func (m *move) of(uid string) (out, in pool.Move) {
	m.t.Helper()
	move := must.Value(volume.ParseMoveID(uid))(m.t)
	out = pool.Move{Volume: id(m.t, "pvc-1"), ID: move, Peer: nodeID(m.t, "node-2")}
	in = out
	in.Peer = nodeID(m.t, "node-1")
	return out, in
}

// moveNamed is a move of a volume to or from another node.
func moveNamed(t *testing.T, name, uid string) pool.Move {
	t.Helper()
	return pool.Move{Volume: id(t, name), ID: must.Value(volume.ParseMoveID(uid))(t), Peer: nodeID(t, "node-2")}
}

func nodeID(t *testing.T, name string) volume.NodeID {
	t.Helper()
	node := must.Value(volume.ParseNodeID(name))(t)
	return node
}

func (m *move) fence() pool.MoveState {
	m.t.Helper()
	state := must.Value(m.from.Moves().Fence(m.t.Context(), pool.FenceRequest{Move: m.out}))(m.t)
	return state
}

// prepare makes the copy with the shape that the source has now.
func (m *move) prepare() pool.MoveState {
	m.t.Helper()
	state := must.Value(m.tryPrepare(m.in))(m.t)
	return state
}

func (m *move) tryPrepare(in pool.Move) (pool.MoveState, error) {
	m.t.Helper()
	source := must.Value(m.from.Moves().State(m.t.Context(), in.Volume))(m.t)
	return m.to.Moves().PrepareTarget(m.t.Context(), pool.TargetRequest{Move: in, Shape: source.Shape})
}

// handOver does all steps up to that one, and returns the fence.
func (m *move) handOver() string {
	m.t.Helper()
	m.prepare()
	fence := m.fence().Fence
	must.Succeed(m.t, m.to.Moves().Received(m.t.Context(), m.in, fence, ""))
	must.Succeed(m.t, m.from.Moves().HandOver(m.t.Context(), m.out, fence))
	return fence
}

func (m *move) publishAt(h *harness, mode volume.Mode, target string) error {
	return h.Publications().Publish(m.t.Context(), pool.Publication{ID: m.out.Volume, Target: h.Target(target), Mode: mode})
}

// restartBoth ends both drivers and starts them again: nothing is kept in memory.
func (m *move) restartBoth() {
	m.t.Helper()
	for node, b := range map[string]*harness{"node-1": m.from, "node-2": m.to} {
		must.Succeed(m.t, b.Close(m.t.Context()))
		b.startNode(node, local)
	}
}

// At each step no more than one node publishes the volume, each step can be repeated, and a driver that starts anew knows it.
func TestMove(t *testing.T) {
	for _, mode := range []volume.Mode{volume.ModeMount, volume.ModeBlock} {
		t.Run(string(mode), func(t *testing.T) {
			moving(t, mode, func(t *testing.T, m *move) {
				var fence string
				ctx := t.Context()
				for _, step := range []struct {
					name     string
					do       func() error
					from, to bool // publish the volume afterwards
				}{
					{"prepare", func() error { _, err := m.tryPrepare(m.in); return err }, true, false},
					{"fence", func() error { fence = m.fence().Fence; return nil }, false, false},
					{"received", func() error { return m.to.Moves().Received(ctx, m.in, fence, "") }, false, false},
					{"hand over", func() error { return m.from.Moves().HandOver(ctx, m.out, fence) }, false, false},
					{"confirm", func() error { return m.to.Moves().ConfirmTarget(ctx, m.in, fence) }, false, true},
					{"remove", func() error { return m.from.Moves().RemoveSource(ctx, m.out) }, false, true},
				} {
					for range 2 {
						must.Succeed(t, step.do())
						m.restartBoth()
						for b, may := range map[*harness]bool{m.from: step.from, m.to: step.to} {
							err := m.publishAt(b, mode, "a")
							if may {
								must.Succeed(t, err)
								must.Succeed(t, b.unpublish("pvc-1", "a"))
							} else if step.name != "remove" {
								wantError(t, err, volume.ErrPrecondition)
							}
						}
					}
				}
				m.from.wantVolumes()
				m.from.wantClean()
				m.to.wantVolumes("pvc-1")
				if got := m.to.Status()[0].Promised; got != mib {
					t.Errorf("the target promises %d bytes, want %d", got, mib)
				}
				m.to.delete("pvc-1")
			})
		})
	}
}

func TestFenced(t *testing.T) {
	for _, mode := range []volume.Mode{volume.ModeMount, volume.ModeBlock} {
		t.Run(string(mode), func(t *testing.T) {
			moving(t, mode, func(t *testing.T, m *move) {
				must.Succeed(t, m.publishAt(m.from, mode, "a"))
				state := m.fence()
				if !state.Used {
					t.Error("a published volume is reported as unused")
				}
				// What is published may be so again, but nowhere else.
				must.Succeed(t, m.publishAt(m.from, mode, "a"))
				err := m.publishAt(m.from, mode, "b")
				wantError(t, err, volume.ErrPrecondition)
				if !strings.Contains(err.Error(), "node-2") {
					t.Errorf("%v does not say where the volume is going", err)
				}
				wantError(t, m.from.Moves().HandOver(t.Context(), m.out, state.Fence), volume.ErrInUse)
				must.Succeed(t, m.from.unpublish("pvc-1", "a"))
				wantError(t, m.publishAt(m.from, mode, "a"), volume.ErrPrecondition)
				m.wantUntouchable(m.from, mode)
				other, _ := m.of("move-2")
				_, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: other})
				wantError(t, err, volume.ErrPrecondition)
				wantError(t, m.from.Moves().Unfence(t.Context(), other, true), volume.ErrPrecondition)
				wantError(t, m.from.Moves().RemoveSource(t.Context(), m.out), volume.ErrPrecondition)
				must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
				must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
				must.Succeed(t, m.publishAt(m.from, mode, "a"))
				must.Succeed(t, m.from.unpublish("pvc-1", "a"))
				m.from.delete("pvc-1")
			})
		})
	}
}

// wantUntouchable expects no call of CSI to change a volume that moves.
func (m *move) wantUntouchable(h *harness, mode volume.Mode) {
	m.t.Helper()
	ctx, is := m.t.Context(), m.out.Volume
	wantError(m.t, h.Delete(ctx, is), volume.ErrPrecondition)
	_, err := h.Create(ctx, pool.Request{ID: is, Mode: mode, Range: volume.Range{Required: mib}})
	wantError(m.t, err, volume.ErrPrecondition)
	_, err = h.Expand(ctx, is, h.Target("a"), mode, volume.Range{Required: 2 * mib})
	wantError(m.t, err, volume.ErrPrecondition)
	_, err = h.Snapshots().Create(ctx, pool.SnapshotRequest{ID: snapshotID(m.t, "s"), Source: is})
	wantError(m.t, err, volume.ErrPrecondition)
	_, err = h.Create(ctx, pool.Request{ID: id(m.t, "clone"), Mode: mode, Source: &pool.Source{ID: is}})
	wantError(m.t, err, volume.ErrPrecondition)
}

func TestTarget(t *testing.T) {
	for _, mode := range []volume.Mode{volume.ModeMount, volume.ModeBlock} {
		t.Run(string(mode), func(t *testing.T) {
			moving(t, mode, func(t *testing.T, m *move) {
				m.prepare()
				if got := m.to.Status()[0].Promised; got != mib {
					t.Errorf("the target promises %d bytes, want %d", got, mib)
				}
				err := m.publishAt(m.to, mode, "a")
				wantError(t, err, volume.ErrPrecondition)
				if !strings.Contains(err.Error(), "node-1") {
					t.Errorf("%v does not say where the volume comes from", err)
				}
				m.wantUntouchable(m.to, mode)
				_, other := m.of("move-2")
				_, err = m.tryPrepare(other)
				wantError(t, err, volume.ErrExists)
				wantError(t, m.to.Moves().AbortTarget(t.Context(), other, false), volume.ErrPrecondition)
				wantError(t, m.to.Moves().Received(t.Context(), other, "f", ""), volume.ErrPrecondition)
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), other, "f"), volume.ErrPrecondition)
				wantError(t, m.to.Moves().RemoveSource(t.Context(), m.in), volume.ErrPrecondition)
				// Nothing was received yet, or not as of that fence.
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, "f"), volume.ErrPrecondition)
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, ""), volume.ErrInvalid)
				must.Succeed(t, m.to.Moves().Received(t.Context(), m.in, "e", ""))
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, "f"), volume.ErrPrecondition)
				filled := must.Value(dir.Open(m.to.Path("pool", "pvc-1")))(t)
				unlock := must.Value(dir.TryLockDir(filled))(t)
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, "e"), volume.ErrInUse)
				unlock()
				must.Succeed(t, filled.Close())
				// A pass after it begins anew: the copy is not whole.
				m.prepare()
				wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, "e"), volume.ErrPrecondition)
				must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, false))
				must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, false))
				m.to.settled()
				m.to.wantVolumes()
				if got := m.to.Status()[0].Promised; got != 0 {
					t.Errorf("the target promises %d bytes, want none", got)
				}
			})
		})
	}
}

func TestTargetOfNameThatIsTaken(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.to.create("pvc-1", mib)
		_, err := m.tryPrepare(m.in)
		wantError(t, err, volume.ErrExists)
		wantError(t, m.to.Moves().AbortTarget(t.Context(), m.in, false), volume.ErrPrecondition)
		wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, "f"), volume.ErrPrecondition)
		m.to.wantVolumes("pvc-1")
	})
}

func TestTargetWithoutRoom(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		_, err := m.to.Moves().PrepareTarget(t.Context(), pool.TargetRequest{Move: m.in, Shape: volume.Shape{Mode: volume.ModeMount, Bytes: 1 << 45}})
		wantError(t, err, volume.ErrNoSpace)
		m.to.wantVolumes()
	})
}

// A source that was confirmed elsewhere must not be published again.
func TestHandedOver(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		fence := m.handOver()
		wantError(t, m.from.Moves().Unfence(t.Context(), m.out, false), volume.ErrPrecondition)
		wantError(t, m.publishAt(m.from, volume.ModeMount, "a"), volume.ErrPrecondition)
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
		wantError(t, m.to.Moves().AbortTarget(t.Context(), m.in, false), volume.ErrPrecondition)
		m.to.wantVolumes("pvc-1")
	})
	moving(t, volume.ModeMount, func(t *testing.T, m *move) { // a target that was given up comes back
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, m.handOver()))
		_, other := m.of("move-2")
		wantError(t, m.to.Moves().AbortTarget(t.Context(), other, true), volume.ErrPrecondition)
		must.Succeed(t, m.publishAt(m.to, volume.ModeMount, "a"))
		wantError(t, m.to.Moves().AbortTarget(t.Context(), m.in, true), volume.ErrInUse)
		must.Succeed(t, m.to.unpublish("pvc-1", "a"))
		must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, true))
		m.to.wantVolumes()
	})
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.handOver()
		must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, false))
		must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, true))
		must.Succeed(t, m.publishAt(m.from, volume.ModeMount, "a"))
		must.Succeed(t, m.from.unpublish("pvc-1", "a"))
	})
}

// What pods wrote between two fences is in no copy of before. Without a record a driver that starts anew does not know that the move was undone.
func TestHandOverOfEarlierFence(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.prepare()
		must.Succeed(t, os.Remove(m.from.Own("volumes", "pvc-1.json")))
		fence := m.fence().Fence
		must.Succeed(t, m.to.Moves().Received(t.Context(), m.in, fence, ""))
		must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
		m.restartBoth()
		if again := m.fence().Fence; again == fence {
			t.Errorf("two fences are called %s", fence)
		}
		wantError(t, m.from.Moves().HandOver(t.Context(), m.out, fence), volume.ErrPrecondition)
	})
}

// A mover that is made late, or was amid a pass, fences no volume whose move was undone: nothing would end that. Another move does.
func TestFenceOfUndoneMove(t *testing.T) {
	for name, fenced := range map[string]bool{"before the fence": false, "after it": true} {
		t.Run(name, func(t *testing.T) {
			moving(t, volume.ModeMount, func(t *testing.T, m *move) {
				if fenced {
					m.fence()
				}
				must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
				m.restartBoth()
				_, err := m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: m.out})
				wantError(t, err, volume.ErrPrecondition)
				must.Succeed(t, m.publishAt(m.from, volume.ModeMount, "a"), m.from.unpublish("pvc-1", "a"))
				m.out, m.in = m.of("move-2")
				must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, m.handOver()))
			})
		})
	}
}

// Nor does such a mover have a copy be made that was aborted.
func TestPrepareOfAbortedMove(t *testing.T) {
	for name, made := range map[string]bool{"made before": true, "not made yet": false} {
		t.Run(name, func(t *testing.T) {
			moving(t, volume.ModeMount, func(t *testing.T, m *move) {
				if made {
					m.prepare()
				}
				must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, false))
				_, err := m.tryPrepare(m.in)
				wantError(t, err, volume.ErrPrecondition)
				m.to.settled()
				m.to.wantVolumes()
				m.out, m.in = m.of("move-2")
				must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, m.handOver()))
			})
		})
	}
}

// A copy is whole only as the session has left it that filled it last.
func TestReceivedFromSession(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.prepare()
		fence := m.fence().Fence
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "", "filling-one", ""))
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "filling-one", "filling-two", ""))
		for _, filled := range []string{"", "filling-one"} {
			wantError(t, m.to.Moves().Received(t.Context(), m.in, fence, filled), volume.ErrPrecondition)
		}
		for range 2 {
			must.Succeed(t, m.to.Moves().Received(t.Context(), m.in, fence, "filling-two"))
		}
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "filling-two", "filling-three", ""))
		wantError(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence), volume.ErrPrecondition)
		must.Succeed(t, m.to.Moves().Received(t.Context(), m.in, fence, "filling-three"))
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
	})
}

// Holes that the copy got from its source are no space that others may take.
func TestReceivedBlockVolumeIsAllocated(t *testing.T) {
	moving(t, volume.ModeBlock, func(t *testing.T, m *move) {
		m.prepare()
		must.Succeed(t, unix.Truncate(m.to.Path("pool", "pvc-1", "disk.img"), 0))
		must.Succeed(t, unix.Truncate(m.to.Path("pool", "pvc-1", "disk.img"), mib))
		must.Succeed(t, m.to.Moves().Received(t.Context(), m.in, "f", ""))
		if got := m.to.stat("pvc-1").Blocks * 512; got < mib {
			t.Errorf("%d bytes are allocated, want %d", got, mib)
		}
	})
}

// A migration must not take the directory of a volume that moves, nor drop its fence.
func TestHandoverOfMovingVolume(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.prepare()
		m.fence()
		for _, b := range []*harness{m.from, m.to} {
			place := store.VolumePath{Directory: b.Path("pool"), Name: "pvc-1"}
			_, err := store.Handover{From: place, To: place}.Find()
			wantError(t, err, volume.ErrPrecondition)
		}
	})
}

func TestLostTarget(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.prepare()
		must.Succeed(t, os.Remove(m.to.Path("pool", "pvc-1")))
		_, err := m.tryPrepare(m.in)
		wantError(t, err, volume.ErrLost)
		wantError(t, m.to.Moves().Received(t.Context(), m.in, "f", ""), volume.ErrNotFound)
		must.Succeed(t, m.to.Moves().AbortTarget(t.Context(), m.in, false))
		_, m.in = m.of("move-2")
		m.prepare()
	})
}

// What is confirmed once more shows that the target has the volume, so that the source is removed.
func TestConfirmOfVolumeThatIsLost(t *testing.T) {
	for mode, lost := range map[volume.Mode]string{volume.ModeMount: "pvc-1", volume.ModeBlock: "pvc-1/disk.img"} {
		t.Run(string(mode), func(t *testing.T) {
			moving(t, mode, func(t *testing.T, m *move) {
				fence := m.handOver()
				must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
				must.Succeed(t, os.RemoveAll(m.to.Path("pool", lost)))
				if err := m.to.Moves().ConfirmTarget(t.Context(), m.in, fence); err == nil {
					t.Error("a volume that is lost is confirmed")
				}
			})
		})
	}
}

func TestMoveThereAndBack(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		fence := m.handOver()
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
		must.Succeed(t, m.from.Moves().RemoveSource(t.Context(), m.out))
		m.from.settled()
		m.out, m.in = m.of("move-2")
		m.from, m.to = m.to, m.from
		fence = m.handOver()
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
		must.Succeed(t, m.from.Moves().RemoveSource(t.Context(), m.out))
		must.Succeed(t, m.publishAt(m.to, volume.ModeMount, "a"))
		must.Succeed(t, m.to.unpublish("pvc-1", "a"))
	})
}

func TestSourceThatGrew(t *testing.T) {
	for _, mode := range []volume.Mode{volume.ModeMount, volume.ModeBlock} {
		t.Run(string(mode), func(t *testing.T) {
			moving(t, mode, func(t *testing.T, m *move) {
				m.prepare()
				must.Succeed(t, m.publishAt(m.from, mode, "a"))
				must.Succeed(t, must.Err(m.from.Expand(t.Context(), m.out.Volume, m.from.Target("a"), mode, volume.Range{Required: 3 * mib})))
				must.Succeed(t, m.from.unpublish("pvc-1", "a"))
				if state := m.prepare(); state.Bytes != 3*mib || state.Role != "target" {
					t.Errorf("the copy of a volume that grew is %+v", state)
				}
				if got := m.to.Status()[0].Promised; got != 3*mib {
					t.Errorf("the target promises %d bytes, want %d", got, 3*mib)
				}
			})
		})
	}
}

// A volume of the upstream driver has a record while it is fenced, and a promise where it goes.
func TestMoveWithoutRecord(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		record := m.from.Own("volumes", "pvc-1.json")
		must.Succeed(t, os.Remove(record))
		must.Succeed(t, os.WriteFile(m.from.Path("pool", "pvc-1", "data"), make([]byte, 10_000), 0o600))
		state, err := m.from.Moves().State(t.Context(), m.out.Volume)
		if err != nil || state.Recorded || state.Bytes < 10_000 || state.Bytes > mib {
			t.Errorf("without a record it is %+v (%v)", state, err)
		}
		state, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: m.out, Bytes: 5 * mib})
		if err != nil || !state.Recorded || state.Bytes != 5*mib {
			t.Errorf("it is fenced as %+v (%v)", state, err)
		}
		m.restartBoth()
		wantError(t, m.publishAt(m.from, volume.ModeMount, "a"), volume.ErrPrecondition)
		must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
		if _, err := os.Stat(record); !os.IsNotExist(err) {
			t.Errorf("the record of the fence is left: %v", err)
		}
		must.Succeed(t, m.publishAt(m.from, volume.ModeMount, "a"))
		must.Succeed(t, m.from.unpublish("pvc-1", "a"))
		for _, claim := range []int64{0, 4096} { // nothing kept it from holding more than its claim
			must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
			m.out, _ = m.of(fmt.Sprint("claim-", claim))
			state, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: m.out, Bytes: claim})
			if err != nil || state.Bytes < 10_000 || state.Bytes > mib {
				t.Errorf("with a claim of %d bytes it is fenced as %+v (%v), want what it holds", claim, state, err)
			}
		}
	})
}

// What cannot move is refused when it is fenced.
func TestUnmovable(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		_, err := m.from.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s"), Source: m.out.Volume})
		must.Succeed(t, err)
		_, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: m.out})
		wantError(t, err, volume.ErrPrecondition)
		_, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: m.out, LeaveSnapshots: true})
		must.Succeed(t, err)

		_, err = m.from.Create(t.Context(), pool.Request{ID: id(t, "csi-1"), Inline: true})
		must.Succeed(t, err)
		inline := m.out
		inline.Volume = id(t, "csi-1")
		_, err = m.from.Moves().Fence(t.Context(), pool.FenceRequest{Move: inline})
		wantError(t, err, volume.ErrInvalid)
	})
	onPools(t, `[{"name":"local","path":"pool","shared":true}]`, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		m := &move{t: t, from: h}
		out, in := m.of("move-1")
		_, err := h.Moves().Fence(t.Context(), pool.FenceRequest{Move: out})
		wantError(t, err, volume.ErrInvalid)
		in.Volume = id(t, "pvc-2")
		_, err = h.Moves().PrepareTarget(t.Context(), pool.TargetRequest{Move: in, Shape: volume.Shape{Mode: volume.ModeMount, Bytes: mib}})
		wantError(t, err, volume.ErrInvalid)
	})
}

// The copy has what the devices and the inodes of the source depend on, whatever its own pool would choose.
func TestShapeOfTarget(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		_, in := (&move{t: t}).of("move-1")
		for _, shape := range []volume.Shape{
			{Mode: volume.ModeBlock, Bytes: mib, BlockBytes: 2048},
			{Mode: volume.ModeMount, Bytes: mib, BytesPerInode: 4096},
		} {
			state, err := h.Moves().PrepareTarget(t.Context(), pool.TargetRequest{Move: in, Shape: shape})
			if err != nil || state.Shape != shape {
				t.Errorf("a copy of %+v is %+v (%v)", shape, state, err)
			}
			must.Succeed(t, h.Moves().Received(t.Context(), in, "f", ""))
			must.Succeed(t, h.Moves().ConfirmTarget(t.Context(), in, "f"))
			if shape.Mode == volume.ModeBlock {
				must.Succeed(t, h.publishBlock("pvc-1", "a"))
				device := h.attached(1)[0]
				if device.BlockBytes != shape.BlockBytes {
					t.Errorf("the device has blocks of %d bytes, want %d", device.BlockBytes, shape.BlockBytes)
				}
				must.Succeed(t, h.unpublish("pvc-1", "a"))
			}
			h.delete("pvc-1")
			h.settled()
		}
	})
}

// A source that says what no volume has gets no copy, and leaves nothing: what cannot be read could not be aborted either.
func TestShapeThatNoVolumeHas(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		for n, shape := range []volume.Shape{
			{Mode: volume.ModeBlock, Bytes: mib},
			{Mode: volume.ModeBlock, Bytes: mib, BlockBytes: 3},
			{Mode: volume.ModeMount, Bytes: mib, BlockBytes: 512},
			{Mode: volume.ModeMount, Bytes: mib, BytesPerInode: -1},
			{Mode: volume.ModeMount, Bytes: mib, BytesPerInode: 1 << 40},
			{Mode: volume.ModeMount, Bytes: -1},
			{Mode: volume.ModeMount, Bytes: math.MaxInt64},
		} {
			in := moveNamed(t, "pvc-1", fmt.Sprint("move-", n))
			if _, err := h.Moves().PrepareTarget(t.Context(), pool.TargetRequest{Move: in, Shape: shape}); err == nil {
				t.Errorf("a copy of %+v was made", shape)
			}
			must.Succeed(t, h.Moves().AbortTarget(t.Context(), in, false))
			h.settled()
		}
	})
}

func TestInspectedMove(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		want := func(out, in *inspect.Move) {
			t.Helper()
			for b, want := range map[*harness]*inspect.Move{m.from: out, m.to: in} {
				report := inspect.Report{Pools: b.inspect(local)}
				if diff := cmp.Diff(want, report.Pools[0].Volumes[0].Move); diff != "" {
					t.Errorf("inspect reports another move (-want +got):\n%s", diff)
				}
				var table strings.Builder
				must.Succeed(t, report.WriteTable(&table, time.Now()))
				for move, shown := range map[*inspect.Move]string{out: "mount,to:node-2", in: "mount,from:node-1"} {
					if has := strings.Contains(table.String(), shown); has != (want != nil && want == move) {
						t.Errorf("%q is shown: %v\n%s", shown, has, &table)
					}
				}
			}
		}
		m.prepare()
		want(nil, &inspect.Move{ID: "move-1", Role: "target", Peer: "node-1"})
		fence := m.handOver()
		want(&inspect.Move{ID: "move-1", Role: "source", Peer: "node-2", HandedOver: true}, &inspect.Move{ID: "move-1", Role: "target", Peer: "node-1", Whole: true})
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
		want(&inspect.Move{ID: "move-1", Role: "source", Peer: "node-2", HandedOver: true}, nil)
	})
}

// An earlier driver must take both sides of a move for unreadable, which it neither publishes nor changes: it knows version 1.
func TestVersionOfMovingRecord(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		version := func(h *harness) int {
			t.Helper()
			var record struct{ Version int }
			data := must.Value(os.ReadFile(h.Own("volumes", "pvc-1.json")))(t)
			must.Succeed(t, json.Unmarshal(data, &record))
			return record.Version
		}
		want := func(when string, from, to int) {
			t.Helper()
			if version(m.from) != from || version(m.to) != to {
				t.Errorf("%s: the records have the versions %d and %d, want %d and %d", when, version(m.from), version(m.to), from, to)
			}
		}
		m.prepare()
		want("prepared", 1, 2)
		// A mover that knows no bases would fill the copy and leave the base as it was: its driver, which knows version 2, must not let it.
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "", "one", "all"))
		want("based", 1, 3)
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "one", "", ""))
		want("filled", 1, 2)
		fence := m.handOver()
		want("handed over", 2, 2)
		must.Succeed(t, m.to.Moves().ConfirmTarget(t.Context(), m.in, fence))
		want("confirmed", 2, 1)
	})
}

// In a record of version 2 a base is not relied on: a mover that knew none may have filled the copy since.
func TestBaseOfEarlierVersion(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.prepare()
		must.Succeed(t, m.to.Moves().Based(t.Context(), m.in, "", "one", "all"))
		must.Succeed(t, m.to.Close(t.Context()))
		path := m.to.Own("volumes", "pvc-1.json")
		data := must.Value(os.ReadFile(path))(t)
		earlier := bytes.Replace(data, []byte(`"version":3`), []byte(`"version":2`), 1)
		if bytes.Equal(data, earlier) {
			t.Fatalf("the record is %s", data)
		}
		must.Succeed(t, os.WriteFile(path, earlier, 0o600))
		m.to.startNode("node-2", local)
		if state, err := m.to.Moves().State(t.Context(), m.in.Volume); err != nil || state.Base != "" || state.Verify != "" || state.Role != "target" {
			t.Errorf("the copy is %+v (%v)", state, err)
		}
	})
}
