// Package inspect tests inspect of the real program, on real filesystems: that
// it reports what is there, changes nothing, and ends.
package inspect

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	if program := os.Getenv(programVariable); program != "" {
		fmt.Fprintln(os.Stderr, launch(program)) // there is no error but this, and no return
		os.Exit(1)
	}
	testenv.Main(m)
}

const (
	mib = 1 << 20
	gib = 1 << 30
	// inTime is far above what a check takes, with a pool that hangs in it.
	inTime = 60 * time.Second
)

// A harness is a driver with the pool "local" on a btrfs that enforces sizes.
type harness struct {
	*drivertest.Driver
	program, pool string
	pools         []drivertest.PoolConfig
}

func newHarness(t *testing.T, program string, more ...drivertest.PoolConfig) *harness {
	t.Helper()
	h := &harness{program: program, pool: filepath.Join(testenv.CountingBtrfs(t, gib), "pool")}
	h.pools = append([]drivertest.PoolConfig{{Name: "local", Path: h.pool, Enforcement: "required"}}, more...)
	h.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: h.pools})
	return h
}

func directory(id string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Bytes: bytes}
}

func device(id string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Bytes: bytes, Block: true}
}

// run runs inspect as the manifests have it run: the environment says what to check. It is
// killed if it syncs.
func (h *harness) run(args ...string) (output string, status int) {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), inTime)
	defer cancel()
	launcher, err := os.Executable()
	h.Must(err)
	cmd := exec.CommandContext(ctx, launcher, append([]string{"inspect"}, args...)...)
	cmd.Env = append(h.environment(), programVariable+"="+h.program)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		h.Fatal(err)
	}
	if stderr.Len() > 0 {
		h.Errorf("inspect %q complains: %s", args, stderr.String())
	}
	return stdout.String(), cmd.ProcessState.ExitCode()
}

// environment has the variables that the manifests set.
func (h *harness) environment() []string {
	h.Helper()
	pools, err := json.Marshal(h.pools)
	h.Must(err)
	return append(os.Environ(), "DATADIR="+string(pools), "NODE_NAME="+drivertest.NodeName)
}

// report is inspect's output for programs.
func (h *harness) report(wantStatus int, args ...string) inspect.Report {
	h.Helper()
	output, status := h.run(append([]string{"--output=json"}, args...)...)
	if status != wantStatus {
		h.Errorf("inspect %q ends with %d, want %d:\n%s", args, status, wantStatus, output)
	}
	var report inspect.Report
	decoder := json.NewDecoder(strings.NewReader(output))
	decoder.DisallowUnknownFields()
	h.Must(decoder.Decode(&report))
	return report
}

func volume(t *testing.T, r inspect.Report, id string) inspect.Volume {
	t.Helper()
	for _, p := range r.Pools {
		for _, v := range p.Volumes {
			if v.ID == id {
				return v
			}
		}
	}
	t.Fatalf("the report has no volume %s: %+v", id, r)
	return inspect.Volume{}
}

// All that needs the program is here, so that it is built once.
func TestInspect(t *testing.T) {
	program := drivertest.Built(t)
	for name, test := range map[string]func(t *testing.T, program string){
		"reports what is there, and changes nothing":      testTellsAndChangesNothing,
		"ends with a pool that hangs, and shows the rest": testHang,
		"lists snapshots, and what changed between them":  testSnapshots,
	} {
		t.Run(name, func(t *testing.T) { test(t, program) })
	}
}

