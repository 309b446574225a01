// Package runbooks does to a pool that is broken what the documents say, word for word. It
// has those instructions that a shell can follow and whose failing would not be seen
// but a person in need.
package runbooks

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib     = 1 << 20
	content = "what matters"
)

// A harness is a driver with a volume in a pool on btrfs, where each volume is a subvolume:
// what walks over directories may not see what is in them.
type harness struct {
	*drivertest.Driver
	pool   string
	volume drivertest.Volume
}

func newHarness(t *testing.T, program, filesystem string) *harness {
	t.Helper()
	h := &harness{pool: filepath.Join(filesystem, "pool"), volume: drivertest.Volume{ID: "pvc-1", Bytes: 64 * mib}}
	h.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{{Name: "local", Path: h.pool}}})
	_, err := h.Create(h.Context(), h.volume)
	h.Must(err)
	h.Must(os.WriteFile(h.path("data"), []byte(content), 0o644))
	return h
}

// path is one in the volume.
func (h *harness) path(name string) string { return filepath.Join(h.pool, h.volume.ID, name) }

func (h *harness) record() string {
	return filepath.Join(h.pool, ".hostpath-provisioner/volumes", h.volume.ID+".json")
}

func (h *harness) condition() string {
	h.Helper()
	got, err := h.Get(h.Context(), h.volume.ID)
	h.Must(err)
	return oldcsi.Condition(got.GetStatus()).GetMessage()
}

// wantMended expects the volume in order under the promise and the limit that it had, and
// what was in it.
func (h *harness) wantMended() {
	h.Helper()
	if got := h.condition(); got != "in order" {
		h.Errorf("the condition is %q", got)
	}
	h.Must(h.Publish(h.Context(), h.volume, "pod"))
	stats, err := h.Stats(h.Context(), h.volume.ID, "pod")
	h.Must(err)
	if total := stats.GetUsage()[0].GetTotal(); total != h.volume.Bytes {
		h.Errorf("the volume has %d bytes, want %d", total, h.volume.Bytes)
	}
	data, err := os.ReadFile(filepath.Join(h.Target("pod"), "data"))
	h.Must(err)
	if string(data) != content {
		h.Errorf("the volume has %q", data)
	}
	h.Must(h.Unpublish(h.Context(), h.volume.ID, "pod"))
}

// section is what a document has below a heading.
func (h *harness) section(document, heading string) string {
	h.Helper()
	text, err := os.ReadFile(filepath.Join("../../../docs", document))
	h.Must(err)
	_, section, found := strings.Cut(string(text), "# "+heading+"\n")
	if !found {
		h.Fatalf("%s has no heading %q", document, heading)
	}
	section, _, _ = strings.Cut(section, "\n#")
	return section
}

// block is what is indented in a section: commands, or the content of a file.
func (h *harness) block(document, heading string) string {
	h.Helper()
	lines := regexp.MustCompile(`(?m)^    (.*)$`).FindAllStringSubmatch(h.section(document, heading), -1)
	if len(lines) == 0 {
		h.Fatalf("%s has nothing to run below %q", document, heading)
	}
	var block strings.Builder
	for _, line := range lines {
		block.WriteString(line[1] + "\n")
	}
	return block.String()
}

// run has a shell do what is written, with the names of this harness, and answers what it
// prints.
func (h *harness) run(commands, entry string) string {
	h.Helper()
	commands = strings.NewReplacer("<pool>", h.pool, "<volume id>", h.volume.ID,
		"/var/hpvolumes", h.pool, "ENTRY", entry, "NODE", drivertest.NodeName).Replace(commands)
	cmd := exec.CommandContext(h.Context(), "sh", "-c", commands)
	var printed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &printed, &printed
	err := cmd.Run()
	h.Logf("%s%s", commands, printed.String())
	h.Must(err)
	return printed.String()
}

// only is the line of a block that begins with a word.
func only(block, word string) string {
	return regexp.MustCompile(`(?m)^` + word + ` .*$`).FindString(block)
}

// All is in one test, so that the program is built once.
func TestRunbooks(t *testing.T) {
	testenv.NeedPrograms(t, "btrfs", "lsattr", "findmnt", "find", "du")
	program := drivertest.Built(t)
	for name, test := range map[string]func(*testing.T, *harness){
		"trash that cannot be erased": testStuckTrash,
		"a volume from a backup":      testBackup,
		"a record by hand":            testRecord,
		"a record of a newer driver":  testNewerRecord,
		"a volume that is full":       testFull,
		"a snapshot that is lost":     testLostSnapshot,
	} {
		t.Run(name, func(t *testing.T) { test(t, newHarness(t, program, testenv.CountingBtrfs(t, 512*mib))) })
	}
	t.Run("quotas over volumes that are there", func(t *testing.T) {
		testQuotas(t, newHarness(t, program, testenv.LoopFS(t, "btrfs", 512*mib)))
	})
}

