package devices

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

var (
	// stepBytes is overwritten in one system call, which cannot be interrupted: a second on a slow disk.
	stepBytes int64 = 64 * mib
	// rangeBytes is overwritten at the head, at the tail and at each of the starts.
	rangeBytes int64 = 100 * mib
)

// starts are where copies of labels are that wipefs does not erase: those of Ceph's BlueStore at the head and after
// 1, 10, 100 and 1000 GiB (bdev_label_positions), and after 256 GiB the third superblock of btrfs.
var starts = []int64{0, 1 * gib, 10 * gib, 100 * gib, 256 * gib, 1000 * gib}

// A span is a part of a device, in bytes.
type span struct{ from, to int64 }

// spans are what a way of cleaning overwrites, in order and apart from each other.
func (w Wipe) spans(size int64) []span {
	if w != WipeSignatures {
		return []span{{0, size}}
	}
	var all []span
	for _, start := range starts {
		if start < size {
			all = append(all, span{start, min(start+rangeBytes, size)})
		}
	}
	all = append(all, span{max(0, size-rangeBytes) / blockdev.Unit * blockdev.Unit, size})
	slices.SortFunc(all, func(a, b span) int { return int(min(max(a.from-b.from, -1), 1)) })
	merged := all[:1]
	for _, s := range all[1:] {
		if last := &merged[len(merged)-1]; s.from <= last.to {
			last.to = max(last.to, s.to)
		} else {
			merged = append(merged, s)
		}
	}
	return merged
}

// covers reports whether a device that was cleaned one way need not be cleaned the other way.
func (w Wipe) covers(other Wipe) bool { return w == other || other == WipeSignatures || w == WipeZero }

// Progress is how far cleaning is, in bytes.
type Progress struct {
	Wipe        Wipe
	Done, Total int64
}

// String is for logs and events.
func (p Progress) String() string {
	if p.Total == 0 {
		return "0%"
	}
	return fmt.Sprintf("%d%%", 100*p.Done/p.Total)
}

type wiper struct {
	device *erasable
	wipe   Wipe
	// turn waits until a step may be done, and returns what ends it.
	turn func(context.Context) (done func(), err error)
	// stepped is called after each.
	stepped   func(Progress)
	overwrite func(offset, bytes int64) error
}

// run cleans, from where an earlier run had come to. It may be ended at any point and run again.
func (w *wiper) run(ctx context.Context, from int64) error {
	// First of all, so that no program finds half of a filesystem.
	if err := w.erase(ctx); err != nil {
		return err
	}
	w.choose()
	if err := w.spans(ctx, from); err != nil {
		return err
	}
	if err := w.none(ctx); err != nil {
		return err
	}
	if len(w.device.Facts.Partitions) > 0 {
		return w.device.writer.ForgetPartitions()
	}
	return nil
}

func (w *wiper) erase(ctx context.Context) error {
	if err := eraseSignatures(ctx, w.device); err != nil {
		return err
	}
	if err := w.device.writer.Sync(); err != nil {
		return err
	}
	return w.none(ctx)
}

// none makes sure that no signature is left.
func (w *wiper) none(ctx context.Context) error {
	left, err := Signatures(ctx, w.device.Held)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%s still has %s after it was erased", w.device, describe(left))
	}
	return err
}

func (w *wiper) spans(ctx context.Context, from int64) error {
	spans := w.wipe.spans(w.device.Facts.SizeBytes)
	p := Progress{Wipe: w.wipe}
	for _, s := range spans {
		p.Total += s.to - s.from
	}
	for _, s := range spans {
		for at := s.from; at < s.to; {
			bytes := min(stepBytes, s.to-at)
			at += bytes
			p.Done += bytes
			if p.Done <= from {
				continue
			}
			if err := w.step(ctx, at-bytes, bytes, p); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *wiper) step(ctx context.Context, offset, bytes int64, p Progress) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done, err := w.turn(ctx)
	if err != nil {
		return err
	}
	err = w.overwrite(offset, bytes)
	done()
	if err != nil {
		return err
	}
	w.stepped(p)
	return nil
}

// choose sets how spans are overwritten: where the device can forget them, and promises zeroes, by that.
func (w *wiper) choose() {
	w.overwrite = w.device.writer.Zero
	if w.wipe != WipeDiscard {
		return
	}
	for _, way := range []func(int64, int64) error{w.device.writer.Deallocate, w.eraseAndZero} {
		// The head is to be overwritten anyway.
		if err := way(0, min(mib, w.device.Facts.SizeBytes)); !errors.Is(err, errors.ErrUnsupported) {
			w.overwrite = way
			return
		}
	}
}

// eraseAndZero is for a device that erases all copies, and promises nothing of what is read afterwards (BLKSECDISCARD).
func (w *wiper) eraseAndZero(offset, bytes int64) error {
	if err := w.device.writer.SecureErase(offset, bytes); err != nil {
		return err
	}
	return w.device.writer.Zero(offset, bytes)
}

func describe(signatures []Signature) string {
	var all []string
	for _, s := range signatures {
		all = append(all, s.String())
	}
	return strings.Join(all, ", ")
}
