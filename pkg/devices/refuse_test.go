package devices_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/rawdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A device that somebody uses is neither offered nor cleaned, whether it has a volume that was released, or none, and
// also where data of others may be wiped.
func TestDeviceInUseIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		use  func(t *testing.T, w *world, d *testDisk)
		want devices.Reason
	}{
		"mounted": {func(t *testing.T, w *world, d *testDisk) {
			run(t, "mkfs.ext4", "-q", "-F", d.node)
			mount(t, d.node, t.TempDir())
		}, devices.Mounted},
		"mounted in another mount namespace": {func(t *testing.T, w *world, d *testDisk) {
			run(t, "mkfs.ext4", "-q", "-F", d.node)
			mountElsewhere(t, d.node)
		}, devices.Mounted},
		"swap": {func(t *testing.T, w *world, d *testDisk) {
			run(t, "mkswap", d.node)
			swapOn(t, d.node)
		}, devices.IsSwap},
		"held exclusively": {func(t *testing.T, w *world, d *testDisk) {
			held, err := rawdev.Open(d.node)
			must.Succeed(t, err)
			t.Cleanup(func() { must.Succeed(t, held.Close()) })
		}, devices.InUse},
		"file of a loop device": {func(t *testing.T, w *world, d *testDisk) {
			device, err := loopfs.Attach(d.node)
			must.Succeed(t, err)
			t.Cleanup(func() { device.Close() })
		}, devices.HasLoop},
		"read-only": {func(t *testing.T, w *world, d *testDisk) {
			run(t, "blockdev", "--setro", d.node)
			t.Cleanup(func() { run(t, "blockdev", "--setrw", d.node) })
		}, devices.ReadOnly},
	} {
		for _, hasVolume := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " and released", false: ""}[hasVolume], func(t *testing.T) {
				w := newWorld(t)
				w.config.ExistingData = devices.Erase
				d := w.disk("disk", 32*mib)
				if hasVolume {
					w.volumes = []devices.Volume{released(d.volume("pv"))}
				}
				c.use(t, w, d)
				d.untouched()
				w.refused(c.want)
			})
		}
	}
}

func mount(t *testing.T, node, dir string) {
	t.Helper()
	must.Succeed(t, unix.Mount(node, dir, "ext4", unix.MS_RDONLY, "")) // so that it does not write itself
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(dir, 0)) })
}

// mountElsewhere has a process mount the device where nobody else sees it.
func mountElsewhere(t *testing.T, node string) {
	t.Helper()
	dir := t.TempDir()
	// Not by the test's context, which ends before the cleanups: unmounting writes to the journal, and the disk is compared first.
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", `mount -r -t ext4 "$0" "$1" && echo mounted && read line`, node, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	t.Cleanup(func() {
		must.Succeed(t, input.Close())
		_ = cmd.Wait() // read has found the end
	})
	line := make([]byte, len("mounted\n"))
	if _, err := output.Read(line); err != nil || string(line) != "mounted\n" {
		t.Fatalf("mount in another namespace: %q, %v", line, err)
	}
	if content, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(content), dir) {
		t.Fatalf("this namespace sees that mount (%v)", err)
	}
}

func swapOn(t *testing.T, node string) {
	t.Helper()
	path, err := unix.BytePtrFromString(node)
	must.Succeed(t, err)
	call := func(number uintptr) error {
		if _, _, errno := unix.Syscall(number, uintptr(pointer(path)), 0, 0); errno != 0 {
			return errno
		}
		return nil
	}
	if err := call(unix.SYS_SWAPON); err != nil {
		testenv.Missing(t, "swap: "+err.Error())
	}
	t.Cleanup(func() { must.Succeed(t, call(unix.SYS_SWAPOFF)) })
}

func TestOtherFilesAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		make func(path string) error
		want devices.Reason
	}{
		"a regular file":     {func(path string) error { return os.WriteFile(path, make([]byte, mib), 0o600) }, devices.NotABlock},
		"a character device": {func(path string) error { return os.Symlink("/dev/null", path) }, devices.NotABlock},
		"a pipe":             {func(path string) error { return syscall.Mkfifo(path, 0o600) }, devices.NotABlock},
		"a dangling link":    {func(path string) error { return os.Symlink("/dev/none", path) }, devices.Gone},
		"a link to itself":   {func(path string) error { return os.Symlink(path, path) }, devices.Gone},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			must.Succeed(t, c.make(filepath.Join(w.dir, "disk")))
			w.refused(c.want)
		})
	}
}

func TestEmptyDeviceIsRefused(t *testing.T) {
	w := newWorld(t)
	w.disk("disk", 0)
	w.refused(devices.Empty)
}

// Each signature is made by the program that users have.
func TestDeviceWithSignatureIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		bytes int64
		make  func(t *testing.T, node string)
	}{
		"ext4":  {32 * mib, func(t *testing.T, node string) { run(t, "mkfs.ext4", "-q", "-F", node) }},
		"xfs":   {320 * mib, func(t *testing.T, node string) { run(t, "mkfs.xfs", "-q", "-f", node) }},
		"btrfs": {128 * mib, func(t *testing.T, node string) { run(t, "mkfs.btrfs", "-q", "-f", node) }},
		"swap":  {32 * mib, func(t *testing.T, node string) { run(t, "mkswap", node) }},
		"gpt":   {32 * mib, func(t *testing.T, node string) { partitionTable(t, node, "gpt") }},
		"dos":   {32 * mib, func(t *testing.T, node string) { partitionTable(t, node, "dos") }},
		"LVM2_member": {32 * mib, func(t *testing.T, node string) {
			run(t, "pvcreate", "--quiet", "--yes", "--force", "--devices", node, "--config", `devices{use_devicesfile=0} activation{udev_sync=0 udev_rules=0}`, node)
		}},
		"crypto_LUKS": {32 * mib, func(t *testing.T, node string) {
			key := filepath.Join(t.TempDir(), "key")
			must.Succeed(t, os.WriteFile(key, []byte("secret"), 0o600))
			run(t, "cryptsetup", "luksFormat", "--batch-mode", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-file", key, node)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", c.bytes)
			c.make(t, d.node)
			d.untouched()
			if p := w.refused(devices.HasSignature); !strings.Contains(p.Detail, name) {
				t.Errorf("the problem is %q, want it to name %s", p.Detail, name)
			}
			// Also after a restart, and again and again.
			w.agent.Close()
			w.start()
			w.refused(devices.HasSignature)
		})
		t.Run(name+" that may be wiped", func(t *testing.T) {
			w := newWorld(t)
			w.config.ExistingData = devices.Erase
			d := w.disk("disk", c.bytes)
			c.make(t, d.node)
			w.offered()
			wantNoSignature(t, d)
		})
	}
}

