package transfer

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
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
	r := &receiver{ctx: ctx, wire: w, into: into, progress: o.Progress, finished: o.Finished, allocated: o.Allocated, attrs: newAttributer(), block: newBlockBuffer(), seed: maphash.MakeSeed(), seen: newSpool(into)}
	err = r.run()
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

type receiver struct {
	ctx   context.Context
	wire  *wire
	into  *dir.Dir
	btrfs bool
	// allocated: see Options.
	allocated bool
	progress  func(Progress)
	finished  func() error
	shown     time.Time
	done      Progress
	attrs     *attributer
	block     []byte
	seed      maphash.Seed

	// Of a round.
	begun   bool
	tree    *dir.Descent[place]
	lost    int // levels below a directory that could not be made
	lastID  uint64
	pending map[uint64]*target
	current *target
	links   links
	seen    *spool // names that the source has in the directories from the root to the current one, by their fingerprints
	noRoom  int64
	first   string // for which there was no room
	compare *compared
}

// A place is what is known of a directory of the tree.
type place struct {
	fresh bool  // it was made in this round
	mark  int64 // where its names begin in receiver.seen
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
		r.show()
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func (r *receiver) show() {
	if r.progress == nil || time.Since(r.shown) < 100*time.Millisecond {
		return
	}
	r.shown = time.Now()
	r.progress(r.done)
}

func (r *receiver) finish(p parser) error {
	if err := p.end(); err != nil {
		return err
	}
	if err := clone.Sync(r.into); err != nil {
		return err
	}
	if r.finished != nil {
		if err := r.finished(); err != nil {
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

// forget ends a round, wherever it is.
func (r *receiver) forget() error {
	for _, t := range r.pending {
		t.close()
	}
	if r.current != nil {
		r.current.close()
	}
	var err error
	if r.tree != nil {
		err = r.tree.Close()
	}
	err = errors.Join(err, r.links.close())
	r.compare.close()
	r.seen.close()
	r.begun, r.tree, r.lost, r.pending, r.current, r.compare = false, nil, 0, nil, nil, nil
	r.noRoom, r.first = 0, ""
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
	case kindVerify:
		return r.beginCompare(p)
	case kindCheck, kindDigests, kindCheckHole, kindUp, kindVerified:
		if r.compare == nil {
			return outOfOrder(k)
		}
		return r.compareFrame(k, p)
	}
	if !r.begun {
		return outOfOrder(k)
	}
	switch k {
	case kindEnter, kindLeave, kindFile, kindNode, kindSelect, kindEnd:
		if r.current != nil {
			return outOfOrder(k)
		}
	default:
		if r.current == nil {
			return outOfOrder(k)
		}
	}
	switch k {
	case kindEnter:
		return r.enter(p)
	case kindLeave:
		return r.leave(p)
	case kindFile:
		return r.file(p)
	case kindNode:
		return r.node(p)
	case kindSelect:
		return r.selectFile(p)
	case kindEnd:
		return r.end(p)
	}
	return r.currentFrame(k, p)
}

func outOfOrder(k kind) error {
	return fmt.Errorf("%w: a frame of kind %d out of order", ErrProtocol, k)
}

func (r *receiver) begin(p parser) error {
	if err := errors.Join(p.end(), r.forget()); err != nil {
		return err
	}
	empty := true
	for _, err := range r.into.Entries() {
		if err != nil {
			return err
		}
		empty = false
		break
	}
	r.begun = true
	r.pending = make(map[uint64]*target)
	r.seen = newSpool(r.into)
	r.links = links{root: r.into}
	r.done = Progress{}
	var err error
	if r.tree, err = dir.NewDescent(r.into, place{fresh: empty}); err != nil {
		return err
	}
	r.wire.begin(kindReady)
	r.wire.put8(byte(flagIf(empty, flagEmpty) | flagIf(r.btrfs, flagBtrfs)))
	return r.wire.send(r.ctx)
}

// try notes that there was no room for an entry, which the sender tries again once the rest is there. Other errors end all.
func (r *receiver) try(t *target, err error) error {
	if err == nil || !outOfRoom(err) {
		return err
	}
	t.failed = true
	if r.noRoom++; r.noRoom == 1 {
		r.first = err.Error()
		r.first = r.first[:min(len(r.first), maxMessage)]
	}
	return nil
}

// note remembers that the source has a name in the current directory.
func (r *receiver) note(name string) error {
	if r.tree.Current().Value.fresh {
		return nil
	}
	return r.seen.push(maphash.String(r.seed, name))
}

func (r *receiver) enter(p parser) error {
	name := p.name()
	if err := p.end(); err != nil {
		return err
	}
	r.done.Entries++
	if r.lost > 0 {
		r.lost++
		return nil
	}
	if err := r.note(name); err != nil {
		return err
	}
	in := r.tree.Current()
	is, err := lookFor(in.Dir, name)
	if err != nil {
		return err
	}
	if is != nil && format(is) == unix.S_IFDIR {
		return r.tree.Enter(name, place{mark: r.seen.size()})
	}
	if is != nil {
		err = r.remove(in.Dir, name)
	}
	if err == nil {
		err = r.tree.Make(name, place{fresh: true, mark: r.seen.size()})
	}
	var t target
	if err = r.try(&t, err); t.failed {
		r.lost++
	}
	return err
}

// lookFor returns nil for a missing name.
func lookFor(in *dir.Dir, name string) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	err := unix.Fstatat(in.Fd(), name, st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("stat", in, name, err)
	}
	return st, nil
}

// remove removes an entry. A file gives its blocks back first: XFS counts them until some time after the last name is gone.
func (r *receiver) remove(in *dir.Dir, name string) error {
	is, err := lookFor(in, name)
	if err != nil || is == nil {
		return err
	}
	if format(is) == unix.S_IFREG && is.Nlink == 1 {
		fd, err := unix.Openat(in.Fd(), name, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return pathError("truncate", in, name, err)
		}
		_ = unix.Close(fd) // nothing was written
	}
	return dir.RemoveTree(r.ctx, in, name, func(ctx context.Context) error { return ctx.Err() })
}

func (r *receiver) leave(p parser) error {
	st := p.attributes()
	if err := p.end(); err != nil {
		return err
	}
	if format(st) != unix.S_IFDIR {
		return fmt.Errorf("%w: a directory that is none", ErrProtocol)
	}
	t := &target{kind: aDirectory, fd: notOpen, want: st, lost: r.lost > 0}
	r.current = t
	if t.lost {
		t.failed = true
		return nil
	}
	d := r.tree.Current().Dir
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	t.dir, t.holder, t.path = fd, xattr.Descriptor(fd), d.String()
	return r.try(t, wrap("set the owner and mode of", t.path, clone.SetOwner(fd, st)))
}

// leaveDone removes from a directory what the source does not have, and gives it its times, which that changes.
func (r *receiver) leaveDone(t *target) error {
	if t.lost {
		r.lost--
		return nil
	}
	in := r.tree.Current()
	if !in.Value.fresh {
		if err := r.removeGone(in.Dir, in.Value.mark); err != nil {
			return err
		}
	}
	r.seen.cut(in.Value.mark)
	atRoot := r.tree.Depth() == 0
	if atRoot {
		if err := r.links.remove(r.ctx); err != nil {
			return err
		}
	}
	if !t.failed {
		if err := r.try(t, setTimes(t.dir, "", unix.AT_EMPTY_PATH, t.want, t.path)); err != nil {
			return err
		}
	}
	if atRoot {
		return nil
	}
	return r.tree.Leave()
}

// namesAtOnce are compared at once with those that the source has.
const namesAtOnce = 256 << 10

func (r *receiver) removeGone(in *dir.Dir, mark int64) error {
	parts := uint64((r.seen.size()-mark)/namesAtOnce + 1)
	for part := range parts {
		has := make(map[uint64]struct{})
		err := r.seen.each(mark, func(name uint64) {
			if name%parts == part {
				has[name] = struct{}{}
			}
		})
		if err == nil {
			err = r.removeUnless(in, func(name uint64) bool {
				_, found := has[name]
				return found || name%parts != part
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeUnless removes the entries of a directory but for those that are kept, by the hashes of their names.
func (r *receiver) removeUnless(in *dir.Dir, kept func(name uint64) bool) error {
	for entry, err := range in.Entries() {
		if err == nil {
			err = r.ctx.Err()
		}
		if err != nil {
			return err
		}
		if kept(maphash.String(r.seed, entry.Name)) || r.links.is(in, entry.Name) {
			continue
		}
		if err := r.remove(in, entry.Name); err != nil {
			return err
		}
	}
	return nil
}

func (r *receiver) selectFile(p parser) error {
	id := uint64(p.i64())
	if err := p.end(); err != nil {
		return err
	}
	if r.current = r.pending[id]; r.current == nil {
		return fmt.Errorf("%w: content of a file that was not asked for", ErrProtocol)
	}
	return nil
}

func (r *receiver) end(p parser) error {
	flags := p.u8()
	if err := p.end(); err != nil {
		return err
	}
	if r.tree.Depth() > 0 || r.lost > 0 || len(r.pending) > 0 {
		return fmt.Errorf("%w: a round that is not complete", ErrProtocol)
	}
	noRoom, first := r.noRoom, r.first
	if err := r.forget(); err != nil {
		return err
	}
	if flags&flagSync != 0 && noRoom == 0 {
		if err := clone.Sync(r.into); err != nil {
			return err
		}
	}
	r.wire.begin(kindRound)
	r.wire.put64(noRoom)
	r.wire.putString(first)
	return r.wire.send(r.ctx)
}
