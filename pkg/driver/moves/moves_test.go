package moves_test

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// serve serves the calls by a function until the test ends, and returns a client.
func serve(t *testing.T, call func(ctx context.Context, name string, r moves.Request) (*moves.Volume, error), around ...grpc.UnaryServerInterceptor) *moves.Client {
	t.Helper()
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := net.Listen("unix", socket)
	must.Succeed(t, err)
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(around...))
	server.RegisterService(moves.Describe(call), nil)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	client, err := moves.Dial(socket)
	must.Succeed(t, err)
	t.Cleanup(func() {
		must.Succeed(t, client.Close())
		server.Stop()
		must.Succeed(t, <-ended)
	})
	return client
}

// Sizes have more digits than a number of JSON keeps.
func TestCall(t *testing.T) {
	request := moves.Request{
		Volume: "pvc-1", Move: "move-1", Peer: "node-2", Fence: "f", LeaveSnapshots: true, TargetAborted: true, Pool: "local",
		Shape: moves.Shape{Mode: "block", Bytes: 1<<62 + 1, BlockBytes: 512, BytesPerInode: 1<<53 + 1},
	}
	answer := moves.Volume{
		Pool: "local", Shape: request.Shape, UID: "u", Recorded: true, Used: true,
		Move: "move-1", Role: "source", Peer: "node-2", Fence: "f", HandedOver: true, Moved: "move-0",
	}
	for _, name := range []string{
		moves.State, moves.Fence, moves.Unfence, moves.HandOver, moves.RemoveSource,
		moves.PrepareTarget, moves.Received, moves.ConfirmTarget, moves.AbortTarget,
	} {
		client := serve(t, func(_ context.Context, called string, got moves.Request) (*moves.Volume, error) {
			if diff := cmp.Diff(request, got); diff != "" || called != name {
				t.Errorf("%s arrives as %s with another request (-want +got):\n%s", name, called, diff)
			}
			return &answer, nil
		})
		got := must.Value(client.Call(t.Context(), name, request))(t)
		if diff := cmp.Diff(answer, got); diff != "" {
			t.Errorf("%s: another answer (-want +got):\n%s", name, diff)
		}
	}
}

func TestErrorKeepsItsCode(t *testing.T) {
	client := serve(t, func(context.Context, string, moves.Request) (*moves.Volume, error) {
		return nil, status.Error(codes.FailedPrecondition, "not now")
	})
	_, err := client.Call(t.Context(), moves.Fence, moves.Request{})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the error is %v", err)
	}
}

// An earlier driver, which knows no moves, is named by its version.
func TestEarlierDriver(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := net.Listen("unix", socket)
	must.Succeed(t, err)
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, &earlier{})
	go func() { _ = server.Serve(listener) }() // until it is stopped
	defer server.Stop()
	client, err := moves.Dial(socket)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, client.Close()) }()
	_, err = client.Repeat(t.Context(), moves.State, moves.Request{Volume: "pvc-1"})
	if !moves.IsUnknown(err) || !strings.Contains(err.Error(), "version v0.1.0") {
		t.Errorf("the error is %v", err)
	}
}

type earlier struct {
	csi.UnimplementedIdentityServer
}

func (*earlier) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{VendorVersion: "v0.1.0"}, nil
}

func TestRepeat(t *testing.T) {
	answers := []codes.Code{codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.OK, codes.FailedPrecondition, codes.Aborted}
	client := serve(t, func(context.Context, string, moves.Request) (*moves.Volume, error) {
		code := answers[0]
		if len(answers) > 1 {
			answers = answers[1:]
		}
		return &moves.Volume{}, status.Error(code, "as planned")
	})
	for _, want := range []codes.Code{codes.OK, codes.FailedPrecondition} {
		if _, err := client.Repeat(t.Context(), moves.Fence, moves.Request{}); status.Code(err) != want {
			t.Errorf("the answer is %v, want %v", err, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := client.Repeat(ctx, moves.Fence, moves.Request{}); err == nil {
		t.Error("a call succeeds that never does")
	}
}

// What is around the calls of CSI is around these too.
func TestInterceptors(t *testing.T) {
	var seen []string
	client := serve(t, func(context.Context, string, moves.Request) (*moves.Volume, error) { return &moves.Volume{}, nil },
		func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			seen = append(seen, info.FullMethod)
			return handler(ctx, request)
		})
	must.Succeed(t, must.Err(client.Call(t.Context(), moves.Fence, moves.Request{})))
	if diff := cmp.Diff([]string{"/hostpath.Moves/MoveFence"}, seen); diff != "" {
		t.Errorf("other calls were seen (-want +got):\n%s", diff)
	}
}
