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
	o, err := parse([]string{"--rounds=1", "--samples=2", "--files=2000", "--filesystem=xfs", "--dir=" + t.TempDir()})
	must.Succeed(t, err)
	o.binary, o.disk, o.volumes = drivertest.Built(t), 16<<20, 100
	o.io = func(context.Context, load, string, order) (float64, error) { return 1 << 30, nil }
	var out strings.Builder
	results, err := measure(t.Context(), o, &out)
	if err != nil && !errors.Is(err, errBudget) {
		t.Fatal(err)
	}
	got := make(map[string]bool)
	for _, r := range results {
		if got[r.name] || !strings.Contains(out.String(), r.String()) {
			t.Errorf("%s is measured twice, or not printed", r.name)
		}
		got[r.name] = true
	}
	for _, name := range []string{
		"NodePublishVolume, without the socket", "GetCapacity", "CreateVolume", "DeleteVolume with 2,000 files",
		"CreateSnapshot of a block volume, btrfs", "CreateSnapshot of 1,000 files, xfs", "CreateVolume, 16 in flight",
		"memory, 100 volumes", "the program", "1 MiB sequential write, 4",
	} {
		if !got[name] {
			t.Errorf("no row %q in\n%s", name, out.String())
		}
	}
	wantNothingLeft(t, o.dir)
}

func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	devices, err := loopfs.Left(dir)
	must.Succeed(t, err)
	mounts, err := mountns.Below(dir)
	must.Succeed(t, err)
	entries, err := os.ReadDir(dir)
	must.Succeed(t, err)
	if len(devices)+len(mounts)+len(entries) > 0 {
		t.Errorf("left behind: devices %q, mounts %q, files %v", devices, mounts, entries)
	}
}

// The limit is only one if the driver takes what was made without it for its own.
func TestMakerVolumesMatchDriver(t *testing.T) {
	s, err := setUp(t.Context(), order{dir: t.TempDir(), kind: "btrfs", binary: drivertest.Built(t)})
	defer func() { must.Succeed(t, s.close()) }()
	must.Succeed(t, err)
	a, err := s.enter(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(a.create(statsID, volumeBytes)(t.Context()), a.publish(statsID)(t.Context()), a.Process.Stop()))
	m, err := s.maker(a.pool())
	must.Succeed(t, err)
	kept, removed := m.pair("pvc-beside"), m.pair("pvc-gone")
	must.Succeed(t, inOrder(kept.do, removed.do, removed.undo, a.restart, settled(a.pool()))(t.Context()))
	page, err := a.List(t.Context(), 0)
	must.Succeed(t, err)
	if len(page) != 2 {
		t.Errorf("%d volumes, want two: %v", len(page), page)
	}
	for _, e := range page {
		if v := e.GetVolume(); oldcsi.Condition(e.GetStatus()).GetAbnormal() || v.GetCapacityBytes() != volumeBytes {
			t.Errorf("%v, want %d bytes in a good condition", e, volumeBytes)
		}
	}
}

func TestJudgeToleratesNoise(t *testing.T) {
	least, most := budget{atLeast: 0.7}, budget{atMost: 1.5}
	for name, test := range map[string]struct {
		ours, limit  []float64
		ratio, noise float64
		budget       budget
		exceeded     bool
	}{
		"the machine slows down in the middle": {[]float64{80, 40, 20}, []float64{100, 50, 25}, 0.8, 0, least, false},
		"less than at least":                   {[]float64{6, 6, 6}, []float64{10, 10, 10}, 0.6, 0, least, true},
		"less, but not by more than noise":     {[]float64{5, 6, 7}, []float64{10, 10, 10}, 0.6, 0.1, least, false},
		"less by more than any noise":          {[]float64{1, 5, 9}, []float64{10, 10, 10}, 0.5, 0.4, least, true},
		"as much as the budget":                {[]float64{15, 15}, []float64{10, 10}, 1.5, 0, most, false},
		"more than at most":                    {[]float64{16, 16, 17}, []float64{10, 10, 10}, 1.6, 0, most, true},
		"no budget":                            {[]float64{90, 90}, []float64{10, 10}, 9, 0, budget{}, false},
		"a figure above its most":              {[]float64{41, 41, 45}, nil, 0, 0, budget{max: 40}, true},
		"a figure above it by noise":           {[]float64{39, 41, 45}, nil, 0, 2, budget{max: 40}, false},
		"a figure with a limit":                {[]float64{30, 41, 41}, []float64{1, 41, 41}, 1, 0, budget{max: 40}, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := comparison{budget: test.budget}
			if test.limit != nil {
				c.limit = func(context.Context) (float64, error) { return 1, nil }
			}
			got := c.judge(test.ours, test.limit)
			if off(got.ratio, test.ratio) || off(got.noise, test.noise) || got.exceeded != test.exceeded {
				t.Errorf("judge = %+v, want the ratio %g, noise %g, exceeded %v", got, test.ratio, test.noise, test.exceeded)
			}
		})
	}
}

func off(got, want float64) bool { return got < want-1e-9 || got > want+1e-9 }

func TestCompareInterleaves(t *testing.T) {
	var order strings.Builder
	note := func(what string, value float64) measureFunc {
		return func(context.Context) (float64, error) {
			order.WriteString(what)
			return value, nil
		}
	}
	results, err := compare(t.Context(), []comparison{
		{ours: note("a", 3), limit: note("A", 4)}, {samples: 2, ours: note("b", 5), limit: note("B", 5)},
	}, 2)
	must.Succeed(t, err)
	if want := "aAbBBbAaBbbB"; order.String() != want || off(results[0].ratio, 0.75) || off(results[1].ratio, 1) {
		t.Errorf("measured in the order %s, want %s; the results are %+v", &order, want, results)
	}
}

func TestResultShowsVerdict(t *testing.T) {
	for want, r := range map[string]result{
		"| slow | 45.6 ms | 20.0 ms | 2.28 | ±0.50 | ≤ 2.00 | within noise |\n": {name: "slow", unit: micros, ours: 45_600, limit: 20_000, ratio: 2.28, noise: 0.5, budget: budget{atMost: 2}},
		"| bad | 9.00 /s | 100 /s | 0.09 | ±0.01 | ≥ 0.70 | EXCEEDED |\n":       {name: "bad", unit: eachSecond, ours: 9, limit: 100, ratio: 0.09, noise: 0.01, budget: budget{atLeast: 0.7}, exceeded: true},
		"| start | 1.50 s | 300 ms | 5.00 | ±2000 µs | ≤ 2.00 s |  |\n":         {name: "start", unit: micros, ours: 1.5e6, limit: 3e5, ratio: 5, noise: 2000, budget: budget{max: 2e6}},
	} {
		if got := r.String(); got != want {
			t.Errorf("it prints %q, want %q", got, want)
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
		if got, err := readFio([]byte(output)); got != want || (err == nil) != (want > 0) {
			t.Errorf("readFio(%s) = %g, %v; want %g", output, got, err, want)
		}
	}
}
