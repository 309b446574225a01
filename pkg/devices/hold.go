package devices

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A Held is a device that is open exclusively: no other process uses it, or can until it is closed.
type Held struct {
	*blockdev.Held
	Facts blockdev.Facts
}

// Hold opens a device exclusively if it is not in use. All that is checked is checked again with the device held. The
// device has to have the number that was found at the path. A device that is ours may have partitions, which its last
// user left: if they were in use the device could not be held.
func Hold(path string, number blockdev.Number, ours bool) (*Held, error) {
	facts, err := inspect(path, number, ours)
	if err != nil {
		return nil, err
	}
	device, err := blockdev.Hold(path)
	if err != nil {
		return nil, Problem{Path: path, Reason: reasonOf(err), Detail: err.Error()}
	}
	held := &Held{Held: device, Facts: facts}
	if err := held.check(ours); err != nil {
		return nil, errors.Join(err, device.Close())
	}
	return held, nil
}

// check repeats the check with the device held.
func (h *Held) check(ours bool) error {
	path := h.String()
	if h.Number() != h.Facts.Number {
		return Problem{Path: path, Reason: OtherDevice, Detail: fmt.Sprintf("now leads to device %s, and led to %s when it was inspected", h.Number(), h.Facts.Number)}
	}
	facts, err := inspect(path, h.Number(), ours)
	if err != nil {
		return err
	}
	h.Facts = facts
	if err := h.Writable(); err != nil {
		return Problem{Path: path, Reason: reasonOf(err), Detail: err.Error()}
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

// inspect refuses a device by what the kernel knows of it.
func inspect(path string, number blockdev.Number, ours bool) (blockdev.Facts, error) {
	refuse := func(reason Reason, format string, args ...any) error {
		return Problem{Path: path, Reason: reason, Detail: fmt.Sprintf(format, args...)}
	}
	facts, err := blockdev.Inspect(number)
	if err != nil {
		return facts, refuse(reasonOf(err), "%v", err)
	}
	switch {
	case facts.SizeBytes == 0:
		return facts, refuse(Empty, "it has no size")
	case facts.ReadOnly:
		return facts, refuse(ReadOnly, "it is read-only")
	case len(facts.Holders) > 0:
		return facts, refuse(HasHolders, "it is part of %s", strings.Join(facts.Holders, ", "))
	case len(facts.Partitions) > 0 && !ours:
		return facts, refuse(HasPartitions, "it has %d partitions", len(facts.Partitions))
	case len(facts.Loops) > 0:
		return facts, refuse(HasLoop, "it, its disk or one of its partitions is the file of loop device %s", strings.Join(facts.Loops, ", "))
	}
	if twins := facts.Twins(); len(twins) > 0 {
		return facts, refuse(Twice, "it is the same disk, %s, as %s: use through that path cannot be detected here", facts.Identity, strings.Join(twins, ", "))
	}
	swap, err := facts.Swap()
	if err != nil {
		return facts, refuse(Failed, "%v", err)
	}
	if swap {
		return facts, refuse(IsSwap, "the kernel swaps to it")
	}
	mounts, err := mountsOf(facts)
	if err != nil {
		return facts, refuse(reasonOf(err), "%v", err)
	}
	if len(mounts) > 0 {
		slices.Sort(mounts)
		return facts, refuse(Mounted, "it is mounted on %s", strings.Join(mounts, ", "))
	}
	return facts, nil
}

// mountsOf are the places where a device is mounted, its disk or its partitions. That of a node, as kubelet maps it for a
// pod, keeps nobody from holding the device exclusively.
func mountsOf(facts blockdev.Facts) ([]string, error) {
	all, err := facts.Mounts()
	for _, number := range facts.Overlapping() {
		if err != nil {
			return nil, err
		}
		var part blockdev.Facts
		var mounts []string
		if part, err = blockdev.Inspect(number); err == nil {
			mounts, err = part.Mounts()
		}
		all = append(all, mounts...)
	}
	return all, err
}
