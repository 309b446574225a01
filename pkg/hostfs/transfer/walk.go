package transfer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// A walk is a visitor of the source that sends it once.
type walk struct {
	s     *Sender
	ctx   context.Context
	from  *dir.Dir
	still bool
	began int64 // the pass, in nanoseconds

	track
	push  bool // the target is empty
	btrfs bool // it keeps the attributes of btrfs
	names clone.Names
	// pending are files that the receiver was asked about, or that it wants.
	pending map[uint64]*offer
	result  Result
	noRoom  int64     // entries for which the target had none
	leased  bool      // a file could not be opened: for the next pass nothing has changed
	shown   time.Time // the progress
}

// A handle keeps a directory open for the files in it that are pending.
type handle struct {
	*dir.Dir
	users int
}

func (h *handle) release() {
	if h == nil {
		return
	}
	if h.users--; h.users == 0 {
		_ = h.Close() // opened for reading
	}
}

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

// round sends the tree.
func (w *walk) round() error {
	defer w.close()
	w.pending = make(map[uint64]*offer)
	if err := w.s.wire.sendEmpty(w.ctx, kindBegin); err != nil {
		return err
	}
	ready, err := w.s.await(kindReady)
	if err != nil {
		return err
	}
	w.push, w.btrfs = ready.flags&flagEmpty != 0, ready.flags&flagBtrfs != 0
	root, err := w.look(statSelf(w.from))
	if err != nil {
		return source(err)
	}
	w.begin(root)
	if err := dir.Visit(w.from, w); err != nil {
		return source(err)
	}
	for len(w.pending) > 0 {
		if err := w.serve(true); err != nil {
			return err
		}
	}
	if err := w.sendLeave(w.from); err != nil {
		return source(err)
	}
	w.s.wire.begin(kindEnd)
	w.s.wire.put8(byte(flagIf(!w.still, flagSync)))
	if err := w.s.wire.send(w.ctx); err != nil {
		return err
	}
	end, err := w.s.await(kindRound)
	if w.noRoom = end.count; err == nil && w.noRoom > 0 {
		err = fmt.Errorf("%w for %d entries, the first: %q", ErrNoRoom, end.count, end.messages)
	}
	return err
}

func (w *walk) close() {
	for _, o := range w.pending {
		o.close()
	}
	w.pending = nil
	for len(w.levels) > 0 {
		w.up()
	}
}

func flagIf(set bool, flag int) int {
	if set {
		return flag
	}
	return 0
}

// source marks an error of a system call on the source: it is not explained by the connection.
func source(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	return err
}

// look is for an entry that was just looked at. Of what is still, none has changed since the pass began, but one whose ctime is
// in the future, since a clock was wrong.
func (w *walk) look(st *unix.Stat_t, err error) (*unix.Stat_t, error) {
	return st, checkStill(w.still, w.began, st, err)
}

func checkStill(still bool, began int64, st *unix.Stat_t, err error) error {
	switch {
	case !still:
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, clone.ErrGone):
		return fmt.Errorf("%w: %w", ErrChanged, err)
	case err == nil && st.Ctim.Nano() >= began && st.Ctim.Nano() <= time.Now().UnixNano():
		return ErrChanged
	}
	return err
}

// isGone says that an entry went while it was looked at, and counts it.
func (w *walk) isGone(err error) bool {
	gone := !errors.Is(err, ErrChanged) && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, clone.ErrGone))
	if gone {
		w.result.Missed++
	}
	return gone
}

// changedAt is ErrChanged for an entry.
func changedAt(in *dir.Dir, name string, err error) error {
	if errors.Is(err, ErrChanged) {
		return fmt.Errorf("%s/%s: %w", in, name, err)
	}
	return err
}

// Enter sends a directory.
func (w *walk) Enter(d, in *dir.Dir, name string) error {
	if err := w.step(); err != nil {
		return err
	}
	st, err := w.look(statSelf(d))
	if err != nil {
		return changedAt(in, name, err)
	}
	w.names.Add(w.current().number, name, st)
	w.enter(name, st)
	w.result.Entries++
	w.s.wire.begin(kindEnter)
	w.s.wire.putString(name)
	return w.s.wire.send(w.ctx)
}

// Leave sends the attributes of a directory.
func (w *walk) Leave(d *dir.Dir) error {
	if err := w.sendLeave(d); err != nil {
		return err
	}
	w.up()
	return nil
}

func (w *walk) sendLeave(d *dir.Dir) error {
	st, err := w.look(statSelf(d))
	if err != nil {
		return changedAt(d, ".", err)
	}
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	w.s.wire.begin(kindLeave)
	w.s.wire.putAttributes(st)
	if err := w.s.wire.send(w.ctx); err != nil {
		return err
	}
	if err := w.sendXattrs(xattr.Descriptor(fd), d.String()); err != nil {
		return err
	}
	return w.s.wire.sendEmpty(w.ctx, kindDone)
}

// step is before each entry.
func (w *walk) step() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	w.show()
	for len(w.s.answers) > 0 {
		if err := w.serve(false); err != nil {
			return err
		}
	}
	return nil
}

