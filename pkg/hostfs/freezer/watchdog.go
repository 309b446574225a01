package freezer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Watchdog freezes pods for a client, and thaws them when the client says so, when it ends, and
// at the latest after Limit. It thaws what it has frozen from its own memory, and not by the marks of groups, which
// are for the next watchdog. It has to be a process that does not end with the client, in a
// container of its own: what ends a container ends all of its processes.
type Watchdog struct {
	root     *dir.Dir
	log      logr.Logger
	claiming sync.Mutex
	// limit is Limit, and longest how long stopping the processes may take.
	limit, longest time.Duration
}

// network keeps the bounds of what is sent (SOCK_SEQPACKET, unix(7)).
const network = "unixpacket"

// maxPods is how many pods can be frozen at once: as many handles as one message can carry
// (SCM_MAX_FD, unix(7)).
const maxPods = 253

// What client and watchdog say to each other, a packet each. The client asks, and closes its side of
// the connection to have the pods thawed. The watchdog answers when all groups are its own, with
// handles of them; when they stand still; and when it has thawed them, or has frozen none.
type (
	question struct {
		Pods []string `json:"pods"`
	}
	answer struct {
		// Groups is how many handles come with it.
		Groups int `json:"groups,omitempty"`
		// Still: they stand still.
		Still bool `json:"still,omitempty"`
		// Over: nothing is frozen any more.
		Over bool `json:"over,omitempty"`
		// Error is why not, and Kind which of the errors of this package that is.
		Error string `json:"error,omitempty"`
		Kind  int    `json:"kind,omitempty"`
	}
)

// kinds are the errors that pass from the watchdog to the client, by their number.
var kinds = []error{errors.New("failed"), ErrUnavailable, ErrBusy, ErrThawed, ErrUnstoppable}

// over is the last answer.
func over(err error) answer {
	if err == nil {
		return answer{Over: true}
	}
	kind := max(0, slices.IndexFunc(kinds, func(is error) bool { return errors.Is(err, is) }))
	return answer{Over: true, Error: err.Error(), Kind: kind}
}

func (a answer) err() error {
	if a.Error == "" {
		return nil
	}
	return fmt.Errorf("%w: %s", kinds[min(max(a.Kind, 0), len(kinds)-1)], a.Error)
}

// NewWatchdog opens the node's control groups, which the host has at /sys/fs/cgroup, and thaws what
// watchdogs that have ended left frozen. Errors: ErrUnavailable.
func NewWatchdog(groups string, log logr.Logger) (*Watchdog, error) {
	root, err := open(groups)
	if err != nil {
		return nil, err
	}
	w := &Watchdog{root: root, log: log, limit: Limit, longest: 2 * time.Second}
	w.thawLeft()
	return w, nil
}

// Close ends the use of the groups.
func (w *Watchdog) Close() error { return w.root.Close() }

// patrolEvery is how often a watchdog looks for what others have left frozen: another may serve the same
// node while a driver is replaced, and end later.
const patrolEvery = 2 * time.Second

func (w *Watchdog) patrol(ctx context.Context) {
	tick := time.NewTicker(patrolEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.thawLeft()
		}
	}
}

// thawLeft thaws what is marked and has no owner. One group that fails leaves the others to be thawed.
func (w *Watchdog) thawLeft() {
	err := each(w.root, maxDepth, func(name string, d *dir.Dir) error {
		if err := w.thawOwnerless(name, d); err != nil {
			w.log.Error(err, "A pod may be left frozen", "group", name)
		}
		return nil
	})
	if err != nil {
		w.log.Error(err, "Not all control groups could be searched for pods that were left frozen")
	}
}

func (w *Watchdog) thawOwnerless(name string, d *dir.Dir) error {
	g, err := reopen(d)
	if err != nil {
		return ignoreGone(err)
	}
	defer g.close()
	if marked, err := g.marked(); err != nil || !marked {
		return err
	}
	w.claiming.Lock() // or a claim at the same time would find the group locked
	defer w.claiming.Unlock()
	err = g.lock(dir.TryLockDir)
	if errors.Is(err, dir.ErrLocked) {
		return nil // its owner thaws it
	}
	if err != nil {
		return ignoreGone(err)
	}
	w.log.Info("Thawing a pod that was left frozen", "group", name)
	return g.thawLeft()
}

