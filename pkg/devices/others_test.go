package devices_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// elsewhere is a node of a device that is not below /dev, nor on the filesystem of the kernel's nodes.
func elsewhere(t *testing.T, node string) string {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(node, &st))
	made := filepath.Join(t.TempDir(), "node of it") // a mount table has spaces in octal
	must.Succeed(t, unix.Mknod(made, unix.S_IFBLK|0o600, int(st.Rdev)))
	return made
}

func bindTo(t *testing.T, node, to string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(to, nil, 0o600))
	must.Succeed(t, unix.Mount(node, to, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(to, 0)) })
}

// A process that does not hold a device exclusively is not kept away by the agent's doing so.
func TestDeviceUsedWithoutExclusiveOpenIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		use  func(t *testing.T, d *devicestest.Disk)
		want devices.Reason
	}{
		"open in a process": {func(t *testing.T, d *devicestest.Disk) { devicestest.With(t, `exec 3<>"$1"`, d.Node) }, devices.InUse},
		"open in a process by a node elsewhere": {func(t *testing.T, d *devicestest.Disk) {
			devicestest.With(t, `exec 3<>"$1"`, elsewhere(t, d.Node))
		}, devices.InUse},
		"a node below /dev of a container": {func(t *testing.T, d *devicestest.Disk) {
			devicestest.With(t, `mount -t tmpfs none /dev/shm && touch /dev/shm/xvda && mount --bind "$1" /dev/shm/xvda`, d.Node)
		}, devices.Mounted},
		"a node elsewhere, in a container": {func(t *testing.T, d *devicestest.Disk) {
			devicestest.With(t, `touch "$2" && mount --bind "$1" "$2"`, elsewhere(t, d.Node), filepath.Join(t.TempDir(), "to"))
		}, devices.Mounted},
		"a node elsewhere, mapped": {func(t *testing.T, d *devicestest.Disk) {
			bindTo(t, elsewhere(t, d.Node), filepath.Join(t.TempDir(), "a pod"))
		}, devices.Mounted},
		"the file that it is of, as a loop device, open in a process": {func(t *testing.T, d *devicestest.Disk) {
			same := filepath.Join(filepath.Dir(d.Image), "by another name")
			must.Succeed(t, os.Link(d.Image, same))
			devicestest.With(t, `exec 3<>"$1"`, same)
		}, devices.InUse},
		"the file of a loop device, by a node elsewhere": {func(t *testing.T, d *devicestest.Disk) {
			device, err := loopfs.Attach(elsewhere(t, d.Node))
			must.Succeed(t, err)
			t.Cleanup(func() { device.Close() })
		}, devices.HasLoop},
	} {
		for _, hasVolume := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " and released", false: ""}[hasVolume], func(t *testing.T) {
				h := devicestest.New(t)
				d := h.Disk("disk", 8*mib)
				if hasVolume {
					h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
				}
				d.Untouched()
				c.use(t, d)
				h.Refused(c.want)
			})
		}
	}
}

// An agent with process ids of its own may not look who uses a device, and so wipes none.
func TestDeviceIsNotWipedWhereUsersCannotBeSeen(t *testing.T) {
	testenv.NeedRoot(t)
	const inside = "DEVICES_TEST_INSIDE"
	if os.Getenv(inside) == "" {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
		if output, err := cmd.CombinedOutput(); err != nil || strings.Count(string(output), "--- PASS: "+t.Name()+"/") != 2 {
			t.Errorf("%v: %s", err, output)
		}
		return
	}
	for _, released := range []bool{false, true} {
		t.Run(fmt.Sprintf("released %t", released), func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", 8*mib)
			d.Untouched()
			if released {
				h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			}
			h.Refused(devices.Hidden)
		})
	}
}

// Reading a device is what udev does each time.
func TestReaderOfDeviceIsNoUser(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	devicestest.With(t, `exec 3<"$1"`, d.Node)
	h.Offered()
}

// libblkid does not know them: SPDK's blobstore, Aerospike, dm-crypt and LUKS with a detached header, GPFS.
func TestDataWithoutSignatureIsKept(t *testing.T) {
	for name, at := range map[string]int64{"head": 0, "tail": 256*mib - 4096, "between": 16*mib + 100*(224*mib/256/4096*4096)} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Wipe = devices.WipeZero
			d := h.Blank("disk", 256*mib)
			device, err := os.OpenFile(d.Node, os.O_RDWR, 0)
			must.Succeed(t, err)
			_, err = device.WriteAt([]byte("SPDKBLOB"), at)
			must.Succeed(t, errors.Join(err, device.Sync(), device.Close()))
			d.Untouched()
			h.Refused(devices.HasData)
			h.Restart()
			h.Refused(devices.HasData)
		})
	}
}

