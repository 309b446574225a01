package mover_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib   = 1 << 20
	local = `[{"name":"local","path":"pool"}]`
)

type uncounted struct{}

func (uncounted) Call(string, string, time.Duration) {}
func (uncounted) Panic(string)                       {}

// A side is a node with a driver, and its mover's client.
type side struct {
	*pooltest.Node
	*pool.Set
	*moves.Client
	pools mover.Pools
}

func newSide(t *testing.T, name string) *side {
	t.Helper()
	return newSideIn(t, name, t.TempDir())
}

func newSideIn(t *testing.T, name, root string) *side {
	t.Helper()
	s := &side{Node: pooltest.New(t, root)}
	configs, options := s.Configs(local), s.Options(name)
	options.HangAfter = time.Minute // the disk of a busy machine is slower than one that counts as hanging
	s.Set = s.Start(configs, options)
	must.Succeed(t, s.Wait(t.Context()))
	s.pools = mover.Pools{Configs: configs, Mounts: s.Mounts}
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	node, err := volume.ParseNodeID(name)
	must.Succeed(t, err)
	server := driver.NewServer(driver.Config{Name: "test.example.com", Node: node}, s.Set, uncounted{}, klog.Logger{})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx, listener, time.Minute) }()
	client, err := moves.Dial(socket)
	must.Succeed(t, err)
	s.Client = client
	t.Cleanup(func() {
		must.Succeed(t, client.Close())
		stop()
		must.Succeed(t, <-ended)
	})
	return s
}

// A plane copies the file "data" of a volume. It is a stand-in for pkg/hostfs/transfer.
type plane struct {
	net.Conn
	passes *[]mover.Pass
	// during is called in each pass.
	during func(p mover.Pass) error
	bytes  func(pass int) int64 // that a pass reports
}

func (p plane) Pass(_ context.Context, from *dir.Dir, pass mover.Pass) (mover.Result, error) {
	began := time.Now()
	*p.passes = append(*p.passes, pass)
	if p.during != nil {
		if err := p.during(pass); err != nil {
			return mover.Result{}, err
		}
	}
	data, err := from.ReadFile("data", mib)
	if err != nil {
		return mover.Result{}, err
	}
	_, err = p.Write(append([]byte{byte(len(data))}, data...))
	r := mover.Result{Began: began, Bytes: int64(len(data))}
	if p.bytes != nil {
		r.Bytes = p.bytes(len(*p.passes))
	}
	return r, err
}

func (p plane) Finish(context.Context) error {
	if _, err := p.Write([]byte{0}); err != nil {
		return err
	}
	_, err := io.ReadFull(p, make([]byte, 1))
	return err
}

func receive(_ context.Context, conn net.Conn, into *dir.Dir, _ mover.Receiving, finished func() error) error {
	for {
		length := make([]byte, 1)
		if _, err := io.ReadFull(conn, length); err != nil {
			return err
		}
		if length[0] == 0 {
			if err := finished(); err != nil {
				return err
			}
			_, err := conn.Write([]byte{1})
			return err
		}
		data := make([]byte, length[0])
		if _, err := io.ReadFull(conn, data); err != nil {
			return err
		}
		if err := into.WriteFile("data", data); err != nil {
			return err
		}
	}
}

// A harness is two nodes, of which the first has the volume pvc-1, with the movers of the two.
type harness struct {
	t        *testing.T
	from, to *side
	out      *mover.Out
	in       *mover.In
	plane    plane
	passes   []mover.Pass

	mu     sync.Mutex
	events []string
	// at is called with each event of the source.
	at func(e mover.Event)
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	return newHarnessIn(t, t.TempDir())
}

// newHarnessIn is a harness whose volume is on a filesystem of its own.
func newHarnessIn(t *testing.T, root string) *harness {
	t.Helper()
	h := &harness{t: t, from: newSideIn(t, "node-1", root), to: newSide(t, "node-2")}
	h.plane.passes = &h.passes
	_, err := h.from.Create(t.Context(), pool.Request{ID: pooltest.ID(t, "pvc-1"), Range: volume.Range{Required: mib}})
	must.Succeed(t, err)
	h.write("first")
	h.out = &mover.Out{
		Driver: h.from, Open: h.from.pools.Open, Volume: "pvc-1", Move: "move-1", Peer: "node-2", Report: h.report, Every: time.Millisecond,
		Sender: func(conn net.Conn) mover.Sender {
			p := h.plane
			p.Conn = conn
			return p
		},
	}
	h.in = &mover.In{
		Driver: h.to, Open: h.to.pools.Open, Receive: receive, Volume: "pvc-1", Move: "move-1", Peer: "node-1", Report: func(mover.Event) {},
	}
	return h
}

func (h *harness) report(e mover.Event) {
	h.mu.Lock()
	h.events = append(h.events, e.Event)
	at := h.at
	h.mu.Unlock()
	if at != nil {
		at(e)
	}
}

func (h *harness) write(data string) {
	h.t.Helper()
	must.Succeed(h.t, os.WriteFile(h.from.Path("pool", "pvc-1", "data"), []byte(data), 0o600))
}

func (h *harness) publish(s *side, target string) error {
	return s.Publications().Publish(h.t.Context(), pool.Publication{ID: pooltest.ID(h.t, "pvc-1"), Target: s.Target(target)})
}

func (h *harness) unpublish(s *side, target string) {
	h.t.Helper()
	must.Succeed(h.t, s.Publications().Unpublish(h.t.Context(), pooltest.ID(h.t, "pvc-1"), s.Target(target)))
}

