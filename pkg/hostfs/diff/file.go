package diff

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// A Range is a part of a file, in bytes.
type Range struct{ Offset, Bytes int64 }

// unit is what a difference is rounded to, in bytes.
const unit = 4096

// Files compares two files, and calls found for the parts that differ, in their order. What one
// file has and the other is too short for differs. Before each extent and each MiB that is read it
// calls step, whose error ends it.
func Files(step func() error, from, to *os.File, found func(Range) error) error {
	a, err := newMapping(from)
	if err != nil {
		return err
	}
	b, err := newMapping(to)
	if err != nil {
		return err
	}
	f := &finder{found: found, buffers: [2][]byte{}}
	common := min(a.size, b.size)
	for at := int64(0); at < common; {
		if err := step(); err != nil {
			return err
		}
		inA, err := a.at(at)
		if err != nil {
			return err
		}
		inB, err := b.at(at)
		if err != nil {
			return err
		}
		end := min(inA.end, inB.end, common)
		if !inA.same(inB) {
			end = at + min(end-at, chunk) // so that step is called
			if err := f.compare(from, to, at, end); err != nil {
				return err
			}
		}
		at = end
	}
	if longer := max(a.size, b.size); longer > common {
		if err := f.add(Range{common, longer - common}); err != nil {
			return err
		}
	}
	return f.flush()
}

// chunk is how many bytes are compared at a time.
const chunk = 1 << 20

// A finder puts together differences that follow each other.
type finder struct {
	found   func(Range) error
	last    Range // not reported yet, if it has bytes
	buffers [2][]byte
}

func (f *finder) compare(from, to *os.File, at, end int64) error {
	if f.buffers[0] == nil {
		f.buffers = [2][]byte{make([]byte, chunk), make([]byte, chunk)}
	}
	a, b := f.buffers[0][:end-at], f.buffers[1][:end-at]
	for _, one := range []struct {
		file *os.File
		into []byte
	}{{from, a}, {to, b}} {
		n, err := one.file.ReadAt(one.into, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		clear(one.into[n:]) // cut off meanwhile
	}
	for begin := 0; begin < len(a); begin += unit {
		end := min(begin+unit, len(a))
		if bytes.Equal(a[begin:end], b[begin:end]) {
			continue
		}
		if err := f.add(Range{at + int64(begin), int64(end - begin)}); err != nil {
			return err
		}
	}
	return nil
}

func (f *finder) add(r Range) error {
	if f.last.Bytes > 0 && f.last.Offset+f.last.Bytes == r.Offset {
		f.last.Bytes += r.Bytes
		return nil
	}
	err := f.flush()
	f.last = r
	return err
}

func (f *finder) flush() error {
	if f.last.Bytes == 0 {
		return nil
	}
	err := f.found(f.last)
	f.last = Range{}
	return err
}

// A mapping says where on the disk a file lies.
type mapping struct {
	file *os.File
	size int64
	// segments are known, in order and without a gap; those before where the reader is are gone.
	segments []segment
	known    int64 // end of the last
	blind    bool  // the filesystem does not say, or is not believed
	synced   bool  // what was written to it before is on the disk
}

// A segment is a part of a file up to end. It lies at one place of the disk, or reads as zeros, or
// it has to be read.
type segment struct {
	end int64
	// shift is the place on the disk less the offset in the file, if that is known.
	shift         int64
	placed, zeros bool
}

func (s segment) same(other segment) bool {
	return s.zeros && other.zeros || s.placed && other.placed && s.shift == other.shift
}

func newMapping(f *os.File) (*mapping, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: f.Name(), Err: err}
	}
	return &mapping{file: f, size: info.Size(), blind: !namesPlaces(int64(st.Type))}, nil
}

// namesPlaces says of a kind of filesystem that no two places of it are said to be the same (FIEMAP). Where it lies on several devices, each of
// them may have one, as with bcachefs: what was written to another device would be taken for what was there before.
func namesPlaces(kind int64) bool {
	return kind == unix.XFS_SUPER_MAGIC || kind == unix.EXT4_SUPER_MAGIC || kind == unix.BTRFS_SUPER_MAGIC
}

// at is the segment of an offset. Offsets must grow.
func (m *mapping) at(offset int64) (segment, error) {
	for len(m.segments) > 0 && m.segments[0].end <= offset {
		m.segments = m.segments[1:]
	}
	if len(m.segments) == 0 && !m.blind {
		if err := m.read(offset); err != nil {
			return segment{}, err
		}
	}
	if m.blind {
		return segment{end: m.size}, nil
	}
	return m.segments[0], nil
}

// Of linux/fiemap.h.
const (
	flagSync        = 0x1
	extentLast      = 0x1
	extentUnwritten = 0x800
	// extentOdd is what lies elsewhere than it says, or not alone: not known, not written yet, encoded,
	// not aligned, within metadata, or with the end of another file.
	extentOdd = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
)

// read asks the filesystem for the segments from an offset on.
func (m *mapping) read(from int64) error {
	var got ioctl.Extents
	got.Start, got.Length, got.Wanted = uint64(from), uint64(m.size-from), uint32(len(got.Extents))
	if !m.synced {
		got.Flags, m.synced = flagSync, true
	}
	err := ioctl.Do(ioctl.File{File: m.file}, ioctl.GetExtents, &got)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EBADR) {
		m.blind = true
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "ask for the extents of", Path: m.file.Name(), Err: err}
	}
	last := got.Mapped < got.Wanted
	m.known = from
	for _, e := range got.Extents[:got.Mapped] {
		m.add(segment{end: int64(e.Logical), zeros: true}) // a hole
		m.add(segment{
			end:    int64(min(e.Logical+e.Length, math.MaxInt64)), // the last block of the longest file ends behind that
			shift:  int64(e.Physical) - int64(e.Logical),
			placed: e.Flags&(extentOdd|extentUnwritten) == 0,
			zeros:  e.Flags&extentUnwritten != 0 && e.Flags&extentOdd == 0,
		})
		last = last || e.Flags&extentLast != 0
	}
	if last {
		m.add(segment{end: m.size, zeros: true})
	}
	m.blind = len(m.segments) == 0 // it makes no sense
	return nil
}

// add appends a segment, unless it ends where the last one does.
func (m *mapping) add(s segment) {
	if s.end > m.known {
		m.segments, m.known = append(m.segments, s), s.end
	}
}