// partitioned makes a disk with the partitions that sfdisk makes of a script, and answers the nodes of as many.
func partitioned(t *testing.T, h *devicestest.Harness, script string, count int) (d *devicestest.Disk, parts []string) {
	t.Helper()
	d = h.Blank("whole", 64*mib)
	cmd := exec.CommandContext(t.Context(), "sfdisk", "--quiet", "--no-reread", "--no-tell-kernel", d.Node)
	cmd.Stdin = strings.NewReader(script)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("sfdisk: %v: %s", err, output)
	}
	for n := range count {
		node := addPartitionAt(t, d.Node, n+1, int64(n+1)*8*mib)
		parts = append(parts, deviceNode(t, node))
	}
	return d, parts
}

const (
	dataType = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"
	biosBoot = "21686148-6449-6E6F-744E-656564454649"
)

// A boot loader has neither a filesystem nor a mount.
func TestPartitionIsRefused(t *testing.T) {
	table := func(second string) string {
		return "label: gpt\nstart=8MiB, size=8MiB, type=" + dataType + "\nstart=16MiB, size=8MiB, " + second + "\n"
	}
	for name, c := range map[string]struct {
		script     string
		partitions devices.Partitions
		use        func(t *testing.T, sibling string)
		want       devices.Reason
	}{
		"BIOS boot, by default":                {table("type=" + biosBoot), "", nil, devices.IsPartition},
		"plain data, by default":               {table("type=" + dataType), devices.RefusePartitions, nil, devices.IsPartition},
		"BIOS boot":                            {table("type=" + biosBoot), devices.OfferPartitions, nil, devices.Reserved},
		"EFI":                                  {table("type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B"), devices.OfferPartitions, nil, devices.Reserved},
		"PReP":                                 {table("type=9E1A2D38-C612-4316-AA26-8B49521E5A8B"), devices.OfferPartitions, nil, devices.Reserved},
		"MSR":                                  {table("type=E3C9E316-0B5C-4DB8-817D-F92DF00215AE"), devices.OfferPartitions, nil, devices.Reserved},
		"META of Talos":                        {table("name=META, type=" + dataType), devices.OfferPartitions, nil, devices.Reserved},
		"a slot":                               {table("name=root-B, type=" + dataType), devices.OfferPartitions, nil, devices.Reserved},
		"one that a platform requires":         {table(`attrs="RequiredPartition", type=` + dataType), devices.OfferPartitions, nil, devices.Reserved},
		"of a table of DOS, for a logical one": {"label: dos\nstart=8MiB, size=8MiB, type=83\nstart=16MiB, size=8MiB, type=5\n", devices.OfferPartitions, nil, devices.Reserved},
		"a sibling is mounted": {table("type=" + dataType), devices.OfferPartitions, func(t *testing.T, sibling string) {
			devicestest.Run(t, "mkfs.ext4", "-q", "-F", sibling)
			mount(t, sibling, t.TempDir())
		}, devices.Mounted},
		"a sibling is held": {table("type=" + dataType), devices.OfferPartitions, func(t *testing.T, sibling string) {
			file, err := os.OpenFile(sibling, os.O_RDONLY|syscall.O_EXCL, 0)
			must.Succeed(t, err)
			t.Cleanup(func() { file.Close() })
		}, devices.InUse},
		"a sibling is open": {table("type=" + dataType), devices.OfferPartitions, func(t *testing.T, sibling string) {
			devicestest.With(t, `exec 3<>"$1"`, sibling)
		}, devices.InUse},
		"nothing else is used":                      {table("type=" + dataType), devices.OfferPartitions, nil, ""},
		"nothing else is used, with a table of DOS": {"label: dos\nstart=8MiB, size=8MiB, type=83\nstart=16MiB, size=8MiB, type=83\n", devices.OfferPartitions, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Partitions = c.partitions
			_, parts := partitioned(t, h, c.script, 2)
			d := h.Link("disk-part2", parts[1])
			if c.use != nil {
				c.use(t, parts[0])
			}
			d.Untouched()
			if c.want == "" {
				h.Offered()
				return
			}
			h.Refused(c.want)
		})
	}
}

