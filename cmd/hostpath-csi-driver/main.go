// Command hostpath-csi-driver serves CSI for volumes that are directories, or devices
// made of files, on a node's storage pools. It needs no Kubernetes API.
//
// With the argument inspect it reports the pools and volumes of the node, and exits. With
// remove-inline it has the driver remove an inline volume that its pod left behind, and with
// remove-lost the record of a volume whose directory is gone. With forget-pool the volumes of a pool that is not
// configured any more count as deleted. With move-out and move-in it copies a volume to another node. With freezer it is the process that
// freezes pods for the driver, and thaws them whatever becomes of that. With try it writes to a volume, for helm test.
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
	"slices"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

const (
	// grace is how long in-flight calls may take after SIGTERM; Kubernetes sends SIGKILL
	// after 30 s.
	grace = 15 * time.Second
	// settle is how long the driver waits for pools to open before it serves, and to close.
	settle = 5 * time.Second
	// flush is the timeout of the last export of spans.
	flush = 3 * time.Second
)

// The kernel delivers a signal to the first thread of a process if that thread accepts it
// (complete_signal in linux/kernel/signal.c). If that thread were blocked on a filesystem that
// hangs, SIGTERM would have no effect. So it runs nothing but main, which opens the node's own
// files (device nodes, mount table, socket, certificates), then waits, and touches no pool.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case inspectCommand:
			os.Exit(runInspect(os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
		case removeInlineCommand, removeLostCommand:
			os.Exit(runRemove(os.Args[1], os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
		case forgetPoolCommand:
			os.Exit(runForgetPool(os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
		case moveOutCommand, moveInCommand:
			os.Exit(runMove(os.Args[1], os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
		case freezerCommand:
			os.Exit(runFreezer(os.Args[2:], os.Stdout, os.Stderr))
		case tryCommand:
			os.Exit(runTry(os.Args[2:], os.Stdout, os.Stderr))
		}
	}
	config, err := parse(os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-csi-driver: invalid configuration:\n%v\n", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the default action is restored: a second one kills the process.
	context.AfterFunc(ctx, stop)
	err = confine()
	if err == nil {
		err = run(ctx, config)
	}
	if err != nil {
		klog.ErrorS(err, "Driver stopped")
		klog.Flush()
		os.Exit(1)
	}
	klog.Flush()
}

// confine drops the capabilities that the driver does not need: a privileged container has all.
func confine() error {
	missing, err := privilege.Keep(privilege.Needed, slices.Concat(privilege.ForErasing, privilege.ForCopies)...)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		klog.InfoS("Keeping all capabilities: this binary was built with cgo")
		return nil
	case err != nil:
		return err
	case len(missing) > 0:
		klog.InfoS("Missing capabilities; some calls will fail", "missing", fmt.Sprint(missing))
	}
	return nil
}

// isOwn reports whether a directory of device nodes is known not to be the host's, which all
// containers see that mount it.
func isOwn(nodes *dir.Dir) bool {
	table, err := mounts.ReadTable()
	if err != nil {
		return false
	}
	m, err := table.MountOf(nodes)
	return err == nil && m.Type != "devtmpfs"
}

func run(ctx context.Context, c config) (err error) {
	log := klog.Background()
	kernel, err := bind.NewKernel()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kernel.Close()) }()
	nodes, err := dir.Open(c.deviceNodes)
	if err != nil {
		return fmt.Errorf("--device-nodes: %w", err)
	}
	defer func() { err = errors.Join(err, nodes.Close()) }()
	ownDev := isOwn(nodes)
	if ownDev {
		log.Info("The directory of device nodes is not the host's /dev: no lock keeps other drivers of this node from a pool, only their signs of life", "deviceNodes", c.deviceNodes)
	}
	// First what can fail, so that a failure leaves no pool behind.
	listener, err := driver.Listen(ctx, c.socket)
	if err != nil {
		return err
	}
	metricsListener, err := listenForMetrics(c.metricsAddress)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if err := startTracing(c.tracing, log); err != nil {
		return errors.Join(err, listener.Close())
	}
	c.driver.Tracer = c.tracing
	pools := pool.Start(c.pools, pool.Options{
		Node:       c.driver.Node,
		Mounts:     kernel,
		Labels:     label.NewKernel(),
		Devices:    loop.NewKernel(nodes),
		Dev:        nodes,
		OwnDev:     ownDev,
		Freezer:    freezer.Client{Socket: freezerSocket(c.socket)},
		SystemPath: filepath.Dir(c.socket),
		EachVolume: c.volumeMetrics,
		Served:     served.In(c.stateDir),
		Log:        log,
	})
	observed := observe(c, pools)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	metricsDone := serveMetrics(ctx, metricsListener, observed, c.metricsTLS, cancel)
	waitForPools(ctx, pools)
	log.Info("Serving", "driver", c.driver.Name, "version", c.driver.Version, "node", c.driver.Node.String(), "socket", c.socket)
	err = driver.NewServer(c.driver, pools, observed, log).Serve(ctx, listener, grace)
	cancel(nil)
	<-metricsDone
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(err, cause)
	}
	err = errors.Join(err, closePools(pools))
	stopTracing(c.tracing)
	return err
}

// observe counts calls, and shows the pools to those who read the metrics.
func observe(c config, pools *pool.Set) *metrics.Metrics {
	var volumes func() []pool.Surveyed
	if c.volumeMetrics {
		volumes = pools.Surveyed
	}
	return metrics.New(metrics.Options{
		Version:      c.driver.Version,
		Revision:     metrics.Revision(),
		Pools:        pools.Status,
		Volumes:      volumes,
		DroppedSpans: droppedSpans(c.tracing),
	})
}

func startTracing(tracer *trace.Tracer, log klog.Logger) error {
	if tracer == nil {
		return nil
	}
	log.Info("Exporting traces")
	return tracer.Start(log)
}

func droppedSpans(tracer *trace.Tracer) func() uint64 {
	if tracer == nil {
		return nil
	}
	return tracer.Dropped
}

// stopTracing flushes the spans. A collector that does not answer neither delays the exit beyond
// flush nor changes the exit status.
func stopTracing(tracer *trace.Tracer) {
	if tracer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flush)
	defer cancel()
	if err := tracer.Close(ctx); err != nil {
		klog.ErrorS(err, "Failed to export all spans")
	}
}

// waitForPools gives the pools a moment to open, so that the first calls do not fail.
func waitForPools(ctx context.Context, pools *pool.Set) {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	if err := pools.Wait(ctx); err != nil {
		klog.InfoS("Some pools are not checked yet; serving the others")
	}
}

// closePools closes the pools; one that hangs does not keep the process from exiting.
func closePools(pools *pool.Set) error {
	ctx, cancel := context.WithTimeout(context.Background(), settle)
	defer cancel()
	if err := pools.Close(ctx); err != nil {
		klog.ErrorS(err, "Pool did not close in time: its filesystem hangs", "limit", settle)
	}
	return nil
}

// listenForMetrics returns nil if the address is empty.
func listenForMetrics(address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics (choose another --metrics-address, or an empty one to disable metrics): %w", err)
	}
	return listener, nil
}

// serveMetrics serves metrics in the background; if that fails later, it calls fail.
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
