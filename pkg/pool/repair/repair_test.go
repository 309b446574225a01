package repair_test

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr/testr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/repair"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	mib     = 1 << 20
	promise = 2 * mib // of pvc-1, whose file has twice that
)

// grown is a pool with a block volume whose growth was interrupted after that of its file, and with the device of
// the file, which is not published. No call works in it.
func grown(t *testing.T) (p *repair.Pool, id volume.ID, quotas *quotatest.Fake) {
	t.Helper()
	configs, err := poolconfig.Parse(`[{"name":"local","path":"`+t.TempDir()+`"}]`, "/")
	must.Succeed(t, err)
	node, err := volume.ParseNodeID("node-1")
	must.Succeed(t, err)
	ignore := func(*dir.Dir) error { return nil }
	s, _, err := store.Create(t.Context(), &store.Location{Path: configs[0].Path, Node: node, Verify: ignore, Nested: ignore})
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	quotas = &quotatest.Fake{}
	limits := limit.Options{Detect: func(*dir.Dir) (quota.Facility, error) { return quotas, nil }}
	keeper, err := limits.Keeper(s.Root(), &limit.Claims{})
	must.Succeed(t, err)
	dev, err := dir.Open(t.TempDir())
	must.Succeed(t, err)
	mounts, devices := &bindtest.Fake{}, looptest.NewFake(dev)
	t.Cleanup(func() { must.Succeed(t, errors.Join(devices.Close(), mounts.Close(), dev.Close())) })
	p = &repair.Pool{
		Pool: &scan.Pool{
			Config: &configs[0], Node: node, Store: s, Keeper: keeper, Ledger: ledger.New(ledger.Policy{Overprovision: 1}),
			Host:  content.Host{Mounts: mounts, Devices: devices, Dev: dev, Log: testr.New(t)},
			Lock:  func(volume.ID) (func(), error) { return func() {}, nil },
			Steps: new(atomic.Uint64), Log: testr.New(t),
		},
		UnlessBusy:         func(_ volume.ID, do func() error) error { return do() },
		UnlessBusyAnywhere: func(_ volume.ID, do func() error) error { return do() },
		UnlessPromising:    func(_ volume.ID, do func() error) error { return do() },
	}
	id, err = volume.ParseID("pvc-1")
	must.Succeed(t, err)
	rec := store.NewRecord(id, volume.ModeBlock, promise)
	rec.Thin = true
	d, kept, err := keeper.Make(s.Root(), s.Root(), rec.ID, rec.UID, scan.CardOf(store.Entry{Record: rec}))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	rec.Quota, rec.ProjectID = string(kept.Kind), uint64(kept.ID)
	disk := p.Disk(id, rec)
	must.Succeed(t, disk.Make(t.Context(), d))
	rec.BlockBytes = disk.BlockBytes
	must.Succeed(t, s.WriteRecord(rec))
	file, err := content.OpenFile(id, d)
	must.Succeed(t, err)
	_, err = devices.Attach(file, loop.Options{})
	must.Succeed(t, errors.Join(err, file.Close()))
	must.Succeed(t, disk.Grow(t.Context(), d, 2*promise))
	must.Succeed(t, p.Load())
	return p, id, quotas
}

func TestInterruptedGrowthIsFinished(t *testing.T) {
	p, id, _ := grown(t)
	p.Records()
	rec, err := p.Store.ReadRecord(id)
	must.Succeed(t, err)
	if known := p.Ledger.Known(id).Promised; rec.Bytes != 2*promise || known != 2*promise {
		t.Errorf("the record has %d bytes, the ledger %d, want %d", rec.Bytes, known, 2*promise)
	}
	p.Devices()
	all, err := p.Host.Attachments()
	must.Succeed(t, err)
	if got := all.Devices[0].SizeBytes; got != 2*promise {
		t.Errorf("the device has %d bytes, want %d", got, 2*promise)
	}
}

func TestDevicesOfBusyVolumesStay(t *testing.T) {
	p, _, _ := grown(t)
	for _, busy := range []bool{true, false} {
		p.UnlessBusy = func(_ volume.ID, do func() error) error {
			if busy {
				return nil
			}
			return do()
		}
		p.DetachUnpublished(t.Context())
		all, err := p.Host.Attachments()
		must.Succeed(t, err)
		if attached := len(all.Devices) > 0; attached != busy {
			t.Errorf("with a call at work %v, the device is attached %v", busy, attached)
		}
	}
}

func TestLimitsAreRestored(t *testing.T) {
	p, id, quotas := grown(t)
	d, err := p.Store.Root().Open(id.String())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	c := p.Ledger.Known(id)
	for title, restore := range map[string]func(){
		"before calls": p.Limits,
		"during calls": func() {
			queued := p.AllLimits()
			p.Lock = func(volume.ID) (func(), error) { return nil, volume.ErrBusy }
			if p.LimitsOf(queued); len(queued) != 1 {
				t.Errorf("%d volumes are left while a call works on the only one", len(queued))
			}
			p.Lock = func(volume.ID) (func(), error) { return func() {}, nil }
			if p.LimitsOf(queued); len(queued) != 0 {
				t.Errorf("%d volumes are left", len(queued))
			}
		},
	} {
		must.Succeed(t, quotas.Limit(d, c.QuotaID(), quota.Limit{Bytes: mib}))
		restore()
		usage, err := p.Keeper.Usage(d, c)
		must.Succeed(t, err)
		if want := p.Keeper.Limit(c); usage.Limit.Bytes < want.Bytes {
			t.Errorf("%s: the limit is %+v, want %+v", title, usage.Limit, want)
		}
	}
}
