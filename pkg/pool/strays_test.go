package pool_test

import (
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
)

// escaping is a facility whose directories have so many files that are not in their limit.
type escaping struct {
	quota.Facility
	files, strays, unseen atomic.Int64
	broken                atomic.Bool
}

func (e *escaping) Strays(_ *dir.Dir, _ quota.ID, step func() error) (quota.Strays, error) {
	found := quota.Strays{Outside: int(e.strays.Load()), Unseen: int(e.unseen.Load())}
	for range e.files.Load() {
		if err := step(); err != nil {
			return found, err
		}
	}
	if e.broken.Load() {
		return found, syscall.EIO
	}
	return found, nil
}

// inEscaping runs a test on a pool with quotas of XFS whose files can leave them.
func inEscaping(t *testing.T, test func(t *testing.T, b *harness, e *escaping, said *diary)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b, said := newHarness(t, t.TempDir()), &diary{}
		e := &escaping{Facility: &quotatest.Fake{As: quota.XFS}}
		b.real = func(*dir.Dir) (quota.Facility, error) { return e, nil }
		b.log = funcr.New(said.write, funcr.Options{})
		b.start(local)
		test(t, b, e, said)
	})
}

func (h *harness) wantOutside(name, says string) {
	h.t.Helper()
	if c := h.volume(name).Condition; c.Reason != health.OutsideLimit || !strings.Contains(c.Message, says) {
		h.t.Errorf("volume %s is %+v, want it to have %s outside its limit", name, c, says)
	}
}

func TestStraysMakeVolumeAbnormal(t *testing.T) {
	inEscaping(t, func(t *testing.T, h *harness, e *escaping, said *diary) {
		h.create("pvc-1", mib)
		h.createBlock("pvc-disk", mib)
		e.strays.Store(3)
		h.later(2 * time.Minute)
		h.wantOutside("pvc-1", "3 files")
		if c := h.volume("pvc-disk").Condition; c.Abnormal {
			t.Errorf("a block volume, whose file no pod reaches, is %+v", c)
		}
		h.later(time.Minute) // a survey
		if got := h.Status()[0].Abnormal[health.OutsideLimit]; got != 1 {
			t.Errorf("%d volumes are counted, want 1", got)
		}
		h.later(2 * time.Hour)
		if got := said.count("outside its limit"); got != 1 {
			t.Errorf("it is logged %d times, want once", got)
		}
		e.strays.Store(0)
		h.later(2 * time.Hour)
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("when the files are back it is %+v", c)
		}
	})
}

// A search takes its time, and stops at the end of that or of the driver.
func TestSearchForStraysIsBounded(t *testing.T) {
	inEscaping(t, func(t *testing.T, h *harness, e *escaping, _ *diary) {
		h.create("pvc-1", mib)
		e.files.Store(256 * 10 * 60 * 5) // 5 minutes
		e.strays.Store(1)
		h.later(5 * time.Minute)
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Error("all files were looked at faster than that is bounded")
		}
		h.later(2 * time.Minute)
		h.wantOutside("pvc-1", "1 file or directory")

		e.files.Store(1 << 40)
		e.strays.Store(2)
		h.later(time.Hour + 12*time.Minute) // what was seen of it counts
		h.wantOutside("pvc-1", "2 files")
		h.later(time.Hour) // in the midst of the next
		h.restart(local)
	})
}

// A volume that takes the name of one that is gone has its own files.
func TestStraysEndWithTheirVolume(t *testing.T) {
	inEscaping(t, func(t *testing.T, h *harness, e *escaping, _ *diary) {
		h.create("pvc-1", mib)
		e.strays.Store(1)
		h.later(2 * time.Minute)
		h.wantOutside("pvc-1", "1 file or directory")
		h.delete("pvc-1")
		e.strays.Store(0)
		h.create("pvc-1", mib)
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("a new volume is %+v", c)
		}
	})
}

// What could not be looked at is not said to be in its limit.
func TestSearchThatDoesNotSeeAllIsReported(t *testing.T) {
	inEscaping(t, func(t *testing.T, h *harness, e *escaping, said *diary) {
		h.create("pvc-1", mib)
		h.files = true
		want := func(words string) {
			t.Helper()
			if c := h.volume("pvc-1").Condition; c.Abnormal || !strings.Contains(c.Message, words) {
				t.Errorf("the volume is %+v, want %q", c, words)
			}
			if c := h.seen(local); c.Abnormal || !strings.Contains(c.Message, words) {
				t.Errorf("inspect --files reports %+v, want %q", c, words)
			}
		}
		e.unseen.Store(2)
		h.later(2 * time.Minute)
		want("2 files could not be checked")
		e.broken.Store(true)
		h.later(time.Hour + time.Minute)
		want("search for files outside its limit failed: input/output error")
		if got := said.count("could not be checked for being outside its limit"); got != 2 {
			t.Errorf("it is logged %d times, want twice", got)
		}
		e.unseen.Store(0)
		e.broken.Store(false)
		h.later(time.Hour + time.Minute)
		want("in order")
		e.strays.Store(4)
		if c := h.seen(local); c.Reason != health.OutsideLimit || !strings.Contains(c.Message, "4 files") {
			t.Errorf("inspect --files reports %+v, want 4 files outside", c)
		}
	})
}