// listen begins to serve the target, and has the source dial it. What it returns waits for the end.
func (h *harness) listen() (ended func() error) {
	h.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(h.t, err)
	address := listener.Addr().String()
	h.out.Dial = func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", address) }
	ctx, cancel := context.WithCancel(h.t.Context())
	done := make(chan error, 1)
	go func() { done <- h.in.Serve(ctx, listener) }()
	h.t.Cleanup(cancel)
	return sync.OnceValue(func() error { return <-done })
}

// wantData expects the copy to be confirmed by a fence and to be published with that content.
func (h *harness) wantMoved(fence, data string) {
	h.t.Helper()
	if err := h.publish(h.to, "a"); !errors.Is(err, volume.ErrPrecondition) {
		h.t.Errorf("a copy that is not confirmed is published: %v", err)
	}
	for range 2 {
		must.Succeed(h.t, h.in.Confirm(h.t.Context(), fence))
	}
	must.Succeed(h.t, h.publish(h.to, "a"))
	h.unpublish(h.to, "a")
	if got, err := os.ReadFile(h.to.Path("pool", "pvc-1", "data")); err != nil || string(got) != data {
		h.t.Errorf("the copy has %q (%v), want %q", got, err, data)
	}
	if err := h.publish(h.from, "a"); !errors.Is(err, volume.ErrPrecondition) {
		h.t.Errorf("the source is published as well: %v", err)
	}
	if err := h.in.Abort(h.t.Context(), false); err == nil {
		h.t.Error("the confirmed volume is aborted")
	}
	h.in.Fence = fence
	h.listen()
	for range 2 {
		must.Succeed(h.t, h.out.Remove(h.t.Context()))
	}
	if _, err := h.from.Moves().State(h.t.Context(), pooltest.ID(h.t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
		h.t.Errorf("the source is still there: %v", err)
	}
}

// A pod writes until it gives the volume up, when it is told that the volume is fenced.
func TestCopyWhileUsed(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, h.publish(h.from, "a"))
	ended := h.listen()
	h.at = func(e mover.Event) {
		switch e.Event {
		case mover.Passed:
			if e.Last {
				return
			}
			h.write("second")
		case mover.Waiting:
			h.write("third")
			h.unpublish(h.from, "a")
		}
	}
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, ended())
	want := []string{mover.Passed, mover.Fenced, mover.Waiting, mover.Unused, mover.Passed, mover.Received}
	if !slices.Equal(h.events, want) {
		t.Errorf("the events are %q, want %q", h.events, want)
	}
	if len(h.passes) != 2 || h.passes[0].Last || !h.passes[0].Since.IsZero() || !h.passes[1].Last || h.passes[1].Since.IsZero() {
		t.Errorf("the passes are %+v", h.passes)
	}
	h.wantMoved(fence, "third")
}

// As long as there is no leave the volume is not fenced, and passes go on, so that the last one has little to do.
func TestCopyWaitsForLeaveToFence(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, h.publish(h.from, "a"))
	h.listen()
	asked, passes := 0, 0
	h.at = func(e mover.Event) {
		switch e.Event {
		case mover.Passed:
			passes++
		case mover.Waiting:
			h.unpublish(h.from, "a")
		}
	}
	h.out.MayFence = func() (bool, error) {
		asked++
		must.Succeed(t, h.publish(h.from, "b"))
		h.unpublish(h.from, "b")
		return passes == 3, nil
	}
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	want := []string{mover.Passed, mover.Copied, mover.Passed, mover.Copied, mover.Passed, mover.Copied, mover.Fenced}
	if asked < 200 || len(h.events) < len(want) || !slices.Equal(h.events[:len(want)], want) {
		t.Errorf("it has asked %d times, and the events are %q, want %q", asked, h.events, want)
	}
	h.wantMoved(fence, "first")

	h = newHarness(t)
	h.listen()
	ctx, cancel := context.WithCancel(t.Context())
	h.out.MayFence = func() (bool, error) {
		cancel()
		return false, nil
	}
	if _, err := h.out.Copy(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("one that is ended: %v", err)
	}
	must.Succeed(t, h.publish(h.from, "a"))
}

// A volume without a record may hold more than its claim, in more files than its driver counts: already the first pass needs room for all of
// it.
func TestCopyHasRoomForVolumeWithoutRecord(t *testing.T) {
	for name, files := range map[string]int{"few files": 0, "many files": 10_001} {
		t.Run(name, func(t *testing.T) {
			if files > 0 {
				testenv.NeedTime(t)
			}
			h := newHarness(t)
			must.Succeed(t, os.Remove(h.from.Own("volumes", "pvc-1.json")), os.WriteFile(h.from.Path("pool", "pvc-1", "more"), make([]byte, mib), 0o600))
			for i := range files {
				must.Succeed(t, os.WriteFile(h.from.Path("pool", "pvc-1", strconv.Itoa(i)), nil, 0o600))
			}
			h.out.Bytes = 4096
			h.listen()
			promised := int64(0)
			h.at = func(e mover.Event) {
				if e.Event == mover.Passed && promised == 0 {
					state, err := h.to.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
					must.Succeed(t, err)
					promised = state.Bytes
				}
			}
			fence, err := h.out.Copy(t.Context())
			must.Succeed(t, err)
			if promised < mib || h.out.Promised() != promised {
				t.Errorf("the copy is promised %d bytes, and the source says %d", promised, h.out.Promised())
			}
			h.wantMoved(fence, "first")
		})
	}
}

