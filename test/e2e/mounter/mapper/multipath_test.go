package mapper

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A disk with two paths is mounted by the multipath device, never by a path of its own, and serves and grows while one path is
// left. Without any path nothing is formatted.
func TestMultipath(t *testing.T) {
	mounter, at := program(t), target(t)
	run(t, "", "modprobe", "-a", "dm_multipath", "dm_round_robin")
	file := sparse(t, 400*mib)
	paths := []string{attach(t, file), attach(t, file)}
	table := func(bytes int64) string {
		return fmt.Sprintf("0 %d multipath 0 0 1 1 round-robin 0 2 1 %s 1 %s 1", bytes/sector, paths[0], paths[1])
	}
	device := mapped(t, table(400*mib))
	name := filepath.Base(device)
	message := func(verb, path string) {
		run(t, "", "dmsetup", "message", name, "0", verb+" "+number(t, path))
	}
	claim := claimOf(t, device)
	flags := []string{"--target", at, "--device", claim, "--fs-type", "ext4"}

	for _, path := range paths {
		wantRefused(t, "in use by dm-", mounter, "mount", "--target", at, "--device", path)
		message("fail_path", path)
	}
	wantRefused(t, "input/output error", mounter, append([]string{"mount"}, flags...)...)
	for _, path := range paths {
		message("reinstate_path", path)
	}
	wantBlank(t, file)

	until(t, "fills the device", mounter, append([]string{"mount"}, flags...)...)
	wantMount(t, at, device, "ext4", 400*mib)
	message("fail_path", paths[0])
	must.Succeed(t, os.WriteFile(filepath.Join(at, "file"), []byte("data"), 0o600))
	unix.Sync()
	run(t, "", mounter, append([]string{"probe"}, flags...)...)
	must.Succeed(t, os.Truncate(file, 600*mib))
	for _, path := range paths {
		must.Succeed(t, loopfs.Resized(path))
	}
	run(t, table(600*mib), "dmsetup", "reload", "--noudevsync", name)
	run(t, "", "dmsetup", "resume", "--noudevsync", name)
	message("fail_path", paths[1])
	until(t, "fills the device", mounter, append([]string{"mount"}, flags...)...)
	wantMount(t, at, device, "ext4", 600*mib)
	wantContent(t, filepath.Join(at, "file"), "data")
	run(t, "", mounter, append([]string{"unmount", "--patience", "10s"}, flags[:4]...)...)
}

// claimOf is a device as a container has it.
func claimOf(t *testing.T, device string) string {
	t.Helper()
	var info unix.Stat_t
	must.Succeed(t, unix.Stat(device, &info))
	claim := filepath.Join(t.TempDir(), "claim")
	must.Succeed(t, unix.Mknod(claim, unix.S_IFBLK|0o600, int(info.Rdev)))
	return claim
}

// number is that of a device, as device mapper writes it.
func number(t *testing.T, device string) string {
	t.Helper()
	var info unix.Stat_t
	must.Succeed(t, unix.Stat(device, &info))
	return fmt.Sprintf("%d:%d", unix.Major(info.Rdev), unix.Minor(info.Rdev))
}

func wantRefused(t *testing.T, why, name string, args ...string) {
	t.Helper()
	output, err := exec.Command(name, append(args, "--patience", "0")...).CombinedOutput()
	if err == nil || !strings.Contains(string(output), why) {
		t.Errorf("%s: %v, %s; want it refused with %q", strings.Join(args, " "), err, output, why)
	}
}

// wantBlank says that a sparse file was never written to.
func wantBlank(t *testing.T, file string) {
	t.Helper()
	var info unix.Stat_t
	must.Succeed(t, unix.Stat(file, &info))
	if info.Blocks != 0 {
		t.Errorf("%s has %d blocks, want none", file, info.Blocks)
	}
}

func wantContent(t *testing.T, file, want string) {
	t.Helper()
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s has %q, %v; want %q", file, got, err, want)
	}
}
