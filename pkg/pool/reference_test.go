package pool_test

import (
	"errors"
	"os"
	"path/filepath"
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
	all, err := filepath.Glob(filepath.Join(root, "pool", "*", "snapshots", "*"))
	must.Succeed(t, err)
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
	b := newBench(t, root)
	b.start(local)
	b.create("pvc-1", mib)
	ctx, of := t.Context(), id(t, "pvc-1")
	want := func(when string, references ...string) {
		t.Helper()
		got := referencesOf(t, root)
		if len(got) != len(references) {
			t.Errorf("%s there are %q, want %q", when, got, references)
		}
		some, _ := b.Snapshots(ctx, volume.ID{}, volume.ID{}, 10)
		if len(some) > 0 {
			t.Errorf("%s a reference is reported as a snapshot: %+v", when, some)
		}
	}
	must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", "data"), []byte("first"), 0o600))
	for range 2 {
		must.Succeed(t, b.Reference(ctx, of, "a", ""))
	}
	want("after the first", "~_a.pvc-1")
	must.Succeed(t, b.Reference(ctx, of, "b", "a"))
	must.Succeed(t, b.Reference(ctx, of, "c", "b"))
	want("after the third", "~_b.pvc-1", "~_c.pvc-1")

	move, err := volume.ParseMoveID("move-1")
	must.Succeed(t, err)
	m := pool.Move{Volume: of, ID: move, Peer: nodeID(t, "node-2")}
	_, err = b.Fence(ctx, pool.FenceRequest{Move: m})
	must.Succeed(t, err)
	if err := b.Reference(ctx, of, "d", "c"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a reference of a fenced volume: %v", err)
	}
	must.Succeed(t, b.Close(ctx))
	b.start(local)
	want("after a restart in the fence", "~_c.pvc-1")
	for range 2 {
		must.Succeed(t, b.Unfence(ctx, m, false))
	}
	want("after the move was undone")

	must.Succeed(t, b.Reference(ctx, of, "e", ""))
	must.Succeed(t, b.Unfence(ctx, m, false))
	want("after a move was undone before its fence")
	must.Succeed(t, b.Reference(ctx, of, "f", ""))
	must.Succeed(t, b.Close(ctx))
	b.start(local)
	want("after a restart without a fence")
	must.Succeed(t, b.Reference(ctx, of, "g", ""))
	must.Succeed(t, b.Delete(ctx, of))
	want("after the volume was deleted")
}

func TestReferenceWithoutSharedBlocks(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.start(local)
		b.create("pvc-1", mib)
		if err := b.Reference(t.Context(), id(t, "pvc-1"), "a", ""); !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("%v, want a precondition that fails", err)
		}
	})
}
