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
	onPools(t, datadir, func(t *testing.T, b *bench) {
		target := b.Target("pod")
		must.Succeed(t, b.Publications().PublishInline(t.Context(), pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}, pool.Publication{ID: id(t, "csi-1"), Target: target}))
		b.create("pvc-1", mib)
		b.later(2 * time.Hour)
		b.up.Store(int64(2 * time.Hour))
		b.wantLeftBehind("published", datadir, 0)

		must.Succeed(t, b.Mounts.Unpublish(target, nil))
		b.up.Store(int64(59 * time.Minute))
		b.wantLeftBehind("rebooted lately", datadir, 0)
		b.up.Store(int64(61 * time.Minute))
		b.wantLeftBehind("unpublished for an hour", datadir, 1)

		must.Succeed(t, b.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "csi-1"), Target: target}))
		b.wantLeftBehind("published again", datadir, 0)
		unlock, err := b.ShareTarget(id(t, "csi-1"), target)
		must.Succeed(t, err)
		must.Succeed(t, b.Publications().Unpublish(t.Context(), id(t, "csi-1"), target))
		unlock()
		b.wantVolumes("pvc-1")
	})
}

// The runbook of a pool that became read-only has its pods end first.
func TestUnpublishInlineOnReadOnlyPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		must.Succeed(t, os.Mkdir(b.Path("disk"), 0o755))
		disk(t, b)
		const datadir = `[{"name":"local","path":"disk"}]`
		b.start(datadir)
		request := pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}
		must.Succeed(t, b.Publications().PublishInline(t.Context(), request, pool.Publication{ID: request.ID, Target: b.Target("pod")}))
		must.Succeed(t, syscall.Mount("", b.Path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		must.Succeed(t, b.unpublish("csi-1", "pod"))
		wantGone(t, b.Path("pods", "pod"))
		b.wantVolumes("csi-1")
		b.up.Store(int64(2 * time.Hour))
		b.later(2 * time.Hour)
		if all := b.volume("csi-1").Conditions; !slices.ContainsFunc(all, func(c health.Condition) bool { return c.Reason == health.InlineUnpublished }) {
			t.Errorf("of the volume that stays is said %v", all)
		}
	})
}

// The clock of a node may be years ahead when it boots, and be set later.
func TestInlineVolumeOfTheFutureIsLeftBehindToo(t *testing.T) {
	onPools(t, local, func(t *testing.T, b *bench) {
		target := b.Target("pod")
		must.Succeed(t, b.Publications().PublishInline(t.Context(), pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}, pool.Publication{ID: id(t, "csi-1"), Target: target}))
		b.create("pvc-1", mib)
		must.Succeed(t, b.Mounts.Unpublish(target, nil))
		b.up.Store(int64(2 * time.Hour))
		record := b.Path("pool", ".hostpath-provisioner", "volumes", "csi-1.json")
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
		b.wantLeftBehind("by a clock that was a little ahead", local, 0)
		made(20 * 365 * 24 * time.Hour)
		b.wantLeftBehind("by a clock that was years ahead", local, 1)
	})
}

// wantLeftBehind expects so many volumes, all of them csi-1, to be reported as left behind by their pods.
func (b *bench) wantLeftBehind(when, datadir string, want int) {
	b.t.Helper()
	b.later(2 * time.Minute)
	counted := b.Status()[0].Abnormal[health.InlineUnpublished]
	var reported, seen int
	for _, name := range []string{"csi-1", "pvc-1"} {
		if b.volume(name).Condition.Reason == health.InlineUnpublished {
			reported++
		}
	}
	for _, v := range b.inspect(datadir)[0].Volumes {
		if v.Reason == string(health.InlineUnpublished) && v.ID == "csi-1" {
			seen++
		}
	}
	if counted != want || reported != want || seen != want {
		b.t.Errorf("%s: %d volumes are counted as left behind, %d answered and %d inspected, want %d", when, counted, reported, seen, want)
	}
}

// Pods of a node that was booted publish their volumes again while the pool is opened. If that fails the volumes stay: they were not made
// by those calls.
func TestFailedPublicationWhilePoolOpensKeepsInlineVolume(t *testing.T) {
	b := newBench(t, t.TempDir())
	b.begin("node-1", local)
	must.Succeed(t, b.Wait(t.Context()))
	var all []pool.Publication
	for i := range 16 {
		name := fmt.Sprintf("csi-%d", i)
		all = append(all, pool.Publication{ID: id(t, name), Target: b.Target(name)})
		must.Succeed(t, b.publishInline(all[i]), b.Mounts.Unpublish(all[i].Target, nil))
		must.Succeed(t, os.WriteFile(b.Path("pods", name), nil, 0o600)) // in the way
	}
	for range 20 {
		must.Succeed(t, b.Close(t.Context()))
		b.begin("node-1", local)
		var calls sync.WaitGroup
		for _, p := range all {
			calls.Go(func() {
				err := b.publishInline(p)
				for errors.Is(err, volume.ErrUnavailable) {
					err = b.publishInline(p)
				}
				wantError(t, err, volume.ErrExists)
			})
		}
		calls.Wait()
		for _, p := range all {
			_, err := b.Volume(t.Context(), p.ID)
			must.Succeed(t, err)
		}
	}
}

func (b *bench) publishInline(p pool.Publication) error {
	return b.Publications().PublishInline(b.t.Context(), pool.Request{ID: p.ID, Range: volume.Range{Required: mib}}, p)
}

// What its pod left behind can be removed also where no space is left, which is when that matters.
func TestFullInlineVolumeLeftBehindIsRemoved(t *testing.T) {
	onTmpfs(t, local, func(t *testing.T, b *bench) {
		request := pool.Request{ID: id(t, "csi-1"), Range: volume.Range{Required: mib}}
		must.Succeed(t, b.Publications().PublishInline(t.Context(), request, pool.Publication{ID: request.ID, Target: b.Target("pod")}))
		b.create("pvc-1", mib)
		must.Succeed(t, b.Mounts.Unpublish(b.Target("pod"), nil))
		if err := os.WriteFile(b.Path("pool", "csi-1", "data"), make([]byte, 256*mib), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("filled the filesystem: %v", err)
		}
		b.later(2 * time.Hour)
		b.up.Store(int64(2 * time.Hour))
		b.wantLeftBehind("full", local, 1)
		must.Succeed(t, b.DeleteOnly(t.Context(), request.ID, health.InlineUnpublished))
		b.wantVolumes("pvc-1")
	})
}
