package devices_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// sharedDisk is the identity of the disk, and reservation what it is reserved by.
const sharedDisk, reservation = "wwid=naa.600a", "naa.600a"

// twoNodes see one disk by the two devices, and an API that has no volume of it yet.
func twoNodes(t *testing.T) (a, b *devicestest.Harness, seenByA, seenByB *devicestest.Disk) {
	t.Helper()
	t.Cleanup(devices.Identify(func(string) string { return sharedDisk }))
	a, b = devicestest.New(t), devicestest.New(t)
	b.Reserved, b.Hostname = a.Reserved, "other"
	b.Restart()
	return a, b, a.Blank("disk", 8*mib), b.Blank("disk", 8*mib)
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
	for name, end := range map[string]func(w *devicestest.Harness, d *devicestest.Disk){
		"it is not selected any more": func(w *devicestest.Harness, _ *devicestest.Disk) { w.Config.DeviceDir = w.TempDir() },
		"another node has made a volume meanwhile": func(w *devicestest.Harness, d *devicestest.Disk) {
			w.API = func() ([]devices.Volume, error) {
				return []devices.Volume{{Name: "theirs", Path: d.Path, Elsewhere: true, Identity: sharedDisk}}, nil
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
			a.Answer(r)
			b.Offered()
		})
	}
}

// What a node has of a claim whose volume was deleted by hand is offered by no other node, whatever this one looks at.
func TestDiskWithDataOfClaimStaysReserved(t *testing.T) {
	for name, pass := range map[string]func(h *devicestest.Harness) devices.Report{
		"it is new to the next agent": func(h *devicestest.Harness) devices.Report {
			h.Settle = 5 * time.Minute
			h.Restart()
			return h.Pass()
		},
		"nothing is selected": func(h *devicestest.Harness) devices.Report {
			q := h.Request()
			q.Offer = nil
			return h.Agent.Pass(q)
		},
		"another directory is selected": func(h *devicestest.Harness) devices.Report {
			h.Config.DeviceDir = h.TempDir()
			return h.Pass()
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, d, _ := twoNodes(t)
			a.Offered()
			a.PVs[0] = devicestest.Bound(a.PVs[0])
			a.Pass()
			d.WriteAt(devicestest.Pattern(), mib)
			a.PVs = nil
			a.Refused(devices.WasBound)
			for range 2 {
				if r := pass(a); len(r.GivenUp) > 0 {
					t.Errorf("found %+v, want the disk to stay reserved", r)
				}
			}
			b.Refused(devices.Twice)
		})
	}
}

// A record that cannot be read may be of any disk. The reservation goes with the record.
func TestDiskStaysReservedWhileARecordCannotBeRead(t *testing.T) {
	for name, content := range map[string]string{
		"it is damaged":         "{",
		"it is empty":           "",
		"it is of a later form": `{"version": 2, "disk": "naa.600a"}`,
	} {
		t.Run(name, func(t *testing.T) {
			a, _, _, _ := twoNodes(t)
			dir := t.TempDir()
			a.Agent.Close()
			a.Open(dir)
			a.Start()
			a.Offered()
			a.PVs[0] = devicestest.Bound(a.PVs[0])
			a.Pass()
			a.PVs = nil
			records, err := filepath.Glob(filepath.Join(dir, "*.json"))
			if err != nil || len(records) != 1 {
				t.Fatalf("found the records %q, %v; want one", records, err)
			}
			must.Succeed(t, os.WriteFile(records[0], []byte(content), 0o600))
			q := a.Request()
			q.Offer = nil
			for range 2 {
				if r := a.Agent.Pass(q); len(r.GivenUp) > 0 {
					t.Errorf("found %+v, want the disk to stay reserved", r)
				}
			}
			must.Succeed(t, os.Remove(records[0]))
			if r := a.Agent.Pass(q); !slices.Equal(r.GivenUp, []string{reservation}) {
				t.Errorf("without a record it gave up %q, want the disk", r.GivenUp)
			}
		})
	}
}

