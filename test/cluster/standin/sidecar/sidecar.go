// Package sidecar is what the stand-ins for the sidecars of the driver share. No
// registry that the tests reach has the real ones, so each stand-in does the
// part that the cluster needs, with the flags and the sockets of the real one.
package sidecar

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/http"
	"os/signal"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Main runs a sidecar until kubelet asks its container to end.
func Main(run func(context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// Dial connects to the driver's socket, for as long as the program runs.
func Dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// DriverName asks the driver for its name, until it gets one.
func DriverName(ctx context.Context, connection *grpc.ClientConn) (string, error) {
	info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return "", fmt.Errorf("ask the driver for its name: %w", err)
	}
	return info.GetName(), nil
}

// ServeHealth answers at /healthz what check says, until the context ends.
func ServeHealth(ctx context.Context, address string, check func(context.Context) error) error {
	if address == "" {
		<-ctx.Done()
		return nil
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return AnswerHealth(ctx, listener, check)
}

// AnswerHealth is ServeHealth for who listens already. It closes the listener.
func AnswerHealth(ctx context.Context, listener net.Listener, check func(context.Context) error) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := check(r.Context()); err != nil {
			log.Print(err)
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	err := server.Serve(listener)
	if ctx.Err() != nil {
		return nil
	}
	return err
}
