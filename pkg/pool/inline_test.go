package pool_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// An inline volume whose pod is gone, as after kubeadm reset, is abnormal an hour later.
func TestInlineVolumeLeftBehindIsAbnormal(t *testing.T) {
	for name, shared := range map[string]string{"local": local, "shared": sharedPool} {
		t.Run(name, func(t *testing.T) { testInlineLeftBehind(t, shared) })
	}
}

func testInlineLeftBehind(t *testing.T, datadir string) {
	onPools(t, datadir, func(t *testing.T, h *harness) {
		target := h.Target("pod")
		must.Succeed(t, h.Publications().PublishInline(t.Context(), pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}, pool.Publication{ID: id(t, "csi-1"), Target: target}))
		h.create("pvc-1", mib)
		h.later(2 * time.Hour)
		h.up.Store(int64(2 * time.Hour))
		h.wantLeftBehind("published", datadir, 0)

		must.Succeed(t, h.Mounts.Unpublish(target, nil))
		h.up.Store(int64(59 * time.Minute))
		h.wantLeftBehind("rebooted lately", datadir, 0)
		h.up.Store(int64(61 * time.Minute))
		h.wantLeftBehind("unpublished for an hour", datadir, 1)

		must.Succeed(t, h.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "csi-1"), Target: target}))
		h.wantLeftBehind("published again", datadir, 0)
		unlock := must.Value(h.ShareTarget(id(t, "csi-1"), target))(t)
		must.Succeed(t, h.Publications().Unpublish(t.Context(), id(t, "csi-1"), target))
		unlock()
		h.wantVolumes("pvc-1")
	})
}

// The runbook of a pool that became read-only has its pods end first.
func TestUnpublishInlineOnReadOnlyPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		disk(t, h)
		const datadir = `[{"name":"local","path":"disk"}]`
		h.start(datadir)
		request := pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}
		must.Succeed(t, h.Publications().PublishInline(t.Context(), request, pool.Publication{ID: request.ID, Target: h.Target("pod")}))
		must.Succeed(t, syscall.Mount("", h.Path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		must.Succeed(t, h.unpublish("csi-1", "pod"))
		wantGone(t, h.Path("pods", "pod"))
		h.wantVolumes("csi-1")
		h.up.Store(int64(2 * time.Hour))
		h.later(2 * time.Hour)
		if all := h.volume("csi-1").Conditions; !slices.ContainsFunc(all, func(c health.Condition) bool { return c.Reason == health.InlineUnpublished }) {
			t.Errorf("of the volume that stays is said %v", all)
		}
	})
}

// The clock of a node may be years ahead when it boots, and be set later.
func TestInlineVolumeOfTheFutureIsLeftBehindToo(t *testing.T) {
	onPools(t, local, func(t *testing.T, h *harness) {
		target := h.Target("pod")
		must.Succeed(t, h.Publications().PublishInline(t.Context(), pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}, pool.Publication{ID: id(t, "csi-1"), Target: target}))
		h.create("pvc-1", mib)
		must.Succeed(t, h.Mounts.Unpublish(target, nil))
		h.up.Store(int64(2 * time.Hour))
		record := h.Path("pool", ".hostpath-provisioner", "volumes", "csi-1.json")
		made := func(ahead time.Duration) {
			t.Helper()
			text, err := os.ReadFile(record)
			must.Succeed(t, err)
			var fields map[string]any
			must.Succeed(t, json.Unmarshal(text, &fields))
			fields["created"] = time.Now().Add(ahead)
			text, err = json.Marshal(fields)
			must.Succeed(t, err)
			must.Succeed(t, os.WriteFile(record, text, 0o600))
		}
		made(30 * time.Minute)
		h.wantLeftBehind("by a clock that was a little ahead", local, 0)
		made(20 * 365 * 24 * time.Hour)
		h.wantLeftBehind("by a clock that was years ahead", local, 1)
	})
}

// wantLeftBehind expects so many volumes, all of them csi-1, to be reported as left behind by their pods.
func (h *harness) wantLeftBehind(when, datadir string, want int) {
	h.t.Helper()
	h.later(2 * time.Minute)
	counted := h.Status()[0].Abnormal[health.InlineUnpublished]
	var reported, seen int
	for _, name := range []string{"csi-1", "pvc-1"} {
		if h.volume(name).Condition.Reason == health.InlineUnpublished {
			reported++
		}
	}
	for _, v := range h.inspect(datadir)[0].Volumes {
		if v.Reason == string(health.InlineUnpublished) && v.ID == "csi-1" {
			seen++
		}
	}
	if counted != want || reported != want || seen != want {
		h.t.Errorf("%s: %d volumes are counted as left behind, %d answered and %d inspected, want %d", when, counted, reported, seen, want)
	}
}

// Pods of a node that was booted publish their volumes again while the pool is opened. If that fails the volumes stay: they were not made
// by those calls.
func TestFailedPublicationWhilePoolOpensKeepsInlineVolume(t *testing.T) {
	h := newHarness(t, t.TempDir())
	h.begin("node-1", local)
	must.Succeed(t, h.Wait(t.Context()))
	var all []pool.Publication
	for i := range 16 {
		name := fmt.Sprintf("csi-%d", i)
		all = append(all, pool.Publication{ID: id(t, name), Target: h.Target(name)})
		must.Succeed(t, h.publishInline(all[i]), h.Mounts.Unpublish(all[i].Target, nil))
		must.Succeed(t, os.WriteFile(h.Path("pods", name), nil, 0o600)) // in the way
	}
	for range 20 {
		must.Succeed(t, h.Close(t.Context()))
		h.begin("node-1", local)
		var calls sync.WaitGroup
		for _, p := range all {
			calls.Go(func() {
				err := h.publishInline(p)
				for errors.Is(err, volume.ErrUnavailable) {
					err = h.publishInline(p)
				}
				wantError(t, err, volume.ErrExists)
			})
		}
		calls.Wait()
		for _, p := range all {
			must.Succeed(t, must.Err(h.Volume(t.Context(), p.ID)))
		}
	}
}

func (h *harness) publishInline(p pool.Publication) error {
	return h.Publications().PublishInline(h.t.Context(), pool.Request{ID: p.ID, Range: volume.Range{Required: mib}}, p)
}

// What its pod left behind can be removed also where no space is left, which is when that matters.
func TestFullInlineVolumeLeftBehindIsRemoved(t *testing.T) {
	onTmpfs(t, local, func(t *testing.T, h *harness) {
		request := pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}
		must.Succeed(t, h.Publications().PublishInline(t.Context(), request, pool.Publication{ID: request.ID, Target: h.Target("pod")}))
		h.create("pvc-1", mib)
		must.Succeed(t, h.Mounts.Unpublish(h.Target("pod"), nil))
		if err := os.WriteFile(h.Path("pool", "csi-1", "data"), make([]byte, 256*mib), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("filled the filesystem: %v", err)
		}
		h.later(2 * time.Hour)
		h.up.Store(int64(2 * time.Hour))
		h.wantLeftBehind("full", local, 1)
		must.Succeed(t, h.DeleteOnly(t.Context(), request.ID, health.InlineUnpublished))
		h.wantVolumes("pvc-1")
	})
}
