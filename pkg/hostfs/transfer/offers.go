package transfer

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
)

// serve does what an answer asks for. If there is none yet, it waits.
func (w *walk) serve(flush bool) error {
	var a answer
	var err error
	if flush {
		a, err = w.s.receive()
	} else if a = <-w.s.answers; a.kind == 0 { // closed
		err = w.s.failed
	}
	if err != nil {
		return err
	}
	switch a.kind {
	case kindHave, kindSkip, kindWant, kindWantHole, kindWantBase:
	default:
		return fmt.Errorf("%w: an answer of kind %d amid a round", ErrProtocol, a.kind)
	}
	o := w.pending[a.id]
	if o == nil {
		if a.id == 0 || a.id > w.s.nextID {
			return fmt.Errorf("%w: an answer to no question", ErrProtocol)
		}
		return nil // of an earlier round, or of a file that is gone
	}
	if a.kind == kindHave {
		w.drop(a.id, o)
		return nil
	}
	if err := w.sendSelect(a.id); err != nil {
		return err
	}
	if a.kind == kindSkip {
		return w.abort(a.id, o)
	}
	return w.section(a, o)
}

func (w *walk) drop(id uint64, o *offer) {
	delete(w.pending, id)
	o.close()
}

func (w *walk) sendSelect(id uint64) error {
	w.s.wire.begin(kindSelect)
	w.s.wire.put64(int64(id))
	return w.s.wire.send(w.ctx)
}

func (w *walk) abort(id uint64, o *offer) error {
	w.drop(id, o)
	return w.s.wire.sendEmpty(w.ctx, kindAbort)
}

// mayWant reports whether an answer is of a length that there is, and of a base that was offered.
func (o *offer) mayWant(a answer) bool {
	if a.kind == kindWantBase {
		return o.base != nil && a.length == o.st.Size
	}
	return a.length > 0 || o.st.Size == 0
}

// section sends what the receiver does not have of a part of a file. After the last part the file is complete.
func (w *walk) section(a answer, o *offer) error {
	size := o.st.Size // that the receiver was told
	if a.offset != o.next || a.offset+a.length > size || !o.mayWant(a) {
		return fmt.Errorf("%w: it wants another part of a file", ErrProtocol)
	}
	o.next += a.length
	if o.fd == notOpen {
		st := *o.st
		fd, err := w.open(o.in.Dir, o.name, &st)
		if err != nil {
			if err = w.passOver(err); err != nil {
				return changedAt(o.in.Dir, o.name, err)
			}
			return w.abort(a.id, o)
		}
		o.fd = fd
		o.st.Ctim = st.Ctim
		if st.Size != size {
			if w.still {
				return changedAt(o.in.Dir, o.name, ErrChanged)
			}
			w.result.Missed++
		}
	}
	err := w.sendSection(a, o)
	if err != nil {
		return fmt.Errorf("send %s/%s: %w", o.in, o.name, err)
	}
	if err := w.s.wire.sendEmpty(w.ctx, kindSection); err != nil {
		return err
	}
	if a.offset+a.length < size {
		return nil
	}
	if err := w.sendSelect(a.id); err != nil {
		return err
	}
	if err := w.finish(o.fd, o.in.Dir, o.name, o.st, size); err != nil {
		return changedAt(o.in.Dir, o.name, err)
	}
	w.drop(a.id, o)
	return nil
}

func (w *walk) sendSection(a answer, o *offer) error {
	end := a.offset + a.length
	switch a.kind {
	case kindWantHole:
		return w.sendRange(o.fd, a.offset, end, false)
	case kindWantBase:
		return eachDifference(w.ctx, o.base, o.fd, func(r diff.Range) error {
			at := r.Offset
			if r.Offset+r.Bytes > end { // it was cut off, perhaps so that its last granule is a hole now
				at = min(at, (end-1)/granule*granule)
			}
			return w.sendChanged(o.fd, at, min(r.Offset+r.Bytes, end), end)
		})
	}
	r := newReader(o.fd, a.offset, end, w.s.block)
	for i, theirs := range a.digests {
		at := a.offset + int64(i)*blockBytes
		ours, err := r.block(at)
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
		if ours.sum != theirs {
			err = w.sendRange(o.fd, at, min(at+blockBytes, end), true)
		}
		if err == nil {
			err = w.ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
