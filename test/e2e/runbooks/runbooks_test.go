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

// A scene is a driver with a volume in a pool on btrfs, where each volume is a subvolume:
// what walks over directories may not see what is in them.
type scene struct {
	*drivertest.Driver
	pool   string
	volume drivertest.Volume
}

func newScene(t *testing.T, program, filesystem string) *scene {
	t.Helper()
	s := &scene{pool: filepath.Join(filesystem, "pool"), volume: drivertest.Volume{ID: "pvc-1", Bytes: 64 * mib}}
	s.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{{Name: "local", Path: s.pool}}})
	_, err := s.Create(s.Context(), s.volume)
	s.Must(err)
	s.Must(os.WriteFile(s.path("data"), []byte(content), 0o644))
	return s
}

// path is one in the volume.
func (s *scene) path(name string) string { return filepath.Join(s.pool, s.volume.ID, name) }

func (s *scene) record() string {
	return filepath.Join(s.pool, ".hostpath-provisioner/volumes", s.volume.ID+".json")
}

func (s *scene) condition() string {
	s.Helper()
	got, err := s.Get(s.Context(), s.volume.ID)
	s.Must(err)
	return oldcsi.Condition(got.GetStatus()).GetMessage()
}

// wantMended expects the volume in order under the promise and the limit that it had, and
// what was in it.
func (s *scene) wantMended() {
	s.Helper()
	if got := s.condition(); got != "in order" {
		s.Errorf("the condition is %q", got)
	}
	s.Must(s.Publish(s.Context(), s.volume, "pod"))
	stats, err := s.Stats(s.Context(), s.volume.ID, "pod")
	s.Must(err)
	if total := stats.GetUsage()[0].GetTotal(); total != s.volume.Bytes {
		s.Errorf("the volume has %d bytes, want %d", total, s.volume.Bytes)
	}
	data, err := os.ReadFile(filepath.Join(s.Target("pod"), "data"))
	s.Must(err)
	if string(data) != content {
		s.Errorf("the volume has %q", data)
	}
	s.Must(s.Unpublish(s.Context(), s.volume.ID, "pod"))
}

// section is what a document has below a heading.
func (s *scene) section(document, heading string) string {
	s.Helper()
	text, err := os.ReadFile(filepath.Join("../../../docs", document))
	s.Must(err)
	_, section, found := strings.Cut(string(text), "# "+heading+"\n")
	if !found {
		s.Fatalf("%s has no heading %q", document, heading)
	}
	section, _, _ = strings.Cut(section, "\n#")
	return section
}

// block is what is indented in a section: commands, or the content of a file.
func (s *scene) block(document, heading string) string {
	s.Helper()
	lines := regexp.MustCompile(`(?m)^    (.*)$`).FindAllStringSubmatch(s.section(document, heading), -1)
	if len(lines) == 0 {
		s.Fatalf("%s has nothing to run below %q", document, heading)
	}
	var block strings.Builder
	for _, line := range lines {
		block.WriteString(line[1] + "\n")
	}
	return block.String()
}

// run has a shell do what is written, with the names of this scene, and answers what it
// prints.
func (s *scene) run(commands, entry string) string {
	s.Helper()
	commands = strings.NewReplacer("<pool>", s.pool, "<volume id>", s.volume.ID,
		"/var/hpvolumes", s.pool, "ENTRY", entry, "NODE", drivertest.NodeName).Replace(commands)
	cmd := exec.CommandContext(s.Context(), "sh", "-c", commands)
	var printed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &printed, &printed
	err := cmd.Run()
	s.Logf("%s%s", commands, printed.String())
	s.Must(err)
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
	for name, test := range map[string]func(*testing.T, *scene){
		"trash that cannot be erased": testStuckTrash,
		"a volume from a backup":      testBackup,
		"a record by hand":            testRecord,
		"a record of a newer driver":  testNewerRecord,
		"a volume that is full":       testFull,
		"a snapshot that is lost":     testLostSnapshot,
	} {
		t.Run(name, func(t *testing.T) { test(t, newScene(t, program, testenv.CountingBtrfs(t, 512*mib))) })
	}
	t.Run("quotas over volumes that are there", func(t *testing.T) {
		testQuotas(t, newScene(t, program, testenv.LoopFS(t, "btrfs", 512*mib)))
	})
}

