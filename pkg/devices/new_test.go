package devices_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const settle = 5 * time.Minute

// settling is a node whose agent has just been started, and waits before it takes what is new.
func settling(t *testing.T) *devicestest.Harness {
	t.Helper()
	h := devicestest.New(t)
	h.Settle, h.Now = settle, time.Now()
	h.Restart()
	return h
}

// wantNew expects that a disk is not touched, and until when.
func wantNew(t *testing.T, h *devicestest.Harness, d *devicestest.Disk, left time.Duration) {
	t.Helper()
	sum := d.Sum()
	h.Refused(devices.New)
	if r := h.Pass(); !r.Settles.Equal(h.Now.Add(left)) {
		t.Errorf("it settles in %s, want %s", r.Settles.Sub(h.Now), left)
	}
	if record, err := h.Records.Get(d.Path); err != nil || record.State != "" || d.Sum() != sum || h.Wiped() != 0 {
		t.Errorf("it was touched: %d bytes, %+v (%v)", h.Wiped(), record, err)
	}
}

// wantNewThenOffered is for a disk that is taken once it has been unchanged for as long as that takes.
func wantNewThenOffered(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
	t.Helper()
	wantNew(t, h, d, settle)
	h.Now = h.Now.Add(settle)
	h.Offered()
}

// A disk that another driver has attached is empty until it formats it.
func TestNewDisk_isTakenOnceItWasUnchangedForAWhile(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	wantNew(t, h, d, settle)
	h.Now = h.Now.Add(settle - time.Second)
	wantNew(t, h, d, time.Second)
	d.WriteAt(make([]byte, 4096), 0) // which leaves it empty
	wantNewThenOffered(t, h, d)
}

// Also one that was there when the agent was started, however often that was.
func TestNewDisk_isNewToEachAgent(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	for range 3 {
		wantNew(t, h, d, settle)
		h.Now = h.Now.Add(settle - time.Second)
		h.Restart()
	}
	wantNewThenOffered(t, h, d)
}

// It may have the number and the path of one that is gone.
func TestNewDisk_isNotThatBeforeIt(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	wantNew(t, h, d, settle)
	h.Now = h.Now.Add(settle - time.Second)
	must.Succeed(t, d.Resize(16*mib))
	wantNew(t, h, d, settle)
}

// The disk of a virtual machine that is started anew has no user for a moment, and may be as empty as when it was attached.
func TestNewDisk_isNewAgainAfterItWasUsed(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	wantNew(t, h, d, settle)
	end := devicestest.With(t, `exec 3<>"$1"`, d.Node)
	for range 2 {
		h.Now = h.Now.Add(settle)
		h.Refused(devices.InUse)
	}
	end()
	h.Now = h.Now.Add(time.Second)
	wantNew(t, h, d, settle)
	h.Now = h.Now.Add(settle - time.Second)
	wantNew(t, h, d, time.Second)
	h.Now = h.Now.Add(time.Second)
	h.Offered()
}

// Also after its time.
func TestNewDisk_isNotTakenWhileAVolumeIsBeingAttached(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	wantNew(t, h, d, settle)
	h.Now, h.Attached = h.Now.Add(settle), "kubernetes.io/csi/ebs.csi.aws.com^vol-1"
	h.Refused(devices.Attaching)
	if h.Wiped() != 0 {
		t.Errorf("%d bytes were overwritten", h.Wiped())
	}
	h.Attached = "" // it is attached, and about to be formatted and mounted
	wantNewThenOffered(t, h, d)
}

// What is written by another path is not counted as written to this one.
func TestNewDisk_isNewAgainAfterItHadAnotherPath(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	other, err := loopfs.Attach(d.Image)
	must.Succeed(t, err)
	defer other.Close()
	wantNew(t, h, d, settle)
	h.Now = h.Now.Add(settle)
	h.Refused(devices.Twice)
	other.Close()
	h.Now = h.Now.Add(time.Second)
	wantNewThenOffered(t, h, d)
}

// An administrator may delete a volume to give its disk to something else.
func TestDiskOfAVolume_isNewAfterItWasUsedByAnother(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	h.Pass()
	h.Now = h.Now.Add(settle)
	h.Offered()
	h.PVs = nil
	end := devicestest.With(t, `exec 3<>"$1"`, d.Node)
	h.Refused(devices.InUse)
	d.Fill()
	d.Untouched()
	h.Now = h.Now.Add(time.Hour)
	h.Refused(devices.InUse)
	end() // as that of a virtual machine which is started anew
	h.Now = h.Now.Add(time.Second)
	h.Refused(devices.New)
}

// Also where that was over before it was looked at: what has been written since shows it.
func TestDiskOfAVolume_isNewAfterAnotherHasWrittenToIt(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	h.Pass()
	h.Now = h.Now.Add(settle)
	h.Offered()
	h.Pass()
	h.PVs = nil
	d.WriteAt(make([]byte, 4096), 0) // and is about to format it
	h.Refused(devices.New)
	h.Now = h.Now.Add(settle)
	h.Offered()
}

