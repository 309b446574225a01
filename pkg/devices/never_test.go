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
	refuse := func(w *devicestest.World, err error) {
		w.Helper()
		r := w.Pass()
		if len(r.Offers) != 1 {
			w.Fatalf("found %+v, want an offer", r)
		}
		must.Succeed(w, w.Agent.Offering(w.Context(), r.Offers[0]))
		must.Succeed(w, w.Agent.Offered(r.Offers[0], "", err))
	}
	record := func(w *devicestest.World, d *devicestest.Disk, change func(*devices.Record)) {
		w.Helper()
		r := devices.Record{Path: d.Path, Bytes: d.Bytes(), Identity: d.Identity(), Wipe: devices.WipeZero}
		change(&r)
		must.Succeed(w, w.Records.Put(r))
	}
	for name, before := range map[string]func(w *devicestest.World, d *devicestest.Disk){
		"new": func(*devicestest.World, *devicestest.Disk) {},
		"tried again": func(w *devicestest.World, d *devicestest.Disk) {
			end := devicestest.With(w, `exec 3<>"$1"`, d.Node)
			w.Refused(devices.InUse)
			end()
		},
		"the agent is restarted": func(w *devicestest.World, _ *devicestest.Disk) {
			w.Agent.Pass(w.Request())
			w.Restart()
		},
		"its volume was refused": func(w *devicestest.World, _ *devicestest.Disk) {
			refuse(w, errors.New("a webhook refuses"))
			w.Restart()
			refuse(w, errors.New("no answer"))
		},
		"its volume was deleted": func(w *devicestest.World, _ *devicestest.Disk) {
			w.Offered()
			w.Pass()
			w.PVs = nil
		},
		"an earlier build was cleaning it": func(w *devicestest.World, d *devicestest.Disk) {
			record(w, d, func(r *devices.Record) { r.State, r.Done = devices.Cleaning, mib })
		},
		"an earlier build has cleaned it": func(w *devicestest.World, d *devicestest.Disk) {
			record(w, d, func(r *devices.Record) { r.State = devices.Clean })
		},
	} {
		for _, wipe := range []devices.Wipe{devices.WipeSignatures, devices.WipeDiscard, devices.WipeZero} {
			for _, hasData := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, with data %t", name, wipe, hasData), func(t *testing.T) {
					w := devicestest.New(t)
					w.Config.Wipe = wipe
					d := w.Blank("disk", 64*mib)
					written := d.Written()
					before(w, d)
					opened := opensForWriting(d)
					if !hasData {
						w.Offered()
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
					w.Refused(devices.HasData)
					w.Restart()
					w.Refused(devices.HasData)
				})
			}
		}
	}
}

// Its descriptor cannot write, whatever is done with it.
func TestDeviceThatIsNotOursIsOpenForReading(t *testing.T) {
	w := devicestest.New(t)
	d := w.Blank("disk", mib)
	d.Untouched()
	held, err := devices.Hold(devices.Look{Path: d.Path, Number: d.Number(), View: devicestest.View()})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, held.Close()) }()
	if _, err := held.File().WriteAt([]byte("x"), 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("writing to it: %v, want it not to be open for that", err)
	}
}
