package driver_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// upstreamSnapshot does what CreateSnapshot of the upstream driver does (pkg/hostpath/reflink.go of kubevirt/hostpath-provisioner v0.25.2): a
// directory that names the volume, and `cp -rp --reflink=auto`. Its volume has a disk image, as those of KubeVirt have.
func upstreamSnapshot(t *testing.T, snapshotPath, name, of string) {
	t.Helper()
	source, to := t.TempDir(), filepath.Join(snapshotPath, name, "data")
	clonetest.Hostile(t, source)
	must.Succeed(t, os.WriteFile(filepath.Join(source, "disk.img"), []byte("disk of "+of), 0o660))
	must.Succeed(t, os.Truncate(filepath.Join(source, "disk.img"), 1<<20))
	must.Succeed(t, os.Chown(source, 107, 107))
	must.Succeed(t, os.MkdirAll(to, 0o755))
	must.Succeed(t, os.MkdirAll(filepath.Join(snapshotPath, name, of), 0o755))
	if out, err := exec.CommandContext(t.Context(), "cp", "-rp", "--reflink=auto", source+"/.", to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func fromSnapshot(id string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
		}}
	}
}

func (h *harness) snapshots(t *testing.T, request *csi.ListSnapshotsRequest) (ids []string) {
	t.Helper()
	list := must.Value(h.ListSnapshots(t.Context(), request))(t)
	for _, e := range list.GetEntries() {
		ids = append(ids, e.GetSnapshot().GetSnapshotId())
	}
	return ids
}

// The operator of the upstream driver puts snapshotPath into the pool, its default is elsewhere.
func TestUpstreamSnapshots(t *testing.T) {
	testenv.NeedRoot(t)
	for name, where := range map[string]func(pool, elsewhere string) string{
		"in the pool": func(pool, _ string) string { return pool + "/snapshots" },
		"elsewhere":   func(_, elsewhere string) string { return elsewhere },
	} {
		t.Run(name, func(t *testing.T) {
			pool := t.TempDir()
			path := where(pool, t.TempDir())
			upstreamSnapshot(t, path, "snapshot-1", "pvc-gone")
			upstreamSnapshot(t, path, "snapshot-2", "pvc-1")
			must.Succeed(t, os.MkdirAll(path+"/half/data", 0o755))
			must.Succeed(t, os.MkdirAll(path+"/mine/data", 0o755))
			must.Succeed(t, os.WriteFile(path+"/mine/notes", nil, 0o600))
			h := newHarness(t, setup{pools: `[{"name":"local","path":"` + pool + `","snapshotPath":"` + path + `","snapshotProvider":"reflink"}]`})
			_, err := h.CreateVolume(t.Context(), createRequest("pvc-1"))
			must.Succeed(t, err)
			own, err := h.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot-15", SourceVolumeId: "pvc-1"})
			must.Succeed(t, err)

			wantEqual(t, "all snapshots", h.snapshots(t, &csi.ListSnapshotsRequest{}), []string{"snapshot-1", own.GetSnapshot().GetSnapshotId(), "snapshot-2"})
			wantEqual(t, "the second page", h.snapshots(t, &csi.ListSnapshotsRequest{StartingToken: "after:snapshot-15"}), []string{"snapshot-2"})
			wantEqual(t, "those of a volume", h.snapshots(t, &csi.ListSnapshotsRequest{SourceVolumeId: "pvc-gone"}), []string{"snapshot-1"})
			wantEqual(t, "one", h.snapshots(t, &csi.ListSnapshotsRequest{SnapshotId: "snapshot-2"}), []string{"snapshot-2"})
			got, err := h.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "snapshot-1"})
			must.Succeed(t, err)
			if s := got.GetSnapshot(); s.GetSourceVolumeId() != "pvc-gone" || !s.GetReadyToUse() || s.GetSizeBytes() != 0 || s.GetCreationTime().AsTime().IsZero() {
				t.Errorf("the snapshot is %v", s)
			}
			_, err = h.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "snapshot-1@" + nodeName})
			wantCode(t, err, codes.NotFound, "snapshot-1")

			data := filepath.Join(path, "snapshot-1", "data")
			kept := t.TempDir()
			clonetest.Copy(t, data, kept)
			restore := createRequest("pvc-2", fromSnapshot("snapshot-1"))
			for range 2 { // the second is a repeated call
				must.Succeed(t, must.Err(h.CreateVolume(t.Context(), restore)))
				clonetest.Same(t, kept, filepath.Join(pool, "pvc-2"))
				must.Succeed(t, os.WriteFile(filepath.Join(pool, "pvc-2", "disk.img"), []byte("written by a pod"), 0o660))
				must.Succeed(t, os.WriteFile(filepath.Join(kept, "disk.img"), []byte("written by a pod"), 0o660))
				mtime(t, filepath.Join(pool, "pvc-2", "disk.img"), filepath.Join(kept, "disk.img"))
			}
			_, err = h.CreateVolume(t.Context(), createRequest("pvc-3", fromSnapshot("snapshot-9")))
			wantCode(t, err, codes.NotFound, "snapshot-9")
			_, err = h.CreateVolume(t.Context(), createRequest("pvc-3", fromSnapshot("half")))
			wantCode(t, err, codes.Internal, "did not finish")
			_, err = h.CreateVolume(t.Context(), createRequest("pvc-3", fromSnapshot("mine")))
			wantCode(t, err, codes.FailedPrecondition, `"notes"`)
			wantGone(t, filepath.Join(pool, "pvc-3"))

			_, err = h.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: "mine"})
			wantCode(t, err, codes.FailedPrecondition, `"notes"`)
			_, err = h.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: "snapshot-1@" + nodeName})
			must.Succeed(t, err) // of this driver there is none
			wantThere(t, data)
			for _, id := range []string{"snapshot-1", "snapshot-1", "half", "../pvc-1", own.GetSnapshot().GetSnapshotId()} {
				must.Succeed(t, must.Err(h.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})))
			}
			wantEqual(t, "what is left", h.snapshots(t, &csi.ListSnapshotsRequest{}), []string{"snapshot-2"})
			wantGone(t, filepath.Join(path, "snapshot-1"))
			wantGone(t, filepath.Join(path, "half"))
			wantThere(t, filepath.Join(path, "mine", "notes"))
			wantEqual(t, "the volumes", h.ids(t), []string{"pvc-1", "pvc-2"})
		})
	}
}

