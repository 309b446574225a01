package pool_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestDeleteDoesNotFollowLinks(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		canary := filepath.Join(t.TempDir(), "canary")
		must.Succeed(t, os.WriteFile(canary, nil, 0o644))
		h.create("pvc-1", mib)
		must.Succeed(t, os.Symlink(filepath.Dir(canary), h.Path("pool", "pvc-1", "dir")))
		must.Succeed(t, os.Symlink(canary, h.Path("pool", "pvc-1", "file")))
		h.delete("pvc-1")
		h.wantClean()
		if _, err := os.Stat(canary); err != nil {
			t.Error(err)
		}
	})
}

func TestDeleteRefusesPublishedVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), nil, 0o644))
		must.Succeed(t, h.publish("pvc-1", "a"))
		err := h.Delete(t.Context(), id(t, "pvc-1"))
		wantError(t, err, volume.ErrInUse)
		if !strings.Contains(err.Error(), h.Path("pods", "a")) {
			t.Errorf("%v does not report where the volume is published", err)
		}
		// An unmount that failed never leads to a delete.
		release := h.Mounts.Hold(h.Target("a"))
		wantError(t, h.unpublish("pvc-1", "a"), volume.ErrInUse)
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
		release()
		if _, err := os.Stat(h.Path("pool", "pvc-1", "data")); err != nil {
			t.Error(err)
		}
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
		h.wantClean()
	})
}

func TestDeleteRefusesVolumeMountedBySubpath(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-1", "sub"), 0o755))
		sub := must.Value(dir.Open(h.Path("pool", "pvc-1", "sub")))(t)
		defer func() { must.Succeed(t, sub.Close()) }()
		must.Succeed(t, h.Mounts.Publish(sub, h.Target("subpath"), bind.Flags{}))
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
		must.Succeed(t, h.Mounts.Unpublish(h.Target("subpath"), nil))
		h.delete("pvc-1")
	})
}

func TestUnremovableTrashIsReported(t *testing.T) {
	testenv.NeedRoot(t)
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-1", "mounted"), 0o755))
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "file"), nil, 0o644))
		must.Succeed(t, syscall.Mount("tmpfs", h.Path("pool", "pvc-1", "mounted"), "tmpfs", 0, ""))
		h.delete("pvc-1")
		h.settled()
		status := h.Status()[0]
		if status.Trash.Pieces != 1 || status.Trash.Stuck != 1 || status.Volumes != 0 || status.Promised != 0 {
			t.Errorf("status %+v, want one piece of stuck trash and nothing promised", status)
		}
		trash := names(t, h.Own("trash", "node-1"))
		if len(trash) != 1 {
			t.Fatalf("trash %q, want one piece", trash)
		}
		// Once the reason is gone, time removes it.
		must.Succeed(t, syscall.Unmount(h.Own("trash", "node-1", trash[0], "mounted"), 0))
		h.later(time.Hour)
		h.wantClean()
	})
}

func TestReaperPausesBetweenSmallVolumes(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		const volumes = 33 // one that is erased at once, and two bursts
		for i := range volumes {
			h.create("pvc-"+strconv.Itoa(i), mib)
		}
		f.slowEnd.Store(true)
		for i := range volumes {
			h.delete("pvc-" + strconv.Itoa(i))
		}
		h.later(volumes * 12 * time.Millisecond)
		if left := h.Status()[0].Trash.Pieces; left == 0 || left == volumes {
			t.Errorf("%d pieces of trash are left after the time that all take without a rest, want some", left)
		}
		h.later(volumes * 48 * time.Millisecond)
		if left := h.Status()[0].Trash.Pieces; left != 0 {
			t.Errorf("%d pieces of trash are left after four times as long, want none", left)
		}
		h.wantClean()
	})
}

func TestDeleteUnknownVolumeWhilePoolIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("away"), 0o750))
		h.start(`[{"name":"local","path":"pool"},{"name":"away","path":"away","requireMount":true}]`)
		// It may be in the pool that is away: saying that it is gone would leak it.
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
		local, err := volume.ParsePoolName("local")
		must.Succeed(t, err)
		_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Pool: local, Range: volume.Range{Required: mib}})
		must.Succeed(t, err)
		h.delete("pvc-2")
		if left := names(t, h.Path("away")); len(left) > 0 {
			t.Errorf("the bare mount point holds %q", left)
		}
	})
}

