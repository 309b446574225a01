package devices_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

func TestReleasedDeviceIsWiped(t *testing.T) {
	for _, wipe := range []devices.Wipe{devices.WipeSignatures, devices.WipeDiscard, devices.WipeZero} {
		t.Run(string(wipe), func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = wipe
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			d.WantZero(0, 2*mib)
			d.WantZero(6*mib, 8*mib)
			if wipe == devices.WipeSignatures {
				d.WantPattern(2*mib, 6*mib)
			} else {
				d.WantZero(2*mib, 6*mib)
			}
		})
	}
}

func TestSignatureRanges(t *testing.T) {
	const gib = 1 << 30
	for size, want := range map[int64][][2]int64{
		4096:           {{0, 4096}},
		150 * mib:      {{0, 150 * mib}},
		1*gib + 10*mib: {{0, 100 * mib}, {934 * mib, 1034 * mib}},
		300 * gib: {{0, 100 * mib}, {gib, gib + 100*mib}, {10 * gib, 10*gib + 100*mib}, {100 * gib, 100*gib + 100*mib},
			{256 * gib, 256*gib + 100*mib}, {300*gib - 100*mib, 300 * gib}},
	} {
		if diff := cmp.Diff(want, devices.WipeSignatures.Spans(size)); diff != "" {
			t.Errorf("%d bytes: %s", size, diff)
		}
	}
	if got := devices.WipeSignatures.Spans(2000 * gib); len(got) != 7 || got[5] != [2]int64{1000 * gib, 1000*gib + 100*mib} {
		t.Errorf("of 2 TB the ranges are %v", got)
	}
}

// The whole life of a device: offered, bound, released, cleaned, offered again. Nothing is cleaned twice.
func TestDeviceLifecycle(t *testing.T) {
	h := devicestest.New(t)
	h.Config.Wipe = devices.WipeZero
	d := h.Blank("disk", 32*mib)
	want := devices.Offer{Name: "local-node-disk", Path: d.Path, Bytes: 32 * mib}
	o := h.Offered()
	if o.Name != want.Name || o.Path != want.Path || o.Bytes != want.Bytes {
		t.Errorf("offered %+v, want %+v", o, want)
	}
	devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
	h.PVs = []devices.Volume{devicestest.Bound(d.Volume(o.Name))}
	sum := d.Sum()
	if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 || d.Sum() != sum {
		t.Fatalf("a bound volume: %+v", r)
	}
	h.PVs = []devices.Volume{h.Released(d.Volume(o.Name))}
	if r := h.Pass(); len(r.Cleaned) != 1 || r.Cleaned[0] != o.Name {
		t.Fatalf("a released volume: %+v, want it cleaned", r)
	}
	d.WantZero(0, 32*mib)
	wiped := h.Wiped()
	// The agent is restarted before the volume is deleted.
	h.Restart()
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Fatalf("after a restart: %+v, want it cleaned", r)
	}
	h.PVs = nil
	h.Offered()
	if h.Wiped() != wiped {
		t.Errorf("%d bytes were overwritten again", h.Wiped()-wiped)
	}
}

// itsOwn stands for the identity of the disk.
const itsOwn = "its own"

func changed(r devices.Record, change func(*devices.Record)) devices.Record {
	change(&r)
	return r
}

// Only what is released is cleaned: what else is on a device was written by a claim that may want it, or by another program.
func TestDeviceWithoutVolumeIsNotWiped(t *testing.T) {
	released := devices.Record{State: devices.Cleaning, Wipe: devices.WipeSignatures, Identity: itsOwn, Volume: "pv", VolumeUID: "uid of pv", ClaimUID: "uid-1", Claim: "default/data"}
	for name, c := range map[string]struct {
		record devices.Record
		sign   bool
		want   devices.Reason
	}{
		"the volume of a claim disappeared":                             {devices.Record{State: devices.Bound}, true, devices.WasBound},
		"the volume of a claim with raw data disappeared":               {devices.Record{State: devices.Bound}, false, devices.WasBound},
		"the same, and the disk has another identity now":               {devices.Record{State: devices.Bound, Identity: "serial=other"}, false, devices.WasBound},
		"an offered device was formatted meanwhile":                     {devices.Record{State: devices.Offered}, true, devices.HasSignature},
		"a clean device was formatted meanwhile":                        {devices.Record{State: devices.Clean}, true, devices.HasSignature},
		"an unclaimed volume was deleted":                               {devices.Record{State: devices.Offered}, false, devices.HasData},
		"a clean device was written to meanwhile":                       {devices.Record{State: devices.Clean, Wipe: devices.WipeSignatures}, false, devices.HasData},
		"cleaning had begun":                                            {released, true, devices.WasBound},
		"cleaning had begun, on raw data":                               {released, false, devices.WasBound},
		"cleaning had begun, on a disk that has been replaced":          {changed(released, func(r *devices.Record) { r.Identity = "serial=other" }), true, devices.HasSignature},
		"cleaning had begun, on a disk of another size":                 {changed(released, func(r *devices.Record) { r.Bytes = 64 * mib }), true, devices.HasSignature},
		"cleaning had begun, on a disk that cannot be told from others": {changed(released, func(r *devices.Record) { r.Identity, r.Instance = "", "another boot/1/7:0" }), false, devices.WasBound},
		"cleaning had begun, on a disk that no claim had":               {changed(released, func(r *devices.Record) { r.ClaimUID = "" }), false, devices.HasData},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			if c.sign {
				devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
			}
			c.record.Path = d.Path
			if c.record.Bytes == 0 {
				c.record.Bytes = d.Bytes()
			}
			if c.record.Identity == itsOwn {
				c.record.Identity = d.Identity()
			}
			must.Succeed(t, h.Records.Put(c.record))
			d.Untouched()
			if p := h.Refused(c.want); !strings.Contains(p.Detail, "blkdiscard --zeroout "+d.Path) {
				t.Errorf("the problem is %q, want it to say how the disk is given", p.Detail)
			}
		})
	}
}

