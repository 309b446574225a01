package transfer

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
)

// An offer is a file that the receiver may want.
type offer struct {
	in   *handle
	name string
	st   *unix.Stat_t
	fd   int      // once it is open
	next int64    // where the next section begins
	base *os.File // that the receiver may have; nil if it has not
}

const notOpen = -1

func (o *offer) close() {
	if o.fd != notOpen {
		_ = unix.Close(o.fd) // opened for reading
	}
	if o.base != nil {
		_ = o.base.Close() // opened for reading
	}
	o.in.release()
}

// Offers are the files that the receiver was asked about, or that it wants.
type offers struct {
	ctx     context.Context
	wire    *wire
	answers *answers
	source  *source
	out     *output
	block   []byte // a buffer
	pending map[uint64]*offer
}

// add adds one, and returns its id.
func (f *offers) add(o *offer) uint64 {
	id := f.answers.nextID()
	f.pending[id] = o
	return id
}

// serveUntil serves until so many are left at most.
func (f *offers) serveUntil(left int) error {
	for len(f.pending) > left {
		if err := f.serve(true); err != nil {
			return err
		}
	}
	return nil
}

func (f *offers) close() {
	for id, o := range f.pending {
		f.drop(id, o)
	}
}

// serve does what an answer asks for. To wait for one it flushes what was sent.
func (f *offers) serve(wait bool) error {
	var a answer
	var err error
	if wait {
		a, err = f.answers.receive()
	} else if a = <-f.answers.all; a.kind == 0 { // closed
		err = f.answers.failed
	}
	if err != nil {
		return err
	}
	switch a.kind {
	case kindHave, kindSkip, kindWant, kindWantHole, kindWantBase:
	default:
		return fmt.Errorf("%w: an answer of kind %d amid a round", ErrProtocol, a.kind)
	}
	o := f.pending[a.id]
	if o == nil { // of an earlier round, or of a file that is gone
		return f.answers.passOver(a)
	}
	if a.kind == kindHave {
		f.drop(a.id, o)
		return nil
	}
	if err := f.out.sendSelect(a.id); err != nil {
		return err
	}
	if a.kind == kindSkip {
		return f.abort(a.id, o)
	}
	return f.section(a, o)
}

// drop ends one. The receiver may have asked for more of it, or have no room for that.
func (f *offers) drop(id uint64, o *offer) {
	delete(f.pending, id)
	o.close()
	f.answers.late += sections
}

func (f *offers) abort(id uint64, o *offer) error {
	f.drop(id, o)
	return f.wire.sendEmpty(f.ctx, kindAbort)
}

// mayWant reports whether an answer is of the next part that there is, of whole blocks, and of a base that was offered.
func (o *offer) mayWant(a answer) bool {
	size, end := o.st.Size, a.offset+a.length
	switch {
	case a.offset != o.next || end > size:
		return false
	case a.kind == kindWantBase:
		return o.base != nil && a.length == size
	}
	return end == size || a.length > 0 && end%blockBytes == 0
}

// section sends what the receiver does not have of a part of a file. After the last part the file is complete.
func (f *offers) section(a answer, o *offer) error {
	size := o.st.Size // that the receiver was told
	if !o.mayWant(a) {
		return fmt.Errorf("%w: it wants another part of a file", ErrProtocol)
	}
	o.next += a.length
	if o.fd == notOpen {
		st := *o.st
		fd, err := f.source.open(o.in.Dir, o.name, &st)
		if err != nil {
			if err = f.source.passOver(err); err != nil {
				return changedAt(o.in.Dir, o.name, err)
			}
			return f.abort(a.id, o)
		}
		o.fd = fd
		o.st.Ctim = st.Ctim
		if st.Size != size {
			if f.source.still {
				return changedAt(o.in.Dir, o.name, ErrChanged)
			}
			f.source.missed++
		}
	}
	err := f.sendSection(a, o)
	if err != nil {
		return fmt.Errorf("send %s/%s: %w", o.in, o.name, err)
	}
	if err := f.wire.sendEmpty(f.ctx, kindSection); err != nil {
		return err
	}
	if a.offset+a.length < size {
		return nil
	}
	if err := f.out.sendSelect(a.id); err != nil {
		return err
	}
	st, err := f.source.changed(o.fd, o.in.Dir, o.name, o.st)
	if err == nil {
		err = f.out.sendRest(o.fd, o.in.Dir, o.name, st, size)
	}
	if err != nil {
		return changedAt(o.in.Dir, o.name, err)
	}
	f.drop(a.id, o)
	return nil
}

func (f *offers) sendSection(a answer, o *offer) error {
	end := a.offset + a.length
	switch a.kind {
	case kindWantHole:
		return f.out.sendRange(o.fd, a.offset, end, false)
	case kindWantBase:
		return eachDifference(f.ctx, o.base, o.fd, func(r diff.Range) error {
			at := r.Offset
			if r.Offset+r.Bytes > end { // it was cut off, perhaps so that its last granule is a hole now
				at = min(at, (end-1)/granule*granule)
			}
			return f.out.sendChanged(o.fd, at, min(r.Offset+r.Bytes, end), end)
		})
	}
	r := newReader(o.fd, a.offset, end, f.block)
	for i, theirs := range a.digests {
		at := a.offset + int64(i)*blockBytes
		ours, err := r.block(at)
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
		if ours.sum != theirs {
			err = f.out.sendRange(o.fd, at, endOf(blockBytes, at, end), true)
		}
		if err == nil {
			err = f.ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
