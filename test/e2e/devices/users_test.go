package devices

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const nqn = "nqn.2014-08.org.nvmexpress:disk"

// export has the kernel serve a device as a namespace of NVMe on the loopback, until the test ends. Its configuration is mounted
// nowhere when this returns.
// https://docs.kernel.org/filesystems/configfs.html
func export(t *testing.T, device string) {
	t.Helper()
	devicestest.Run(t, "modprobe", "-a", "nvmet_tcp", "nvme_tcp")
	config := t.TempDir()
	mounted := func(do func()) {
		must.Succeed(t, unix.Mount("configfs", config, "configfs", 0, ""))
		defer func() { must.Succeed(t, unix.Unmount(config, 0)) }()
		do()
	}
	subsystem, port := filepath.Join(config, "nvmet/subsystems", nqn), filepath.Join(config, "nvmet/ports/1")
	namespace, link := filepath.Join(subsystem, "namespaces/1"), filepath.Join(port, "subsystems", nqn)
	t.Cleanup(func() {
		mounted(func() {
			for _, name := range []string{link, port, namespace, subsystem} {
				must.Succeed(t, os.Remove(name))
			}
		})
	})
	mounted(func() {
		for _, dir := range []string{subsystem, namespace, port} {
			must.Succeed(t, os.Mkdir(dir, 0o755))
		}
		write(t, filepath.Join(subsystem, "attr_allow_any_host"), "1")
		write(t, filepath.Join(namespace, "device_path"), device)
		write(t, filepath.Join(namespace, "enable"), "1")
		for attribute, value := range map[string]string{"trtype": "tcp", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": "4420"} {
			write(t, filepath.Join(port, "addr_"+attribute), value)
		}
		must.Succeed(t, os.Symlink(subsystem, link))
	})
}

// A disk that the kernel serves to other machines is not held by it, and no process has it open.
func TestDiskServedByKernelIsRefused(t *testing.T) {
	for _, hasVolume := range []bool{false, true} {
		t.Run(fmt.Sprintf("volume %t", hasVolume), func(t *testing.T) {
			h := newHarness(t)
			d := h.Disk("disk", 8*mib)
			if hasVolume {
				h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			}
			export(t, d.Path)
			d.Untouched()
			if p := h.Refused(devices.InUse); !strings.Contains(p.Detail, nqn) {
				t.Errorf("the problem is %q, want it to name %s", p.Detail, nqn)
			}
		})
	}
}

// open has a process have a file open for writing, until the test ends.
func open(t *testing.T, file string) {
	t.Helper()
	devicestest.With(t, `exec 3<>"$1"`, file)
}

// one waits for the only file of a pattern.
func one(t *testing.T, pattern string) string {
	t.Helper()
	return some(t, pattern, 1)[0]
}

func some(t *testing.T, pattern string, count int) []string {
	t.Helper()
	for late := time.Now().Add(time.Minute); time.Now().Before(late); {
		found, err := filepath.Glob(pattern)
		must.Succeed(t, err)
		if len(found) == count {
			return found
		}
	}
	t.Fatalf("%s did not come %d times", pattern, count)
	return nil
}

// Commands for a disk need no block device: SCSI and NVMe have character devices for them.
func TestDiskWithOpenCharacterDeviceIsRefused(t *testing.T) {
	t.Run("bsg", func(t *testing.T) {
		h := newHarness(t)
		d := scsiDisk(t, h)
		d.Fill()
		d.Untouched()
		open(t, filepath.Join("/dev/bsg", filepath.Base(one(t, "/sys/block/"+filepath.Base(d.Node)+"/device/bsg/*"))))
		h.Refused(devices.InUse)
	})
	for _, pattern := range []string{"/dev/ng*n1", "/dev/nvme[0-9]"} {
		t.Run(pattern, func(t *testing.T) {
			h := newHarness(t)
			backing := h.Disk("other", 8*mib)
			export(t, backing.Node)
			write(t, "/dev/nvme-fabrics", "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn="+nqn)
			t.Cleanup(func() { write(t, one(t, "/sys/class/nvme/nvme*/delete_controller"), "1") })
			d := h.Link("disk", one(t, "/dev/nvme*n1"))
			d.Untouched()
			open(t, one(t, pattern))
			h.Refused(devices.InUse)
		})
	}
}

// A multipath device is used by a process that uses a path of it, and so are all paths that it does not have.
func TestMultipathDeviceWithPathInUseIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		paths int
		want  devices.Reason
	}{"of it": {2, devices.InUse}, "beside it": {1, devices.Twice}} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			devicestest.Run(t, "modprobe", "-a", "sd_mod", "dm_multipath", "dm_round_robin")
			// Another test may have left its own disk, and the kernel may still be looking at one.
			const unload = `for n in $(seq 50); do test -d /sys/module/scsi_debug || exit 0; modprobe -r scsi_debug; done; exit 1`
			shell(t, unload)
			devicestest.Run(t, "modprobe", "scsi_debug", "dev_size_mb=8", "add_host=2", "vpd_use_hostno=0")
			t.Cleanup(func() { shell(t, unload) })
			var paths []string
			for _, path := range some(t, scsiHost+"/target*/*/block/sd*", 2) {
				paths = append(paths, one(t, "/dev/"+filepath.Base(path)))
			}
			id, err := os.ReadFile("/sys/block/" + filepath.Base(paths[0]) + "/device/wwid")
			must.Succeed(t, err)
			naa, ok := strings.CutPrefix(strings.TrimSpace(string(id)), "naa.")
			if !ok {
				t.Fatalf("the disk is known as %q, want a number of the NAA", id)
			}
			table := fmt.Sprintf("0 %d multipath 0 0 1 1 round-robin 0 %d 1 %s 1", 8*mib/sector, c.paths, strings.Join(paths[:c.paths], " 1 "))
			shell(t, `printf %s "$1" | dmsetup create --noudevsync --verifyudev --uuid "$2" paths`, table, "mpath-3"+naa)
			t.Cleanup(func() { devicestest.Run(t, "dmsetup", "remove", "--noudevsync", "--retry", "paths") })
			d := h.Link("disk", "/dev/mapper/paths")
			d.Fill()
			d.Untouched()
			open(t, paths[1])
			h.Refused(c.want)
		})
	}
}

// A partition that kpartx has made is known by its number, which another one has when the table was sorted.
func TestPartitionOfKpartxThatBeginsElsewhereIsKept(t *testing.T) {
	h := newHarness(t)
	whole := h.Blank("other", 64*mib)
	part := func(at int64) {
		t.Helper()
		table := fmt.Sprintf("0 %d linear %s %d", 8*mib/sector, whole.Node, at/sector)
		shell(t, `printf %s "$1" | dmsetup create --noudevsync --verifyudev --uuid part2-mpath-3600a part2`, table)
	}
	remove := func() { devicestest.Run(t, "dmsetup", "remove", "--noudevsync", "--retry", "part2") }
	part(8 * mib)
	t.Cleanup(func() { remove() })
	d := h.Link("disk", "/dev/mapper/part2")
	v := d.Volume("pv")
	v.Unidentified = v.Identity == ""
	h.PVs = []devices.Volume{devicestest.Bound(v)}
	if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 {
		t.Fatalf("found %+v, want the volume", r)
	}
	remove()
	part(16 * mib)
	d.Fill()
	sum := d.Sum()
	h.PVs = []devices.Volume{h.Released(v)}
	h.Refused(devices.NotIdentified)
	if d.Sum() != sum {
		t.Error("another partition was written to")
	}
}
