package transfer

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io/fs"
	"iter"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A digest identifies the content of a block. That of zeros is zero, and so is that of a hole: where a source has holes depends on
// what of it was written to the disk, so the target has a hole wherever a granule is zero.
type digest [sha256.Size]byte

// A reader makes digests of a file from an offset on.
type reader struct {
	fd       int
	found    *clone.Data
	size     int64
	from, to int64 // data that is known, if from < to
	known    int64 // up to where it is
	buffer   []byte
	last     block
}

func newReader(fd int, at, size int64, buffer []byte) *reader {
	return &reader{fd: fd, found: clone.DataOf(fd), size: size, from: at, to: at, known: at, buffer: buffer}
}

// data says whether there is any between two offsets, which never go back.
func (r *reader) data(at, end int64) (bool, error) {
	for r.to <= at && r.known < r.size {
		from, to, err := r.found.Next(max(at, r.known), r.size)
		if err != nil {
			return false, err
		}
		if from == to { // none
			from, to = r.size, r.size
		}
		r.from, r.to, r.known = from, to, to
	}
	return r.from < r.to && r.from < end && r.to > at, nil
}

// holeUntil is the block in which the next data after an offset, that of a block, is, or the end of the file.
func (r *reader) holeUntil(at int64) (int64, error) {
	some, err := r.data(at, r.size)
	if err != nil {
		return 0, err
	}
	if !some {
		return r.size, nil
	}
	return max(at, r.from/blockBytes*blockBytes), nil
}

// endOf is where the unit ends in which an offset is, or what is looked at if that ends before. Files end where numbers do.
func endOf(unit, at, end int64) int64 { return at + min(end-at, unit-at%unit) }

// blocks is how many a part of a file has that begins with one.
func blocks(length int64) int64 { return length/blockBytes + min(length%blockBytes, 1) }

// A block is what a file has at an offset.
type block struct {
	sum     digest
	content []byte // until the next one is read; what was cut off meanwhile is zero
	data    byte   // a bit for each granule that is no hole
}

// granules are the parts of a block.
func (b *block) granules() iter.Seq2[int64, []byte] {
	return func(yield func(int64, []byte) bool) {
		for at := 0; at < len(b.content) && yield(int64(at), b.content[at:min(at+granule, len(b.content))]); at += granule {
		}
	}
}

// isData says so of the granule at an offset in the block.
func (b *block) isData(at int64) bool { return b.data&(1<<(at/granule)) != 0 }

// block reads one.
func (r *reader) block(at int64) (*block, error) {
	b := &r.last
	*b = block{content: r.buffer[:min(blockBytes, r.size-at)]}
	for i, part := range b.granules() {
		some, err := r.data(at+i, at+i+int64(len(part)))
		if err != nil {
			return nil, err
		}
		if some {
			b.data |= 1 << (i / granule)
		}
	}
	if b.data == 0 {
		clear(b.content)
		return b, nil
	}
	if err := readAt(r.fd, b.content, at); err != nil {
		return nil, err
	}
	if !isZero(b.content) {
		b.sum = sha256.Sum256(b.content)
	}
	return b, nil
}

var zeros = make([]byte, dataBytes)

// isZero is for what is not longer than a frame.
func isZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }

// newBlockBuffer is for newReader.
func newBlockBuffer() []byte { return make([]byte, blockBytes) }

// readAt reads all of it, and zeros behind the end of the file.
func readAt(fd int, into []byte, at int64) error {
	for len(into) > 0 {
		n, err := unix.Pread(fd, into, at)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			clear(into)
			return nil
		default:
			into, at = into[n:], at+int64(n)
		}
	}
	return nil
}

// writeAt writes all of it.
func writeAt(fd int, data []byte, at int64) error {
	for len(data) > 0 {
		n, err := unix.Pwrite(fd, data, at)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		data, at = data[n:], at+int64(n)
	}
	return nil
}

func format(st *unix.Stat_t) uint32 { return st.Mode & unix.S_IFMT }

func stat(in *dir.Dir, name string) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	if err := unix.Fstatat(in.Fd(), name, st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, pathError("stat", in, name, err)
	}
	return st, nil
}

func statSelf(d *dir.Dir) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	if err := unix.Fstat(d.Fd(), st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: d.String(), Err: err}
	}
	return st, nil
}

func readlink(in *dir.Dir, name string) (string, error) {
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(in.Fd(), name, target)
	if err != nil {
		return "", pathError("readlink", in, name, err)
	}
	return string(target[:n]), nil
}

func pathError(op string, in *dir.Dir, name string, err error) error {
	return &fs.PathError{Op: op, Path: in.String() + "/" + name, Err: err}
}

// isBtrfs says which attributes a filesystem keeps.
func isBtrfs(d *dir.Dir) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: d.String(), Err: err}
	}
	return int64(st.Type) == unix.BTRFS_SUPER_MAGIC, nil
}
