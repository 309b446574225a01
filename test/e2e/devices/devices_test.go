// Package devices has pkg/devices decide on disks that the kernel of the host may lack, in the guest of test/cmd/kernel:
// those that device mapper, md and bcache are made of, those that fail, and those that can forget.
package devices

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib    = 1 << 20
	sector = 512
)

func newHarness(t *testing.T) *devicestest.Harness {
	t.Helper()
	if !testenv.Guest() {
		t.Skip("this is not the guest of test/cmd/kernel")
	}
	return devicestest.New(t)
}

// mapped makes a device of device mapper, until the test ends.
func mapped(t *testing.T, table string) (node string) {
	t.Helper()
	name := fmt.Sprintf("test-%d", os.Getpid())
	shell(t, `printf %s "$1" | dmsetup create --noudevsync --verifyudev --uuid "$2" "$3"`, table, fmt.Sprintf("LVM-%064d", os.Getpid()), name)
	t.Cleanup(func() { devicestest.Run(t, "dmsetup", "remove", "--noudevsync", "--retry", name) })
	return "/dev/mapper/" + name
}

// load replaces the table of a device.
func load(t *testing.T, node, table string) {
	t.Helper()
	shell(t, `printf %s "$1" | dmsetup reload --noudevsync "$2" && dmsetup resume --noudevsync "$2"`, table, filepath.Base(node))
}

func shell(t *testing.T, script string, args ...string) {
	t.Helper()
	devicestest.Run(t, append([]string{"sh", "-c", script, "sh"}, args...)...)
}

// linear is a table, or a part of one, that maps to the same place of another device.
func linear(node string, from, to int64) string {
	return fmt.Sprintf("%d %d linear %s %d", from/sector, (to-from)/sector, node, from/sector)
}

func write(t *testing.T, file, content string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(file, []byte(content), 0))
}

// holders make another device of a disk, and answer its name.
var holders = map[string]func(t *testing.T, d *devicestest.Disk) string{
	"device mapper": func(t *testing.T, d *devicestest.Disk) string {
		mapped(t, linear(d.Node, 0, d.Bytes()))
		return "dm-"
	},
	"md": func(t *testing.T, d *devicestest.Disk) string {
		array(t, d, "1.2")
		// So that it does not write itself.
		devicestest.Run(t, "mdadm", "--readonly", md)
		return filepath.Base(md)
	},
	"bcache": func(t *testing.T, d *devicestest.Disk) string {
		devicestest.Run(t, "modprobe", "bcache")
		devicestest.Run(t, "make-bcache", "-B", "--wipe-bcache", d.Node)
		write(t, "/sys/fs/bcache/register", d.Node)
		t.Cleanup(func() { write(t, filepath.Join("/sys/block", filepath.Base(d.Node), "bcache/stop"), "1") })
		return "bcache0"
	},
}

const md = "/dev/md7"

// array makes half a mirror of a disk, until the test ends.
func array(t *testing.T, d *devicestest.Disk, metadata string) {
	t.Helper()
	devicestest.Run(t, "modprobe", "raid1")
	t.Setenv("MDADM_NO_UDEV", "1")
	devicestest.Run(t, "mdadm", "--create", md, "--run", "--quiet", "--level=1", "--raid-devices=2", "--metadata="+metadata, d.Node, "missing")
	t.Cleanup(func() { stop(t) })
}

func stop(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/sys/block/md7/md/array_state"); err == nil {
		devicestest.Run(t, "mdadm", "--stop", "--quiet", md)
	}
}

// A disk that another device is made of is neither offered nor cleaned.
func TestDiskOfOtherDeviceIsRefused(t *testing.T) {
	for name, hold := range holders {
		for _, hasVolume := range []bool{true, false} {
			if testing.Short() && !hasVolume {
				continue
			}
			t.Run(fmt.Sprintf("%s, volume %t", name, hasVolume), func(t *testing.T) {
				h := newHarness(t)
				d := h.Disk("disk", 8*mib)
				holder := hold(t, d)
				if hasVolume {
					h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
				}
				d.Untouched()
				if p := h.Refused(devices.HasHolders); !strings.Contains(p.Detail, holder) {
					t.Errorf("the problem is %q, want it to name %s", p.Detail, holder)
				}
			})
		}
	}
}

// A member of an array that is not assembled carries the signature of md, at its head or its tail.
func TestMemberOfArrayIsKept(t *testing.T) {
	versions := []string{"0.90", "1.0", "1.1", "1.2"}
	if testing.Short() {
		versions = versions[:1]
	}
	for _, metadata := range versions {
		for _, released := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, released %t", metadata, released), func(t *testing.T) {
				h := newHarness(t)
				d := h.Disk("disk", 8*mib)
				array(t, d, metadata)
				stop(t)
				if released {
					h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
					if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
						t.Errorf("found %+v, want it cleaned", r)
					}
					d.WantNoSignature()
					return
				}
				d.Untouched()
				if p := h.Refused(devices.HasSignature); !strings.Contains(p.Detail, "linux_raid_member") {
					t.Errorf("the problem is %q, want it to name the array", p.Detail)
				}
			})
		}
	}
}

