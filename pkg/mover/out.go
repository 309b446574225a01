package mover

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Pass is one over the whole volume.
type Pass struct {
	// Since is when the pass before began, to the same copy; zero for none.
	Since time.Time
	// Last: nothing writes to the volume any more, and both sides are compared.
	Last bool
	// Reference: it is made from one, which nothing writes to. Both sides are compared then, too, so that the last pass need not.
	Reference bool
	// Base is a reference that the copy equals; nil for none.
	Base *dir.Dir
}

// A Result is what a pass did.
type Result struct {
	Began                           time.Time
	Entries, Files, Bytes, Compared int64
}

// ErrNoRoom is what a Sender returns where the copy has no room for all.
var ErrNoRoom = errors.New("the copy has no room for all of the volume")

// A Sender copies a volume over a connection: that of pkg/hostfs/transfer, or a stand-in.
type Sender interface {
	Pass(ctx context.Context, from *dir.Dir, p Pass) (Result, error)
	// Finish makes the copy durable.
	Finish(ctx context.Context) error
}

// Out is the side that has the volume.
type Out struct {
	Driver Driver
	Open   Open
	// Dial connects to the target. Remove does without where it is nil.
	Dial   func(ctx context.Context) (net.Conn, error)
	Sender func(conn net.Conn) Sender
	// Volume is the volume id, Move the uid of the move, and Peer the other node.
	Volume, Move, Peer string
	// Bytes is the promise of a volume without a record, unless it holds more.
	Bytes int64
	// LeaveSnapshots has those of the volume stay on this node.
	LeaveSnapshots bool
	Report         func(Event)
	// Verify is what the Sender compares: what the copy was compared with in another way is no base.
	Verify string
	// WasSet says whether the clock of this node was set since it was asked before; nil for one that Copy opens.
	WasSet func() (bool, error)
	// Every is how often the driver is asked whether the volume is in use, and for leave; 0 for half a second.
	Every time.Duration
	// MayFence says whether the volume may be fenced; nil for one that may.
	MayFence func() (bool, error)

	passes int
	sent   int64     // bytes, by all passes
	since  time.Time // when the last pass began
	base   string    // the reference that it was made from
	copied string    // the uid of the copy that it went to

	promised int64
}

const (
	// mostPasses are made while pods go on.
	mostPasses = 10
	// fewBytes is how much of a difference a last pass sends in little time.
	fewBytes = 64 << 20
	// asks for leave are made between passes, which keep small what is left for the last one.
	asks = 120
)

// Copy copies the volume and hands it over. Pods have to give it up at some time after it is fenced, which it is once there is leave. When
// Copy returns, the copy can be confirmed, and the source cannot be published any more. Repeating it goes on where it was.
func (o *Out) Copy(ctx context.Context) (fence string, err error) {
	if o.WasSet == nil {
		clock, err := clone.OpenClock()
		if err != nil {
			return "", err
		}
		defer func() {
			o.WasSet = nil
			_ = clock.Close() // nothing was written to it
		}()
		o.WasSet = clock.WasSet
	}
	return o.copyAll(ctx)
}

func (o *Out) copyAll(ctx context.Context) (fence string, err error) {
	v, err := o.state(ctx)
	if err != nil {
		return "", err
	}
	if v.Move != o.Move {
		if err := o.copyUntilLeave(ctx, v); err != nil {
			return "", err
		}
	}
	if v, err = o.call(ctx, moves.Fence, ""); err != nil {
		return "", err
	}
	o.promised = v.Bytes
	o.Report(Event{Event: Fenced})
	if v.HandedOver && !errors.Is(o.end(ctx, v), errRefused) {
		return v.Fence, nil
	}
	for {
		if err := o.copyStill(ctx, v); err != nil {
			return "", err
		}
		if _, err := o.call(ctx, moves.HandOver, v.Fence); err != nil {
			return "", err
		}
		// Another error is reported, and the volume is handed over all the same. A copy that is whole no more would not be confirmed:
		// a source that was to have ended has begun to fill it.
		if !errors.Is(o.end(ctx, v), errRefused) {
			return v.Fence, nil
		}
	}
}

// Promised is what the volume is promised, in bytes, and its copy too. It is known when the volume is handed over.
func (o *Out) Promised() int64 { return o.promised }

