package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Sender sends a tree over a connection. It must not be used by several goroutines at once. Who made the connection closes it, also after
// an error; until then a goroutine reads from it.
type Sender struct {
	wire     *wire
	progress func(Progress)
	answers  *answers // nil before the peer said who it is
	broken   error    // why the connection is of no use

	clock *clone.Clock
	// names say of what entries the target was made by the last pass. See clone.Names.
	names clone.Names
	attrs *attributer
	block []byte
	data  []byte
}

// NewSender has not sent anything yet.
func NewSender(conn io.ReadWriter, o Options) *Sender {
	return &Sender{wire: newWire(conn, o), progress: o.Progress, attrs: newAttributer(), block: newBlockBuffer(), data: make([]byte, dataBytes)}
}

// Pass makes the target equal to from, as far as that keeps still.
func (s *Sender) Pass(ctx context.Context, from *dir.Dir, p Pass) (Result, error) {
	result, err := use(ctx, s, func(ctx context.Context) (Result, error) { return s.pass(ctx, from, p) })
	if err != nil {
		return result, fmt.Errorf("transfer %s: %w", from, err)
	}
	return result, nil
}

// Finish returns when the target is durable, and ends the protocol.
func (s *Sender) Finish(ctx context.Context) error {
	_, err := use(ctx, s, func(ctx context.Context) (struct{}, error) {
		if err := s.wire.sendEmpty(ctx, kindFinish); err != nil {
			return struct{}{}, err
		}
		_, err := s.answers.await(kindFinished)
		return struct{}{}, err
	})
	if err != nil {
		return fmt.Errorf("finish a transfer: %w", err)
	}
	s.broken = errFinished
	return nil
}

var errFinished = errors.New("the transfer is finished")

// use calls with a connection that the end of ctx interrupts, and remembers if it is of no use after that.
func use[T any](ctx context.Context, s *Sender, call func(context.Context) (T, error)) (result T, err error) {
	if s.broken != nil {
		return result, s.broken
	}
	release, err := s.wire.bind(ctx)
	if err != nil {
		return result, err
	}
	defer release()
	if s.answers == nil {
		err = s.greet(ctx)
	}
	if err == nil {
		result, err = call(ctx)
	}
	if err == nil || errors.Is(err, ErrChanged) || errors.Is(err, clone.ErrMounted) || errors.Is(err, ErrDiffers) || errors.Is(err, ErrNoRoom) {
		return result, err
	}
	err = s.explain(ctx, err)
	s.broken = err
	s.wire.interrupt() // so that listen ends
	return result, err
}

// explain says why a call on the connection failed: the peer may have said so.
func (s *Sender) explain(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if s.answers == nil || errors.Is(err, errSource) || errors.Is(err, ErrProtocol) {
		return err
	}
	patience := time.NewTimer(lastWords)
	defer patience.Stop()
	for {
		select {
		case _, more := <-s.answers.all:
			if !more {
				return s.answers.failed
			}
		case <-patience.C:
			return err
		}
	}
}

// lastWords is for how long a side that failed waits for the other to say why, or to read why.
const lastWords = time.Second

// errSource is of the source, not of the connection.
var errSource = errors.New("read the source")

func (s *Sender) greet(ctx context.Context) error {
	if err := s.wire.sendHello(ctx, kindHello); err != nil {
		return err
	}
	k, p, err := s.wire.read()
	if err == nil && k == kindFailure {
		err = fmt.Errorf("%w: %q", ErrPeer, p.text(maxMessage))
	}
	if err == nil {
		err = checkHello(kindWelcome, k, p)
	}
	if err != nil {
		return err
	}
	if s.clock, err = clone.OpenClock(); err != nil {
		return err
	}
	runtime.AddCleanup(s, func(c *clone.Clock) { _ = c.Close() }, s.clock)
	s.answers = newAnswers(s.wire)
	go s.answers.listen()
	return nil
}

// Now is a moment by the clock of a filesystem: what changes in it later has not an earlier ctime. It makes a file without a
// name; where there is no room for one, it asks the clock that local filesystems have.
func Now(d *dir.Dir) (time.Time, error) {
	fd, err := unix.Openat(d.Fd(), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			return time.Time{}, err
		}
		return time.Unix(now.Unix()), nil
	}
	defer func() { _ = unix.Close(fd) }() // nothing is in it
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return time.Time{}, fmt.Errorf("ask for the time of %s: %w", d, err)
	}
	return time.Unix(st.Ctim.Unix()), nil
}