// An administrator who deletes a volume that was released, or in use, has its device, and may have given it to something else.
func TestVolumeDeletedBeforeItsDeviceIsCleanIsKept(t *testing.T) {
	for name, before := range map[string]func(h *devicestest.Harness, v devices.Volume){
		"in use": func(h *devicestest.Harness, v devices.Volume) {
			h.PVs = []devices.Volume{devicestest.Bound(v)}
			h.Pass()
		},
		"released, while it is cleaned": func(h *devicestest.Harness, v devices.Volume) {
			h.PVs = []devices.Volume{h.Released(v)}
			goOn := h.PassUntilCleaning()
			h.PVs = nil
			h.Agent.Pass(h.Request())
			goOn()
			h.Agent.Close()
			h.Start()
			if h.Wiped() != mib {
				h.Errorf("%d bytes were overwritten, want no step after the volume was deleted", h.Wiped())
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 16*mib)
			before(h, d.Volume("pv"))
			h.PVs = nil
			written := d.Written()
			for range 2 {
				h.Refused(devices.WasBound)
				h.Restart()
			}
			if now := d.Written(); now != written {
				t.Errorf("the kernel has counted %q, and before %q", now, written)
			}
		})
	}
}

// What earlier claims left must not be read by the next one, and is cleaned by more only for a volume that is released.
func TestDeviceThatWasCleanedByLessIsRefused(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	h.Pass()
	h.PVs = nil
	h.Config.Wipe = devices.WipeZero
	d.Untouched()
	if p := h.Refused(devices.HasData); !strings.Contains(p.Detail, "signatures") {
		t.Errorf("the problem is %q, want it to say how it was cleaned", p.Detail)
	}
	h.Config.Wipe = devices.WipeSignatures
	h.Offered()
}

// A device that has grown has the rest of what was left still.
func TestDeviceThatWasCleanedByLessIsRefusedAfterItHasGrown(t *testing.T) {
	h, d := availableAfterSignatures(t)
	must.Succeed(t, d.Resize(16*mib))
	h.Pass()
	h.PVs = nil
	h.Config.Wipe = devices.WipeZero
	d.Untouched()
	if p := h.Refused(devices.HasData); !strings.Contains(p.Detail, "signatures") {
		t.Errorf("the problem is %q, want it to say how it was cleaned", p.Detail)
	}
}

// A claim may get an available volume at any time, so that it stays as it was cleaned.
func TestAvailableVolumeIsCleanedByMoreAfterItsNextClaim(t *testing.T) {
	h, d := availableAfterSignatures(t)
	h.Config.Wipe = devices.WipeZero
	h.Restart()
	if r := h.Pass(); r.Available != 1 || len(r.Wiping)+len(r.Cleaned)+len(r.Problems) > 0 {
		t.Fatalf("found %+v, want it available", r)
	}
	d.WantPattern(2*mib, 6*mib)
	h.PVs[0] = devicestest.Bound(h.PVs[0])
	h.Pass()
	h.PVs[0] = h.Released(h.PVs[0])
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	d.WantZero(0, 8*mib)
}

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
	if r := h.Pass(); r.Available != 1 {
		t.Fatalf("found %+v, want it available", r)
	}
	return h, d
}

// What the users of a volume were promised is kept, also where the configuration has changed or there is none.
func TestVolumeIsCleanedAsPromised(t *testing.T) {
	for name, c := range map[string]struct{ promised, configured, want devices.Wipe }{
		"less is configured now": {devices.WipeZero, devices.WipeSignatures, devices.WipeZero},
		"more is configured now": {devices.WipeDiscard, devices.WipeZero, devices.WipeZero},
		"nothing was promised":   {"", devices.WipeSignatures, devices.WipeSignatures},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = c.configured
			d := h.Disk("disk", 8*mib)
			v := h.Released(d.Volume("pv"))
			v.Wipe = c.promised
			h.PVs = []devices.Volume{v}
			if r := h.Pass(); len(r.Cleaned) != 1 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			if record, err := h.Records.Get(d.Path); err != nil || record.Wipe != c.want {
				t.Errorf("it was cleaned by %+v, %v; want %s", record, err, c.want)
			}
			if c.want == devices.WipeSignatures {
				d.WantPattern(2*mib, 6*mib)
			} else {
				d.WantZero(0, 8*mib)
			}
		})
	}
}

