package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
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
)

const sharedPool = `[{"name":"local","path":"pool","shared":true}]`

// withNodes runs a test on two nodes of a shared pool. What the second does about limits
// may be held up.
func withNodes(t *testing.T, test func(t *testing.T, one, two *harness, f *faulty)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.Quota = &quotatest.Fake{As: quota.XFS}
		one.start(sharedPool)
		f := &faulty{Fake: one.Quota}
		two := &harness{t: t, Node: one.Beside(), real: f.detect}
		two.startNode("node-2", sharedPool)
		test(t, one, two, f)
	})
}

// another is a node next to the first, with mounts and devices of its own.
func (h *harness) another(node string) *harness {
	h.t.Helper()
	n := &harness{t: h.t, Node: h.Beside()}
	n.OwnDev("dev-" + node)
	n.startNode(node, sharedPool)
	return n
}

// begin makes a call that is held up in its midst, until it is to finish or the test ends.
func (f *faulty) begin(t *testing.T, call func() error) (finish func() error) {
	until, ended := make(chan struct{}), make(chan error, 1)
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	wait := func() { <-until }
	f.meanwhile.Store(&wait)
	go func() { ended <- call() }()
	synctest.Wait()
	return func() error {
		release()
		return <-ended
	}
}

// background makes a call, and returns when that waits.
func background(call func() error) (ended <-chan error) {
	done := make(chan error, 1)
	go func() { done <- call() }()
	synctest.Wait()
	return done
}

// lockVolume takes the lock of a volume for another node.
func (h *harness) lockVolume(name string) (unlock func()) {
	h.t.Helper()
	unlock, err := pool.LockVolume(h.openOwn(), id(h.t, name))
	must.Succeed(h.t, err)
	return unlock
}

func (h *harness) openOwn() *dir.Dir {
	h.t.Helper()
	own := must.Value(dir.Open(h.Own()))(h.t)
	h.t.Cleanup(func() { must.Succeed(h.t, own.Close()) })
	return own
}

// makes is another node that has written the record of a volume, and ends with what is
// returned. It holds the lock all the time.
func (h *harness) makes(name string) (end func()) {
	h.t.Helper()
	unlock := h.lockVolume(name)
	must.Succeed(h.t, os.MkdirAll(h.Own("trash", "node-9"), 0o700))
	must.Succeed(h.t, os.MkdirAll(h.Own("creating", "node-9", name), 0o700))
	h.record(name, mib)
	return func() {
		must.Succeed(h.t, os.Rename(h.Own("creating", "node-9", name), h.Path("pool", name)))
		unlock()
	}
}

// record writes the record of a volume without a quota.
func (h *harness) record(name string, bytes int64) {
	h.t.Helper()
	record := fmt.Sprintf(`{"version":1,"id":%q,"uid":"0123456789abcdef","mode":"mount","bytes":%d,"created":"2026-11-20T18:56:54Z"}`+"\n", name, bytes)
	must.Succeed(h.t, os.WriteFile(h.Own("volumes", name+".json"), []byte(record), 0o600))
}

// wantWhole says that a volume has both a directory and a record, or neither.
func (h *harness) wantWhole(name string, want bool) {
	h.t.Helper()
	_, dirErr := os.Stat(h.Path("pool", name))
	_, recordErr := os.Stat(h.Own("volumes", name+".json"))
	if (dirErr == nil) != want || (recordErr == nil) != want {
		h.t.Errorf("of %s there are a directory (%v) and a record (%v), want both or neither: %v", name, dirErr, recordErr, want)
	}
}

func TestDeleteWhileOtherNodeCreates(t *testing.T) {
	withNodes(t, func(t *testing.T, one, _ *harness, _ *faulty) {
		end := one.makes("pvc-1")
		deleted := background(func() error { return one.Delete(t.Context(), id(t, "pvc-1")) })
		end()
		must.Succeed(t, <-deleted)
		one.wantWhole("pvc-1", false)
		one.wantVolumes()
	})
}

func TestPublishWhileOtherNodeCreates(t *testing.T) {
	withNodes(t, func(t *testing.T, one, _ *harness, _ *faulty) {
		end := one.makes("pvc-1")
		published := background(func() error { return one.publish("pvc-1", "a") })
		end()
		must.Succeed(t, <-published)
		one.wantWhole("pvc-1", true)
	})
}

func TestVolumeInWorkOnOtherNodeIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, said := newHarness(t, t.TempDir()), &diary{}
		b.each, b.log = true, funcr.New(said.write, funcr.Options{})
		b.start(sharedPool)
		tellsLost := func() bool {
			t.Helper()
			b.later(2 * time.Minute)
			v, err := b.Volume(t.Context(), id(t, "pvc-1"))
			if err != nil {
				wantError(t, err, volume.ErrNotFound)
			}
			surveyed := slices.ContainsFunc(b.Surveyed(), func(v pool.Surveyed) bool { return v.Condition.Abnormal })
			listed := slices.Contains(b.volumes(), "pvc-1")
			if v.Lost != surveyed || v.Lost != listed {
				t.Errorf("lost: %v, %v when surveyed and %v in a list; want it reported everywhere or nowhere", v.Lost, surveyed, listed)
			}
			return v.Lost
		}
		unlock := b.lockVolume("pvc-1")
		b.record("pvc-1", mib)
		if tellsLost() || said.count("is missing") > 0 {
			t.Error("what another node is at work on is reported as lost")
		}
		unlock()
		check := must.Value(pool.CheckVolume(b.openOwn(), id(t, "pvc-1")))(t)
		defer check()
		if !tellsLost() {
			t.Error("a record without a directory is not reported as lost, and no call is at work on it")
		}
	})
}

func TestExpandOnOtherNodeIsNotLimitMismatch(t *testing.T) {
	withNodes(t, func(t *testing.T, one, _ *harness, _ *faulty) {
		one.create("pvc-1", 10*mib)
		unlock := one.lockVolume("pvc-1")
		must.Succeed(t, one.Quota.Limit(one.open("pvc-1"), one.carried("pvc-1"), quota.Limit{Bytes: 20 * mib}))
		if v := one.volume("pvc-1"); v.Condition.Abnormal {
			t.Errorf("while another node is at work on it: %+v", v.Condition)
		}
		unlock()
		one.wantAbnormal("pvc-1", "limit")
	})
}

func TestPublishAfterRecreateOnOtherNode(t *testing.T) {
	withNodes(t, func(t *testing.T, one, two *harness, _ *faulty) {
		one.create("pvc-1", mib)
		trashed := "pvc-1." + uid(t, one, "pvc-1")
		unlock := one.lockVolume("pvc-1")
		published := background(func() error { return one.publish("pvc-1", "a") })
		must.Succeed(t, os.MkdirAll(one.Own("trash", "node-9"), 0o700))
		must.Succeed(t, os.Rename(one.Path("pool", "pvc-1"), one.Own("trash", "node-9", trashed)))
		must.Succeed(t, os.Mkdir(one.Path("pool", "pvc-1"), 0o777))
		one.record("pvc-1", mib)
		unlock()
		must.Succeed(t, <-published)
		at, err := one.Mounts.Open(one.Target("a"))
		must.Succeed(t, err)
		got, err := at.ID()
		must.Succeed(t, errors.Join(err, at.Close()))
		now, err := one.open("pvc-1").ID()
		must.Succeed(t, err)
		if got != now {
			t.Error("what is published is not what is in the pool now")
		}
		wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
	})
}

func TestPublishAfterDeleteOnOtherNode(t *testing.T) {
	withNodes(t, func(t *testing.T, one, two *harness, _ *faulty) {
		one.create("pvc-1", mib)
		unlock := one.lockVolume("pvc-1")
		published := background(func() error { return one.publish("pvc-1", "a") })
		must.Succeed(t, os.Remove(one.Own("volumes", "pvc-1.json")))
		must.Succeed(t, os.Remove(one.Path("pool", "pvc-1")))
		unlock()
		err := <-published
		wantError(t, err, volume.ErrNotFound)
		must.SayOnce(t, err.Error())
		wantGone(t, one.Path("pods", "a"))
		wantGone(t, one.Own("published", "node-1", "pvc-1"))
		two.wantVolumes()
	})
}

func TestConcurrentNodesSeeWholeVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.start(sharedPool)
		two := one.another("node-2")
		three := one.another("node-3") // no call of its own delays its checks
		var churn sync.WaitGroup
		for i, b := range []*harness{one, two} {
			churn.Go(func() {
				for range 30 {
					b.locked("pvc-1", func() { b.livesOnce("pvc-1", fmt.Sprint("on-", i)) })
				}
			})
		}
		done := make(chan struct{})
		go func() { churn.Wait(); close(done) }()
		for checks, running := 0, true; running; checks++ {
			select {
			case <-done:
				running = false
			default:
			}
			if checks%10 == 0 { // those who wait for a lock need time to go by, which it does not meanwhile
				time.Sleep(time.Millisecond)
			}
			page, _ := three.List(t.Context(), volume.ID{}, 10)
			if v, err := three.Volume(t.Context(), id(t, "pvc-1")); err == nil {
				page = append(page, v)
			}
			for _, v := range page {
				if v.Condition.Abnormal {
					t.Errorf("%s is reported as abnormal: %+v", v.ID, v.Condition)
				}
			}
		}
		one.wantVolumes()
		one.wantClean()
	})
}

