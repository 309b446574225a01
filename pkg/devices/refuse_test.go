package devices_test

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A device in use is neither offered nor cleaned, whether it has a volume that was released, or none.
func TestDeviceInUseIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		use  func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk)
		want devices.Reason
	}{
		"mounted": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
			mount(t, d.Node, t.TempDir())
		}, devices.Mounted},
		"mounted in another mount namespace": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
			mountElsewhere(t, d.Node)
		}, devices.Mounted},
		"swap": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			devicestest.Run(t, "mkswap", d.Node)
			swapOn(t, d.Node)
		}, devices.IsSwap},
		"held exclusively": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			held, err := blockdev.Hold(d.Node)
			must.Succeed(t, err)
			t.Cleanup(func() { must.Succeed(t, held.Close()) })
		}, devices.InUse},
		"file of a loop device": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			device, err := loopfs.Attach(d.Node)
			must.Succeed(t, err)
			t.Cleanup(func() { device.Close() })
		}, devices.HasLoop},
		// As kubelet maps a block volume, whether its pod is known to the API or not.
		"mapped for a pod": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			mapped := filepath.Join(t.TempDir(), "pod-uid")
			must.Succeed(t, os.WriteFile(mapped, nil, 0o600))
			must.Succeed(t, unix.Mount(d.Node, mapped, "", unix.MS_BIND, ""))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(mapped, 0)) })
		}, devices.Mounted},
		"read-only": {func(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) {
			devicestest.Run(t, "blockdev", "--setro", d.Node)
			t.Cleanup(func() { devicestest.Run(t, "blockdev", "--setrw", d.Node) })
		}, devices.ReadOnly},
	} {
		for _, hasVolume := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " and released", false: ""}[hasVolume], func(t *testing.T) {
				h := devicestest.New(t)
				d := h.Disk("disk", 32*mib)
				if hasVolume {
					h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
				}
				c.use(t, h, d)
				d.Untouched()
				h.Refused(c.want)
			})
		}
	}
}

func mount(t *testing.T, node, dir string) {
	t.Helper()
	must.Succeed(t, unix.Mount(node, dir, "ext4", unix.MS_RDONLY, "")) // so that it does not write itself
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(dir, 0)) })
}

// mountElsewhere has a process mount the device where no other sees it.
func mountElsewhere(t *testing.T, node string) {
	t.Helper()
	dir := t.TempDir()
	devicestest.With(t, `mount -r -t ext4 "$1" "$2"`, node, dir)
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

func TestOtherFilesAreNoDevices(t *testing.T) {
	for name, c := range map[string]struct {
		make func(path string) error
		want devices.Reason
	}{
		"a regular file":     {func(path string) error { return os.WriteFile(path, make([]byte, mib), 0o600) }, ""},
		"a character device": {func(path string) error { return os.Symlink("/dev/null", path) }, ""},
		"a pipe":             {func(path string) error { return syscall.Mkfifo(path, 0o600) }, ""},
		"a dangling link":    {func(path string) error { return os.Symlink("/dev/none", path) }, devices.Gone},
		"a link to itself":   {func(path string) error { return os.Symlink(path, path) }, devices.Gone},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			must.Succeed(t, c.make(filepath.Join(h.Dir, "disk")))
			if c.want == "" {
				if r := h.Pass(); len(r.Problems)+len(r.Offers) > 0 {
					t.Errorf("found %+v, want nothing: as /dev/mapper/control it can never be offered", r)
				}
				return
			}
			h.Refused(c.want)
		})
	}
}

func TestEmptyDeviceIsRefused(t *testing.T) {
	h := devicestest.New(t)
	h.Disk("disk", 0)
	h.Refused(devices.Empty)
}

