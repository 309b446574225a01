package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer/internal/spool"
)

// Receive makes the tree into, to which nothing else writes, equal to that of the sender, as often as it makes a pass. It returns nil
// once the sender has called Finish and all is on the disk. After an error a new connection may go on with what is there. It makes
// a directory of its own in the tree while entries are linked, which the next pass removes if this one cannot.
func Receive(ctx context.Context, conn io.ReadWriter, into *dir.Dir, o Options) error {
	w := newWire(conn, o)
	release, err := w.bind(ctx)
	if err != nil {
		return err
	}
	defer release()
	r := &receiver{ctx: ctx, wire: w, into: into, options: o, meter: &meter{call: o.Progress}, attrs: newAttributer(), block: newBlockBuffer()}
	r.files = &files{ctx: ctx, wire: w, allocated: o.Allocated, doubted: o.Doubted, block: r.block}
	if o.Doubted { // only what is on its way to the disk no more can be taken out of memory
		err = clone.Sync(into)
	}
	if err == nil {
		err = r.run()
	}
	if err != nil && ctx.Err() == nil {
		r.lastWords(err)
	}
	err = errors.Join(err, r.forget())
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return fmt.Errorf("receive %s: %w", into, err)
	}
	return nil
}

// A receiver is the receiving end of a connection.
type receiver struct {
	ctx     context.Context
	wire    *wire
	into    *dir.Dir
	options Options
	meter   *meter
	attrs   *attributer
	block   []byte
	btrfs   bool // the tree is on one
	files   *files

	// One of them at most is under way.
	round   *round
	compare *compared
}

func (r *receiver) run() error {
	k, p, err := r.wire.read()
	if err == nil {
		err = checkHello(kindHello, k, p)
	}
	if err == nil {
		r.btrfs, err = isBtrfs(r.into)
	}
	if err == nil {
		err = r.wire.sendHello(r.ctx, kindWelcome)
	}
	for err == nil {
		if r.wire.idle() {
			if err := r.wire.w.Flush(); err != nil {
				return err
			}
		}
		if k, p, err = r.wire.read(); err != nil {
			break
		}
		if k == kindFinish {
			return r.finish(p)
		}
		err = r.frame(k, p)
		r.meter.show()
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func (r *receiver) finish(p parser) error {
	if err := p.end(); err != nil {
		return err
	}
	if err := clone.Sync(r.into); err != nil {
		return err
	}
	if r.options.Finished != nil {
		if err := r.options.Finished(); err != nil {
			return err
		}
	}
	return errors.Join(r.wire.sendEmpty(r.ctx, kindFinished), r.wire.w.Flush())
}

// lastWords tells the sender why it ends, and reads on for a moment: closing a connection that has data to be read would throw away
// what the sender did not read yet.
func (r *receiver) lastWords(err error) {
	message := err.Error()
	r.wire.begin(kindFailure)
	r.wire.putString(message[:min(len(message), maxMessage)])
	stop := time.AfterFunc(lastWords, r.wire.interrupt)
	defer stop.Stop()
	if r.wire.send(r.ctx) == nil && r.wire.w.Flush() == nil {
		_, _ = io.Copy(io.Discard, r.wire.r) // ends with the connection, or is interrupted
	}
}

// forget ends what is under way, wherever it is.
func (r *receiver) forget() error {
	r.compare.close()
	err := r.round.close()
	r.round, r.compare = nil, nil
	return err
}

// frame does what the sender says.
func (r *receiver) frame(k kind, p parser) error {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	switch k {
	case kindBegin:
		return r.begin(p)
	case kindEnd:
		return r.end(p)
	case kindVerify:
		return r.beginCompare(p)
	case kindVerified:
		return r.endCompare(p)
	case kindCheck, kindDigests, kindCheckHole, kindUp:
		if r.compare == nil {
			return outOfOrder(k)
		}
		return r.compare.frame(k, p)
	}
	if r.round == nil {
		return outOfOrder(k)
	}
	return r.round.frame(k, p)
}

func outOfOrder(k kind) error {
	return fmt.Errorf("%w: a frame of kind %d out of order", ErrProtocol, k)
}

func (r *receiver) begin(p parser) error {
	if err := errors.Join(p.end(), r.forget()); err != nil {
		return err
	}
	empty, err := isEmpty(r.into)
	if err != nil {
		return err
	}
	tree, err := dir.NewDescent(r.into, place{fresh: empty})
	if err != nil {
		return err
	}
	r.meter.done = Progress{}
	r.round = &round{
		ctx: r.ctx, meter: r.meter, attrs: r.attrs, btrfs: r.btrfs, files: r.files, tree: tree,
		names: newSourceNames(r.into), links: links{root: r.into},
	}
	r.wire.begin(kindReady)
	r.wire.put8(byte(flagIf(empty, flagEmpty) | flagIf(r.btrfs, flagBtrfs)))
	return r.wire.send(r.ctx)
}

func (r *receiver) end(p parser) error {
	if r.round == nil || r.round.current != nil {
		return outOfOrder(kindEnd)
	}
	flags := p.u8()
	if err := p.end(); err != nil {
		return err
	}
	if !r.round.isComplete() {
		return fmt.Errorf("%w: a round that is not complete", ErrProtocol)
	}
	noRoom := r.round.noRoom
	if err := r.forget(); err != nil {
		return err
	}
	if flags&flagSync != 0 && noRoom.entries == 0 {
		if err := clone.Sync(r.into); err != nil {
			return err
		}
	}
	r.wire.begin(kindRound)
	r.wire.put64(noRoom.entries)
	r.wire.putString(noRoom.first)
	return r.wire.send(r.ctx)
}

func (r *receiver) beginCompare(p parser) error {
	root := p.attributes()
	attributes := readSums(&p)
	if err := p.end(); err != nil {
		return err
	}
	if r.round != nil {
		return outOfOrder(kindVerify)
	}
	r.compare.close()
	r.compare = nil
	tree, err := dir.NewDescent(r.into, struct{}{})
	if err != nil {
		return err
	}
	r.meter.done.Compared = 0
	r.compare = &compared{
		ctx: r.ctx, meter: r.meter, attrs: r.attrs, btrfs: r.btrfs, tree: tree, pairs: pairs{spool.New(r.into)},
		file: comparedFile{fd: notOpen, block: r.block, allocated: r.options.Allocated},
	}
	return r.compare.root(r.into, root, attributes)
}

func (r *receiver) endCompare(p parser) error {
	if r.compare == nil {
		return outOfOrder(kindVerified)
	}
	if err := p.end(); err != nil {
		return err
	}
	if !r.compare.isComplete() {
		return outOfOrder(kindVerified)
	}
	if err := r.compare.links(); err != nil {
		return err
	}
	found := r.compare.found
	r.wire.begin(kindDifferences)
	r.wire.put64(found.count)
	r.wire.put64(r.meter.done.Compared)
	r.wire.put32(uint32(len(found.first)))
	for _, message := range found.first {
		r.wire.putString(message)
	}
	err := r.wire.send(r.ctx)
	r.compare.close()
	r.compare = nil
	return err
}

func isEmpty(d *dir.Dir) (bool, error) {
	for _, err := range d.Entries() {
		return false, err
	}
	return true, nil
}
