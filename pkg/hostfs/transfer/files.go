package transfer

import (
	"context"
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// Files are the regular files whose content the receiver asks for. Their numbers go on from round to round.
type files struct {
	ctx       context.Context
	wire      *wire
	allocated bool // see Options
	doubted   bool
	block     []byte
	lastID    uint64
	pending   map[uint64]*target
}

// isNext says that a file may have an id.
func (f *files) isNext(id uint64) bool { return id == f.lastID+1 && len(f.pending) <= window }

// begin asks for the first parts of a file.
func (f *files) begin(t *target) error {
	if f.pending == nil {
		f.pending = make(map[uint64]*target)
	}
	f.pending[t.id] = t
	for range sections {
		if err := f.ask(t); err != nil || t.failed {
			return err
		}
	}
	return nil
}

// close drops all.
func (f *files) close() {
	for _, t := range f.pending {
		t.close()
	}
	f.pending = nil
}

func (f *files) answer(k kind, id uint64) error {
	f.wire.begin(k)
	f.wire.put64(int64(id))
	return f.wire.send(f.ctx)
}

// ask asks for the next part of a file.
func (f *files) ask(t *target) error {
	if t.failed {
		return f.answer(kindSkip, t.id)
	}
	size := t.want.Size
	if t.next == size && (size > 0 || t.finished) {
		return nil
	}
	from := t.next
	if size == 0 { // a section without content
		t.finished = true
		return f.want(kindWantHole, t, size)
	}
	if t.fresh {
		return f.want(kindWantHole, t, size)
	}
	if t.based {
		return f.want(kindWantBase, t, size)
	}
	content := newReader(t.fd, from, size, f.block)
	until, err := content.holeUntil(from)
	if err != nil {
		return wrap("read", t.path, err)
	}
	if until > from {
		return f.want(kindWantHole, t, until)
	}
	until = from + min(sectionBlocks*blockBytes, size-from)
	f.wire.begin(kindWant)
	f.wire.put64(int64(t.id))
	f.wire.put64(from)
	f.wire.put64(until - from)
	for at := from; at < until; at = endOf(blockBytes, at, until) {
		b, err := content.block(at)
		if err == nil {
			err = f.makeSparse(t, at, b)
		}
		if err != nil {
			return wrap("read", t.path, err)
		}
		f.wire.putRaw(b.sum[:])
	}
	t.next = until
	return errors.Join(f.wire.send(f.ctx), f.wire.w.Flush())
}

// makeSparse makes a hole of what is zero.
func (f *files) makeSparse(t *target, at int64, b *block) error {
	for i, part := range b.granules() {
		if b.isData(i) && isZero(part) {
			if err := f.punch(t, at+i, int64(len(part))); err != nil {
				return err
			}
		}
	}
	return f.ctx.Err()
}

func (f *files) want(k kind, t *target, until int64) error {
	f.wire.begin(k)
	f.wire.put64(int64(t.id))
	f.wire.put64(t.next)
	f.wire.put64(until - t.next)
	t.next = until
	return f.wire.send(f.ctx)
}

// open opens a file whose content stays as far as it is as in the source.
func (f *files) open(in *dir.Dir, name string, access int) (int, error) {
	fd, err := openFile(in, name, access)
	if err != nil || !f.doubted {
		return fd, err
	}
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		_ = unix.Close(fd) // nothing was written
		return notOpen, pathError("read from the disk", in, name, err)
	}
	return fd, nil
}

func (f *files) drop(t *target) {
	delete(f.pending, t.id)
	t.close()
}

// punch makes a hole: as zeros where the filesystem cannot. The last block of a file is given back as a whole.
func (f *files) punch(t *target, at, length int64) error {
	end := at + length
	if end >= t.want.Size {
		if math.MaxInt64-t.want.Size < granule && !f.allocated { // there is no end of that block
			return errors.Join(unix.Ftruncate(t.fd, at), unix.Ftruncate(t.fd, t.want.Size))
		}
		end = t.want.Size + min(granule-t.want.Size%granule, math.MaxInt64-t.want.Size)
	}
	if at >= end {
		return nil
	}
	mode := uint32(unix.FALLOC_FL_PUNCH_HOLE)
	if f.allocated {
		mode = unix.FALLOC_FL_ZERO_RANGE
	}
	err := unix.Fallocate(t.fd, mode|unix.FALLOC_FL_KEEP_SIZE, at, end-at)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	for end = min(end, t.want.Size); at < end; at = endOf(dataBytes, at, end) {
		if err := f.ctx.Err(); err != nil {
			return err
		}
		if err := writeAt(t.fd, zeros[:endOf(dataBytes, at, end)-at], at); err != nil {
			return err
		}
	}
	return nil
}

