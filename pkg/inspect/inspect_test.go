package inspect_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func number(n int64) *int64 { return &n }

// aNode has one of everything that a report can have.
func aNode() inspect.Report {
	made := noon.Add(-26 * time.Hour)
	const kubelet = "/var/lib/kubelet/pods/6f1c9c1e-5f0e-4b5c-9d0f-3a1f6f6c2b11/volumes/kubernetes.io~csi/pvc-2/mount"
	return inspect.Report{
		Version: 1, Node: "node-a", Abnormal: 8,
		Pools: []inspect.Pool{
			{
				Name: "local", Path: "/var/hpvolumes", Readable: true, Condition: "in order",
				UUID: "kwinljr55icti4ji", Created: made, Quota: "xfs",
				Space: inspect.Space{
					SizeBytes: number(100 * gib), FreeBytes: number(60 * gib), PromisedBytes: number(31 * gib), SetAsideBytes: number(714 * mib), TrashHeldBytes: number(13 * mib), AvailableBytes: number(55 * gib),
					Inodes: number(52428800), InodesFree: number(52428000),
				},
				Contents: inspect.Contents{
					Volumes: []inspect.Volume{
						{
							ID: "disk-1", Mode: "block", Condition: "in order", Recorded: true, Enforced: true, Created: &made,
							Sizes: inspect.Sizes{
								PromisedBytes: number(10 * gib), LimitBytes: number(10*gib + 641*mib), UsedBytes: number(10*gib + 4*kib),
								QuotaID: 1213202432, RecordQuotaID: 1213202432, FileBytes: number(10 * gib), AllocatedBytes: number(10 * gib), Extents: new(25_000),
							},
							Published: []inspect.Place{{Path: "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/disk-1/6f1c"}},
							Nodes:     []string{"node-a"},
							Devices:   []inspect.Device{{Name: "loop0", SizeBytes: 10 * gib}, {Name: "loop1", SizeBytes: 10 * gib, ReadOnly: true, Foreign: true}},
						},
						{
							ID: "old", Mode: "mount", Condition: "in order; the volume has no record", Published: []inspect.Place{}, Nodes: []string{}, Devices: []inspect.Device{},
						},
						{
							ID: "pvc-1", Mode: "mount", Abnormal: true, Condition: "the volume's directory is missing; its record is kept", Reason: "DirectoryMissing",
							Recorded: true, Lost: true, Created: &made, Sizes: inspect.Sizes{PromisedBytes: number(20 * gib), RecordQuotaID: 1213202433},
							Published: []inspect.Place{}, Nodes: []string{}, Devices: []inspect.Device{},
						},
						{
							ID: "pvc-2", Mode: "mount", Condition: "in order", Recorded: true, Enforced: true, Inline: true, Created: &made,
							Sizes:     inspect.Sizes{PromisedBytes: number(gib), LimitBytes: number(gib), UsedBytes: number(1000), QuotaID: 1213202434, RecordQuotaID: 1213202434},
							Published: []inspect.Place{{Path: kubelet}, {Path: "/var/lib/kubelet/evil\x1b[2Jname", Inside: "sub\npath"}},
							Nodes:     []string{"node-a"}, Devices: []inspect.Device{},
						},
					},
					Snapshots: []inspect.Snapshot{
						{
							Name: "before-upgrade", Condition: "in order", Source: "pvc-2", Mode: "mount", SizeBytes: number(gib), HeldBytes: number(12 * mib),
							Method: "reflink", Consistency: "point-in-time", Cut: &made, TookMillis: number(1250), StallMillis: number(0),
						},
						{
							Name: "daily", Abnormal: true, Lost: true, Condition: "the snapshot is lost", Reason: "DirectoryMissing", Source: "pvc-1", Mode: "mount",
							SizeBytes: number(20 * gib), HeldBytes: number(20 * gib), Method: "copy", Consistency: "crash-consistent", Cut: &made, TookMillis: number(90_000), StallMillis: number(340),
						},
						{Name: "torn", Abnormal: true, Condition: "the snapshot's record is unreadable", Reason: "RecordUnreadable"},
					},
					Creating: []inspect.Leftover{{Node: "node-a", Name: "pvc-9", Changed: noon.Add(-3 * time.Second), Condition: "being made"}},
					Trash: []inspect.Leftover{
						{Node: "node-a", Name: "pvc-8.abcdefgh+10485760", Changed: noon.Add(-90 * time.Minute), UsedBytes: number(3 * mib), HeldBytes: number(10 * mib), Abnormal: true, Condition: "unchanged for 1h30m0s: cannot be erased, or no driver runs on its node"},
						{Node: "node-b", Name: "pvc-7.abcdefgh", Changed: noon.Add(-72 * time.Hour), HeldBytes: number(3 * mib), Condition: "being erased"},
					},
				},
			},
			{
				Name: "shared", Path: "/mnt/nfs", Shared: true, Readable: true, Abnormal: true, Condition: "the pool's filesystem is read-only", Reason: "ReadOnly",
				UUID: "zzhioir5avpfwbox", Created: made, ReadOnly: true, SystemDisk: true, SharesWith: []string{"home", "local"}, Unenforced: "no directory quotas: nfs at /mnt/nfs has none",
				Space: inspect.Space{SizeBytes: number(2048 * gib), FreeBytes: number(0), PromisedBytes: number(0), SetAsideBytes: number(0), TrashHeldBytes: number(0), AvailableBytes: number(0)},
				Contents: inspect.Contents{
					Volumes: []inspect.Volume{{
						ID: "pvc-3", Mode: "block", Abnormal: true, Condition: "the pool's filesystem is read-only\nand more", Recorded: true, Enforced: true, Thin: true, Created: &made,
						Sizes: inspect.Sizes{PromisedBytes: number(0)}, Published: []inspect.Place{}, Nodes: []string{"node-b", "node-c"}, Devices: []inspect.Device{},
					}},
					Snapshots: []inspect.Snapshot{}, Creating: []inspect.Leftover{}, Trash: []inspect.Leftover{},
					DevicesError: "the node's loop devices: no answer for 5s",
				},
			},
			{
				Name: "away", Path: "/mnt/away", Abnormal: true, Condition: "the pool does not serve: no answer for 5s: its filesystem hangs",
				Contents: inspect.Contents{Volumes: []inspect.Volume{}, Snapshots: []inspect.Snapshot{}, Creating: []inspect.Leftover{}, Trash: []inspect.Leftover{}},
			},
		},
	}
}

