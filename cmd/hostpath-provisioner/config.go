package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// config is the command line and the environment, found to be good.
type config struct {
	provisioner    provisioner.Config
	node           volume.NodeID
	pool           poolconfig.Config
	kubeconfig     string // empty inside a cluster
	deviceNodes    string
	stateDir       string // empty: what was in the pool is not remembered
	systemPath     string
	healthAddress  string // empty for no probes
	metricsAddress string // empty for no metrics
	metricsTLS     metrics.TLS
}

// parse reads the command line and the environment and reports all that is wrong with them. It changes nothing.
func parse(args []string, getenv func(string) string, output io.Writer) (config, error) {
	var c config
	var mode, node, dir, prefix, policy, shared, options, tlsVersion, tlsSuites string
	flags := flag.NewFlagSet("hostpath-provisioner", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&mode, "mode", string(provisioner.PerNode), "node: one instance on each node; single-node: one instance for a cluster of one node")
	flags.StringVar(&node, "node-name", getenv("NODE_NAME"), "name of this node (required); default $NODE_NAME")
	flags.StringVar(&dir, "pv-dir", getenv("PV_DIR"), "directory of the volumes, by its path on the node (required); default $PV_DIR")
	flags.StringVar(&prefix, "use-naming-prefix", getenv("USE_NAMING_PREFIX"), "true to name directories <claim>-<pv> instead of <pv>; not with --mode=single-node; default $USE_NAMING_PREFIX")
	flags.StringVar(&c.metricsTLS.Namespace, "pod-namespace", getenv("POD_NAMESPACE"), "namespace of this pod, for the name in the certificate of the metrics and to know its own DaemonSet; default $POD_NAMESPACE")
	flags.StringVar(&policy, "pv-reclaim-policy", getenv("PV_RECLAIM_POLICY"), "Delete or Retain, overrides reclaimPolicy of the StorageClass; with --mode=single-node; default $PV_RECLAIM_POLICY")
	flags.StringVar(&shared, "pv-dir-shared", getenv("PV_DIR_SHARED"), "true if --pv-dir is the same directory on all nodes; with --mode=single-node; default $PV_DIR_SHARED")
	flags.StringVar(&options, "pool-options", cmp.Or(getenv("POOL_OPTIONS"), "{}"), "options of the pool, a JSON object; see docs/provisioner.md; default $POOL_OPTIONS")
	c.processFlags(flags, &tlsVersion, &tlsSuites)
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
	c.provisioner.Mode, c.provisioner.Node = provisioner.Mode(mode), node
	note("mode", checkMode(c.provisioner.Mode))
	var err error
	c.node, err = parseNode(node)
	note("node-name", err)
	note("pv-dir", checkDir(dir))
	c.pool, err = parsePool(dir, options)
	note("pool-options", err)
	c.provisioner.Path = c.pool.Path
	c.provisioner.NamePrefix, err = parseBool(prefix)
	note("use-naming-prefix", err)
	c.provisioner.Shared, err = parseShared(shared, c.provisioner.Mode)
	note("pv-dir-shared", err)
	c.provisioner.ReclaimPolicy, err = parsePolicy(policy, c.provisioner.Mode)
	note("pv-reclaim-policy", err)
	c.provisioner.Namespace = c.metricsTLS.Namespace
	note("pod-namespace", checkNamespace(c.metricsTLS.Namespace))
	note("device-nodes", checkAbsolute(c.deviceNodes, "/dev"))
	note("state-dir", checkStateDir(c.stateDir, dir))
	note("health-address", cmdline.CheckAddress(c.healthAddress))
	note("metrics-address", cmdline.CheckAddress(c.metricsAddress))
	c.metricsTLS.Accepted, err = tlsprofile.Parse(tlsVersion, tlsSuites)
	note("metrics-tls-version, --metrics-tls-cipher-suites", err)
	note("metrics-cert-file", checkCertificate(c.metricsTLS))
	return c, problems
}

// processFlags are those that do not concern volumes.
func (c *config) processFlags(flags *flag.FlagSet, tlsVersion, tlsSuites *string) {
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; not needed inside a cluster")
	flags.StringVar(&c.deviceNodes, "device-nodes", "/dev", "the host's /dev: programs of the node lock its null for the directories that they serve")
	flags.StringVar(&c.stateDir, "state-dir", "", "directory of the node, not in --pv-dir, in which to remember what was there; default: none, and volumes of a disk that is not mounted count as deleted")
	flags.StringVar(&c.systemPath, "system-path", "", "directory on the operating system's disk, for the metric that reports whether the pool shares it; empty if unknown")
	flags.StringVar(&c.healthAddress, "health-address", ":9808", "address to serve /healthz and /readyz on; empty for none")
	flags.StringVar(&c.metricsAddress, "metrics-address", ":8443", "address to serve metrics on with TLS; empty for none")
	flags.StringVar(&c.metricsTLS.CertFile, "metrics-cert-file", "", "certificate for the metrics; without one the program makes its own")
	flags.StringVar(&c.metricsTLS.KeyFile, "metrics-key-file", "", "private key of --metrics-cert-file")
	flags.StringVar(tlsVersion, "metrics-tls-version", "VersionTLS13", "lowest version of TLS for the metrics")
	flags.StringVar(tlsSuites, "metrics-tls-cipher-suites", "", "cipher suites for the metrics with TLS 1.2 and older, as Go names them, separated by commas; default: those of Go")
}