// show calls Options.Progress a few times a second.
func (w *walk) show() {
	if w.s.progress == nil || time.Since(w.shown) < 100*time.Millisecond {
		return
	}
	w.shown = time.Now()
	w.s.progress(Progress{Entries: w.result.Entries, Files: w.result.Files, Bytes: w.result.Bytes})
}

// File sends an entry that is no directory.
func (w *walk) File(in *dir.Dir, name string) error {
	if err := w.step(); err != nil {
		return err
	}
	st, err := w.look(clone.StatSource(in, name))
	if errors.Is(err, clone.ErrMounted) {
		return w.Mount(in, name)
	}
	if w.isGone(err) {
		return nil
	}
	if err == nil {
		switch format(st) {
		case unix.S_IFREG:
			err = w.file(in, name, st)
		case unix.S_IFDIR: // by now
			err = checkStill(w.still, w.began, st, clone.ErrGone)
		default:
			err = w.node(in, name, st)
		}
	}
	if w.isGone(err) {
		return nil
	}
	if err != nil {
		return changedAt(in, name, err)
	}
	w.names.Add(w.current().number, name, st)
	w.result.Entries++
	return nil
}

// Mount leaves to the next pass what something is mounted on: nothing would be known of what is below. The last pass is an error.
func (w *walk) Mount(in *dir.Dir, name string) error {
	if w.still {
		return clone.Mounted(in, name)
	}
	w.result.Missed++
	return nil
}

// file sends a regular file at once to an empty target, and else asks what of it the receiver wants. That is also asked if it has
// several names, since the receiver may have it under another.
func (w *walk) file(in *dir.Dir, name string, st *unix.Stat_t) error {
	w.result.Files++
	if w.push && st.Nlink == 1 {
		return w.pushFile(in, name, st)
	}
	for len(w.pending) >= window {
		if err := w.serve(true); err != nil {
			return err
		}
	}
	h, err := w.hold(in)
	if err != nil {
		return err
	}
	base, same := w.inBase(in, name, st)
	w.s.nextID++
	w.pending[w.s.nextID] = &offer{in: h, name: name, st: st, fd: notOpen, base: base}
	return w.sendFile(in, name, st, w.s.nextID, flagIf(same || w.isSettled(name, st), flagSettled)|flagIf(base != nil, flagBase))
}

// hold keeps the current directory open for a file in it.
func (w *walk) hold(in *dir.Dir) (*handle, error) {
	at := w.current()
	if at.handle == nil {
		d, err := in.Reopen()
		if err != nil {
			return nil, err
		}
		at.handle = &handle{Dir: d, users: 1}
	}
	at.handle.users++
	return at.handle, nil
}

func (w *walk) sendFile(in *dir.Dir, name string, st *unix.Stat_t, id uint64, flags int) error {
	out := w.s.wire
	out.begin(kindFile)
	out.put64(int64(id))
	out.put8(byte(flags | flagIf(st.Nlink > 1, flagLinked)))
	out.putAttributes(st)
	putLink(out, in, name, st)
	out.putString(name)
	return out.send(w.ctx)
}

// linkBytes identify an entry that has several names.
const linkBytes = 16

func putLink(out *wire, in *dir.Dir, name string, st *unix.Stat_t) {
	var link [linkBytes]byte
	if st.Nlink > 1 {
		sum := sha256.Sum256([]byte(clone.Identify(in, name, st)))
		copy(link[:], sum[:])
	}
	out.putRaw(link[:])
}

