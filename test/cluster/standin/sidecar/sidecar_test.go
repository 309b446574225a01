package sidecar_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"kubevirt.io/hostpath-provisioner/test/cluster/standin/sidecar"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

type identity struct {
	csi.UnimplementedIdentityServer
}

func (identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "example"}, nil
}

// The containers of a pod start at once, so that a sidecar may come first.
func TestDriverNameWaitsForDriver(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "csi.sock")
	connection, err := sidecar.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	connection.Connect()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, identity{})
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	if got, err := sidecar.DriverName(t.Context(), connection); got != "example" || err != nil {
		t.Errorf("the name is %q, %v", got, err)
	}
}

func TestHealth(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var sick error
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- sidecar.AnswerHealth(ctx, listener, func(context.Context) error { return sick }) }()

	for err, want := range map[error]int{nil: http.StatusOK, errors.New("sick"): http.StatusInternalServerError} {
		sick = err
		if got := status(t, "http://"+listener.Addr().String()+"/healthz"); got != want {
			t.Errorf("with %v the status is %d, want %d", err, got, want)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func status(t *testing.T, url string) int {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode
}