// A volume stays after its device is clean, for as long as the API server refuses the deletion, or a finalizer keeps it.
func TestDiskOfAVolume_isNewAfterAnotherHasWrittenToItBeforeItsDeletion(t *testing.T) {
	const at = 16*mib + 80<<10 // between two samples
	for name, stays := range map[string]func(h *devicestest.Harness, v *devices.Volume){
		"the deletion is refused": func(*devicestest.Harness, *devices.Volume) {},
		"a finalizer keeps it": func(_ *devicestest.Harness, v *devices.Volume) {
			v.Released, v.Deleted, v.Used, v.Bound = false, true, true, true
		},
		"the kernel is older than 5.15": func(h *devicestest.Harness, v *devices.Volume) {
			record, err := h.Records.Get(v.Path)
			must.Succeed(h, err)
			record.Left = ""
			must.Succeed(h, h.Records.Put(record))
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := settling(t)
			t.Cleanup(devices.UseSmallSteps())
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 64*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			if r := h.Pass(); len(r.Cleaned) != 1 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			stays(h, &h.PVs[0])
			h.Pass()
			d.WriteAt(devicestest.Pattern()[:32<<10], at)
			h.Pass()
			h.PVs = nil
			if r := h.Pass(); len(r.Offers) > 0 {
				d.WantZero(at, at+32<<10) // it was cleaned anew, or has to wait
			}
		})
	}
}

// Where the kernel does not count what is written, nothing shows that nothing was.
func TestDiskOfAVolume_isNewIfNothingIsCounted(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	devicestest.CountNothing(d)
	h.Pass()
	h.Now = h.Now.Add(settle)
	h.Offered()
	h.Pass()
	h.PVs = nil
	d.WriteAt(make([]byte, 4096), 0)
	h.Refused(devices.New)
	h.Now = h.Now.Add(settle)
	h.Offered()
}

// The API server may be slow between the check of a device and its offer, and a program may open a device that is held, but for an exclusive open.
func TestDeviceUsedBeforeItIsOffered(t *testing.T) {
	use := func(t *testing.T, d *devicestest.Disk) (end func()) {
		return devicestest.With(t, `exec 3<>"$1"`, d.Node)
	}
	for name, c := range map[string]struct {
		use  func(*testing.T, *devicestest.Disk) (end func())
		want devices.Reason
	}{
		"it is open":                       {use, devices.InUse},
		"it was open, and nothing written": {func(t *testing.T, d *devicestest.Disk) func() { use(t, d)(); return func() {} }, ""},
		"it was written to": {func(_ *testing.T, d *devicestest.Disk) func() {
			d.Write(devicestest.Pattern())
			return func() {}
		}, devices.New},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Blank("disk", 8*mib)
			r := h.Pass()
			if len(r.Offers) != 1 {
				t.Fatalf("found %+v, want an offer", r)
			}
			end := c.use(t, d)
			err := h.Agent.Offering(t.Context(), r.Offers[0])
			problem, refused := errors.AsType[devices.Problem](err)
			if refused != (c.want != "") || refused && problem.Reason != c.want || !refused && err != nil {
				t.Errorf("the offer ends with %v, want %q", err, c.want)
			}
			end()
		})
	}
}

// The kernel does not count for a partition what is written to it by its disk.
func TestPartitionWrittenToBeforeItIsOffered(t *testing.T) {
	for name, c := range map[string]struct {
		write func(disk, part, sibling *devicestest.Disk)
		want  devices.Reason
	}{
		"itself":      {func(_, part, _ *devicestest.Disk) { part.Write(devicestest.Pattern()) }, devices.New},
		"by its disk": {func(disk, _, _ *devicestest.Disk) { disk.WriteAt(devicestest.Pattern(), 8*mib) }, devices.New},
		"its sibling": {func(_, _, sibling *devicestest.Disk) { sibling.Write(devicestest.Pattern()) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Partitions = devices.OfferPartitions
			disk, parts := partitioned(t, h, "label: gpt\nstart=8MiB, size=8MiB, type="+dataType+"\nstart=16MiB, size=8MiB, type="+dataType+"\n", 2)
			must.Succeed(t, os.Remove(disk.Path))
			part, sibling := h.Link("disk-part1", parts[0]), h.Link("sibling", parts[1])
			r := h.Pass()
			if len(r.Offers) != 1 {
				t.Fatalf("found %+v, want an offer", r)
			}
			c.write(disk, part, sibling)
			err := h.Agent.Offering(t.Context(), r.Offers[0])
			if problem, refused := errors.AsType[devices.Problem](err); refused != (c.want != "") || problem.Reason != c.want || !refused && err != nil {
				t.Errorf("the offer ends with %v, want %q", err, c.want)
			}
			h.Agent.Close()
		})
	}
}

// No other program has attached the disk of a volume.
func TestDiskOfAVolume_isOfferedAgainAtOnce(t *testing.T) {
	h := settling(t)
	d := h.Blank("disk", 8*mib)
	h.Pass()
	h.Now = h.Now.Add(settle)
	h.Offered()
	offered := h.PVs[0]
	h.PVs[0] = devicestest.Bound(offered)
	h.Pass()
	devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
	h.PVs[0] = devicestest.Released(offered)
	if r := h.Pass(); len(r.Cleaned) != 1 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	h.PVs, h.Attached = nil, "kubernetes.io/csi/ebs.csi.aws.com^vol-1"
	h.Offered()
}