// livesOnce makes a volume, publishes and removes it, as far as another node does not keep it
// from that.
func (h *harness) livesOnce(name, target string) {
	try := func(err error, allowed ...error) bool {
		if err != nil && !slices.ContainsFunc(allowed, func(a error) bool { return errors.Is(err, a) }) {
			h.t.Error(err)
		}
		return err == nil
	}
	_, err := h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Range: volume.Range{Required: mib}})
	try(err)
	if try(h.publish(name, target), volume.ErrNotFound, volume.ErrInUse) {
		try(h.publishedAsInPool(name, target))
		try(h.Publications().Unpublish(h.t.Context(), id(h.t, name), h.Target(target))) // by the caller's lock
	}
	try(h.Delete(h.t.Context(), id(h.t, name)), volume.ErrInUse, volume.ErrNotFound)
}

// publishedAsInPool fails if a target has something else than the pool.
func (h *harness) publishedAsInPool(name, target string) error {
	at, err := h.Mounts.Open(h.Target(target))
	if err != nil {
		return err
	}
	published, err := at.ID()
	inPool, poolErr := h.open(name).ID()
	if err := errors.Join(err, poolErr, at.Close()); err != nil {
		return err
	}
	if inPool != published {
		return fmt.Errorf("what is published of %s is not what is in the pool", name)
	}
	return nil
}

// Allocating a disk can take long, and a node can hang in its midst.
func TestSlowCreateDoesNotDelayOtherNodes(t *testing.T) {
	withNodes(t, func(t *testing.T, one, two *harness, f *faulty) {
		one.create("pvc-1", mib)
		one.create("pvc-2", mib)
		began := time.Now()
		finish := f.begin(t, func() error { _, err := two.tryCreateBlock("pvc-disk", mib); return err })
		must.Succeed(t, one.publish("pvc-1", "a"))
		must.Succeed(t, one.unpublish("pvc-1", "a"))
		one.delete("pvc-1")
		if waited := time.Since(began); waited > 0 {
			t.Errorf("calls on other volumes waited for %v", waited)
		}
		must.Succeed(t, os.WriteFile(one.Own("volumes", ".new-pvc-5.json"), nil, 0o600))
		must.Succeed(t, os.Mkdir(one.Own("creating", "node-1", "pvc-6"), 0o700))
		must.Succeed(t, os.MkdirAll(one.Own("published", "node-1"), 0o700))
		must.Succeed(t, os.WriteFile(one.Own("published", "node-1", ".new-pvc-2"), nil, 0o600))
		one.restart(sharedPool)
		if status := one.Status()[0]; status.Err != nil || time.Since(began) > 0 {
			t.Errorf("a start gives %v after %v", status.Err, time.Since(began))
		}
		one.wantClean()
		if left := names(t, one.Own("published", "node-1")); len(left) > 0 {
			t.Errorf("of marks %q are left", left)
		}
		ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
		defer stop()
		_, err := one.Create(ctx, pool.Request{ID: id(t, "pvc-3"), Range: volume.Range{Required: mib}})
		wantError(t, err, context.DeadlineExceeded) // one sells at a time
		must.Succeed(t, finish())
		one.create("pvc-3", mib)
		one.wantVolumes("pvc-2", "pvc-3", "pvc-disk")
	})
}

func TestPublishWhileExpandWaitsForCreate(t *testing.T) {
	withNodes(t, func(t *testing.T, one, two *harness, f *faulty) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		finish := f.begin(t, func() error { _, err := two.tryCreateBlock("pvc-disk", mib); return err })
		grown := background(func() error {
			return must.Err(one.Expand(t.Context(), id(t, "pvc-1"), one.Target("a"), "", volume.Range{Required: 2 * mib}))
		})
		began := time.Now()
		must.Succeed(t, two.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "pvc-1"), Target: two.Target("b"), MultiNode: true}))
		if waited := time.Since(began); waited > 0 {
			t.Errorf("publishing waited for %v", waited)
		}
		must.Succeed(t, finish())
		must.Succeed(t, <-grown)
	})
}

// Here the node that hangs has the lock of one volume.
func TestCreateWhileExpandWaitsForVolume(t *testing.T) {
	withNodes(t, func(t *testing.T, one, two *harness, _ *faulty) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		unlock := one.lockVolume("pvc-1")
		grown := background(func() error {
			return must.Err(one.Expand(t.Context(), id(t, "pvc-1"), one.Target("a"), "", volume.Range{Required: 2 * mib}))
		})
		began := time.Now()
		two.create("pvc-2", mib)
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("a creation waited for %v", waited)
		}
		unlock()
		must.Succeed(t, <-grown)
		if got := two.volume("pvc-1").Bytes; got != 2*mib {
			t.Errorf("it has %d bytes, want 2 MiB", got)
		}
	})
}

