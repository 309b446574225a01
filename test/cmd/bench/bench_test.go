package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// short is an order that shows that all of it works, in seconds.
func short(dir string) order {
	return order{rounds: 2, samples: 2, duration: time.Second, dir: dir, disk: 16 << 20, files: 2 * inEach, volumes: []int{0, 100, 200, 300}, reference: 200, output: "json"}
}

func needDriver(t *testing.T) {
	t.Helper()
	binary := drivertest.Built(t)
	t.Setenv(drivertest.BinaryVariable, binary)
}

// diskOf is a disk whose devices do so much of what their files do.
func diskOf(share float64, fails error) driveFunc {
	return disks(share, share, fails)
}

// disks is diskOf with other devices than the driver's that do more, or less.
func disks(share, plain float64, fails error) driveFunc {
	return func(_ context.Context, _ load, path string, _ int64, _ time.Duration) (float64, error) {
		info, err := os.Stat(path)
		if err != nil {
			return 0, err
		}
		rate := float64(1 << 30)
		switch {
		case info.Mode()&os.ModeDevice == 0:
		case strings.HasPrefix(path, "/dev/"):
			rate *= plain
		default:
			rate *= share
		}
		return rate, fails
	}
}

func TestMeasure(t *testing.T) {
	needDriver(t)
	for name, test := range map[string]struct {
		kind  string
		ours  float64 // of what the file does
		plain float64 // of another device, if not the same
		fails error
		shows string
		wants error
	}{
		"in a directory":               {ours: 0.9, shows: `"ratio": 0.9`},
		"on a filesystem of its own":   {kind: "xfs", ours: 0.9, shows: `"filesystem": "xfs"`},
		"a device that is much slower": {ours: 0.1, shows: `"exceeded": true`, wants: errBudget},
		"slower than what losetup has": {ours: 0.9, plain: 1.3, shows: `"limit": "a device of losetup on such a file"`, wants: errBudget},
		"a measurement that fails":     {kind: "ext4", fails: os.ErrDeadlineExceeded, wants: os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			o := short(t.TempDir())
			o.kind, o.only = test.kind, []string{"blocks"}
			var out strings.Builder
			err := measure(t.Context(), o, &out, disks(test.ours, cmp.Or(test.plain, test.ours), test.fails))
			if !errors.Is(err, test.wants) || !strings.Contains(out.String(), test.shows) {
				t.Errorf("measure = %v, want %v; it shows\n%s\nwant in it %q", err, test.wants, out.String(), test.shows)
			}
			wantNothingLeft(t, o.dir)
		})
	}
}

// What the figures are does not count here: the machine may be busy.
func TestEveryGroupIsMeasured(t *testing.T) {
	needDriver(t)
	for _, kind := range []string{"", "btrfs"} {
		t.Run("filesystem "+kind, func(t *testing.T) {
			o := short(t.TempDir())
			o.kind = kind
			var out strings.Builder
			if err := measure(t.Context(), o, &out, diskOf(1, nil)); err != nil && !errors.Is(err, errBudget) {
				t.Fatal(err)
			}
			var got report
			if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
				t.Fatal(err)
			}
			measured := make(map[string]bool)
			names := make(map[string]bool)
			for _, r := range got.Results {
				measured[r.Group] = true
				if r.Ours <= 0 || (r.Limit != "") != (r.Bare > 0) || (r.Bare > 0) != (r.Ratio > 0) {
					t.Errorf("%+v is not whole", r)
				}
				if key := r.Name + " / " + r.Limit; names[key] {
					t.Errorf("%s is there twice", key)
				} else {
					names[key] = true
				}
			}
			for _, g := range groups {
				if !measured[g.title] {
					t.Errorf("nothing is reported of %s", g.name)
				}
			}
			wantRows(t, got.Results)
			if kind == "btrfs" && !got.Machine.Quotas {
				t.Errorf("on btrfs it reports %s, want quotas", got.Machine)
			}
			wantNothingLeft(t, o.dir)
		})
	}
}