// Leases go with the Node object and with the namespace of the agents, and earlier programs made none. The node is back, and so are they.
func TestDiskWithDataOfClaimIsReservedAgain(t *testing.T) {
	for name, now := range map[string]func(h *devicestest.Harness, d *devicestest.Disk){
		"its volume is bound":    func(*devicestest.Harness, *devicestest.Disk) {},
		"its volume is released": func(h *devicestest.Harness, _ *devicestest.Disk) { h.PVs[0] = devicestest.Released(h.PVs[0]) },
		"its volume is gone":     func(h *devicestest.Harness, _ *devicestest.Disk) { h.PVs = nil },
		"its volume is of an earlier program": func(h *devicestest.Harness, d *devicestest.Disk) {
			h.Agent.Close()
			h.Open(h.TempDir())
			h.PVs[0].Identity = ""
		},
		"its volume is not there, and its record is damaged": func(h *devicestest.Harness, _ *devicestest.Disk) {
			h.PVs = nil
			h.DamageRecords()
		},
		"its volume is gone, and the disk is away": func(h *devicestest.Harness, d *devicestest.Disk) {
			h.PVs = nil
			must.Succeed(h, os.Remove(d.Path))
		},
		"the disk of its volume is away": func(h *devicestest.Harness, d *devicestest.Disk) { must.Succeed(h, os.Remove(d.Path)) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, d, _ := twoNodes(t)
			a.Offered()
			a.PVs[0] = devicestest.Bound(a.PVs[0])
			a.Pass()
			a.Reserved.Clear()
			now(a, d)
			a.Restart()
			q := a.Request()
			q.Frozen = true // cleans nothing
			q.Reserved = nil
			if r := a.Agent.Pass(q); len(r.NotReserved) > 0 {
				t.Errorf("without knowing what is reserved, %q is not", r.NotReserved)
			}
			q = a.Request()
			q.Frozen = !strings.Contains(name, "damaged") // one without a volume is only searched for to be offered
			r := a.Agent.Pass(q)
			if !slices.Equal(r.NotReserved, []string{reservation}) || len(r.GivenUp) > 0 {
				t.Fatalf("found %+v, want the disk to be reserved", r)
			}
			a.Answer(r)
			if r := a.Agent.Pass(a.Request()); len(r.NotReserved) > 0 || len(r.GivenUp) > 0 {
				t.Errorf("then found %+v, want the disk to stay reserved", r)
			}
			b.Refused(devices.Twice)
		})
	}
}

// Another node would not know that earlier claims have left on a disk what is to be overwritten now.
func TestDiskThatWasCleanedByLessStaysReserved(t *testing.T) {
	a, b, _, _ := twoNodes(t)
	a.Offered()
	a.PVs[0] = devicestest.Bound(a.PVs[0])
	a.Pass()
	a.PVs[0] = devicestest.Released(a.PVs[0])
	if r := a.Pass(); len(r.Cleaned) != 1 {
		t.Fatalf("found %+v, want the volume cleaned", r)
	}
	a.PVs, a.Config.Wipe = nil, devices.WipeZero
	for range 2 {
		a.Refused(devices.HasData)
		if r := a.Pass(); len(r.GivenUp) > 0 {
			t.Errorf("gave up %q", r.GivenUp)
		}
		a.Restart()
	}
	b.Refused(devices.Twice)
}

