package snapshots

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	slow "kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// On the disk of these tests little is written in a second, and less than that is kept in memory.
const (
	perSecond = 16 * mib
	inMemory  = 4 * mib
)

// slowDisk mounts a filesystem on one until the test ends.
func slowDisk(t *testing.T, kind string) *slow.Filesystem {
	t.Helper()
	fs := slow.Mount(t, kind, 512*mib)
	fs.KeepUnwritten(t, inMemory)
	fs.Slow(0, perSecond)
	return fs
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
	"names": nameAsNeighbour,
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
		if testing.Short() && fs.kind != "xfs" {
			continue
		}
		t.Run(fs.name, func(t *testing.T) {
			pool := slowDisk(t, fs.kind).At
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
	refused := 0
	for len(all) < rounds {
		made := p.freezeUntilSeen("s-1")
		began := time.Now()
		p.Eventually("the pod goes on", func() bool { return !p.frozen() })
		all = append(all, time.Since(began))
		err := <-made
		if status.Code(err) == codes.FailedPrecondition {
			refused++
			continue // a process that waits in a write of its own could not be stopped: that time counts too
		}
		p.Must(err)
		p.wantMoment(p.pool.Own("snapshots", "~s-1"))
		p.Must(p.DeleteSnapshot(p.Context(), "s-1@"+drivertest.NodeName))
	}
	p.Logf("the pod was frozen for %v; %d snapshots were refused", all, refused)
	if refused == rounds {
		p.Error("all snapshots were refused")
	}
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

// nameAsNeighbour makes directories and removes them, which fills the log of the filesystem.
func nameAsNeighbour(t *testing.T, pool string) (stop func()) {
	t.Helper()
	const most = 20_000
	in := filepath.Join(pool, "neighbour")
	must.Succeed(t, os.Mkdir(in, 0o700))
	end := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-end:
				return
			default:
			}
			at := filepath.Join(in, strconv.Itoa(n%most))
			if n >= most {
				if err := os.Remove(at); err != nil {
					t.Error(err)
					return
				}
			}
			if err := os.Mkdir(at, 0o700); err != nil {
				t.Error(err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		writer.Wait()
		must.Succeed(t, os.RemoveAll(in))
	})
	t.Cleanup(stop)
	return stop
}
