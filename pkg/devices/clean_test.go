package devices_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

func TestNewDeviceIsWiped(t *testing.T) {
	for _, wipe := range []devices.Wipe{devices.WipeSignatures, devices.WipeDiscard, devices.WipeZero} {
		t.Run(string(wipe), func(t *testing.T) {
			w := newWorld(t)
			w.config.Wipe = wipe
			const bytes = 256 * mib
			d := w.disk("disk", bytes)
			want := devices.Offer{Name: "local-node-disk", Path: d.path, Bytes: bytes}
			if got := w.offered(); got.Name != want.Name || got.Path != want.Path || got.Bytes != want.Bytes {
				t.Errorf("offered %+v, want %+v", got, want)
			}
			wantZero(t, d, 0, 100*mib)
			wantZero(t, d, 156*mib, 256*mib)
			if wipe == devices.WipeSignatures {
				wantPattern(t, d, 100*mib, 156*mib)
			} else {
				wantZero(t, d, 100*mib, 156*mib)
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
	w := newWorld(t)
	w.config.Wipe = devices.WipeZero
	d := w.disk("disk", 32*mib)
	o := w.offered()
	run(t, "mkfs.ext4", "-q", "-F", d.node)
	w.volumes = []devices.Volume{bound(d.volume(o.Name))}
	sum := d.sum()
	if r := w.pass(); r.Available != 1 || len(r.Problems) > 0 || d.sum() != sum {
		t.Fatalf("a bound volume: %+v", r)
	}
	w.volumes = []devices.Volume{released(d.volume(o.Name))}
	if r := w.pass(); len(r.Cleaned) != 1 || r.Cleaned[0] != o.Name {
		t.Fatalf("a released volume: %+v, want it cleaned", r)
	}
	wantZero(t, d, 0, 32*mib)
	wiped := w.wiped
	// The agent is restarted before the volume is deleted.
	w.agent.Close()
	w.start()
	if r := w.pass(); len(r.Cleaned) != 1 {
		t.Fatalf("after a restart: %+v, want it cleaned", r)
	}
	w.volumes = nil
	w.offered()
	if w.wiped != wiped {
		t.Errorf("%d bytes were overwritten again", w.wiped-wiped)
	}
}

func TestOnlyAllowedDataIsWiped(t *testing.T) {
	for name, c := range map[string]struct {
		record devices.Record
		sign   bool
		want   devices.Reason // empty for an offer
	}{
		"the volume of a claim disappeared":                    {devices.Record{State: devices.Bound}, true, devices.WasBound},
		"the volume of a claim with raw data disappeared":      {devices.Record{State: devices.Bound}, false, devices.WasBound},
		"an offered device was formatted by somebody":          {devices.Record{State: devices.Offered}, true, devices.HasSignature},
		"a clean device was formatted by somebody":             {devices.Record{State: devices.Clean}, true, devices.HasSignature},
		"a half cleaned device was formatted by somebody":      {devices.Record{State: devices.Cleaning, Erased: true, Wipe: devices.WipeSignatures}, true, devices.HasSignature},
		"cleaning had begun":                                   {devices.Record{State: devices.Cleaning, Wipe: devices.WipeSignatures}, true, ""},
		"cleaning had begun, on a disk that has been replaced": {devices.Record{State: devices.Cleaning, Identity: "serial=other"}, true, devices.HasSignature},
		"cleaning had begun, on a disk of another size":        {devices.Record{State: devices.Cleaning, Bytes: mib}, true, devices.HasSignature},
		"the volume of nobody was deleted":                     {devices.Record{State: devices.Offered}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", 32*mib)
			if c.sign {
				run(t, "mkfs.ext4", "-q", "-F", d.node)
			}
			c.record.Path = d.path
			if c.record.Bytes == 0 {
				c.record.Bytes = d.bytes()
			}
			must.Succeed(t, w.records.Put(c.record))
			if c.want == "" {
				w.offered()
				return
			}
			d.untouched()
			w.refused(c.want)
		})
	}
}

// A volume that is deleted after its claim, before its device was cleaned, leaves a device that may be cleaned; one that
// is deleted in use does not.
func TestVolumeDeletedBeforeCleaning(t *testing.T) {
	for name, c := range map[string]struct {
		last func(devices.Volume) devices.Volume
		want int
	}{"released": {released, 1}, "bound": {bound, 0}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", 32*mib)
			w.volumes = []devices.Volume{bound(d.volume("pv"))}
			w.pass()
			run(t, "mkfs.ext4", "-q", "-F", d.node)
			w.volumes = nil
			must.Succeed(t, w.agent.Deleted(c.last(d.volume("pv"))))
			if r := w.pass(); len(r.Offers) != c.want || len(r.Problems) != 1-c.want {
				t.Errorf("found %+v, want %d offers", r, c.want)
			}
		})
	}
}

// Whatever the cache has, the API is asked before a device is overwritten.
func TestAPIIsReadBeforeWipe(t *testing.T) {
	for name, c := range map[string]struct {
		cache, api func(d *testDisk) []devices.Volume
		err        error
	}{
		"the volume was just made": {nil, func(d *testDisk) []devices.Volume { return []devices.Volume{d.volume("pv")} }, nil},
		"the volume is in use again": {func(d *testDisk) []devices.Volume { return []devices.Volume{released(d.volume("pv"))} },
			func(d *testDisk) []devices.Volume { return []devices.Volume{bound(d.volume("pv"))} }, nil},
		"the volume is another one": {func(d *testDisk) []devices.Volume { return []devices.Volume{released(d.volume("pv"))} },
			func(d *testDisk) []devices.Volume { return []devices.Volume{released(d.volume("pv-2"))} }, nil},
		"the volume is gone": {func(d *testDisk) []devices.Volume { return []devices.Volume{released(d.volume("pv"))} }, nil, nil},
		"the API does not answer": {func(d *testDisk) []devices.Volume { return []devices.Volume{released(d.volume("pv"))} },
			nil, errors.New("no answer")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", 32*mib)
			d.untouched()
			if c.cache != nil {
				w.volumes = c.cache(d)
			}
			w.api = func() (volumes []devices.Volume, err error) {
				if c.api != nil {
					volumes = c.api(d)
				}
				return volumes, c.err
			}
			if r := w.pass(); len(r.Offers) > 0 || len(r.Cleaned) > 0 {
				t.Errorf("found %+v, want nothing offered or cleaned", r)
			}
		})
	}
}

