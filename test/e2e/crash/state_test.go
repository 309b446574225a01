package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// capacitySlack is what the filesystem itself may take or give, and the step in which
// capacity is reported. No volume is as small.
const capacitySlack = 4 * mib

// ledgerBound is how long the ledger may take to notice what is gone. It is below the
// minute after which the driver compares its memory with the disk: that would correct a
// ledger that is wrong.
const ledgerBound = 30 * time.Second

// wantState expects the victim to be in one of some states, the pool to be in order for
// that, and the volumes of others to be as they were.
func (w *world) wantState(where string, possible ...state) {
	w.Helper()
	is := w.observe()
	w.now = is
	if !slices.Contains(possible, is) {
		w.Errorf("%s: the volume is %+v, want one of %+v", where, is, possible)
	}
	all := w.expected(is)
	if err := errors.Join(w.pool.Problems(all), w.content(all), w.capacityIs(is)); err != nil {
		w.Errorf("%s: the volume is %+v, but:\n%v", where, is, err)
	}
}

// kept is what there should be of a volume in a state.
func kept(id string, s state) drivertest.Kept {
	k := drivertest.Kept{Volume: asked(id, s.block, s.bytes)}
	k.Inline = s.inline
	if s.published {
		k.Pods = []string{id}
	}
	return k
}

func (w *world) expected(victimIs state) []drivertest.Kept {
	var all []drivertest.Kept
	for _, o := range others {
		all = append(all, kept(o.id, state{bytes: o.bytes, block: o.block, published: true}))
	}
	if victimIs != (state{}) {
		all = append(all, kept(victim, victimIs))
	}
	return all
}

// observe finds what there is of the victim, by what the disk and the kernel have.
func (w *world) observe() state {
	w.Helper()
	var is state
	r, err := w.pool.Record(victim)
	if errors.Is(err, os.ErrNotExist) {
		return is
	}
	w.Must(err)
	is.bytes, is.block, is.inline = r.Bytes, r.Mode == "block", r.Inline
	mounts, err := mountns.Below(w.Targets)
	w.Must(err)
	is.published = slices.Contains(mounts, w.Target(victim))
	return is
}

// content expects what users wrote, in each volume that is published.
func (w *world) content(all []drivertest.Kept) error {
	var problems []error
	for _, v := range all {
		switch {
		case len(v.Pods) == 0:
		case v.Block:
			problems = append(problems, w.has(v, w.Target(v.ID)))
		default:
			problems = append(problems, w.has(v, filepath.Join(w.Target(v.ID), "file")))
		}
	}
	return errors.Join(problems...)
}

// has expects what users wrote, and that they can write. An inline volume is new each
// time.
func (w *world) has(v drivertest.Kept, path string) error {
	if v.Inline {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) && v.ID == victim && !w.filled {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.Read(got); err != nil {
		return err
	}
	if string(got) != content && (v.ID != victim || w.filled) {
		return fmt.Errorf("%s has the content %q", path, got)
	}
	if _, err := f.WriteAt(got, 0); err != nil {
		return err
	}
	return f.Sync()
}

// capacityOf learns what the pool has left in a state that no crash has led to. It has to
// agree with what is known of others: a single check may come before the reaper has entered
// into the ledger what it removed on the way to this state.
func (w *world) capacityOf(s state) {
	w.Helper()
	if w.now != s {
		w.Fatalf("the volume is %+v, not %+v", w.now, s)
	}
	w.Must(w.capacityIs(s))
	if w.place.kind == quota.Btrfs {
		w.Must(w.pool.Settle())
		w.Must(errors.Join(w.Process.Stop(), w.Process.Restart(w.Context())))
	}
	w.capacities[s] = w.capacity()
}

func (w *world) capacity() int64 {
	w.Helper()
	got, err := w.Capacity(w.Context(), "local")
	w.Must(err)
	return got
}

// capacityIs expects the ledger to have what the records sum up to: what the pool had
// left without a crash.
func (w *world) capacityIs(s state) error {
	all := int64(-1)
	for known, capacity := range w.capacities {
		all = capacity + known.bytes
	}
	if all < 0 {
		return nil
	}
	want := all - s.bytes
	near := func() bool {
		got := w.capacity()
		return got > want-capacitySlack && got < want+capacitySlack
	}
	if w.place.kind == quota.Btrfs {
		// It counts behind, and what others hold is counted once a minute and at the start.
		for range 2 {
			if near() {
				return nil
			}
			w.Must(w.pool.Settle())
		}
		w.Must(errors.Join(w.Process.Stop(), w.Process.Restart(w.Context())))
	}
	// What is free is no number of the driver's, and the reaper, which has emptied the
	// trash, is about to update the ledger.
	for deadline := time.Now().Add(ledgerBound); !near(); w.Must(w.pool.Settle()) {
		if time.Now().After(deadline) {
			return fmt.Errorf("the capacity is %d bytes, want %d", w.capacity(), want)
		}
	}
	return nil
}

// wantNothingLeft expects an empty pool, after all volumes were deleted.
func (w *world) wantNothingLeft() {
	w.Helper()
	w.Must(w.pool.Holds(nil))
	w.Must(w.pool.MountedAndAttached(nil))
	var left []string
	for _, id := range []string{others[0].id, others[1].id, victim} {
		names, err := drivertest.Names(filepath.Dir(w.Target(id)))
		w.Must(err)
		left = append(left, names...)
	}
	if len(left) > 0 {
		w.Errorf("after all was removed there is still %q", left)
	}
}
