package mover

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// In is the side that gets the volume.
type In struct {
	Driver Driver
	Open   Open
	// Receive fills the copy, and calls finished when all of it is on the disk, before the source hears of it.
	Receive func(ctx context.Context, conn net.Conn, into *dir.Dir, is Receiving, finished func() error) error
	// Volume is the volume id, Move the uid of the move, Peer the other node, and Pool that of the copy; empty where there is one.
	Volume, Move, Peer, Pool string
	// Fence is that as of which the copy was confirmed: then Serve only tells the source, as often as that asks, whether this node has the
	// volume. Empty for a copy that is filled.
	Fence string
	// Aborts has Serve remove the copy. One that may be whole goes only when the source says that it has the volume: it may have been set up
	// anew since the removal was asked for, and this node may hear of that late.
	Aborts bool
	Report func(Event)

	finished string // what the last session is called of which all is on the disk
}

// Receiving says of a copy that is filled what is known of it.
type Receiving struct {
	// Block is for the file of a block volume. It has its space set aside: what is a hole in the source need not be one there.
	Block bool
	// Doubted says that what is in memory of the copy may not be on the disk: a session before has not come to its end.
	Doubted bool
}

// Ready returns an error if the driver cannot get a volume, since it is of another version.
func (i *In) Ready(ctx context.Context) error {
	_, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	if moves.IsUnknown(err) {
		return err
	}
	return nil
}

// Serve has the source copy the volume, until it has handed it over, or vouches for the volume, until ctx ends. A session of the source ends the one before, whose connection
// may have been cut without a word. A connection that fails ends nothing else. Serve closes the listener, and can be repeated.
func (i *In) Serve(ctx context.Context, listener net.Listener) error {
	ctx, end := context.WithCancelCause(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer end(nil)
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	defer func() { _ = listener.Close() }() // no connection is waited for any more
	if i.Aborts {
		if done, err := i.abortPart(ctx); done || err != nil {
			return err
		}
	}
	i.Report(Event{Event: Listening})
	var last session
	var entrance entrance
	for {
		conn, err := listener.Accept()
		switch {
		case err == nil: // it is closed with the others if ctx has ended
		case errors.Is(context.Cause(ctx), errEnded):
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		default:
			return fmt.Errorf("wait for the source: %w", err)
		}
		unproven := entrance.enter(conn)
		all.Go(func() {
			defer func() { _ = conn.Close() }() // what matters was answered
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			err := prove(ctx, conn)
			if !entrance.leave(unproven) {
				return
			}
			ended := false
			if err == nil {
				ended, err = i.listen(ctx, conn, &last)
			}
			if err != nil {
				i.Report(Event{Event: Refused, Error: err.Error()})
			}
			if ended {
				end(errEnded)
			}
		})
	}
}

// listen serves what the source says over a connection, if it does.
func (i *In) listen(ctx context.Context, conn net.Conn, last *session) (ended bool, err error) {
	says, spoke, err := hear(conn)
	if !spoke || err != nil {
		return false, err
	}
	ctx, done := last.replace(ctx)
	defer done()
	return i.serve(ctx, conn, &says)
}

var errEnded = errors.New("the volume is handed over")

// prove has a connection of TLS prove that it is the source's.
func prove(ctx context.Context, conn net.Conn) error {
	secure, ok := conn.(interface{ HandshakeContext(context.Context) error })
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	if err := secure.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("%s is not the source: %w", conn.RemoteAddr(), err)
	}
	return nil
}

// hear returns what the source says, if it does: a connection that has only asked whether the target is there ends no session.
func hear(conn net.Conn) (says hello, spoke bool, err error) {
	switch err := receive(conn, answerWithin, &says); {
	case errors.Is(err, io.EOF):
		return hello{}, false, nil
	case err != nil:
		return hello{}, false, fmt.Errorf("hear %s: %w", conn.RemoteAddr(), err)
	}
	return says, true, nil
}

// A session is the one that is served.
type session struct {
	mu     sync.Mutex
	cancel context.CancelCauseFunc
	ended  chan struct{}
}

var errReplaced = errors.New("the source has connected anew")

// replace ends the session that is served and begins another, which ends with done.
func (s *session) replace(ctx context.Context) (_ context.Context, done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel != nil {
		s.cancel(errReplaced)
		<-s.ended
	}
	ctx, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	s.cancel, s.ended = cancel, ended
	return ctx, func() {
		cancel(nil)
		close(ended)
	}
}

// serve is one session.
func (i *In) serve(ctx context.Context, conn net.Conn, says *hello) (ended bool, err error) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	into, reply, err := i.answer(ctx, *says)
	is := Receiving{Block: says.Mode == string(volume.ModeBlock)}
	if into != nil {
		defer func() { err = errors.Join(err, into.Close()) }()
		var release func()
		release, reply, is.Doubted, err = i.claim(ctx, into)
		defer release()
	}
	if err != nil {
		reply.Error = err.Error()
	}
	if sendErr := send(conn, reply); sendErr != nil || err != nil {
		return false, errors.Join(err, sendErr)
	}
	switch says.Kind {
	case sessionPass:
		return false, i.Receive(ctx, conn, into, is, func() error {
			if i.finished = reply.Filled; says.Base == "" {
				return nil
			}
			return i.based(ctx, reply.Filled, says.Base, says.Verify)
		})
	case sessionReceived:
		i.Report(Event{Event: Received})
	}
	return says.Kind == sessionEnd || says.Kind == sessionUndone, nil
}

// serves says whether sessions of a kind are served.
func (i *In) serves(kind string) bool {
	switch kind {
	case sessionVouch:
		return i.Fence != ""
	case sessionUndone:
		return i.Aborts
	}
	return i.Fence == "" && !i.Aborts
}

