package devices

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A Held is a device that is open exclusively, and that had no user when all was checked with it open. Only Hold makes one:
// who has it has the descriptor that was checked, whatever its path leads to now.
type Held struct {
	*blockdev.Held
	Facts blockdev.Facts
	look  Look
}

// A Look says which device is looked at, and what is allowed of it.
type Look struct {
	Path   string
	Number blockdev.Number
	// Ours says that it is that of a released volume. Its claim may have left partitions: if they were in use the device could not be held.
	Ours bool
	// Record is what is known of it, and Partitions how one without a record is taken.
	Record     Record
	Partitions Partitions
	// View is what is seen of its users.
	View blockdev.View

	holding bool
}

// inspect is what the kernel knows of a device.
var inspect = blockdev.Inspect

// Hold opens a device exclusively if it is not in use. All that is checked is checked again with the device held. The
// device has to have the number that was found at the path.
func Hold(l Look) (*Held, error) {
	facts, err := l.inspect()
	if err != nil {
		return nil, err
	}
	device, err := blockdev.Hold(l.Path)
	if err != nil {
		return nil, l.refuse(reasonOf(err), "%v", err)
	}
	held := &Held{device, facts, l}
	if err := held.check(); err != nil {
		return nil, errors.Join(err, device.Close())
	}
	return held, nil
}

func (h *Held) check() error {
	if h.Number() != h.Facts.Number {
		return h.look.refuse(OtherDevice, "now leads to device %s, and led to %s when it was inspected", h.Number(), h.Facts.Number)
	}
	look := h.look
	look.holding = true
	facts, err := look.inspect()
	if err != nil {
		return err
	}
	h.Facts = facts
	if err := h.Writable(); err != nil {
		return h.look.refuse(reasonOf(err), "%v", err)
	}
	return h.checkSize()
}

// checkSize refuses a device whose size is not as it was when it was held. One that was removed has none.
func (h *Held) checkSize() error {
	bytes, err := h.Size()
	if err != nil {
		return Problem{Path: h.String(), Reason: reasonOf(err), Detail: err.Error()}
	}
	if bytes != h.Facts.SizeBytes {
		return Problem{Path: h.String(), Reason: OtherDevice, Detail: fmt.Sprintf("its size has changed from %d to %d bytes", h.Facts.SizeBytes, bytes)}
	}
	return nil
}

func (l Look) refuse(reason Reason, format string, args ...any) error {
	return Problem{Path: l.Path, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// inspect refuses a device by what the kernel knows of it and of its users.
func (l Look) inspect() (blockdev.Facts, error) {
	facts, err := inspect(l.Number)
	if err != nil {
		return facts, l.refuse(reasonOf(err), "%v", err)
	}
	switch {
	case facts.SizeBytes == 0:
		return facts, l.refuse(Empty, "it has no size")
	case facts.ReadOnly:
		return facts, l.refuse(ReadOnly, "it is read-only")
	case len(facts.Holders) > 0:
		return facts, l.refuse(HasHolders, "it is part of %s", strings.Join(facts.Holders, ", "))
	case len(facts.Snapshots) > 0:
		return facts, l.refuse(HasHolders, "it has the snapshot %s, which would be filled with what is overwritten, and lost: remove it with lvremove", strings.Join(facts.Snapshots, ", "))
	case len(facts.Partitions) > 0 && !l.Ours:
		return facts, l.refuse(HasPartitions, "it has %s", partitionsOf(facts))
	}
	if twins := facts.Twins(); len(twins) > 0 {
		return facts, l.refuse(Twice, "it is the same disk, %s, as %s: use through that path cannot be detected here", facts.Alike, strings.Join(twins, ", "))
	}
	known, err := l.Record.of(facts)
	if err != nil {
		return facts, l.refuse(Failed, "%v", err)
	}
	if !facts.IsPartition() || known.State != "" {
		return facts, l.unused(facts, facts.Overlapping())
	}
	if err := l.partition(facts); err != nil {
		return facts, err
	}
	siblings, err := facts.Siblings()
	if err != nil {
		return facts, l.refuse(Failed, "%v", err)
	}
	if err := l.unused(facts, append(siblings, facts.Disk)); err != nil {
		return facts, err
	}
	return facts, l.alone(facts)
}

// unused refuses a device that has a user, or one of the others that it shares a disk with.
func (l Look) unused(facts blockdev.Facts, with []blockdev.Number) error {
	all := []blockdev.Facts{facts}
	for _, number := range with {
		if number == facts.Number {
			continue
		}
		other, err := inspect(number)
		if err != nil {
			return l.refuse(reasonOf(err), "%v", err)
		}
		// What a multipath device is part of is its partitions.
		parent := number == facts.Disk && !slices.Contains(other.Partitions, facts.Number)
		if len(other.Holders) > 0 && !parent {
			return l.refuse(HasHolders, "%s of the same disk is part of %s", other.Name, strings.Join(other.Holders, ", "))
		}
		all = append(all, other)
	}
	all, err := l.withBelow(all)
	if err != nil {
		return err
	}
	for _, f := range all {
		swap, err := f.Swap()
		if err != nil {
			return l.refuse(Failed, "%v", err)
		}
		if swap {
			return l.refuse(IsSwap, "the kernel swaps to %s", f.Name)
		}
	}
	users, err := l.View.FindUsers(all)
	switch {
	case err != nil:
		return l.refuse(reasonOf(err), "whether it is in use cannot be known: %v", err)
	case len(users.Mounts) > 0:
		return l.refuse(Mounted, "it is mounted, or another part of its disk, on %s", strings.Join(users.Mounts, ", "))
	case len(users.Loops) > 0:
		return l.refuse(HasLoop, "it, its disk or one of its partitions is the file of loop device %s, or has the same file", strings.Join(users.Loops, ", "))
	case len(users.Targets) > 0:
		return l.refuse(InUse, "the kernel serves it, its disk or one of its partitions to other machines as %s", strings.Join(users.Targets, ", "))
	case len(users.Processes) > 0:
		slices.Sort(users.Processes)
		return l.refuse(InUse, "it, its disk or one of its partitions is open for writing in the process %s", strings.Join(users.Processes, ", "))
	}
	return nil
}

// withBelow adds what devices are made of: a path of a multipath device leads to the same blocks.
func (l Look) withBelow(all []blockdev.Facts) ([]blockdev.Facts, error) {
	for _, f := range slices.Clone(all) {
		for _, number := range f.Below {
			other, err := inspect(number)
			if err != nil {
				return nil, l.refuse(reasonOf(err), "%v", err)
			}
			all = append(all, other)
		}
	}
	return all, nil
}