// A claim that had the disk may have made its partitions, and one that had a partition has its data on the disk.
func TestDataOfClaimIsKeptOnPartsOfItsDevice(t *testing.T) {
	h := newIdentified(t)
	h.Config.Partitions = devices.OfferPartitions
	disk, parts := partitioned(t, h, "label: gpt\nstart=8MiB, size=8MiB, type="+dataType+"\nstart=16MiB, size=8MiB, type="+dataType+"\n", 2)
	part := h.Link("part", parts[1])
	released := func(d *devicestest.Disk, identity string) devices.Volume {
		v := d.Volume("released")
		v.Identity = identity
		return h.Released(v)
	}
	whole, second := disk.Identity(), disk.Identity()+"#2"
	disk.Untouched()
	for kept, other := range map[string]struct {
		identity string
		volumes  []devices.Volume
		want     devices.Reason
	}{
		whole:  {second, []devices.Volume{released(part, second)}, devices.Contradiction},
		second: {whole, []devices.Volume{released(disk, whole)}, devices.Contradiction},
	} {
		left := devices.Record{Path: "/dev/left", Bytes: mib, Identity: kept, State: devices.Bound, Volume: "pv", VolumeUID: "uid", ClaimUID: "uid-0", Claim: "default/left"}
		must.Succeed(t, h.Records.Put(left))
		h.PVs = other.volumes
		h.Refused(other.want)
	}
	h.PVs = nil
	must.Succeed(t, h.Records.Put(devices.Record{Path: "/dev/left", Bytes: mib, Identity: whole, State: devices.Bound, Volume: "pv", VolumeUID: "uid", ClaimUID: "uid-0", Claim: "default/left"}))
	must.Succeed(t, os.Rename(part.Path, filepath.Join(h.Dir, "disk-part2")))
	h.Refused(devices.WasBound)
}

// A partition that is ours is cleaned, also while another one of its disk is used.
func TestPartitionWithRecordIsCleaned(t *testing.T) {
	h := newIdentified(t)
	disk, parts := partitioned(t, h, "label: gpt\nstart=8MiB, size=8MiB\nstart=16MiB, size=8MiB\n", 2)
	d := h.Link("disk-part2", parts[1])
	devicestest.Run(t, "mkfs.ext4", "-q", "-F", parts[0])
	mount(t, parts[0], t.TempDir())
	v := d.Volume("pv")
	v.Identity = disk.Identity() + "#2"
	h.PVs = []devices.Volume{devicestest.Bound(v)}
	h.Pass()
	h.PVs = []devices.Volume{h.Released(v)}
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Errorf("found %+v, want it cleaned", r)
	}
}

// The partitions of a disk were sorted (sfdisk --reorder), or made anew: another one has the number, and the size.
func TestPartitionThatBeginsElsewhereIsKept(t *testing.T) {
	available := func(v devices.Volume) devices.Volume { return v }
	for name, c := range map[string]struct {
		before, after func(devices.Volume) devices.Volume
	}{
		"released":  {devicestest.Bound, devicestest.Released},
		"available": {available, available},
		"bound":     {devicestest.Bound, devicestest.Bound},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			disk, parts := partitioned(t, h, "label: gpt\nstart=8MiB, size=8MiB\nstart=16MiB, size=8MiB\n", 2)
			v := h.Link("disk-part2", parts[1]).Volume("pv")
			h.PVs = []devices.Volume{c.before(v)}
			h.Pass()
			for n := range parts {
				if errno := removePartition(t, disk.Node, n+1); errno != 0 {
					t.Fatal(errno)
				}
			}
			for n := range parts {
				parts[n] = addPartitionAt(t, disk.Node, n+1, int64(2-n)*8*mib)
			}
			d := &devicestest.Disk{TB: t, Path: v.Path, Node: deviceNode(t, parts[1])}
			d.Fill()
			d.Untouched()
			h.PVs = []devices.Volume{c.after(v)}
			h.Refused(devices.OtherDevice)
			h.Restart()
			h.Refused(devices.OtherDevice)
		})
	}
}

// The node was installed anew, and knows of no record. Its raw device has another path now.
func TestDeviceOfVolumeThatMissesItsOwnIsKept(t *testing.T) {
	for name, change := range map[string]func(v *devices.Volume){
		"known by its identity":     func(*devices.Volume) {},
		"known by its size":         func(v *devices.Volume) { v.Identity = "" },
		"although it has grown":     func(v *devices.Volume) { v.Bytes /= 2 },
		"the path leads to another": func(v *devices.Volume) { v.Path = filepath.Join(filepath.Dir(v.Path), "other") },
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Blank("disk-a", 32*mib)
			h.Blank("other", 16*mib)
			v := devicestest.Bound(d.Volume("pv"))
			v.Path = filepath.Join(h.Dir, "disk-b")
			change(&v)
			h.PVs = []devices.Volume{v}
			d.Untouched()
			r := h.Pass()
			devices.SortProblems(r.Problems)
			if len(r.Problems) != 2 || r.Problems[0].Path != d.Path || r.Problems[0].Reason != devices.MayBeMissing || len(r.Offers) > 0 {
				t.Errorf("found %+v, want the disk refused for the volume that misses its own", r)
			}
		})
	}
}