// answer does what a hello asks for. The directory is where passes go.
func (i *In) answer(ctx context.Context, says hello) (into *dir.Dir, reply answer, err error) {
	switch {
	case says.Version != sessions:
		return nil, reply, fmt.Errorf("version %d is spoken here, not %d", sessions, says.Version)
	case says.Volume != i.Volume || says.Move != i.Move:
		return nil, reply, fmt.Errorf("move %s of volume %s is expected here, not %s of %s", i.Move, i.Volume, says.Move, says.Volume)
	case !i.serves(says.Kind):
		return nil, reply, fmt.Errorf("a session of the kind %q is not served here", says.Kind)
	}
	switch says.Kind {
	case sessionPass:
		i.Report(Event{Event: Preparing})
		r := i.request("")
		r.Pool, r.Shape = i.Pool, says.Shape
		v, err := i.Driver.Repeat(ctx, moves.PrepareTarget, r)
		if err != nil {
			return nil, reply, err
		}
		into, err = i.Open(ctx, i.Volume, v)
		return into, answer{UID: v.UID}, err
	case sessionReceived:
		return nil, reply, i.received(ctx, says)
	case sessionEnd:
		return nil, reply, i.whole(ctx, says)
	case sessionVouch:
		return nil, reply, i.Confirm(ctx, i.Fence)
	case sessionUndone:
		ctx, cancel := context.WithTimeout(ctx, answerWithin) // after that the source has to say it again
		defer cancel()
		return nil, reply, i.Abort(ctx, true)
	}
	return nil, reply, fmt.Errorf("a session of the kind %q is not known here", says.Kind)
}

// claim has no other process fill the copy, nor the driver confirm it, until release is called: one that was replaced may still have
// a session, and would change what pods have. From then on it is not known of the copy what it equals: was has what that was. Recorded is
// instead what no other session is called: only in its place may this one record a reference that the copy equals, or that it is whole.
func (i *In) claim(ctx context.Context, into *dir.Dir) (release func(), was answer, doubted bool, err error) {
	if release, err = dir.TryLockDir(into); err != nil {
		return func() {}, was, true, fmt.Errorf("another process fills the copy of volume %s: %w", i.Volume, err)
	}
	was.Filled = beingFilled + rand.Text()
	v, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	if err == nil && (v.Move != i.Move || v.Role != string(store.MoveTarget)) {
		err = fmt.Errorf("the copy of volume %s was confirmed in between", i.Volume)
	}
	if err == nil {
		err = i.based(ctx, v.Base, was.Filled, "")
	}
	if was.UID = v.UID; !strings.HasPrefix(v.Base, beingFilled) {
		was.Base, was.Verify = v.Base, v.Verify
	}
	return release, was, was.Base == "" && (v.Base == "" || v.Base != i.finished), err
}

// beingFilled begins what is recorded of a copy that a session fills. No token of a reference has a hyphen.
const beingFilled = "filling-"

// based records what reference of the source the copy equals by which comparison, in the place of what was recorded.
func (i *In) based(ctx context.Context, was, token, verify string) error {
	r := i.request("")
	r.Was, r.Base, r.Verify = was, token, verify
	_, err := i.Driver.Repeat(ctx, moves.Based, r)
	return err
}

// received records that the copy is whole, if it is the one that the source has filled.
func (i *In) received(ctx context.Context, says hello) error {
	v, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	if err != nil {
		return err
	}
	if v.UID != says.UID {
		return fmt.Errorf("the copy of volume %s is not the one that was filled: it was aborted in between", i.Volume)
	}
	r := i.request(says.Fence)
	r.Was = says.Filled
	_, err = i.Driver.Repeat(ctx, moves.Received, r)
	return err
}

// whole returns an error unless the copy is whole, or confirmed.
func (i *In) whole(ctx context.Context, says hello) error {
	v, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	if err == nil && v.Moved != i.Move && (v.Move != i.Move || v.Fence != says.Fence) {
		err = fmt.Errorf("the copy of volume %s is not whole", i.Volume)
	}
	return err
}

// Confirm makes the copy the volume. The fence is what the source has reported when it had handed the volume over. Repeated, it succeeds
// only where the volume is.
func (i *In) Confirm(ctx context.Context, fence string) error {
	_, err := i.Driver.Repeat(ctx, moves.ConfirmTarget, i.request(fence))
	return err
}

// abortPart removes a copy that cannot be all of the volume, and says whether it has. One that the driver cannot describe may be.
func (i *In) abortPart(ctx context.Context) (done bool, err error) {
	v, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	switch {
	case moves.IsNotFound(err):
	case err != nil:
		return false, ctx.Err()
	case v.Moved == i.Move, v.Move == i.Move && v.Fence != "":
		return false, nil
	}
	return true, i.Abort(ctx, false)
}

// Abort removes the copy, unless it was confirmed, or even then. What else has the name is not of this move, and stays.
func (i *In) Abort(ctx context.Context, evenConfirmed bool) error {
	v, err := i.Driver.Repeat(ctx, moves.State, i.request(""))
	if err == nil && v.Move != i.Move && v.Moved != i.Move {
		return nil
	}
	// Also if there is none: it may be being made by the last call of a mover that was killed, for which only this call waits.
	r := i.request("")
	r.EvenConfirmed = evenConfirmed
	_, err = i.Driver.Repeat(ctx, moves.AbortTarget, r)
	return err
}

func (i *In) request(fence string) moves.Request {
	return moves.Request{Volume: i.Volume, Move: i.Move, Peer: i.Peer, Fence: fence}
}
