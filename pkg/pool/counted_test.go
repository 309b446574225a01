package pool_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// onCounted runs a test on a node whose pools are on one filesystem of 256 MiB, with quotas. A volume of 100 MiB is
// in the pool b, and others hold 120 MiB that were not there when the pools were made: so 36 MiB can be promised.
func onCounted(t *testing.T, test func(t *testing.T, b *harness)) {
	t.Helper()
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.Ext4}
		h.start(neighbours)
		h.createIn("b", "pvc-b", 100*mib)
		must.Succeed(t, os.WriteFile(h.Path("others"), make([]byte, 120*mib), 0o600))
		h.later(2 * time.Minute)
		h.wantCapacity("a", 36, 2)
		test(t, h)
	})
}

// A meeting is a quota that has two pools be opened at once: neither serves yet when the other counts what they hold.
type meeting struct {
	*quotatest.Fake
	a      string        // the path of one pool
	counts chan struct{} // closed when the other counts
	ready  chan struct{} // closed when that may go on
	used   int           // how often it has asked for its volume
}

func (m *meeting) ReleaseUnused(fs *dir.Dir, taken func(quota.ID) bool) (int, error) {
	if fs.String() == m.a {
		<-m.counts
	}
	return m.Fake.ReleaseUnused(fs, taken)
}

func (m *meeting) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	if m.used++; m.used == 2 { // it has restored the limit before
		close(m.counts)
		<-m.ready
	}
	return m.Fake.Usage(d, id)
}

// What others hold is counted before anything is promised, also if the pools are opened at once.
func TestOthersAreCountedWhenPoolsAreOpenedAtOnce(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		m := &meeting{Fake: h.Quota, a: h.Path("a"), counts: make(chan struct{}), ready: make(chan struct{})}
		h.real = func(*dir.Dir) (quota.Facility, error) { return m, nil }
		h.begin("node-1", neighbours)
		h.later(time.Second)
		close(m.ready)
		must.Succeed(t, h.Wait(t.Context()))
		h.wantCapacity("a", 36, 2)
		h.wantCapacity("b", 36, 2)
	})
}

// What others hold is counted beside a pool that does not serve.
func TestOthersAreCountedBesidePoolThatAnotherDriverServes(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		h.start(`[{"name":"b","path":"b"}]`)
		two := h.second("node-1", neighbours)
		two.wantCapacity("a", 36, 2)
		must.Succeed(t, os.WriteFile(h.Path("more"), make([]byte, 10*mib), 0o600))
		two.later(2 * time.Minute)
		two.wantCapacity("a", 26, 2)
	})
}

// A swing is a quota under which a volume holds 90 MiB whenever it is counted, and nothing before and after.
type swing struct {
	*quotatest.Fake
	swings *dir.Dir // the volume
	id     quota.ID
	in     string // the path of its pool, which is what is asked when all volumes are counted
	file   *quotatest.FakeFile
	err    error
}

func (s *swing) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	data := filepath.Join(s.swings.String(), "data")
	switch {
	case d.String() != s.in:
	case id == s.id:
		s.err = errors.Join(s.err, os.WriteFile(data, make([]byte, 90*mib), 0o600))
		_, err := s.file.Write(90 * mib)
		s.err = errors.Join(s.err, err)
	default:
		s.err = errors.Join(s.err, os.Remove(data), s.file.Remove())
	}
	return s.Fake.Usage(d, id)
}

// A pod that writes and erases all the time does not hide what others hold.
func TestVolumeThatIsFullForAMomentHidesNothing(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		h.createIn("b", "pvc-c", mib)
		d, err := dir.Open(h.Path("b", "pvc-b"))
		must.Succeed(t, err)
		defer func() { must.Succeed(t, d.Close()) }()
		file, err := h.Quota.Create(d)
		must.Succeed(t, err)
		must.Succeed(t, h.Close(t.Context()))
		s := &swing{Fake: h.Quota, swings: d, id: h.projectIn("b", "pvc-b"), in: h.Path("b"), file: file}
		h.real = func(*dir.Dir) (quota.Facility, error) { return s, nil }
		h.start(neighbours)
		for range 3 {
			h.wantCapacity("a", 35, 2)
			h.later(time.Minute)
		}
		must.Succeed(t, s.err)
	})
}

