package devices

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

const (
	// blankEnd is read at both ends of a device to find whether it is empty, in bytes.
	blankEnd = 16 * mib
	// samples of sampleBytes are read between, at equal distances.
	samples     = 256
	sampleBytes = 64 << 10
)

// sampled are the parts of a device by which it is judged whether there is anything on it.
func sampled(size int64) (parts []span) {
	if size <= 2*blankEnd+samples*sampleBytes {
		return []span{{0, size}}
	}
	parts = []span{{0, blankEnd}}
	distance := (size - 2*blankEnd) / samples / blockdev.Unit * blockdev.Unit
	for n := range int64(samples) {
		at := blankEnd + n*distance
		parts = append(parts, span{at, at + sampleBytes})
	}
	return append(parts, span{(size - blankEnd) / blockdev.Unit * blockdev.Unit, size})
}

// emptyParts are those of the sampled parts of a device without a volume that are empty if it was not written to, and by which
// way of cleaning they are: all of one that was empty when it was first offered, and of one that a claim has used those that
// were overwritten since, as far as that came.
func (r Record) emptyParts(f blockdev.Facts) (parts []span, by Wipe, err error) {
	same, err := r.isSurely(f)
	interrupted := r.State == Cleaning
	if err != nil || !same || r.Wipe == "" || r.Empty == WipeZero || interrupted && r.Empty == "" && (r.ClaimUID == "" || r.Done == 0 && !r.unwritten(f)) {
		return sampled(f.SizeBytes), WipeZero, err
	}
	spans, by := r.cleaned(), r.Empty
	if !interrupted {
		by = r.Wipe
	} else if by != "" {
		spans = append(spans, by.spans(r.Bytes)...)
	}
	for _, part := range sampled(r.Bytes) {
		for _, s := range spans {
			if from, to := max(part.from, s.from), min(part.to, s.to); from < to {
				parts = append(parts, span{from, to})
			}
		}
	}
	return parts, by, nil
}

// cleaned are the spans that were overwritten.
func (r Record) cleaned() []span {
	spans, done := r.Wipe.spans(r.Bytes), r.Done
	for n := range spans {
		if r.State == Cleaning {
			spans[n].to = min(spans[n].to, spans[n].from+done)
			done -= spans[n].to - spans[n].from
		}
	}
	return spans
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
