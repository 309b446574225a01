package mounter

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A Block claim is formatted once, survives every end of its mounter, comes back when it was unmounted, grows with its
// device, and goes when asked to.
func TestDevice(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 400*mib)
			flags := []string{"--device", d.Path, "--fs-type", kind, "--check-interval", "100ms"}
			mount := append([]string{"mount"}, flags...)
			probe := append([]string{"probe"}, flags...)
			if status, said := h.run("", probe...); status != 1 {
				t.Fatalf("probe before the mount: status %d, %s", status, said)
			}
			first := h.start("", mount...)
			first.says(mounted, 1)
			h.wantMounted(kind)
			if source := h.mounts()[0].Source; source != d.Path {
				t.Errorf("the host sees %s, want the device's own name %s", source, d.Path)
			}
			file := filepath.Join(h.Target, "file")
			must.Succeed(t, os.WriteFile(file, []byte("data"), 0o600))

			first.stop(syscall.SIGKILL)
			h.wantMounted(kind)
			second := h.start("", mount...)
			second.says(keeping, 1)
			if status, said := h.run("", probe...); status != 0 {
				t.Fatalf("probe of a mounted pool: status %d, %s", status, said)
			}
			h.wantMounted(kind)

			h.unmount()
			second.says(mounted, 1)
			h.wantMounted(kind)
			if got, err := os.ReadFile(file); err != nil || string(got) != "data" {
				t.Errorf("after the second mount the file has %q, %v", got, err)
			}
			wantGrowth(t, h, d, second, kind)

			second.stop(syscall.SIGTERM)
			if second.err != nil {
				t.Errorf("SIGTERM ends the mounter with %v", second.err)
			}
			h.wantMounted(kind)
			for range 2 {
				if status, said := h.run("", "unmount", "--device", d.Path, "--patience", "0"); status != 0 {
					t.Fatalf("unmount: status %d, %s", status, said)
				}
				h.wantUnmounted()
			}
		})
	}
}

// wantGrowth makes the disk larger. An ext4 is grown with CAP_SYS_RESOURCE only, which not even root has everywhere:
// then the error is logged, and the pool stays mounted.
func wantGrowth(t *testing.T, h *host, d *disk, p *pod, kind string) {
	t.Helper()
	d.grow(600 * mib)
	if kind == "ext4" && !hasSysResource(t) {
		p.says("Failed to grow the filesystem", 1)
		h.wantMounted(kind)
		return
	}
	p.says("bytes=629145600", 1)
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(h.Target, &st))
	if size := st.Blocks * uint64(st.Bsize); size < 500*mib {
		t.Errorf("the filesystem has %d MiB of a device with 600", size/mib)
	}
}

func hasSysResource(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	must.Succeed(t, unix.Capget(&header, &data[0]))
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// A partition is a device like any other.
func TestPartition(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	info, err := unix.IoctlLoopGetStatus64(int(d.device.Fd()))
	must.Succeed(t, err)
	info.Flags |= unix.LO_FLAGS_PARTSCAN
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(d.device.Fd()), info))
	tool(t, "addpart", d.Path, "1", "2048", "700000") // in sectors of 512 bytes
	defer tool(t, "delpart", d.Path, "1")
	partition := d.Path + "p1"
	p := h.start("", "mount", "--device", partition)
	p.says(mounted, 1)
	h.wantMounted("xfs")
	if source := h.mounts()[0].Source; source != partition {
		t.Errorf("the host sees %s, want %s", source, partition)
	}
	p.stop(syscall.SIGTERM)
	if status, said := h.run("", "unmount", "--device", partition, "--patience", "0"); status != 0 {
		t.Errorf("unmount: status %d, %s", status, said)
	}
}

