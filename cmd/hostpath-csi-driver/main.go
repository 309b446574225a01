// Command hostpath-csi-driver serves CSI for volumes that are directories, or devices
// made of files, on a node's storage pools. It needs no Kubernetes API.
//
// With the argument inspect it shows what is on the node, and ends.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

const (
	// grace is how long calls in flight may take after SIGTERM; Kubernetes kills
	// after 30 s.
	grace = 15 * time.Second
	// settle is how long the pools are waited for before calls are taken.
	settle = 5 * time.Second
	// flush is how long the last spans may take to be sent.
	flush = 3 * time.Second
)

// The kernel wakes the first thread of a process for a signal, if that can take it
// (complete_signal of linux/kernel/signal.c), and one that waits for a filesystem that hangs
// takes it for ever: SIGTERM would not be heard. So that thread runs main alone. At the start
// main opens what is the node's (device nodes, mount table, socket, certificates), and from
// then on it waits. It touches no pool.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) > 1 && os.Args[1] == inspectCommand {
		os.Exit(runInspect(os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
	}
	config, err := parse(os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-csi-driver: the configuration is not usable:\n%v\n", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the default holds again: a second one ends the process.
	context.AfterFunc(ctx, stop)
	err = confine()
	if err == nil {
		err = run(ctx, config)
	}
	if err != nil {
		klog.ErrorS(err, "The driver ends")
		klog.Flush()
		os.Exit(1)
	}
	klog.Flush()
}

// confine gives up what the driver does not need: a privileged container has everything.
func confine() error {
	missing, err := privilege.Keep(privilege.Needed)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		klog.InfoS("All privileges are kept: this binary was built with cgo")
		return nil
	case err != nil:
		return err
	case len(missing) > 0:
		klog.InfoS("The driver lacks capabilities that some of its calls need", "missing", fmt.Sprint(missing))
	}
	return nil
}

// run serves until ctx ends.
func run(ctx context.Context, c config) (err error) {
	log := klog.Background()
	mounts, err := bind.NewKernel()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mounts.Close()) }()
	nodes, err := dir.Open(c.deviceNodes)
	if err != nil {
		return fmt.Errorf("--device-nodes: %w", err)
	}
	defer func() { err = errors.Join(err, nodes.Close()) }()
	// First what can fail, so that a failure leaves no pool behind.
	listener, err := driver.Listen(c.socket)
	if err != nil {
		return err
	}
	metricsListener, err := listenForMetrics(c.metricsAddress)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	pools := pool.Start(c.pools, pool.Options{
		Node:       c.driver.Node,
		Mounts:     mounts,
		Labels:     label.NewKernel(),
		Devices:    loop.NewKernel(nodes),
		Dev:        nodes,
		SystemPath: filepath.Dir(c.socket),
		EachVolume: c.volumeMetrics,
		Log:        log,
	})
	tracer := startTracing(c.tracing, log)
	c.driver.Tracer = tracer
	observed := metrics.New(metrics.Options{
		Version:  c.driver.Version,
		Revision: revision(),
		Pools:    func() []metrics.Pool { return shownPools(pools.Status()) },
		Volumes:  eachVolume(c, pools),

		DroppedSpans: droppedSpans(tracer),
	})

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	poolsOpen := make(chan struct{})
	go boundGarbage(ctx, poolsOpen, heapInUse)
	metricsDone := serveMetrics(ctx, metricsListener, observed, c.metricsTLS, cancel)
	waitForPools(ctx, pools)
	close(poolsOpen)
	log.Info("serving", "driver", c.driver.Name, "version", c.driver.Version, "node", c.driver.Node.String(), "socket", c.socket)
	err = driver.NewServer(c.driver, pools, observed, log).Serve(ctx, listener, grace)
	cancel(nil)
	<-metricsDone
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(err, cause)
	}
	err = errors.Join(err, closePools(pools))
	stopTracing(tracer)
	return err
}

// startTracing answers nil where nothing is to be traced.
func startTracing(config *trace.Config, log klog.Logger) *trace.Tracer {
	if config == nil {
		return nil
	}
	config.Log = log
	log.Info("Sending spans of the calls", "collector", config.URL.Redacted())
	return trace.Start(*config)
}

func droppedSpans(tracer *trace.Tracer) func() uint64 {
	if tracer == nil {
		return nil
	}
	return tracer.Dropped
}

// stopTracing does not let a collector that is away keep the process, or fail it.
func stopTracing(tracer *trace.Tracer) {
	if tracer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flush)
	defer cancel()
	if err := tracer.Close(ctx); err != nil {
		klog.ErrorS(err, "Not all spans were sent")
	}
}

// waitForPools gives the pools a moment, so that the first calls find them.
func waitForPools(ctx context.Context, pools *pool.Set) {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	if err := pools.Wait(ctx); err != nil {
		klog.InfoS("Not all pools were looked at yet, those that are ready are served")
	}
}

// closePools does not let a pool that hangs keep the process.
func closePools(pools *pool.Set) error {
	ctx, cancel := context.WithTimeout(context.Background(), settle)
	defer cancel()
	if err := pools.Close(ctx); err != nil {
		klog.ErrorS(err, "A pool hangs and is left behind")
	}
	return nil
}

// listenForMetrics answers nil for no address.
func listenForMetrics(address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics (choose another --metrics-address, or an empty one for none): %w", err)
	}
	return listener, nil
}

// serveMetrics serves them in the background; if that fails later, it ends ctx.
func serveMetrics(ctx context.Context, listener net.Listener, m *metrics.Metrics, tls metrics.TLS, fail context.CancelCauseFunc) (done <-chan struct{}) {
	ended := make(chan struct{})
	if listener == nil {
		close(ended)
		return ended
	}
	klog.InfoS("Serving metrics", "address", listener.Addr().String())
	go func() {
		defer close(ended)
		if err := m.Serve(ctx, listener, tls); err != nil {
			fail(err)
		}
	}()
	return ended
}
