package freezer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Client has a watchdog freeze pods.
type Client struct {
	Socket string
	// patience is silence, if it is not set.
	patience time.Duration
}

// silence is how long a client waits for the watchdog to thaw before it does so itself.
const silence = time.Second

// Freeze stops all processes of pods, and returns a context that ends when they no longer stand
// still for certain. Thaw lets them go on, and reports ErrThawed if they have before; it must be
// called, within Limit. If ctx or the watchdog ends meanwhile they go on at once, whatever the caller is blocked in; thaw then
// reports the cause. When Freeze fails, or thaw returns, none of them is frozen any more. Errors: ErrUnavailable, ErrBusy,
// ErrUnstoppable.
func (c Client) Freeze(ctx context.Context, pods []Pod) (still context.Context, thaw func() error, err error) {
	conn, err := net.DialUnix(network, nil, &net.UnixAddr{Name: c.Socket, Net: network})
	if err != nil {
		return nil, nil, fmt.Errorf("%w: no watchdog answers: %w", ErrUnavailable, err)
	}
	l := &lease{conn: conn, patience: cmp.Or(c.patience, silence), still: make(chan struct{}), over: make(chan struct{})}
	if err := l.ask(pods); err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	go l.listen()
	select {
	case <-l.still:
	case <-l.over:
		l.end()
		return nil, nil, cmp.Or(l.err, ErrThawed)
	case <-ctx.Done():
		l.end()
		return nil, nil, context.Cause(ctx)
	}
	still, lost := context.WithCancelCause(ctx)
	stop := context.AfterFunc(ctx, l.end)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-l.over
		l.end()
		lost(l.err)
	}()
	return still, func() error {
		stop()
		l.end()
		<-ended
		return errors.Join(context.Cause(ctx), l.err)
	}, nil
}

// A lease is one freeze, from the client's side.
type lease struct {
	conn     *net.UnixConn
	patience time.Duration
	still    chan struct{} // closed when the pods stand still
	over     chan struct{} // closed when the watchdog has thawed them, or says nothing more
	ended    sync.Once
	// These are of who listens, until it is over.
	groups []*group
	thawed bool  // the watchdog has thawed them
	err    error // what it said of that
}

// ask has the watchdog begin.
func (l *lease) ask(pods []Pod) error {
	q := question{}
	for _, pod := range pods {
		q.Pods = append(q.Pods, pod.uid)
	}
	data, err := json.Marshal(q)
	if err != nil {
		return err
	}
	// The watchdog thaws at the limit by itself.
	if err := l.conn.SetDeadline(time.Now().Add(Limit + l.patience)); err != nil {
		return err
	}
	if _, err := l.conn.Write(data); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return nil
}

// listen hears the watchdog until it says that it is over, or says nothing more.
func (l *lease) listen() {
	defer close(l.over)
	var failed error // on this side
	for {
		a, err := l.hear()
		if err != nil {
			l.err = errors.Join(failed, err)
			return
		}
		if err := l.adopt(a); err != nil {
			failed = err
			_ = l.conn.CloseWrite()
		}
		switch {
		case a.Over:
			l.thawed, l.err = true, errors.Join(failed, a.err())
			return
		case a.Still && failed == nil:
			close(l.still)
		}
	}
}

// end has the pods thawed, and returns when they are. Only if the watchdog has ended, or is silent, that is
// done here. What it froze is thawed whatever its mark says.
func (l *lease) end() {
	l.ended.Do(func() {
		_ = l.conn.CloseWrite() // nothing listens there if it has ended
		_ = l.conn.SetReadDeadline(time.Now().Add(l.patience))
		<-l.over
		_ = l.conn.Close() // a watchdog that goes on later finds that out
		if !l.thawed {
			for _, g := range l.groups {
				if err := g.set(false); err != nil {
					l.err = errors.Join(l.err, err)
				}
			}
		}
		closeAll(l.groups)
	})
}

// A heard answer has the handles of groups that came with it, as yet without an owner.
type heard struct {
	answer
	handles []byte
}

func (l *lease) hear() (heard, error) {
	data, handles := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*maxPods))
	n, oobn, _, _, err := l.conn.ReadMsgUnix(data, handles)
	h := heard{handles: handles[:max(oobn, 0)]}
	if err == nil {
		err = json.Unmarshal(data[:n], &h.answer)
	}
	if err != nil {
		return heard{}, fmt.Errorf("%w: the watchdog has ended, or does not answer: %v", ErrThawed, err)
	}
	return h, nil
}

// adopt takes over the groups that come with an answer, as far as that is possible.
func (l *lease) adopt(h heard) error {
	if len(h.handles) == 0 && h.Groups == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(h.handles)
	if err != nil {
		return err
	}
	received := 0
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return err
		}
		received += len(fds)
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			f := os.NewFile(uintptr(fd), "the control group of a pod")
			g, adopted := adopt(f)
			if adopted == nil {
				l.groups = append(l.groups, g)
			} else if err = errors.Join(err, f.Close()); !isGone(adopted) {
				err = errors.Join(err, adopted)
			}
		}
		if err != nil {
			return err
		}
	}
	if received != h.Groups {
		return fmt.Errorf("only %d of %d handles of control groups were received", received, h.Groups)
	}
	return nil
}
