package snapshots

import (
	"os"
	"path/filepath"
	"slices"
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

// slowDisk mounts a filesystem on a disk that writes so many bytes in a second, until the test ends.
func slowDisk(t *testing.T, kind string, bytes, perSecond int64) (at string) {
	t.Helper()
	image, err := loopfs.Format(t.Context(), t.TempDir(), kind, bytes)
	must.Succeed(t, err)
	d := slow.New(t, image, t.TempDir())
	must.Succeed(t, os.Remove(image))
	device, err := loopfs.Attach(d.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	at = filepath.Join(t.TempDir(), "pool")
	must.Succeed(t, os.Mkdir(at, 0o755), loopfs.MountDevice(t.Context(), device.Name(), at, kind))
	t.Cleanup(func() {
		d.Heal()
		must.Succeed(t, loopfs.Unmount(at))
	})
	d.Slow(0, perSecond)
	return at
}

// TestStandstillDoesNotWaitForNeighbours has another tenant of the filesystem write as fast as the disk, and faster, while
// pods are frozen for a snapshot. They stand still for at most twice as long as without.
func TestStandstillDoesNotWaitForNeighbours(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	rounds := 7
	if testing.Short() {
		rounds = 2
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
		if testing.Short() && fs.name != "xfs" {
			continue
		}
		t.Run(fs.name, func(t *testing.T) {
			config := drivertest.PoolConfig{Name: "local", Path: slowDisk(t, fs.kind, 512*mib, 16*mib), Enforcement: fs.enforcement}
			if fs.enforcement != "" {
				must.Succeed(t, loopfs.SwitchQuotasOn(t.Context(), config.Path))
			}
			d := drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{config}})
			b := &bench{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}}
			for version, hierarchy := range hierarchies(t) {
				if version != "cgroup v2" {
					continue
				}
				p := startPod(b, hierarchy, 20, 0)
				startFreezer(b, driver, p)
				var alone, beside time.Duration
				// Less than the second that one write waits behind those of the neighbour, and more than a busy machine adds.
				tooLong := func() bool { return beside > max(2*alone, 200*time.Millisecond) }
				// What else the machine does makes some times longer, and none shorter.
				for try := 0; try == 0 || try < 3 && tooLong(); try++ {
					alone = p.standstill(rounds)
					stop := writeAsNeighbour(t, config.Path)
					beside = p.standstill(rounds)
					stop()
					t.Logf("frozen for %s alone, for %s beside a neighbour that writes", alone, beside)
				}
				if tooLong() {
					t.Errorf("pods stand still for %s beside a neighbour that writes, %s without", beside, alone)
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

// writeAsNeighbour keeps writes of up to 4 MiB in the queue of the disk until stop is called: what is written after them waits
// for a quarter of a second each time.
func writeAsNeighbour(t *testing.T, pool string) (stop func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(pool, "neighbour"), os.O_CREATE|os.O_WRONLY|syscall.O_DIRECT, 0o600)
	must.Succeed(t, err)
	data, err := unix.Mmap(-1, 0, 4*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned, as O_DIRECT needs
	must.Succeed(t, err)
	end := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
			}
			if _, err := f.WriteAt(data, 0); err != nil {
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
