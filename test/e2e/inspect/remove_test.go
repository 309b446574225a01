package inspect

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// An administrator removes an inline volume that its pod left behind, by the command that
// inspect names, and can remove no other by it.
func TestRemoveInline(t *testing.T) {
	testenv.NeedPrograms(t, "unshare")
	program := upTwoHours(t, drivertest.Built(t))
	h := &harness{program: program, pool: filepath.Join(t.TempDir(), "pool")}
	h.pools = []drivertest.PoolConfig{{Name: "local", Path: h.pool}}
	h.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: h.pools})
	inline := func(id string) drivertest.Volume {
		return drivertest.Volume{ID: id, Pool: "local", Bytes: mib, Inline: true}
	}
	h.MustCreate(directory("pvc-1", mib))
	h.Must(h.Publish(t.Context(), inline("csi-1"), "gone"))
	h.Must(h.Publish(t.Context(), inline("csi-2"), "alive"))
	for _, id := range []string{"csi-1", "csi-2"} {
		h.age(id)
	}
	h.Must(syscall.Unmount(h.Target("gone"), 0)) // as a reboot does, and kubelet never comes back

	if v := volume(t, h.report(2), "csi-1"); v.Reason != string(health.InlineUnpublished) || !strings.Contains(v.Condition, "`/hostpath-csi-driver remove-inline --volume=csi-1`") {
		t.Errorf("the volume is %+v, want the reason %s and the command that removes it", v, health.InlineUnpublished)
	}
	for id, says := range map[string]string{"pvc-1": "no inline volume", "csi-2": "not left behind", "csi-3": "no pool has", "": "--volume"} {
		if output, err := h.removeInline(id); err == nil || !strings.Contains(output, says) {
			t.Errorf("remove %q: %v, %s; want an error with %q", id, err, output, says)
		}
	}
	if output, err := h.removeInline("csi-1"); err != nil || output != "removed csi-1\n" {
		t.Errorf("remove csi-1: %v, %s", err, output)
	}
	report := h.report(0)
	if ids := report.Pools[0].Volumes; len(ids) != 2 || ids[0].ID != "csi-2" || ids[1].ID != "pvc-1" {
		t.Errorf("the volumes are %+v, want csi-2 and pvc-1", ids)
	}
	h.Must(h.Unpublish(t.Context(), "csi-2", "alive"))
}

// The upstream driver deletes volumes and knows no records. Only an administrator can say
// that a directory will not come back.
func TestRemoveLost(t *testing.T) {
	program := drivertest.Built(t)
	h := &harness{program: program, pool: filepath.Join(t.TempDir(), "pool")}
	h.pools = []drivertest.PoolConfig{{Name: "local", Path: h.pool}}
	h.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: h.pools})
	h.MustCreate(directory("pvc-1", mib))
	h.MustCreate(directory("pvc-2", 3*mib))
	must.Succeed(t, os.Remove(filepath.Join(h.pool, "pvc-1")))

	if v := volume(t, h.report(2), "pvc-1"); v.Reason != string(health.DirectoryMissing) || !strings.Contains(v.Condition, "`/hostpath-csi-driver remove-lost --volume=pvc-1`") {
		t.Errorf("the volume is %+v, want the reason %s and the command that removes its record", v, health.DirectoryMissing)
	}
	for id, says := range map[string]string{"pvc-2": "has its directory", "pvc-3": "no pool has", "": "--volume"} {
		if output, err := h.remove("remove-lost", id); err == nil || !strings.Contains(output, says) {
			t.Errorf("remove %q: %v, %s; want an error with %q", id, err, output, says)
		}
	}
	// In a copy of the pool, such as a backup, it is lost; in the pool that the driver serves it is not.
	backup := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(h.pool, ".hostpath-provisioner"), backup).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
	other := fmt.Sprintf(`--datadir=[{"name":"local","path":%q}]`, backup)
	if output, err := h.remove("remove-lost", "pvc-1"); err == nil || !strings.Contains(output, "--data-is-gone") {
		t.Errorf("remove pvc-1 without a word: %v, %s; want the word", err, output)
	}
	const word = "--data-is-gone"
	if output, err := h.remove("remove-lost", "pvc-2", other, word); err == nil || !strings.Contains(output, `its condition is "in order`) {
		t.Errorf("remove pvc-2, which is lost in a backup: %v, %s; want it refused", err, output)
	}
	if output, err := h.remove("remove-lost", "pvc-1", word); err != nil || output != "removed pvc-1\n" {
		t.Errorf("remove pvc-1: %v, %s", err, output)
	}
	pool := h.report(0).Pools[0]
	if len(pool.Volumes) != 1 || *pool.PromisedBytes != 3*mib {
		t.Errorf("the pool has %+v and promises %d bytes, want only pvc-2", pool.Volumes, *pool.PromisedBytes)
	}
}