// Two nodes see one disk of a storage network.
func TestDiskOfVolumeOfAnotherNodeIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		theirs   string
		released bool
	}{
		"new": {"wwid=naa.600a", false}, "released": {"wwid=naa.600a", true}, "by multipath there": {"uuid=mpath-3600a", false},
		"a partition there": {"wwid=naa.600a#2", false}, "a partition of multipath there": {"uuid=part2-mpath-3600a", true},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			t.Cleanup(devices.Identify(func(string) string { return "wwid=naa.600a" }))
			d := h.Blank("disk", 8*mib)
			v := d.Volume("pv")
			v.Identity = "wwid=naa.600a"
			if c.released {
				h.PVs = []devices.Volume{h.Released(v)}
			}
			h.API = func() ([]devices.Volume, error) {
				return append([]devices.Volume{{Name: "theirs", Path: d.Path, Elsewhere: true, Identity: c.theirs}}, h.PVs...), nil
			}
			d.Untouched()
			if p := h.Refused(devices.Twice); !strings.Contains(p.Detail, "theirs") {
				t.Errorf("the problem is %v, want it to name the other volume", p)
			}
		})
	}
}

// A disk whose name others have too is known while the node runs, as one without an identity. Its Lease is of the name, so that no other node takes
// what may be the same disk.
func TestDiskThatLooksLikeOthers(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.Liken("wwid=t10.VENDOR  DISK"))
	d := h.Blank("disk", 8*mib)
	o := h.Offered()
	if o.Identity != "" {
		t.Fatalf("the offer has the identity %q", o.Identity)
	}
	other := devicestest.New(t)
	other.Reserved, other.Hostname = h.Reserved, "another"
	other.Restart()
	other.Blank("disk", 8*mib)
	other.Refused(devices.Twice)
	bound := devicestest.Bound(h.PVs[0])
	h.PVs = []devices.Volume{bound}
	for range 2 {
		if r := h.Pass(); len(r.GivenUp) > 0 || len(r.Problems) > 0 || r.Available != 1 {
			t.Errorf("found %+v, want it to stay reserved", r)
		}
		h.Restart()
	}
	must.Succeed(t, os.Remove(d.Path))
	if r := h.Pass(); len(r.GivenUp) > 0 {
		t.Errorf("%q is given up while the device is missing", r.GivenUp)
	}
	must.Succeed(t, os.Symlink(d.Node, d.Path))
	record := must.Value(h.Records.Get(d.Path))(t)
	booted := record
	booted.Instance = "another boot/1"
	must.Succeed(t, h.Records.Put(booted))
	d.Fill()
	h.PVs = []devices.Volume{h.Released(bound)}
	sum := d.Sum()
	h.Refused(devices.NotIdentified)
	if d.Sum() != sum {
		t.Error("a disk that may be another one was written to")
	}
	must.Succeed(t, h.Records.Put(record))
	if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
		t.Errorf("found %+v, want the disk of this boot to be cleaned", r)
	}
}

func TestSameDisk(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"wwid=naa.600a", "wwid=naa.600a", true}, {"wwid=naa.600a", "wwid=naa.600b", false}, {"", "", false},
		{"wwid=naa.600a#1", "wwid=naa.600a#2", false}, {"wwid=naa.600a#1", "wwid=naa.600a", true},
		{"uuid=part1-mpath-3600a", "wwid=naa.600a#1", true}, {"uuid=part1-mpath-3600a", "wwid=naa.600a#2", false},
		{"uuid=mpath-20025", "wwid=eui.0025", true}, {"uuid=mpath-1ATA_QEMU_HARDDISK_QM00001", "wwid=t10.ATA     QEMU HARDDISK                           QM00001             ", true},
		{"uuid=part2-mpath-1ATA_QEMU_HARDDISK_QM00001", "wwid=t10.ATA     QEMU HARDDISK                           QM00001#2", true}, {"serial=1", "backing_file=1", false},
	} {
		if devices.SameDisk(c.a, c.b) != c.want || devices.SameDisk(c.b, c.a) != c.want {
			t.Errorf("%q and %q: want %t", c.a, c.b, c.want)
		}
	}
}

// Its device is not written to, also after a restart.
func TestRefusedOfferIsMadeAgain(t *testing.T) {
	h := devicestest.New(t)
	h.Config.Wipe = devices.WipeZero
	h.Blank("disk", 32*mib).Untouched()
	for range 3 {
		r := h.Pass()
		if len(r.Offers) != 1 {
			t.Fatalf("found %+v, want an offer", r)
		}
		must.Succeed(t, h.Agent.Offering(t.Context(), r.Offers[0]))
		must.Succeed(t, h.Agent.Offered(r.Offers[0], "", errors.New("a webhook refuses")))
		if r := h.Agent.Pass(h.Request()); len(r.Problems) != 1 || r.Problems[0].Reason != devices.NotOffered || len(r.Offers) > 0 {
			t.Errorf("then found %+v, want it refused until it is checked again", r)
		}
	}
	h.Restart()
	h.Offered()
}

