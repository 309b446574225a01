package reconcile_test

import (
	"errors"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	mib     = 1 << 20
	promise = 2 * mib // of pvc-1, whose file has twice that
)

// grown is a pool with a block volume whose growth was interrupted after that of its file, and with the device of
// the file, which is not published. No call works in it.
func grown(t *testing.T) (p *reconcile.Repairs, id volume.ID, quotas *quotatest.Fake) {
	t.Helper()
	quotas = &quotatest.Fake{}
	p = &reconcile.Repairs{
		In:                 newPool(t, quotas),
		UnlessBusy:         func(_ volume.ID, do func() error) error { return do() },
		UnlessBusyAnywhere: func(_ volume.ID, do func() error) error { return do() },
		UnlessPromising:    func(_ volume.ID, do func() error) error { return do() },
	}
	id, e, d := makeBlock(t, p.In, "pvc-1", promise)
	file, err := content.OpenFile(id, d)
	must.Succeed(t, err)
	_, err = p.In.Host.Devices.Attach(file, loop.Options{})
	must.Succeed(t, errors.Join(err, file.Close()))
	must.Succeed(t, p.In.Disk(id, e.Record).Grow(t.Context(), d, 2*promise))
	must.Succeed(t, p.In.Index().Load())
	return p, id, quotas
}

func TestDevicesOfBusyVolumesAreNotDetached(t *testing.T) {
	p, _, _ := grown(t)
	for _, busy := range []bool{true, false} {
		p.UnlessBusy = func(_ volume.ID, do func() error) error {
			if busy {
				return nil
			}
			return do()
		}
		p.DetachUnpublished(t.Context())
		all := must.Value(p.In.Host.Attachments())(t)
		if attached := len(all.Devices) > 0; attached != busy {
			t.Errorf("with a call at work %v, the device is attached %v", busy, attached)
		}
	}
}

func TestLimitsAreRestored(t *testing.T) {
	p, id, quotas := grown(t)
	d := must.Value(p.In.Store.Root().Open(id.String()))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	c := p.In.Ledger.Known(id)
	for title, restore := range map[string]func(){
		"before calls": p.Limits,
		"during calls": func() {
			queued := p.AllLimits()
			p.In.Lock = func(volume.ID) (func(), error) { return nil, volume.ErrBusy }
			if p.LimitsOf(queued); len(queued) != 1 {
				t.Errorf("%d volumes are left while a call works on the only one", len(queued))
			}
			p.In.Lock = func(volume.ID) (func(), error) { return func() {}, nil }
			if p.LimitsOf(queued); len(queued) != 0 {
				t.Errorf("%d volumes are left", len(queued))
			}
		},
	} {
		must.Succeed(t, quotas.Limit(d, c.QuotaID(), quota.Limit{Bytes: mib}))
		restore()
		usage := must.Value(p.In.Enforcer.Usage(d, c))(t)
		if want := p.In.Enforcer.Sizes.Limit(c); usage.Limit.Bytes < want.Bytes {
			t.Errorf("%s: the limit is %+v, want %+v", title, usage.Limit, want)
		}
	}
}
