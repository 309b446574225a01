// node-driver-registrar stands in for the real one: it registers the
// driver with kubelet, by a socket in /registration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster/standin/sidecar"
)

type config struct {
	address, kubeletPath, registrationPath, httpEndpoint string
	timeout                                              time.Duration
}

func main() {
	var c config
	flag.StringVar(&c.address, "csi-address", "/run/csi/socket", "socket of the driver")
	flag.StringVar(&c.kubeletPath, "kubelet-registration-path", "", "socket of the driver, as kubelet sees it")
	flag.StringVar(&c.registrationPath, "plugin-registration-path", "/registration", "directory of the socket for kubelet")
	flag.StringVar(&c.httpEndpoint, "http-endpoint", "", "address to answer at /healthz on")
	flag.DurationVar(&c.timeout, "timeout", time.Second, "for a call to the driver")
	flag.Int("v", 0, "how much is logged; without effect")
	flag.Parse()

	sidecar.Main(func(ctx context.Context) error { return run(ctx, c) })
}

func run(ctx context.Context, c config) error {
	connection, err := sidecar.Dial(c.address)
	if err != nil {
		return err
	}
	name, err := sidecar.DriverName(ctx, connection)
	if err != nil {
		return err
	}
	socket := filepath.Join(c.registrationPath, name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	failed := make(chan error, 3)
	registration.RegisterRegistrationServer(server, &registrar{name: name, endpoint: c.kubeletPath, failed: failed})
	go func() { failed <- server.Serve(listener) }()
	defer server.Stop()
	go func() {
		failed <- sidecar.ServeHealth(ctx, c.httpEndpoint, func(context.Context) error {
			_, err := os.Stat(socket)
			return err
		})
	}()
	log.Printf("registering %s at %s", name, c.kubeletPath)
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
	failed         chan<- error
}

// GetInfo gives kubelet the driver's name and socket.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              r.name,
		Endpoint:          r.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus hears what kubelet has made of it. As with the real
// one the container ends if that was nothing, and is started again.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		log.Print("registered")
	} else {
		r.failed <- fmt.Errorf("kubelet has not registered the driver: %s", status.GetError())
	}
	return &registration.RegistrationStatusResponse{}, nil
}