// copyStill copies what has changed since the last pass, when no pod has the volume any more.
func (o *Out) copyStill(ctx context.Context, v moves.Volume) error {
	if err := o.awaitUnused(ctx); err != nil {
		return err
	}
	filled := ""
	for {
		based := false
		err := o.session(ctx, sessionPass, hello{Shape: v.Shape}, func(conn net.Conn, is answer) error {
			filled = is.Filled
			base := o.openReference(ctx, v, is)
			if based = base != nil; based {
				defer func() { _ = base.Close() }() // opened for reading
			}
			return o.onePass(ctx, conn, v, o.Volume, is.UID, Pass{Last: true, Base: base})
		})
		if err == nil {
			break
		}
		if !based || ctx.Err() != nil {
			return err
		}
		o.Report(Event{Event: Unbased, Error: err.Error()})
	}
	if err := o.session(ctx, sessionReceived, hello{Shape: v.Shape, UID: o.copied, Filled: filled, Fence: v.Fence}, nil); err != nil {
		return err
	}
	o.Report(Event{Event: Received})
	return nil
}

// end lets the target end, which may have done so before. It returns errRefused for a target that is not whole.
func (o *Out) end(ctx context.Context, v moves.Volume) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	err := o.session(ctx, sessionEnd, hello{Shape: v.Shape, Fence: v.Fence}, nil)
	if err != nil {
		o.Report(Event{Event: Refused, Error: err.Error()})
	}
	return err
}

// Undo has the volume be published here again. Of one that was handed over the copy has to be aborted before. One that another move
// has is as it should be. Without an error, the volume is here.
func (o *Out) Undo(ctx context.Context, aborted bool) error {
	v, err := o.call(ctx, moves.State, "")
	switch {
	case moves.IsNotFound(err):
		return fmt.Errorf("this node has nothing to undo, and a copy on node %s may be the only one: %w", o.Peer, err)
	case err != nil:
		return err
	case v.Move == "" || v.Move == o.Move:
		return o.unfence(ctx, aborted)
	case v.Role == string(store.MoveTarget):
		return fmt.Errorf("this node has only a copy that move %s makes, and one on node %s may be whole", v.Move, o.Peer)
	}
	return nil
}

// UndoAndTell is Undo of which the target hears at this moment, which aborts its copy then.
func (o *Out) UndoAndTell(ctx context.Context, aborted bool) error {
	conn, err := o.dial(ctx) // may take long: what is said is to be how it is afterwards
	if err != nil {
		return err
	}
	if err := o.Undo(ctx, aborted); err != nil {
		return errors.Join(err, conn.Close())
	}
	return o.speak(ctx, conn, sessionUndone, hello{}, nil)
}

// GiveUp is Undo for a volume that nothing wants any more, and that may be gone.
func (o *Out) GiveUp(ctx context.Context) error {
	v, err := o.call(ctx, moves.State, "")
	if err == nil && v.Move != "" && v.Move != o.Move {
		return nil
	}
	if err = o.unfence(ctx, true); moves.IsNotFound(err) {
		return nil
	}
	return err
}

func (o *Out) unfence(ctx context.Context, aborted bool) error {
	_, err := o.Driver.Repeat(ctx, moves.Unfence, moves.Request{Volume: o.Volume, Move: o.Move, Peer: o.Peer, TargetAborted: aborted})
	return err
}

// Remove removes the volume after its copy was confirmed. The target has to vouch for that now: it may have been set up anew since the
// removal was asked for, and this node may hear of that late.
func (o *Out) Remove(ctx context.Context) error {
	if o.Dial != nil {
		if err := o.session(ctx, sessionVouch, hello{}, nil); err != nil {
			return fmt.Errorf("ask node %s whether it has the volume: %w", o.Peer, err)
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, answerWithin) // a driver that answers later is asked after the target is asked again
		defer cancel()
	}
	_, err := o.call(ctx, moves.RemoveSource, "")
	return err
}

func (o *Out) call(ctx context.Context, name, fence string) (moves.Volume, error) {
	return o.Driver.Repeat(ctx, name, moves.Request{
		Volume: o.Volume, Move: o.Move, Peer: o.Peer, Fence: fence, LeaveSnapshots: o.LeaveSnapshots, Shape: moves.Shape{Bytes: o.Bytes},
	})
}

// state is that of a volume whose move was not undone.
func (o *Out) state(ctx context.Context) (moves.Volume, error) {
	v, err := o.call(ctx, moves.State, "")
	if err == nil && v.Undone == o.Move && v.Move != o.Move {
		err = fmt.Errorf("move %s was undone on this node: another one has another uid", o.Move)
	}
	return v, err
}

