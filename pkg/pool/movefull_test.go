package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// fillUp has others take all of the filesystem that a directory is on: no file, directory or record can be made. Of the trees of btrfs nothing
// is taken: see fillTrees.
func fillUp(t *testing.T, in, kind string) {
	t.Helper()
	file := must.Value(os.OpenFile(filepath.Join(in, "file"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600))(t)
	for _, size := range []int{1 << 20, 4096, 512} {
		err := error(nil)
		for data := make([]byte, size); err == nil; {
			_, err = file.Write(data)
		}
		wantError(t, err, syscall.ENOSPC)
	}
	_ = file.Sync() // of what was delayed
	must.Succeed(t, file.Close())
	for n, err := 0, error(nil); err == nil && kind != "btrfs"; n++ { // blocks that were set aside
		err = os.WriteFile(filepath.Join(in, fmt.Sprint(n)), []byte("x"), 0o600)
	}
}

// A fenced volume is handed over and undone although others have filled the filesystem since. A move that has fenced nothing is undone there,
// too, and fences nothing when there is room again.
func TestUndoneOnFullFilesystem(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		for _, step := range []string{"copied", "fenced", "handed over"} {
			t.Run(kind+" "+step, func(t *testing.T) {
				var arguments []string
				if kind == "btrfs" { // trees as large as those of other disks
					arguments = []string{"-m", "dup"}
				}
				root := testenv.MadeFS(t, kind, 320*mib, arguments...)
				synctest.Test(t, func(t *testing.T) { testUndoneOnFullFilesystem(t, root, kind, step) })
			})
		}
	}
}

func testUndoneOnFullFilesystem(t *testing.T, root, kind, step string) {
	h := newHarness(t, root)
	h.start(local)
	h.create("pvc-1", mib)
	m, fence := moveNamed(t, "pvc-1", "move-1"), ""
	if step != "copied" {
		fence = must.Value(h.Moves().Fence(t.Context(), pool.FenceRequest{Move: m}))(t).Fence
	}
	others := filepath.Join(root, "others")
	must.Succeed(t, os.Mkdir(others, 0o700))
	fillUp(t, others, kind)
	for range 2 {
		if step == "handed over" {
			must.Succeed(t, h.Moves().HandOver(t.Context(), m, fence))
		}
	}
	for range 2 {
		must.Succeed(t, h.Moves().Unfence(t.Context(), m, true))
	}
	if state := must.Value(h.Moves().State(t.Context(), m.Volume))(t); state.ID != "" || step != "copied" && state.Undone != "move-1" {
		t.Errorf("the source is %+v", state)
	}
	must.Succeed(t, os.RemoveAll(others), h.publish("pvc-1", "a"), h.unpublish("pvc-1", "a"))
	_, err := h.Moves().Fence(t.Context(), pool.FenceRequest{Move: m})
	wantError(t, err, volume.ErrPrecondition)
	if got := names(t, h.Own("volumes")); len(got) != 1 {
		t.Errorf("among the records there are %q", got)
	}
}

// On full trees btrfs renames nothing. The record that is left is that of the volume, after a restart, too, until it is written or goes.
func TestUndoneWhereTreesAreFull(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 256*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		for _, name := range []string{"fenced", "copied"} {
			h.create(name, 8*mib)
		}
		fenced, copied := moveNamed(t, "fenced", "move-1"), moveNamed(t, "copied", "move-2")
		must.Value(h.Moves().Fence(t.Context(), pool.FenceRequest{Move: fenced}))(t)
		h.create("full", h.capacity())
		fillTrees(t, root, h.Path("pool", "full"))
		for range 2 {
			must.Succeed(t, h.Moves().Unfence(t.Context(), fenced, true), h.Moves().Unfence(t.Context(), copied, true))
		}
		h.restart(local)
		h.wantVolumes("copied", "fenced", "full")
		if state := must.Value(h.Moves().State(t.Context(), fenced.Volume))(t); state.ID != "" || state.Undone != "move-1" || state.Bytes != 8*mib {
			t.Errorf("the source is %+v", state)
		}
		h.delete("fenced")
		if got := names(t, h.Own("volumes")); !slices.Equal(got, []string{"copied.json", "full.json"}) {
			t.Errorf("among the records there are %q", got)
		}
	})
}

// Nor does undoing a move that has fenced nothing need to write.
func TestUndoneOnReadOnlyFilesystem(t *testing.T) {
	root := testenv.LoopFS(t, "xfs", 320*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(local)
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()), syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		h.start(local)
		m := moveNamed(t, "pvc-1", "move-1")
		_, err := h.Moves().Fence(t.Context(), pool.FenceRequest{Move: m})
		wantError(t, err, volume.ErrUnavailable)
		for range 2 {
			must.Succeed(t, h.Moves().Unfence(t.Context(), m, false))
		}
		must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT, ""))
		_, err = h.Moves().Fence(t.Context(), pool.FenceRequest{Move: m})
		wantError(t, err, volume.ErrPrecondition)
	})
}

// What a fenced volume becomes goes with it, also where a crash has left it.
func TestPreparedRecordsGo(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		ctx := t.Context()
		fence := m.handOver()
		must.Succeed(t, m.to.Moves().ConfirmTarget(ctx, m.in, fence), m.from.Moves().RemoveSource(ctx, m.out))
		must.Succeed(t, os.WriteFile(m.to.Own("volumes", "pvc-1.json.unfenced"), nil, 0o600))
		m.to.delete("pvc-1")
		for _, h := range []*harness{m.from, m.to} {
			if got := names(t, h.Own("volumes")); len(got) > 0 {
				t.Errorf("among the records there are %q", got)
			}
		}
	})
}

// What a record was to become that is gone, or is not fenced any more, goes with the next start, and nothing else: not what a fenced record may
// become, nor what is the record itself.
func TestPreparedRecordsThatAreLeftGo(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.fence()
		for _, id := range []string{"bare", "whole"} {
			m.from.create(id, mib)
		}
		prepared := must.Value(os.ReadFile(m.from.Own("volumes", "whole.json")))(t)
		for _, name := range []string{".new-pvc-1.json.unfenced", "whole.json.unfenced", "whole.json.handed-over", "gone.json.handed-over", "bare.json.handed-over"} {
			must.Succeed(t, os.WriteFile(m.from.Own("volumes", name), prepared, 0o600))
		}
		must.Succeed(t, os.Rename(m.from.Own("volumes", "bare.json"), m.from.Own("volumes", "bare.json.unfenced")))
		m.from.restart(local)
		want := []string{"bare.json.unfenced", "pvc-1.json", "pvc-1.json.handed-over", "pvc-1.json.unfenced", "whole.json"}
		if got := names(t, m.from.Own("volumes")); !slices.Equal(got, want) {
			t.Errorf("among the records there are %q, want %q", got, want)
		}
	})
}

// A record that has changed since it was prepared what it becomes is not taken back to what it was.
func TestPreparedRecordIsOutdated(t *testing.T) {
	moving(t, volume.ModeMount, func(t *testing.T, m *move) {
		m.fence()
		must.Succeed(t, os.Rename(m.from.Own("volumes", "pvc-1.json.handed-over"), m.from.Own("volumes", "pvc-1.json.unfenced")))
		must.Succeed(t, m.from.Moves().Unfence(t.Context(), m.out, true))
		must.Succeed(t, m.publishAt(m.from, volume.ModeMount, "a"), m.from.unpublish("pvc-1", "a"))
	})
}
