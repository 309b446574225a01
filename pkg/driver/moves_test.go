package driver_test

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// moveOf is a driver, and a request about a volume that moves between it and another node.
type moveOf struct {
	*harness
	*moves.Client
	request moves.Request
}

func newMoveOf(t *testing.T) *moveOf {
	t.Helper()
	h := newHarness(t, setup{})
	client := must.Value(moves.Dial(h.socket))(t)
	t.Cleanup(func() { must.Succeed(t, client.Close()) })
	return &moveOf{h, client, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: "node-2"}}
}

// call makes a call that has to succeed.
func (m *moveOf) call(t *testing.T, name string) {
	t.Helper()
	must.Succeed(t, must.Err(m.Call(t.Context(), name, m.request)))
}

// wantCode expects a call to be answered with a code.
func (m *moveOf) wantCode(t *testing.T, name string, want codes.Code) {
	t.Helper()
	if _, err := m.Call(t.Context(), name, m.request); status.Code(err) != want {
		t.Errorf("%s: %v, want %v", name, err, want)
	}
}

func TestInvalidMoves(t *testing.T) {
	m := newMoveOf(t)
	valid := m.request
	for what, change := range map[string]func(*moves.Request){
		"a volume outside the pool": func(r *moves.Request) { r.Volume = "../pvc-1" },
		"no move":                   func(r *moves.Request) { r.Move = "" },
		"a peer that is no node":    func(r *moves.Request) { r.Peer = "a/b" },
		"an unknown pool":           func(r *moves.Request) { r.Pool = "nowhere" },
		"no mode":                   func(r *moves.Request) { r.Mode = "" },
		"a negative size":           func(r *moves.Request) { r.Bytes = -1 },
	} {
		t.Run(what, func(t *testing.T) {
			m.request = valid
			m.request.Shape = moves.Shape{Mode: "mount", Bytes: mib}
			change(&m.request)
			m.wantCode(t, moves.PrepareTarget, codes.InvalidArgument)
		})
	}
	m.request = valid
	for _, call := range []string{moves.State, moves.Fence, moves.Unfence, moves.HandOver, moves.Received, moves.ConfirmTarget} {
		m.request.Fence = "f"
		m.wantCode(t, call, codes.NotFound)
	}
	m.call(t, moves.AbortTarget)
	m.call(t, moves.RemoveSource)
}

// A mover waits for the calls on its volume, and the other way round.
func TestMoveExcludesCalls(t *testing.T) {
	m := newMoveOf(t)
	m.create(t, "pvc-1", "")
	id, err := volume.ParseID("pvc-1")
	must.Succeed(t, err)
	unlock, err := m.set.Lock(id)
	must.Succeed(t, err)
	m.wantCode(t, moves.Fence, codes.Aborted)
	unlock()
	m.call(t, moves.Fence)
}