// measure has a volume without a record be promised what it holds, if its driver does not count so many files.
func (o *Out) measure(ctx context.Context, v moves.Volume) error {
	if v.Recorded || v.Bytes != volume.Unknown {
		return nil
	}
	d, err := o.Open(ctx, o.Volume, v)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	holds, err := dir.OccupiedBelow(d, ctx.Err)
	if err != nil {
		return fmt.Errorf("measure volume %s: %w", o.Volume, err)
	}
	o.Bytes = max(o.Bytes, holds)
	return nil
}

// copyUntilLeave copies while pods go on, until the volume may be fenced: what ends the pods that have it, and tells that others wait, has to
// know of the fence, and may hear nothing from this node.
func (o *Out) copyUntilLeave(ctx context.Context, v moves.Volume) error {
	for {
		// It may grow while it is copied.
		for _, do := range []func(context.Context, moves.Volume) error{o.measure, o.copyWhileUsed, o.measure} {
			if err := do(ctx, v); err != nil {
				return err
			}
		}
		if o.MayFence == nil {
			return nil
		}
		o.Report(Event{Event: Copied})
		if given, err := o.awaitLeave(ctx); given || err != nil {
			return err
		}
	}
}

// awaitLeave waits for leave for a while.
func (o *Out) awaitLeave(ctx context.Context) (given bool, err error) {
	again := time.NewTicker(o.every())
	defer again.Stop()
	for range asks {
		if given, err = o.MayFence(); given || err != nil {
			return given, err
		}
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("wait for leave to fence volume %s: %w", o.Volume, context.Cause(ctx))
		case <-again.C:
		}
	}
	return false, nil
}

// copyWhileUsed makes passes while pods go on, as long as each has less to send than the one before.
func (o *Out) copyWhileUsed(ctx context.Context, v moves.Volume) error {
	if !v.Recorded && o.Bytes > 0 {
		v.Bytes = max(v.Bytes, o.Bytes)
	}
	// A reference keeps space, and is not made for a target that is not there, or cannot move anything.
	conn, err := o.dial(ctx)
	if err != nil {
		return err
	}
	_ = conn.Close() // nothing was said
	err = o.copyReferences(ctx, v)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if !errors.Is(err, errNoReference) {
		o.Report(Event{Event: Unbased, Error: err.Error()})
	}
	if _, err := o.state(ctx); err != nil { // no copy is begun anew for one that was undone
		return err
	}
	return o.session(ctx, sessionPass, hello{Shape: v.Shape}, func(conn net.Conn, is answer) error {
		from, err := o.Open(ctx, o.Volume, v)
		if err != nil {
			return err
		}
		defer func() { _ = from.Close() }() // opened for reading
		sender := o.Sender(conn)
		before := int64(-1)
		for range mostPasses {
			r, err := o.pass(ctx, sender, from, is.UID, Pass{})
			if err != nil {
				return err
			}
			enough, err := o.enough(ctx, r.Bytes, before)
			if err != nil {
				return err
			}
			if enough {
				break
			}
			before = r.Bytes
		}
		return sender.Finish(ctx)
	})
}

// enough says that another pass while pods go on would not help.
func (o *Out) enough(ctx context.Context, sent, before int64) (bool, error) {
	now, err := o.state(ctx)
	return !now.Used || sent <= fewBytes || before >= 0 && sent > before/10*8, err
}

var errNoReference = errors.New("the driver makes no reference of the volume")

// copyReferences makes passes from references of the volume, each but the first with the one before as its base. Where blocks cannot
// be shared it returns errNoReference.
func (o *Out) copyReferences(ctx context.Context, v moves.Volume) error {
	before := int64(-1)
	for range mostPasses {
		token := rand.Text()
		r := moves.Request{Volume: o.Volume, Move: o.Move, Peer: o.Peer, Reference: token, Base: o.base}
		if _, err := o.Driver.Repeat(ctx, moves.Reference, r); err != nil {
			return fmt.Errorf("%w: %w", errNoReference, err)
		}
		based := false
		sent := o.sent
		if err := o.session(ctx, sessionPass, hello{Shape: v.Shape, Base: token, Verify: o.Verify}, func(conn net.Conn, is answer) error {
			base := o.openReference(ctx, v, is)
			if based = base != nil; based {
				defer func() { _ = base.Close() }() // opened for reading
			}
			return o.onePass(ctx, conn, v, o.reference(token), is.UID, Pass{Reference: true, Base: base})
		}); err != nil {
			return err
		}
		o.base = token
		sent = o.sent - sent
		// What changes during the first pass, which reads everything, is left to another.
		enough, err := o.enough(ctx, sent, before)
		if err != nil || enough && (based || before >= 0) {
			return err
		}
		before = sent
	}
	return nil
}

