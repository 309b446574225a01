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
func (h *harness) wantState(where string, possible ...state) {
	h.Helper()
	is := h.observe()
	h.now = is
	if !slices.Contains(possible, is) {
		h.Errorf("%s: the volume is %+v, want one of %+v", where, is, possible)
	}
	all := h.expected(is)
	if err := errors.Join(h.pool.Problems(all), h.content(all), h.capacityIs(is)); err != nil {
		h.Errorf("%s: the volume is %+v, but:\n%v", where, is, err)
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

func (h *harness) expected(victimIs state) []drivertest.Kept {
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
func (h *harness) observe() state {
	h.Helper()
	var is state
	r, err := h.pool.Record(victim)
	if errors.Is(err, os.ErrNotExist) {
		return is
	}
	h.Must(err)
	is.bytes, is.block, is.inline = r.Bytes, r.Mode == "block", r.Inline
	mounts, err := mountns.Below(h.Targets)
	h.Must(err)
	is.published = slices.Contains(mounts, h.Target(victim))
	return is
}

// content expects what users wrote, in each volume that is published.
func (h *harness) content(all []drivertest.Kept) error {
	var problems []error
	for _, v := range all {
		switch {
		case len(v.Pods) == 0:
		case v.Block:
			problems = append(problems, h.has(v, h.Target(v.ID)))
		default:
			problems = append(problems, h.has(v, filepath.Join(h.Target(v.ID), "file")))
		}
	}
	return errors.Join(problems...)
}

// has expects what users wrote, and that they can write. An inline volume is new each
// time.
func (h *harness) has(v drivertest.Kept, path string) error {
	if v.Inline {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) && v.ID == victim && !h.filled {
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
	if string(got) != content && (v.ID != victim || h.filled) {
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
func (h *harness) capacityOf(s state) {
	h.Helper()
	if h.now != s {
		h.Fatalf("the volume is %+v, not %+v", h.now, s)
	}
	h.Must(h.capacityIs(s))
	if h.place.kind == quota.Btrfs {
		h.Must(h.pool.Settle())
		h.Must(errors.Join(h.Process.Stop(), h.Process.Restart(h.Context())))
	}
	h.capacities[s] = h.MustCapacity("local")
}

// capacityIs expects the ledger to have what the records sum up to: what the pool had
// left without a crash.
func (h *harness) capacityIs(s state) error {
	all := int64(-1)
	for known, capacity := range h.capacities {
		all = capacity + known.bytes
	}
	if all < 0 {
		return nil
	}
	want := all - s.bytes
	near := func() bool {
		got := h.MustCapacity("local")
		return got > want-capacitySlack && got < want+capacitySlack
	}
	if h.place.kind == quota.Btrfs {
		// It counts behind, and what others hold is counted once a minute and at the start.
		for range 2 {
			if near() {
				return nil
			}
			h.Must(h.pool.Settle())
		}
		h.Must(errors.Join(h.Process.Stop(), h.Process.Restart(h.Context())))
	}
	// What is free is no number of the driver's, and the reaper, which has emptied the
	// trash, is about to update the ledger.
	for deadline := time.Now().Add(ledgerBound); !near(); h.Must(h.pool.Settle()) {
		if time.Now().After(deadline) {
			return fmt.Errorf("the capacity is %d bytes, want %d", h.MustCapacity("local"), want)
		}
	}
	return nil
}

// wantNothingLeft expects an empty pool, after all volumes were deleted.
func (h *harness) wantNothingLeft() {
	h.Helper()
	h.Must(h.pool.Holds(nil))
	h.Must(h.pool.MountedAndAttached(nil))
	var left []string
	for _, id := range []string{others[0].id, others[1].id, victim} {
		names, err := drivertest.Names(filepath.Dir(h.Target(id)))
		h.Must(err)
		left = append(left, names...)
	}
	if len(left) > 0 {
		h.Errorf("after all was removed there is still %q", left)
	}
}