// cleanIn has this test binary clean the disk of a test, and stop after each step until it is asked to go on.
const cleanIn = "DEVICES_TEST_CLEAN"

func cleanUntilKilled(path string, bytes int64, wipe devices.Wipe, records string) error {
	devices.NoteEachStep()
	r, err := devices.OpenRecords(records)
	if err != nil {
		return err
	}
	api := &world{volumes: []devices.Volume{released(devices.Volume{Name: "pv", Path: path, Bytes: bytes})}}
	input := bufio.NewReader(os.Stdin)
	step := func() {
		fmt.Println("step")
		if _, err := input.ReadString('\n'); err != nil {
			os.Exit(2)
		}
	}
	a := devices.NewAgent(devices.Options{Node: "node", Records: r, API: api, Log: logr.Discard(), Changed: func() {}, Wiped: func(int64) { step() }})
	request := devices.Request{Volumes: api.volumes, Wipe: wipe}
	a.Pass(request)
	a.Settle()
	fmt.Println(a.Pass(request).Cleaned)
	return nil
}

func TestKilledWipeResumes(t *testing.T) {
	const bytes, steps = 320 * mib, 5
	for _, wipe := range []devices.Wipe{devices.WipeSignatures, devices.WipeZero} {
		for killed := range steps + 1 {
			t.Run(fmt.Sprintf("%s after step %d", wipe, killed), func(t *testing.T) {
				w := newWorld(t)
				w.config.Wipe = wipe
				d := w.disk("disk", bytes)
				run(t, "mkfs.xfs", "-q", "-f", d.node)
				records := t.TempDir()
				killAfter(t, killed, d, wipe, records)
				var err error
				w.records, err = devices.OpenRecords(records)
				must.Succeed(t, err)
				w.start()
				w.volumes = []devices.Volume{released(d.volume("pv"))}
				if r := w.pass(); len(r.Cleaned) != 1 {
					t.Fatalf("found %+v, want it cleaned", r)
				}
				wantNoSignature(t, d)
				wantZero(t, d, 0, 100*mib)
				wantZero(t, d, 220*mib, 320*mib)
				if wipe == devices.WipeZero {
					wantZero(t, d, 100*mib, 220*mib)
					if most := int64(steps-max(killed-1, 0)) * 64 * mib; w.wiped > most {
						t.Errorf("%d bytes were overwritten after the restart, want at most %d", w.wiped, most)
					}
				}
			})
		}
	}
}

