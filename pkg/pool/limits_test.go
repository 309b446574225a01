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
func withFaults(t *testing.T, datadir string, test func(t *testing.T, b *harness, f *faulty)) {
	t.Helper()
	withFaultsAt(t, t.TempDir(), datadir, test)
}

func withFaultsAt(t *testing.T, root, datadir string, test func(t *testing.T, b *harness, f *faulty)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		f := &faulty{Fake: &quotatest.Fake{As: quota.XFS}}
		h.Quota, h.real = f.Fake, f.detect
		h.start(datadir)
		test(t, h, f)
	})
}

// carried is the id of a directory of the pool.
func (h *harness) carried(name string) quota.ID {
	h.t.Helper()
	id := must.Value(h.Quota.IDOf(h.open(name)))(h.t)
	return id
}

func (h *harness) limitOf(name string) int64 {
	h.t.Helper()
	usage := must.Value(h.Quota.Usage(h.open(name), h.carried(name)))(h.t)
	return usage.Limit.Bytes
}

func (h *harness) volume(name string) pool.Volume {
	h.t.Helper()
	v := must.Value(h.Volume(h.t.Context(), id(h.t, name)))(h.t)
	return v
}

// wantFirstID makes a volume and expects it to have the lowest id there is: nothing
// else has it any more.
func (h *harness) wantFirstID(name string) {
	h.t.Helper()
	h.create(name, mib)
	if got := h.carried(name); got != quota.FirstID {
		h.t.Errorf("the id of %s is %#x, want %#x: another was not given back", name, got, quota.FirstID)
	}
}

func (h *harness) wantAbnormal(name, says string) {
	h.t.Helper()
	v := h.volume(name)
	if v.Enforced || !v.Condition.Abnormal || !strings.Contains(v.Condition.Message, says) {
		h.t.Errorf("volume %+v, want it abnormal for %q and not enforced", v, says)
	}
}

// A call or a survey that looks at a volume does not keep another from seeing what it sees.
func TestChecksAtTheSameMomentReportSameCondition(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: 8 * mib}))
		until := make(chan struct{})
		underLock := func() { <-until }
		before := func() { f.asked.Store(&underLock) } // the first look, without the lock
		f.asked.Store(&before)
		look := func() error {
			h.wantAbnormal("pvc-1", "limit")
			return nil
		}
		one := background(look)
		two := background(look)
		close(until)
		must.Succeed(t, <-one, <-two)
	})
}

func TestSlowOpenIsNotHung(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		for i := range 20 {
			h.create(fmt.Sprintf("pvc-%d", i), mib)
		}
		f.slow.Store(true)
		h.restart(local) // waits until it was checked, or that takes long
		if err := h.Status()[0].Err; !errors.Is(err, volume.ErrUnavailable) || strings.Contains(err.Error(), "hangs") {
			t.Errorf("error %v, want one that reports the opening", err)
		}
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "new"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrUnavailable)
		if errors.Is(err, volume.ErrNoSpace) {
			t.Errorf("%v would send the claim to another node", err)
		}
		f.slow.Store(false)
		h.later(time.Minute)
		h.create("new", mib)
	})
}

func TestQuotasLostAndRestored(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", 10*mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		f.off.Store(true)
		h.later(time.Minute)
		if h.Status()[0].Enforced {
			t.Error("the pool is still said to be enforced")
		}
		h.wantAbnormal("pvc-1", "quotas of xfs")
		if v := h.create("pvc-2", mib); v.Enforced {
			t.Error("a volume without a limit is said to be enforced")
		}
		_, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 20 * mib})
		wantError(t, err, volume.ErrCannotGrow)

		must.Succeed(t, f.Fake.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: mib}))
		f.off.Store(false)
		h.later(time.Minute)
		if got := h.limitOf("pvc-1"); got != 10*mib {
			t.Errorf("the limit is %d, want it put back", got)
		}
		if status := h.Status()[0]; !status.Enforced || status.Restored != 1 {
			t.Errorf("status %+v, want the pool enforced and one limit put back", status)
		}
		if v := h.volume("pvc-1"); !v.Enforced || v.Condition.Abnormal {
			t.Errorf("volume %+v, want it enforced and in order", v)
		}
	})
}

func TestRequiredQuotasLostStopsPool(t *testing.T) {
	withFaults(t, `[{"name":"local","path":"pool","enforcement":"required"}]`, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		f.off.Store(true)
		h.later(time.Minute)
		if err := h.Status()[0].Err; !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), "switch them on") {
			t.Errorf("error %v, want one that says what to do", err)
		}
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		if got := h.capacity(); got != 0 {
			t.Errorf("capacity %d, want none", got)
		}
		f.off.Store(false)
		h.later(time.Minute)
		h.create("pvc-2", mib)
	})
}

