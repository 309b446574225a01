package freezer

import (
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
type Client struct{ Socket string }

// Freeze stops all processes of pods, and returns a context that ends when they no longer stand
// still for certain. Thaw lets them go on, and reports ErrThawed if they have before; it must be
// called, within Limit. If the watchdog ends meanwhile they go on at once. Errors:
// ErrUnavailable, ErrBusy.
func (c Client) Freeze(ctx context.Context, pods []Pod) (still context.Context, thaw func() error, err error) {
	conn, err := net.DialUnix(network, nil, &net.UnixAddr{Name: c.Socket, Net: network})
	if err != nil {
		return nil, nil, fmt.Errorf("%w: no watchdog answers: %w", ErrUnavailable, err)
	}
	l := &lease{conn: conn}
	if err := l.begin(ctx, pods); err != nil {
		l.end()
		return nil, nil, err
	}
	still, lost := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := l.watch(); err != nil {
			lost(err)
		}
	}()
	return still, func() error {
		if err := conn.CloseWrite(); err != nil {
			l.end() // watch notices
		}
		<-done
		l.end()
		defer lost(context.Canceled)
		if err := context.Cause(still); ctx.Err() == nil {
			return err
		}
		return nil
	}, nil
}

// A lease is one freeze, from the client's side.
type lease struct {
	conn   *net.UnixConn
	name   string
	groups []*group
	ended  sync.Once
}

// begin asks the watchdog, and waits until the pods stand still.
func (l *lease) begin(ctx context.Context, pods []Pod) error {
	deadline := time.Now().Add(Limit)
	if err := l.conn.SetDeadline(deadline); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	q := question{}
	for _, pod := range pods {
		q.Pods = append(q.Pods, pod.uid)
	}
	data, err := json.Marshal(q)
	if err != nil {
		return err
	}
	if _, err := l.conn.Write(data); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	found, err := l.hear()
	if err != nil {
		return err
	}
	l.name = found.Name
	_, err = l.hear()
	return err
}

// watch waits until the watchdog says that the pods were thawed, and why if that was not asked for.
// If it says nothing, they are thawed here.
func (l *lease) watch() error {
	_, err := l.hear()
	if err == nil {
		return nil
	}
	if _, thawed := thawAll(l.groups, l.name); thawed != nil {
		err = errors.Join(err, thawed)
	}
	return err
}

// end thaws what is not thawed yet, and gives all back.
func (l *lease) end() {
	l.ended.Do(func() {
		_ = l.conn.Close() // the watchdog thaws too
		_, _ = thawAll(l.groups, l.name)
		closeAll(l.groups)
	})
}

// hear reads an answer, and adopts the groups that come with it.
func (l *lease) hear() (answer, error) {
	data, handles := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*maxPods))
	n, oobn, _, _, err := l.conn.ReadMsgUnix(data, handles)
	if adopted := l.adopt(handles[:max(oobn, 0)]); err == nil {
		err = adopted
	}
	if err != nil {
		return answer{}, fmt.Errorf("%w: the watchdog has ended, or does not answer: %v", ErrThawed, err)
	}
	var a answer
	if err := json.Unmarshal(data[:n], &a); err != nil {
		return answer{}, err
	}
	return a, a.err()
}

func (l *lease) adopt(handles []byte) error {
	if len(handles) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(handles)
	if err != nil {
		return err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			g, err := adopt(os.NewFile(uintptr(fd), "the control group of a pod"))
			if err != nil {
				return err
			}
			l.groups = append(l.groups, g)
		}
	}
	return nil
}
