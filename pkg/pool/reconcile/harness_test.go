package reconcile_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr/testr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// newPool makes an empty pool on a real disk, with fakes of mounts and devices, in which no call works. Quotas may be nil, for none.
func newPool(t *testing.T, quotas quota.Facility) *reconcile.View {
	t.Helper()
	return newPoolAt(t, t.TempDir(), quotas)
}

func newPoolAt(t *testing.T, path string, quotas quota.Facility) *reconcile.View {
	t.Helper()
	configs, err := poolconfig.Parse(`[{"name":"local","path":"`+path+`"}]`, "/")
	must.Succeed(t, err)
	node, err := volume.ParseNodeID("node-1")
	must.Succeed(t, err)
	ignore := func(*dir.Dir) error { return nil }
	s, _, err := store.Create(t.Context(), &store.Location{Path: configs[0].Path, Node: node, Verify: ignore, Nested: ignore})
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	detect := func(*dir.Dir) (quota.Facility, error) { return quotas, nil }
	if quotas == nil {
		detect = func(*dir.Dir) (quota.Facility, error) { return nil, quota.ErrNone }
	}
	enforcer, err := limit.Options{Detect: detect}.Enforcer(s.Root(), &limit.Claims{})
	must.Succeed(t, err)
	dev, err := dir.Open(t.TempDir())
	must.Succeed(t, err)
	mounts, devices := &bindtest.Fake{}, looptest.NewFake(dev)
	t.Cleanup(func() { must.Succeed(t, errors.Join(devices.Close(), mounts.Close(), dev.Close())) })
	return &reconcile.View{
		Config: &configs[0], Node: node, Store: s, Enforcer: enforcer, Ledger: ledger.New(ledger.Policy{Overprovision: 1}), Peers: &reconcile.Peers{},
		Host:  content.Host{Mounts: mounts, Devices: devices, Dev: dev, Log: testr.New(t)},
		Lock:  func(volume.ID) (func(), error) { return func() {}, nil },
		Steps: new(atomic.Uint64), Log: testr.New(t),
		Failed: func(err error, _ string, _ ...any) { t.Error(err) },
		Left:   func(_ string, err error) { must.Succeed(t, err) },
	}
}

// makeBlock makes a block volume, and opens its directory.
func makeBlock(t *testing.T, p *reconcile.View, name string, bytes int64) (volume.ID, store.Entry, *dir.Dir) {
	t.Helper()
	id, err := volume.ParseID(name)
	must.Succeed(t, err)
	rec := store.NewRecord(id, volume.ModeBlock, bytes)
	rec.Thin = true
	d, applied, err := p.Enforcer.Make(p.Store.Root(), p.Store.Root(), name, rec.UID, reconcile.InfoOf(store.Entry{Record: rec}))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	rec.Quota, rec.ProjectID = string(applied.Kind), uint64(applied.ID)
	disk := p.Disk(id, rec)
	must.Succeed(t, disk.Make(t.Context(), d))
	rec.BlockBytes = disk.BlockBytes
	must.Succeed(t, p.Store.Records().Write(rec))
	return id, store.Entry{Record: rec, Present: true}, d
}