func TestQuotasOffKeepsExistingLimits(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, _ *faulty) {
		h.create("pvc-1", 10*mib)
		h.restart(`[{"name":"local","path":"pool","enforcement":"none"}]`)
		if v := h.create("pvc-2", mib); v.Enforced || h.carried("pvc-2") != 0 {
			t.Errorf("volume %+v with id %d, want no limit", v, h.carried("pvc-2"))
		}
		must.Succeed(t, h.publish("pvc-1", "a"))
		bytes := must.Value(h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 20 * mib}))(t)
		if bytes != 20*mib || h.limitOf("pvc-1") != 20*mib || !h.volume("pvc-1").Enforced {
			t.Errorf("expanded to %d under a limit of %d, want 20 MiB", bytes, h.limitOf("pvc-1"))
		}
		if h.Status()[0].Enforced {
			t.Error("the pool is said to be enforced")
		}
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
		h.settled()
		h.restart(local)
		h.wantFirstID("pvc-3")
	})
}

func TestLimitBeingChangedIsNotReported(t *testing.T) {
	withQuota(t, "", func(t *testing.T, h *harness) {
		h.create("pvc-1", 10*mib)
		must.Succeed(t, h.Quota.Limit(h.open("pvc-1"), h.carried("pvc-1"), quota.Limit{Bytes: 20 * mib}))
		unlock := must.Value(h.Lock(id(t, "pvc-1")))(t)
		if v := h.volume("pvc-1"); v.Condition.Abnormal || !v.Enforced {
			t.Errorf("volume %+v, want it in order while a call works on it", v)
		}
		unlock()
		h.wantAbnormal("pvc-1", "limit")
	})
}

func TestProjectIDIsReleasedAfterFailedCreate(t *testing.T) {
	for when, fault := range map[string]func(*faulty) *atomic.Bool{
		"before the directory had it": func(f *faulty) *atomic.Bool { return &f.failBefore },
		"after the directory had it":  func(f *faulty) *atomic.Bool { return &f.failAfter },
	} {
		t.Run(when, func(t *testing.T) {
			withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
				fault(f).Store(true)
				_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
				wantError(t, err, errFault)
				fault(f).Store(false)
				h.later(time.Minute)
				h.wantClean()
				h.wantFirstID("pvc-2")
			})
		})
	}
}

func TestProjectIDOfLostVolumeIsReleased(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, _ *faulty) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Remove(h.Path("pool", "pvc-1")))
		h.delete("pvc-1")
		h.wantFirstID("pvc-2")
	})
}

func TestProjectIDReleaseIsRetried(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		f.failEnd.Store(true)
		h.delete("pvc-1")
		h.settled()
		if status := h.Status()[0]; status.Trash.Stuck != 1 {
			t.Errorf("status %+v, want one piece stuck", status)
		}
		f.failEnd.Store(false)
		h.later(2 * time.Hour)
		h.wantClean()
		h.wantFirstID("pvc-2")
	})
}

func TestOrphanLimitIsReleasedAtStart(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		carried := h.carried("pvc-1")
		// Removed while no driver could see to its limit.
		f.off.Store(true)
		h.later(time.Minute)
		h.delete("pvc-1")
		h.settled()
		h.Quota.Removed(carried)
		f.off.Store(false)
		h.restart(local)
		h.wantFirstID("pvc-2")
	})
}

func TestProjectIDInTwoRecords(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, _ *faulty) {
		h.create("pvc-2", 10*mib)
		data := must.Value(os.ReadFile(h.Own("volumes", "pvc-2.json")))(t)
		// Copies on either side of the alphabet, since records are read in any order.
		for _, name := range []string{"pvc-1", "pvc-3"} {
			must.Succeed(t, os.Mkdir(h.Path("pool", name), 0o777))
			copied := strings.Replace(string(data), `"pvc-2"`, `"`+name+`"`, 1)
			copied = regexp.MustCompile(`"uid":"\w+"`).ReplaceAllString(copied, `"uid":"copy`+name+`"`)
			must.Succeed(t, os.WriteFile(filepath.Join(h.Own("volumes"), name+".json"), []byte(copied), 0o600))
		}
		h.restart(local)
		for _, name := range []string{"pvc-1", "pvc-3"} {
			h.wantAbnormal(name, "quotas")
			h.delete(name)
		}
		h.settled()
		if v := h.volume("pvc-2"); !v.Enforced || v.Condition.Abnormal || h.limitOf("pvc-2") != 10*mib {
			t.Errorf("volume %+v under a limit of %d, want it in order", v, h.limitOf("pvc-2"))
		}
	})
}

func TestTrashIsRemovedAfterQuotasAreLost(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		f.failEnd.Store(true)
		h.delete("pvc-1")
		h.settled()
		f.off.Store(true)
		h.later(2 * time.Hour)
		h.wantClean()
	})
}