// Each signature is made by the program that users have, where Debian has one that runs without a kernel module or a
// cluster. test/e2e/devices has those of md.
func TestDeviceWithSignatureIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		bytes int64
		make  func(t *testing.T, node string)
	}{
		"ext4":  {32 * mib, func(t *testing.T, node string) { devicestest.Run(t, "mkfs.ext4", "-q", "-F", node) }},
		"xfs":   {320 * mib, func(t *testing.T, node string) { devicestest.Run(t, "mkfs.xfs", "-q", "-f", node) }},
		"btrfs": {128 * mib, func(t *testing.T, node string) { devicestest.Run(t, "mkfs.btrfs", "-q", "-f", node) }},
		"swap":  {32 * mib, func(t *testing.T, node string) { devicestest.Run(t, "mkswap", node) }},
		"gpt":   {32 * mib, func(t *testing.T, node string) { partitionTable(t, node, "gpt") }},
		"dos":   {32 * mib, func(t *testing.T, node string) { partitionTable(t, node, "dos") }},
		"LVM2_member": {32 * mib, func(t *testing.T, node string) {
			devicestest.Run(t, "pvcreate", "--quiet", "--yes", "--force", "--devices", node, "--config", `devices{use_devicesfile=0} activation{udev_sync=0 udev_rules=0}`, node)
		}},
		"crypto_LUKS": {32 * mib, func(t *testing.T, node string) {
			key := filepath.Join(t.TempDir(), "key")
			must.Succeed(t, os.WriteFile(key, []byte("secret"), 0o600))
			devicestest.Run(t, "cryptsetup", "luksFormat", "--batch-mode", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-file", key, node)
		}},
		"zfs_member":     {64 * mib, zfsLabels},
		"ceph_bluestore": {32 * mib, bluestoreLabel},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", c.bytes)
			c.make(t, d.Node)
			d.Untouched()
			if p := h.Refused(devices.HasSignature); !strings.Contains(p.Detail, name) {
				t.Errorf("the problem is %q, want it to name %s", p.Detail, name)
			}
			// Also after a restart, and again and again.
			h.Restart()
			h.Refused(devices.HasSignature)
		})
		t.Run(name+" that a claim has left", func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", c.bytes)
			c.make(t, d.Node)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Errorf("found %+v, want it cleaned", r)
			}
			d.WantNoSignature()
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

// zfsLabels writes what libblkid knows a disk of ZFS by: uberblocks, in the second half of each of four labels of 256 KiB,
// two at the head and two at the tail (OpenZFS, include/sys/vdev_impl.h, struct vdev_label; uberblock_impl.h,
// UBERBLOCK_MAGIC).
func zfsLabels(t *testing.T, node string) {
	t.Helper()
	const label, uberblock, magic = 256 << 10, 1 << 10, 0x00bab10c
	device, err := os.OpenFile(node, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer device.Close()
	size, err := device.Seek(0, io.SeekEnd)
	must.Succeed(t, err)
	block := make([]byte, uberblock)
	binary.LittleEndian.PutUint64(block, magic)
	binary.LittleEndian.PutUint64(block[8:], 5000) // the version of all pools with feature flags
	for _, start := range []int64{0, label, size - 2*label, size - label} {
		for at := start + label/2; at < start+label; at += uberblock {
			_, err := device.WriteAt(block, at)
			must.Succeed(t, err)
		}
	}
	must.Succeed(t, device.Sync())
}

// bluestoreLabel writes the first line of the label of Ceph's BlueStore (src/os/bluestore/BlueStore.cc, _write_bdev_label).
func bluestoreLabel(t *testing.T, node string) {
	t.Helper()
	device, err := os.OpenFile(node, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer device.Close()
	_, err = device.WriteString("bluestore block device\n7e5d6f1c-2f0a-4c39-9d77-5f6d4a1f9a10\n")
	must.Succeed(t, errors.Join(err, device.Sync()))
}

func TestLinksToOneDeviceMakeOneVolume(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk-b", 32*mib)
	must.Succeed(t, os.Symlink(d.Node, filepath.Join(h.Dir, "disk-a")))
	must.Succeed(t, os.Mkdir(filepath.Join(h.Dir, "below"), 0o755))
	must.Succeed(t, os.Symlink(d.Path, filepath.Join(h.Dir, "below", "disk-c")))
	if o := h.Offered(); o.Name != "local-node-disk-c" {
		t.Errorf("offered as %s, want the first path", o.Name)
	}
	if r := h.Pass(); len(r.Offers) > 0 || len(r.Problems) > 0 || r.Available != 1 {
		t.Errorf("then %+v, want one volume and nothing else", r)
	}
}

// The upstream program makes two volumes of two links: none of them may be cleaned while the other is used.
func TestDeviceOfTwoVolumesIsNotCleaned(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk-a", 32*mib)
	second := devicestest.Bound(d.Volume("pv-b"))
	second.Path = filepath.Join(h.Dir, "disk-b")
	must.Succeed(t, os.Symlink(d.Node, second.Path))
	h.PVs = []devices.Volume{h.Released(d.Volume("pv-a")), second}
	d.Untouched()
	r := h.Pass()
	if len(r.Problems) != 2 || r.Problems[0].Reason != devices.Twice || len(r.Cleaned) > 0 || len(r.Wiping) > 0 {
		t.Errorf("found %+v, want two problems and nothing cleaned", r)
	}
}

func TestDiskAndItsPartitionsAreNotBothOffered(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 32*mib)
	node := addPartition(t, d.Node)
	d.Untouched()
	if p := h.Refused(devices.HasPartitions); p.Path != d.Path {
		t.Errorf("refused is %s", p.Path)
	}
	// Now the disk is a volume in use, and its user makes a partition of it.
	h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
	must.Succeed(t, os.Symlink(node, d.Path+"-part1"))
	if p := h.Refused(devices.DiskInUse); p.Path != d.Path+"-part1" {
		t.Errorf("refused is %s", p.Path)
	}
}

// A disk and a partition of it may both be volumes of an earlier provisioner. Neither is cleaned under the other.
func TestDiskIsNotCleanedUnderVolumeOnPartition(t *testing.T) {
	for name, c := range map[string]struct {
		disk, partition func(devices.Volume) devices.Volume
	}{
		"disk released":      {devicestest.Released, devicestest.Bound},
		"partition released": {devicestest.Bound, devicestest.Released},
		"both released":      {devicestest.Released, devicestest.Released},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", 32*mib)
			partition := d.Volume("pv-part")
			partition.Path, partition.Bytes, partition.Identity = d.Path+"-part1", 8*mib, d.Identity()+"#1"
			must.Succeed(t, os.Symlink(addPartition(t, d.Node), partition.Path))
			h.PVs = []devices.Volume{c.disk(d.Volume("pv")), c.partition(partition)}
			d.Untouched()
			r := h.Pass()
			if len(r.Problems) == 0 || r.Problems[0].Reason != devices.Twice || len(r.Cleaned) > 0 || len(r.Wiping) > 0 {
				t.Errorf("found %+v, want a problem and nothing cleaned", r)
			}
		})
	}
}