// A Filesystem claim is whatever directory kubelet has mounted in the pod, wherever that comes from.
func TestVolume(t *testing.T) {
	for name, test := range map[string]struct {
		kind string
		make func(t *testing.T) (source string)
	}{
		"tmpfs": {"tmpfs", func(t *testing.T) string { return testenv.Tmpfs(t, mib) }},
		"a directory of an ext4": {"ext4", func(t *testing.T) string {
			sub := filepath.Join(testenv.LoopFS(t, "ext4", 64*mib), "exports", "pvc-1")
			must.Succeed(t, os.MkdirAll(sub, 0o755))
			return sub
		}},
		"a subvolume of a btrfs": {"btrfs", func(t *testing.T) string {
			sub := filepath.Join(testenv.LoopFS(t, "btrfs", 128*mib), "pvc-1")
			tool(t, "btrfs", "subvolume", "create", sub)
			return sub
		}},
		"kubelet's directory is a link": {"tmpfs", func(t *testing.T) string {
			link := filepath.Join(t.TempDir(), "kubelet")
			must.Succeed(t, os.Symlink(testenv.Tmpfs(t, mib), link))
			return link
		}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			source := test.make(t)
			volume := t.TempDir()
			container := "mount --bind " + source + " " + volume + "\nmount --make-private " + volume
			p := h.start(container, "mount", "--volume", volume)
			p.says(mounted, 1)
			h.wantMounted(test.kind)
			must.Succeed(t, os.WriteFile(filepath.Join(h.Target, "file"), nil, 0o600))
			if _, err := os.Stat(filepath.Join(source, "file")); err != nil {
				t.Errorf("the pool is not on the claim: %v", err)
			}
			h.wantServed(true)
			p.stop(syscall.SIGKILL)
			h.wantMounted(test.kind)
			// The next pod has a mount of its own of the same directory.
			if status, said := h.run(container, "probe", "--volume", volume); status != 0 {
				t.Errorf("probe in the next pod: status %d, %s", status, said)
			}
			if status, said := h.run(container, "unmount", "--volume", volume, "--patience", "0"); status != 0 {
				t.Errorf("unmount: status %d, %s", status, said)
			}
			h.wantUnmounted()
			h.wantServed(false)
		})
	}
}

// A rolling update, or a node that is unsure, may have two at a time.
func TestConcurrentMountersMountOnce(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	mount := []string{"mount", "--device", d.Path}
	one, two := h.start("", mount...), h.start("", mount...)
	one.says(keeping, 1)
	two.says(keeping, 1)
	h.wantMounted("xfs")
	one.stop(syscall.SIGTERM)
	h.wantMounted("xfs")
	had := strings.Count(two.output.String(), mounted)
	h.unmount()
	two.says(mounted, had+1)
	h.wantMounted("xfs")
}

// While volumes keep the filesystem mounted, an unmounted pool is mounted again: neither formatted nor checked.
func TestRemountUnderPublishedVolumes(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 400*mib)
			p := h.start("", "mount", "--device", d.Path, "--fs-type", kind)
			p.says(mounted, 1)
			volume := filepath.Join(h.Target, "pvc-1")
			must.Succeed(t, os.Mkdir(volume, 0o755))
			must.Succeed(t, unix.Mount(volume, h.Published, "", unix.MS_BIND, ""))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(h.Published, 0)) })
			h.unmount()
			p.says(mounted, 2)
			h.wantMounted(kind)
			must.Succeed(t, os.WriteFile(filepath.Join(h.Published, "file"), nil, 0o600))
			if _, err := os.Stat(filepath.Join(volume, "file")); err != nil {
				t.Errorf("the pool is another filesystem than its volume: %v", err)
			}
		})
	}
}

// Nothing of a full filesystem hinders its mount or its growth.
func TestFullDevice(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	p := h.start("", "mount", "--device", d.Path, "--check-interval", "100ms")
	p.says(mounted, 1)
	f, err := os.Create(filepath.Join(h.Target, "file"))
	must.Succeed(t, err)
	for chunk := int64(64 * mib); chunk >= 4096; chunk /= 2 {
		for offset := int64(0); err == nil; offset += chunk {
			end, seekErr := f.Seek(0, 2)
			must.Succeed(t, seekErr)
			err = unix.Fallocate(int(f.Fd()), 0, end, chunk)
		}
		err = nil
	}
	must.Succeed(t, f.Close())
	p.stop(syscall.SIGTERM)
	h.unmount()
	p = h.start("", "mount", "--device", d.Path, "--check-interval", "100ms")
	p.says(mounted, 1)
	wantGrowth(t, h, d, p, "xfs")
}

