package blockdev

import (
	"context"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	// sampledEnd is read at both ends of a device to find whether it is empty, in bytes.
	sampledEnd = 16 << 20
	// samples of sampleBytes are read between, at equal distances.
	samples     = 256
	sampleBytes = 64 << 10
)

// A Span is a part of a device, in bytes.
type Span struct{ From, To int64 }

// Samples are the parts of a device by which it is judged whether there is anything on it: libblkid does not know what has no
// signature, as encrypted devices and many stores.
func Samples(size int64) []Span {
	if size <= 2*sampledEnd+samples*sampleBytes {
		return []Span{{0, size}}
	}
	parts := []Span{{0, sampledEnd}}
	distance := (size - 2*sampledEnd) / samples / Unit * Unit
	for n := range int64(samples) {
		at := sampledEnd + n*distance
		parts = append(parts, Span{at, at + sampleBytes})
	}
	return append(parts, Span{(size - sampledEnd) / Unit * Unit, size})
}

// Blank reports whether the device reads as zeroes where anything on it would be found, what the page cache has of it left aside.
func (d Device) Blank(ctx context.Context) (bool, error) {
	f, err := d.open(unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer f.Close()
	size, err := d.SizeBytes()
	if err != nil {
		return false, err
	}
	for _, part := range Samples(size) {
		if zero, err := zeroes(ctx, f, part); err != nil || !zero {
			return false, err
		}
	}
	return true, nil
}

func zeroes(ctx context.Context, f *os.File, part Span) (bool, error) {
	if err := unix.Fadvise(int(f.Fd()), part.From, part.To-part.From, unix.FADV_DONTNEED); err != nil {
		return false, explain("fadvise", f.Name(), err)
	}
	zero := true
	err := read(ctx, f, part, func(piece []byte) bool {
		zero = !slices.ContainsFunc(piece, func(b byte) bool { return b != 0 })
		return zero
	})
	return zero && err == nil, err
}

// pieceBytes are read at once: a node may look at a hundred devices at a time.
const pieceBytes = 256 << 10

// read reads a part of a device, as long as it is to go on.
func read(ctx context.Context, f *os.File, part Span, goOn func(piece []byte) bool) error {
	buffer := make([]byte, min(part.To-part.From, pieceBytes))
	for part.From < part.To {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece := buffer[:min(int64(len(buffer)), part.To-part.From)]
		if _, err := f.ReadAt(piece, part.From); err != nil {
			return explain("read", f.Name(), err)
		}
		if !goOn(piece) {
			return nil
		}
		part.From += int64(len(piece))
	}
	return nil
}