// Listen makes the socket of a watchdog, for root alone. One that a process serves is not replaced: whichever of the two ended
// first would leave the other without.
func Listen(ctx context.Context, socket string) (*net.UnixListener, error) {
	in, err := dir.Open(filepath.Dir(socket))
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()   // the lock has a handle of its own
	unlock, err := dir.LockDir(ctx, in) // or two may find no process that serves it
	if err != nil {
		return nil, err
	}
	defer unlock()
	at := &net.UnixAddr{Name: socket, Net: network}
	conn, err := net.DialUnix(network, nil, at)
	switch {
	case err == nil:
		return nil, errors.Join(fmt.Errorf("listen on %s: another process serves it", socket), conn.Close())
	case errors.Is(err, unix.ECONNREFUSED): // no process listens
		err = os.Remove(socket)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix(network, at)
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
	clients.Go(func() { w.patrol(ctx) })
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
				w.log.Error(err, "Pods were not frozen, or not for as long as was asked")
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
	if err == nil {
		err = w.freeze(ctx, c, groups)
	}
	if errors.Is(err, errLeft) {
		return err // the client has to thaw
	}
	_ = say(c, over(err), nil) // the client may be gone
	return err
}

// errLeft reports a group that could not be thawed. It keeps its mark.
var errLeft = errors.New("a pod could not be thawed")

// freeze has groups stand still until the client closes its side, and thaws them and gives them back,
// whatever else fails.
func (w *Watchdog) freeze(ctx context.Context, c *net.UnixConn, groups []*group) (err error) {
	defer closeAll(groups)
	began := time.Now()
	err = w.hold(ctx, c, groups)
	still, thawed := thawAll(groups)
	if err == nil && !still {
		err = ErrThawed
	}
	w.log.Info("Froze pods", "groups", len(groups), "for", time.Since(began))
	return errors.Join(err, thawed)
}

func (w *Watchdog) hold(ctx context.Context, c *net.UnixConn, groups []*group) error {
	if err := w.claim(groups); err != nil {
		return err
	}
	if err := say(c, answer{Groups: len(groups)}, groups); err != nil {
		return err
	}
	ctx = w.untilClosed(ctx, c)
	if err := w.stop(ctx, groups); err != nil {
		return err
	}
	if err := say(c, answer{Still: true}, nil); err != nil {
		return err
	}
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, errClosed) {
		return err
	}
	return nil
}

// errClosed reports a client that wants its pods thawed, or has ended.
var errClosed = errors.New("the client has closed the connection")

// untilClosed is a context that ends when the client closes its side, with errClosed as its cause, and at the
// limit.
func (w *Watchdog) untilClosed(ctx context.Context, c *net.UnixConn) context.Context {
	open, closed := context.WithCancelCause(context.WithoutCancel(ctx)) // reading ends with that too
	go func() {
		_, err := c.Read(make([]byte, 1))
		switch {
		case ctx.Err() != nil:
			err = fmt.Errorf("%w: the watchdog is shutting down", ErrThawed)
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = fmt.Errorf("%w: pods are frozen for %s at most", ErrThawed, w.limit)
		case errors.Is(err, io.EOF):
			err = errClosed
		case err == nil:
			err = errors.New("the client says more than is expected")
		}
		closed(err)
	}()
	return open
}

// claim makes all groups the watchdog's own.
func (w *Watchdog) claim(groups []*group) error {
	w.claiming.Lock()
	defer w.claiming.Unlock()
	for _, g := range groups {
		if err := g.claim(); err != nil {
			return err
		}
	}
	return nil
}

// stop freezes all groups, one after the other.
func (w *Watchdog) stop(ctx context.Context, groups []*group) error {
	ctx, cancel := context.WithTimeoutCause(ctx, w.longest, fmt.Errorf("%w within %s", ErrUnstoppable, w.longest))
	defer cancel()
	for _, g := range groups {
		if err := g.stop(ctx); err != nil {
			return fmt.Errorf("%s: %w", g.dir.Name(), err)
		}
	}
	return nil
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

// thawAll thaws what the watchdog has frozen, whatever fails.
func thawAll(groups []*group) (still bool, err error) {
	still = true
	for _, g := range groups {
		stood, thawed := g.thaw()
		if g.frozen {
			thawed = fmt.Errorf("%w: %s: %w", errLeft, g.dir.Name(), thawed)
		}
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