func testStuckTrash(t *testing.T, h *harness) {
	h.Must(os.WriteFile(h.path("both"), make([]byte, 8*mib), 0o644))
	du := only(h.block("runbooks/HostPathPoolAlmostFull.md", "How to check"), "du")
	if printed := h.run("sync -f <pool>; "+du, ""); !strings.Contains(printed, "8.0M\t"+h.path("")+"\n") && !strings.Contains(printed, "8.1M\t"+h.path("")+"\n") {
		t.Errorf("%q does not find 8 MiB in the volume", du)
	}
	over := filepath.Join(filepath.Dir(h.pool), "over")
	h.Must(os.WriteFile(over, make([]byte, 8*mib), 0o644))
	for _, name := range []string{"data", "both"} { // what is a mount point cannot be removed
		h.Must(syscall.Mount(over, h.path(name), "", syscall.MS_BIND, ""))
	}
	h.Must(h.Delete(t.Context(), h.volume.ID))
	h.Eventually("the trash is stuck", func() bool {
		return strings.Contains(h.Process.Log(), "Failed to erase trash; it is kept and tried again")
	})
	entries, err := filepath.Glob(filepath.Join(h.pool, ".hostpath-provisioner/trash", drivertest.NodeName, "*"))
	h.Must(err)
	if len(entries) != 1 {
		t.Fatalf("the trash has %q", entries)
	}
	entry := filepath.Base(entries[0])

	printed := h.run(h.block("runbooks/HostPathTrashStuck.md", "How to check"), entry)
	for _, name := range []string{"data", "both"} {
		if !strings.Contains(printed, entry+"/"+name+" ") {
			t.Errorf("the runbook does not find %s", name)
		}
	}
	find := only(h.block("runbooks/HostPathTrashOld.md", "How to check"), "find")
	if count := strings.TrimSpace(h.run(find, entry)); count != "3" {
		t.Errorf("%q finds %q things in the trash, want 3", find, count)
	}

	repair := regexp.MustCompile("`(umount [^`]+)`").FindStringSubmatch(h.section("runbooks/HostPathTrashStuck.md", "What to do"))
	for _, name := range []string{"data", "both"} {
		h.run(strings.Replace(repair[1], "PATH", filepath.Join(entries[0], name), 1), entry)
	}
	h.Restart()
	h.AwaitNoTrash(h.pool)
}

func testBackup(t *testing.T, h *harness) {
	backup := filepath.Join(t.TempDir(), "backup")
	h.run("cp -a <pool>/<volume id> "+backup+" && btrfs subvolume delete <pool>/<volume id> && cp -a "+backup+" <pool>/<volume id>", "")
	if got := h.condition(); !strings.Contains(got, "limit is missing") {
		t.Errorf("the condition is %q", got)
	}
	h.run(h.block("layout.md", "A volume from a backup"), "")
	h.Restart()
	h.wantMended()
}

func testRecord(t *testing.T, h *harness) {
	h.Must(os.WriteFile(h.record(), []byte(`{"version":1,"id`), 0o600))
	if got := h.condition(); !strings.Contains(got, "record is unreadable") {
		t.Errorf("the condition is %q", got)
	}
	example, _, _ := strings.Cut(h.block("layout.md", "A record by hand"), "\n")
	record := make(map[string]any)
	h.Must(json.Unmarshal([]byte(example), &record))
	maps.Copy(record, map[string]any{"id": h.volume.ID, "bytes": h.volume.Bytes, "quota": "btrfs"})
	written, err := json.Marshal(record)
	h.Must(err)
	h.Must(os.WriteFile(h.record(), written, 0o600))
	h.Restart()
	h.wantMended()
}

// A driver that is too old must touch nothing of what a newer one wrote, and its runbook has
// to distinguish that from a record that is torn.
func testNewerRecord(t *testing.T, h *harness) {
	newer := []byte(`{"version":4,"id":"pvc-1","bytes":"64Mi","data":{}}`)
	written, err := os.ReadFile(h.record())
	h.Must(err)
	h.Must(os.WriteFile(h.record(), newer, 0o600))
	quote := regexp.MustCompile("“(it has version …, this driver knows …)”").FindStringSubmatch(h.section("runbooks/HostPathVolumesDamaged.md", "What to do"))
	if quote == nil {
		t.Fatal("the runbook does not say by what words a newer record is known")
	}
	if says := strings.ReplaceAll(quote[1], "…", `\d+`); !regexp.MustCompile(says).MatchString(h.condition()) {
		t.Errorf("the condition is %q, want %q in it", h.condition(), says)
	}
	h.Restart()
	left, err := os.ReadFile(h.record())
	h.Must(err)
	if !bytes.Equal(left, newer) {
		t.Errorf("the record is %q, want what the newer driver wrote", left)
	}
	// As if that were installed again.
	h.Must(os.WriteFile(h.record(), written, 0o600))
	h.wantMended()
}

