// Command hostpath-provisioner makes hostPath PersistentVolumes from directories of a node: KubeVirt's provisioner from
// before CSI, and with --mode=single-node the one for clusters of one node. With the argument migrate it turns their
// PersistentVolumes into ones of the CSI driver.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/version"
)

const (
	// closing is how long the pool may take to close.
	closing = 5 * time.Second
	// requests and burst bound the load on the API server: a volume takes about four requests.
	requests, burst = 50, 100
)

// A pool that hangs must not hold the thread that signals are delivered to; see cmd/hostpath-csi-driver.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) > 1 && os.Args[1] == migrateCommand {
		migrateMain(os.Args[2:])
		return
	}
	config, err := parse(os.Args[1:], os.Getenv, os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Printf("hostpath-provisioner %s --help lists the flags of the migration to the CSI driver.\n", migrateCommand)
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-provisioner: invalid configuration:\n%v\n", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	if err := run(ctx, config); err != nil {
		klog.ErrorS(err, "Provisioner stopped")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
	klog.Flush()
}

func run(ctx context.Context, c config) (err error) {
	log := klog.Background()
	client, err := connect(c.kubeconfig)
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	if _, err := privilege.Keep(privilege.Needed, privilege.ForErasing...); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	// Before anything of the pool is touched.
	metricsListener, metricsErr := listen("metrics-address", c.metricsAddress)
	healthListener, healthErr := listen("health-address", c.healthAddress)
	if err := errors.Join(metricsErr, healthErr); err != nil {
		return err
	}
	pools, closePool, err := openPool(c, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closePool()) }()

	ctx, fail := context.WithCancelCause(klog.NewContext(ctx, log))
	defer fail(nil)
	instance, err := provisioner.New(ctx, c.provisioner, pools, client)
	if err != nil {
		return err
	}
	var servers sync.WaitGroup
	if metricsListener != nil {
		shown := metrics.New(metrics.Options{
			Version:  version.Of(),
			Revision: metrics.Revision(),
			Pools:    pools.Status,
			More:     instance.Collectors(),
		})
		servers.Go(func() { fail(shown.Serve(ctx, metricsListener, c.metricsTLS)) })
	}
	if healthListener != nil {
		servers.Go(func() { fail(serveHealth(ctx, healthListener, readiness(instance, pools))) })
	}
	log.Info("Serving", "provisioner", c.provisioner.Name(), "node", c.provisioner.Node, "path", c.provisioner.Path, "version", version.Of())
	instance.Run(ctx)
	fail(nil)
	servers.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

func connect(kubeconfig string) (kubernetes.Interface, error) {
	config, err := rest.InClusterConfig()
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	config.UserAgent = "hostpath-provisioner/" + version.Of()
	config.QPS, config.Burst = requests, burst
	return kubernetes.NewForConfig(config)
}

// openPool begins to serve the pool. It is opened in the background: claims that come first are tried again.
func openPool(c config, log klog.Logger) (*pool.Set, func() error, error) {
	mounts, err := bind.NewKernel()
	if err != nil {
		return nil, nil, err
	}
	// No block volumes are made here, and none of others are touched. By the host's /dev the programs of a node see
	// who serves a directory.
	devices, err := dir.Open(c.deviceNodes)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("--device-nodes: %w", err), mounts.Close())
	}
	set := pool.Start([]poolconfig.Config{c.pool}, pool.Options{
		Node:       c.node,
		Mounts:     mounts,
		Labels:     label.NewKernel(),
		Devices:    loop.NewKernel(devices),
		Dev:        devices,
		SystemPath: c.systemPath,
		Served:     served.ByHand(c.stateDir),
		Log:        log,
	})
	return set, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), closing)
		defer cancel()
		if err := set.Close(ctx); err != nil {
			log.Error(err, "Pool did not close: its filesystem hangs", "timeout", closing)
		}
		return errors.Join(devices.Close(), mounts.Close())
	}, nil
}

func listen(flag, address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w; choose another address, or an empty one for none", flag, err)
	}
	return listener, nil
}

// readiness is why claims are not served; nil if they are.
func readiness(instance *provisioner.Instance, pools *pool.Set) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, status := range pools.Status() {
			if status.Err != nil {
				return status.Err
			}
		}
		return instance.Ready(ctx)
	}
}

// serveHealth answers probes until ctx ends: /healthz while the process runs, /readyz while it serves claims.
func serveHealth(ctx context.Context, listener net.Listener, ready func(context.Context) error) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := ready(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve probes on %s: %w", listener.Addr(), err)
	}
	return nil
}
