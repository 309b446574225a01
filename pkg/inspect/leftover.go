package inspect

import (
	"context"
	"fmt"
	"slices"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// longestCreation is how long no creation goes on without a change in what it makes. A copy of
// a large volume takes longer than that, and its call goes on without its caller.
const longestCreation = 10 * time.Minute

// leftovers are the entries of creating/ or trash/, of all nodes: volumes that are being made or
// removed, and what was left of that.
func (r *reader) leftovers(ctx context.Context, place store.Place) ([]Leftover, error) {
	all := []Leftover{}
	err := r.Store.Nodes().EachIn(place, func(node string, d *dir.Dir) error {
		entries, err := store.Names(d)
		if err != nil {
			return err
		}
		slices.Sort(entries)
		var here []Leftover
		for _, name := range entries {
			r.steps.Add(1)
			left, err := r.leftover(ctx, place, d, name)
			if dir.IsMissing(err) {
				continue
			}
			if err != nil {
				return err
			}
			left.Node = node
			here = append(here, left)
		}
		lately, err := r.workedOn(place, d, here)
		if err != nil {
			return err
		}
		for _, left := range here {
			left.Abnormal, left.Condition = r.leftoverCondition(place, left, lately)
			all = append(all, left)
		}
		return nil
	})
	if err != nil || place != store.InTrash {
		return all, err
	}
	here, err := r.removedInPlace(ctx)
	return append(all, here...), err
}

// removedInPlace are the volumes that were removed where they were, for want of room in the trash.
func (r *reader) removedInPlace(ctx context.Context) (all []Leftover, err error) {
	pieces, err := r.Store.Trash().InPlace()
	if err != nil {
		return nil, err
	}
	for _, name := range pieces {
		err := r.Store.Trash().In(name, func(in *dir.Dir, entry string) error {
			left, err := r.leftover(ctx, store.InTrash, in, entry)
			if err != nil {
				return err
			}
			left.Name, left.Node = name, r.Node.String()
			if promised := store.ParseTrashName(name).Promised; promised != volume.Unknown {
				left.HeldBytes = known(promised)
			}
			left.Abnormal, left.Condition = r.leftoverCondition(store.InTrash, left, left.Changed)
			all = append(all, left)
			return nil
		})
		if err != nil && !dir.IsMissing(err) {
			return nil, err
		}
	}
	return all, nil
}

func (r *reader) leftover(ctx context.Context, place store.Place, in *dir.Dir, name string) (Leftover, error) {
	changed, err := dir.Changed(in, name)
	if err != nil {
		return Leftover{}, err
	}
	if place == store.InCreation && time.Since(changed) > longestCreation {
		changed, err = dir.LastChange(ctx, in, name, func() { r.steps.Add(1) })
		if err != nil {
			return Leftover{}, err
		}
	}
	left := Leftover{Name: name, Changed: changed.UTC()}
	id, err := r.Enforcer.IDs.In(in, name)
	if err != nil {
		return Leftover{}, err
	}
	left.UsedBytes = known(r.Enforcer.UsedByID(r.Store.Root(), id))
	if place == store.InTrash {
		held := store.ParseTrashName(name).Promised
		if held == volume.Unknown {
			held = r.Usage().HeldBy(in, name, id)
		}
		left.HeldBytes = known(held)
	}
	return left, nil
}

// workedOn is when anything in the trash of a node last changed. Creations do not wait for
// each other: of those it is the zero time.
func (r *reader) workedOn(place store.Place, in *dir.Dir, here []Leftover) (last time.Time, err error) {
	if place != store.InTrash {
		return last, nil
	}
	// In a shared pool a node sets this as its sign of life, whether it can erase or not.
	if !r.Config.Shared {
		if last, err = dir.Modified(in); err != nil {
			return last, err
		}
	}
	for _, left := range here {
		if left.Changed.After(last) {
			last = left.Changed
		}
	}
	return last, nil
}

// leftoverCondition distinguishes work in progress from what stays. The reaper erases one piece
// after the other, so one that waits behind a large one is no sign of trouble as long as
// the node gets on.
func (r *reader) leftoverCondition(place store.Place, l Leftover, lately time.Time) (abnormal bool, condition string) {
	limit, normal, says := ledger.RetryStuck, "being erased", "cannot be erased, or no driver runs on its node"
	if place == store.InCreation {
		limit, normal, says = longestCreation, "being made", "a creation that did not finish; the driver of its node removes it when it runs"
	}
	if r.Config.Shared && l.Node != r.Node.String() {
		limit = store.UnseenAfter // then others take it over
	}
	since := time.Since(l.Changed)
	switch {
	case since <= limit:
		return false, normal
	case time.Since(lately) <= limit:
		return false, "waits to be erased"
	}
	return true, fmt.Sprintf("unchanged for %v: %s", since.Truncate(time.Minute), says)
}
