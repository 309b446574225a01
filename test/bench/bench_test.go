package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestMeasureShowsRatiosAndLeavesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	binary, err := node.Binary(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(node.BinaryVariable, binary)
	for name, test := range map[string]struct {
		kind  string
		json  bool
		ours  float64 // of what the file does
		fails error
		shows string
		wants error
	}{
		"in a directory":                   {ours: 0.9, shows: "kept"},
		"on a filesystem of its own":       {kind: "xfs", json: true, ours: 0.9, shows: `"ratio": 0.9`},
		"a device that is much slower":     {ours: 0.1, shows: "EXCEEDED", wants: errBudget},
		"a measurement that cannot be had": {kind: "ext4", fails: os.ErrDeadlineExceeded, wants: os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			drive := func(_ context.Context, _ load, path string, _ int64, _ time.Duration) (float64, error) {
				info, err := os.Stat(path)
				if err != nil {
					return 0, err
				}
				rate := float64(1 << 30)
				if info.Mode()&os.ModeDevice != 0 {
					rate *= test.ours
				}
				return rate, test.fails
			}
			var out strings.Builder
			err := measure(t.Context(), order{rounds: 2, kind: test.kind, dir: dir, disk: 16 << 20, json: test.json}, &out, drive)
			if !errors.Is(err, test.wants) || !strings.Contains(out.String(), test.shows) {
				t.Errorf("measure = %v, want %v; it shows\n%s\nwant in it %q", err, test.wants, out.String(), test.shows)
			}
			wantNothingLeft(t, dir)
		})
	}
}

func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	devices, err := loopfs.Devices(dir)
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

func TestParse(t *testing.T) {
	if o, err := parse([]string{"--rounds=3", "--json", "--filesystem=btrfs", "--duration=2s", "--disk=64"}); err != nil ||
		o.rounds != 3 || !o.json || o.kind != "btrfs" || o.duration != 2*time.Second || o.disk != 64<<20 {
		t.Errorf("parse = %+v, %v", o, err)
	}
	for _, args := range [][]string{{"--rounds=0"}, {"--disk=0"}, {"--duration=10ms"}, {"--duration=1500ms"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("parse(%q) finds nothing wrong", args)
		}
	}
}
