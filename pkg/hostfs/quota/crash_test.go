package quota_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A disk is a file that holds a filesystem.
type disk struct{ kind, file, at string }

// image creates a filesystem with the features for quotas, whatever the mount options.
func image(t *testing.T, kind string) disk {
	t.Helper()
	testenv.NeedPrograms(t, "mkfs."+kind, "mount")
	format := map[string]string{
		"btrfs": "mkfs.btrfs -q",
		"xfs":   "mkfs.xfs -q",
		"ext4":  "mkfs.ext4 -q -F -O quota,project -E quotatype=prjquota",
	}[kind]
	d := disk{kind: kind, file: filepath.Join(t.TempDir(), "disk")}
	must.Succeed(t, os.WriteFile(d.file, nil, 0o600))
	must.Succeed(t, os.Truncate(d.file, 300<<20))
	run(t, append(strings.Fields(format), d.file)...)
	return d
}

// mount mounts the disk until the test ends, or unmount.
func (d *disk) mount(t *testing.T, options ...string) string {
	t.Helper()
	d.at = t.TempDir()
	must.Succeed(t, loopfs.MountImage(t.Context(), d.file, d.at, d.kind, options...))
	t.Cleanup(func() { d.unmount(t) })
	return d.at
}

func (d *disk) unmount(t *testing.T) {
	t.Helper()
	if d.at != "" {
		must.Succeed(t, syscall.Unmount(d.at, 0))
		d.at = ""
	}
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if output, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, output)
	}
}