func testTellsAndChangesNothing(t *testing.T, program string) {
	h := newHarness(t, program, drivertest.PoolConfig{Name: "second", Path: filepath.Join(t.TempDir(), "second")})
	ctx := t.Context()
	files, disk := directory("pvc-1", 16*mib), device("disk-1", 32*mib)
	h.MustCreate(files)
	h.MustCreate(disk)
	h.Must(errors.Join(h.Publish(ctx, files, "a"), h.Publish(ctx, disk, "b")))
	h.Must(os.WriteFile(h.Target("a")+"/data", bytes.Repeat([]byte("x"), mib), 0o600))
	h.Must((&drivertest.Pool{Driver: h.Driver, PoolConfig: h.pools[0]}).Settle()) // else what is free changes when it is written back
	available, err := h.Capacity(ctx, "local")
	h.Must(err)

	before := h.tree()
	report := h.report(0)
	if report.Abnormal != 0 || report.Node != drivertest.NodeName || len(report.Pools) != 2 {
		t.Errorf("the report is %+v, want two pools in order", report)
	}
	if p := report.Pools[0]; p.Quota != "btrfs" || *p.PromisedBytes != 48*mib || *p.AvailableBytes != available {
		t.Errorf("the pool is %+v, want 48 MiB promised and %d available", p, available)
	}
	if v := volume(t, report, "pvc-1"); len(v.Published) != 1 || v.Published[0].Path != h.Target("a") || *v.LimitBytes != 16*mib || v.QuotaID == 0 {
		t.Errorf("the directory volume is %+v", v)
	}
	if v := volume(t, report, "disk-1"); len(v.Devices) != 1 || v.Devices[0].SizeBytes != 32*mib || v.Devices[0].Foreign ||
		len(v.Published) != 1 || v.Published[0].Path != h.Target("b") || *v.FileBytes != 32*mib || *v.AllocatedBytes < 32*mib || *v.Extents < 1 {
		t.Errorf("the block volume is %+v", v)
	}
	h.wantSame(before)

	// And without the driver, of what is wrong as well.
	h.MustCreate(directory("pvc-2", 16*mib))
	h.MustCreate(directory("pvc-3", 16*mib))
	h.Must(h.Process.Stop())
	h.Must(os.Rename(filepath.Join(h.pool, "pvc-2"), filepath.Join(filepath.Dir(h.pool), "aside")))
	h.Must(os.WriteFile(filepath.Join(h.pool, ".hostpath-provisioner", "volumes", "pvc-3.json"), []byte(`{"version":1,`), 0o600))
	before = h.tree()
	report = h.report(2)
	if report.Abnormal != 2 {
		t.Errorf("%d things are not in order, want 2", report.Abnormal)
	}
	if v := volume(t, report, "pvc-2"); !v.Lost || !strings.HasPrefix(v.Condition, "the volume's directory is missing; its record is kept") {
		t.Errorf("the lost volume is %+v", v)
	}
	if v := volume(t, report, "pvc-3"); !v.Abnormal || !strings.Contains(v.Condition, "record") || !strings.Contains(v.Condition, "pvc-3") {
		t.Errorf("the volume with a torn record is %+v", v)
	}
	if one := h.report(0, "--pool=local", "--volume=pvc-1"); len(one.Pools) != 1 || len(one.Pools[0].Volumes) != 1 {
		t.Errorf("the report of one volume is %+v", one)
	}
	table, status := h.run()
	if status != 2 || strings.Count(table, "ABNORMAL: ") != 2 || !strings.HasSuffix(table, "2 problems: see the lines with ABNORMAL\n") {
		t.Errorf("the table ends with %d, and is\n%s", status, table)
	}
	h.wantSame(before)
}

