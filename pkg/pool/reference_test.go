package pool_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// referencesOf are the names of the references that a pool has on disk.
func referencesOf(t *testing.T, root string) (names []string) {
	t.Helper()
	all := must.Value(filepath.Glob(filepath.Join(root, "pool", "*", "snapshots", "*")))(t)
	for _, path := range all {
		names = append(names, filepath.Base(path))
	}
	return names
}

func TestReference(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512*mib)
			synctest.Test(t, func(t *testing.T) { testReference(t, root) })
		})
	}
}

func testReference(t *testing.T, root string) {
	h := newHarness(t, root)
	h.start(local)
	h.create("pvc-1", mib)
	ctx, of, m := t.Context(), id(t, "pvc-1"), moveNamed(t, "pvc-1", "move-1")
	want := func(when string, references ...string) {
		t.Helper()
		got := referencesOf(t, root)
		if len(got) != len(references) {
			t.Errorf("%s there are %q, want %q", when, got, references)
		}
		some, _ := h.Snapshots().List(ctx, volume.ID{}, volume.ID{}, 10)
		if len(some) > 0 {
			t.Errorf("%s a reference is reported as a snapshot: %+v", when, some)
		}
	}
	must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), []byte("first"), 0o600))
	for range 2 {
		must.Succeed(t, h.Moves().Reference(ctx, m, "a", ""))
	}
	want("after the first", "~_a.pvc-1")
	must.Succeed(t, h.Moves().Reference(ctx, m, "b", "a"))
	must.Succeed(t, h.Moves().Reference(ctx, m, "c", "b"))
	want("after the third", "~_b.pvc-1", "~_c.pvc-1")

	_, err := h.Moves().Fence(ctx, pool.FenceRequest{Move: m})
	must.Succeed(t, err)
	if err := h.Moves().Reference(ctx, m, "d", "c"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a reference of a fenced volume: %v", err)
	}
	if err := h.Delete(ctx, of); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a volume is deleted in the fence: %v", err)
	}
	want("after a deletion that was refused", "~_b.pvc-1", "~_c.pvc-1")
	must.Succeed(t, h.Close(ctx))
	h.start(local)
	want("after a restart in the fence", "~_b.pvc-1", "~_c.pvc-1")
	for range 2 {
		must.Succeed(t, h.Moves().Unfence(ctx, m, false))
	}
	want("after the move was undone")
	for range 2 {
		if err := h.Moves().Reference(ctx, m, "late", ""); !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("a reference for a move that was undone: %v", err)
		}
		must.Succeed(t, h.Close(ctx))
		h.start(local)
	}
	want("after a mover asked that goes on")

	m = moveNamed(t, "pvc-1", "move-2")
	must.Succeed(t, h.Moves().Reference(ctx, m, "e", ""))
	must.Succeed(t, h.Moves().Unfence(ctx, m, false))
	want("after a move was undone before its fence")
	m = moveNamed(t, "pvc-1", "move-3")
	must.Succeed(t, h.Moves().Reference(ctx, m, "f", ""))
	must.Succeed(t, h.Close(ctx))
	h.start(local)
	want("after a restart without a fence")
	must.Succeed(t, h.Moves().Reference(ctx, m, "g", ""))
	must.Succeed(t, h.Delete(ctx, of))
	want("after the volume was deleted")
}

func TestReferenceWithoutSharedBlocks(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(local)
		h.create("pvc-1", mib)
		if err := h.Moves().Reference(t.Context(), moveNamed(t, "pvc-1", "move-1"), "a", ""); !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("%v, want a precondition that fails", err)
		}
	})
}

// A reference that is being made is not there yet, and would be left if the others were removed meanwhile.
func TestReferenceIsBeingMade(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		all, err := m.out.Volume.Reference("0")
		must.Succeed(t, err)
		made, err := m.from.Lock(all) // as Reference does
		must.Succeed(t, err)
		for what, err := range map[string]error{
			"another is made":    m.from.Moves().Reference(t.Context(), m.out, "a", ""),
			"the move is undone": m.from.Moves().Unfence(t.Context(), m.out, false),
		} {
			if !errors.Is(err, volume.ErrBusy) {
				t.Errorf("%s meanwhile: %v", what, err)
			}
		}
		made()
		must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, false))
	})
}

// A volume whose id is too long for a reference is undone and deleted without one.
func TestReferenceOfLongID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.start(local)
		name := strings.Repeat("a", volume.MaxID)
		h.create(name, mib)
		if err := h.Moves().Reference(t.Context(), moveNamed(t, name, "move-1"), "a", ""); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("a reference with a longer id: %v", err)
		}
		must.Succeed(t, h.Delete(t.Context(), id(t, name)))
	})
}

// Only the session that fills a copy says what it equals: not one whose copy is gone, and not one that another has replaced.
func TestBased(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		ctx := t.Context()
		m.prepare()
		must.Succeed(t, m.to.Moves().Based(ctx, m.in, "", "filling-1", ""))
		for range 2 {
			must.Succeed(t, m.to.Moves().Based(ctx, m.in, "filling-1", "one", "all"))
		}
		if state, err := m.to.Moves().State(ctx, m.in.Volume); err != nil || state.Base != "one" || state.Verify != "all" {
			t.Errorf("the copy is %+v (%v)", state, err)
		}
		if err := m.to.Moves().Based(ctx, m.in, "one", "", "all"); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("a copy that was compared with nothing: %v", err)
		}
		must.Succeed(t, m.to.Moves().Based(ctx, m.in, "one", "filling-2", ""))
		late := func(when, was string) {
			t.Helper()
			if err := m.to.Moves().Based(ctx, m.in, was, "two", "all"); !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("%s: %v", when, err)
			}
			if state, err := m.to.Moves().State(ctx, m.in.Volume); err != nil || state.Base == "two" {
				t.Errorf("%s the copy equals %q (%v)", when, state.Base, err)
			}
		}
		late("after another session has begun", "filling-1")
		must.Succeed(t, m.to.Moves().AbortTarget(ctx, m.in, false))
		m.restartBoth()
		m.prepare()
		late("after the copy was made anew", "filling-2")
	})
}