// Right before a volume is made the API has to know of no other one.
func TestAPIIsReadBeforeOffer(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	r := h.Pass()
	if len(r.Offers) != 1 {
		t.Fatalf("found %+v, want an offer", r)
	}
	h.API = func() ([]devices.Volume, error) {
		return []devices.Volume{{Name: "by-hand", Path: d.Node, Foreign: true}}, nil
	}
	err := h.Agent.Offering(t.Context(), r.Offers[0])
	if p, ok := errors.AsType[devices.Problem](err); !ok || p.Reason != devices.OfOthers {
		t.Errorf("Offering = %v, want %s", err, devices.OfOthers)
	}
}

// While a cache is behind, the API is not asked again and again what it has answered.
func TestAPIIsNotAskedAgainBeforeCacheHasChanged(t *testing.T) {
	h := devicestest.New(t)
	d := h.Blank("disk", 8*mib)
	asked := 0
	h.API = func() ([]devices.Volume, error) {
		asked++
		return []devices.Volume{d.Volume("pv")}, nil
	}
	h.Pass()
	for range 5 {
		if r := h.Agent.Pass(h.Request()); len(r.Wiping) > 0 {
			<-h.Changed()
		}
	}
	if asked != 1 {
		t.Errorf("it was asked %d times, want once", asked)
	}
	h.PVs = []devices.Volume{d.Volume("pv")}
	if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 {
		t.Errorf("then found %+v, want the volume", r)
	}
}

// An administrator who takes the claim from a volume makes it available, with what is left of its data.
func TestHalfCleanVolumeIsNeverAvailable(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", 8*mib)
	v := h.Released(d.Volume("pv"))
	v.Wipe = devices.WipeZero
	h.PVs = []devices.Volume{devicestest.Bound(d.Volume("pv"))}
	h.Pass()
	h.PVs = []devices.Volume{v}
	goOn := h.PassUntilCleaning()
	h.PVs = []devices.Volume{d.Volume("pv")}
	h.Agent.Pass(h.Request())
	goOn()
	if r := h.Pass(); r.Available != 0 || len(r.HalfClean) != 1 || len(r.Problems) != 1 || r.Problems[0].Reason != devices.HalfClean {
		t.Fatalf("found %+v, want it to be deleted", r)
	}
	h.Restart()
	h.PVs = nil
	h.Refused(devices.WasBound)
}

// One that a claim has got all the same is that claim's, and the agent says what that means.
func TestHalfCleanVolumeThatIsBoundIsNotCleaned(t *testing.T) {
	h := devicestest.New(t)
	d := h.Disk("disk", 8*mib)
	v := devicestest.Bound(d.Volume("pv"))
	h.PVs = []devices.Volume{v}
	must.Succeed(t, h.Records.Put(devices.Record{Path: d.Path, Bytes: v.Bytes, Identity: v.Identity, State: devices.Cleaning, Volume: "pv", ClaimUID: "uid-0", Wipe: devices.WipeZero}))
	d.Untouched()
	if r := h.Pass(); len(r.HalfClean) > 0 || len(r.Problems)+len(r.Cleaned) > 1 {
		t.Errorf("found %+v", r)
	}
	if record, err := h.Records.Get(d.Path); err != nil || record.State != devices.Bound {
		t.Errorf("the record is %+v, %v; want the claim's data to be kept", record, err)
	}
}

// A volume that was deleted and made anew while its device was cleaned is another one, which no pass may have seen to be gone.
func TestCleaningEndsWhenItsVolumeIsMadeAnew(t *testing.T) {
	t.Cleanup(devices.UseSmallSteps())
	h := devicestest.New(t)
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", 8*mib)
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	goOn := h.PassUntilCleaning()
	h.PVs[0].UID = "uid of a later one"
	h.Agent.Pass(h.Request())
	goOn()
	h.Pass() // the last one
	h.Refused(devices.Contradiction)
	d.WantPattern(mib, 8*mib)
}