// Until the pool was checked it is not known that the volume is inline. An answer of success
// would be the last that kubelet asks about it.
func TestInlineVolumeIsDeletedWhilePoolOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, mounts := newHanging(t)
		must.Succeed(t, h.Publications().PublishInline(t.Context(),
			pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}},
			pool.Publication{ID: id(t, "csi-1"), Target: h.Target("a")}))
		must.Succeed(t, h.Close(t.Context()))

		open := mounts.hang()
		h.begin("node-1", mountedPool)
		wantError(t, h.unpublish("csi-1", "a"), volume.ErrUnavailable)
		wantGone(t, h.Path("pods", "a"))
		open()
		must.Succeed(t, h.Wait(t.Context()))
		must.Succeed(t, h.unpublish("csi-1", "a"))
		h.wantVolumes()
		h.wantClean()
	})
}

func TestUnpublishKeepsMountBelow(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		h.create("pvc-2", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		over, err := dir.Open(h.Path("pool", "pvc-2"))
		must.Succeed(t, err)
		must.Succeed(t, h.Mounts.Stack(over, h.Target("a")))
		must.Succeed(t, over.Close())
		wantError(t, h.unpublish("pvc-2", "a"), volume.ErrInUse)
		_, err = h.Publications().Stats(t.Context(), id(t, "pvc-1"), h.Target("a"))
		must.Succeed(t, err)
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-2")
	})
}

func TestForeignLabelIsRelabelledOnce(t *testing.T) {
	for relabel, want := range map[string]string{"root": "container_file_t", "recursive": "container_file_t", "none": "var_t"} {
		t.Run(relabel, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				must.Succeed(t, os.MkdirAll(h.Path("pool", "pvc-old"), 0o755))
				h.start(`[{"name":"local","path":"pool","relabel":"` + relabel + `"}]`)
				d := must.Value(dir.Open(h.Path("pool", "pvc-old")))(t)
				defer func() { must.Succeed(t, d.Close()) }()
				must.Succeed(t, h.Labels.Set(d, "system_u:object_r:var_t:s0"))
				must.Succeed(t, h.publish("pvc-old", "a"))
				if got := labelOf(t, h, h.Path("pool", "pvc-old")); !strings.Contains(got, want) {
					t.Errorf("label %q, want %s", got, want)
				}
			})
		})
	}
}

func TestCanceledCallsDoNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := h.Create(ctx, pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, context.Canceled)
		wantError(t, h.Delete(ctx, id(t, "pvc-1")), context.Canceled)
		h.wantVolumes("pvc-1")
		h.wantClean()
	})
}

// What an administrator saw may have changed by the time of the deletion.
func TestDeleteOnly(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		for _, reason := range []health.Reason{health.DirectoryMissing, health.InlineUnpublished} {
			wantError(t, h.DeleteOnly(t.Context(), id(t, "pvc-1"), reason), volume.ErrPrecondition)
		}
		h.wantVolumes("pvc-1")
		must.Succeed(t, os.Remove(h.Path("pool", "pvc-1")))
		wantError(t, h.DeleteOnly(t.Context(), id(t, "pvc-1"), health.InlineUnpublished), volume.ErrPrecondition)
		must.Succeed(t, h.DeleteOnly(t.Context(), id(t, "pvc-1"), health.DirectoryMissing))
		h.wantVolumes()
		wantError(t, h.DeleteOnly(t.Context(), id(t, "pvc-1"), health.DirectoryMissing), volume.ErrNotFound)
	})
}

// Of a volume that was asked about for one reason more may be wrong.
func TestDeleteOnlyIfLostWithDamagedRecord(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Remove(h.Path("pool", "pvc-1")))
		must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), []byte("{"), 0o600))
		must.Succeed(t, h.DeleteOnly(t.Context(), id(t, "pvc-1"), health.DirectoryMissing))
		h.wantVolumes()
	})
}
