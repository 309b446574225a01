// Command hostpath-provisioner-operator deploys the CSI driver for the HostPathProvisioner of a cluster, and keeps it
// deployed. It also moves volumes between nodes, as VolumeMoves ask. Its environment says what its flags do not: see docs/operator.md.
//
// With the argument render it prints what it would deploy for the object on its standard input, and ends. With uninstall it has the operator
// that runs remove what only that can remove. By the name csv-generator it prints a ClusterServiceVersion of itself.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"kubevirt.io/hostpath-provisioner/pkg/operator"
	"kubevirt.io/hostpath-provisioner/pkg/operator/move"
	"kubevirt.io/hostpath-provisioner/pkg/operator/olm"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/webhook"
)

// A settings is what the flags say.
type settings struct {
	health, metrics string
	webhook         int
	certificate     string
	elect           bool
	resync          time.Duration
}

func main() {
	if filepath.Base(os.Args[0]) == olm.Generator {
		if err := olm.Generate(os.Args[1:], os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", olm.Generator, err)
			os.Exit(1)
		}
		return
	}
	var s settings
	flag.StringVar(&s.health, "health-address", ":6060", "address to serve /livez and /readyz on")
	flag.StringVar(&s.metrics, "metrics-address", ":8443", "address to serve metrics on, with TLS, to clients that may get /metrics; 0 for none")
	flag.IntVar(&s.webhook, "webhook-port", 9443, "port to serve the webhooks on; 0 for none")
	flag.StringVar(&s.certificate, "webhook-cert-dir", "", "directory with tls.crt and tls.key for the webhooks, which another program renews and has the API server know; the operator makes its own without it")
	flag.BoolVar(&s.elect, "leader-elect", true, "whether to work only while holding the Lease "+operator.LeaderElection)
	flag.DurationVar(&s.resync, "resync", operator.Resync, "how often to check what no watch shows: volumes of deleted nodes, and which kinds the cluster has")
	klog.InitFlags(nil)
	flag.Parse()
	ctrl.SetLogger(klog.Background())
	config, err := render.ConfigFromEnvironment(os.Getenv)
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-provisioner-operator: invalid environment:\n%v\n", err)
		os.Exit(1)
	}
	switch flag.Arg(0) {
	case "render":
		err = render.Print(os.Stdin, os.Stdout, config, render.Facts{
			OpenShift: true, Monitoring: true, TLS: operator.NewTLSPolicy(config.TLSCiphers, config.TLSMinVersion).Now(),
		})
	case "uninstall":
		err = uninstall(flag.Args()[1:], config.Namespace)
	default:
		err = run(s, config)
	}
	klog.Flush()
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-provisioner-operator: %v\n", err)
		os.Exit(1)
	}
}

func run(s settings, config render.Config) error {
	policy := operator.NewTLSPolicy(config.TLSCiphers, config.TLSMinVersion)
	clock := &move.Clock{}
	m, err := newManager(s, config.Namespace, policy, clock)
	if err != nil {
		return err
	}
	if config.Release, err = operator.Release(context.Background(), m.GetAPIReader(), config.Namespace, os.Getenv("POD_NAME")); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctrl.SetupSignalHandler())
	defer stop(nil)
	if err := operator.CheckAlone(ctx, m.GetAPIReader(), config.Namespace); err != nil {
		return err
	}
	r := &operator.Reconciler{
		Client:    m.GetClient(),
		APIReader: m.GetAPIReader(),
		Recorder:  m.GetEventRecorder("operator-controller"),
		Config:    config,
		TLS:       policy,
		Optional:  &operator.OptionalKinds{},
		Resync:    s.resync,
		Stop:      stop,
	}
	err = errors.Join(
		operator.RegisterMetrics(metrics.Registry),
		metrics.Registry.Register(move.Metrics(m.GetClient(), m.Elected(), clock.Now)),
		r.Add(m),
		addMoves(m, config.Namespace, clock),
		m.AddHealthzCheck("ping", healthz.Ping),
		m.AddReadyzCheck("ping", healthz.Ping),
		addWebhook(m, s, config.Namespace, policy),
	)
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// newManager makes what runs the controllers of an operator in a namespace, while that holds its Lease. The clock is set by what the API
// server answers.
func newManager(s settings, namespace string, policy *operator.TLSPolicy, clock *move.Clock) (manager.Manager, error) {
	cluster, err := ctrl.GetConfig()
	if err != nil {
		return nil, err
	}
	cluster.Wrap(clock.Wrap)
	scheme, err := operator.Scheme()
	if err != nil {
		return nil, err
	}
	caches, err := operator.CacheOptions(namespace)
	if err != nil {
		return nil, err
	}
	grace := 10 * time.Second
	return ctrl.NewManager(cluster, manager.Options{
		Scheme:                  scheme,
		Cache:                   caches,
		Client:                  operator.ClientOptions(),
		HealthProbeBindAddress:  s.health,
		LivenessEndpointName:    "/livez",
		LeaderElection:          s.elect,
		LeaderElectionID:        operator.LeaderElection,
		LeaderElectionNamespace: namespace,
		// The next one takes over at once when this one ends.
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       &grace,
		Metrics: metricsserver.Options{
			BindAddress:    s.metrics,
			SecureServing:  true,
			FilterProvider: operator.Authorize,
			TLSOpts:        []func(*tls.Config){policy.Configure},
		},
	})
}

// addMoves has the manager move volumes of a driver in a namespace.
func addMoves(m manager.Manager, namespace string, clock *move.Clock) error {
	pods, err := kubernetes.NewForConfigAndClient(m.GetConfig(), m.GetHTTPClient())
	if err != nil {
		return err
	}
	r := &move.Reconciler{Client: m.GetClient(), APIReader: m.GetAPIReader(), Reports: move.Logs{Pods: pods}, DriverNamespace: namespace, Now: clock.Now}
	return r.Add(m)
}

// addWebhook has the manager serve the webhook on a port, if that is not 0.
func addWebhook(m manager.Manager, s settings, namespace string, policy *operator.TLSPolicy) error {
	if s.webhook == 0 {
		return nil
	}
	var certificates interface {
		manager.Runnable
		webhook.Identity
	} = webhook.NewCertificates(m.GetAPIReader(), m.GetClient(), namespace)
	if s.certificate != "" {
		mounted, err := webhook.NewMounted(s.certificate)
		if err != nil {
			return fmt.Errorf("read the certificate of the webhooks: %w", err)
		}
		certificates = mounted
	}
	server := &webhook.Server{
		Address: net.JoinHostPort("", strconv.Itoa(s.webhook)), TLS: policy.Configure, Certificates: certificates,
		Validate: (&webhook.Validator{Reader: m.GetAPIReader()}).Handler(m.GetScheme()),
		Restores: &admission.Webhook{Handler: &webhook.Restores{Reader: m.GetAPIReader()}},
	}
	return errors.Join(m.Add(server), m.Add(certificates))
}
