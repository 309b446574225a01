package mounter

import (
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	diskenv "kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

func contains(s, part string) bool { return strings.Contains(s, part) }

// A device with anything on it that is no pool is refused with its name, and stays as it is.
func TestUsedDeviceIsNotFormatted(t *testing.T) {
	for name, test := range map[string]struct {
		fill func(t *testing.T, d *disk)
		want string
	}{
		"a physical volume of LVM": {func(_ *testing.T, d *disk) {
			d.write(512, "LABELONE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00LVM2 001")
		}, "its first 4096 bytes have data"},
		"swap": {func(t *testing.T, d *disk) { tool(t, "mkswap", d.Path) }, "swap"},
		"a partition table": {func(_ *testing.T, d *disk) {
			// One partition of type 83 from sector 2048 on, in a master boot record.
			d.write(446, "\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00")
			d.write(510, "\x55\xaa")
		}, "a partition table (dos)"},
		"encrypted": {func(_ *testing.T, d *disk) {
			d.write(0, "LUKS\xba\xbe\x00\x01aes\x00")
		}, "crypto_LUKS"},
		"a raid at the end": {func(_ *testing.T, d *disk) {
			// The magic of md, version 0.90, in the last 64 KiB but one.
			d.write((16*mib)&^(65535)-65536, "\xfc\x4e\x2b\xa9\x00\x00\x00\x00\x5a\x00\x00\x00")
		}, "linux_raid_member"},
		"data without a name":          {func(_ *testing.T, d *disk) { d.write(100, "a database of its own") }, "data of an unknown kind"},
		"data that begins later":       {func(_ *testing.T, d *disk) { d.write(5*mib, "a store of its own") }, "does not read as zeroes"},
		"data in the last block":       {func(_ *testing.T, d *disk) { d.write(16*mib-512, "a label") }, "does not read as zeroes"},
		"a filesystem that is no pool": {func(t *testing.T, d *disk) { tool(t, "mkfs.ext2", "-q", d.Path) }, "ext2"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 16*mib)
			test.fill(t, d)
			before := d.sum()
			status, said := h.try("mount", "--device", d.Path, "--fs-type", "ext4", "--patience", "0")
			if status != 1 || !contains(said, "device is not blank") || !contains(said, test.want) {
				t.Errorf("status %d, %s; want 1 and %q", status, said, test.want)
			}
			if d.sum() != before {
				t.Error("the device was written to")
			}
			h.wantUnmounted()
		})
	}
}

// try is run for a command that is to fail: a mounter that does not goes on until it is stopped.
func (h *host) try(args ...string) (status int, said string) {
	h.t.Helper()
	p := h.start("", args...)
	if p.saysOrEnds(keeping) {
		p.stop(unix.SIGTERM)
	}
	p.wait()
	return p.cmd.ProcessState.ExitCode(), p.output.String()
}

func (d *disk) sum() (sum [sha256.Size]byte) {
	d.t.Helper()
	f, err := os.Open(d.Path)
	must.Succeed(d.t, err)
	defer f.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, f)
	must.Succeed(d.t, err)
	hash.Sum(sum[:0])
	return sum
}

// That blkid finds nothing on a device which cannot be read does not make it blank.
func TestUnreadableDeviceIsNotFormatted(t *testing.T) {
	h := newHost(t)
	file := filepath.Join(t.TempDir(), "blank")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	must.Succeed(t, os.Truncate(file, 16*mib))
	dir := t.TempDir()
	bad := diskenv.New(t, file, dir)
	d := attach(t, bad.Path)
	bad.Fail(diskenv.Read)
	status, said := h.run("", "mount", "--device", d.Path, "--fs-type", "ext4", "--patience", "0")
	if status != 1 || !contains(said, "input/output error") {
		t.Errorf("status %d, %s", status, said)
	}
	bad.Heal()
	if strings.Contains(said, "Formatting") {
		t.Errorf("it was formatted: %s", said)
	}
	h.wantUnmounted()
	p := h.start("", "mount", "--device", d.Path, "--fs-type", "ext4")
	p.says(mounted, 1)
	p.stop(unix.SIGTERM)
	h.unmount()
}

// What blkid says when it fails, or cannot be run, is never that the device is blank.
func TestBlkidFailureIsNotBlankDevice(t *testing.T) {
	for name, script := range map[string]string{
		"status 1":               "exit 1",
		"status 2 with a reason": "echo error: cannot open >&2; exit 2",
		"ambivalent":             "exit 8",
		"killed":                 "kill -9 $$",
		"nonsense":               "echo nonsense",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 16*mib)
			before := d.sum()
			status, said := h.run(with(t, "blkid", script), "mount", "--device", d.Path, "--fs-type", "ext4", "--patience", "0")
			if status != 1 || !contains(said, "blkid") {
				t.Errorf("status %d, %s", status, said)
			}
			if d.sum() != before {
				t.Error("the device was written to")
			}
		})
	}
}

