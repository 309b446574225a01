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
	answers  chan answer
	// failed is why there are no more answers, once their channel is closed.
	failed  error
	broken  error // why the connection is of no use
	greeted bool

	nextID uint64
	clock  *clone.Clock
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

// An answer is a frame of the receiver.
type answer struct {
	kind           kind
	id             uint64
	offset, length int64
	digests        []digest
	flags          byte
	count, bytes   int64
	messages       []string
}

// maxAnswers the sender has not dealt with: more of them a receiver does not send.
const maxAnswers = window*(sections+1) + 16

// listen reads all answers.
func (s *Sender) listen() {
	for {
		a, err := s.readAnswer()
		if err == nil {
			select {
			case s.answers <- a:
				continue
			default:
				err = fmt.Errorf("%w: too many answers", ErrProtocol)
			}
		}
		s.failed = err
		close(s.answers)
		s.wire.interrupt() // who is sending
		return
	}
}

func (s *Sender) readAnswer() (answer, error) {
	k, p, err := s.wire.read()
	if err != nil {
		return answer{}, err
	}
	a := answer{kind: k}
	switch k {
	case kindReady:
		a.flags = p.u8()
	case kindHave, kindSkip:
		a.id = uint64(p.i64())
	case kindWantHole, kindWantBase:
		a.id = uint64(p.i64())
		a.offset, a.length = p.extent()
	case kindWant:
		a.id = uint64(p.i64())
		a.offset, a.length = p.extent()
		if !p.failed && len(p.rest)%len(digest{}) == 0 && len(p.rest) <= sectionBlocks*len(digest{}) {
			for len(p.rest) > 0 {
				a.digests = append(a.digests, digest(p.bytes(len(digest{}))))
			}
		}
		p.failed = p.failed || a.offset%blockBytes != 0 || blocks(a.length) != int64(len(a.digests))
	case kindRound:
		a.count = p.i64()
		a.messages = []string{p.text(maxMessage)}
	case kindDifferences:
		a.count, a.bytes = p.i64(), p.i64()
		for range min(p.u32(), maxFirst) {
			a.messages = append(a.messages, p.text(maxMessage))
		}
	case kindFinished:
	case kindFailure:
		message := p.text(maxMessage)
		if err := p.end(); err != nil {
			return answer{}, err
		}
		return answer{}, fmt.Errorf("%w: %q", ErrPeer, message)
	default:
		return answer{}, fmt.Errorf("%w: a frame of kind %d", ErrProtocol, k)
	}
	return a, p.end()
}

// blocks is how many a part of a file has that begins with one.
func blocks(length int64) int64 { return length/blockBytes + min(length%blockBytes, 1) }

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
		_, err := s.await(kindFinished)
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
	if !s.greeted {
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
		case _, more := <-s.answers:
			if !more {
				return s.failed
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
	s.greeted = true
	s.answers = make(chan answer, maxAnswers)
	go s.listen()
	return nil
}

// receive waits for an answer.
func (s *Sender) receive() (answer, error) {
	if err := s.wire.w.Flush(); err != nil {
		return answer{}, err
	}
	a, more := <-s.answers
	if !more {
		return answer{}, s.failed
	}
	return a, nil
}

// await waits for an answer of that kind. Others are to what an earlier round asked.
func (s *Sender) await(k kind) (answer, error) {
	for {
		a, err := s.receive()
		if err != nil || a.kind == k {
			return a, err
		}
		if a.id == 0 || a.id > s.nextID {
			return answer{}, fmt.Errorf("%w: an answer of kind %d to no question", ErrProtocol, a.kind)
		}
	}
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
		c := &comparison{s: s, ctx: ctx, from: from, all: p.Verify == VerifyAll, began: began.UnixNano(), track: track{since: since, before: before, base: beginBase(p.Base)}}
		err := c.run(&result)
		c.base.close()
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
		w := &walk{s: s, ctx: ctx, from: from, still: p.Still, began: began.UnixNano(), names: clone.NewNames(), track: track{since: since, before: before, base: beginBase(p.Base)}}
		err := w.round()
		w.base.close()
		p.Base = nil // the target is another by now
		result.add(&w.result)
		if err == nil {
			if w.leased {
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

func (r *Result) add(round *Result) {
	r.Entries, r.Files, r.Missed = round.Entries, round.Files, round.Missed
	r.Sent += round.Sent
	r.Bytes += round.Bytes
}

// beginPass decides what need not be read. The ctime of what was changed after a clock was set back may be older than a pass before.
// A store through a mapping changes it only if the page was clean: so all is written to the disk once. Memory has no clean pages.
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
