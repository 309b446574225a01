package mover_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What a session has left in memory may not be on the disk of the target, but for one that has come to its end in the same process.
func TestCopyIsDoubted(t *testing.T) {
	h := newHarness(t)
	var doubted []bool
	began := make(chan struct{}, 4)
	h.in.Receive = func(ctx context.Context, conn net.Conn, into *dir.Dir, is mover.Receiving, finished func() error) error {
		h.mu.Lock()
		doubted = append(doubted, is.Doubted)
		h.mu.Unlock()
		began <- struct{}{}
		return receive(ctx, conn, into, is, finished)
	}
	want := func(what string, all ...bool) {
		t.Helper()
		h.mu.Lock()
		defer h.mu.Unlock()
		if !slices.Equal(doubted, all) {
			t.Errorf("%s: the sessions doubt what is there: %v, want %v", what, doubted, all)
		}
		doubted = nil
	}
	ended := h.listen()
	h.plane.during = func(mover.Pass) error {
		<-began
		return errors.New("cut")
	}
	if _, err := h.out.Copy(t.Context()); err == nil {
		t.Fatal("a pass that fails has copied all")
	}
	h.plane.during = nil
	_, err := h.out.Copy(t.Context())
	must.Succeed(t, err, ended())
	want("one that was cut, passes and a last pass", true, true, false)

	state := must.Value(h.from.Call(t.Context(), moves.State, moves.Request{Volume: "pvc-1"}))(t)
	_, err = h.to.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-1", Shape: state.Shape})
	must.Succeed(t, err)
	h.in = &mover.In{Driver: h.in.Driver, Open: h.in.Open, Receive: h.in.Receive, Volume: h.in.Volume, Move: h.in.Move, Peer: h.in.Peer, Report: h.in.Report}
	h.listen()
	must.Succeed(t, must.Err(h.out.Copy(t.Context())))
	want("a last pass to another process", true)
}