func TestRestoredLimitsKeepExpansion(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		names := []string{"pvc-1", "pvc-2", "pvc-3", "pvc-4"}
		for _, name := range names {
			h.create(name, 10*mib)
			must.Succeed(t, h.publish(name, name))
		}
		f.off.Store(true)
		h.later(time.Minute)
		f.off.Store(false)
		f.slow.Store(true)
		for !h.Status()[0].Enforced {
			h.later(100 * time.Millisecond)
		}
		for _, name := range names {
			unlock, err := h.Lock(id(t, name))
			if err != nil {
				continue // the limit being changed is this one
			}
			_, err = h.Expand(t.Context(), id(t, name), h.Target(name), "", volume.Range{Required: 20 * mib})
			must.Succeed(t, err)
			unlock()
		}
		f.slow.Store(false)
		h.later(time.Minute)
		for _, name := range names {
			if v := h.volume(name); h.limitOf(name) != v.Bytes || v.Condition.Abnormal {
				t.Errorf("%s has a limit of %d and was promised %d: %v", name, h.limitOf(name), v.Bytes, v.Condition)
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
		h := newHarness(t, root)
		quotas := map[string]*quotatest.Fake{"one": {As: quota.XFS}, "two": {As: quota.XFS}}
		h.real = func(d *dir.Dir) (quota.Facility, error) { return quotas[filepath.Base(filepath.Dir(d.String()))], nil }
		one, two := `{"name":"one","path":"one/pool"}`, `{"name":"two","path":"two/pool"}`
		h.start("[" + one + "]")
		h.create("pvc-1", mib)
		h.restart("[" + two + "]")
		h.create("pvc-2", mib)
		h.restart("[" + one + "," + two + "]")
		for _, name := range []string{"pvc-1", "pvc-2"} {
			must.Succeed(t, h.publish(name, name))
			must.Succeed(t, must.Err(h.Expand(t.Context(), id(t, name), h.Target(name), "", volume.Range{Required: 2 * mib})))
			if v := h.volume(name); !v.Enforced || v.Condition.Abnormal {
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
	withFaultsAt(t, testenv.Tmpfs(t, 300*mib), local, func(t *testing.T, h *harness, f *faulty) {
		must.Succeed(t, os.WriteFile(h.Path("foreign"), make([]byte, 80*mib), 0o600))
		h.create("full", 80*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "full", "data"), make([]byte, 80*mib), 0o600))
		must.Succeed(t, h.write("full", 80*mib))
		h.create("empty", 80*mib)
		deleted := func() {
			must.Succeed(t, h.Delete(context.Background(), id(t, "full")))
			time.Sleep(time.Second) // the reaper's, and the bubble's
		}
		h.later(time.Minute)
		f.meanwhile.Store(&deleted)
		h.later(2 * time.Minute)
		h.wantVolumes("empty")
		if got := h.capacity(); got > 140*mib {
			t.Errorf("capacity %d, want 140 MiB at most: 80 are promised and 80 foreign, of 300", got)
		}
	})
}

// A panic ends one call, and the process lives: what the call held must not be lost to all
// others.
func TestPanicReleasesReservation(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", 4*mib)
		h.createBlock("pvc-disk", 4*mib)
		must.Succeed(t, h.publishBlock("pvc-disk", "disk"))
		for name, call := range map[string]func() error{
			"a creation": func() error {
				return must.Err(h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}}))
			},
			"an expansion": func() error {
				return must.Err(h.Expand(t.Context(), id(t, "pvc-disk"), h.Target("disk"), volume.ModeBlock, volume.Range{Required: 8 * mib}))
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
			if promised := h.Status()[0].Promised; promised != 8*mib {
				t.Errorf("after %s %d bytes are promised, want %d", name, promised, 8*mib)
			}
			h.wantVolumes("pvc-1", "pvc-disk")
		}
		h.create("pvc-2", mib)
	})
}

// Its alert has people read the log.
func TestUnreadableVolumeIsLoggedOnce(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		said := &diary{}
		h.log = funcr.New(said.write, funcr.Options{})
		h.restart(local)
		h.create("pvc-1", mib)
		h.create("pvc-2", mib)
		want := func(when string, lines int) {
			t.Helper()
			h.later(3 * time.Minute)
			if got := said.count("Failed to read a volume"); got != lines {
				t.Errorf("%s: the log has it %d times, want %d", when, got, lines)
			}
		}
		want("when all is well", 0)
		f.uncounted.Store(uint32(h.carried("pvc-1")))
		want("when one cannot be read", 1)
		if said.count("pvc-1") == 0 || said.count(errFault.Error()) == 0 {
			t.Error("the log reports neither which volume it is nor why")
		}
		if since := time.Since(h.Status()[0].LastError); since > time.Minute {
			t.Errorf("the last error was %v ago", since)
		}
		f.uncounted.Store(uint32(h.carried("pvc-2")))
		want("when it is another", 2)
		f.uncounted.Store(uint32(h.carried("pvc-1")))
		want("when it is the first again", 3)
	})
}
