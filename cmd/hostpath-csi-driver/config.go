package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/version"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// defaultPools is the default pool of the upstream KubeVirt driver.
const defaultPools = `[{"name":"legacy","path":"/csi-data-dir","snapshotPath":"/snap-dir","snapshotProvider":"reflink"}]`

// defaultEndpoint is where CSI drivers conventionally put their socket in their container.
const defaultEndpoint = "unix:///csi/csi.sock"

// config is the validated command line.
type config struct {
	driver         driver.Config
	socket         string
	pools          []poolconfig.Config
	deviceNodes    string
	stateDir       string // empty: pools are not remembered
	metricsAddress string // empty: no metrics
	metricsTLS     metrics.TLS
	volumeMetrics  bool          // export metrics per volume
	tracing        *trace.Tracer // nil: no tracing
}

// parse reads the command line and reports all problems at once. It changes
// nothing on the host.
func parse(args []string, output io.Writer) (config, error) {
	var c config
	var reported, node, endpoint, datadir, tlsVersion, tlsSuites, collector string
	flags := flag.NewFlagSet("hostpath-csi-driver", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&c.driver.Name, "drivername", driver.DefaultName, "CSI driver name")
	flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "Unix socket to serve CSI on")
	flags.StringVar(&node, "nodeid", "", "name of this Kubernetes node (required)")
	flags.StringVar(&reported, "version", version.Of(), "driver version to report in GetPluginInfo")
	flags.StringVar(&datadir, "datadir", defaultPools, "storage pools as a JSON array; see docs/configuration.md")
	flags.StringVar(&c.deviceNodes, "device-nodes", "/dev", "directory where the kernel creates device nodes (devtmpfs)")
	flags.StringVar(&c.stateDir, "state-dir", "", "directory of the node in which to remember the pools that were served; default: none, and deleting volumes of a pool that was taken out of --datadir succeeds without removing them")
	c.metricsFlags(flags, &tlsVersion, &tlsSuites)
	flags.BoolVar(&c.volumeMetrics, "volume-metrics", false, "export metrics per volume")
	flags.StringVar(&collector, "tracing-endpoint", "", "OTLP collector to export traces to, such as http://ADDRESS:4318; overrides OTEL_EXPORTER_OTLP_ENDPOINT; see docs/tracing.md")
	klog.InitFlags(flags)

	problems := cmdline.ParseAll(flags, args)
	if errors.Is(problems, flag.ErrHelp) {
		return config{}, flag.ErrHelp
	}
	note := func(flag string, err error) {
		if err != nil {
			problems = errors.Join(problems, fmt.Errorf("--%s: %w", flag, err))
		}
	}
	workdir, err := os.Getwd()
	note("datadir", err)
	note("drivername", driver.CheckName(c.driver.Name))
	c.driver.Version = cmp.Or(reported, version.Of())
	c.driver.Node, err = volume.ParseNodeID(node)
	note("nodeid", err)
	c.socket, err = driver.ParseEndpoint(endpoint)
	note("endpoint", err)
	c.pools, err = poolconfig.Parse(datadir, workdir)
	note("datadir", err)
	c.metricsTLS.Accepted, err = tlsprofile.Parse(tlsVersion, tlsSuites)
	note("metrics-tls-version, --metrics-tls-cipher-suites", err)
	if !path.IsAbs(c.deviceNodes) {
		note("device-nodes", fmt.Errorf("%q is not an absolute path such as /dev", c.deviceNodes))
	}
	if c.stateDir != "" && !path.IsAbs(c.stateDir) {
		note("state-dir", fmt.Errorf("%q is not an absolute path such as /csi", c.stateDir))
	}
	note("metrics-address", cmdline.CheckAddress(c.metricsAddress))
	if (c.metricsTLS.CertFile == "") != (c.metricsTLS.KeyFile == "") {
		note("metrics-cert-file", errors.New("must be set together with --metrics-key-file"))
	} else {
		note("metrics-cert-file", c.metricsTLS.Check())
	}
	c.tracing, err = trace.New(trace.Config{Endpoint: collector, Service: "hostpath-csi-driver", Version: c.driver.Version, Node: node})
	note("tracing-endpoint and OTEL_* variables", err)
	return c, problems
}

func (c *config) metricsFlags(flags *flag.FlagSet, tlsVersion, tlsSuites *string) {
	flags.StringVar(&c.metricsAddress, "metrics-address", ":8443", "address to serve metrics on, with TLS; empty disables metrics")
	flags.StringVar(&c.metricsTLS.CertFile, "metrics-cert-file", "", "TLS certificate of the metrics endpoint; default: a self-signed one")
	flags.StringVar(&c.metricsTLS.KeyFile, "metrics-key-file", "", "private key of --metrics-cert-file")
	flags.StringVar(tlsVersion, "metrics-tls-version", "VersionTLS13", "minimum TLS version of the metrics endpoint")
	flags.StringVar(tlsSuites, "metrics-tls-cipher-suites", "", "cipher suites of the metrics endpoint for TLS 1.2 and older, as Go names them, separated by commas; default: those of Go")
}