// One that was made anew under the name is not given what is left either, nor does its record end.
func TestHalfCleanDeviceOfVolumeThatWasMadeAnewIsNotForgotten(t *testing.T) {
	h := newIdentified(t)
	d := h.Disk("disk", 8*mib)
	for _, name := range []string{"pv", "another"} {
		left := devices.Record{Path: d.Path, Bytes: d.Bytes(), Identity: d.Identity(), State: devices.Cleaning, Wipe: devices.WipeZero,
			Volume: "pv", VolumeUID: "uid of an earlier one", ClaimUID: "uid-0", Claim: "default/data"}
		must.Succeed(t, h.Records.Put(left))
		h.PVs = []devices.Volume{d.Volume(name)}
		h.Refused(devices.Contradiction)
		if record, err := h.Records.Get(d.Path); err != nil || record.State != devices.Cleaning {
			t.Errorf("the record is %+v, %v", record, err)
		}
		h.PVs = []devices.Volume{devicestest.Bound(d.Volume(name))}
		if r := h.Agent.Pass(h.Request()); len(r.Problems) != 1 || r.Problems[0].Reason != devices.HalfClean || len(r.HalfClean) > 0 {
			t.Errorf("the claim that was made anew too has got it, and found is %+v", r)
		}
	}
}

// The same disk may be larger than it was, as one of a storage network.
func TestDeviceThatHasGrownIsTheSame(t *testing.T) {
	for name, change := range map[string]func(devices.Volume) devices.Volume{
		"available": func(v devices.Volume) devices.Volume { return v }, "bound": devicestest.Bound, "released": devicestest.Released,
	} {
		for _, recorded := range []bool{true, false} {
			if !recorded && name == "released" {
				continue // it is kept
			}
			t.Run(name, func(t *testing.T) {
				h := newIdentified(t)
				h.Config.Wipe = devices.WipeZero
				d := h.Disk("disk", 8*mib)
				v := d.Volume("pv")
				if recorded {
					h.PVs = []devices.Volume{devicestest.Bound(v)}
					h.Pass()
					v.Identity = ""
				}
				must.Succeed(t, d.Resize(16*mib))
				if v = change(v); recorded {
					v.ClaimUID, v.Claim = "uid-1", "default/data"
				}
				h.PVs = []devices.Volume{v}
				r := h.Pass()
				if len(r.Problems) > 0 {
					t.Fatalf("found %+v, want the same device", r)
				}
				if v.Released {
					d.WantZero(0, 16*mib)
					return
				}
				if len(r.Known) != 1 || r.Known[0].Bytes != 16*mib || r.Known[0].Identity != d.Identity() || r.Available != 1 {
					t.Errorf("found %+v, want the volume to grow", r)
				}
			})
		}
	}
	t.Run("clean, without a volume", func(t *testing.T) {
		h := newIdentified(t)
		h.Config.Wipe = devices.WipeZero
		d := h.Blank("disk", 8*mib)
		must.Succeed(t, h.Records.Put(devices.Record{Path: d.Path, Bytes: 8 * mib, Identity: d.Identity(), State: devices.Clean, Wipe: devices.WipeZero}))
		must.Succeed(t, d.Resize(16*mib))
		d.Untouched()
		if o := h.Offered(); o.Bytes != 16*mib {
			t.Errorf("offered %+v, want all of it", o)
		}
	})
}

// attachAnother moves the file of a loop device away, and has another loop device have one of its path.
func attachAnother(t *testing.T, h *devicestest.Harness, d *devicestest.Disk) *devicestest.Disk {
	t.Helper()
	must.Succeed(t, os.Rename(d.Image, d.Image+".old"))
	must.Succeed(t, os.Remove(d.Path))
	return h.Disk(filepath.Base(d.Path), d.Bytes())
}

// The path of a loop device's file says little: another file may have it, and in another mount namespace one has.
func TestLoopDeviceOnAnotherFileOfTheNameIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		claim func(devices.Volume) devices.Volume
		want  devices.Reason
	}{
		"released": {devicestest.Released, devices.NotIdentified},
		"bound":    {devicestest.Bound, devices.OtherDevice},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Wipe = devices.WipeZero
			d := h.Blank("disk", 8*mib)
			h.Offered()
			v := h.PVs[0]
			h.PVs[0] = devicestest.Bound(v)
			if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 {
				t.Fatalf("found %+v, want the volume", r)
			}
			attachAnother(t, h, d).Untouched()
			h.PVs[0] = c.claim(v)
			h.Refused(c.want)
		})
	}
}

