package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/handover"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The size that the kernel enforces goes along to the pool of the driver inside PV_DIR, and comes back.
func TestHandedOverVolume_keepsItsLimit(t *testing.T) {
	if testenv.Guest() {
		t.Skip("make test has this on btrfs")
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.LoopFS(t, "btrfs", 512*mib)
	if out, err := exec.CommandContext(t.Context(), "btrfs", "quota", "enable", root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	path := filepath.Join(root, "pool")
	csi := filepath.Join(path, provisioner.CSIDirectory)
	old, driver := serve(t, path), serve(t, csi)
	id, err := volume.ParseID("pvc-1")
	must.Succeed(t, err)
	_, err = old.Create(t.Context(), pool.Request{ID: id, Range: volume.Range{Required: 16 * mib}})
	must.Succeed(t, err)

	there := handover.Handover{From: handover.Place{Directory: path, Name: "pvc-1"}, To: handover.Place{Directory: csi, Name: "pvc-1"}}
	for _, way := range []struct {
		handover.Handover
		set *pool.Set
	}{{there, driver}, {there.Reverse(), old}} {
		must.Succeed(t, way.Move())
		must.Succeed(t, way.Record(0))
		v, err := way.set.Volume(t.Context(), id)
		if err != nil || v.Bytes != 16*mib || !v.Enforced {
			t.Errorf("%s: %+v (%v)", way.To, v, err)
		}
		file := filepath.Join(way.To.String(), "file")
		if err := os.WriteFile(file, make([]byte, 32*mib), 0o600); !errors.Is(err, syscall.EDQUOT) {
			t.Errorf("%s: writing 32 MiB into 16: %v, want EDQUOT", way.To, err)
		}
		must.Succeed(t, os.Remove(file))
		syncfs(t, root)
	}
	must.Succeed(t, old.Delete(t.Context(), id))
	if _, err := driver.Volume(t.Context(), id); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("after its deletion: %v", err)
	}
}

// syncfs has btrfs count what was removed.
func syncfs(t *testing.T, root string) {
	t.Helper()
	d, err := dir.Open(root)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	must.Succeed(t, unix.Syncfs(d.Fd()))
}