func testStuckTrash(t *testing.T, s *scene) {
	s.Must(os.WriteFile(s.path("both"), make([]byte, 8*mib), 0o644))
	du := only(s.block("runbooks/HostPathPoolAlmostFull.md", "How to check"), "du")
	if printed := s.run("sync -f <pool>; "+du, ""); !strings.Contains(printed, "8.0M\t"+s.path("")+"\n") && !strings.Contains(printed, "8.1M\t"+s.path("")+"\n") {
		t.Errorf("%q does not find 8 MiB in the volume", du)
	}
	over := filepath.Join(filepath.Dir(s.pool), "over")
	s.Must(os.WriteFile(over, make([]byte, 8*mib), 0o644))
	for _, name := range []string{"data", "both"} { // what is a mount point cannot be removed
		s.Must(syscall.Mount(over, s.path(name), "", syscall.MS_BIND, ""))
	}
	s.Must(s.Delete(t.Context(), s.volume.ID))
	s.Eventually("the trash is stuck", func() bool {
		return strings.Contains(s.Process.Log(), "Failed to erase trash; it is kept and tried again")
	})
	entries, err := filepath.Glob(filepath.Join(s.pool, ".hostpath-provisioner/trash", drivertest.NodeName, "*"))
	s.Must(err)
	if len(entries) != 1 {
		t.Fatalf("the trash has %q", entries)
	}
	entry := filepath.Base(entries[0])

	printed := s.run(s.block("runbooks/HostPathTrashStuck.md", "How to check"), entry)
	for _, name := range []string{"data", "both"} {
		if !strings.Contains(printed, entry+"/"+name+" ") {
			t.Errorf("the runbook does not find %s", name)
		}
	}
	find := only(s.block("runbooks/HostPathTrashOld.md", "How to check"), "find")
	if count := strings.TrimSpace(s.run(find, entry)); count != "3" {
		t.Errorf("%q finds %q things in the trash, want 3", find, count)
	}

	repair := regexp.MustCompile("`(umount [^`]+)`").FindStringSubmatch(s.section("runbooks/HostPathTrashStuck.md", "What to do"))
	for _, name := range []string{"data", "both"} {
		s.run(strings.Replace(repair[1], "PATH", filepath.Join(entries[0], name), 1), entry)
	}
	s.Restart()
	s.AwaitNoTrash(s.pool)
}

func testBackup(t *testing.T, s *scene) {
	backup := filepath.Join(t.TempDir(), "backup")
	s.run("cp -a <pool>/<volume id> "+backup+" && btrfs subvolume delete <pool>/<volume id> && cp -a "+backup+" <pool>/<volume id>", "")
	if got := s.condition(); !strings.Contains(got, "limit is missing") {
		t.Errorf("the condition is %q", got)
	}
	s.run(s.block("layout.md", "A volume from a backup"), "")
	s.Restart()
	s.wantMended()
}

func testRecord(t *testing.T, s *scene) {
	s.Must(os.WriteFile(s.record(), []byte(`{"version":1,"id`), 0o600))
	if got := s.condition(); !strings.Contains(got, "record is unreadable") {
		t.Errorf("the condition is %q", got)
	}
	example, _, _ := strings.Cut(s.block("layout.md", "A record by hand"), "\n")
	record := make(map[string]any)
	s.Must(json.Unmarshal([]byte(example), &record))
	maps.Copy(record, map[string]any{"id": s.volume.ID, "bytes": s.volume.Bytes, "quota": "btrfs"})
	written, err := json.Marshal(record)
	s.Must(err)
	s.Must(os.WriteFile(s.record(), written, 0o600))
	s.Restart()
	s.wantMended()
}

// A driver that is too old must touch nothing of what a newer one wrote, and its runbook has
// to distinguish that from a record that is torn.
func testNewerRecord(t *testing.T, s *scene) {
	newer := []byte(`{"version":4,"id":"pvc-1","bytes":"64Mi","data":{}}`)
	written, err := os.ReadFile(s.record())
	s.Must(err)
	s.Must(os.WriteFile(s.record(), newer, 0o600))
	quote := regexp.MustCompile("“(it has version …, this driver knows …)”").FindStringSubmatch(s.section("runbooks/HostPathVolumesDamaged.md", "What to do"))
	if quote == nil {
		t.Fatal("the runbook does not say by what words a newer record is known")
	}
	if says := strings.ReplaceAll(quote[1], "…", `\d+`); !regexp.MustCompile(says).MatchString(s.condition()) {
		t.Errorf("the condition is %q, want %q in it", s.condition(), says)
	}
	s.Restart()
	left, err := os.ReadFile(s.record())
	s.Must(err)
	if !bytes.Equal(left, newer) {
		t.Errorf("the record is %q, want what the newer driver wrote", left)
	}
	// As if that were installed again.
	s.Must(os.WriteFile(s.record(), written, 0o600))
	s.wantMended()
}