// While nothing may be changed, cleaning stops, and volumes are counted and noted all the same.
func TestFrozenNode(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	h.Config.Wipe = devices.WipeZero
	used, released, gone := h.Disk("disk-used", 8*mib), h.Disk("disk-released", 8*mib), h.Disk("disk-gone", 4*mib)
	fresh := h.Disk("disk-new", 8*mib)
	h.PVs = []devices.Volume{h.Released(released.Volume("pv-released")), devicestest.Bound(used.Volume("pv-used")), gone.Volume("pv-gone")}
	must.Succeed(t, os.Remove(gone.Path))
	frozen := h.Request()
	frozen.Frozen, frozen.Retry = true, true
	begun := make(chan struct{})
	goOn := make(chan struct{})
	h.Step = func() {
		h.Step = nil
		close(begun)
		<-goOn
	}
	h.Agent.Pass(devices.Request{Volumes: h.PVs, Wipe: devices.WipeZero})
	<-begun
	h.Agent.Pass(frozen)
	close(goOn)
	r := h.Agent.Pass(frozen)
	for len(r.Wiping) > 0 {
		<-h.Changed()
		r = h.Agent.Pass(frozen)
	}
	if r.Available != 1 || len(r.Problems) != 1 || r.Problems[0].Volume != "pv-gone" || len(r.Cleaned)+len(r.Offers)+len(r.Wiping) > 0 {
		t.Errorf("found %+v, want one in use, one missing, and nothing else", r)
	}
	if record, err := h.Records.Get(used.Path); err != nil || record.State != devices.Bound {
		t.Errorf("the record of the one in use is %+v, %v", record, err)
	}
	released.WantPattern(6*mib, 8*mib)
	fresh.WantPattern(0, 8*mib)
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Errorf("found %+v, want cleaning to go on then", r)
	}
}

// Raw data has no signature, and a device may have another path after a reboot.
func TestDataOfClaimIsKeptUnderAnotherPath(t *testing.T) {
	for _, state := range []devices.State{devices.Bound, devices.Cleaning} {
		t.Run(string(state), func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk-b", 32*mib)
			h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
			h.Pass()
			record := must.Value(h.Records.Get(d.Path))(t)
			record.State = state
			must.Succeed(t, h.Records.Put(record))
			d.Untouched()
			h.PVs = nil
			path := filepath.Join(h.Dir, "disk-a")
			must.Succeed(t, os.Rename(d.Path, path))
			if p := h.Refused(devices.WasBound); p.Path != path {
				t.Errorf("refused is %s", p.Path)
			}
		})
	}
}

// Another disk at the path of one with the data of a claim gets a record of its own, and that of the claim stays.
func TestDataOfClaimIsKeptAfterAnotherDiskHadItsPath(t *testing.T) {
	h := newIdentified(t)
	records := t.TempDir()
	h.Open(records)
	h.Restart()
	d := h.Blank("disk-a", 64*mib)
	h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
	h.Pass()
	h.PVs = nil
	d.Untouched()
	h.Refused(devices.WasBound)
	moved := filepath.Join(h.Dir, "moved")
	must.Succeed(t, os.Rename(d.Path, moved))
	must.Succeed(t, os.Rename(h.Blank("another", 32*mib).Path, d.Path))
	h.Offered()
	h.Pass()
	path := filepath.Join(h.Dir, "disk-b")
	must.Succeed(t, os.Rename(moved, path))
	if p := h.Refused(devices.WasBound); p.Path != path {
		t.Errorf("refused is %s", p.Path)
	}
	// Also where it is at its path again, with the other one's record.
	h.PVs = nil
	must.Succeed(t, os.Remove(d.Path))
	must.Succeed(t, os.Rename(path, d.Path))
	p := h.Refused(devices.WasBound)
	_, name, _ := strings.Cut(p.Detail, "remove its record ")
	must.Succeed(t, os.Remove(filepath.Join(records, name)))
	h.Offered()
}

// A record that speaks of another volume or claim than the API, as after the API was restored from a backup, leaves it
// open whose data is on the device.
func TestReleasedVolumeThatItsRecordContradictsIsKept(t *testing.T) {
	bound := devices.Record{State: devices.Bound, Identity: itsOwn, Volume: "pv", VolumeUID: "uid of pv", ClaimUID: "uid-1", Claim: "default/data"}
	for name, c := range map[string]struct {
		change  func(r *devices.Record, d *devicestest.Disk)
		cleaned bool
	}{
		"the same":                        {func(*devices.Record, *devicestest.Disk) {}, true},
		"no claim had it, as is known":    {func(r *devices.Record, _ *devicestest.Disk) { r.State, r.ClaimUID, r.Claim = devices.Offered, "", "" }, true},
		"another claim":                   {func(r *devices.Record, _ *devicestest.Disk) { r.ClaimUID, r.Claim = "uid-2", "default/data" }, false},
		"another volume":                  {func(r *devices.Record, _ *devicestest.Disk) { r.Volume = "pv-2" }, false},
		"another volume of that name":     {func(r *devices.Record, _ *devicestest.Disk) { r.VolumeUID = "uid of a later one" }, false},
		"another claim, and it was clean": {func(r *devices.Record, _ *devicestest.Disk) { r.State, r.ClaimUID = devices.Clean, "uid-2" }, false},
		"another volume that was offered": {func(r *devices.Record, _ *devicestest.Disk) {
			r.State, r.VolumeUID, r.ClaimUID = devices.Offered, "uid of a later one", ""
		}, false},
		"another volume, by another path": {func(r *devices.Record, _ *devicestest.Disk) {
			r.Path, r.Volume, r.ClaimUID = "/dev/other", "pv-2", "uid-2"
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			record := bound
			record.Path, record.Bytes, record.Identity = d.Path, d.Bytes(), "backing_file="+d.Image
			c.change(&record, d)
			must.Succeed(t, h.Records.Put(record))
			if c.cleaned {
				if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
					t.Fatalf("found %+v, want it cleaned", r)
				}
				return
			}
			d.Untouched()
			if p := h.Refused(devices.Contradiction); p.Volume != "pv" {
				t.Errorf("the problem is %+v, want one of the volume", p)
			}
		})
	}
}