// wantRows says that each figure which is to be measured is there with its budget, and none
// other. A change of one of these changes what the project promises.
func wantRows(t *testing.T, results []result) {
	t.Helper()
	most := func(allowed float64) budget { return budget{AtMost: allowed} }
	least := func(allowed float64) budget { return budget{AtLeast: allowed} }
	const called, durable = "an empty call and the bare system calls", "the same durable sequence without the driver"
	want := map[string]budget{
		"NodePublishVolume / " + called:                                   most(3),
		"NodeUnpublishVolume / " + called:                                 most(2),
		"NodePublishVolume, without the socket / the bare system calls":   most(3),
		"NodeUnpublishVolume, without the socket / the bare system calls": most(2),
		"an empty call / the bare system calls of publishing":             {},
		"NodeGetVolumeStats / an empty call":                              most(1.5),
		"GetCapacity / an empty call":                                     most(1.5),
		"CreateVolume / an empty call and " + durable:                     most(1.5),
		"DeleteVolume / an empty call and " + durable:                     most(2),
		"CreateVolume, without the socket / " + durable:                   most(1.5),
		"DeleteVolume, without the socket / " + durable:                   most(2),
		"DeleteVolume with 2,000 files / DeleteVolume of a fresh volume":  most(2),
		"CreateVolume, 1 in flight / an empty call and " + durable:        least(1 / 1.5),
		"CreateVolume, 16 in flight / an empty call and " + durable:       least(1 / 1.5),
		"CreateVolume, 64 in flight / an empty call and " + durable:       least(1 / 1.5),
		"CreateSnapshot of 1,000 files, xfs / making each file and sharing its blocks by the bare system calls, and one syncfs": most(2),
		"finding out that 200 files did not change, xfs / copying them, without the socket":                                     most(0.05),
		"CreateSnapshot again, xfs / an empty call":                                                                             most(1.5),
		"ListSnapshots of one, xfs / an empty call":                                                                             most(1.5),
		"ListSnapshots, a page of 100, xfs / opening the directory and reading the record of each":                              {},
		"NodePublishVolume while 200 files are copied, xfs / NodePublishVolume":                                                 most(1.2),
		"NodeGetVolumeStats while 200 files are copied, xfs / NodeGetVolumeStats":                                               most(1.2),
		"CreateSnapshot of a block volume, xfs / an empty call, FICLONE, fsync and a durable record":                            most(1.5),
		"CreateSnapshot of a subvolume, btrfs / an empty call, BTRFS_IOC_SNAP_CREATE_V2, a limit and a durable record":          most(3),
		"CreateSnapshot of a block volume, btrfs / an empty call, FICLONE, fsync and a durable record":                          most(1.5),
		"ListVolumes, 0 volumes / an empty call":                                                                                {},
		"ListVolumes, a page of 100, 200 volumes / with the fewest volumes":                                                     most(1.5),
		"ListVolumes, a page of 100, 300 volumes / with the fewest volumes":                                                     most(1.5),
		"start, 0 volumes / ":    {},
		"memory, 0 volumes / ":   {},
		"memory, 100 volumes / ": {},
		"memory, 200 volumes / ": {Max: 48},
		"memory, 300 volumes / ": {},
		"start, 200 volumes / listing the volumes and reading each record": {Max: 0.5e6},
		"the program / ":  {Max: 18},
		"memory, idle / ": {},
		"memory, most under calls of 64 at a time / idle":                      {},
		"4 KiB random read, 1 at a time / its file":                            {},
		"4 KiB random write, 1 at a time / its file":                           {},
		"4 KiB random read, 32 / its file":                                     least(0.6),
		"4 KiB random write, 32 / its file":                                    least(0.6),
		"1 MiB sequential read, 4 / its file":                                  least(0.8),
		"1 MiB sequential write, 4 / its file":                                 least(0.8),
		"4 KiB random read, 1 at a time / a device of losetup on such a file":  least(0.8),
		"4 KiB random write, 1 at a time / a device of losetup on such a file": least(0.8),
	}
	for _, n := range []string{"100", "200", "300"} {
		for _, call := range []string{"CreateVolume", "NodeGetVolumeStats", "GetCapacity"} {
			want[call+", "+n+" volumes / with no volumes"] = most(1.5)
		}
		want["ListVolumes, a page of 100, "+n+" volumes / opening each directory of the page"] = budget{}
		if n != "200" {
			want["start, "+n+" volumes / listing the volumes and reading each record"] = budget{}
		}
	}
	for _, kind := range []string{"xfs", "btrfs"} {
		want["CPU time of FICLONE of extents, "+kind+" / the prediction, 30µs for each"] = most(1.5)
	}
	got := make(map[string]budget)
	for _, r := range results {
		// How many extents there are is up to the filesystem.
		name := regexp.MustCompile("^CPU time of FICLONE of [0-9,]+ extents").ReplaceAllString(r.Name, "CPU time of FICLONE of extents")
		got[name+" / "+r.Limit] = r.Budget
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("the rows and their budgets (-want +got)\n%s", diff)
	}
}