// Nor is a disk that is to be cleaned, but has lost its own volume.
func TestDiskWithoutVolumeIsNotCleanedUnderVolumeOnPartition(t *testing.T) {
	h := newIdentified(t)
	d := h.Disk("disk", 32*mib)
	partition := d.Volume("pv-part")
	partition.Path, partition.Bytes, partition.Identity = d.Path+"-part1", 8*mib, d.Identity()+"#1"
	must.Succeed(t, os.Symlink(addPartition(t, d.Node), partition.Path))
	h.PVs = []devices.Volume{partition}
	must.Succeed(t, h.Records.Put(devices.Record{Path: d.Path, Bytes: d.Bytes(), Identity: "backing_file=" + d.Image, State: devices.Cleaning,
		Volume: "pv", ClaimUID: "uid-1"}))
	d.Untouched()
	if p := h.Refused(devices.HasPartitions); p.Path != d.Path || !strings.Contains(p.Detail, "pv-part") {
		t.Errorf("the problem is %+v, want one of the disk that names the volume", p)
	}
}

// What the last user of a disk has made of it does not keep it from being cleaned.
func TestReleasedDiskIsCleanedWithPartitions(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 32*mib)
	partitionTable(t, d.Node, "gpt")
	addPartition(t, d.Node)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Fatalf("found %+v, want it cleaned", r)
	}
	d.WantNoSignature()
	h.PVs = nil
	h.Offered()
}

// A loop device on another part of the disk is opened by no process exclusively.
func TestLoopDeviceOnPartOfDiskIsUser(t *testing.T) {
	for name, ofPartition := range map[string]bool{"on a partition of the released disk": true, "on the disk of the new partition": false} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			partition := deviceNode(t, addPartition(t, d.Node))
			d.Untouched()
			user := d.Node
			if ofPartition {
				user = partition
				h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			} else {
				must.Succeed(t, errors.Join(os.Remove(d.Path), os.Symlink(partition, d.Path)))
				must.Succeed(t, h.Records.Put(devices.Record{Path: d.Path, Bytes: 8 * mib, Identity: d.Identity() + "#1", State: devices.Clean}))
			}
			device, err := loopfs.Attach(user)
			must.Succeed(t, err)
			t.Cleanup(func() { device.Close() })
			h.Refused(devices.HasLoop)
		})
	}
}

