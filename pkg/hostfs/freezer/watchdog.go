package freezer

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Watchdog freezes pods for a client, and thaws them when the client says so, when it ends, and
// at the latest after Limit. It has to be a process that does not end with the client, in a
// container of its own: what ends a container ends all of its processes.
type Watchdog struct {
	root *dir.Dir
	log  logr.Logger
	// limit is Limit, and longest how long stopping the processes may take.
	limit, longest time.Duration
}

// network keeps the bounds of what is sent (SOCK_SEQPACKET, unix(7)).
const network = "unixpacket"

// maxPods is how many pods can be frozen at once: as many handles as one message can carry
// (SCM_MAX_FD, unix(7)).
const maxPods = 253

// What client and watchdog say to each other, a packet each. The client asks, and closes its side of
// the connection to have the pods thawed. The watchdog answers when it has found the groups, with
// handles of them; when they stand still; and when they are thawed.
type (
	question struct {
		Pods []string `json:"pods"`
	}
	answer struct {
		// Name of the freeze, with the handles.
		Name string `json:"name,omitempty"`
		// Error is why not, and Kind which of the errors of this package that is.
		Error string `json:"error,omitempty"`
		Kind  int    `json:"kind,omitempty"`
	}
)

// kinds are the errors that pass from the watchdog to the client, by their number.
var kinds = []error{errors.New("failed"), ErrUnavailable, ErrBusy, ErrThawed}

func answerOf(err error) answer {
	if err == nil {
		return answer{}
	}
	for kind, is := range kinds {
		if errors.Is(err, is) {
			return answer{Error: err.Error(), Kind: kind}
		}
	}
	return answer{Error: err.Error()}
}

func (a answer) err() error {
	if a.Error == "" {
		return nil
	}
	return fmt.Errorf("%w: %s", kinds[min(max(a.Kind, 0), len(kinds)-1)], a.Error)
}

// NewWatchdog opens the node's control groups, which the host has at /sys/fs/cgroup, and thaws what
// an earlier watchdog has left frozen. Errors: ErrUnavailable.
func NewWatchdog(groups string, log logr.Logger) (*Watchdog, error) {
	root, err := open(groups)
	if err != nil {
		return nil, err
	}
	w := &Watchdog{root: root, log: log, limit: Limit, longest: 2 * time.Second}
	if err := w.thawLeft(); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return w, nil
}

// Close ends the use of the groups.
func (w *Watchdog) Close() error { return w.root.Close() }

// thawLeft thaws what has the mark of whatever freeze.
func (w *Watchdog) thawLeft() error {
	return each(w.root, maxDepth, func(name string, d *dir.Dir) error {
		g, err := reopen(d)
		if err != nil {
			return err
		}
		defer g.close()
		marked, err := g.marked()
		if err != nil || marked == "" {
			return err
		}
		w.log.Info("thawing a pod that was left frozen", "group", name)
		_, err = g.thaw("")
		return err
	})
}

// Listen makes the socket of a watchdog, for root alone.
func Listen(socket string) (*net.UnixListener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: socket, Net: network})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Serve answers clients until ctx ends, and returns when all that it froze is thawed.
func (w *Watchdog) Serve(ctx context.Context, l *net.UnixListener) error {
	var clients sync.WaitGroup
	defer clients.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		clients.Go(func() {
			defer func() { _ = c.Close() }()
			if err := w.serve(ctx, c); err != nil {
				w.log.Error(err, "pods were not frozen, or not for as long as was asked")
			}
		})
	}
}

// serve freezes what one client asks for.
func (w *Watchdog) serve(ctx context.Context, c *net.UnixConn) error {
	if err := c.SetReadDeadline(time.Now().Add(w.limit)); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })()
	groups, err := w.groups(c)
	if err != nil {
		return errors.Join(err, say(c, answerOf(err), nil))
	}
	defer closeAll(groups)
	name := rand.Text()
	if err := say(c, answer{Name: name}, groups); err != nil {
		return err
	}
	began := time.Now()
	err = w.hold(ctx, c, groups, name)
	still, thawed := thawAll(groups, name)
	if err == nil && !still {
		err = ErrThawed
	}
	err = errors.Join(err, thawed)
	w.log.Info("froze pods", "groups", len(groups), "for", time.Since(began))
	_ = say(c, answerOf(err), nil) // the client may be gone
	return err
}

// hold freezes groups until the client closes its side.
func (w *Watchdog) hold(ctx context.Context, c *net.UnixConn, groups []*group, name string) error {
	if err := w.freeze(ctx, groups, name); err != nil {
		return err
	}
	if err := say(c, answer{}, nil); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%w: the watchdog is shutting down", ErrThawed)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: pods are frozen for %s at most", ErrThawed, w.limit)
	}
	return err
}

// groups reads which pods a client asks for, and finds their groups.
func (w *Watchdog) groups(c *net.UnixConn) ([]*group, error) {
	data := make([]byte, 1<<16)
	n, err := c.Read(data)
	if err != nil {
		return nil, err
	}
	var q question
	if err := json.Unmarshal(data[:n], &q); err != nil {
		return nil, err
	}
	var pods []Pod
	for _, uid := range q.Pods {
		pod, err := ParsePod(uid)
		if err != nil {
			return nil, err
		}
		pods = append(pods, pod)
	}
	if len(pods) > maxPods {
		return nil, fmt.Errorf("%w: %d pods are to be frozen at once, at most %d can be", ErrUnavailable, len(pods), maxPods)
	}
	return find(w.root, pods)
}

// freeze stops all groups, one after the other. What it has marked when it fails is thawed by the
// caller.
func (w *Watchdog) freeze(ctx context.Context, groups []*group, name string) error {
	ctx, cancel := context.WithTimeout(ctx, w.longest)
	defer cancel()
	for _, g := range groups {
		if err := g.freeze(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// thawAll thaws what a freeze has marked, whatever fails.
func thawAll(groups []*group, name string) (still bool, err error) {
	still = true
	for _, g := range groups {
		stood, thawed := g.thaw(name)
		still, err = still && stood, errors.Join(err, thawed)
	}
	return still, err
}

// say sends an answer, with handles of groups.
func say(c *net.UnixConn, a answer, with []*group) error {
	data, err := json.Marshal(a)
	if err != nil {
		return err
	}
	var handles []byte
	if len(with) > 0 {
		fds := make([]int, len(with))
		for i, g := range with {
			fds[i] = int(g.dir.Fd())
		}
		handles = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(data, handles, nil)
	return err
}