// The limit is only one if the driver takes what was made without it for its own.
func TestMakerVolumesMatchDriver(t *testing.T) {
	needDriver(t)
	for _, kind := range []string{"", "btrfs"} {
		t.Run("filesystem "+kind, func(t *testing.T) {
			o := short(t.TempDir())
			o.kind = kind
			s, err := setUp(t.Context(), o, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.close(); err != nil {
					t.Error(err)
				}
			}()
			a, err := s.enterWith(t.Context(), 3)
			if err != nil {
				t.Fatal(err)
			}
			wantWhole(t, a, volumeID(0), volumeID(1), volumeID(2), statsID)
			m, err := newMaker(a.pool())
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(m.make("pvc-beside"), m.remove(volumeID(1)), m.close(), a.Process.Stop(), a.restart(t.Context())); err != nil {
				t.Fatal(err)
			}
			wantWhole(t, a, volumeID(0), volumeID(2), statsID, "pvc-beside")
			if err := a.settle(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// wantWhole says that a driver has these volumes and finds nothing wrong with them but
// that their sizes are not enforced, where that is so.
func wantWhole(t *testing.T, a *actor, want ...string) {
	t.Helper()
	page, err := a.List(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range page {
		got = append(got, e.GetVolume().GetVolumeId())
		if c := e.GetStatus().GetVolumeCondition(); c.GetAbnormal() || e.GetVolume().GetCapacityBytes() != volumeBytes {
			t.Errorf("%s has %d bytes and is %s, want %d", e.GetVolume().GetVolumeId(), e.GetVolume().GetCapacityBytes(), c, volumeBytes)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("volumes %q, want %q", got, want)
	}
}

func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	devices, err := loopfs.Left(dir)
	if err != nil || len(devices) > 0 {
		t.Errorf("devices left behind: %q, %v", devices, err)
	}
	mounts, err := mountns.Below(dir)
	if err != nil || len(mounts) > 0 {
		t.Errorf("mounts left behind: %q, %v", mounts, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("files left behind: %v, %v", entries, err)
	}
}

func TestReadFio(t *testing.T) {
	for name, test := range map[string]struct {
		output string
		want   float64
		fails  bool
	}{
		"a reader":         {`{"jobs":[{"error":0,"read":{"bw_bytes":42},"write":{"bw_bytes":0}}]}`, 42, false},
		"a writer":         {`{"jobs":[{"error":0,"read":{"bw_bytes":0},"write":{"bw_bytes":7}}]}`, 7, false},
		"a note before it": {"note: both iodepth >= 1\n" + `{"jobs":[{"write":{"bw_bytes":7}}]}`, 7, false},
		"an IO error":      {`{"jobs":[{"error":5,"read":{"bw_bytes":42}}]}`, 0, true},
		"no job":           {`{"jobs":[]}`, 0, true},
		"half of it":       {`{"jobs":[`, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readFio([]byte(test.output))
			if got != test.want || (err != nil) != test.fails {
				t.Errorf("readFio = %g, %v; want %g", got, err, test.want)
			}
		})
	}
}

func TestParseScalesMatchBudgets(t *testing.T) {
	o, err := parse(nil)
	if err != nil || !slices.Equal(o.volumes, []int{0, 1_000, 10_000}) || o.reference != 10_000 || o.files != 100_000 {
		t.Errorf("parse = %+v, %v", o, err)
	}
}

func TestParse(t *testing.T) {
	o, err := parse([]string{"--rounds=3", "--output=json", "--filesystem=btrfs", "--duration=2s", "--disk=64", "--only=mounts,scale", "--volumes=1000"})
	if err != nil || o.rounds != 3 || o.output != "json" || o.kind != "btrfs" || o.duration != 2*time.Second || o.disk != 64<<20 ||
		!slices.Equal(o.only, []string{"mounts", "scale"}) || !slices.Equal(o.volumes, []int{0, 1_000}) {
		t.Errorf("parse = %+v, %v", o, err)
	}
	for _, args := range [][]string{
		{"--rounds=0"}, {"--samples=0"}, {"--disk=0"}, {"--files=0"}, {"--volumes=-1"},
		{"--duration=10ms"}, {"--duration=1500ms"}, {"--output=xml"}, {"--only=mounts,nothing"},
	} {
		if _, err := parse(args); err == nil {
			t.Errorf("parse(%q) finds nothing wrong", args)
		}
	}
}

// Memory is that of a driver as it is run.
func TestDriverFlagsMatchManifests(t *testing.T) {
	data, err := os.ReadFile("../../../deploy/csi/base/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, driver, _ := strings.Cut(string(data), "- name: driver\n")
	args, _, _ := strings.Cut(driver, "env:")
	for _, flag := range manifestFlags {
		flag = strings.Replace(flag, "127.0.0.1:0", ":", 1)
		if !strings.Contains(args, "- "+flag) {
			t.Errorf("the manifest does not have %q, it has %s", flag, args)
		}
	}
}
