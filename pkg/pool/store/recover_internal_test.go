package store

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A driver was killed between the two steps of a removal, before the first was durable. The next one ends it, and then the power
// goes: what is left is whole, or trash. Btrfs makes no more durable than what is synced.
func TestFinishedRemovalSurvivesLossOfPower(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "mkfs.btrfs", "btrfs", "mount")
	image, err := loopfs.Format(t.Context(), t.TempDir(), "btrfs", 128<<20)
	must.Succeed(t, err)
	record, err := NewRecord(idOf("pvc-1"), volume.ModeMount, 5).encode()
	must.Succeed(t, err)
	rec, err := decodeRecord(idOf("pvc-1"), record)
	must.Succeed(t, err)
	piece := Trashed(idOf("pvc-1"), Entry{Record: rec, Present: true})
	left := filepath.Join(t.TempDir(), "left")
	onImage(t, image, func(path string) {
		s := openAs(t, path, "node-1")
		must.Succeed(t, s.OpenWork(), os.Mkdir(filepath.Join(path, "pvc-1"), 0o700), s.Records().Write(rec))
		if out, err := exec.CommandContext(t.Context(), "btrfs", "filesystem", "sync", path).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		must.Succeed(t, os.Rename(filepath.Join(path, "pvc-1"), filepath.Join(path, OwnName, trashName, "node-1", piece)))
		if _, dropped, err := s.Trash().FinishRemoval(s.trash, piece); !dropped || err != nil {
			t.Errorf("the removal is ended: %v, %v", dropped, err)
		}
		data, err := os.ReadFile(image)
		must.Succeed(t, err, os.WriteFile(left, data, 0o600))
		s.Close()
	})
	onImage(t, left, func(path string) {
		s := openAs(t, path, "node-1")
		defer s.Close()
		e, d, err := s.Lookup(idOf("pvc-1"))
		must.Succeed(t, err)
		closed(t, d)
		if e.Exists() && e.Usable() != nil || e.Present && e.Record == nil {
			t.Errorf("after the loss of power the volume is %+v", e)
		}
	})
}

func closed(t *testing.T, d *dir.Dir) {
	t.Helper()
	if d != nil {
		must.Succeed(t, d.Close())
	}
}

// onImage has a btrfs mounted while a function works.
func onImage(t *testing.T, image string, work func(path string)) {
	t.Helper()
	device := must.Value(loopfs.Attach(image))(t)
	path := filepath.Join(t.TempDir(), "fs")
	must.Succeed(t, os.Mkdir(path, 0o700), loopfs.MountDevice(t.Context(), device.Name(), path, "btrfs"), device.Close())
	defer func() { must.Succeed(t, loopfs.Unmount(path)) }()
	work(path)
}
