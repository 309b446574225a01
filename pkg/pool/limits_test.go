package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// faulty is a quota that can be switched off, and whose calls can fail.
type faulty struct {
	*quotatest.Fake
	off                            atomic.Bool
	failBefore, failAfter, failEnd atomic.Bool
	// slow makes each count take a second.
	slow atomic.Bool
	// hangs makes each count take an hour.
	hangs atomic.Bool
	// refused: the disk refuses each count.
	refused atomic.Bool
	// refusedID: it refuses the id of each directory.
	refusedID atomic.Bool
	// slowEnd makes each release take ten milliseconds.
	slowEnd atomic.Bool
	// uncounted is an id whose use cannot be read.
	uncounted atomic.Uint32
	// meanwhile is called once, in the midst of the next call that limits, or that
	// counts more than a megabyte.
	meanwhile atomic.Pointer[func()]
	// asked is called once, when a directory is asked for its id.
	asked atomic.Pointer[func()]
}

func (f *faulty) IDOf(d *dir.Dir) (quota.ID, error) {
	if do := f.asked.Swap(nil); do != nil {
		(*do)()
	}
	if f.refusedID.Load() {
		return 0, syscall.EIO
	}
	return f.Fake.IDOf(d)
}

func (f *faulty) interrupt() {
	if do := f.meanwhile.Swap(nil); do != nil {
		(*do)()
	}
}

func (f *faulty) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	if f.slow.Load() {
		time.Sleep(time.Second) // the bubble's time
	}
	if f.hangs.Load() {
		time.Sleep(time.Hour)
	}
	if f.refused.Load() {
		return quota.Usage{}, syscall.EIO
	}
	if id != 0 && uint32(id) == f.uncounted.Load() {
		return quota.Usage{}, errFault
	}
	usage, err := f.Fake.Usage(d, id)
	if usage.Bytes > mib {
		f.interrupt()
	}
	return usage, err
}

var errFault = errors.New("fault")

func (f *faulty) Limit(d *dir.Dir, id quota.ID, l quota.Limit) error {
	if f.failBefore.Load() {
		return errFault
	}
	f.interrupt()
	err := f.Fake.Limit(d, id, l)
	if f.failAfter.Load() && l != (quota.Limit{}) {
		return errors.Join(err, errFault)
	}
	return err
}

func (f *faulty) Release(fs *dir.Dir, id quota.ID) error {
	if f.failEnd.Load() {
		return errFault
	}
	if f.slowEnd.Load() {
		time.Sleep(10 * time.Millisecond) // the bubble's time
	}
	return f.Fake.Release(fs, id)
}

func (f *faulty) detect(d *dir.Dir) (quota.Facility, error) {
	if f.off.Load() {
		return nil, fmt.Errorf("%w: switch them on at %s", quota.ErrNone, d)
	}
	return f, nil
}

// withFaults runs a test on a node whose quotas may fail.
func withFaults(t *testing.T, datadir string, test func(t *testing.T, b *bench, f *faulty)) {
	t.Helper()
	withFaultsAt(t, t.TempDir(), datadir, test)
}

func withFaultsAt(t *testing.T, root, datadir string, test func(t *testing.T, b *bench, f *faulty)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		f := &faulty{Fake: &quotatest.Fake{As: quota.XFS}}
		b.Quota, b.real = f.Fake, f.detect
		b.start(datadir)
		test(t, b, f)
	})
}

// carried is the id of a directory of the pool.
func (b *bench) carried(name string) quota.ID {
	b.t.Helper()
	id, err := b.Quota.IDOf(b.open(name))
	must.Succeed(b.t, err)
	return id
}

func (b *bench) limitOf(name string) int64 {
	b.t.Helper()
	usage, err := b.Quota.Usage(b.open(name), b.carried(name))
	must.Succeed(b.t, err)
	return usage.Limit.Bytes
}

func (b *bench) volume(name string) pool.Volume {
	b.t.Helper()
	v, err := b.Volume(b.t.Context(), id(b.t, name))
	must.Succeed(b.t, err)
	return v
}

// wantFirstID makes a volume and expects it to have the lowest id there is: nothing
// else has it any more.
func (b *bench) wantFirstID(name string) {
	b.t.Helper()
	b.create(name, mib)
	if got := b.carried(name); got != quota.FirstID {
		b.t.Errorf("the id of %s is %#x, want %#x: another was not given back", name, got, quota.FirstID)
	}
}

func (b *bench) wantAbnormal(name, says string) {
	b.t.Helper()
	v := b.volume(name)
	if v.Enforced || !v.Condition.Abnormal || !strings.Contains(v.Condition.Message, says) {
		b.t.Errorf("volume %+v, want it abnormal for %q and not enforced", v, says)
	}
}