// A failed unmount is a failure, and changes nothing.
func TestUnmountPoolInUse(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	p := h.start("", "mount", "--device", d.Path)
	p.says(mounted, 1)
	p.stop(syscall.SIGTERM)
	volume := filepath.Join(h.Target, "pvc-1")
	must.Succeed(t, os.Mkdir(volume, 0o755))
	unmount := func(patience string) (int, string) {
		return h.run("", "unmount", "--device", d.Path, "--patience", patience)
	}

	f, err := os.Create(filepath.Join(volume, "file"))
	must.Succeed(t, err)
	if status, said := unmount("0"); status != 1 {
		t.Errorf("unmount with an open file: status %d, %s", status, said)
	}
	h.wantMounted("xfs")
	must.Succeed(t, f.Close())

	must.Succeed(t, unix.Mount(volume, h.Published, "", unix.MS_BIND, ""))
	status, said := unmount("0")
	if status != 1 || !contains(said, "published at "+h.Published) {
		t.Errorf("unmount with a published volume: status %d, %s", status, said)
	}
	h.wantMounted("xfs")

	// It tries again, so that a pod that is about to end does not fail it.
	waiting := h.start("", "unmount", "--device", d.Path, "--patience", "1m")
	waiting.says("Trying again", 1)
	must.Succeed(t, unix.Unmount(h.Published, 0))
	waiting.wait()
	if waiting.err != nil {
		t.Errorf("unmount after the volume is unpublished: %v", waiting.err)
	}
	h.wantUnmounted()
}

// On the node something is mounted over a directory above the pool, in a way that the clean-up's container does not have the pool's mount: its
// claim must not be detached, as far as that can be known.
func TestUnmountOfPoolThatTheContainerDoesNotSee(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	p := h.start("", "mount", "--device", d.Path)
	p.says(mounted, 1)
	p.stop(syscall.SIGTERM)
	const hide = "mount --make-rprivate /; umount %s || true; mount -t tmpfs cover %s; "
	covers := map[string]string{
		"over the directory of the pool":       fmt.Sprintf(hide, h.Target, h.Path) + "mkdir " + h.Target,
		"over a directory above, which has it": fmt.Sprintf(hide, h.Target, h.Root) + "mkdir -p " + h.Path,
		"over a directory above":               fmt.Sprintf(hide, h.Target, h.Root),
	}
	for where, covered := range covers {
		status, said := h.run(covered, "unmount", "--device", d.Path, "--patience", "0")
		if status != 1 || !contains(said, "nothing is mounted there that this container sees") {
			t.Errorf("%s, unmount beside a mount that is not seen: status %d, %s", where, status, said)
		}
		h.wantMounted("xfs")
	}
	h.unmount()
	for where, covered := range covers {
		if status, said := h.run(covered, "unmount", "--device", d.Path, "--patience", "0"); status != 0 {
			t.Errorf("%s, unmount after that: status %d, %s", where, status, said)
		}
	}
}

// Pods that use a filesystem which failed may still have data of it in memory: their pool stays mounted, as a live one does.
func TestUnmountFailedPoolInUse(t *testing.T) {
	h := newHost(t)
	p := h.start("", "mount", "--device", newDisk(t, 400*mib).Path)
	p.says(mounted, 1)
	p.stop(syscall.SIGTERM)
	volume := filepath.Join(h.Target, "pvc-1")
	must.Succeed(t, os.Mkdir(volume, 0o755))
	must.Succeed(t, unix.Mount(volume, h.Published, "", unix.MS_BIND, ""))
	testenv.ShutDown(t, h.Target)
	status, said := h.run("", "unmount", "--patience", "0")
	if status != 1 || !contains(said, "published at "+h.Published) {
		t.Errorf("unmount with a published volume: status %d, %s", status, said)
	}
	h.wantMounted("xfs")
	must.Succeed(t, unix.Unmount(h.Published, 0))
	if status, said := h.run("", "unmount", "--patience", "0"); status != 0 {
		t.Errorf("unmount: status %d, %s", status, said)
	}
	h.wantUnmounted()
}

// A clean-up begins while the mounter is at work, so that the claim is never without a pod. It unmounts once the mounter has ended, which
// would mount the pool again.
func TestUnmountWaitsForTheMounter(t *testing.T) {
	h := newHost(t)
	d := newDisk(t, 400*mib)
	p := h.start("", "mount", "--device", d.Path)
	p.says(mounted, 1)
	second := h.start("", "mount", "--device", d.Path) // the next pod of a rollout
	second.says("Keeping the pool mounted", 1)
	unmount := h.start("", "unmount", "--patience", "0", "--v", "2")
	unmount.says("Waiting for the mounter", 1)
	h.wantMounted("xfs")
	p.stop(syscall.SIGTERM)
	h.wantMounted("xfs")
	second.stop(syscall.SIGTERM)
	unmount.wait()
	if unmount.err != nil {
		t.Errorf("unmount: %v", unmount.err)
	}
	h.wantUnmounted()
}