// A volume stays until all of its disk could be overwritten.
func TestDiskWithBadSectorsKeepsVolume(t *testing.T) {
	for name, bad := range map[string]int64{"at the head": 0, "in the middle": 4 * mib, "at the tail": 7 * mib} {
		if testing.Short() && bad != 4*mib {
			continue
		}
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.Config.Wipe = devices.WipeZero
			disk := h.Disk("below", 8*mib)
			good := linear(disk.Node, 0, 8*mib)
			node := mapped(t, good)
			d := h.Link("disk", node)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			failing := []string{fmt.Sprintf("%d %d error", bad/sector, mib/sector)}
			if bad > 0 {
				failing = append([]string{linear(disk.Node, 0, bad)}, failing...)
			}
			if bad+mib < 8*mib {
				failing = append(failing, linear(disk.Node, bad+mib, 8*mib))
			}
			load(t, node, strings.Join(failing, "\n"))
			h.Refused(devices.Failed)
			load(t, node, good)
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want it cleaned once its sectors can be written", r)
			}
			d.WantZero(0, 8*mib)
		})
	}
}

// What cannot be read may be a signature: util-linux takes such a device for an empty one.
func TestUnreadableDiskIsNotBlank(t *testing.T) {
	for name, bad := range map[string]int64{"head": 0, "tail": 7 * mib} {
		if testing.Short() && bad > 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			disk := h.Disk("below", 8*mib)
			table := fmt.Sprintf("0 %d error\n%s", mib/sector, linear(disk.Node, mib, 8*mib))
			if bad > 0 {
				table = fmt.Sprintf("%s\n%d %d error", linear(disk.Node, 0, bad), bad/sector, mib/sector)
			}
			h.Link("disk", mapped(t, table))
			disk.Untouched()
			h.Refused(devices.Failed)
		})
	}
}

// scsiDisk makes a disk of 8 MiB in the memory of the guest that can forget, and promises zeroes. The next test has the
// same.
func scsiDisk(t *testing.T, h *devicestest.Harness) *devicestest.Disk {
	t.Helper()
	devicestest.Run(t, "modprobe", "sd_mod")
	devicestest.Run(t, "modprobe", "scsi_debug", "dev_size_mb=8", "lbpu=1", "lbpws=1", "lbprz=1")
	return h.Link("disk", awaitSCSI(t))
}

// scsiHost is the directory of the adapter that the disk is on.
const scsiHost = "/sys/bus/pseudo/drivers/scsi_debug/adapter*/host*"

// awaitSCSI waits for the node of the disk.
func awaitSCSI(t *testing.T) (node string) {
	t.Helper()
	for late := time.Now().Add(time.Minute); time.Now().Before(late); {
		found, err := filepath.Glob(scsiHost + "/target*/*/block/sd*")
		must.Succeed(t, err)
		if len(found) == 1 {
			node := filepath.Join("/dev", filepath.Base(found[0]))
			if _, err := os.Stat(node); err == nil {
				return node
			}
		}
	}
	t.Fatal("the disk did not come")
	return ""
}

// A disk that is pulled out while it is cleaned is not clean, before its first byte is overwritten nor after its last one.
// Once it is back, under whatever name, it is cleaned.
func TestDiskIsPulledOutWhileItIsCleaned(t *testing.T) {
	for name, during := range map[string]func(h *devicestest.Harness, pull func()){
		"before": func(h *devicestest.Harness, pull func()) {
			h.API = func() ([]devices.Volume, error) {
				h.API = nil
				pull()
				return h.PVs, nil
			}
		},
		"after": func(h *devicestest.Harness, pull func()) {
			h.Step = func() {
				h.Step = nil
				pull()
			}
		},
	} {
		if testing.Short() && name == "before" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.Config.Wipe = devices.WipeZero
			d := scsiDisk(t, h)
			d.Fill()
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			during(h, func() {
				if err := os.WriteFile(filepath.Join("/sys/block", filepath.Base(d.Node), "device/delete"), []byte("1"), 0); err != nil {
					t.Error(err)
				}
			})
			if p := h.Refused(devices.Gone); p.Volume != "pv" {
				t.Errorf("the problem is %+v, want one of the volume", p)
			}
			h.Restart()
			if r, err := h.Records.Get(d.Path); err != nil || r.State == devices.Clean {
				t.Errorf("the record is %+v, %v; want it not to be clean", r, err)
			}
			hosts, err := filepath.Glob(scsiHost + "/scsi_host/host*/scan")
			must.Succeed(t, err)
			if len(hosts) != 1 {
				t.Fatalf("the adapters are %q, want one", hosts)
			}
			write(t, hosts[0], "- - -")
			must.Succeed(t, os.Remove(d.Path))
			d = h.Link("disk", awaitSCSI(t))
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want it cleaned once it is back", r)
			}
			d.WantZero(0, d.Bytes())
		})
	}
}

// A disk that can forget, and promises zeroes for that, gives the space back.
func TestDiscard(t *testing.T) {
	h := newHarness(t)
	h.Config.Wipe = devices.WipeDiscard
	d := scsiDisk(t, h)
	d.Fill()
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Errorf("found %+v, want it cleaned", r)
	}
	d.WantZero(0, d.Bytes())
	// Which blocks the disk has, https://sg.danny.cz/sg/scsi_debug.html
	left, err := os.ReadFile("/sys/bus/pseudo/drivers/scsi_debug/map")
	must.Succeed(t, err)
	if text := strings.TrimSpace(string(left)); text != "" {
		t.Errorf("the disk still has the blocks %s", text)
	}
}