func testLostSnapshot(t *testing.T, s *scene) {
	const runbook = "runbooks/HostPathSnapshotsLost.md"
	made, err := s.Snapshot(t.Context(), "daily", s.volume.ID, "")
	s.Must(err)
	ready := func() bool {
		t.Helper()
		list, err := s.Snapshots(t.Context(), "")
		s.Must(err)
		return len(list) == 1 && list[0].GetReadyToUse()
	}
	place := filepath.Join(filepath.Dir(s.pool), "aside")
	s.Must(os.Rename(filepath.Join(s.pool, ".hostpath-provisioner/snapshots/~daily"), place))
	named := strings.NewReplacer("SNAPSHOT", "daily", "PLACE", place)
	check := named.Replace(s.block(runbook, "How to check"))
	if printed := s.run(only(check, "ls")+"; "+only(check, "cat"), ""); strings.Contains(printed, "~daily\n") || !strings.Contains(printed, `"id":"~daily"`) || ready() {
		t.Errorf("the snapshot does not show to be lost:\n%s", printed)
	}
	restored := drivertest.Volume{ID: "pvc-2", Bytes: s.volume.Bytes}
	_, err = s.Restore(t.Context(), restored, made.GetSnapshotId())
	if err == nil || !strings.Contains(s.section(runbook, "What users see"), "“its directory is lost, only its record is left”") || !strings.Contains(err.Error(), "its directory is lost, only its record is left") {
		t.Errorf("restoring it: %v, want what the runbook quotes", err)
	}
	s.run(strings.TrimSpace(only(strings.ReplaceAll(named.Replace(s.block(runbook, "What to do")), "  mv", "mv"), "mv")), "")
	if !ready() {
		t.Error("the snapshot is not ready after its directory is back")
	}
	_, err = s.Restore(t.Context(), restored, made.GetSnapshotId())
	s.Must(err)
	data, err := os.ReadFile(filepath.Join(s.pool, "pvc-2/data"))
	if err != nil || string(data) != content {
		t.Errorf("the restored volume has %q, %v", data, err)
	}
	s.Must(os.Rename(filepath.Join(s.pool, ".hostpath-provisioner/snapshots/~daily"), place))
	s.Must(s.DeleteSnapshot(t.Context(), made.GetSnapshotId()))
	if _, err := os.Stat(filepath.Join(s.pool, ".hostpath-provisioner/volumes/~daily.json")); !os.IsNotExist(err) {
		t.Errorf("its record after it was deleted: %v", err)
	}
}

func testFull(t *testing.T, s *scene) {
	s.Must(s.Publish(t.Context(), s.volume, "pod"))
	s.run("dd if=/dev/zero of="+filepath.Join(s.Target("pod"), "much")+" bs=1M; dd if=/dev/zero of="+filepath.Join(s.Target("pod"), "more")+" bs=4k; sync -f <pool>", "")
	query := regexp.MustCompile(`kubelet_volume_stats_available_bytes (\S+) (\d+)`).FindStringSubmatch(s.block("runbooks/HostPathVolumesFull.md", "How to check"))
	if query == nil {
		t.Fatal("the runbook has no query for volumes that are full")
	}
	stats, err := s.Stats(t.Context(), s.volume.ID, "pod")
	s.Must(err)
	if got := oldcsi.Condition(stats).GetMessage(); got != "no space is left" {
		t.Errorf("the condition is %q", got)
	}
	left := stats.GetUsage()[0].GetAvailable()
	bound, err := strconv.ParseInt(query[2], 10, 64)
	found := left == bound || query[1] == "<" && left < bound
	if err != nil || !found {
		t.Errorf("%q does not find a volume with %d bytes left", query[0], left)
	}
	s.Must(s.Unpublish(t.Context(), s.volume.ID, "pod"))
}

// testQuotas switches quotas on while the driver runs: they enforce the sizes of new volumes only.
func testQuotas(t *testing.T, s *scene) {
	const unenforced = "in order; the size is promised but not enforced"
	if got := s.condition(); !strings.HasPrefix(got, unenforced) {
		t.Errorf("the condition is %q", got)
	}
	// Not every machine has the programs for simple quotas; pkg/hostfs/quota switches them on without.
	_, ordinary, _ := strings.Cut(s.section("quotas.md", "Switch quotas on"), "Ordinary ones, where")
	ordinary, _, _ = strings.Cut(ordinary, "To switch from ordinary quotas to simple ones")
	commands := regexp.MustCompile(`(?m)^ +btrfs .*$`).FindAllString(ordinary, -1)
	if len(commands) == 0 {
		t.Fatal("docs/quotas.md has no commands for ordinary quotas")
	}
	s.run(strings.Join(commands, "\n"), "")
	s.Eventually("the driver notices", func() bool {
		return strings.Contains(s.Process.Log(), "From now on the kernel enforces the sizes of new volumes")
	})
	if got := s.condition(); !strings.HasPrefix(got, unenforced) {
		t.Errorf("the condition of the volume that was there is %q", got)
	}
	fresh := drivertest.Volume{ID: "pvc-2", Bytes: 48 * mib}
	_, err := s.Create(t.Context(), fresh)
	s.Must(err)
	show := only(s.block("runbooks/HostPathVolumesAbnormal.md", "How to check"), "btrfs")
	if printed := s.run(show, ""); strings.Count(printed, "48.00MiB") != 1 || strings.Contains(printed, "64.00MiB") {
		t.Errorf("%q shows other limits than that of the new volume:\n%s", show, printed)
	}
}
