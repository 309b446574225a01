package pool

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// unlimited is for copies that have no limit.
func unlimited() error { return nil }

// A pod may make a subvolume after it was decided how to copy the volume. It would be empty in the snapshot.
func TestSubvolumeMadeBeforeCutFailsSnapshot(t *testing.T) {
	root := testenv.LoopFS(t, "btrfs", 256<<20)
	must.Succeed(t, exec.Command("btrfs", "subvolume", "create", filepath.Join(root, "pvc-1")).Run(), os.Mkdir(filepath.Join(root, "creating"), 0o700))
	open := func(name string) *dir.Dir {
		d := must.Value(dir.Open(filepath.Join(root, name)))(t)
		t.Cleanup(func() { must.Succeed(t, d.Close()) })
		return d
	}
	s := &source{id: idOf(t, "pvc-1"), dir: open("pvc-1")}
	d, err := s.subvolume(t.Context(), open("creating"), "first", unlimited)
	must.Succeed(t, err, d.Close())
	must.Succeed(t, exec.Command("btrfs", "subvolume", "create", filepath.Join(root, "pvc-1", "inside")).Run())
	if _, err := s.subvolume(t.Context(), open("creating"), "second", unlimited); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a snapshot in which a subvolume is empty: %v, want ErrPrecondition", err)
	}
}

// A pod may make a subvolume and remove it again around the cut.
func TestSubvolumeMadeAndRemovedDuringCutFailsSnapshot(t *testing.T) {
	root := testenv.LoopFS(t, "btrfs", 256<<20)
	must.Succeed(t, exec.Command("btrfs", "subvolume", "create", filepath.Join(root, "pvc-1")).Run(), os.Mkdir(filepath.Join(root, "creating"), 0o700))
	open := func(name string) *dir.Dir {
		d := must.Value(dir.Open(filepath.Join(root, name)))(t)
		t.Cleanup(func() { must.Succeed(t, d.Close()) })
		return d
	}
	from, creating := open("pvc-1"), open("creating")
	must.Succeed(t, exec.Command("btrfs", "quota", "enable", root).Run())
	facility := must.Value(quota.Detect(from))(t)
	end := make(chan struct{})
	var pod sync.WaitGroup
	pod.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
			}
			inside, err := facility.Make(from, "inside")
			if err == nil {
				err = errors.Join(inside.Close(), os.Remove(filepath.Join(root, "pvc-1", "inside")))
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer func() { close(end); pod.Wait() }()
	s, failed := &source{id: idOf(t, "pvc-1"), dir: from}, 0
	for range 100 {
		d, err := s.subvolume(t.Context(), creating, "copy", unlimited)
		if err != nil {
			must.ErrorIs(t, err, volume.ErrPrecondition)
			failed++
		} else {
			must.Succeed(t, d.Close())
			// BTRFS_EMPTY_SUBVOL_DIR_OBJECTID, the number of what was a subvolume.
			var st syscall.Stat_t
			if err := syscall.Stat(filepath.Join(root, "creating", "copy", "inside"), &st); err == nil && st.Ino == 2 {
				t.Error("a snapshot in which a subvolume is empty was made")
			}
		}
		must.Succeed(t, dir.RemoveTree(t.Context(), creating, "copy", func(context.Context) error { return nil }))
	}
	t.Logf("%d of 100 snapshots failed", failed)
}
