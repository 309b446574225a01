package devices

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// sampled are the parts of a device by which it is judged whether there is anything on it.
func sampled(size int64) (parts []span) {
	for _, part := range blockdev.Samples(size) {
		parts = append(parts, span{part.From, part.To})
	}
	return parts
}

// parts are those by which it is judged whether anything is on a device of which this is the record, and that no claim has used since it was
// cleaned: where it was overwritten.
func (r Record) parts(size int64) (parts []span) {
	if r.Wipe == "" || r.Bytes != size {
		return sampled(size)
	}
	for _, part := range sampled(size) {
		for _, s := range r.Wipe.spans(size) {
			if from, to := max(part.from, s.from), min(part.to, s.to); from < to {
				parts = append(parts, span{from, to})
			}
		}
	}
	return parts
}

// blank reports whether a device reads as zeroes where anything on it would be found: libblkid does not know what has no
// signature, as encrypted devices and many stores.
func blank(ctx context.Context, h *Held, parts []span) (bool, error) {
	for _, part := range parts {
		if zero, err := h.Zeroes(ctx, part.from, part.to-part.from); err != nil || !zero {
			return false, err
		}
	}
	return true, nil
}