// A pod that copies a file in its volume by reference, as cp(1) does where it can, has it counted twice. On the disk it is once, and
// the second does not hide what others hold.
func TestReflinkInVolumeHidesNothing(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		must.Succeed(t, os.WriteFile(h.Path("b", "pvc-b", "data"), make([]byte, 40*mib), 0o600))
		for of, bytes := range map[string]int64{h.Path(): 120 * mib, h.Path("b", "pvc-b"): 80 * mib} {
			d := must.Value(dir.Open(of))(t)
			must.Succeed(t, h.Quota.Write(d, bytes), d.Close())
		}
		h.later(2 * time.Minute)
		h.wantCapacity("a", 36, 2)
		if got := *h.inspect(neighbours)[0].AvailableBytes / mib; got > 36 || got < 34 {
			t.Errorf("inspect reports %d MiB available, want 36", got)
		}
	})
}

// A torn quota cannot read what one volume holds.
type torn struct {
	*quotatest.Fake
	id quota.ID
	in string // the path of its pool
}

func (q *torn) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	if d.String() == q.in && id == q.id {
		return quota.Usage{}, syscall.EIO
	}
	return q.Fake.Usage(d, id)
}

// A volume that cannot be counted does not hide what others hold, which is counted on.
func TestOthersAreCountedBesideUnreadableVolume(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		q := &torn{Fake: h.Quota, id: h.projectIn("b", "pvc-b"), in: h.Path("b")}
		h.real = func(*dir.Dir) (quota.Facility, error) { return q, nil }
		h.restart(neighbours)
		h.wantCapacity("a", 36, 2)
		must.Succeed(t, os.WriteFile(h.Path("more"), make([]byte, 10*mib), 0o600))
		h.later(2 * time.Minute)
		h.wantCapacity("a", 26, 2)
	})
}

// projectIn is what a volume of a pool is counted by.
func (h *harness) projectIn(in, name string) quota.ID {
	h.t.Helper()
	d, err := dir.Open(h.Path(in, name))
	must.Succeed(h.t, err)
	defer func() { must.Succeed(h.t, d.Close()) }()
	id, err := h.Quota.IDOf(d)
	must.Succeed(h.t, err)
	return id
}

// A crowd is a quota that needs longer to ask for what is beside the volumes than checks have, as an XFS whose users had a hundred thousand
// projects.
type crowd struct {
	*quotatest.Fake
	until time.Time
}

func (c crowd) Beside(fs *dir.Dir) (quota.Usage, error) {
	time.Sleep(time.Until(c.until)) // the bubble's time
	return c.Fake.Beside(fs)
}

// What is not known yet is not promised, and keeps no pool from being served.
func TestPoolIsServedWhileOthersAreCounted(t *testing.T) {
	onCounted(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		crowd := crowd{h.Quota, time.Now().Add(29 * time.Second)}
		h.real = func(*dir.Dir) (quota.Facility, error) { return crowd, nil }
		data := h.Path("b", "pvc-b", "data")
		must.Succeed(t, os.WriteFile(data, make([]byte, 30*mib), 0o600))
		d := must.Value(dir.Open(h.Path("b", "pvc-b")))(t)
		must.Succeed(t, h.Quota.Write(d, 30*mib), d.Close())
		h.begin("node-1", neighbours)
		h.later(4 * time.Second)
		for _, status := range h.Status() {
			must.Succeed(t, status.Err)
		}
		h.wantCapacity("a", 6, 2)
		h.later(3 * time.Minute)
		h.wantCapacity("a", 36, 2)
	})
}

// Files of a volume that share blocks are charged for them in full. That hides nothing of what the filesystem keeps for itself.
func TestSharedBlocksHideNoReserve(t *testing.T) {
	testenv.NeedRoot(t)
	for _, kind := range []quota.Kind{quota.XFS, quota.Ext4} {
		t.Run(string(kind), func(t *testing.T) {
			root := testenv.LoopFS(t, string(kind), 1<<30)
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, root)
				h.Quota = &quotatest.Fake{As: kind}
				h.start(local)
				h.create("pvc-1", 200*mib)
				h.later(2 * time.Minute)
				before := h.capacity()
				d := must.Value(dir.Open(h.Path("pool", "pvc-1")))(t)
				must.Succeed(t, h.Quota.Write(d, 199*mib), d.Close())
				h.later(2 * time.Minute)
				if after := h.capacity(); after > before+4*mib {
					t.Errorf("the capacity has grown from %d to %d MiB", before/mib, after/mib)
				}
			})
		})
	}
}