// While the API has a volume that the record contradicts, the record stays as it is, so that a later release does not free
// the data of the claim that it names.
func TestRecordIsKeptAgainstVolumeThatItContradicts(t *testing.T) {
	for name, c := range map[string]struct {
		now  func(devices.Volume) devices.Volume
		want devices.Reason // of the volume, and empty for none
		last devices.Reason // after it was released
	}{
		"restored, and available": {func(v devices.Volume) devices.Volume { v.UID = "uid of an earlier one"; return v }, devices.Contradiction, devices.Contradiction},
		"restored, and in use by another claim": {func(v devices.Volume) devices.Volume {
			v = devicestest.Bound(v)
			v.UID, v.ClaimUID, v.Claim = "uid of an earlier one", "uid-0", "default/other"
			return v
		}, devices.Contradiction, devices.Contradiction},
		// As by Velero: everything has a new UID.
		"restored with its claim": {func(v devices.Volume) devices.Volume {
			v = devicestest.Bound(v)
			v.UID, v.ClaimUID = "a new uid", "a new uid"
			return v
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
			h.Pass()
			now := c.now(d.Volume("pv"))
			h.PVs = []devices.Volume{now}
			if r := h.Pass(); len(r.Problems) > 0 != (c.want != "") || c.want != "" && r.Problems[0].Reason != c.want {
				t.Errorf("found %+v, want the problem %q", r, c.want)
			}
			now.Used, now.Released = false, true
			if now.ClaimUID == "" {
				now.ClaimUID, now.Claim = "uid-3", "default/third"
			}
			h.PVs = []devices.Volume{now}
			if c.last == "" {
				if r := h.Pass(); len(r.Cleaned) != 1 {
					t.Errorf("found %+v, want it cleaned", r)
				}
				return
			}
			d.Untouched()
			h.Refused(c.last)
		})
	}
}

// An administrator who makes a volume available by hand keeps what is on it: the record still has the claim whose data it is.
func TestDataOfVolumeThatIsAvailableAgainIsKept(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 8*mib)
	d.Untouched()
	h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
	h.Pass()
	h.PVs = []devices.Volume{d.Volume("pv")}
	if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 {
		t.Errorf("found %+v, want it available", r)
	}
	h.PVs = nil
	h.Refused(devices.WasBound)
}

// Of a released volume that neither a record nor its own annotation knows the device of, another disk may be at the path, whatever is
// on it.
func TestUnknownReleasedVolumeIsKept(t *testing.T) {
	for name, made := range map[string][]string{"a filesystem": {"mkfs.ext4", "-q", "-F"}, "no signature, as never used": nil} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			if made != nil {
				devicestest.Run(t, append(made, d.Node)...)
			}
			v := devicestest.Released(d.Volume("pv"))
			v.Identity = ""
			h.PVs = []devices.Volume{v}
			d.Untouched()
			h.Refused(devices.NotIdentified)
		})
	}
}

// The administrator says that it is the device, by its identity, or gives up the volume and erases the device by hand.
func TestUnknownReleasedVolumeIsLetGo(t *testing.T) {
	t.Run("by its identity", func(t *testing.T) {
		h := newIdentified(t)
		d := h.Disk("disk", 8*mib)
		v := d.Volume("pv")
		v.Identity = "" // when it was recorded
		h.PVs = []devices.Volume{h.Released(v)}
		if p := h.Refused(devices.NotIdentified); !strings.Contains(p.Detail, d.Identity()) {
			t.Errorf("the problem is %q, want it to name what the disk is known by", p.Detail)
		}
		h.PVs[0].Identity = d.Identity()
		if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
			t.Errorf("found %+v, want it cleaned", r)
		}
	})
	t.Run("by deleting the volume", func(t *testing.T) {
		h := newIdentified(t)
		d := h.Disk("disk", 8*mib)
		h.PVs = []devices.Volume{devicestest.Released(d.Volume("pv"))}
		h.Refused(devices.NotIdentified)
		h.PVs = nil
		h.Refused(devices.HasData)
		devicestest.Run(t, "blkdiscard", "--zeroout", d.Node)
		h.Offered()
	})
}