// reference is the id of one of the volume.
func (o *Out) reference(token string) string {
	of, err := volume.ParseID(o.Volume)
	if err != nil {
		return ""
	}
	id, err := of.Reference(token)
	if err != nil {
		return ""
	}
	return id.String()
}

// openReference opens what the copy equals. It returns nil where that is not known, or was compared in another way, and for what is not
// there any more: then the pass does without.
func (o *Out) openReference(ctx context.Context, v moves.Volume, is answer) *dir.Dir {
	if is.Base == "" || is.Verify != o.Verify {
		return nil
	}
	d, err := o.Open(ctx, o.reference(is.Base), v)
	if err != nil {
		o.Report(Event{Event: Unbased, Error: err.Error()})
		return nil
	}
	return d
}

// onePass makes the pass of a session.
func (o *Out) onePass(ctx context.Context, conn net.Conn, v moves.Volume, id, uid string, p Pass) error {
	from, err := o.Open(ctx, id, v)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }() // opened for reading
	sender := o.Sender(conn)
	if _, err := o.pass(ctx, sender, from, uid, p); err != nil {
		return err
	}
	return sender.Finish(ctx)
}

func (o *Out) pass(ctx context.Context, sender Sender, from *dir.Dir, uid string, p Pass) (Result, error) {
	// What changed after the clock was set back may seem older than the pass before. A sender only knows of its own connection, and
	// between two of them pods may have the volume for days.
	set, err := o.WasSet()
	if err != nil {
		return Result{}, err
	}
	if set {
		o.since = time.Time{}
	}
	if uid == o.copied {
		p.Since = o.since
	}
	r, err := sender.Pass(ctx, from, p)
	if errors.Is(err, ErrNoRoom) {
		return r, fmt.Errorf("%w: node %s enforces the size of the volume, or is full: a volume that holds more than it is promised moves when its claim is as large, or files are deleted", err, o.Peer)
	}
	if err != nil {
		return r, err
	}
	o.since, o.copied = r.Began, uid
	if p.Last || p.Reference {
		o.since = time.Time{} // another after it is as the first: see transfer.Pass
	}
	o.passes++
	o.sent += r.Bytes
	o.Report(Event{Event: Passed, Pass: o.passes, Last: p.Last, Based: p.Base != nil, Entries: r.Entries, Files: r.Files, Bytes: r.Bytes, Compared: r.Compared})
	return r, nil
}

func (o *Out) every() time.Duration { return cmp.Or(o.Every, time.Second/2) }

// awaitUnused waits until no pod has the volume any more.
func (o *Out) awaitUnused(ctx context.Context) error {
	again := time.NewTicker(o.every())
	defer again.Stop()
	for first := true; ; first = false {
		v, err := o.call(ctx, moves.State, "")
		if err != nil {
			return err
		}
		switch {
		case v.Move != o.Move || v.Fence == "":
			return fmt.Errorf("volume %s is not fenced any more: the move was undone", o.Volume)
		case !v.Used:
			o.Report(Event{Event: Unused})
			return nil
		case first:
			o.Report(Event{Event: Waiting})
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for volume %s to be unpublished: %w", o.Volume, context.Cause(ctx))
		case <-again.C:
		}
	}
}

func (o *Out) dial(ctx context.Context) (net.Conn, error) {
	conn, err := o.Dial(ctx)
	if err != nil {
		err = fmt.Errorf("connect to the target: %w", err)
	}
	return conn, err
}

// session connects to the target, has it agree, and does something over the connection.
func (o *Out) session(ctx context.Context, kind string, says hello, do func(conn net.Conn, is answer) error) error {
	conn, err := o.dial(ctx)
	if err != nil {
		return err
	}
	return o.speak(ctx, conn, kind, says, do)
}

// speak is a session over a connection, which it closes.
func (o *Out) speak(ctx context.Context, conn net.Conn, kind string, says hello, do func(conn net.Conn, is answer) error) error {
	defer func() { _ = conn.Close() }() // what matters was answered
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	says.Version, says.Kind, says.Volume, says.Move = sessions, kind, o.Volume, o.Move
	if err := send(conn, says); err != nil {
		return fmt.Errorf("speak to the target: %w", err)
	}
	var is answer
	// The driver there may be starting.
	if err := receive(conn, 0, &is); err != nil {
		return fmt.Errorf("hear the target: %w", err)
	}
	switch {
	case is.Error != "":
		return fmt.Errorf("%w: %s", errRefused, is.Error)
	case do == nil:
		return nil
	}
	return do(conn, is)
}

var errRefused = errors.New("the target refuses")