// Between two connections no sender knows that the clock was set: what changed after it was set back has an old ctime.
func TestClockIsSetBetweenConnections(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, h.publish(h.from, "a"))
	h.listen()
	set := false
	h.out.WasSet = func() (bool, error) {
		defer func() { set = false }()
		return set, nil
	}
	h.at = func(e mover.Event) {
		if e.Event == mover.Waiting {
			set = true
			h.unpublish(h.from, "a")
		}
	}
	_, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	if last := h.passes[len(h.passes)-1]; !last.Last || !last.Since.IsZero() {
		t.Errorf("the last pass is %+v: it relies on a time before the clock was set", last)
	}
}

// Passes go on while each has much less to send than the one before.
func TestPasses(t *testing.T) {
	const much = 1 << 30
	for name, c := range map[string]struct {
		bytes func(pass int) int64
		want  int
	}{
		"a small difference":              {func(int) int64 { return 1 }, 1},
		"differences that get smaller":    {func(pass int) int64 { return much >> pass }, 4},
		"differences that stay":           {func(int) int64 { return much }, 2},
		"differences that shrink forever": {func(pass int) int64 { return much * 1000 >> pass }, 10},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			must.Succeed(t, h.publish(h.from, "a"))
			h.listen()
			h.plane.bytes = c.bytes
			h.at = func(e mover.Event) {
				if e.Event == mover.Waiting {
					h.unpublish(h.from, "a")
				}
			}
			_, err := h.out.Copy(t.Context())
			must.Succeed(t, err)
			if got := len(h.passes) - 1; got != c.want {
				t.Errorf("%d passes are made while pods go on, want %d", got, c.want)
			}
		})
	}
}

var errKilled = errors.New("killed")

// At whatever event the source ends, it goes on when it runs again.
func TestSourceRunsAgain(t *testing.T) {
	for _, event := range []string{mover.Passed, mover.Fenced, mover.Waiting, mover.Unused, mover.Received} {
		t.Run(event, func(t *testing.T) {
			h := newHarness(t)
			must.Succeed(t, h.publish(h.from, "a"))
			h.listen()
			ctx, cancel := context.WithCancelCause(t.Context())
			h.at = func(e mover.Event) {
				if e.Event == mover.Waiting {
					h.unpublish(h.from, "a")
				}
				if e.Event == event {
					cancel(errKilled)
				}
			}
			if fence, err := h.out.Copy(ctx); err == nil {
				t.Errorf("it ends with the fence %s, want an error", fence)
			}
			again := *h.out
			h.at = func(e mover.Event) {
				if e.Event == mover.Waiting {
					h.unpublish(h.from, "a")
				}
			}
			fence, err := again.Copy(t.Context())
			must.Succeed(t, err)
			h.wantMoved(fence, "first")
		})
	}
}

// A source that was handed over needs no target any more, unless that has begun to copy anew.
func TestSourceRunsAgainAfterHandOver(t *testing.T) {
	h := newHarness(t)
	ended := h.listen()
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, ended())
	ended = h.listen()
	again, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, ended())
	if again != fence {
		t.Errorf("it is handed over as of %s, and was as of %s", again, fence)
	}
	// Another process began a pass, so that the copy is not whole.
	state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
	must.Succeed(t, err)
	_, err = h.to.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-1", Shape: state.Shape})
	must.Succeed(t, err)
	if err := h.in.Confirm(t.Context(), fence); err == nil {
		t.Error("a copy is confirmed that is not whole")
	}
	h.listen()
	_, err = h.out.Copy(t.Context())
	must.Succeed(t, err)
	// Nothing listens any more.
	h.out.Dial = func(context.Context) (net.Conn, error) { return nil, errors.New("away") }
	again, err = h.out.Copy(t.Context())
	must.Succeed(t, err)
	h.wantMoved(again, "first")
}

// loseCopy removes the copy by hand.
func (h *harness) loseCopy() {
	h.t.Helper()
	must.Succeed(h.t, os.RemoveAll(h.to.Path("pool", "pvc-1")), os.Remove(h.to.Own("volumes", "pvc-1.json")))
}

// A copy that was made anew after it was filled is empty, and must not count as whole.
func TestCopyMadeAnewBeforeReceived(t *testing.T) {
	h := newHarness(t)
	h.listen()
	dial, sessions := h.out.Dial, 0
	h.out.Dial = func(ctx context.Context) (net.Conn, error) {
		if sessions++; sessions == 4 { // after the passes and the last pass
			h.loseCopy()
			state, err := h.from.Call(ctx, moves.State, moves.Request{Volume: "pvc-1"})
			must.Succeed(t, err)
			_, err = h.to.Call(ctx, moves.PrepareTarget, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-1", Shape: state.Shape})
			must.Succeed(t, err)
		}
		return dial(ctx)
	}
	if fence, err := h.out.Copy(t.Context()); err == nil {
		t.Errorf("an empty copy is handed over as of %s", fence)
	}
	must.Succeed(t, h.out.Undo(t.Context(), false))
}

// A connection on which nothing is said, as that of a source which asks whether the target is there, ends no session.
func TestSilentConnectionEndsNoSession(t *testing.T) {
	h := newHarness(t)
	h.listen()
	h.plane.during = func(mover.Pass) error {
		conn, err := h.out.Dial(t.Context())
		if err != nil {
			return err
		}
		err = conn.(*net.TCPConn).CloseWrite()
		_, readErr := io.Copy(io.Discard, conn) // until the target ends it
		return errors.Join(err, readErr, conn.Close())
	}
	_, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
}

// What was undone while the mover waits must not be handed over.
func TestUndoneWhileWaiting(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, h.publish(h.from, "a"))
	h.listen()
	h.at = func(e mover.Event) {
		if e.Event == mover.Waiting {
			must.Succeed(t, h.out.Undo(t.Context(), false))
		}
	}
	if fence, err := h.out.Copy(t.Context()); err == nil {
		t.Errorf("it is handed over as of %s", fence)
	}
	h.unpublish(h.from, "a")
	must.Succeed(t, h.in.Abort(t.Context(), false))
	must.Succeed(t, h.publish(h.from, "b"))
	h.unpublish(h.from, "b")
}