// A PersistentVolume that is restored from a backup names the claim that it had, which is there anew, or will be. Until that is bound
// Kubernetes calls the volume released.
func TestRestoredVolumeIsNotCleaned(t *testing.T) {
	for name, c := range map[string]struct {
		recorded bool
		want     devices.Reason
	}{
		"records are there": {true, devices.Contradiction},
		"records are lost":  {false, devices.NotIdentified},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 8*mib)
			d.Untouched()
			v := devicestest.Bound(d.Volume("pv"))
			if c.recorded {
				h.PVs = []devices.Volume{v}
				h.Pass()
			}
			v.UID, v.Bound = "uid of the restored one", false
			h.PVs = []devices.Volume{v}
			h.Pass()
			h.PVs[0] = devicestest.Released(v)
			h.Refused(c.want)
			h.PVs[0] = devicestest.Bound(v) // its claim has it again
			if r := h.Pass(); len(r.Problems) > 0 {
				t.Errorf("problems %v", r.Problems)
			}
		})
	}
}

// Nor one that has the name of a volume that the API server may have refused, on a disk that has got its data back since.
func TestRestoredVolumeOfTheNameOfAnOfferIsNotCleaned(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	r := h.Pass()
	if len(r.Offers) != 1 {
		t.Fatalf("found %+v, want an offer", r)
	}
	must.Succeed(t, h.Agent.Offering(t.Context(), r.Offers[0]))
	must.Succeed(t, h.Agent.Offered(r.Offers[0], "", errors.New("no answer")))
	d.Fill()
	d.Untouched()
	h.PVs = []devices.Volume{devicestest.Released(d.Volume(r.Offers[0].Name))}
	h.Refused(devices.NotIdentified)
}

// Its annotation says which disk it is of, whatever its user has made there, and whether a pod has ever mounted it or not: it was clean
// when it was offered.
func TestReleasedVolumeIsKnownByItsIdentity(t *testing.T) {
	for name, other := range map[string]bool{"the same disk": false, "another disk": true} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			devicestest.Run(t, "mkswap", d.Node)
			v := h.Released(d.Volume("pv"))
			h.PVs = []devices.Volume{v}
			if other {
				h.PVs[0].Identity = "wwid=naa.5000"
				d.Untouched()
				h.Refused(devices.OtherDevice)
				return
			}
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
		})
	}
}

// Whatever the cache has, the API is asked before a device is overwritten.
func TestAPIIsReadBeforeWipe(t *testing.T) {
	for name, c := range map[string]struct {
		cache, api func(d *devicestest.Disk) []devices.Volume
		err        error
	}{
		"the volume was just made": {nil, func(d *devicestest.Disk) []devices.Volume { return []devices.Volume{d.Volume("pv")} }, nil},
		"the volume is in use again": {func(d *devicestest.Disk) []devices.Volume {
			return []devices.Volume{devicestest.Released(d.Volume("pv"))}
		},
			func(d *devicestest.Disk) []devices.Volume { return []devices.Volume{devicestest.Bound(d.Volume("pv"))} }, nil},
		"the volume is another one": {func(d *devicestest.Disk) []devices.Volume {
			return []devices.Volume{devicestest.Released(d.Volume("pv"))}
		},
			func(d *devicestest.Disk) []devices.Volume {
				return []devices.Volume{devicestest.Released(d.Volume("pv-2"))}
			}, nil},
		"the volume is gone": {func(d *devicestest.Disk) []devices.Volume {
			return []devices.Volume{devicestest.Released(d.Volume("pv"))}
		}, nil, nil},
		"the API does not answer": {func(d *devicestest.Disk) []devices.Volume {
			return []devices.Volume{devicestest.Released(d.Volume("pv"))}
		},
			nil, errors.New("no answer")},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Blank("disk", 32*mib)
			d.Untouched()
			if c.cache != nil {
				h.PVs = c.cache(d)
				h.Released(h.PVs[0]) // has a record
			}
			h.API = func() (volumes []devices.Volume, err error) {
				if c.api != nil {
					volumes = c.api(d)
				}
				return volumes, c.err
			}
			r := h.Pass()
			if len(r.Offers) > 0 || len(r.Cleaned) > 0 {
				t.Errorf("found %+v, want nothing offered or cleaned", r)
			}
			if c.err != nil && (len(r.Problems) != 1 || r.Problems[0].Reason != devices.NotConfirmed) {
				t.Errorf("found %+v, want it to say who did not answer", r)
			}
		})
	}
}

// A program may open a device that is held, but for an exclusive open, while the API is asked.
func TestDeviceUsedWhileTheAPIIsAskedIsNotCleaned(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 8*mib)
	d.Untouched()
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	h.API = func() ([]devices.Volume, error) {
		h.API = nil
		devicestest.With(t, `exec 3<>"$1"`, d.Node)
		return h.PVs, nil
	}
	h.Refused(devices.InUse)
}