// A call or a survey that looks at a volume does not keep another from seeing what it sees.
func TestChecksAtTheSameMomentReportSameCondition(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		must.Succeed(t, b.Quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: 8 * mib}))
		until := make(chan struct{})
		underLock := func() { <-until }
		before := func() { f.asked.Store(&underLock) } // the first look, without the lock
		f.asked.Store(&before)
		look := func() error {
			b.wantAbnormal("pvc-1", "limit")
			return nil
		}
		one := background(look)
		two := background(look)
		close(until)
		must.Succeed(t, <-one, <-two)
	})
}

func TestSlowOpenIsNotHung(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		for i := range 20 {
			b.create(fmt.Sprintf("pvc-%d", i), mib)
		}
		f.slow.Store(true)
		b.restart(local) // waits until it was checked, or that takes long
		if err := b.Status()[0].Err; !errors.Is(err, volume.ErrUnavailable) || strings.Contains(err.Error(), "hangs") {
			t.Errorf("error %v, want one that reports the opening", err)
		}
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "new"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrUnavailable)
		if errors.Is(err, volume.ErrNoSpace) {
			t.Errorf("%v would send the claim to another node", err)
		}
		f.slow.Store(false)
		b.later(time.Minute)
		b.create("new", mib)
	})
}

func TestQuotasLostAndRestored(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", 10*mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		f.off.Store(true)
		b.later(time.Minute)
		if b.Status()[0].Enforced {
			t.Error("the pool is still said to be enforced")
		}
		b.wantAbnormal("pvc-1", "quotas of xfs")
		if v := b.create("pvc-2", mib); v.Enforced {
			t.Error("a volume without a limit is said to be enforced")
		}
		_, err := b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 20 * mib})
		wantError(t, err, volume.ErrCannotGrow)

		must.Succeed(t, f.Fake.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: mib}))
		f.off.Store(false)
		b.later(time.Minute)
		if got := b.limitOf("pvc-1"); got != 10*mib {
			t.Errorf("the limit is %d, want it put back", got)
		}
		if status := b.Status()[0]; !status.Enforced || status.Restored != 1 {
			t.Errorf("status %+v, want the pool enforced and one limit put back", status)
		}
		if v := b.volume("pvc-1"); !v.Enforced || v.Condition.Abnormal {
			t.Errorf("volume %+v, want it enforced and in order", v)
		}
	})
}

func TestRequiredQuotasLostStopsPool(t *testing.T) {
	withFaults(t, `[{"name":"local","path":"pool","enforcement":"required"}]`, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		f.off.Store(true)
		b.later(time.Minute)
		if err := b.Status()[0].Err; !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), "switch them on") {
			t.Errorf("error %v, want one that says what to do", err)
		}
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		if got := b.capacity(); got != 0 {
			t.Errorf("capacity %d, want none", got)
		}
		f.off.Store(false)
		b.later(time.Minute)
		b.create("pvc-2", mib)
	})
}

func TestQuotasOffKeepsExistingLimits(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, _ *faulty) {
		b.create("pvc-1", 10*mib)
		b.restart(`[{"name":"local","path":"pool","enforcement":"none"}]`)
		if v := b.create("pvc-2", mib); v.Enforced || b.carried("pvc-2") != 0 {
			t.Errorf("volume %+v with id %d, want no limit", v, b.carried("pvc-2"))
		}
		must.Succeed(t, b.publish("pvc-1", "a"))
		bytes, err := b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 20 * mib})
		must.Succeed(t, err)
		if bytes != 20*mib || b.limitOf("pvc-1") != 20*mib || !b.volume("pvc-1").Enforced {
			t.Errorf("expanded to %d under a limit of %d, want 20 MiB", bytes, b.limitOf("pvc-1"))
		}
		if b.Status()[0].Enforced {
			t.Error("the pool is said to be enforced")
		}
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		b.delete("pvc-1")
		b.settled()
		b.restart(local)
		b.wantFirstID("pvc-3")
	})
}

func TestLimitBeingChangedIsNotReported(t *testing.T) {
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		must.Succeed(t, b.Quota.Limit(b.open("pvc-1"), b.carried("pvc-1"), quota.Limit{Bytes: 20 * mib}))
		unlock, err := b.Lock(id(t, "pvc-1"))
		must.Succeed(t, err)
		if v := b.volume("pvc-1"); v.Condition.Abnormal || !v.Enforced {
			t.Errorf("volume %+v, want it in order while a call works on it", v)
		}
		unlock()
		b.wantAbnormal("pvc-1", "limit")
	})
}