// Another driver removed a block volume, and knew of no device: the device keeps the pool's
// filesystem busy. That of the pool here is a btrfs, whose volumes are subvolumes.
func TestDeviceOnDeletedFile(t *testing.T) {
	program := drivertest.Built(t)
	h := newHarness(t, program)
	disk := device("disk-1", 32*mib)
	h.MustCreate(disk)
	h.Must(h.Publish(t.Context(), disk, "a"))
	h.Must(h.Process.Stop())
	// A driver of another test on a btrfs would detach it: whose subvolume it was cannot be known.
	var at unix.Stat_t
	h.Must(unix.Stat(h.Target("a"), &at))
	held := must.Value(os.Open(fmt.Sprintf("/dev/loop%d", unix.Minor(at.Rdev))))(h)
	defer held.Close()
	h.Must(syscall.Unmount(h.Target("a"), 0))
	h.Must(os.RemoveAll(filepath.Join(h.pool, "disk-1")))
	h.Must(os.Remove(filepath.Join(h.pool, ".hostpath-provisioner", "volumes", "disk-1.json")))

	report := h.report(2)
	if found := report.Pools[0].OnDeleted; len(found) != 1 || !strings.HasSuffix(found[0].File, "/disk-1/disk.img") ||
		!strings.Contains(found[0].Condition, "losetup --detach /dev/"+found[0].Name) {
		t.Errorf("devices on deleted files are %+v, want that of disk-1 and the command that detaches it", found)
	}
	h.Must(held.Close())
	h.Must(h.Process.Restart(t.Context()))
	h.AwaitServing()
	if found := h.report(0).Pools[0].OnDeleted; len(found) > 0 {
		t.Errorf("the driver has left %+v", found)
	}
}

// age has a volume be from a day before the node was booted.
func (h *harness) age(id string) {
	h.Helper()
	path := filepath.Join(h.pool, ".hostpath-provisioner", "volumes", id+".json")
	record := must.Value(os.ReadFile(path))(h)
	at := bytes.Index(record, []byte(`"created":"`)) + len(`"created":"`)
	h.Must(os.WriteFile(path, append(record[:at:at], append([]byte("2020"), record[at+4:]...)...), 0o600))
}

// removeInline runs the command while the driver runs.
func (h *harness) removeInline(id string) (output string, err error) {
	h.Helper()
	return h.remove("remove-inline", id)
}

// remove runs one of the commands that remove a volume, beside the driver.
func (h *harness) remove(command, id string, more ...string) (output string, err error) {
	h.Helper()
	args := append([]string{command, "--endpoint=" + h.Process.Endpoint(), "--volume=" + id}, more...)
	cmd := exec.CommandContext(h.Context(), h.program, args...)
	cmd.Env = h.environment()
	all, err := cmd.CombinedOutput()
	return string(all), err
}

// upTwoHours makes a program that runs another, which finds the node up for two hours more than it is.
func upTwoHours(t *testing.T, program string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "up-two-hours")
	script := fmt.Sprintf("#!/bin/sh\nexec unshare --time --boottime=7200 '%s' \"$@\"\n", program)
	must.Succeed(t, os.WriteFile(path, []byte(script), 0o700))
	return path
}