// The agent is told of its own volumes only. Others are found when the API is asked.
func TestDeviceOfForeignVolumeIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		path     func(t *testing.T, d *devicestest.Disk) string
		released bool
	}{
		"new":            {func(_ *testing.T, d *devicestest.Disk) string { return d.Path }, false},
		"new, by a link": {func(_ *testing.T, d *devicestest.Disk) string { return d.Node }, false},
		"released":       {func(_ *testing.T, d *devicestest.Disk) string { return d.Node }, true},
		// Only the partition is the other's.
		"released, in part": {func(t *testing.T, d *devicestest.Disk) string { return addPartition(t, d.Node) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Blank("disk", 32*mib)
			foreign := devices.Volume{Name: "by-hand", UID: "uid of by-hand", Path: c.path(t, d), Foreign: true}
			if c.released {
				h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			}
			h.API = func() ([]devices.Volume, error) { return append([]devices.Volume{foreign}, h.PVs...), nil }
			d.Untouched()
			if p := h.Refused(devices.OfOthers); !strings.Contains(p.Detail, "by-hand") {
				t.Errorf("the problem is %+v, want it to name the volume", p)
			}
		})
	}
}

// The agent's container has only /dev of the node. The static provisioner of sig-storage wants links to disks in /mnt.
func TestDeviceOfForeignVolumeByAPathThatOnlyTheNodeHas_isRefused(t *testing.T) {
	for name, released := range map[string]bool{"new": false, "released": true} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Blank("disk", 32*mib)
			d.Untouched()
			h.Root = t.TempDir()
			h.Restart()
			var st unix.Stat_t
			must.Succeed(t, unix.Stat(d.Node, &st))
			must.Succeed(t, os.MkdirAll(filepath.Join(h.Root, "mnt/disks of this test"), 0o755))
			must.Succeed(t, unix.Mknod(filepath.Join(h.Root, "mnt/node"), unix.S_IFBLK|0o600, int(st.Rdev)))
			must.Succeed(t, os.Symlink("/mnt/node", filepath.Join(h.Root, "mnt/disks of this test/a")))
			if released {
				h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			}
			foreign := devices.Volume{Name: "static", Path: "/mnt/disks of this test/a", Foreign: true}
			h.API = func() ([]devices.Volume, error) { return append([]devices.Volume{foreign}, h.PVs...), nil }
			h.Refused(devices.OfOthers)
		})
	}
}

// A device that need not be cleaned is offered only if no process has it either.
func TestCleanDeviceOfForeignVolumeIsRefused(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	h.Offered()
	h.PVs = nil
	h.API = func() ([]devices.Volume, error) {
		return []devices.Volume{{Name: "by-hand", Path: d.Node, Foreign: true}}, nil
	}
	must.Succeed(t, h.Records.Put(devices.Record{Path: d.Path, Bytes: d.Bytes(), State: devices.Clean, Wipe: devices.WipeSignatures}))
	h.Refused(devices.OfOthers)
}

// A name that a volume of another node has is made unique.
func TestNameOfOtherNodesVolumeIsNotTaken(t *testing.T) {
	h := devicestest.New(t)
	h.Blank("disk", 8*mib)
	h.Taken = map[string]bool{"local-node-disk": true}
	if o := h.Offered(); !strings.HasPrefix(o.Name, "local-node-disk-") || len(o.Name) != len("local-node-disk-0123456789") {
		t.Errorf("it is offered as %s", o.Name)
	}
}

// childVariable has this test binary clean a disk in small steps. It has the disk's path, the way of cleaning, and the directory of the records.
const childVariable = "DEVICES_TEST_CLEAN"

// cleanStepwise is what that binary does.
func cleanStepwise(disk string, wipe devices.Wipe, dir string) error {
	devices.UseSmallSteps()
	records, err := devices.OpenRecords(dir)
	if err != nil {
		return err
	}
	number, err := blockdev.At(disk)
	if err != nil {
		return err
	}
	facts, err := blockdev.Inspect(number)
	if err != nil {
		return err
	}
	v := devices.Volume{Name: "pv", UID: "uid of pv", Path: disk, Bytes: facts.SizeBytes, Identity: facts.Identity}
	api := list{devicestest.Released(v)}
	changed := make(chan struct{}, 100)
	a := devices.NewAgent(devices.Options{Node: "node", Records: records, API: api, Log: logr.Discard(), View: devicestest.View(), Changed: func() { changed <- struct{}{} }, Wiped: func(int64) {}})
	a.Pass(devices.Request{Volumes: list{devicestest.Bound(v)}})
	for {
		r := a.Pass(devices.Request{Volumes: api, Wipe: wipe})
		if len(r.Cleaned)+len(r.Problems) > 0 {
			return fmt.Errorf("was not killed, and found %+v", r)
		}
		<-changed
	}
}

type list []devices.Volume

func (l list) Volumes(context.Context) ([]devices.Volume, map[string]bool, error) { return l, nil, nil }
func (l list) Attaching(context.Context) (string, error)                          { return "", nil }
func (l list) Reserve(context.Context, string) (string, error)                    { return "node", nil }