// Without the claim, unmount takes down what the mounter has recorded, also if it is mounted twice.
func TestUnmountWithoutClaim(t *testing.T) {
	h := newHost(t)
	p := h.start("", "mount", "--device", newDisk(t, 400*mib).Path)
	p.says(mounted, 1)
	p.stop(syscall.SIGTERM)
	must.Succeed(t, unix.Mount(h.Target, h.Target, "", unix.MS_BIND, ""))
	if status, said := h.run("", "unmount", "--patience", "0"); status != 0 {
		t.Errorf("unmount: status %d, %s", status, said)
	}
	h.wantUnmounted()
}

// A disk that came in the place of the pool's has its device number, and the root directory of its filesystem the same inode number. What an
// administrator has mounted of it stays, also once it fails.
func TestFilesystemInThePlaceOfThePoolStays(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 400*mib)
			p := h.start("", "mount", "--device", d.Path, "--fs-type", kind)
			p.says(mounted, 1)
			p.stop(syscall.SIGTERM)
			h.unmount()
			tool(t, "wipefs", "--all", d.Path)
			tool(t, "mkfs."+kind, "-q", d.Path)
			must.Succeed(t, unix.Mount(d.Path, h.Target, kind, 0, ""))
			if status, said := h.run("", "unmount", "--patience", "0"); status != 0 || !contains(said, "what is mounted in its place stays") {
				t.Errorf("unmount: status %d, %s", status, said)
			}
			h.wantMounted(kind)
		})
	}
}

// A mounter takes down its own filesystem that failed, to mount it anew, and not that of an administrator.
func TestFailedFilesystemOfAdministratorStays(t *testing.T) {
	h := newHost(t)
	other := newDisk(t, 400*mib)
	tool(t, "mkfs.xfs", "-q", other.Path)
	must.Succeed(t, os.Mkdir(h.Target, 0o755))
	must.Succeed(t, unix.Mount(other.Path, h.Target, "xfs", 0, ""))
	testenv.ShutDown(t, h.Target)
	for _, command := range [][]string{{"mount", "--device", newDisk(t, 400*mib).Path}, {"unmount"}} {
		status, said := h.run("", append(command, "--patience", "0")...)
		if status != 1 || !contains(said, "nothing says whether "+other.Path) {
			t.Errorf("%s: status %d, %s", command[0], status, said)
		}
		h.wantMounted("xfs")
	}
}

// A mounter whose pool is mounted needs no more memory than its pod requests, and sleeps until its next check.
func TestIdleMounter(t *testing.T) {
	h := newHost(t)
	p := h.start("", "mount", "--device", newDisk(t, 400*mib).Path)
	p.says("fills the device", 1)
	// What it did before has an end, and the runtime of Go has some work of its own. A loop each second is never this quiet.
	const window, most = 5 * time.Second, 4
	after := idle(t, p)
	for quiet, deadline := false, time.Now().Add(time.Minute); !quiet; {
		before := after
		time.Sleep(window) // nothing to wait for: nothing is to happen
		after = idle(t, p)
		used, woken := after.used-before.used, after.switches-before.switches
		t.Logf("in %v of nothing to do: %v of processor time, %d switches; memory %d KiB", window, used, woken, after.memory)
		quiet = used <= 20*time.Millisecond && woken <= most
		if !quiet && time.Now().After(deadline) {
			t.Fatalf("no %v with at most %d switches and 20ms of processor time", window, most)
		}
	}
	if after.memory > 20<<10 {
		t.Errorf("%d KiB of memory, want the 20 MiB that deploy/operator/mounter requests", after.memory)
	}
}

type usage struct {
	used     time.Duration
	switches int // of all threads, of their own accord
	memory   int // KiB
}

func idle(t *testing.T, p *pod) (u usage) {
	t.Helper()
	var ts unix.Timespec
	clock := ^int32(p.cmd.Process.Pid)<<3 | 2 // clock_getcpuclockid(3): CPUCLOCK_SCHED of a process
	must.Succeed(t, unix.ClockGettime(clock, &ts))
	u.used = time.Duration(ts.Nano())
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.cmd.Process.Pid))
	must.Succeed(t, err)
	if len(threads) == 0 {
		t.Fatal("the mounter has ended")
	}
	for _, thread := range threads {
		u.switches += statusField(t, thread, "voluntary_ctxt_switches")
		u.memory = statusField(t, thread, "VmRSS")
	}
	return u
}

// statusField is a number of a status file of proc(5).
func statusField(t *testing.T, file, name string) (value int) {
	t.Helper()
	text, err := os.ReadFile(file)
	must.Succeed(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			_, err := fmt.Sscan(rest, &value)
			must.Succeed(t, err)
			return value
		}
	}
	t.Fatalf("%s has no %s", file, name)
	return 0
}