// What is undone during a pass before the fence, as when the mover's pod was deleted by force and its process goes on, is not fenced after that.
func TestUndoneBeforeFence(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, h.publish(h.from, "a"))
	h.listen()
	h.plane.during = func(mover.Pass) error { return h.out.Undo(t.Context(), true) }
	h.at = func(e mover.Event) {
		if e.Event == mover.Fenced {
			t.Error("it is fenced")
			must.Succeed(t, h.out.Undo(t.Context(), true))
		}
	}
	for range 2 {
		if _, err := h.out.Copy(t.Context()); err == nil {
			t.Error("a move that was undone is made")
		}
		must.Succeed(t, h.in.Abort(t.Context(), false))
	}
	h.unpublish(h.from, "a")
	must.Succeed(t, h.publish(h.from, "b"))
	h.unpublish(h.from, "b")
	h.at, h.plane.during = nil, nil
	h.out.Move, h.in.Move = "move-2", "move-2"
	_, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
}

// Nor does a mover of such a move leave anything that another move would meet: a reference on the source, or a copy.
func TestUndoneWhileCopied(t *testing.T) {
	for name, tt := range map[string]struct {
		after  string // the event; empty for amid a pass
		aborts bool   // at once
	}{"amid a pass": {aborts: true}, "after a pass": {after: mover.Passed, aborts: true}, "before the abort": {}} {
		t.Run(name, func(t *testing.T) {
			root := testenv.LoopFS(t, "xfs", 512*mib)
			h := newHarnessIn(t, root)
			must.Succeed(t, h.publish(h.from, "a"))
			h.listen()
			h.plane.bytes = func(int) int64 { return 1 << 30 } // so that another pass would follow
			undo := sync.OnceFunc(func() {
				in := *h.in // another mover
				must.Succeed(t, h.out.Undo(t.Context(), true))
				if tt.aborts {
					must.Succeed(t, in.Abort(t.Context(), false))
				}
			})
			h.plane.during = func(mover.Pass) error {
				if tt.after == "" {
					undo()
				}
				return nil
			}
			h.at = func(e mover.Event) {
				if e.Event == tt.after {
					undo()
				}
			}
			for range 2 {
				if _, err := h.out.Copy(t.Context()); err == nil {
					t.Error("a move that was undone is made")
				}
			}
			must.Succeed(t, h.in.Abort(t.Context(), false))
			left, err := filepath.Glob(filepath.Join(root, "pool", "*", "snapshots", "*"))
			if err != nil || len(left) > 0 {
				t.Errorf("the source keeps %q (%v)", left, err)
			}
			if state, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
				t.Errorf("the target has %+v (%v)", state, err)
			}
			h.unpublish(h.from, "a")
		})
	}
}

// A move that has begun nothing on a node undoes nothing there, and what has the name of the volume stays.
func TestNothingToUndo(t *testing.T) {
	h := newHarness(t)
	other := *h.in
	other.Driver = h.from
	must.Succeed(t, h.in.Abort(t.Context(), false), other.Abort(t.Context(), false), h.out.Undo(t.Context(), true))
	must.Succeed(t, h.publish(h.from, "a"))
	h.unpublish(h.from, "a")
	_, err := h.from.Call(t.Context(), moves.Fence, moves.Request{Volume: "pvc-1", Move: "another", Peer: "node-2"})
	must.Succeed(t, err)
	must.Succeed(t, h.out.Undo(t.Context(), true))
	if state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"}); err != nil || state.Move != "another" {
		t.Errorf("another move has %+v (%v)", state, err)
	}
	h.out.Driver = h.to // which has no such volume
	must.Succeed(t, h.out.GiveUp(t.Context()))
}

// As long as the volume is wanted, a node that has it no more undoes nothing: the copy that would be aborted after that may be the only one.
func TestUndoWithoutVolume(t *testing.T) {
	for name, lost := range map[string]func(h *harness){
		"another disk":          func(h *harness) { h.out.Driver = h.to },
		"its directory is gone": func(h *harness) { must.Succeed(t, os.RemoveAll(h.from.Path("pool", "pvc-1"))) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.listen()
			_, err := h.out.Copy(t.Context())
			must.Succeed(t, err)
			must.Succeed(t, h.in.Abort(t.Context(), false))
			lost(h)
			if err := h.out.Undo(t.Context(), true); err == nil || !strings.Contains(err.Error(), "node-2") {
				t.Errorf("the error is %v, want one that names the other node", err)
			}
			for range 2 {
				must.Succeed(t, h.out.GiveUp(t.Context()))
			}
			if _, err := h.from.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); err == nil != (name == "another disk") {
				t.Errorf("the source is %v", err)
			}
		})
	}
}

// A stale driver answers what was so before a mover that was killed had its last call done.
type stale struct {
	*side
	answered func()
}

func (s stale) Repeat(ctx context.Context, call string, r moves.Request) (moves.Volume, error) {
	v, err := s.side.Repeat(ctx, call, r)
	if call == moves.State {
		s.answered()
	}
	return v, err
}