func TestProjectIDIsReleasedAfterFailedCreate(t *testing.T) {
	for when, fault := range map[string]func(*faulty) *atomic.Bool{
		"before the directory had it": func(f *faulty) *atomic.Bool { return &f.failBefore },
		"after the directory had it":  func(f *faulty) *atomic.Bool { return &f.failAfter },
	} {
		t.Run(when, func(t *testing.T) {
			withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
				fault(f).Store(true)
				_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
				wantError(t, err, errFault)
				fault(f).Store(false)
				b.later(time.Minute)
				b.wantClean()
				b.wantFirstID("pvc-2")
			})
		})
	}
}

func TestProjectIDOfLostVolumeIsReleased(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, _ *faulty) {
		b.create("pvc-1", mib)
		must.Succeed(t, os.Remove(b.Path("pool", "pvc-1")))
		b.delete("pvc-1")
		b.wantFirstID("pvc-2")
	})
}

func TestProjectIDReleaseIsRetried(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		f.failEnd.Store(true)
		b.delete("pvc-1")
		b.settled()
		if status := b.Status()[0]; status.Trash.Stuck != 1 {
			t.Errorf("status %+v, want one piece stuck", status)
		}
		f.failEnd.Store(false)
		b.later(2 * time.Hour)
		b.wantClean()
		b.wantFirstID("pvc-2")
	})
}

func TestOrphanLimitIsReleasedAtStart(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		carried := b.carried("pvc-1")
		// Removed while no driver could see to its limit.
		f.off.Store(true)
		b.later(time.Minute)
		b.delete("pvc-1")
		b.settled()
		b.Quota.Removed(carried)
		f.off.Store(false)
		b.restart(local)
		b.wantFirstID("pvc-2")
	})
}

func TestProjectIDInTwoRecords(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, _ *faulty) {
		b.create("pvc-2", 10*mib)
		data, err := os.ReadFile(b.Own("volumes", "pvc-2.json"))
		must.Succeed(t, err)
		// Copies on either side of the alphabet, since records are read in any order.
		for _, name := range []string{"pvc-1", "pvc-3"} {
			must.Succeed(t, os.Mkdir(b.Path("pool", name), 0o777))
			copied := strings.Replace(string(data), `"pvc-2"`, `"`+name+`"`, 1)
			copied = regexp.MustCompile(`"uid":"\w+"`).ReplaceAllString(copied, `"uid":"copy`+name+`"`)
			must.Succeed(t, os.WriteFile(filepath.Join(b.Own("volumes"), name+".json"), []byte(copied), 0o600))
		}
		b.restart(local)
		for _, name := range []string{"pvc-1", "pvc-3"} {
			b.wantAbnormal(name, "quotas")
			b.delete(name)
		}
		b.settled()
		if v := b.volume("pvc-2"); !v.Enforced || v.Condition.Abnormal || b.limitOf("pvc-2") != 10*mib {
			t.Errorf("volume %+v under a limit of %d, want it in order", v, b.limitOf("pvc-2"))
		}
	})
}

func TestTrashIsRemovedAfterQuotasAreLost(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		f.failEnd.Store(true)
		b.delete("pvc-1")
		b.settled()
		f.off.Store(true)
		b.later(2 * time.Hour)
		b.wantClean()
	})
}

func TestRestoredLimitsKeepExpansion(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		names := []string{"pvc-1", "pvc-2", "pvc-3", "pvc-4"}
		for _, name := range names {
			b.create(name, 10*mib)
			must.Succeed(t, b.publish(name, name))
		}
		f.off.Store(true)
		b.later(time.Minute)
		f.off.Store(false)
		f.slow.Store(true)
		for !b.Status()[0].Enforced {
			b.later(100 * time.Millisecond)
		}
		for _, name := range names {
			unlock, err := b.Lock(id(t, name))
			if err != nil {
				continue // the limit being changed is this one
			}
			_, err = b.Expand(t.Context(), id(t, name), b.Target(name), "", volume.Range{Required: 20 * mib})
			must.Succeed(t, err)
			unlock()
		}
		f.slow.Store(false)
		b.later(time.Minute)
		for _, name := range names {
			if v := b.volume(name); b.limitOf(name) != v.Bytes || v.Condition.Abnormal {
				t.Errorf("%s has a limit of %d and was promised %d: %v", name, b.limitOf(name), v.Bytes, v.Condition)
			}
		}
	})
}