func TestVolumeLockWaitIsCanceled(t *testing.T) {
	withNodes(t, func(t *testing.T, one, _ *harness, _ *faulty) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		unlock := one.lockVolume("pvc-1")
		for name, call := range map[string]func(context.Context) error{
			"create": func(ctx context.Context) error {
				return must.Err(one.Create(ctx, pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}}))
			},
			"publish": func(ctx context.Context) error {
				return one.Publications().Publish(ctx, pool.Publication{ID: id(t, "pvc-1"), Target: one.Target("b")})
			},
			"expand": func(ctx context.Context) error {
				return must.Err(one.Expand(ctx, id(t, "pvc-1"), one.Target("a"), "", volume.Range{Required: 2 * mib}))
			},
			"delete": func(ctx context.Context) error { return one.Delete(ctx, id(t, "pvc-1")) },
		} {
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, want the end of its time", name, err)
			}
			stop()
		}
		must.Succeed(t, one.unpublish("pvc-1", "a")) // a pod can end, whatever other nodes do
		unlock()
		one.delete("pvc-1")
	})
}

func TestRecoverySkipsVolumeLockedByOtherNode(t *testing.T) {
	withNodes(t, func(t *testing.T, one, _ *harness, _ *faulty) {
		one.createBlock("pvc-disk", mib)
		one.create("pvc-1", 10*mib)
		must.Succeed(t, one.Close(t.Context()))
		var unlock []func()
		for _, name := range []string{"pvc-disk", "pvc-1", "pvc-5", "pvc-6", "pvc-7", "pvc-8"} {
			unlock = append(unlock, one.lockVolume(name))
		}
		must.Succeed(t, os.Truncate(one.Path("pool", "pvc-disk", "disk.img"), 2*mib))
		must.Succeed(t, one.Quota.Limit(one.open("pvc-1"), one.carried("pvc-1"), quota.Limit{Bytes: 20 * mib}))
		must.Succeed(t, os.WriteFile(one.Own("volumes", ".new-pvc-5.json"), nil, 0o600))
		must.Succeed(t, os.Mkdir(one.Own("creating", "node-1", "pvc-6"), 0o700))
		one.record("pvc-6", mib)
		must.Succeed(t, os.Mkdir(one.Own("trash", "node-1", "pvc-7.0123456789abcdef"), 0o700))
		one.record("pvc-7", mib)
		must.Succeed(t, os.MkdirAll(one.Own("published", "node-1"), 0o700))
		must.Succeed(t, os.WriteFile(one.Own("published", "node-1", ".new-pvc-8"), nil, 0o600))
		left := func() []string {
			return slices.Concat(names(t, one.Own("volumes")), names(t, one.Own("creating", "node-1")), names(t, one.Own("trash", "node-1")), names(t, one.Own("published", "node-1")))
		}
		all := left()
		one.start(sharedPool)
		if status := one.Status()[0]; status.Err != nil {
			t.Errorf("the pool does not serve: %v", status.Err)
		}
		one.later(5 * time.Minute)
		if now := left(); !slices.Equal(now, all) {
			t.Errorf("there is %q, want what others are at work on: %q", now, all)
		}
		if got := one.limitOf("pvc-1"); got != 20*mib {
			t.Errorf("the limit is %d, and another node has made it 20 MiB", got)
		}
		if got := one.volume("pvc-disk").Bytes; got != mib {
			t.Errorf("a disk that another node makes larger has the size %d, want 1 MiB", got)
		}
		for _, f := range unlock {
			f()
		}
		one.later(5 * time.Minute)
		one.wantClean()
		if got := one.limitOf("pvc-1"); got != 10*mib {
			t.Errorf("the limit is %d, want 10 MiB", got)
		}
		if got := one.volume("pvc-disk").Bytes; got != 2*mib {
			t.Errorf("a disk of 2 MiB has the size %d", got)
		}
		if got := names(t, one.Own("published", "node-1")); len(got) > 0 {
			t.Errorf("marks %q, want none", got)
		}
	})
}

// A driver that does not use the pool with others has no locks for that.
func TestUnsharedPoolTakesNoFileLocks(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		own, err := dir.Open(h.Own())
		must.Succeed(t, err)
		unlock, err := dir.Lock(t.Context(), own, "lock") // who wants one too waits in vain
		must.Succeed(t, err, own.Close())
		defer unlock()
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		_, err = h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 2 * mib})
		must.Succeed(t, err)
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
		must.Succeed(t, os.WriteFile(h.Own("volumes", ".new-pvc-5.json"), nil, 0o600))
		h.restart(local)
		h.wantClean()
	})
}
