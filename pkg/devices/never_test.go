package devices_test

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A device that was never the volume of a claim is offered as it is, or refused, and the kernel counts no write to it.
func TestDeviceThatNoClaimHadIsNeverWrittenTo(t *testing.T) {
	refuse := func(h *devicestest.Harness, err error) {
		h.Helper()
		r := h.Pass()
		if len(r.Offers) != 1 {
			h.Fatalf("found %+v, want an offer", r)
		}
		must.Succeed(h, h.Agent.Offering(h.Context(), r.Offers[0]))
		must.Succeed(h, h.Agent.Offered(r.Offers[0], "", err))
	}
	record := func(h *devicestest.Harness, d *devicestest.Disk, change func(*devices.Record)) {
		h.Helper()
		r := devices.Record{Path: d.Path, Bytes: d.Bytes(), Identity: d.Identity(), Wipe: devices.WipeZero}
		change(&r)
		must.Succeed(h, h.Records.Put(r))
	}
	for name, before := range map[string]func(h *devicestest.Harness, d *devicestest.Disk){
		"new": func(*devicestest.Harness, *devicestest.Disk) {},
		"tried again": func(h *devicestest.Harness, d *devicestest.Disk) {
			end := devicestest.With(h, `exec 3<>"$1"`, d.Node)
			h.Refused(devices.InUse)
			end()
		},
		"the agent is restarted": func(h *devicestest.Harness, _ *devicestest.Disk) {
			h.Agent.Pass(h.Request())
			h.Restart()
		},
		"its volume was refused": func(h *devicestest.Harness, _ *devicestest.Disk) {
			refuse(h, errors.New("a webhook refuses"))
			h.Restart()
			refuse(h, errors.New("no answer"))
		},
		"its volume was deleted": func(h *devicestest.Harness, _ *devicestest.Disk) {
			h.Offered()
			h.Pass()
			h.PVs = nil
		},
		"an earlier build was cleaning it": func(h *devicestest.Harness, d *devicestest.Disk) {
			record(h, d, func(r *devices.Record) { r.State, r.Done = devices.Cleaning, mib })
		},
		"an earlier build has cleaned it": func(h *devicestest.Harness, d *devicestest.Disk) {
			record(h, d, func(r *devices.Record) { r.State = devices.Clean })
		},
	} {
		// All it is refused for is the same with each way of cleaning, which decides only how much would be overwritten.
		ways := []devices.Wipe{devices.WipeZero}
		if name == "new" {
			ways = []devices.Wipe{devices.WipeSignatures, devices.WipeDiscard, devices.WipeZero}
		}
		for _, wipe := range ways {
			for _, hasData := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, with data %t", name, wipe, hasData), func(t *testing.T) {
					h := devicestest.New(t)
					h.Config.Wipe = wipe
					d := h.Blank("disk", 8*mib)
					written := d.Written()
					before(h, d)
					opened := opensForWriting(d)
					if !hasData {
						h.Offered()
					}
					if opened() {
						t.Error("it was opened for writing")
					}
					if now := d.Written(); now != written {
						t.Errorf("the kernel has counted %q, and before %q", now, written)
					}
					if !hasData {
						return
					}
					d.Write([]byte("SPDKBLOB"))
					d.Untouched()
					h.Refused(devices.HasData)
					h.Restart()
					h.Refused(devices.HasData)
				})
			}
		}
	}
}

// Its descriptor cannot write, whatever is done with it.
func TestDeviceThatIsNotOursIsOpenForReading(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", mib)
	d.Untouched()
	held, err := devices.Hold(devices.Look{Path: d.Path, Number: d.Number(), View: devicestest.View()})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, held.Close()) }()
	if _, err := held.File().WriteAt([]byte("x"), 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("writing to it: %v, want it not to be open for that", err)
	}
}
