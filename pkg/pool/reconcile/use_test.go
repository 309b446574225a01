package reconcile_test

import (
	"errors"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestUseOfBlockVolume(t *testing.T) {
	p := newPool(t, nil)
	id, e, d := makeBlock(t, p, "pvc-1", mib)
	must.Succeed(t, p.Index().Load())
	v := &reconcile.VolumeUse{Host: p.Host, Root: p.Store.Root(), ID: id, Entry: e, Dir: d, Marked: func() (bool, error) { return true, nil }}
	target, err := bind.ParseTarget(filepath.Join(t.TempDir(), "target"))
	must.Succeed(t, err)
	want := func(when string, published int, used bool, at error) {
		t.Helper()
		all, err := v.Published()
		must.Succeed(t, err)
		is, err := v.Used()
		must.Succeed(t, err)
		ofPool, err := reconcile.PublishedVolumes(p)
		must.Succeed(t, err)
		if len(all) != published || is != used || ofPool[id] != (published > 0) {
			t.Errorf("%s: published at %v, used %v, of the pool %v; want %d and %v", when, all, is, ofPool, published, used)
		}
		if got := v.CheckPublished(target); !errors.Is(got, at) {
			t.Errorf("%s: published at the target: %v, want %v", when, got, at)
		}
	}
	want("before", 0, false, volume.ErrNotFound)
	must.Succeed(t, p.Disk(id, e.Record).Publish(t.Context(), d, content.Target{Path: target}))
	want("published", 1, true, nil)
	must.ErrorIs(t, v.Detach(t.Context()), volume.ErrInUse)
	device := must.Value(p.Host.DeviceAt(target))(t)
	if !reconcile.HoldsFile(p, device) || reconcile.HoldsFile(p, &loop.Device{}) {
		t.Errorf("the pool does not hold the file of %v, or holds that of no volume", device)
	}
	must.Succeed(t, p.Disk(id, e.Record).Grow(t.Context(), d, 2*mib))
	must.Succeed(t, v.GrowDevices())
	all, err := p.Host.Attachments()
	must.Succeed(t, err)
	if got := all.Devices[0].SizeBytes; got != 2*mib {
		t.Errorf("the device has %d bytes after the file grew to %d", got, 2*mib)
	}
	must.Succeed(t, p.Host.Mounts.(*bindtest.Fake).Unpublish(target, nil))
	want("attached", 0, true, volume.ErrNotFound)
	must.Succeed(t, v.Detach(t.Context()))
	want("detached", 0, false, volume.ErrNotFound)
}
