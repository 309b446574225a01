package pool_test

import (
	"errors"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// elsewhere are pools without the one that a volume of a move is in.
const elsewhere = `[{"name":"other","path":"other"}]`

// A side of a move whose pool is not there has not ended: when it is there again, no other call would undo its fence, or remove it.
func TestEndOfMoveInPoolOutOfUseIsRefused(t *testing.T) {
	for name, end := range map[string]struct {
		of func(*move) *harness
		do func(*move) error
	}{
		"unfence": {func(m *move) *harness { return m.from }, func(m *move) error { return m.from.Moves().Unfence(m.t.Context(), m.out, true) }},
		"remove":  {func(m *move) *harness { return m.from }, func(m *move) error { return m.from.Moves().RemoveSource(m.t.Context(), m.out) }},
		"abort":   {func(m *move) *harness { return m.to }, func(m *move) error { return m.to.Moves().AbortTarget(m.t.Context(), m.in, false) }},
	} {
		t.Run(name, func(t *testing.T) {
			moving(t, volume.ModeMount, func(t *testing.T, m *move) {
				b := end.of(m)
				b.memory = t.TempDir()
				b.restart(local)
				m.handOver()
				b.restart(elsewhere)
				_, err := b.Moves().State(t.Context(), m.out.Volume)
				for _, err := range []error{err, end.do(m)} {
					if !errors.Is(err, volume.ErrPrecondition) {
						t.Errorf("without the pool: %v, want %v", err, volume.ErrPrecondition)
					}
				}
				other := m.out
				other.Volume = id(t, "pvc-2")
				_, err = b.Moves().State(t.Context(), other.Volume)
				must.ErrorIs(t, err, volume.ErrNotFound)
				must.Succeed(t, b.Moves().RemoveSource(t.Context(), other))
				b.restart(local)
				must.Succeed(t, end.do(m))
			})
		})
	}
}

// A copy that is made anew beside one of a pool that is not there now would be hidden by it, with what pods wrote.
func TestPrepareBesidePoolOutOfUseIsRefused(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.to.memory = t.TempDir()
		m.to.restart(local)
		m.prepare()
		m.to.restart(elsewhere)
		_, err := m.tryPrepare(m.in)
		must.ErrorIs(t, err, volume.ErrPrecondition)
		m.to.restart(local)
		m.prepare()
	})
}