// The kernel tells of a file with several paths to each loop device the one that it was attached by, as that in a container.
func TestLoopDeviceOnSameFileIsUser(t *testing.T) {
	for name, apart := range map[string]bool{"by another path": false, "on another part of it": true} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", 32*mib)
			other := d.Image + " by another name"
			must.Succeed(t, os.Link(d.Image, other))
			if apart {
				must.Succeed(t, os.Truncate(other, 64*mib))
				moveTo(t, h.Attach("other", other).Node, 32*mib)
			} else {
				h.Attach("other", other)
			}
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			if apart {
				if r := h.Pass(); len(r.Cleaned) != 1 {
					t.Errorf("found %+v, want it cleaned", r)
				}
				return
			}
			d.Untouched()
			h.Refused(devices.HasLoop)
		})
	}
}

// As kubelet maps a block volume that a provisioner has made of a partition.
func TestPartitionMappedForPodKeepsDisk(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 32*mib)
	partition := deviceNode(t, addPartition(t, d.Node))
	d.Untouched()
	mapped := filepath.Join(t.TempDir(), "pod-uid")
	must.Succeed(t, os.WriteFile(mapped, nil, 0o600))
	must.Succeed(t, unix.Mount(partition, mapped, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(mapped, 0)) })
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	h.Refused(devices.Mounted)
}

// Two paths to one disk that no multipath device joins are as two disks to the kernel: neither an exclusive open nor a mount of
// one is seen on the other.
func TestPathsToOneDiskAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		links   []string // of both paths
		volumes func(a, b devices.Volume) []devices.Volume
		want    int
	}{
		"both new":                    {[]string{"disk-a", "disk-b"}, nil, 2},
		"the other one is not chosen": {[]string{"disk-a", "other"}, nil, 1},
		"one is released": {[]string{"disk-a", "other"}, func(a, _ devices.Volume) []devices.Volume {
			return []devices.Volume{devicestest.Released(a)}
		}, 1},
		"both are in use": {[]string{"disk-a", "disk-b"}, func(a, b devices.Volume) []devices.Volume {
			return []devices.Volume{devicestest.Bound(a), devicestest.Bound(b)}
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			a := h.Disk(c.links[0], 8*mib)
			b := h.Attach(c.links[1], a.Image)
			a.Untouched()
			if c.volumes != nil {
				h.PVs = c.volumes(a.Volume("pv-a"), b.Volume("pv-b"))
			}
			r := h.Pass()
			if len(r.Problems) != c.want || len(r.Offers) > 0 || len(r.Cleaned) > 0 {
				t.Fatalf("found %+v, want %d problems", r, c.want)
			}
			devices.SortProblems(r.Problems)
			for n, p := range r.Problems {
				other := []string{b.Node, a.Node}[n]
				if p.Reason != devices.Twice || !strings.Contains(p.Detail, filepath.Base(other)) && !strings.Contains(p.Detail, []string{b.Path, a.Path}[n]) {
					t.Errorf("the problem is %v, want it to name %s", p, other)
				}
			}
		})
	}
}

// What is done by the other path need not look the same there: its partitions or its size may not have been read since they changed.
func TestOtherPathThatLooksDifferentIsKnown(t *testing.T) {
	data := "label: gpt\nstart=8MiB, size=8MiB, type=" + dataType + "\n"
	for name, build := range map[string]func(t *testing.T, h *devicestest.Harness) (d, whole *devicestest.Disk){
		"of another size": func(t *testing.T, h *devicestest.Harness) (d, _ *devicestest.Disk) {
			d = h.Blank("disk", 8*mib)
			must.Succeed(t, os.Truncate(d.Image, 16*mib))
			return d, d
		},
		"of another part": func(t *testing.T, h *devicestest.Harness) (d, _ *devicestest.Disk) {
			d = h.Blank("disk", 8*mib)
			return d, d
		},
		"without partitions": func(t *testing.T, h *devicestest.Harness) (d, whole *devicestest.Disk) {
			whole, parts := partitioned(t, h, data, 1)
			d = h.Link("disk-part1", parts[0])
			d.Image = whole.Image
			return d, whole
		},
	} {
		for _, released := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", released", false: ""}[released], func(t *testing.T) {
				h := newIdentified(t)
				h.Config.Partitions = devices.OfferPartitions
				d, whole := build(t, h)
				if released {
					v := d.Volume("pv")
					if d != whole {
						v.Identity = whole.Identity() + "#1"
					}
					h.PVs = []devices.Volume{devicestest.Bound(v)}
					h.Pass()
					h.PVs = []devices.Volume{h.Released(v)}
				}
				other := h.Attach("other", whole.Image)
				if name == "of another part" {
					moveTo(t, other.Node, mib)
				}
				devicestest.With(t, `exec 3<>"$1"`, other.Node)
				d.Untouched()
				h.Refused(devices.Twice)
			})
		}
	}
}