// A mover may be killed while the driver makes the copy, which is there after that.
func TestAbortWhileCopyIsMade(t *testing.T) {
	h := newHarness(t)
	unlock, err := h.to.Lock(pooltest.ID(t, "pvc-1")) // as the driver has while it makes a copy
	must.Succeed(t, err)
	h.in.Driver = stale{h.to, sync.OnceFunc(func() {
		state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
		must.Succeed(t, err)
		uid, err := volume.ParseMoveID("move-1")
		must.Succeed(t, err)
		peer, err := volume.ParseNodeID("node-1")
		must.Succeed(t, err)
		_, err = h.to.Moves().PrepareTarget(t.Context(), pool.TargetRequest{
			Move: pool.Move{Volume: pooltest.ID(t, "pvc-1"), ID: uid, Peer: peer}, Shape: volume.Shape{Mode: volume.ModeMount, Bytes: state.Bytes},
		})
		must.Succeed(t, err)
		unlock()
	})}
	must.Succeed(t, h.in.Abort(t.Context(), false))
	if state, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("an aborted copy is left: %+v (%v)", state, err)
	}
}

// The source removes what it has only if the target has the volume at that moment, and only the target of the move says so.
func TestRemovalIsVouchedFor(t *testing.T) {
	for name, lost := range map[string]func(h *harness){
		"the target has another disk": func(h *harness) { h.in.Driver = h.from },
		"its directory is gone":       func(h *harness) { must.Succeed(t, os.RemoveAll(h.to.Path("pool", "pvc-1"))) },
		"it copies":                   func(h *harness) { h.in.Fence = "" },
		"it is of another move":       func(h *harness) { h.in.Move = "move-2" },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			ended := h.listen()
			fence, err := h.out.Copy(t.Context())
			must.Succeed(t, err, ended(), h.in.Confirm(t.Context(), fence))
			h.in.Fence = fence
			lost(h)
			h.listen()
			if err := h.out.Remove(t.Context()); err == nil || !strings.Contains(err.Error(), "node-2") {
				t.Errorf("the error is %v, want one that names the other node", err)
			}
			if _, err := h.from.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); err != nil {
				t.Errorf("the source is removed: %v", err)
			}
		})
	}
}

// A copy that may be whole is removed only if the source has the volume at that moment, and only the source of the move says so.
func TestAbortIsVouchedFor(t *testing.T) {
	for name, lost := range map[string]func(h *harness){
		"the source has another disk": func(h *harness) { h.out.Driver = newSide(h.t, "node-1") },
		"its directory is gone":       func(h *harness) { must.Succeed(t, os.RemoveAll(h.from.Path("pool", "pvc-1"))) },
		"it is of another move":       func(h *harness) { h.out.Move = "move-2" },
		"it has a copy of another": func(h *harness) {
			h.out.Driver = newSide(h.t, "node-1")
			_, err := h.out.Driver.Repeat(t.Context(), moves.PrepareTarget, moves.Request{
				Volume: "pvc-1", Move: "move-2", Peer: "node-3", Shape: moves.Shape{Mode: "mount", Bytes: mib},
			})
			must.Succeed(t, err)
		},
	} {
		for _, confirmed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, confirmed %v", name, confirmed), func(t *testing.T) {
				h := newHarness(t)
				ended := h.listen()
				fence, err := h.out.Copy(t.Context())
				must.Succeed(t, err, ended())
				if confirmed {
					must.Succeed(t, h.in.Confirm(t.Context(), fence))
				}
				h.in.Aborts = true
				h.listen()
				lost(h)
				if err := h.out.UndoAndTell(t.Context(), true); err == nil {
					t.Error("a copy is removed without its source")
				}
				if _, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); err != nil {
					t.Errorf("the copy is removed: %v", err)
				}
			})
		}
	}
}

// What the source vouches for is used there, and the copy is gone, also for a mover that is run again after it has removed it.
func TestAbortOnceTold(t *testing.T) {
	for _, confirmed := range []bool{false, true} {
		h := newHarness(t)
		ended := h.listen()
		fence, err := h.out.Copy(t.Context())
		must.Succeed(t, err, ended())
		if confirmed {
			must.Succeed(t, h.in.Confirm(t.Context(), fence))
		}
		h.in.Aborts = true
		for _, told := range []bool{true, false} {
			ended = h.listen()
			if told {
				must.Succeed(t, h.out.UndoAndTell(t.Context(), true))
			}
			must.Succeed(t, ended())
			if state, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
				t.Errorf("the copy is left: %+v (%v)", state, err)
			}
		}
		must.Succeed(t, h.publish(h.from, "a"))
		h.unpublish(h.from, "a")
	}
}

// A copy that is not whole goes without its source.
func TestAbortOfPart(t *testing.T) {
	h := newHarness(t)
	_, err := h.in.Driver.Repeat(t.Context(), moves.PrepareTarget, moves.Request{
		Volume: "pvc-1", Move: "move-1", Peer: "node-1", Shape: moves.Shape{Mode: "mount", Bytes: mib},
	})
	must.Succeed(t, err)
	h.in.Aborts = true
	must.Succeed(t, h.listen()())
	if state, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("the copy is left: %+v (%v)", state, err)
	}
}

// A mover that vouches fills no copy, and does not say that one is whole.
func TestVouchingOnly(t *testing.T) {
	h := newHarness(t)
	h.in.Fence = "fence"
	h.listen()
	if _, err := h.out.Copy(t.Context()); err == nil {
		t.Error("a volume is copied to what only vouches")
	}
	if _, err := h.to.Moves().State(t.Context(), pooltest.ID(t, "pvc-1")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("the target has %v", err)
	}
}