func (w *walk) pushFile(in *dir.Dir, name string, st *unix.Stat_t) error {
	fd, err := w.open(in, name, st)
	if err != nil {
		return w.passOver(err)
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading
	w.s.nextID++
	if err := w.sendFile(in, name, st, w.s.nextID, flagPush); err != nil {
		return err
	}
	if err := w.sendRange(fd, 0, st.Size, false); err != nil {
		return fmt.Errorf("send %s/%s: %w", in, name, err)
	}
	return w.finish(fd, in, name, st, st.Size)
}

// open opens a file, once no write to it is under way that has set its ctime before (see clone.AwaitCalls). What was written
// to it before is on the disk then, so that a store through a mapping shows by the ctime.
func (w *walk) open(in *dir.Dir, name string, st *unix.Stat_t) (int, error) {
	fd, err := clone.OpenRegular(in, name, st)
	if err != nil {
		return notOpen, err
	}
	if !w.still {
		clone.AwaitCalls(fd)
	}
	if !w.still && !w.since.IsZero() {
		const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		err = unix.SyncFileRange(fd, 0, 0, all)
	}
	if err == nil {
		err = unix.Fstat(fd, st)
	}
	if err != nil {
		_ = unix.Close(fd) // opened for reading
		return notOpen, pathError("read", in, name, err)
	}
	return fd, checkStillOr(fd, w, st)
}

// checkStillOr closes a file that is not still.
func checkStillOr(fd int, w *walk, st *unix.Stat_t) error {
	err := checkStill(w.still, w.began, st, nil)
	if err != nil {
		_ = unix.Close(fd) // opened for reading
	}
	return err
}

// passOver leaves to the next pass what cannot be opened now.
func (w *walk) passOver(err error) error {
	switch {
	case w.still && (errors.Is(err, clone.ErrGone) || errors.Is(err, fs.ErrNotExist)):
		return fmt.Errorf("%w: %w", ErrChanged, err)
	case w.isGone(err):
		return nil
	case !w.still && errors.Is(err, clone.ErrLeased):
		w.leased = true
		w.result.Missed++
		return nil
	}
	return err
}

// sendRange sends the content between two offsets but for what is zero, and where that is if there may be something else on the
// target.
func (w *walk) sendRange(fd int, at, end int64, punch bool) error {
	hole := at // where one begins that was not sent yet
	for at < end {
		from, to, err := clone.NextData(fd, at, end)
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
		if from == to { // none: a file that was cut off has a hole here, too
			break
		}
		for at = from; at < to; {
			next := min(to, (at/dataBytes+1)*dataBytes)
			if err := w.sendData(fd, at, int(next-at), punch, &hole); err != nil {
				return err
			}
			at = next
		}
	}
	return w.sendHole(punch, hole, end)
}

// sendHole sends where there is nothing up to an offset.
func (w *walk) sendHole(punch bool, hole, until int64) error {
	if !punch || hole == until {
		return nil
	}
	w.s.wire.begin(kindHole)
	w.s.wire.put64(hole)
	w.s.wire.put64(until - hole)
	return w.s.wire.send(w.ctx)
}

// sendData reads a part of a file, and sends the granules that are not zero.
func (w *walk) sendData(fd int, at int64, length int, punch bool, hole *int64) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	w.show()
	content := w.s.data[:length]
	if err := readAt(fd, content, at); err != nil {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	for len(content) > 0 {
		var n int
		for n < len(content) {
			part := content[n:min(len(content), n+int(granule-(at+int64(n))%granule))]
			if isZero(part) {
				break
			}
			n += len(part)
		}
		if n == 0 {
			n = min(len(content), int(granule-at%granule))
		} else {
			if err := w.sendHole(punch, *hole, at); err != nil {
				return err
			}
			w.s.wire.begin(kindData)
			w.s.wire.put64(at)
			w.s.wire.putRaw(content[:n])
			if err := w.s.wire.send(w.ctx); err != nil {
				return err
			}
			w.result.Bytes += int64(n)
			*hole = at + int64(n)
		}
		content, at = content[n:], at+int64(n)
	}
	return nil
}

// finish sends what is known of a file only after its content, of which so many bytes were sent. If it is longer by now, the rest
// is sent, too.
func (w *walk) finish(fd int, in *dir.Dir, name string, before *unix.Stat_t, size int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return pathError("stat", in, name, err)
	}
	if st.Ctim != before.Ctim || st.Size != before.Size {
		if w.still {
			return ErrChanged
		}
		w.result.Missed++
	}
	if st.Size > size {
		if err := w.sendRange(fd, size, st.Size, false); err != nil {
			return fmt.Errorf("send %s/%s: %w", in, name, err)
		}
	}
	w.result.Sent++
	return w.sendRest(&st, xattr.Descriptor(fd), in.String()+"/"+name)
}

// sendRest sends attributes, after the content.
func (w *walk) sendRest(st *unix.Stat_t, h xattr.Holder, path string) error {
	w.s.wire.begin(kindAttributes)
	w.s.wire.putAttributes(st)
	if err := w.s.wire.send(w.ctx); err != nil {
		return err
	}
	if err := w.sendXattrs(h, path); err != nil {
		return err
	}
	return w.s.wire.sendEmpty(w.ctx, kindDone)
}

func (w *walk) sendXattrs(h xattr.Holder, path string) error {
	out := w.s.wire
	err := w.s.attrs.each(h, w.btrfs, func(name string, value []byte) error {
		out.begin(kindXattr)
		out.putString(name)
		out.putRaw(value)
		return out.send(w.ctx)
	})
	var number unix.Errno
	if errors.As(err, &number) {
		return &fs.PathError{Op: "read the attributes of", Path: path, Err: number}
	}
	return err
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
			return w.passOver(err)
		}
	}
	out := w.s.wire
	out.begin(kindNode)
	out.put8(byte(flagIf(st.Nlink > 1, flagLinked)))
	out.putAttributes(st)
	putLink(out, in, name, st)
	out.putString(name)
	out.putString(target)
	if err := out.send(w.ctx); err != nil {
		return err
	}
	out.begin(kindAttributes)
	out.putAttributes(st)
	if err := out.send(w.ctx); err != nil {
		return err
	}
	err = w.sendXattrs(xattr.Of(in, name), in.String()+"/"+name)
	if !w.still && errors.Is(err, fs.ErrNotExist) { // as far as it came
		w.result.Missed++
		err = nil
	}
	if err != nil {
		return w.passOver(err)
	}
	return out.sendEmpty(w.ctx, kindDone)
}
