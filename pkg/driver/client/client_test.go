package client_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// start serves a pool named "local", in the directory of that name in root, on a socket.
func start(t *testing.T, root string) (*pool.Set, *client.Client) {
	t.Helper()
	n := pooltest.New(t, root)
	options := n.Options("node-a")
	set := n.Start(n.Configs(`[{"name":"local","path":"local"}]`), options)
	must.Succeed(t, set.Wait(t.Context()))
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() {
		served <- driver.NewServer(driver.Config{Name: "test.example.com", Node: options.Node}, set, unobserved{}, logr.Discard()).Serve(ctx, listener, time.Minute)
	}()
	c, err := client.New(socket)
	must.Succeed(t, err)
	t.Cleanup(func() {
		must.Succeed(t, c.Close())
		stop()
		must.Succeed(t, <-served)
	})
	return set, c
}

func TestClient(t *testing.T) {
	set, c := start(t, t.TempDir())
	if name, err := c.Name(t.Context()); name != "test.example.com" || err != nil {
		t.Errorf("name %q (%v)", name, err)
	}
	id, err := volume.ParseID("pvc-1")
	must.Succeed(t, err)
	_, err = c.Volume(t.Context(), id)
	must.ErrorIs(t, err, volume.ErrNotFound)
	_, err = set.Create(t.Context(), pool.Request{ID: id, Range: volume.Range{Required: 1 << 20}})
	must.Succeed(t, err)
	got, err := c.Volume(t.Context(), id)
	must.Succeed(t, err)
	want := client.Volume{
		Context:  map[string]string{"storagePool": "local", "sizeEnforced": got.Context["sizeEnforced"]},
		Segments: []map[string]string{{"topology.hostpath.csi/node": "node-a"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestDirectoryOfAPool(t *testing.T) {
	root := t.TempDir()
	_, c := start(t, root)
	directory, err := dir.Open(filepath.Join(root, "local"))
	must.Succeed(t, err)
	want, err := directory.ID()
	must.Succeed(t, errors.Join(err, directory.Close()))
	if got, err := c.Directory(t.Context(), map[string]string{"storagePool": "local"}); got != want || err != nil {
		t.Errorf("the pool is the directory %s (%v), want %s", got, err, want)
	}
	if _, err := c.Directory(t.Context(), map[string]string{"storagePool": "other"}); err == nil {
		t.Error("a pool that is not there")
	}
}

// As a driver that does not know the question answers it.
func TestDirectoryThatTheDriverDoesNotSay_isNotKnown(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	server := grpc.NewServer()
	csi.RegisterControllerServer(server, silent{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	c, err := client.New(socket)
	must.Succeed(t, err)
	if id, err := c.Directory(t.Context(), nil); err == nil {
		t.Errorf("the pool is the directory %s, and no driver has said so", id)
	}
	must.Succeed(t, c.Close())
	server.Stop()
	must.Succeed(t, <-served)
}

// silent has room, and says nothing else.
type silent struct {
	csi.UnimplementedControllerServer
}

func (silent) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{AvailableCapacity: 1 << 30}, nil
}

func TestClientWithoutADriver(t *testing.T) {
	c := must.Value(client.New(filepath.Join(t.TempDir(), "none")))(t)
	defer func() { must.Succeed(t, c.Close()) }()
	if _, err := c.Name(t.Context()); err == nil {
		t.Error("no process answers, and there is no error")
	}
}

// unobserved takes no note of calls.
type unobserved struct{}

func (unobserved) Call(string, string, time.Duration) {}
func (unobserved) Panic(string)                       {}