func TestTargetRefuses(t *testing.T) {
	for name, change := range map[string]func(h *harness){
		"another move":   func(h *harness) { h.in.Move = "move-2" },
		"another volume": func(h *harness) { h.in.Volume = "pvc-2" },
		"an unknown pool": func(h *harness) {
			h.in.Pool = "nowhere"
		},
		"a name that is taken": func(h *harness) {
			_, err := h.to.Create(h.t.Context(), pool.Request{ID: pooltest.ID(h.t, "pvc-1"), Range: volume.Range{Required: mib}})
			must.Succeed(h.t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			change(h)
			h.listen()
			_, err := h.out.Copy(t.Context())
			if err == nil || !strings.Contains(err.Error(), "the target refuses") {
				t.Errorf("the error is %v", err)
			}
			must.Succeed(t, h.publish(h.from, "a"))
			h.unpublish(h.from, "a")
		})
	}
}

// A peer that says nothing sensible ends its own connection, and nothing else.
func TestTargetSurvivesNonsense(t *testing.T) {
	h := newHarness(t)
	h.listen()
	for _, says := range [][]byte{nil, {0}, {0xff, 0xff, 0xff, 0xff}, {0, 0, 0, 2, '{', '{'}, {0, 0, 0, 2, '{', '}'}, []byte("\x00\x00\x00\x37" + `{"version":1,"kind":"x","volume":"pvc-1","move":"move-1"}`)[:59]} {
		conn, err := h.out.Dial(t.Context())
		must.Succeed(t, err)
		_, err = conn.Write(says)
		must.Succeed(t, err)
		must.Succeed(t, conn.(*net.TCPConn).CloseWrite())
		_, err = io.Copy(io.Discard, conn)
		if err != nil && !strings.Contains(err.Error(), "reset") {
			t.Error(err)
		}
		must.Succeed(t, conn.Close())
	}
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	h.wantMoved(fence, "first")
}

// A cut is a connection that breaks after some reads and writes.
type cut struct {
	net.Conn
	left *int
}

var errCut = errors.New("cut")

func (c cut) use() error {
	if *c.left--; *c.left < 0 {
		return errors.Join(errCut, c.Close())
	}
	return nil
}

func (c cut) Read(b []byte) (int, error) {
	if err := c.use(); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c cut) Write(b []byte) (int, error) {
	if err := c.use(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

// Whenever the network is cut, running the source again moves the volume, and until then the source publishes it or neither does.
func TestCutConnections(t *testing.T) {
	for after := 0; ; after++ {
		h := newHarness(t)
		h.listen()
		dial, left := h.out.Dial, after
		h.out.Dial = func(ctx context.Context) (net.Conn, error) {
			conn, err := dial(ctx)
			return cut{conn, &left}, err
		}
		first := *h.out
		_, err := first.Copy(t.Context())
		if err == nil && left >= 0 {
			t.Logf("there are %d reads and writes", after-left)
			return
		}
		if err := h.publish(h.to, "b"); err == nil {
			t.Errorf("after %d the copy is published", after)
		}
		h.out.Dial = dial
		fence, err := h.out.Copy(t.Context())
		must.Succeed(t, err)
		h.wantMoved(fence, "first")
		if after > 100 {
			t.Fatal("it does not end")
		}
	}
}

// A connection that was cut without a word does not hold up the source that connects again.
func TestSourceConnectsAnew(t *testing.T) {
	h := newHarness(t)
	h.listen()
	silent := h.silent()
	defer silent.Close()
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	h.wantMoved(fence, "first")
}

// A move-in that another one has replaced may still have a session: as long as it has, nothing else fills the copy or confirms it.
func TestTwoTargets(t *testing.T) {
	h := newHarness(t)
	h.listen()
	stale := h.silent()
	defer stale.Close()
	another := *h.in
	h.in = &another
	h.listen()
	if _, err := h.out.Copy(t.Context()); err == nil {
		t.Fatal("a copy is filled by two processes at once")
	}
	must.Succeed(t, stale.Close())
	fence, err := h.out.Copy(t.Context())
	for err != nil { // until the other has noticed
		must.Succeed(t, t.Context().Err())
		fence, err = h.out.Copy(t.Context())
	}
	h.wantMoved(fence, "first")
}

// A move-out that another one has replaced may still run, and fill the copy with what the volume had before it was fenced.
func TestTwoSources(t *testing.T) {
	for name, at := range map[string]int{"before the copy is whole": 4, "before the target ends": 5} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.listen()
			dial, sessions := h.out.Dial, 0
			h.out.Dial = func(ctx context.Context) (net.Conn, error) {
				if sessions++; sessions == at {
					h.out.Dial = dial
					h.fill("stale")
				}
				return dial(ctx)
			}
			fence, err := h.out.Copy(t.Context())
			if err != nil { // as a mover that is started again
				t.Log(err)
				fence, err = h.out.Copy(t.Context())
			}
			must.Succeed(t, err)
			h.wantMoved(fence, "first")
		})
	}
}

// fill is a whole session of another source.
func (h *harness) fill(data string) {
	h.t.Helper()
	session := h.session("")
	defer session.Close()
	_, err := session.Write(append(append([]byte{byte(len(data))}, data...), 0))
	must.Succeed(h.t, err)
	_, err = io.ReadFull(session, make([]byte, 1))
	must.Succeed(h.t, err)
}

// What a session has filled says nothing of a copy that was made anew meanwhile: its next pass would take what is missing for there.
func TestBaseOfCopyThatIsMadeAnew(t *testing.T) {
	h := newHarness(t)
	h.listen()
	session := h.session("first")
	defer session.Close()
	request := moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-1"}
	h.loseCopy()
	state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
	must.Succeed(t, err)
	request.Shape = state.Shape
	_, err = h.to.Call(t.Context(), moves.PrepareTarget, request)
	must.Succeed(t, err)
	_, err = session.Write([]byte{0}) // all was sent
	must.Succeed(t, err)
	if _, err := io.Copy(io.Discard, session); err != nil { // until the target has ended
		t.Log(err)
	}
	if state, err = h.to.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"}); err != nil || state.Base != "" {
		t.Errorf("an empty copy is said to equal %q (%v)", state.Base, err)
	}
}