// mtime gives a file the times of another.
func mtime(t *testing.T, to, from string) {
	t.Helper()
	info := must.Value(os.Stat(from))(t)
	must.Succeed(t, os.Chtimes(to, info.ModTime(), info.ModTime()))
}

// A snapshotPath that is not mounted must not be taken for one without snapshots.
func TestUnmountedSnapshotPathIsUnavailable(t *testing.T) {
	pool := t.TempDir()
	h := newHarness(t, setup{pools: `[{"name":"local","path":"` + pool + `","snapshotPath":"` + pool + `-away","snapshotProvider":"reflink"}]`})
	_, err := h.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: "snapshot-1"})
	wantCode(t, err, codes.Unavailable, "snapshotPath", pool+"-away")
	_, err = h.CreateVolume(t.Context(), createRequest("pvc-1", fromSnapshot("snapshot-1")))
	wantCode(t, err, codes.Unavailable, "snapshotPath")
	wantEqual(t, "the snapshots", len(h.snapshots(t, &csi.ListSnapshotsRequest{})), 0)
}

// What is promised to the restore is not there if it shares blocks.
func TestRestoreOfUpstreamSnapshotSharesNoBlocks(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			pool := testenv.LoopFS(t, kind, 512<<20)
			upstreamSnapshot(t, pool+"/snapshots", "snapshot-1", "pvc-gone")
			h := newHarness(t, setup{pools: `[{"name":"local","path":"` + pool + `","snapshotPath":"` + pool + `/snapshots","snapshotProvider":"reflink"}]`})
			must.Succeed(t, must.Err(h.CreateVolume(t.Context(), createRequest("pvc-1", fromSnapshot("snapshot-1")))))
			if taken, shared := clonetest.Extents(t, filepath.Join(pool, "pvc-1", "disk.img")); taken == 0 || shared {
				t.Errorf("the restored disk takes %d bytes, and shares blocks: %v", taken, shared)
			}
		})
	}
}