// Earlier builds took the path of a loop device's file for an identity. Their volumes stay, and what is at the path is not cleaned.
func TestLoopDeviceThatWasKnownByThePathOfItsFile(t *testing.T) {
	for name, c := range map[string]struct {
		recorded, another bool
		used, released    devices.Reason
	}{
		"recorded":                      {true, false, "", devices.NotIdentified},
		"the record is lost":            {false, false, "", devices.NotIdentified},
		"the path leads to another one": {true, true, devices.OtherDevice, devices.OtherDevice},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			h.Config.Wipe = devices.WipeZero
			d := h.Disk("disk", 8*mib)
			d.Untouched()
			v := d.Volume("pv")
			v.Identity, v.Unidentified = d.Identity(), false
			if c.another {
				v.Identity += ".old"
			}
			used := devicestest.Bound(v)
			if c.recorded {
				must.Succeed(t, h.Records.Put(devices.Record{Path: v.Path, Bytes: v.Bytes, Identity: v.Identity, State: devices.Bound,
					Volume: v.Name, VolumeUID: v.UID, ClaimUID: used.ClaimUID, Claim: used.Claim}))
			}
			h.PVs = []devices.Volume{used}
			if c.used != "" {
				h.Refused(c.used)
			} else if r := h.Pass(); r.Available != 1 || len(r.Problems) > 0 || len(r.Known) > 0 {
				t.Errorf("found %+v, want the volume as it was", r)
			}
			h.PVs = []devices.Volume{devicestest.Released(v)}
			h.Refused(c.released)
		})
	}
}

// A disk without an identity may be another one. It is known to be the same until the node is booted again.
func TestDiskWithoutIdentityThatWasReplacedIsKept(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(r *devices.Record)
		cleaned bool
	}{
		"the same":                 {func(*devices.Record) {}, true},
		"the node was booted":      {func(r *devices.Record) { r.Instance = "another boot/1/7:0" }, false},
		"recorded without knowing": {func(r *devices.Record) { r.Instance = "" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			t.Cleanup(devices.Identify(func(string) string { return "" }))
			d := h.Disk("disk", 64*mib)
			v := d.Volume("pv")
			v.Identity = ""
			h.PVs = []devices.Volume{devicestest.Bound(v)}
			h.Pass()
			record, err := h.Records.Get(d.Path)
			must.Succeed(t, err)
			c.change(&record)
			must.Succeed(t, h.Records.Put(record))
			zfsLabels(t, d.Node)
			h.PVs = []devices.Volume{h.Released(v)}
			if !c.cleaned {
				d.Untouched()
				h.Refused(devices.NotIdentified)
				return
			}
			if r := h.Pass(); len(r.Cleaned) != 1 || len(r.Problems) > 0 {
				t.Errorf("found %+v, want it cleaned", r)
			}
		})
	}
}

// The kernel may number disks in another order after a boot, so that the data of a claim is at the path of a released volume.
func TestDisksWithoutIdentityThatChangedPlacesAreKept(t *testing.T) {
	for name, c := range map[string]struct{ booted, gone bool }{
		"not since the boot": {false, false}, "the node was booted": {true, false}, "and one is missing": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			t.Cleanup(devices.Identify(func(string) string { return "" }))
			a, b := h.Disk("disk-a", 32*mib), h.Disk("disk-b", 32*mib)
			devicestest.Run(t, "mkfs.ext4", "-q", "-F", b.Node)
			one, other := a.Volume("pv-a"), b.Volume("pv-b")
			one.Identity, other.Identity = "", ""
			h.PVs = []devices.Volume{devicestest.Bound(one), devicestest.Bound(other)}
			h.Pass()
			if c.booted {
				for _, d := range []*devicestest.Disk{a, b} {
					record, err := h.Records.Get(d.Path)
					must.Succeed(t, err)
					record.Instance = "another boot/1/7:0"
					must.Succeed(t, h.Records.Put(record))
				}
				must.Succeed(t, errors.Join(os.Remove(a.Path), os.Symlink(b.Node, a.Path), os.Remove(b.Path)))
				if !c.gone {
					must.Succeed(t, os.Symlink(a.Node, b.Path))
				}
				b.Untouched()
			}
			h.PVs[0] = h.Released(one)
			r := h.Pass()
			refused := slices.ContainsFunc(r.Problems, func(p devices.Problem) bool {
				return p.Path == a.Path && p.Reason == devices.NotIdentified
			})
			if refused != c.booted || c.booted == (len(r.Cleaned) == 1) {
				t.Errorf("found %+v, want it cleaned: %t", r, !c.booted)
			}
		})
	}
}