// silent is a session of a source that says no more.
func (h *harness) silent() net.Conn { return h.session("") }

// session is one at whose end the copy equals a reference, if that is not empty.
func (h *harness) session(base string) net.Conn {
	t := h.t
	state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
	must.Succeed(t, err)
	silent, err := h.out.Dial(t.Context())
	must.Succeed(t, err)
	hello, err := json.Marshal(map[string]any{
		"version": 1, "kind": "pass", "volume": "pvc-1", "move": "move-1", "mode": "mount", "bytes": strconv.FormatInt(state.Bytes, 10), "base": base,
	})
	must.Succeed(t, err)
	_, err = silent.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(hello))), hello...))
	must.Succeed(t, err)
	length := make([]byte, 4)
	_, err = io.ReadFull(silent, length)
	must.Succeed(t, err)
	_, err = io.ReadFull(silent, make([]byte, binary.BigEndian.Uint32(length))) // the copy is there, and a pass is awaited
	must.Succeed(t, err)
	return silent
}

// Others that can reach the port do not hold up the source.
func TestStrangersAreSilent(t *testing.T) {
	h := newHarness(t)
	a := newAuthority(t)
	listener, err := mover.Listen(t.Context(), "127.0.0.1:0", identity(t, a, mover.TargetName, x509.ExtKeyUsageServerAuth), time.Minute)
	must.Succeed(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- h.in.Serve(ctx, listener) }()
	var strangers sync.WaitGroup
	defer strangers.Wait()
	defer cancel()
	for range 200 {
		strangers.Go(func() {
			for ctx.Err() == nil { // a connection that is closed is made anew at once
				stranger, err := net.Dial("tcp", listener.Addr().String())
				if err != nil {
					return
				}
				_, _ = stranger.Read(make([]byte, 1))
				_ = stranger.Close()
			}
		})
	}
	h.out.Dial, err = mover.Dialer(listener.Addr().String(), identity(t, a, mover.SourceName, x509.ExtKeyUsageClientAuth), time.Minute)
	must.Succeed(t, err)
	began := time.Now()
	fence, err := h.out.Copy(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, <-done)
	if took := time.Since(began); took > 25*time.Second { // one stranger has 30
		t.Errorf("it takes %v", took)
	}
	h.wantMoved(fence, "first")
}

// The mover sees the pools by its own mounts: they may be others than those of the driver.
func TestOpenAnotherVolume(t *testing.T) {
	h := newHarness(t)
	state, err := h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
	must.Succeed(t, err)
	for name, change := range map[string]func(id *string, v *moves.Volume){
		"another record": func(_ *string, v *moves.Volume) { v.UID = "other" },
		"another pool":   func(_ *string, v *moves.Volume) { v.Pool = "other" },
		"no such volume": func(id *string, _ *moves.Volume) { *id = "pvc-2" },
		"no volume id":   func(id *string, _ *moves.Volume) { *id = "../pvc-1" },
	} {
		id, v := "pvc-1", state
		change(&id, &v)
		if d, err := h.from.pools.Open(t.Context(), id, v); err == nil {
			t.Errorf("%s: %s is opened", name, d)
		}
	}
	d, err := h.from.pools.Open(t.Context(), "pvc-1", state)
	must.Succeed(t, err)
	must.Succeed(t, d.Close())
}

// identity is that of a side, of an authority.
func identity(t *testing.T, a drivertest.Authority, name string, use x509.ExtKeyUsage) mover.Identity {
	t.Helper()
	certificate, key, err := a.Issue(name, use)
	must.Succeed(t, err)
	return mover.Identity{CertFile: certificate, KeyFile: key, CAFile: a.File}
}

func newAuthority(t *testing.T) drivertest.Authority {
	t.Helper()
	a, err := drivertest.NewAuthority(t.TempDir())
	must.Succeed(t, err)
	return a
}

func TestIdentities(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	target := identity(t, ours, mover.TargetName, x509.ExtKeyUsageServerAuth)
	source := identity(t, ours, mover.SourceName, x509.ExtKeyUsageClientAuth)
	for name, c := range map[string]struct {
		target, source mover.Identity
		ok             bool
	}{
		"both of one authority":           {target, source, true},
		"a source of another authority":   {target, identity(t, others, mover.SourceName, x509.ExtKeyUsageClientAuth), false},
		"a target of another authority":   {identity(t, others, mover.TargetName, x509.ExtKeyUsageServerAuth), source, false},
		"a target that is a source":       {source, source, false},
		"a source that is a target":       {target, target, false},
		"a source of another name":        {target, identity(t, ours, "other.move", x509.ExtKeyUsageClientAuth), false},
		"a target of another name":        {identity(t, ours, "another.move", x509.ExtKeyUsageServerAuth), source, false},
		"a source for servers":            {target, identity(t, newAuthority(t), mover.SourceName, x509.ExtKeyUsageServerAuth), false},
		"a source that trusts no target":  {target, mover.Identity{CertFile: source.CertFile, KeyFile: source.KeyFile, CAFile: others.File}, false},
		"a target that trusts no sources": {mover.Identity{CertFile: target.CertFile, KeyFile: target.KeyFile, CAFile: others.File}, source, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := connect(t, c.target, c.source); (err == nil) != c.ok {
				t.Errorf("the error is %v, want success: %v", err, c.ok)
			}
		})
	}
}