// mount-utils asks blkid again, and takes status 2 for blank. A filesystem that was there a moment ago stays.
func TestChangedBlkidAnswerIsNotBlankDevice(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 16*mib)
	tool(t, "mkfs.ext4", "-q", d.Path)
	before := d.sum()
	once := filepath.Join(t.TempDir(), "asked")
	script := `[ -e ` + once + ` ] && exit 2; : > ` + once + `; exec /usr/sbin/blkid "$@"`
	status, said := h.run(with(t, "blkid", script), "mount", "--device", d.Path, "--fs-type", "ext4", "--patience", "0")
	if status != 1 || !contains(said, "not formatted") {
		t.Errorf("status %d, %s", status, said)
	}
	if d.sum() != before {
		t.Error("the device was written to")
	}
}

// with has the pod find another program of that name.
func with(t *testing.T, name, script string) (setup string) {
	t.Helper()
	bin := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	return "export PATH=" + bin + ":$PATH"
}

// Nothing is mounted over what is not the pool's.
func TestTargetInUseIsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		make func(t *testing.T, h *host)
		want string
	}{
		"a directory with data": {func(t *testing.T, h *host) {
			must.Succeed(t, os.MkdirAll(filepath.Join(h.Target, "pvc-1"), 0o755))
		}, `it has data ("pvc-1")`},
		"another mount": {func(t *testing.T, h *host) {
			must.Succeed(t, os.Mkdir(h.Target, 0o755))
			must.Succeed(t, unix.Mount("other", h.Target, "tmpfs", 0, ""))
		}, "other is mounted there"},
		"a file":         {func(t *testing.T, h *host) { must.Succeed(t, os.WriteFile(h.Target, nil, 0o600)) }, "not a directory"},
		"a link":         {func(t *testing.T, h *host) { must.Succeed(t, os.Symlink(t.TempDir(), h.Target)) }, "not a directory"},
		"a missing path": {func(t *testing.T, h *host) { must.Succeed(t, os.Remove(h.Path)) }, "no such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 16*mib)
			before := d.sum()
			test.make(t, h)
			mounts := len(h.mounts())
			for _, command := range []string{"mount", "probe"} {
				status, said := h.run("", command, "--device", d.Path, "--fs-type", "ext4", "--patience", "0")
				if status != 1 || command == "mount" && !contains(said, test.want) {
					t.Errorf("%s: status %d, %s; want 1 and %q", command, status, said, test.want)
				}
			}
			if len(h.mounts()) != mounts || d.sum() != before {
				t.Errorf("%d mounts at the target, want %d, and the device as before", len(h.mounts()), mounts)
			}
		})
	}
}

// An administrator has mounted a directory of the claim's filesystem at the path of the pool. That is not its root directory, which has the pool
// after the next boot.
func TestDirectoryOfTheDeviceIsNoPool(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	tool(t, "mkfs.xfs", "-q", d.Path)
	whole := t.TempDir()
	sub := filepath.Join(whole, "sub")
	must.Succeed(t, unix.Mount(d.Path, whole, "xfs", 0, ""), os.Mkdir(sub, 0o755), os.Mkdir(h.Target, 0o755), unix.Mount(sub, h.Target, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(whole, unix.MNT_DETACH)) })
	for command, want := range map[string]string{"mount": "is mounted there", "probe": "is mounted there", "unmount": "pool is in use"} {
		if status, said := h.try(command, "--device", d.Path, "--patience", "0"); status != 1 || !contains(said, want) {
			t.Errorf("%s: status %d, %s; want 1 and %q", command, status, said, want)
		}
		h.wantMounted("xfs")
	}
}

// A mount that only the container sees would be no pool.
func TestPrivatePropagationIsRefused(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 16*mib)
	before := d.sum()
	status, said := h.run("mount --make-private "+h.Root, "mount", "--device", d.Path, "--patience", "0")
	if status != 1 || !contains(said, "mountPropagation Bidirectional") {
		t.Errorf("status %d, %s", status, said)
	}
	if d.sum() != before {
		t.Error("the device was written to")
	}
}

// A volume that kubelet has not mounted is a directory of the container, and no claim.
func TestMissingVolumeIsRefused(t *testing.T) {
	h := newHost(t)
	status, said := h.run("", "mount", "--volume", t.TempDir(), "--patience", "0")
	if status != 1 || !contains(said, "is not mounted at") {
		t.Errorf("status %d, %s", status, said)
	}
	h.wantUnmounted()
}