// killAfter kills an agent when it has overwritten so many steps.
func killAfter(t *testing.T, steps int, d *testDisk, wipe devices.Wipe, records string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), cleanIn+"="+d.path, "DEVICES_TEST_WIPE="+string(wipe), "DEVICES_TEST_RECORDS="+records,
		fmt.Sprintf("DEVICES_TEST_BYTES=%d", d.bytes()))
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	lines := bufio.NewReader(output)
	for n := range steps {
		if line, err := lines.ReadString('\n'); err != nil || line != "step\n" {
			break // signatures have fewer steps
		}
		if n < steps-1 {
			_, err = io.WriteString(input, "\n")
			must.Succeed(t, err)
		}
	}
	must.Succeed(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
}

func TestCanceledCleaningResumes(t *testing.T) {
	w := newWorld(t)
	w.config.Wipe = devices.WipeZero
	d := w.disk("disk", 128*mib)
	w.volumes = []devices.Volume{released(d.volume("pv"))}
	w.agent.Pass(devices.Request{Volumes: w.volumes, Wipe: devices.WipeZero})
	w.agent.Close()
	w.start()
	if r := w.pass(); len(r.Cleaned) != 1 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	wantZero(t, d, 0, 128*mib)
}

// ill is a disk that does wrong, and holds a pattern.
func (w *world) ill(name string, bytes int64) (*disk.Disk, *testDisk) {
	w.t.Helper()
	file := filepath.Join(w.files, name)
	must.Succeed(w.t, os.WriteFile(file, make([]byte, bytes), 0o600))
	ill := disk.New(w.t, file, w.t.TempDir())
	return ill, w.attach(name, ill.Path)
}

func TestFailingDeviceKeepsVolume(t *testing.T) {
	for name, operation := range map[string]disk.Operation{"writing": disk.Write, "flushing": disk.Flush} {
		for _, hasVolume := range []bool{false, true} {
			t.Run(fmt.Sprint(name, hasVolume), func(t *testing.T) {
				w := newWorld(t)
				ill, d := w.ill("disk", 32*mib)
				if hasVolume {
					w.volumes = []devices.Volume{released(d.volume("pv"))}
				}
				ill.Fail(operation)
				w.refused(devices.Failed)
				ill.Heal()
			})
		}
	}
}

func TestSlowDeviceDoesNotDelayOthers(t *testing.T) {
	w := newWorld(t)
	w.disk("disk-a", 32*mib)
	w.disk("disk-b", 32*mib)
	release := make(chan struct{})
	var asked atomic.Int32
	w.api = func() ([]devices.Volume, error) {
		if asked.Add(1) == 1 {
			<-release
		}
		return nil, nil
	}
	changed := make(chan struct{}, 64)
	w.agent.Changed = func() { changed <- struct{}{} }
	request := devices.Request{Wipe: w.config.Wipe, Offer: &w.config}
	for r := w.agent.Pass(request); len(r.Offers) < 1; r = w.agent.Pass(request) {
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Fatal("no device is offered while the other one is being cleaned")
		}
	}
	close(release)
}

func wantZero(t *testing.T, d *testDisk, from, to int64) {
	t.Helper()
	want(t, d, from, to, make([]byte, mib))
}

func wantPattern(t *testing.T, d *testDisk, from, to int64) {
	t.Helper()
	want(t, d, from, to, pattern())
}

func want(t *testing.T, d *testDisk, from, to int64, content []byte) {
	t.Helper()
	device, err := os.Open(d.node)
	must.Succeed(t, err)
	defer device.Close()
	buffer := make([]byte, mib)
	for at := from; at < to; at += mib {
		_, err := device.ReadAt(buffer, at)
		must.Succeed(t, err)
		if !bytes.Equal(buffer, content) {
			t.Fatalf("the MiB at %d of %s is not as it should be", at, d.path)
		}
	}
}
