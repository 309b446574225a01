package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"path/filepath"
	"syscall"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
)

const freezerCommand = "freezer"

// freezerSocket is where the driver expects the freezer: beside its own socket.
func freezerSocket(socket string) string { return filepath.Join(filepath.Dir(socket), "freezer.sock") }

// runFreezer freezes pods for the driver, and thaws them whatever becomes of that, until it is
// told to stop. It returns the exit status.
func runFreezer(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("hostpath-csi-driver "+freezerCommand, flag.ContinueOnError)
	flags.SetOutput(stdout)
	socket := flags.String("socket", freezerSocket("/csi/csi.sock"), "Unix socket to serve the driver on: freezer.sock, in the directory of the driver's")
	groups := flags.String("cgroups", "/host/sys/fs/cgroup", "the host's /sys/fs/cgroup")
	klog.InitFlags(flags)
	err := cmdline.ParseAll(flags, args)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		err = serveFreezer(ctx, *socket, *groups)
	}
	klog.Flush()
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", freezerCommand, err)
		return failed
	}
	return healthy
}

func serveFreezer(ctx context.Context, socket, groups string) (err error) {
	w, err := freezer.NewWatchdog(groups, klog.Background())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	l, err := freezer.Listen(ctx, socket)
	if err != nil {
		return err
	}
	klog.InfoS("Ready to freeze pods", "socket", socket)
	return w.Serve(ctx, l)
}