// file makes room for a regular file, and asks for what of it is not there.
func (r *round) file(p parser) error {
	t := &target{kind: aFile, fd: notOpen, id: uint64(p.i64())}
	flags := p.u8()
	t.want = p.attributes()
	link := linkID(p.bytes(linkBytes))
	name := p.name()
	if err := p.end(); err != nil {
		return err
	}
	if format(t.want) != unix.S_IFREG || !r.files.isNext(t.id) {
		return fmt.Errorf("%w: a file out of order", ErrProtocol)
	}
	r.files.lastID = t.id
	r.meter.done.Entries++
	r.meter.done.Files++
	if t.pushed = flags&flagPush != 0; t.pushed && flags&(flagLinked|flagSettled) != 0 { // it may be there, and not be opened
		return fmt.Errorf("%w: content of a file that may be there", ErrProtocol)
	}
	if r.lost > 0 {
		t.failed = true
	}
	have := t.failed
	if !have {
		if err := r.note(name); err != nil {
			return err
		}
		in := r.tree.Current().Dir
		t.path = in.String() + "/" + name
		var err error
		have, err = r.prepare(t, in, name, flags, link)
		if err := r.noRoom.note(t, err); err != nil {
			t.close()
			return err
		}
	}
	switch {
	case t.pushed:
		r.current = t
		return nil
	case have:
		return r.files.answer(kindHave, t.id)
	}
	return r.files.begin(t)
}

func (r *round) selectFile(p parser) error {
	id := uint64(p.i64())
	if err := p.end(); err != nil {
		return err
	}
	if r.current = r.files.pending[id]; r.current == nil {
		return fmt.Errorf("%w: content of a file that was not asked for", ErrProtocol)
	}
	return nil
}

// prepare opens a file whose content is to be set, and says whether it need not be. A file that has more names here than in the source
// is another one than those.
func (r *round) prepare(t *target, in *dir.Dir, name string, flags byte, link linkID) (have bool, err error) {
	linked := flags&flagLinked != 0
	is, err := lookFor(in, name)
	if err != nil {
		return false, err
	}
	if linked {
		if found, err := r.links.linkTo(r.ctx, in, name, is, link); found || err != nil {
			return found, err
		}
	}
	usable, err := r.links.isUsable(is, t.want, linked)
	if err != nil {
		return false, err
	}
	if usable && flags&flagSettled != 0 && is.Size == t.want.Size && is.Mtim == t.want.Mtim {
		if linked {
			err = r.links.add(in, name, is, link)
		}
		if err == nil {
			err = setAttributes(in, name, t.want, t.path)
		}
		return true, err
	}
	if t.based, err = r.links.isAsBefore(is, t.want, flags, usable); err != nil {
		return false, err
	}
	if err := r.openTarget(t, in, name, is, usable); err != nil {
		return false, err
	}
	t.based = t.based && !t.fresh
	if linked {
		is, err = r.links.addOpened(in, name, link)
	}
	if err == nil && (t.fresh && t.want.Size > 0 || !t.fresh && is.Size != t.want.Size) {
		err = wrap("truncate", t.path, unix.Ftruncate(t.fd, t.want.Size))
	}
	t.holder = xattr.Descriptor(t.fd)
	return false, err
}

// openTarget opens the file whose content is to be set: the one that is there, or a new one.
func (r *round) openTarget(t *target, in *dir.Dir, name string, is *unix.Stat_t, usable bool) (err error) {
	switch {
	case usable:
		t.fd, err = r.files.open(in, name, unix.O_RDWR)
		return err
	case is != nil && format(is) == unix.S_IFREG && is.Size > 0:
		old, err := r.files.open(in, name, unix.O_RDONLY)
		if err == nil {
			t.fd, err = separate(r.ctx, in, name, old)
		}
		return err
	case is != nil:
		if err := remove(r.ctx, in, name); err != nil {
			return err
		}
	}
	t.fresh = true
	t.fd, err = makeFile(in, name)
	return err
}

// content is a frame of the content of a file.
func (r *round) content(t *target, k kind, p parser) error {
	switch k {
	case kindData:
		at := p.i64()
		if at < 0 || len(p.rest) > dataBytes {
			p.failed = true
		}
		data := p.bytes(len(p.rest))
		return r.write(t, p, func() error { r.meter.done.Bytes += int64(len(data)); return writeAt(t.fd, data, at) })
	case kindHole:
		at, length := p.extent()
		return r.write(t, p, func() error { return r.files.punch(t, at, length) })
	case kindSection:
		if r.current = nil; t.pushed {
			return outOfOrder(k)
		}
		return errors.Join(p.end(), r.files.ask(t))
	case kindAbort:
		r.files.drop(t)
		r.current = nil
		return p.end()
	}
	return outOfOrder(k)
}

func (r *round) write(t *target, p parser, call func() error) error {
	if err := p.end(); err != nil || t.failed {
		return err
	}
	return r.noRoom.note(t, wrap("write", t.path, call()))
}
