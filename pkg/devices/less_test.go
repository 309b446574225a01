package devices_test

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// availableAfterSignatures has a volume that no claim has had since its device was cleaned, by signatures alone.
func availableAfterSignatures(t *testing.T) (*devicestest.Harness, *devicestest.Disk) {
	t.Helper()
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	d := h.Disk("disk", 8*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	h.PVs = nil
	h.Offered()
	if r := h.Pass(); r.Available != 1 || len(r.Withdrawn) > 0 {
		t.Fatalf("found %+v, want it available", r)
	}
	return h, d
}

// withdrawn is what a volume is when the API has had it withdrawn.
func withdrawn(v devices.Volume) devices.Volume {
	v.Released, v.Withdrawn, v.ClaimUID, v.Claim = true, true, v.UID, "default/none"
	return v
}

// With zero no claim reads what an earlier one has left, one that got an available volume neither.
func TestAvailableVolumeThatWasCleanedByLessIsCleanedAgain(t *testing.T) {
	h, d := availableAfterSignatures(t)
	h.Config.Wipe = devices.WipeZero
	h.Restart()
	frozen := h.Request()
	frozen.Frozen = true
	if r := h.Agent.Pass(frozen); r.Available != 1 || len(r.Withdrawn) > 0 {
		t.Errorf("without a configuration found %+v, want nothing to happen", r)
	}
	if r := h.Pass(); r.Available != 0 || len(r.Withdrawn) != 1 || r.Withdrawn[0] != h.PVs[0].Name {
		t.Fatalf("found %+v, want it withdrawn", r)
	}
	d.WantPattern(2*mib, 6*mib) // until no claim can get it
	h.PVs[0] = withdrawn(h.PVs[0])
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	d.WantZero(0, 8*mib)
	h.PVs = nil
	h.Offered()
	if r := h.Pass(); r.Available != 1 || len(r.Withdrawn) > 0 {
		t.Errorf("found %+v, want it available", r)
	}
}

// A claim has got it before it was withdrawn.
func TestVolumeOfClaimIsNotWithdrawn(t *testing.T) {
	h, d := availableAfterSignatures(t)
	h.Config.Wipe = devices.WipeZero
	h.PVs[0] = devicestest.Bound(h.PVs[0])
	if r := h.Pass(); r.Available != 1 || len(r.Withdrawn)+len(r.Wiping)+len(r.Cleaned) > 0 {
		t.Errorf("found %+v, want it kept", r)
	}
	d.WantPattern(2*mib, 6*mib)
}

// A claim had it, and was taken from it by hand for the data, while there was no agent to see that.
func TestDataOnVolumeThatIsWithdrawnIsKept(t *testing.T) {
	for name, test := range map[string]struct {
		write func(t *testing.T, d *devicestest.Disk)
		want  devices.Reason
	}{
		"a filesystem": {func(t *testing.T, d *devicestest.Disk) { devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node) }, devices.HasSignature},
		"other data":   {func(_ *testing.T, d *devicestest.Disk) { d.Fill() }, devices.HasData},
	} {
		t.Run(name, func(t *testing.T) {
			h, d := availableAfterSignatures(t)
			h.Agent.Close()
			test.write(t, d)
			d.Untouched()
			h.Config.Wipe = devices.WipeZero
			h.Start()
			h.PVs[0] = withdrawn(h.PVs[0])
			h.Refused(test.want)
		})
	}
}

// A device that has grown has the rest of what was left still.
func TestGrownDeviceIsStillCleanedByLess(t *testing.T) {
	h, d := availableAfterSignatures(t)
	record, err := h.Records.Get(d.Path)
	must.Succeed(t, err)
	must.Succeed(t, d.Resize(16*mib))
	h.Pass()
	if after, err := h.Records.Get(d.Path); err != nil || after.Bytes == record.Bytes || after.Wipe != record.Wipe {
		t.Errorf("the record is %+v, %v; it was %+v", after, err, record)
	}
}