// Each filesystem has its own ids, and the disks of a node begin with the same.
func TestPoolsOnTwoFilesystemsShareProjectID(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	for _, name := range []string{"one", "two"} {
		mountTmpfs(t, filepath.Join(root, name))
	}
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		quotas := map[string]*quotatest.Fake{"one": {As: quota.XFS}, "two": {As: quota.XFS}}
		b.real = func(d *dir.Dir) (quota.Facility, error) { return quotas[filepath.Base(filepath.Dir(d.String()))], nil }
		one, two := `{"name":"one","path":"one/pool"}`, `{"name":"two","path":"two/pool"}`
		b.start("[" + one + "]")
		b.create("pvc-1", mib)
		b.restart("[" + two + "]")
		b.create("pvc-2", mib)
		b.restart("[" + one + "," + two + "]")
		for _, name := range []string{"pvc-1", "pvc-2"} {
			must.Succeed(t, b.publish(name, name))
			_, err := b.Expand(t.Context(), id(t, name), b.Target(name), "", volume.Range{Required: 2 * mib})
			must.Succeed(t, err)
			if v := b.volume(name); !v.Enforced || v.Condition.Abnormal {
				t.Errorf("volume %+v, want it enforced and in order", v)
			}
		}
	})
}

func mountTmpfs(t *testing.T, at string) {
	t.Helper()
	must.Succeed(t, os.Mkdir(at, 0o755))
	must.Succeed(t, syscall.Mount("tmpfs", at, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, syscall.Unmount(at, 0)) })
}

func TestCapacityWhileTrashIsErased(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.Tmpfs(t, 300*mib), local, func(t *testing.T, b *bench, f *faulty) {
		must.Succeed(t, os.WriteFile(b.Path("foreign"), make([]byte, 80*mib), 0o600))
		b.create("full", 80*mib)
		must.Succeed(t, os.WriteFile(b.Path("pool", "full", "data"), make([]byte, 80*mib), 0o600))
		must.Succeed(t, b.write("full", 80*mib))
		b.create("empty", 80*mib)
		deleted := func() {
			must.Succeed(t, b.Delete(context.Background(), id(t, "full")))
			time.Sleep(time.Second) // the reaper's, and the bubble's
		}
		b.later(time.Minute)
		f.meanwhile.Store(&deleted)
		b.later(2 * time.Minute)
		b.wantVolumes("empty")
		if got := b.capacity(); got > 140*mib {
			t.Errorf("capacity %d, want 140 MiB at most: 80 are promised and 80 foreign, of 300", got)
		}
	})
}

// A panic ends one call, and the process lives: what the call held must not be lost to all
// others.
func TestPanicReleasesReservation(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", 4*mib)
		b.createBlock("pvc-disk", 4*mib)
		must.Succeed(t, b.publishBlock("pvc-disk", "disk"))
		for name, call := range map[string]func() error{
			"a creation": func() error {
				_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
				return err
			},
			"an expansion": func() error {
				_, err := b.Expand(t.Context(), id(t, "pvc-disk"), b.Target("disk"), volume.ModeBlock, volume.Range{Required: 8 * mib})
				return err
			},
		} {
			curse := func() { panic("a curse") }
			f.meanwhile.Store(&curse)
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s did not panic", name)
					}
				}()
				_ = call()
			}()
			if promised := b.Status()[0].Promised; promised != 8*mib {
				t.Errorf("after %s %d bytes are promised, want %d", name, promised, 8*mib)
			}
			b.wantVolumes("pvc-1", "pvc-disk")
		}
		b.create("pvc-2", mib)
	})
}

// Its alert has people read the log.
func TestUnreadableVolumeIsLoggedOnce(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		said := &diary{}
		b.log = funcr.New(said.write, funcr.Options{})
		b.restart(local)
		b.create("pvc-1", mib)
		b.create("pvc-2", mib)
		want := func(when string, lines int) {
			t.Helper()
			b.later(3 * time.Minute)
			if got := said.count("Failed to read a volume"); got != lines {
				t.Errorf("%s: the log has it %d times, want %d", when, got, lines)
			}
		}
		want("when all is well", 0)
		f.uncounted.Store(uint32(b.carried("pvc-1")))
		want("when one cannot be read", 1)
		if said.count("pvc-1") == 0 || said.count(errFault.Error()) == 0 {
			t.Error("the log reports neither which volume it is nor why")
		}
		if since := time.Since(b.Status()[0].LastError); since > time.Minute {
			t.Errorf("the last error was %v ago", since)
		}
		f.uncounted.Store(uint32(b.carried("pvc-2")))
		want("when it is another", 2)
		f.uncounted.Store(uint32(b.carried("pvc-1")))
		want("when it is the first again", 3)
	})
}