// The document is what programs were written for: a change of this file is one for them.
func TestDocumentFormat(t *testing.T) {
	report := aNode()
	var written bytes.Buffer
	must.Succeed(t, report.WriteJSON(&written))
	wantGolden(t, "report.json", written.Bytes())
}

func TestTable(t *testing.T) {
	report := aNode()
	var written bytes.Buffer
	must.Succeed(t, report.WriteTable(&written, noon))
	wantGolden(t, "report.txt", written.Bytes())
	for _, r := range written.String() {
		if r < ' ' && r != '\n' {
			t.Fatalf("the table has the control character %q", r)
		}
	}
}

func wantGolden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		must.Succeed(t, os.WriteFile(path, got, 0o644))
	}
	want := must.Value(os.ReadFile(path))(t)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s is not what was written; if that is meant, -update writes it anew (-want +got):\n%s", path, diff)
	}
}

func TestTableWithTrashOfUnknownSize(t *testing.T) {
	report := inspect.Report{Pools: []inspect.Pool{{Name: "local", Readable: true, Contents: inspect.Contents{Trash: []inspect.Leftover{{Name: "pvc-1.abcdefgh", Condition: "being erased"}}}}}}
	var written bytes.Buffer
	must.Succeed(t, report.WriteTable(&written, noon))
	if want := "all used space held for trash of unknown size"; !strings.Contains(written.String(), want) {
		t.Errorf("the table lacks %q:\n%s", want, written.String())
	}
}