// Cleaning goes on where an agent has ended it, unless what it had cleaned by then may have been written to.
func TestCleaningGoesOnAfterRestart(t *testing.T) {
	for name, c := range map[string]struct{ used, written, goesOn bool }{
		"": {goesOn: true}, "under a user": {used: true}, "and a write": {written: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			passed, ended, end := make(chan struct{}), make(chan struct{}), func() {}
			half := func() {
				if c.used {
					end = devicestest.With(t, `exec 3<>"$1"`, d.Node)
				}
				go func() { <-passed; h.Agent.Close(); close(ended) }()
				<-h.Agent.Ending()
			}
			afterStep(h, 4, half)
			h.Agent.Pass(h.Request())
			close(passed)
			<-ended
			end()
			if c.written {
				d.WriteAt(devicestest.Pattern(), 0)
			}
			h.Start()
			if r := h.Pass(); len(r.Cleaned) != 1 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			d.WantZero(0, 8*mib)
			if h.Wiped() == 8*mib != c.goesOn {
				t.Errorf("%d bytes were overwritten in all; it was to go on: %t", h.Wiped(), c.goesOn)
			}
		})
	}
}

// afterStep has a test do something once in the middle of cleaning.
func afterStep(h *devicestest.Harness, step int, do func()) {
	h.Step = func() {
		if step--; step == 0 {
			h.Step = nil
			do()
		}
	}
}

// Another program writes to what is cleaned already, and ends once it was seen: nothing that it has left is given to the next claim.
func TestCleaningBeginsAnewAfterUser(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	t.Cleanup(devices.CheckEachStep())
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", 8*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	end := func() {}
	afterStep(h, 4, func() {
		d.WriteAt(devicestest.Pattern(), mib)
		end = devicestest.With(t, `exec 3<>"$1"`, d.Node)
	})
	h.Refused(devices.InUse)
	end()
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	d.WantZero(0, 8*mib)
}

// An API server that does not answer for a moment has cleaning go on there: a disk that takes a day would never be clean.
func TestCleaningGoesOnAfterFailureOfTheAPI(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	t.Cleanup(devices.CheckEachStep())
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", 16*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	asked := 0
	h.API = func() ([]devices.Volume, error) {
		if asked++; asked%12 == 0 {
			return nil, errors.New("etcdserver: leader changed")
		}
		return h.PVs, nil
	}
	for tries := 0; len(h.Pass().Cleaned) != 1; tries++ {
		if tries == 20 {
			t.Fatal("it is never clean")
		}
	}
	d.WantZero(0, 16*mib)
	if h.Wiped() != 16*mib {
		t.Errorf("%d bytes were overwritten", h.Wiped())
	}
}

// What is written to a clean device before its volume is deleted is not given to the next claim, also where it is at no place that is looked at.
func TestDeviceThatWasWrittenToWhenCleanIsCleanedAnew(t *testing.T) {
	const at = 16*mib + 80<<10 // between two samples
	for name, write := range map[string]func(h *devicestest.Harness, d *devicestest.Disk){
		"by a user that is seen at the end": func(h *devicestest.Harness, d *devicestest.Disk) {
			end := func() {}
			afterStep(h, 60, func() {
				d.WriteAt(devicestest.Pattern()[:32<<10], at)
				end = devicestest.With(h, `exec 3<>"$1"`, d.Node)
			})
			h.Refused(devices.InUse)
			end()
		},
		"between two agents": func(h *devicestest.Harness, d *devicestest.Disk) {
			if r := h.Pass(); len(r.Cleaned) != 1 {
				h.Fatalf("found %+v, want it cleaned", r)
			}
			h.Agent.Close()
			d.WriteAt(devicestest.Pattern()[:32<<10], at)
			h.Start()
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 64*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			write(h, d)
			if r := h.Pass(); len(r.Cleaned) != 1 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			d.WantZero(at, at+32<<10)
			wiped := h.Wiped()
			if r := h.Pass(); len(r.Cleaned) != 1 || h.Wiped() != wiped {
				t.Errorf("a clean device to which nothing was written: %+v, %d bytes more were overwritten", r, h.Wiped()-wiped)
			}
		})
	}
}

// Cleaning stays with the device that is held, wherever its path leads meanwhile.
func TestPathChangesWhileDeviceIsCleaned(t *testing.T) {
	h := newIdentified(t)
	t.Cleanup(devices.UseSmallSteps())
	h.Config.Wipe = devices.WipeZero
	d, other := h.Disk("disk", 8*mib), h.Disk("other", 8*mib)
	other.Untouched()
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	h.Step = func() {
		h.Step = nil
		if err := errors.Join(os.Remove(d.Path), os.Symlink(other.Node, d.Path)); err != nil {
			t.Error(err)
		}
	}
	h.Pass()
	h.Refused(devices.OtherDevice)
	h.Agent.Close() // the cleaning of the disk that the path led to may have a step to do
	d.WantZero(0, mib)
}

// A loop device whose file is cut off while it is cleaned is as one that was removed: nothing of it can be read, nor
// does anything fail. It is not clean.
func TestDeviceLosesItsSizeWhileItIsCleaned(t *testing.T) {
	for name, left := range map[string]int64{"all": 0, "a part": 4 * mib} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			h.Step = func() { // after the only one
				h.Step = nil
				if err := d.Resize(left); err != nil {
					t.Error(err)
				}
			}
			h.Refused(devices.OtherDevice)
			must.Succeed(t, d.Resize(8*mib))
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want it cleaned once it is back", r)
			}
			d.WantZero(0, 8*mib)
		})
	}
}

