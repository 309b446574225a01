// Command local-pv-provisioner makes a PersistentVolume of each block device of its node that its configuration offers,
// cleans the device when the volume is released, and offers it again.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/localpv"
)

func main() {
	o, log, err := parse(os.Args[1:], os.Getenv, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "local-pv-provisioner: invalid command line:\n%v\n", err)
		os.Exit(1)
	}
	logger := zap.New(zap.UseFlagOptions(log))
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the default holds again: a second one ends the process.
	context.AfterFunc(ctx, stop)
	if err := run(ctx, o); err != nil {
		logger.Error(err, "Provisioner stopped")
		os.Exit(1)
	}
}

func run(ctx context.Context, o localpv.Options) error {
	missing, err := privilege.Keep(privilege.ForDevices)
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	if len(missing) > 0 {
		ctrl.Log.Info("Missing capabilities; some steps will fail", "missing", fmt.Sprint(missing))
	}
	api, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	return localpv.Run(ctx, api, o)
}

// parse reads the command line; a flag that is not given has the value of its variable of the environment. The error has
// all problems.
func parse(args []string, getenv func(string) string, output io.Writer) (localpv.Options, *zap.Options, error) {
	o := localpv.Options{}
	log := &zap.Options{}
	flags := flag.NewFlagSet("local-pv-provisioner", flag.ContinueOnError)
	flags.SetOutput(output)
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	env := func(name, otherwise string) string { return cmp.Or(getenv(name), otherwise) }
	boolean := func(to *bool, flag, name, usage string) {
		value, err := strconv.ParseBool(env(name, "false"))
		if err != nil {
			problem("%s is %q; it has to be true or false", name, getenv(name))
		}
		flags.BoolVar(to, flag, value, usage+" ("+name+")")
	}
	log.BindFlags(flags)
	klog.InitFlags(flags)
	flags.StringVar(&o.MetricsAddress, "metrics-addr", env("LP_METRICS_ADDR", ":8080"), "address of the metrics (LP_METRICS_ADDR)")
	flags.StringVar(&o.Node, "node-name", getenv("LP_NODE_NAME"), "name of the node, required (LP_NODE_NAME)")
	flags.StringVar(&o.Namespace, "namespace-name", getenv("LP_NAMESPACE_NAME"), "namespace of the ConfigMaps, required (LP_NAMESPACE_NAME)")
	flags.StringVar(&o.DefaultConfigMap, "default-pv-spec-configmap", getenv("LP_DEFAULT_PV_SPEC_CONFIGMAP"),
		"ConfigMap of a node without the annotation local-pv-provisioner.cybozu.io/pv-spec-configmap (LP_DEFAULT_PV_SPEC_CONFIGMAP)")
	flags.StringVar(&o.RecordDir, "record-dir", env("LP_RECORD_DIR", "/var/lib/local-pv-provisioner"),
		"directory on the node for the records of the devices that this program offers (LP_RECORD_DIR)")
	interval := flags.String("polling-interval", env("LP_POLLING_INTERVAL", "5m"), "how often to search for devices, besides when one appears (LP_POLLING_INTERVAL)")
	delay := flags.String("new-device-delay", env("LP_NEW_DEVICE_DELAY", "5m"),
		"how long a device that is no volume has to be unused and unchanged before it becomes one, as it may be one that another driver has just attached (LP_NEW_DEVICE_DELAY)")
	boolean(&o.NestedNode, "nested-node", "LP_NESTED_NODE", "the node is a container itself, as with kind, and nothing outside it uses its devices: processes there are not seen")
	boolean(&log.Development, "development", "LP_DEVELOPMENT", "log lines of text instead of JSON, with debug messages")
	err := cmdline.ParseAll(flags, args)
	if errors.Is(err, flag.ErrHelp) {
		return o, log, err
	}
	problems = append(problems, err)
	if o.PollingInterval, err = time.ParseDuration(*interval); err != nil || o.PollingInterval < time.Second {
		problem("--polling-interval is %q; it has to be a duration of at least 1s, such as 5m", *interval)
	}
	if o.NewDeviceDelay, err = time.ParseDuration(*delay); err != nil || o.NewDeviceDelay < 0 {
		problem("--new-device-delay is %q; it has to be a duration, such as 5m", *delay)
	}
	if o.Node == "" {
		problem("--node-name or LP_NODE_NAME is missing")
	}
	if o.Namespace == "" {
		problem("--namespace-name or LP_NAMESPACE_NAME is missing")
	}
	if !filepath.IsAbs(o.RecordDir) {
		problem("--record-dir is %q; it has to be an absolute path", o.RecordDir)
	}
	return o, log, errors.Join(problems...)
}
