package devices_test

import (
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// twoNodes see one disk by the two devices, and an API that has no volume of it yet.
func twoNodes(t *testing.T) (a, b *devicestest.World, seenByA, seenByB *devicestest.Disk) {
	t.Helper()
	t.Cleanup(devices.Identify(func(string) string { return "wwid=naa.600a" }))
	a, b = devicestest.New(t), devicestest.New(t)
	b.Reserved, b.Hostname = a.Reserved, "other"
	b.Restart()
	for _, w := range []*devicestest.World{a, b} {
		w.Config.ExistingData = devices.Erase
	}
	return a, b, a.Disk("disk", 8*mib), b.Disk("disk", 8*mib)
}

// Both nodes have asked the API for volumes of the disk before either has made one.
func TestDiskIsOfferedByOneOfTwoNodes(t *testing.T) {
	a, b, _, seenByB := twoNodes(t)
	seenByB.Untouched()
	if r := a.Pass(); len(r.Offers) != 1 || len(r.GivenUp) > 0 {
		t.Fatalf("the first node found %+v, want an offer", r)
	}
	if p := b.Refused(devices.Twice); !strings.Contains(p.Detail, "the node node has reserved") {
		t.Errorf("the problem is %q, want it to name the node", p.Detail)
	}
	a.Offered()
	b.Refused(devices.Twice)
	// What an agent before it has reserved is known to the next one.
	a.Restart()
	if r := a.Pass(); len(r.GivenUp) > 0 {
		t.Errorf("with its volume, the first node gave up %q", r.GivenUp)
	}
	b.Refused(devices.Twice)
}

func TestReservedDiskIsGivenUp(t *testing.T) {
	for name, end := range map[string]func(w *devicestest.World, d *devicestest.Disk){
		"it is not selected any more": func(w *devicestest.World, _ *devicestest.Disk) { w.Config.DeviceDir = w.TempDir() },
		"another node has made a volume meanwhile": func(w *devicestest.World, d *devicestest.Disk) {
			w.API = func() ([]devices.Volume, error) {
				return []devices.Volume{{Name: "theirs", Path: d.Path, Elsewhere: true, Identity: "wwid=naa.600a"}}, nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, d, _ := twoNodes(t)
			a.Offered()
			a.PVs = nil // its volume was deleted
			if r := a.Pass(); len(r.GivenUp) > 0 {
				t.Fatalf("found %+v, want the disk kept while it is offered", r)
			}
			end(a, d)
			a.Restart()
			r := a.Pass()
			if len(r.GivenUp) != 1 || len(r.Offers) > 0 {
				t.Fatalf("found %+v, want the disk given up", r)
			}
			node, err := b.Reserve(t.Context(), r.GivenUp[0])
			must.Succeed(t, err)
			if node != a.Hostname {
				t.Fatalf("%s had reserved it, want %s", node, a.Hostname)
			}
			a.Reserved.Delete(r.GivenUp[0])
			a.Agent.Unreserved(r.GivenUp[0])
			b.Offered()
		})
	}
}