func partitionTable(t *testing.T, node, label string) {
	t.Helper()
	testenv.NeedPrograms(t, "sfdisk")
	cmd := exec.CommandContext(t.Context(), "sfdisk", "--quiet", "--no-reread", "--no-tell-kernel", "--wipe", "never", node)
	cmd.Stdin = strings.NewReader("label: " + label + "\n,\n")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("sfdisk: %v: %s", err, output)
	}
}

func wantNoSignature(t *testing.T, d *testDisk) {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "wipefs", "--no-act", d.node).CombinedOutput()
	if err != nil || len(output) > 0 {
		t.Errorf("signatures on %s: %s, %v; want none", d.node, output, err)
	}
}

func TestLinksToOneDeviceMakeOneVolume(t *testing.T) {
	w := newWorld(t)
	d := w.disk("disk-b", 32*mib)
	must.Succeed(t, os.Symlink(d.node, filepath.Join(w.dir, "disk-a")))
	must.Succeed(t, os.Mkdir(filepath.Join(w.dir, "below"), 0o755))
	must.Succeed(t, os.Symlink(d.path, filepath.Join(w.dir, "below", "disk-c")))
	if o := w.offered(); o.Name != "local-node-disk-c" {
		t.Errorf("offered as %s, want the first path", o.Name)
	}
	if r := w.pass(); len(r.Offers) > 0 || len(r.Problems) > 0 || r.Available != 1 {
		t.Errorf("then %+v, want one volume and nothing else", r)
	}
}

// The upstream program makes two volumes of two links: none of them may be cleaned while the other is used.
func TestDeviceOfTwoVolumesIsNotCleaned(t *testing.T) {
	w := newWorld(t)
	d := w.disk("disk-a", 32*mib)
	second := bound(d.volume("pv-b"))
	second.Path = filepath.Join(w.dir, "disk-b")
	must.Succeed(t, os.Symlink(d.node, second.Path))
	w.volumes = []devices.Volume{released(d.volume("pv-a")), second}
	d.untouched()
	r := w.pass()
	if len(r.Problems) != 2 || r.Problems[0].Reason != devices.Twice || len(r.Cleaned) > 0 || len(r.Wiping) > 0 {
		t.Errorf("found %+v, want two problems and nothing cleaned", r)
	}
}

func TestDiskAndItsPartitionsAreNotBothOffered(t *testing.T) {
	w := newWorld(t)
	d := w.disk("disk", 32*mib)
	node := addPartition(t, d.node)
	d.untouched()
	if p := w.refused(devices.HasPartitions); p.Path != d.path {
		t.Errorf("refused is %s", p.Path)
	}
	// Now the disk is a volume in use, and its user makes a partition of it.
	w.volumes = []devices.Volume{bound(d.volume("pv"))}
	must.Succeed(t, os.Symlink(node, d.path+"-part1"))
	if p := w.refused(devices.DiskInUse); p.Path != d.path+"-part1" {
		t.Errorf("refused is %s", p.Path)
	}
}

// What the last user of a disk has made of it does not keep it from being cleaned.
func TestReleasedDiskIsCleanedWithPartitions(t *testing.T) {
	w := newWorld(t)
	d := w.disk("disk", 32*mib)
	partitionTable(t, d.node, "gpt")
	addPartition(t, d.node)
	w.volumes = []devices.Volume{released(d.volume("pv"))}
	if r := w.pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	wantNoSignature(t, d)
	w.volumes = nil
	w.offered()
}

func TestMissingDeviceKeepsVolume(t *testing.T) {
	for name, change := range map[string]func(devices.Volume) devices.Volume{
		"available": func(v devices.Volume) devices.Volume { return v }, "bound": bound, "released": released,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", 32*mib)
			w.volumes = []devices.Volume{change(d.volume("pv"))}
			must.Succeed(t, os.Remove(d.path))
			if p := w.refused(devices.Gone); p.Volume != "pv" {
				t.Errorf("the problem is %+v, want one of the volume", p)
			}
		})
	}
}

// After a reboot a path may lead to another disk.
func TestReplacedDiskIsNotCleaned(t *testing.T) {
	for name, other := range map[string]int64{"of the same size": 32 * mib, "of another size": 64 * mib} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d := w.disk("disk", 32*mib)
			w.volumes = []devices.Volume{bound(d.volume("pv"))}
			if r := w.pass(); r.Available != 1 {
				t.Fatalf("found %+v", r)
			}
			must.Succeed(t, os.Remove(d.path))
			other := w.disk("disk2", other)
			must.Succeed(t, os.Rename(other.path, d.path))
			other.untouched()
			w.refused(devices.OtherDevice)
			w.volumes = []devices.Volume{released(w.volumes[0])}
			w.refused(devices.OtherDevice)
		})
	}
}