func TestTableWithoutProblems(t *testing.T) {
	report := inspect.Report{Pools: []inspect.Pool{}}
	var written bytes.Buffer
	must.Succeed(t, report.WriteTable(&written, noon))
	if want := "0 pools, 0 volumes, 0 snapshots, 0 in the trash; all in order\n"; written.String() != want {
		t.Errorf("the table is %q, want %q", written.String(), want)
	}
}

func TestReportOfOneVolume(t *testing.T) {
	for id, c := range map[string]struct {
		found                        bool
		volumes, leftovers, reported int
	}{
		"pvc-1": {true, 1, 0, 5}, // the two pools and the devices count on, and its snapshot
		"pvc-8": {true, 0, 1, 4},
		"pvc-9": {true, 0, 1, 3},
		"pvc":   {false, 0, 0, 3},
	} {
		t.Run(id, func(t *testing.T) {
			report := aNode()
			parsed := must.Value(volume.ParseID(id))(t)
			if found := report.Only(parsed); found != c.found {
				t.Errorf("found: %v", found)
			}
			volumes, leftovers := 0, 0
			for _, p := range report.Pools {
				volumes += len(p.Volumes)
				leftovers += len(p.Creating) + len(p.Trash)
			}
			if volumes != c.volumes || leftovers != c.leftovers || report.Abnormal != c.reported {
				t.Errorf("%d volumes, %d leftovers and %d things not in order are left, want %+v", volumes, leftovers, report.Abnormal, c)
			}
		})
	}
}

func TestReportOfSnapshots(t *testing.T) {
	report := aNode()
	report.OnlySnapshots()
	if p := report.Pools[0]; len(p.Snapshots) != 3 || len(p.Volumes)+len(p.Creating)+len(p.Trash) > 0 {
		t.Errorf("the report is %+v, want its three snapshots alone", p)
	}
	if report.Abnormal != 4 { // two snapshots, and two pools
		t.Errorf("%d things are not in order, want 4", report.Abnormal)
	}
}

// A driver serves one of them, and which one is not known from outside.
func TestRunReportsPoolsOfOneDirectory(t *testing.T) {
	root := t.TempDir()
	mounts := &bindtest.Fake{}
	must.Succeed(t, os.Symlink("pool", filepath.Join(root, "link")))
	configs, err := poolconfig.Parse(`[{"name":"a","path":"pool"},{"name":"b","path":"link"},{"name":"c","path":"other"}]`, root)
	must.Succeed(t, err)
	options := pool.Options{Mounts: mounts, Labels: &labeltest.Fake{}, Devices: &looptest.Fake{}}
	set := pool.Start(configs, options)
	t.Cleanup(func() { must.Succeed(t, errors.Join(set.Close(context.Background()), mounts.Close())) })
	must.Succeed(t, set.Wait(t.Context()))

	report := inspect.Run(t.Context(), configs, inspect.Options{Node: options.Node, Mounts: mounts, Devices: options.Devices})
	if report.Abnormal != 2 {
		t.Errorf("%d things are not in order, want 2", report.Abnormal)
	}
	for i, another := range []string{`of pool "b" as well`, `of pool "a" as well`} {
		if p := report.Pools[i]; !p.Readable || !p.Abnormal || p.Reason != "PoolNotServing" || !strings.Contains(p.Condition, another) {
			t.Errorf("pool %s is %+v", p.Name, p)
		}
	}
	if p := report.Pools[2]; p.Abnormal {
		t.Errorf("the only pool is %+v", p)
	}
}

func TestRunReportsThatNoBlockVolumeCanBeMade(t *testing.T) {
	missing := errors.New("loop devices need the module loop")
	report := inspect.Run(t.Context(), nil, inspect.Options{Mounts: &bindtest.Fake{}, Devices: &looptest.Fake{Nodes: missing}})
	var written bytes.Buffer
	must.Succeed(t, report.WriteTable(&written, noon))
	if want := "no block volume can be made: loop devices need the module loop\n"; report.NoDevices != missing.Error() || report.Abnormal > 0 || !strings.Contains(written.String(), want) {
		t.Errorf("the report is %+v, with %d things not in order, and the table\n%s", report, report.Abnormal, written.String())
	}
}
