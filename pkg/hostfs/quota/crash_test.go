package quota_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A volume is created in one directory, renamed into another, and that is synced: no
// crash may leave it there without its limit, although Limit itself does not sync.
func TestCrash_renamedVolumeHasItsLimit(t *testing.T) {
	testenv.NeedRoot(t)
	options := map[string][]string{"btrfs": nil}
	for kind := range mountedByTheMachine() {
		options[kind] = []string{"prjquota"}
	}
	for kind, options := range options {
		t.Run(kind, func(t *testing.T) {
			before := image(t, kind)
			id := makeVolume(t, kind, before.mount(t, options...))
			// The disk now has the state after a crash.
			after := before.copy(t)
			before.unmount(t)

			root := open(t, after.mount(t, options...))
			facility, err := quota.Detect(root)
			must.Succeed(t, err)
			volume, err := root.Open("volume")
			must.Succeed(t, err)
			defer func() { must.Succeed(t, volume.Close()) }()
			if got, err := facility.IDOf(volume); got != id || err != nil {
				t.Errorf("the volume carries %d, %v; want %d", got, err, id)
			}
			usage, err := facility.Usage(volume, id)
			must.Succeed(t, err)
			if want := (quota.Limit{Bytes: 8 << 20}); usage.Limit != want {
				t.Errorf("limit %+v, want %+v", usage.Limit, want)
			}
		})
	}
}

func makeVolume(t *testing.T, kind, mounted string) quota.ID {
	t.Helper()
	root := open(t, mounted)
	defer func() { must.Succeed(t, root.Close()) }()
	if kind == "btrfs" {
		enableQuotas(t, root, enable)
	}
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	staging, err := root.Make("staging")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, staging.Close()) }()
	must.Succeed(t, root.Sync())

	volume, err := facility.Make(staging, "volume")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, volume.Close()) }()
	id, err := facility.NewID(root, quota.FirstID, func(quota.ID) bool { return false })
	must.Succeed(t, err)
	must.Succeed(t, facility.Limit(volume, id, quota.Limit{Bytes: 8 << 20}))
	id, err = facility.IDOf(volume)
	must.Succeed(t, err)
	must.Succeed(t, staging.Rename("volume", root, "volume"))
	must.Succeed(t, root.Sync())
	return id
}

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
	run(t, "mount", "-t", d.kind, "-o", strings.Join(append(options, "loop"), ","), d.file, d.at)
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

func (d *disk) copy(t *testing.T) disk {
	t.Helper()
	c := disk{kind: d.kind, file: filepath.Join(t.TempDir(), "copy")}
	from, err := os.Open(d.file)
	must.Succeed(t, err)
	defer from.Close()
	to, err := os.Create(c.file)
	must.Succeed(t, err)
	part := make([]byte, 1<<20)
	for at := int64(0); ; at += int64(len(part)) {
		n, err := from.ReadAt(part, at)
		if n > 0 && bytes.Count(part[:n], []byte{0}) < n { // sparse: most of it is zeros, and memory may be short
			_, err := to.WriteAt(part[:n], at)
			must.Succeed(t, err)
		}
		if errors.Is(err, io.EOF) {
			must.Succeed(t, errors.Join(to.Truncate(at+int64(n)), to.Close()))
			return c
		}
		must.Succeed(t, err)
	}
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if output, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, output)
	}
}