// connect has the two sides exchange a byte each.
func connect(t *testing.T, target, source mover.Identity) error {
	t.Helper()
	listener, err := mover.Listen(t.Context(), "127.0.0.1:0", target, time.Minute)
	must.Succeed(t, err)
	defer listener.Close()
	dial, err := mover.Dialer(listener.Addr().String(), source, time.Minute)
	must.Succeed(t, err)
	served := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1))
			if err == nil {
				_, err = conn.Write([]byte{1})
			}
			err = errors.Join(err, conn.Close())
		}
		served <- err
	}()
	conn, err := dial(t.Context())
	if err != nil {
		return errors.Join(err, ignore(<-served))
	}
	defer conn.Close()
	if version := conn.(*tls.Conn).ConnectionState().Version; version != tls.VersionTLS13 {
		t.Errorf("the version of TLS is %x", version)
	}
	if _, err := conn.Write([]byte{1}); err != nil {
		return err
	}
	_, err = io.ReadFull(conn, make([]byte, 1))
	return errors.Join(err, <-served)
}

// ignore is for what follows from an error that is reported.
func ignore(error) error { return nil }

func TestUnusableIdentity(t *testing.T) {
	a := newAuthority(t)
	whole := identity(t, a, mover.TargetName, x509.ExtKeyUsageServerAuth)
	for i, broken := range []mover.Identity{
		{}, {CertFile: whole.CertFile, KeyFile: whole.KeyFile}, {CertFile: whole.CertFile, KeyFile: whole.KeyFile, CAFile: whole.KeyFile},
		{CertFile: whole.CertFile, KeyFile: a.File, CAFile: whole.CAFile},
	} {
		if l, err := mover.Listen(t.Context(), "127.0.0.1:0", broken, time.Minute); err == nil {
			t.Errorf("%d: %v listens", i, l)
		}
		if _, err := mover.Dialer("127.0.0.1:1", broken, time.Minute); err == nil {
			t.Errorf("%d: a source can dial", i)
		}
	}
}

// The files of both sides are made anew while the target waits, as those of a Secret that was deleted.
func TestIdentityMadeAnew(t *testing.T) {
	a, another := newAuthority(t), newAuthority(t)
	target := identity(t, a, mover.TargetName, x509.ExtKeyUsageServerAuth)
	listener, err := mover.Listen(t.Context(), "127.0.0.1:0", target, time.Minute)
	must.Succeed(t, err)
	defer listener.Close()
	source := identity(t, a, mover.SourceName, x509.ExtKeyUsageClientAuth)
	dial, err := mover.Dialer(listener.Addr().String(), source, time.Minute)
	must.Succeed(t, err)
	for _, side := range []struct{ was, is mover.Identity }{
		{target, identity(t, another, mover.TargetName, x509.ExtKeyUsageServerAuth)},
		{source, identity(t, another, mover.SourceName, x509.ExtKeyUsageClientAuth)},
	} {
		for was, is := range map[string]string{side.was.CertFile: side.is.CertFile, side.was.KeyFile: side.is.KeyFile, side.was.CAFile: side.is.CAFile} {
			data, err := os.ReadFile(is)
			must.Succeed(t, err)
			must.Succeed(t, os.WriteFile(was, data, 0o600))
		}
	}
	served := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			_, err = conn.Write([]byte{1})
			err = errors.Join(err, conn.Close())
		}
		served <- err
	}()
	conn, err := dial(t.Context())
	must.Succeed(t, err)
	defer conn.Close()
	_, err = io.ReadFull(conn, make([]byte, 1))
	must.Succeed(t, err, <-served)
}

// What a copy was compared with in another way is no base.
func TestBaseOfAnotherComparison(t *testing.T) {
	for verify, want := range map[string]bool{"all": true, "changed": false, "": false} {
		t.Run(verify, func(t *testing.T) {
			h := newHarness(t)
			h.out.Verify = "all"
			state, err := h.from.Call(t.Context(), moves.Fence, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-2"})
			must.Succeed(t, err)
			request := moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-1", Shape: state.Shape}
			_, err = h.to.Call(t.Context(), moves.PrepareTarget, request)
			must.Succeed(t, err)
			request.Base, request.Verify = "one", verify
			_, err = h.to.Call(t.Context(), moves.Based, request)
			must.Succeed(t, err)
			h.listen()
			fence, err := h.out.Copy(t.Context())
			must.Succeed(t, err)
			if asked := slices.Contains(h.events, mover.Unbased); asked != want { // there is no such reference
				t.Errorf("the events are %q", h.events)
			}
			h.wantMoved(fence, "first")
		})
	}
}

// The source may be there before the target.
func TestDialUntilTargetListens(t *testing.T) {
	a := newAuthority(t)
	source := identity(t, a, mover.SourceName, x509.ExtKeyUsageClientAuth)
	address := testenv.FreeAddress(t)
	dial, err := mover.Dialer(address, source, time.Minute)
	must.Succeed(t, err)
	dialed := make(chan error, 1)
	go func() {
		conn, err := dial(t.Context())
		if err == nil {
			err = conn.Close()
		}
		dialed <- err
	}()
	listener, err := mover.Listen(t.Context(), address, identity(t, a, mover.TargetName, x509.ExtKeyUsageServerAuth), time.Minute)
	must.Succeed(t, err)
	defer listener.Close()
	conn, err := listener.Accept()
	must.Succeed(t, err)
	_, _ = io.Copy(io.Discard, conn) // the handshake, and the end
	must.Succeed(t, <-dialed)
	must.Succeed(t, listener.Close())
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if conn, err := dial(ctx); err == nil {
		t.Error(fmt.Errorf("%v is connected to", conn.RemoteAddr()))
	}
}