func testLostSnapshot(t *testing.T, h *harness) {
	const runbook = "runbooks/HostPathSnapshotsLost.md"
	made, err := h.Snapshot(t.Context(), "daily", h.volume.ID, "")
	h.Must(err)
	ready := func() bool {
		t.Helper()
		list, err := h.Snapshots(t.Context(), "")
		h.Must(err)
		return len(list) == 1 && list[0].GetReadyToUse()
	}
	place := filepath.Join(filepath.Dir(h.pool), "aside")
	h.Must(os.Rename(filepath.Join(h.pool, ".hostpath-provisioner/snapshots/~daily"), place))
	named := strings.NewReplacer("SNAPSHOT", "daily", "PLACE", place)
	check := named.Replace(h.block(runbook, "How to check"))
	if printed := h.run(only(check, "ls")+"; "+only(check, "cat"), ""); strings.Contains(printed, "~daily\n") || !strings.Contains(printed, `"id":"~daily"`) || ready() {
		t.Errorf("the snapshot does not show to be lost:\n%s", printed)
	}
	restored := drivertest.Volume{ID: "pvc-2", Bytes: h.volume.Bytes}
	_, err = h.Restore(t.Context(), restored, made.GetSnapshotId())
	if err == nil || !strings.Contains(h.section(runbook, "What users see"), "“its directory is lost, only its record is left”") || !strings.Contains(err.Error(), "its directory is lost, only its record is left") {
		t.Errorf("restoring it: %v, want what the runbook quotes", err)
	}
	h.run(strings.TrimSpace(only(strings.ReplaceAll(named.Replace(h.block(runbook, "What to do")), "  mv", "mv"), "mv")), "")
	if !ready() {
		t.Error("the snapshot is not ready after its directory is back")
	}
	_, err = h.Restore(t.Context(), restored, made.GetSnapshotId())
	h.Must(err)
	data, err := os.ReadFile(filepath.Join(h.pool, "pvc-2/data"))
	if err != nil || string(data) != content {
		t.Errorf("the restored volume has %q, %v", data, err)
	}
	h.Must(os.Rename(filepath.Join(h.pool, ".hostpath-provisioner/snapshots/~daily"), place))
	h.Must(h.DeleteSnapshot(t.Context(), made.GetSnapshotId()))
	if _, err := os.Stat(filepath.Join(h.pool, ".hostpath-provisioner/volumes/~daily.json")); !os.IsNotExist(err) {
		t.Errorf("its record after it was deleted: %v", err)
	}
}

func testFull(t *testing.T, h *harness) {
	h.Must(h.Publish(t.Context(), h.volume, "pod"))
	h.run("dd if=/dev/zero of="+filepath.Join(h.Target("pod"), "much")+" bs=1M; dd if=/dev/zero of="+filepath.Join(h.Target("pod"), "more")+" bs=4k; sync -f <pool>", "")
	query := regexp.MustCompile(`kubelet_volume_stats_available_bytes (\S+) (\d+)`).FindStringSubmatch(h.block("runbooks/HostPathVolumesFull.md", "How to check"))
	if query == nil {
		t.Fatal("the runbook has no query for volumes that are full")
	}
	stats, err := h.Stats(t.Context(), h.volume.ID, "pod")
	h.Must(err)
	if got := oldcsi.Condition(stats).GetMessage(); got != "no space is left" {
		t.Errorf("the condition is %q", got)
	}
	left := stats.GetUsage()[0].GetAvailable()
	bound, err := strconv.ParseInt(query[2], 10, 64)
	found := left == bound || query[1] == "<" && left < bound
	if err != nil || !found {
		t.Errorf("%q does not find a volume with %d bytes left", query[0], left)
	}
	h.Must(h.Unpublish(t.Context(), h.volume.ID, "pod"))
}

// testQuotas switches quotas on while the driver runs: they enforce the sizes of new volumes only.
func testQuotas(t *testing.T, h *harness) {
	const unenforced = "in order; the size is promised but not enforced"
	if got := h.condition(); !strings.HasPrefix(got, unenforced) {
		t.Errorf("the condition is %q", got)
	}
	commands := regexp.MustCompile(`(?m)^ +btrfs .*$`).FindAllString(h.section("quotas.md", "Switch quotas on"), -1)
	if len(commands) == 0 {
		t.Fatal("docs/quotas.md has no commands that switch quotas on")
	}
	h.run(strings.Join(commands, "\n"), "")
	h.Eventually("the driver notices", func() bool {
		return strings.Contains(h.Process.Log(), "From now on the kernel enforces the sizes of new volumes")
	})
	if got := h.condition(); !strings.HasPrefix(got, unenforced) {
		t.Errorf("the condition of the volume that was there is %q", got)
	}
	fresh := drivertest.Volume{ID: "pvc-2", Bytes: 48 * mib}
	_, err := h.Create(t.Context(), fresh)
	h.Must(err)
	show := only(h.block("runbooks/HostPathVolumesAbnormal.md", "How to check"), "btrfs")
	if printed := h.run(show, ""); strings.Count(printed, "48.00MiB") != 1 || strings.Contains(printed, "64.00MiB") {
		t.Errorf("%q shows other limits than that of the new volume:\n%s", show, printed)
	}
}