// A disk may wait for days until others are clean.
func TestDeviceUsedWhileItIsCleanedIsLeftAlone(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	t.Cleanup(devices.CheckEachStep())
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", 4*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	end := func() {}
	h.Step = func() {
		h.Step = nil
		end = devicestest.With(t, `exec 3<>"$1"`, d.Node)
	}
	h.Refused(devices.InUse)
	d.WantPattern(mib, 4*mib)
	end()
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Errorf("found %+v, want it cleaned after that", r)
	}
}

// A device may become that of another volume for hours while it is cleaned: what its claim writes is not overwritten.
func TestCleaningEndsWhenItsDeviceIsThatOfAnotherVolume(t *testing.T) {
	byPath := func(_ *testing.T, d *devicestest.Disk) string { return d.Node }
	byPartition := func(t *testing.T, d *devicestest.Disk) string {
		return addPartition(t, d.Node)
	}
	for name, c := range map[string]struct {
		path func(*testing.T, *devicestest.Disk) string
		// told says that the passes know of the volume, and not only the API.
		told bool
		want devices.Reason
	}{
		"by another path":        {byPath, true, devices.Twice},
		"a partition of it":      {byPartition, true, devices.Twice},
		"without the label":      {byPath, false, devices.OfOthers},
		"in part, without label": {byPartition, false, devices.OfOthers},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(devices.UseSmallSteps())
			if !c.told {
				t.Cleanup(devices.CheckEachStep())
			}
			h := devicestest.New(t)
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 16*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			goOn := h.PassUntilCleaning()
			other := devicestest.Bound(devices.Volume{Name: "other", UID: "uid of other", Path: c.path(t, d), Bytes: 8 * mib, Foreign: !c.told})
			other.ClaimUID, other.Claim = "uid-2", "default/other"
			if api := append([]devices.Volume{other}, h.PVs...); c.told {
				h.PVs = api
			} else {
				h.API = func() ([]devices.Volume, error) { return api, nil }
			}
			h.Agent.Pass(h.Request())
			goOn()
			untilLetGo(t, h, d)
			if r := h.Pass(); !slices.ContainsFunc(r.Problems, func(p devices.Problem) bool { return p.Volume == "pv" && p.Reason == c.want }) {
				t.Errorf("found %+v, want %s", r, c.want)
			}
			d.WantPattern(2*mib, 16*mib)
		})
	}
}

// untilLetGo waits until the agent holds a device no more.
func untilLetGo(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
	t.Helper()
	for {
		held, err := blockdev.Hold(d.Node)
		if err == nil {
			must.Succeed(t, held.Close())
			return
		}
		if !errors.Is(err, blockdev.ErrBusy) {
			t.Fatal(err)
		}
		<-h.Changed()
	}
}

// ill makes a disk that does wrong when it is told to.
func ill(h *devicestest.Harness, name string, bytes int64) (*disk.Disk, *devicestest.Disk) {
	h.Helper()
	file := filepath.Join(h.TempDir(), name)
	must.Succeed(h, os.WriteFile(file, make([]byte, bytes), 0o600))
	ill := disk.New(h, file, h.TempDir())
	return ill, h.Attach(name, ill.Path)
}

func TestFailingDeviceKeepsVolume(t *testing.T) {
	for name, operation := range map[string]disk.Operation{"writing": disk.Write, "flushing": disk.Flush} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			ill, d := ill(h, "disk", 32*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			ill.Fail(operation)
			h.Refused(devices.Failed)
			ill.Heal()
		})
	}
}

// While a device takes no byte any more, others are cleaned beside it, new ones are found, and its progress is shown. It
// goes on when it answers again.
func TestHungDeviceDelaysNoOther(t *testing.T) {
	h := devicestest.New(t)
	hung, slow := ill(h, "disk-slow", 32*mib)
	h.Blank("disk-a", 32*mib)
	h.Config.Wipe = devices.WipeZero
	h.PVs = []devices.Volume{h.Released(slow.Volume("pv"))}
	hung.Hang()
	t.Cleanup(hung.Heal)
	pass := func(what string, is func(devices.Report) bool) {
		t.Helper()
		for late := time.After(time.Minute); ; {
			r := h.Agent.Pass(h.Request())
			if is(r) {
				return
			}
			select {
			case <-h.Changed():
			case <-late:
				t.Fatalf("found %+v, want %s", r, what)
			}
		}
	}
	pass("disk-a offered, and disk-slow being cleaned", func(r devices.Report) bool {
		return len(r.Offers) == 1 && len(r.Wiping) == 1 && r.Wiping[0].Volume == "pv"
	})
	h.Blank("disk-b", 32*mib)
	pass("disk-b offered too", func(r devices.Report) bool { return len(r.Offers) == 2 && len(r.Cleaned) == 0 })
	hung.Heal()
	pass("disk-slow cleaned", func(r devices.Report) bool { return len(r.Cleaned) == 1 && len(r.Wiping) == 0 })
}