// later is the first moment after all that has happened so far: clocks of filesystems tick each few milliseconds.
func later(ctx context.Context, d *dir.Dir) (time.Time, error) {
	first, err := Now(d)
	now := first
	for err == nil && !now.After(first) {
		if err = ctx.Err(); err == nil {
			now, err = Now(d)
		}
	}
	return now, err
}

// maxRounds are how often a tree is sent in a pass: again if directories were moved meanwhile, or if there was no room before what
// is gone was removed.
const maxRounds = 4

func (s *Sender) pass(ctx context.Context, from *dir.Dir, p Pass) (Result, error) {
	if p.Verify != VerifyNone && !p.Still {
		return Result{}, fmt.Errorf("%w: only what is still can be compared", errSource)
	}
	if p.Base != nil {
		if p.Since = (time.Time{}); !p.Still {
			return Result{}, fmt.Errorf("%w: only of what is still all differences from a base can be found", errSource)
		}
	}
	since, began, err := s.beginPass(ctx, from, p)
	if err != nil {
		return Result{}, err
	}
	result := Result{Began: began}
	before := s.names
	s.names = clone.Names{} // unless the pass succeeds
	names, before, err := s.rounds(ctx, from, p, &result, before, since)
	if err != nil {
		return result, err
	}
	if p.Verify != VerifyNone {
		c := s.comparison(ctx, from, p, began)
		c.track = track{since: since, before: before, base: beginBase(p.Base)}
		err := c.run(&result)
		c.track.base.close()
		if err != nil {
			return result, err
		}
	}
	s.names = names
	return result, nil
}

// rounds sends the tree until a round has met all of it. It returns the names that it has seen, and those of before that still count.
func (s *Sender) rounds(ctx context.Context, from *dir.Dir, p Pass, result *Result, before clone.Names, since time.Time) (names, still clone.Names, err error) {
	began := result.Began
	var noRoom int64 // entries in the round before
	for round := 1; ; round++ {
		w := s.walk(ctx, from, stillness{p.Still, began.UnixNano()}, track{since: since, before: before, base: beginBase(p.Base)})
		err := w.round()
		w.track.base.close()
		p.Base = nil // the target is another by now
		w.addTo(result)
		if err == nil {
			if w.source.leased {
				result.Began = p.Since
			}
			return w.names, before, nil
		}
		if errors.Is(err, dir.ErrMoved) && p.Still {
			return names, before, fmt.Errorf("%w: %w", ErrChanged, err)
		}
		again := errors.Is(err, dir.ErrMoved) || errors.Is(err, ErrNoRoom) && (w.noRoom < noRoom || noRoom == 0)
		if noRoom = w.noRoom; round == maxRounds || !again {
			return names, before, err
		}
		if !p.Still { // a name may have been another entry's in this round
			before = clone.Names{}
		}
	}
}

func (s *Sender) walk(ctx context.Context, from *dir.Dir, is stillness, on track) *walk {
	m := &meter{call: s.progress}
	source := &source{stillness: is, flushed: !on.since.IsZero()}
	out := &output{ctx: ctx, wire: s.wire, attrs: s.attrs, meter: m, data: s.data}
	return &walk{
		ctx: ctx, wire: s.wire, from: from, source: source, out: out, answers: s.answers, meter: m, track: on, names: clone.NewNames(),
		offers: offers{ctx: ctx, wire: s.wire, answers: s.answers, source: source, out: out, block: s.block, pending: make(map[uint64]*offer)},
	}
}

func (s *Sender) comparison(ctx context.Context, from *dir.Dir, p Pass, began time.Time) *comparison {
	return &comparison{
		ctx: ctx, wire: s.wire, answers: s.answers, attrs: s.attrs, block: s.block, meter: meter{call: s.progress},
		from: from, all: p.Verify == VerifyAll, still: stillness{true, began.UnixNano()},
	}
}

// beginPass decides what need not be read. The ctime of what was changed after a clock was set back may be older than a pass before.
// A store through a mapping changes it only if the page was clean: so all is written to the disk once. Not each filesystem writes or notes that.
func (s *Sender) beginPass(ctx context.Context, from *dir.Dir, p Pass) (since, began time.Time, err error) {
	since = p.Since
	set, err := s.clock.WasSet()
	if err != nil {
		return since, began, err
	}
	filesystem, err := dir.FilesystemOf(from)
	if err != nil {
		return since, began, err
	}
	if began, err = later(ctx, from); err != nil {
		return since, began, err
	}
	if set || !filesystem.NotesChanges() || !since.Before(began) {
		since = time.Time{}
	}
	if since.IsZero() {
		s.names = clone.Names{}
	}
	if since.IsZero() && !p.Still {
		err = clone.Sync(from)
	}
	return since, began, err
}
