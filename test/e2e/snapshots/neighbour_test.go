package snapshots

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	slow "kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A slowFS is a filesystem on a disk that writes slowly, of which the kernel keeps little in memory that is still to be written: so who
// writes at full speed has others wait as where the memory of a node is full of that.
type slowFS struct {
	at   string
	disk *slow.Disk
}

const (
	perSecond = 16 * mib
	inMemory  = 4 * mib
)

// slowDisk mounts one until the test ends.
func slowDisk(t *testing.T, kind string, bytes int64) slowFS {
	t.Helper()
	image, err := loopfs.Format(t.Context(), t.TempDir(), kind, bytes)
	must.Succeed(t, err)
	d := slow.New(t, image, t.TempDir())
	must.Succeed(t, os.Remove(image))
	device, err := loopfs.Attach(d.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	before := backingDevices(t)
	at := filepath.Join(t.TempDir(), "pool")
	must.Succeed(t, os.Mkdir(at, 0o755), loopfs.MountDevice(t.Context(), device.Name(), at, kind))
	t.Cleanup(func() {
		d.Heal()
		must.Succeed(t, loopfs.Unmount(at))
	})
	limitUnwritten(t, device, before)
	d.Slow(0, perSecond)
	return slowFS{at, d}
}

const backing = "/sys/class/bdi"

func backingDevices(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(backing + "/*")
	must.Succeed(t, err)
	return names
}

// limitUnwritten sets how much is kept of what was written to the filesystem that has been mounted, by the device that it is on or, on
// btrfs, by one that it has made.
func limitUnwritten(t *testing.T, device *os.File, before []string) {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Fstat(int(device.Fd()), &st))
	of := []string{fmt.Sprintf("%s/%d:%d", backing, unix.Major(st.Rdev), unix.Minor(st.Rdev))}
	for _, name := range backingDevices(t) {
		if strings.Contains(name, "btrfs") && !slices.Contains(before, name) {
			of = append(of, name)
		}
	}
	for _, name := range of {
		for file, value := range map[string]int{"max_bytes": inMemory, "strict_limit": 1} {
			err := os.WriteFile(filepath.Join(name, file), []byte(fmt.Sprint(value)), 0)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.EROFS) {
				testenv.Missing(t, name+"/"+file+" of Linux 6.2")
			}
			must.Succeed(t, err)
		}
	}
}

// neighbours write to the filesystem as fast as they can until stop is called.
var neighbours = map[string]func(t *testing.T, pool string) (stop func()){
	"directly": func(t *testing.T, pool string) (stop func()) {
		t.Helper()
		return writeAsNeighbour(t, pool, syscall.O_DIRECT)
	},
	"through the page cache": func(t *testing.T, pool string) (stop func()) {
		t.Helper()
		return writeAsNeighbour(t, pool, 0)
	},
}

// noise is how much longer a standstill may be, of few milliseconds, because of what else the machine does: two ticks of 10 ms, for which the
// scheduler may run others.
const noise = 20 * time.Millisecond

// TestStandstillDoesNotWaitForNeighbours has another tenant of the filesystem write as fast as it can, which is faster than the disk, while
// pods are frozen for a snapshot: small files have changed, and a large one. They stand still for at most twice as long as without.
func TestStandstillDoesNotWaitForNeighbours(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	rounds := 7
	if testing.Short() {
		rounds = 3
	}
	for _, fs := range []struct {
		name, kind  string
		enforcement string
	}{
		{"xfs", "xfs", ""},
		{"ext4", "ext4", ""},
		{"btrfs", "btrfs", ""},
		{"btrfs with quotas", "btrfs", "required"},
	} {
		if testing.Short() && fs.kind == "btrfs" {
			continue
		}
		t.Run(fs.name, func(t *testing.T) {
			pool := slowDisk(t, fs.kind, 512*mib).at
			if fs.enforcement != "" {
				must.Succeed(t, loopfs.SwitchQuotasOn(t.Context(), pool))
			}
			h := newHarness(t, driver, pool, fs.enforcement)
			for version, hierarchy := range hierarchies(t) {
				if version != "cgroup v2" {
					continue
				}
				p := startPod(h, hierarchy, 20, 4*mib)
				startFreezer(h, driver, p)
				for how, write := range neighbours {
					if testing.Short() && how == "directly" {
						continue
					}
					var alone, beside time.Duration
					tooLong := func() bool { return beside > max(2*alone, noise) }
					// What else the machine does makes some times longer, and none shorter.
					for try := 0; try == 0 || try < 3 && tooLong(); try++ {
						alone = p.standstill(rounds)
						stop := write(t, pool)
						beside = p.standstill(rounds)
						stop()
						t.Logf("frozen for %s alone, for %s beside a neighbour that writes %s", alone, beside, how)
					}
					if tooLong() {
						t.Errorf("pods stand still for %s beside a neighbour that writes %s, %s without", beside, how, alone)
					}
				}
			}
		})
	}
}

// standstill is for how long pods are frozen for a snapshot, in the middle of several.
func (p *pod) standstill(rounds int) time.Duration {
	p.Helper()
	var all []time.Duration
	for len(all) < rounds {
		made := p.freezeUntilSeen("s-1")
		began := time.Now()
		p.Eventually("the pod goes on", func() bool { return !p.frozen() })
		all = append(all, time.Since(began))
		p.Must(<-made)
		p.wantMoment(p.pool.Own("snapshots", "~s-1"))
		p.Must(p.DeleteSnapshot(p.Context(), "s-1@"+drivertest.NodeName))
	}
	p.Logf("the pod was frozen for %v", all)
	slices.Sort(all)
	return all[len(all)/2]
}

// writeAsNeighbour writes up to 4 MiB at a time, over and over to the same file: directly, what is written after them waits
// for a quarter of a second each time.
func writeAsNeighbour(t *testing.T, pool string, flags int) (stop func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(pool, "neighbour"), os.O_CREATE|os.O_WRONLY|flags, 0o600)
	must.Succeed(t, err)
	data, err := unix.Mmap(-1, 0, 4*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned, as O_DIRECT needs
	must.Succeed(t, err)
	end := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for at := int64(0); ; at = (at + 4*mib) % (64 * mib) {
			select {
			case <-end:
				return
			default:
			}
			if _, err := f.WriteAt(data, at); err != nil {
				t.Error(err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		writer.Wait()
		must.Succeed(t, f.Close(), os.Remove(f.Name()), unix.Munmap(data))
	})
	t.Cleanup(stop)
	return stop
}
