package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// defaultPools is the pool of the earlier driver.
const defaultPools = `[{"name":"legacy","path":"/csi-data-dir","snapshotPath":"/snap-dir","snapshotProvider":"reflink"}]`

// defaultEndpoint is the socket of all CSI drivers in their containers.
const defaultEndpoint = "unix:///csi/csi.sock"

// config is the command line, found to be good.
type config struct {
	driver         driver.Config
	socket         string
	pools          []pool.Config
	deviceNodes    string
	metricsAddress string // empty for no metrics
	metricsTLS     metrics.TLS
	volumeMetrics  bool          // each volume is shown by itself
	tracing        *trace.Config // nil for none
}

// parse reads the command line and reports all that is wrong with it. It changes
// nothing on the host.
func parse(args []string, output io.Writer) (config, error) {
	var c config
	var version, node, endpoint, datadir, tlsVersion, collector string
	flags := flag.NewFlagSet("hostpath-csi-driver", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&c.driver.Name, "drivername", driver.DefaultName, "name of the driver")
	flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "socket to serve CSI on")
	flags.StringVar(&node, "nodeid", "", "name of this node (required)")
	flags.StringVar(&version, "version", "", "version to report (required)")
	flags.StringVar(&datadir, "datadir", defaultPools, "storage pools, a JSON array; see docs/configuration.md")
	flags.StringVar(&c.deviceNodes, "device-nodes", "/dev", "directory of device nodes, where the kernel makes those of loop devices")
	flags.StringVar(&c.metricsAddress, "metrics-address", ":8443", "address to serve metrics on with TLS; empty for none")
	flags.StringVar(&c.metricsTLS.CertFile, "metrics-cert-file", "", "certificate for the metrics; without one the driver makes its own")
	flags.StringVar(&c.metricsTLS.KeyFile, "metrics-key-file", "", "key of that certificate")
	flags.StringVar(&tlsVersion, "metrics-tls-version", "VersionTLS13", "lowest version of TLS for the metrics")
	flags.BoolVar(&c.volumeMetrics, "volume-metrics", false, "show each volume in the metrics")
	flags.StringVar(&collector, "tracing-endpoint", "", "OTLP/HTTP collector to send spans of the calls to, such as http://ADDRESS:4318; empty for none")
	klog.InitFlags(flags)

	problems := parseAll(flags, args)
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
	if version == "" {
		note("version", errors.New("is missing; give the version to report"))
	}
	note("drivername", driver.CheckName(c.driver.Name))
	c.driver.Version = version
	c.driver.Node, err = pool.ParseNodeID(node)
	note("nodeid", err)
	c.socket, err = driver.ParseEndpoint(endpoint)
	note("endpoint", err)
	c.pools, err = pool.ParseConfigs(datadir, workdir)
	note("datadir", err)
	c.metricsTLS.MinVersion, err = metrics.ParseTLSVersion(tlsVersion)
	note("metrics-tls-version", err)
	if !path.IsAbs(c.deviceNodes) {
		note("device-nodes", fmt.Errorf("%q is not an absolute path such as /dev", c.deviceNodes))
	}
	note("metrics-address", checkAddress(c.metricsAddress))
	if (c.metricsTLS.CertFile == "") != (c.metricsTLS.KeyFile == "") {
		note("metrics-cert-file", errors.New("goes together with --metrics-key-file; give both or neither"))
	} else {
		note("metrics-cert-file", c.metricsTLS.Check())
	}
	c.tracing, err = parseTracing(collector, c.driver, os.Getenv)
	note("tracing-endpoint", err)
	return c, problems
}

// parseTracing takes from the environment what does not belong on a command line, or what
// OpenTelemetry has everywhere by the same name. It answers nil for no collector.
func parseTracing(collector string, d driver.Config, getenv func(string) string) (*trace.Config, error) {
	if collector == "" {
		return nil, nil
	}
	config := trace.Config{Service: orElse(getenv("OTEL_SERVICE_NAME"), "hostpath-csi-driver"), Version: d.Version, Node: d.Node.String()}
	var problems [3]error
	config.URL, problems[0] = trace.ParseEndpoint(collector)
	const headers, certificate = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_CERTIFICATE"
	if config.Header, problems[1] = trace.ParseHeaders(getenv(headers)); problems[1] != nil {
		problems[1] = fmt.Errorf("%s: %w", headers, problems[1])
	}
	if file := getenv(certificate); file != "" {
		if config.TLS, problems[2] = trace.ReadCertificates(file); problems[2] != nil {
			problems[2] = fmt.Errorf("%s: %w", certificate, problems[2])
		}
	}
	return &config, errors.Join(problems[:]...)
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// checkAddress finds what net.Listen would, without listening.
func checkAddress(address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	switch {
	case err == nil && port == "":
		err = errors.New("the port is missing")
	case err == nil:
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%q is not an address such as :8443: %v", address, err)
	}
	return nil
}

// parseAll goes on after a bad flag, so that all of them are reported.
func parseAll(flags *flag.FlagSet, args []string) error {
	output := flags.Output()
	flags.SetOutput(io.Discard)
	defer flags.SetOutput(output)
	var problems []error
	for {
		err := flags.Parse(args)
		if errors.Is(err, flag.ErrHelp) {
			flags.SetOutput(output)
			flags.PrintDefaults()
			return err
		}
		if err != nil {
			problems = append(problems, err)
		} else if flags.NArg() > 0 {
			problems = append(problems, fmt.Errorf("unexpected argument %q", flags.Arg(0)))
		}
		rest := flags.Args()
		if err == nil && len(rest) > 0 {
			rest = rest[1:]
		}
		if len(rest) == 0 {
			return errors.Join(problems...)
		}
		args = rest
	}
}
