package driver_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
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

func newMoveOf(t *testing.T, name, peer string) *moveOf {
	t.Helper()
	h := newHarness(t, setup{node: name})
	client := must.Value(moves.Dial(h.socket))(t)
	t.Cleanup(func() { must.Succeed(t, client.Close()) })
	return &moveOf{h, client, moves.Request{Volume: "pvc-1", Move: "move-1", Peer: peer}}
}

// call makes a call that has to succeed.
func (m *moveOf) call(t *testing.T, name string) moves.Volume {
	t.Helper()
	answer := must.Value(m.Call(t.Context(), name, m.request))(t)
	return answer
}

// wantCode expects a call to be answered with a code.
func (m *moveOf) wantCode(t *testing.T, name string, want codes.Code) {
	t.Helper()
	if _, err := m.Call(t.Context(), name, m.request); status.Code(err) != want {
		t.Errorf("%s: %v, want %v", name, err, want)
	}
}

func TestMoveBetweenDrivers(t *testing.T) {
	from, to := newMoveOf(t, "node-1", "node-2"), newMoveOf(t, "node-2", "node-1")
	from.create(t, "pvc-1", "")
	from.publish(t, "pvc-1", filepath.Join(from.pods, "a"))
	source := from.call(t, moves.State)
	if source.Bytes != 4*mib || source.Mode != "mount" || source.Pool != "local" || !source.Used || !source.Recorded || source.Move != "" {
		t.Errorf("the source is %+v", source)
	}
	to.request.Shape = source.Shape
	if target := to.call(t, moves.PrepareTarget); target.Bytes != 4*mib || target.Role != "target" || target.UID == source.UID || target.Peer != "node-1" {
		t.Errorf("the target is %+v", target)
	}
	fenced := from.call(t, moves.Fence)
	from.request.Fence, to.request.Fence = fenced.Fence, fenced.Fence
	_, err := from.NodePublishVolume(t.Context(), publishRequest("pvc-1", filepath.Join(from.pods, "b")))
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("publish a fenced volume: %v", err)
	}
	wantContains(t, status.Convert(err).Message(), "node-2")
	from.wantCode(t, moves.HandOver, codes.FailedPrecondition)
	from.unpublish(t, "pvc-1", filepath.Join(from.pods, "a"))
	to.wantCode(t, moves.ConfirmTarget, codes.FailedPrecondition)
	to.call(t, moves.Received)
	from.call(t, moves.HandOver)
	from.wantCode(t, moves.Unfence, codes.FailedPrecondition)
	to.call(t, moves.ConfirmTarget)
	to.wantCode(t, moves.AbortTarget, codes.FailedPrecondition)
	if confirmed := to.call(t, moves.State); confirmed.Moved != "move-1" || confirmed.Role != "" {
		t.Errorf("the confirmed volume is %+v", confirmed)
	}
	to.publish(t, "pvc-1", filepath.Join(to.pods, "a"))
	to.unpublish(t, "pvc-1", filepath.Join(to.pods, "a"))
	from.call(t, moves.RemoveSource)
	from.wantCode(t, moves.State, codes.NotFound)
	if ids := from.ids(t); len(ids) != 0 {
		t.Errorf("the source still has %q", ids)
	}
}

func TestMoveUndone(t *testing.T) {
	from, to := newMoveOf(t, "node-1", "node-2"), newMoveOf(t, "node-2", "node-1")
	from.create(t, "pvc-1", "")
	to.request.Shape = from.call(t, moves.State).Shape
	to.call(t, moves.PrepareTarget)
	fence := from.call(t, moves.Fence).Fence
	_, err := from.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "pvc-1"})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("delete a fenced volume: %v", err)
	}
	to.request.Fence, from.request.Fence = fence, fence
	to.call(t, moves.Received)
	from.call(t, moves.HandOver)
	to.call(t, moves.AbortTarget)
	from.wantCode(t, moves.Unfence, codes.FailedPrecondition)
	from.request.TargetAborted = true
	from.call(t, moves.Unfence)
	from.publish(t, "pvc-1", filepath.Join(from.pods, "a"))
	from.unpublish(t, "pvc-1", filepath.Join(from.pods, "a"))
	if ids := to.ids(t); len(ids) != 0 {
		t.Errorf("the target still has %q", ids)
	}
}

// Its promise is the size that the mover names.
func TestMoveOfVolumeWithoutRecord(t *testing.T) {
	from := newMoveOf(t, "node-1", "node-2")
	must.Succeed(t, os.Mkdir(filepath.Join(from.dir, "local", "pvc-1"), 0o777))
	from.request.Bytes = 8 * mib
	if fenced := from.call(t, moves.Fence); fenced.Bytes != 8*mib || fenced.Fence == "" {
		t.Errorf("it is fenced as %+v", fenced)
	}
}

func TestInvalidMoves(t *testing.T) {
	m := newMoveOf(t, "node-1", "node-2")
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
	m := newMoveOf(t, "node-1", "node-2")
	m.create(t, "pvc-1", "")
	id, err := volume.ParseID("pvc-1")
	must.Succeed(t, err)
	unlock, err := m.set.Lock(id)
	must.Succeed(t, err)
	m.wantCode(t, moves.Fence, codes.Aborted)
	unlock()
	m.call(t, moves.Fence)
}
