package snapshot

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A pod may make a subvolume after it was decided how to copy the volume. It would be empty in the snapshot.
func TestSubvolumeMadeBeforeCutFailsSnapshot(t *testing.T) {
	root := testenv.LoopFS(t, "btrfs", 256<<20)
	must.Succeed(t, exec.Command("btrfs", "subvolume", "create", filepath.Join(root, "pvc-1")).Run(), os.Mkdir(filepath.Join(root, "creating"), 0o700))
	open := func(name string) *dir.Dir {
		d, err := dir.Open(filepath.Join(root, name))
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, d.Close()) })
		return d
	}
	s := &Source{id: idOf(t, "pvc-1"), dir: open("pvc-1")}
	d, err := s.cutSubvolume(t.Context(), open("creating"), "first")
	must.Succeed(t, err, d.Close())
	must.Succeed(t, exec.Command("btrfs", "subvolume", "create", filepath.Join(root, "pvc-1", "inside")).Run())
	if _, err := s.cutSubvolume(t.Context(), open("creating"), "second"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a snapshot in which a subvolume is empty: %v, want ErrPrecondition", err)
	}
}
