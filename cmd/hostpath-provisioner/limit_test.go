package main

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// limiting makes a directory on each kind of filesystem that this kernel has quotas of.
func limiting() map[string]func(*testing.T) string {
	if !testenv.Guest() {
		return map[string]func(*testing.T) string{"btrfs": func(t *testing.T) string { return testenv.CountingBtrfs(t, 512*mib) }}
	}
	return map[string]func(*testing.T) string{
		"xfs":  func(t *testing.T) string { return testenv.GuestDir(t, "HOSTPATH_KERNEL_XFS") },
		"ext4": func(t *testing.T) string { return testenv.GuestDir(t, "HOSTPATH_KERNEL_EXT4") },
	}
}

// The size that the kernel enforces goes along to the pool of the driver inside PV_DIR, and comes back. What was written
// before counts.
func TestHandedOverVolume_hasItsLimit(t *testing.T) {
	testenv.NeedRoot(t)
	for kind, directory := range limiting() {
		t.Run(kind, func(t *testing.T) {
			root := directory(t)
			path := filepath.Join(root, "pool")
			csi := filepath.Join(path, provisioner.CSIDirectory)
			old, driver := serve(t, path), serve(t, csi)
			id, err := volume.ParseID("pvc-1")
			must.Succeed(t, err)
			_, err = old.Create(t.Context(), pool.Request{ID: id, Range: volume.Range{Required: 16 * mib}})
			must.Succeed(t, err)
			_, err = write(t, filepath.Join(path, "pvc-1", "before"), 8)
			must.Succeed(t, err)

			there := store.Handover{From: store.VolumePath{Directory: path, Name: "pvc-1"}, To: store.VolumePath{Directory: csi, Name: "pvc-1"}}
			wantLimitAfter(t, there, driver, id)
			wantLimitAfter(t, there.Reverse(), old, id)
			must.Succeed(t, old.Delete(t.Context(), id))
		})
	}
}

// wantLimitAfter hands a volume of 16 MiB over, of which 8 are taken.
func wantLimitAfter(t *testing.T, way store.Handover, set *pool.Set, id volume.ID) {
	t.Helper()
	must.Succeed(t, way.Move())
	must.Succeed(t, way.Record(0))
	v, err := set.Volume(t.Context(), id)
	if err != nil || v.Bytes != 16*mib || !v.Enforced {
		t.Errorf("%s: %+v (%v)", way.To, v, err)
	}
	file := filepath.Join(way.To.String(), "file")
	if size, refused := write(t, file, 12); refused == nil || size == 0 || size > 8*mib {
		t.Errorf("%s: beside 8 MiB of 16 there is room for %d (%v)", way.To, size, refused)
	}
	root, err := dir.Open(way.To.String())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, root.Close()) }()
	must.Succeed(t, root.Remove("file"))
	must.Succeed(t, unix.Syncfs(root.Fd())) // by which btrfs counts what was removed
}