// It is reported of a volume that another node has reserved its disk, until that gives it up: it has nothing on it.
func TestDiskOfVolumeThatAnotherNodeHasReserved(t *testing.T) {
	a, b, d, seenByB := twoNodes(t)
	a.Offered()
	a.PVs[0] = devicestest.Bound(a.PVs[0])
	a.Pass()
	a.Reserved.Store(reservation, b.Hostname) // B's agent was ended before it had asked for volumes
	b.API = func() ([]devices.Volume, error) {
		v := a.PVs[0]
		v.Elsewhere = true
		return []devices.Volume{v}, nil
	}
	for range 2 {
		p := a.Refused(devices.Twice)
		if p.Volume != a.PVs[0].Name || !strings.Contains(p.Detail, "the node other has reserved") {
			t.Errorf("the problem is %+v, want it to name the volume and the node", p)
		}
	}
	for _, at := range []*devicestest.Disk{d, seenByB} { // one disk
		at.Fill()
	}
	b.Restart()
	r := b.Pass()
	if !slices.Equal(r.GivenUp, []string{reservation}) {
		t.Fatalf("the other node found %+v, want the disk given up", r)
	}
	b.Answer(r)
	if r := a.Pass(); len(r.Problems) > 0 {
		t.Errorf("then the problems are %v", r.Problems)
	}
	if node, _ := a.Reserved.Load(reservation); node != a.Hostname {
		t.Errorf("then the disk is reserved for %v", node)
	}
	a.PVs[0] = devicestest.Released(a.PVs[0])
	if r := a.Pass(); len(r.Cleaned) != 1 {
		t.Errorf("when it is released, found %+v", r)
	}
}

// A node that is installed anew knows nothing of what it has reserved.
func TestReservedDiskOfNoRecordIsGivenUp(t *testing.T) {
	a, b, d, _ := twoNodes(t)
	a.Offered()
	a.PVs = nil
	a.Agent.Close()
	must.Succeed(t, os.Remove(d.Path))
	a.Open(t.TempDir())
	a.Start()
	q := a.Request()
	q.Reserved = nil
	if r := a.Agent.Pass(q); len(r.GivenUp) > 0 {
		t.Errorf("without knowing what is reserved, gave up %q", r.GivenUp)
	}
	q = a.Request()
	q.Frozen = true
	if r := a.Agent.Pass(q); len(r.GivenUp) > 0 {
		t.Errorf("with a wrong configuration, gave up %q", r.GivenUp)
	}
	r := a.Pass()
	if !slices.Equal(r.GivenUp, []string{reservation}) {
		t.Fatalf("found %+v, want the disk given up", r)
	}
	a.Answer(r)
	b.Offered()
}

// The reservation of a node goes with its Node object, which may be made anew while a disk is cleaned. From then on another node may have the
// disk, with the data of a claim by the next step.
func TestCleaningEndsWhenAnotherNodeHasTheDisk(t *testing.T) {
	t.Cleanup(devices.UseSmallSteps())
	a, b, d, _ := twoNodes(t)
	a.Config.Wipe = devices.WipeZero
	v := d.Volume("pv")
	v.Identity = sharedDisk
	a.PVs = []devices.Volume{a.Released(v)}
	steps := 0
	a.Step = func() {
		if steps++; steps == 2 {
			a.Reserved.Store(reservation, b.Hostname)
		}
	}
	a.Refused(devices.Twice)
	if steps != 2 {
		t.Errorf("it was overwritten in %d steps, and is another node's after the second", steps)
	}
}

// What another node may have written since is not what the record is about.
func TestDiskThatAnotherNodeHadIsKept(t *testing.T) {
	for name, record := range map[string]devices.Record{
		"clean":      {State: devices.Clean, Wipe: devices.WipeSignatures},
		"never used": {State: devices.Offered, Wipe: devices.WipeSignatures},
	} {
		t.Run(name, func(t *testing.T) {
			t.Cleanup(devices.UseSmallSteps())
			a, b, d, _ := twoNodes(t)
			// The ends are as they were cleaned.
			d.WriteAt(devicestest.Pattern(), 3*mib)
			record.Path, record.Bytes, record.Identity = d.Path, d.Bytes(), sharedDisk
			record.Volume, record.VolumeUID, record.ClaimUID, record.Claim = "pv", "uid of pv", "uid-1", "default/data"
			must.Succeed(t, a.Records.Put(record))
			_, err := b.Reserve(t.Context(), reservation)
			must.Succeed(t, err)
			d.Untouched()
			a.Refused(devices.Twice)
			a.Reserved.Clear() // with the other node's object
			a.Refused(devices.HasData)
		})
	}
}