// What was done to a disk without an identity, or known of it, says nothing of one that is at its path after a boot.
func TestDiskWithoutIdentityIsNotCleanedWhereAnotherOneWas(t *testing.T) {
	cleaning := devices.Record{Bytes: 32 * mib, State: devices.Cleaning, Wipe: devices.WipeZero, Done: 16 * mib, Instance: "another boot/1/7:0",
		Volume: "pv", ClaimUID: "uid-1"}
	start := func(t *testing.T) (*devicestest.Harness, *devicestest.Disk) {
		h := devicestest.New(t)
		t.Cleanup(devices.UseSmallSteps())
		t.Cleanup(devices.Identify(func(string) string { return "" }))
		h.Config.Wipe = devices.WipeZero
		d := h.Disk("disk", 32*mib)
		record := cleaning
		record.Path = d.Path
		must.Succeed(t, h.Records.Put(record))
		return h, d
	}
	t.Run("whole", func(t *testing.T) {
		h, d := start(t)
		d.Untouched()
		h.Refused(devices.WasBound)
	})
	t.Run("not with partitions", func(t *testing.T) {
		h, d := start(t)
		addPartition(t, d.Node)
		d.Untouched()
		h.Refused(devices.HasPartitions)
	})
	t.Run("not a partition", func(t *testing.T) {
		h, d := start(t)
		part := h.Link("partition", addPartition(t, d.Node))
		must.Succeed(t, errors.Join(os.Remove(d.Path), os.Rename(part.Path, d.Path)))
		record := cleaning
		record.Path, record.Bytes = d.Path, 8*mib
		must.Succeed(t, h.Records.Put(record))
		d.Untouched()
		h.Refused(devices.IsPartition)
	})
}

// By the identity that a volume has its device will be cleaned one day: it is not taken from a disk that may be another one.
func TestIdentityOfDiskThatMayBeAnotherIsNotAdopted(t *testing.T) {
	for name, c := range map[string]struct{ booted, said bool }{
		"not since the boot": {}, "the node was booted": {booted: true}, "an administrator says that it is the same": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			identified := devices.Identify(func(string) string { return "" })
			v := d.Volume("pv")
			v.Identity = ""
			h.PVs = []devices.Volume{devicestest.Bound(v)}
			h.Pass()
			if c.booted {
				record, err := h.Records.Get(d.Path)
				must.Succeed(t, err)
				record.Instance = "another boot/1/7:0"
				must.Succeed(t, h.Records.Put(record))
			}
			identified()
			if c.said {
				h.PVs[0].Identity = d.Identity()
			}
			refused := c.booted && !c.said
			if refused {
				d.Untouched()
				h.Refused(devices.OtherDevice)
			} else if r := h.Pass(); !c.said && (len(r.Known) != 1 || r.Known[0].Identity != d.Identity()) || len(r.Problems) > 0 {
				t.Errorf("found %+v, want its identity", r)
			}
			h.PVs[0].Used, h.PVs[0].Released = false, true
			if r := h.Pass(); refused != (len(r.Cleaned) == 0) {
				t.Errorf("found %+v, want it cleaned: %t", r, !refused)
			}
		})
	}
}

// A disk without an identity is known by the node's record alone. Where that is gone, as after the node was installed anew, the disk at the
// path of the volume may be another one, with or without an identity.
func TestDiskIsNotTakenForThatOfVolumeWithoutRecord(t *testing.T) {
	for name, c := range map[string]struct {
		made, identified, cleaned bool
	}{
		"of a volume that an earlier program made": {false, false, true},
		"without an identity":                      {true, false, false},
		"with one":                                 {true, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newIdentified(t)
			d := h.Disk("disk", 32*mib)
			v := devicestest.Bound(d.Volume("pv"))
			v.Identity, v.Unidentified = "", c.made
			if !c.identified {
				t.Cleanup(devices.Identify(func(string) string { return "" }))
			}
			h.PVs = []devices.Volume{v}
			if !c.cleaned {
				d.Untouched()
			}
			if r := h.Pass(); (len(r.Problems) > 0) != c.identified || len(r.Known) > 0 == c.made {
				t.Errorf("found %+v of the bound volume", r)
			}
			h.Pass() // what it has noted now is no proof either
			h.PVs = []devices.Volume{devicestest.Released(v)}
			if r := h.Pass(); len(r.Cleaned) == 1 != c.cleaned {
				t.Errorf("found %+v, want it cleaned: %t", r, c.cleaned)
			}
		})
	}
}

func TestDevicesAreCleanedInTurns(t *testing.T) {
	h := devicestest.New(t)
	for _, name := range []string{"disk-a", "disk-b"} {
		h.PVs = append(h.PVs, h.Released(h.Disk(name, 8*mib).Volume(name)))
	}
	release := h.Agent.UseTurns()
	h.Agent.Pass(h.Request())
	if r := h.Agent.Pass(h.Request()); len(r.Wiping) != 2 || h.Wiped() > 0 {
		t.Errorf("found %+v after %d bytes, want both to wait", r, h.Wiped())
	}
	release()
	if r := h.Pass(); len(r.Cleaned) != 2 {
		t.Errorf("found %+v, want both cleaned", r)
	}
}
