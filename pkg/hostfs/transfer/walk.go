package transfer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// A walk is a visitor of the source that sends it once.
type walk struct {
	ctx     context.Context
	wire    *wire
	from    *dir.Dir
	entries clone.Look // at those of from
	source  *source
	out     *output
	answers *answers
	offers  offers
	meter   *meter
	track   track

	push   bool // the target is empty
	names  clone.Names
	noRoom int64 // entries for which the target had none
}

// round sends the tree.
func (w *walk) round() error {
	defer w.close()
	if err := w.wire.sendEmpty(w.ctx, kindBegin); err != nil {
		return err
	}
	ready, err := w.answers.await(kindReady)
	if err != nil {
		return err
	}
	w.push, w.out.btrfs = ready.flags&flagEmpty != 0, ready.flags&flagBtrfs != 0
	if w.entries, err = clone.NewLook(w.from); err != nil {
		return sourceError(err)
	}
	root, err := w.source.look(w.entries.Open(w.from))
	if err != nil {
		return sourceError(err)
	}
	w.track.begin(root)
	if err := dir.Visit(w.from, w); err != nil {
		return sourceError(err)
	}
	if err := w.offers.serveUntil(0); err != nil {
		return err
	}
	if err := w.sendLeave(w.from); err != nil {
		return sourceError(err)
	}
	w.wire.begin(kindEnd)
	w.wire.put8(byte(flagIf(!w.source.still, flagSync)))
	if err := w.wire.send(w.ctx); err != nil {
		return err
	}
	end, err := w.answers.await(kindRound)
	if w.noRoom = end.count; err == nil && w.noRoom > 0 {
		err = fmt.Errorf("%w for %d entries, the first: %q", ErrNoRoom, end.count, end.messages)
	}
	return err
}

func (w *walk) close() {
	w.offers.close()
	w.track.close()
}

func flagIf(set bool, flag int) int {
	if set {
		return flag
	}
	return 0
}

// Enter sends a directory.
func (w *walk) Enter(d, in *dir.Dir, name string) error {
	if err := w.step(); err != nil {
		return err
	}
	st, err := w.source.look(w.entries.Open(d))
	if err != nil {
		return changedAt(in, name, err)
	}
	w.names.Add(w.track.current().number, name, st)
	w.track.enter(name, st)
	w.meter.done.Entries++
	return w.out.sendEnter(name)
}

// Leave sends the attributes of a directory.
func (w *walk) Leave(d *dir.Dir) error {
	if err := w.sendLeave(d); err != nil {
		return err
	}
	w.track.up()
	return nil
}

func (w *walk) sendLeave(d *dir.Dir) error {
	st, err := w.source.look(statSelf(d))
	if err != nil {
		return changedAt(d, ".", err)
	}
	return w.out.sendLeave(d, st)
}

// step is before each entry.
func (w *walk) step() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	w.meter.show()
	for w.answers.some() {
		if err := w.offers.serve(false); err != nil {
			return err
		}
	}
	return nil
}

// File sends an entry that is no directory.
func (w *walk) File(in *dir.Dir, name string) error {
	if err := w.step(); err != nil {
		return err
	}
	st, err := w.source.look(w.entries.Stat(in, name))
	if errors.Is(err, clone.ErrMounted) {
		return w.source.mounted(in, name)
	}
	if w.source.isGone(err) {
		return nil
	}
	if err == nil {
		switch format(st) {
		case unix.S_IFREG:
			err = w.file(in, name, st)
		case unix.S_IFDIR: // by now
			_, err = w.source.look(st, clone.ErrGone)
		default:
			err = w.node(in, name, st)
		}
	}
	if w.source.isGone(err) {
		return nil
	}
	if err != nil {
		return changedAt(in, name, err)
	}
	w.names.Add(w.track.current().number, name, st)
	w.meter.done.Entries++
	return nil
}

// Mount leaves out what something is mounted on, or ends the walk.
func (w *walk) Mount(in *dir.Dir, name string) error { return w.source.mounted(in, name) }

// file sends a regular file at once to an empty target, and else asks what of it the receiver wants. That is also asked if it has
// several names, since the receiver may have it under another.
func (w *walk) file(in *dir.Dir, name string, st *unix.Stat_t) error {
	w.meter.done.Files++
	if w.push && st.Nlink == 1 {
		return w.pushFile(in, name, st)
	}
	if err := w.offers.serveUntil(window - 1); err != nil {
		return err
	}
	h, err := w.track.hold(in)
	if err != nil {
		return err
	}
	base, same := w.inBase(in, name, st)
	settled := same || w.track.isSettled(name, st)
	id := w.offers.add(&offer{in: h, name: name, st: st, fd: notOpen, base: base})
	return w.out.sendFile(in, name, st, id, flagIf(settled, flagSettled)|flagIf(base != nil, flagBase))
}

func (w *walk) pushFile(in *dir.Dir, name string, st *unix.Stat_t) error {
	fd, err := w.source.open(in, name, st)
	if err != nil {
		return w.source.passOver(err)
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading
	if err := w.out.sendFile(in, name, st, w.answers.nextID(), flagPush); err != nil {
		return err
	}
	if err := w.out.sendRange(fd, 0, st.Size, false); err != nil {
		return fmt.Errorf("send %s/%s: %w", in, name, err)
	}
	size := st.Size
	if st, err = w.source.changed(fd, in, name, st); err != nil {
		return err
	}
	return w.out.sendRest(fd, in, name, st, size)
}

// node sends what is never opened: a link, a FIFO, a socket or a device.
func (w *walk) node(in *dir.Dir, name string, st *unix.Stat_t) error {
	var target string
	var err error
	if format(st) == unix.S_IFLNK {
		target, err = readlink(in, name)
		if errors.Is(err, unix.EINVAL) { // by now something else
			err = clone.ErrGone
		}
		if err != nil {
			return w.source.passOver(err)
		}
	}
	if err := w.out.sendNode(in, name, st, target); err != nil {
		return err
	}
	err = w.out.sendXattrs(xattr.Of(in, name), in.String()+"/"+name)
	if !w.source.still && errors.Is(err, fs.ErrNotExist) { // as far as it came
		w.source.missed++
		err = nil
	}
	if err != nil {
		return w.source.passOver(err)
	}
	return w.out.sendDone()
}

// addTo adds what this round did to what a pass did.
func (w *walk) addTo(r *Result) {
	r.Entries, r.Files, r.Missed = w.meter.done.Entries, w.meter.done.Files, w.source.missed
	r.Sent += w.out.files
	r.Bytes += w.meter.done.Bytes
}