// moveTo has a loop device begin at an offset of its file.
func moveTo(t *testing.T, node string, offset uint64) {
	t.Helper()
	device, err := os.OpenFile(node, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer device.Close()
	info, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	must.Succeed(t, err)
	info.Offset = offset
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(device.Fd()), info))
}

func TestMissingDeviceKeepsVolume(t *testing.T) {
	for name, change := range map[string]func(devices.Volume) devices.Volume{
		"available": func(v devices.Volume) devices.Volume { return v }, "bound": devicestest.Bound, "released": devicestest.Released,
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", 32*mib)
			h.PVs = []devices.Volume{change(d.Volume("pv"))}
			must.Succeed(t, os.Remove(d.Path))
			if p := h.Refused(devices.Gone); p.Volume != "pv" {
				t.Errorf("the problem is %+v, want one of the volume", p)
			}
			must.Succeed(t, os.Symlink("/dev/none", d.Path))
			if p := h.Refused(devices.Gone); p.Volume != "pv" {
				t.Errorf("with a dangling link the problem is %+v, want one of the volume", p)
			}
		})
	}
}

// A path that leads to another device than it just did is not followed.
func TestDeviceIsHeldByNumber(t *testing.T) {
	h := devicestest.New(t)
	first, second := h.Disk("disk-1", mib), h.Disk("disk-2", mib)
	number, err := blockdev.At(first.Path)
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(os.Remove(first.Path), os.Symlink(second.Node, first.Path)))
	_, err = devices.Hold(devices.Look{Path: first.Path, Number: number, Ours: true, View: devicestest.View()})
	if p, ok := errors.AsType[devices.Problem](err); !ok || p.Reason != devices.OtherDevice {
		t.Errorf("Hold = %v, want %s", err, devices.OtherDevice)
	}
	free, err := blockdev.Hold(second.Node)
	if err != nil {
		t.Fatalf("the other device is still held: %v", err)
	}
	must.Succeed(t, free.Close())
}

// A process that begins to use a device between the check and the exclusive open is seen by the check that follows.
func TestCheckIsRepeatedWithDeviceHeld(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", mib)
	number, err := blockdev.At(d.Path)
	must.Succeed(t, err)
	mapped := filepath.Join(t.TempDir(), "pod-uid")
	must.Succeed(t, os.WriteFile(mapped, nil, 0o600))
	err = beforeHolding(t, func() error { return unix.Mount(d.Node, mapped, "", unix.MS_BIND, "") }, func() error {
		held, err := devices.Hold(devices.Look{Path: d.Path, Number: number, Ours: true, View: devicestest.View()})
		if err == nil {
			err = held.Close()
		}
		return err
	})
	if p, ok := errors.AsType[devices.Problem](err); !ok || p.Reason != devices.Mounted {
		t.Errorf("Hold = %v, want %s", err, devices.Mounted)
	}
	must.Succeed(t, unix.Unmount(mapped, 0))
}

// After a reboot a path may lead to another disk.
func TestReplacedDiskIsNotCleaned(t *testing.T) {
	for name, other := range map[string]int64{"of the same size": 32 * mib, "of another size": 64 * mib} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
			if r := h.Pass(); r.Available != 1 {
				t.Fatalf("found %+v", r)
			}
			must.Succeed(t, os.Remove(d.Path))
			other := h.Disk("disk2", other)
			must.Succeed(t, os.Rename(other.Path, d.Path))
			other.Untouched()
			h.Refused(devices.OtherDevice)
			h.PVs = []devices.Volume{h.Released(h.PVs[0])}
			h.Refused(devices.OtherDevice)
		})
	}
}

// Checked again at each poll, a refused device stays refused meanwhile.
func TestRefusedDeviceIsCheckedAgain(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 8*mib)
	devicestest.Run(t, "mkswap", d.Node)
	h.Refused(devices.HasSignature)
	again := h.Request()
	again.Retry = true
	for range 3 {
		if r := h.Agent.Pass(again); len(r.Problems) != 1 || r.Problems[0].Reason != devices.HasSignature {
			t.Errorf("found %+v while it is checked, want it refused", r)
		}
	}
	h.Refused(devices.HasSignature) // The check that runs has ended before wipefs opens the device.
	devicestest.Run(t, "wipefs", "--all", d.Node)
	h.Refused(devices.HasData)
	devicestest.Run(t, "blkdiscard", "--zeroout", d.Node)
	h.Offered()
}