func testSnapshots(t *testing.T, program string) {
	h := newHarness(t, program)
	ctx := t.Context()
	h.MustCreate(directory("pvc-1", 64*mib))
	h.MustCreate(device("disk-1", 32*mib))
	snapshot := func(name, of string) {
		t.Helper()
		_, err := h.Snapshot(ctx, name, of, "")
		h.Must(err)
	}
	write := func(path string, at int64) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
		h.Must(err)
		_, err = f.WriteAt([]byte("changed"), at)
		h.Must(errors.Join(err, f.Sync(), f.Close()))
	}
	in := func(name string) string { return filepath.Join(h.pool, "pvc-1", name) }
	image := filepath.Join(h.pool, "disk-1", "disk.img")
	write(in("kept"), 0)
	write(in("removed"), 0)
	snapshot("monday", "pvc-1")
	snapshot("image-monday", "disk-1")
	write(in("kept"), 5)
	write(in("added\nhere"), 0)
	h.Must(os.Remove(in("removed")))
	write(image, 5*mib)
	snapshot("tuesday", "pvc-1")
	snapshot("image-tuesday", "disk-1")
	write(in("later"), 0)

	before := h.tree()
	snapshots := h.report(0, "--snapshots").Pools[0].Snapshots
	if len(snapshots) != 4 || snapshots[2].Name != "monday" || snapshots[2].Source != "pvc-1" || *snapshots[2].SizeBytes != 64*mib ||
		snapshots[2].Method != "subvolume" || *snapshots[2].HeldBytes >= 64*mib {
		t.Errorf("the snapshots are %+v", snapshots)
	}
	table, status := h.run("--snapshots", "--volume=disk-1")
	if status != 0 || !strings.Contains(table, "image-monday") || strings.Contains(table, "tuesday  pvc-1") || strings.Contains(table, "VOLUME") {
		t.Errorf("the table of one volume's snapshots ends with %d, and is\n%s", status, table)
	}
	for args, want := range map[string]string{
		"--diff monday tuesday":                           "added     -                 added\\nhere\nchanged   size,mtime        kept\nremoved   -                 removed\n",
		"--diff tuesday":                                  "added     -                 later\n",
		"--diff monday monday":                            "",
		"--diff image-monday@node image-tuesday@node":     "changed   4096 bytes at 5242880\n",
		"--diff=image-monday image-tuesday --output json": `{"change":"changed","offset":5242880,"bytes":4096}` + "\n",
		"--output=json --diff tuesday monday":             `{"change":"removed","path":"added\nhere"}` + "\n" + `{"change":"changed","path":"kept","what":["size","mtime"]}` + "\n" + `{"change":"added","path":"removed"}` + "\n",
	} {
		if got, status := h.run(strings.Fields(args)...); got != want || status != 0 {
			t.Errorf("inspect %s ends with %d, and prints\n%swant\n%s", args, status, got, want)
		}
	}
	h.wantSame(before)

	h.Must(h.Process.Stop())
	h.Must(os.Rename(filepath.Join(h.pool, ".hostpath-provisioner", "snapshots", "~monday"), filepath.Join(filepath.Dir(h.pool), "aside")))
	if lost := h.report(2, "--snapshots").Pools[0].Snapshots[2]; !lost.Lost || lost.Reason != "DirectoryMissing" {
		t.Errorf("the lost snapshot is %+v", lost)
	}
}

func testHang(t *testing.T, program string) {
	hung := filepath.Join(t.TempDir(), "hung")
	release := testenv.Hang(t, hung)
	h := newHarness(t, program)
	h.MustCreate(directory("pvc-1", 16*mib))
	h.pools = append(h.pools, drivertest.PoolConfig{Name: "hung", Path: hung})
	report := h.report(2)
	if p := report.Pools[0]; p.Abnormal || len(p.Volumes) != 1 {
		t.Errorf("the pool that answers is %+v", p)
	}
	if p := report.Pools[1]; p.Readable || !strings.Contains(p.Condition, "no answer for 5s") {
		t.Errorf("the pool that hangs is %+v", p)
	}
	// One volume, of a pool that may have it.
	if report := h.report(2, "--volume=pvc-9"); report.Pools[1].Condition == "" {
		t.Errorf("the report is %+v", report)
	}
	_, err := h.Snapshot(t.Context(), "monday", "pvc-1", "")
	h.Must(err)
	h.Must(os.WriteFile(filepath.Join(h.pool, "pvc-1", "new"), nil, 0o644))
	slices.Reverse(h.pools) // that which hangs is asked first
	if output, status := h.run("--diff", "monday"); status != 0 || !strings.Contains(output, "new") {
		t.Errorf("comparing ends with %d, and prints %q", status, output)
	}
	release()
}

// tree is all that can be seen of the files of the node.
func (h *harness) tree() map[string]string {
	h.Helper()
	all := make(map[string]string)
	for _, p := range h.pools {
		h.Must(filepath.WalkDir(p.Path, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st syscall.Stat_t
			if err := syscall.Lstat(path, &st); err != nil {
				return err
			}
			if strings.HasSuffix(path, "/.hostpath-provisioner/lock") {
				// A driver that runs writes its sign of life there.
				all[path] = fmt.Sprintf("inode %d, mode %o", st.Ino, st.Mode)
				return nil
			}
			content := ""
			if d.Type().IsRegular() {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				content = fmt.Sprintf("%x", sha256.Sum256(data))
			}
			all[path] = fmt.Sprintf("inode %d, mode %o, %d links, owner %d:%d, %d bytes, modified %d, changed %d, %s",
				st.Ino, st.Mode, st.Nlink, st.Uid, st.Gid, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), content)
			return nil
		}))
	}
	return all
}

func (h *harness) wantSame(before map[string]string) {
	h.Helper()
	if diff := cmp.Diff(before, h.tree()); diff != "" {
		h.Errorf("inspecting changed (-before +after):\n%s", diff)
	}
}
