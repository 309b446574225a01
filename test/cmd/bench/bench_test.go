package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// What the figures are does not count here: the machine may be busy.
func TestEveryGroupIsMeasured(t *testing.T) {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	o, err := parse([]string{
		"--rounds=1", "--samples=2", "--files=2000", "--filesystem=xfs", "--dir=" + t.TempDir(),
		"--only=" + strings.Join(names, ","), "--move-mib=16", "--mover-files=1000",
	})
	must.Succeed(t, err)
	o.binary, o.disk, o.volumes = drivertest.Built(t), 16<<20, 100
	o.io = func(context.Context, load, string, int64) float64 { return 1 << 30 }
	var out strings.Builder
	if err := o.measure(t.Context(), &out); err != nil && !errors.Is(err, errBudget) {
		t.Fatal(err)
	}
	for _, name := range []string{
		"NodePublishVolume, without the socket", "GetCapacity", "CreateVolume", "DeleteVolume with 2,000 files",
		"CreateSnapshot of a block volume, btrfs", "CreateSnapshot of 1,000 files, xfs", "CreateVolume, 16 in flight",
		"memory, 100 volumes", "the program", "1 MiB sequential write, 4",
		"moving a file of 16 MiB", "moving 1,000 files of 4 KiB", "memory of move-in, 1,000 files", "CreateVolume on the target while 1,000 files move",
	} {
		if strings.Count(out.String(), "\n| "+name+" | ") != 1 {
			t.Errorf("no row %q, or two, in\n%s", name, out.String())
		}
	}
	devices, err := loopfs.Left(o.dir)
	must.Succeed(t, err)
	mounts, err := mountns.Below(o.dir)
	must.Succeed(t, err)
	entries, err := os.ReadDir(o.dir)
	must.Succeed(t, err)
	if len(devices)+len(mounts)+len(entries) > 0 {
		t.Errorf("left behind: devices %q, mounts %q, files %v", devices, mounts, entries)
	}
}

// The limit is only one if the driver takes what was made without it for its own.
func TestMakerVolumesMatchDriver(t *testing.T) {
	s := &scene{order: order{dir: t.TempDir(), kind: "btrfs", binary: drivertest.Built(t)}, ctx: t.Context()}
	defer func() { must.Succeed(t, s.close()) }()
	must.Succeed(t, try(func() {
		s.setUp()
		a := s.enter("fs")
		inOrder(a.create(statsID, volumeBytes), a.publish(statsID))()
		check(a.Process.Stop())
		m := s.maker(a.pool())
		inOrder(m.volume("pvc-beside").do, m.volume("pvc-gone").do, m.volume("pvc-gone").undo, a.restart, s.settled(a.pool()))()
		page := got(a.List(t.Context(), 0))
		if len(page) != 2 {
			t.Errorf("%d volumes, want two: %v", len(page), page)
		}
		for _, e := range page {
			if v := e.GetVolume(); oldcsi.Condition(e.GetStatus()).GetAbnormal() || v.GetCapacityBytes() != volumeBytes {
				t.Errorf("%v, want %d bytes in a good condition", e, volumeBytes)
			}
		}
	}))
}

func TestJudgeToleratesNoise(t *testing.T) {
	least, most := budget{atLeast: 0.7}, budget{atMost: 1.5}
	for name, test := range map[string]struct {
		ours, limit []float64
		budget      budget
		exceeded    bool
	}{
		"the machine slows down in the middle": {[]float64{80, 40, 20}, []float64{100, 50, 25}, least, false},
		"less than at least":                   {[]float64{6, 6, 6}, []float64{10, 10, 10}, least, true},
		"less, but not by more than noise":     {[]float64{5, 6, 7}, []float64{10, 10, 10}, least, false},
		"less by more than any noise":          {[]float64{1, 5, 9}, []float64{10, 10, 10}, least, true},
		"as much as the budget":                {[]float64{15, 15}, []float64{10, 10}, most, false},
		"more than at most":                    {[]float64{16, 16, 17}, []float64{10, 10, 10}, most, true},
		"no budget":                            {[]float64{90, 90}, []float64{10, 10}, budget{}, false},
		"a figure above its most":              {[]float64{41, 41, 45}, nil, budget{max: 40}, true},
		"a figure above it by noise":           {[]float64{39, 41, 45}, nil, budget{max: 40}, false},
	} {
		c := row{budget: test.budget}
		if test.limit != nil {
			c.limit = func() float64 { return 1 }
		}
		if got := c.judge(test.ours, test.limit); got.exceeded != test.exceeded {
			t.Errorf("%s: judged %+v, want exceeded %v", name, got, test.exceeded)
		}
	}
}

func TestReadFio(t *testing.T) {
	for output, want := range map[string]float64{
		`{"jobs":[{"error":0,"read":{"bw_bytes":42},"write":{"bw_bytes":0}}]}`: 42,
		"note: both iodepth >= 1\n" + `{"jobs":[{"write":{"bw_bytes":7}}]}`:    7,
		`{"jobs":[{"error":5,"read":{"bw_bytes":42}}]}`:                        0,
		`{"jobs":[]}`: 0,
		`{"jobs":[`:   0,
	} {
		read := 0.0
		if err := try(func() { read = readFio([]byte(output)) }); read != want || (err == nil) != (want > 0) {
			t.Errorf("%s is read as %g, %v; want %g", output, read, err, want)
		}
	}
}

// What is worse than its budget is seen in the table, and fails the run.
func TestResultShowsVerdict(t *testing.T) {
	for verdict, r := range map[string]result{
		" within noise |": {row: row{name: "slow", budget: budget{atMost: 2}}, ours: 45_600, limit: 20_000, ratio: 2.28, noise: 0.5},
		" EXCEEDED |":     {row: row{name: "bad", budget: budget{atLeast: 0.7}}, ours: 9, limit: 100, ratio: 0.09, noise: 0.01, exceeded: true},
	} {
		if got := strings.TrimSpace(r.String()); !strings.HasSuffix(got, verdict) {
			t.Errorf("it prints %q, want %q at its end", got, verdict)
		}
	}
}
