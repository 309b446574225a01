package drivertest

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// behaviour names what this test binary does as a stand-in for the driver.
const behaviour = "DRIVERTEST_STANDIN"

func TestMain(m *testing.M) {
	if name := os.Getenv(behaviour); name != "" {
		os.Exit(standIn(name))
	}
	testenv.Main(m)
}

// standIn is as much of a driver as a Process needs: its flags, its socket,
// Probe and what it does on SIGTERM.
func standIn(name string) int {
	if name == "is a parent" {
		return haveChild()
	}
	fmt.Fprintln(os.Stderr, "stand-in:", strings.Join(os.Args[1:], " "))
	flags := flag.NewFlagSet("stand-in", flag.ContinueOnError)
	endpoint := flags.String("endpoint", "", "")
	for _, other := range []string{"nodeid", "datadir", "metrics-address", "version", "v"} {
		flags.String(other, "", "")
	}
	if err := flags.Parse(os.Args[1:]); err != nil || name == "dies at start" {
		fmt.Fprintln(os.Stderr, "stand-in: cannot start")
		return 5
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	server, err := serve(strings.TrimPrefix(*endpoint, "unix://"), name == "ready later")
	if err != nil {
		fmt.Fprintln(os.Stderr, "stand-in:", err)
		return 6
	}
	if name == "deaf" {
		signal.Ignore(syscall.SIGTERM)
		select {}
	}
	<-asked
	server.GracefulStop()
	if name == "fails at the end" {
		return 7
	}
	return 0
}

// haveChild starts a child that shares the standard output and waits for it.
func haveChild() int {
	cmd := exec.Command("sleep", "3600")
	cmd.Stdout = os.Stdout
	child, err := startChild(cmd)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("child", child.Pid)
	<-child.exited
	return 0
}

func serve(socket string, later bool) (*grpc.Server, error) {
	_ = os.Remove(socket) // of a run that was killed
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, &identity{later: later})
	go func() { _ = server.Serve(listener) }() // until it is stopped
	return server, nil
}

type identity struct {
	csi.UnimplementedIdentityServer
	later  bool
	probes atomic.Int32
}

func (i *identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ready := !i.later || i.probes.Add(1) > 3
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: fmt.Sprint("after ", i.probes.Load(), " probes")}, nil
}