func checkMode(mode provisioner.Mode) error {
	if mode != provisioner.PerNode && mode != provisioner.SingleNode {
		return fmt.Errorf("%q is neither %q nor %q", mode, provisioner.PerNode, provisioner.SingleNode)
	}
	return nil
}

func checkNamespace(namespace string) error {
	if wrong := validation.IsDNS1123Label(namespace); namespace != "" && wrong != nil {
		return fmt.Errorf("%q is not a namespace: %s", namespace, strings.Join(wrong, ", "))
	}
	return nil
}

func checkCertificate(tls metrics.TLS) error {
	if (tls.CertFile == "") != (tls.KeyFile == "") {
		return errors.New("goes together with --metrics-key-file; give both or neither")
	}
	return tls.Check()
}

func parseShared(s string, mode provisioner.Mode) (bool, error) {
	shared, err := parseBool(s)
	if shared && mode != provisioner.SingleNode {
		return false, fmt.Errorf("is for --mode=%s", provisioner.SingleNode)
	}
	return shared, err
}

func parseNode(name string) (volume.NodeID, error) {
	if name == "" {
		return volume.NodeID{}, errors.New("is missing; set it, or the variable NODE_NAME, to the name of the Node object")
	}
	return volume.ParseNodeID(name)
}

// parseBool takes an empty value for false.
func parseBool(s string) (bool, error) {
	switch strings.ToLower(s) {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, fmt.Errorf("%s is neither true nor false", strconv.Quote(s))
}

func parsePolicy(s string, mode provisioner.Mode) (corev1.PersistentVolumeReclaimPolicy, error) {
	policy := corev1.PersistentVolumeReclaimPolicy(s)
	switch {
	case s == "":
		return "", nil
	case policy != corev1.PersistentVolumeReclaimDelete && policy != corev1.PersistentVolumeReclaimRetain:
		return "", fmt.Errorf("%q is neither Delete nor Retain", s)
	case mode != provisioner.SingleNode:
		return "", fmt.Errorf("is for --mode=%s; set reclaimPolicy in the StorageClass", provisioner.SingleNode)
	}
	return policy, nil
}

// poolName is what logs and metrics call the pool.
const poolName = "provisioner"

// optionKeys are those of a pool in docs/configuration.md that concern directories.
var optionKeys = []string{"bytesPerInode", "enforcement", "overprovision", "relabel", "requireMount", "reserve"}

func checkDir(dir string) error {
	if dir == "" {
		return errors.New("is missing; set it, or the variable PV_DIR, to the directory of the volumes")
	}
	return checkAbsolute(dir, "/var/hpvolumes")
}

// checkStateDir refuses what is missing when the volumes are.
func checkStateDir(state, dir string) error {
	switch {
	case state == "":
		return nil
	case origin.Inside(state, dir):
		return fmt.Errorf("%s is in the directory of the volumes, %s: choose one on the disk of the system", state, dir)
	}
	return checkAbsolute(state, "/var/lib/hostpath-provisioner-state")
}

func checkAbsolute(path, example string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q is not an absolute path such as %s", path, example)
	}
	return nil
}

// parsePool has the options parsed by who parses those of the CSI driver's pools. It finds all that is wrong with them,
// whatever the directory is.
func parsePool(dir, options string) (poolconfig.Config, error) {
	document := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader([]byte(options)))
	decoder.UseNumber()
	if err := decoder.Decode(&document); err != nil {
		return poolconfig.Config{}, fmt.Errorf("it is not a JSON object such as {\"reserve\":\"5%%\"}: %w", err)
	}
	var problems []error
	for _, key := range slices.Sorted(maps.Keys(document)) {
		if !slices.Contains(optionKeys, key) {
			problems = append(problems, fmt.Errorf("unknown key %q; known are %s", key, strings.Join(optionKeys, ", ")))
			delete(document, key)
		}
	}
	if checkDir(dir) != nil {
		dir = "/unknown" // that is reported already
	}
	document["name"], document["path"] = poolName, dir
	text, err := json.Marshal([]any{document})
	if err != nil {
		return poolconfig.Config{}, err
	}
	configs, err := poolconfig.Parse(string(text), "/")
	if problems = append(problems, err); errors.Join(problems...) != nil {
		return poolconfig.Config{}, errors.Join(problems...)
	}
	configs[0].Except = provisioner.CSIDirectory
	return configs[0], nil
}
