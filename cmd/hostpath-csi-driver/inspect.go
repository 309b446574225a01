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
	"slices"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const inspectCommand = "inspect"

// The exit statuses of inspect.
const (
	healthy  = 0
	failed   = 1
	abnormal = 2
)

// inspection is the validated command line of inspect.
type inspection struct {
	pools       []poolconfig.Pool
	node        volume.NodeID
	volume      volume.ID // the zero id for all
	deviceNodes string
	socket      string
	write       func(*inspect.Report, io.Writer) error
}

// The manifests set these variables in the driver's container, so that inspect needs no
// flags there.
const (
	datadirVariable     = "DATADIR"
	nodeVariable        = "NODE_NAME"
	deviceNodesVariable = "DEVICE_NODES"
)

// parseInspection reads the command line and reports all problems at once.
func parseInspection(command string, args []string, getenv func(string) string, output io.Writer) (inspection, error) {
	var i inspection
	var datadir, node, endpoint, poolName, volumeID, format string
	flags := flag.NewFlagSet("hostpath-csi-driver "+command, flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&datadir, "datadir", getenv(datadirVariable), "storage pools, the driver's --datadir; default $"+datadirVariable)
	flags.StringVar(&node, "nodeid", getenv(nodeVariable), "name of this Kubernetes node, the driver's --nodeid; default $"+nodeVariable)
	flags.StringVar(&i.deviceNodes, "device-nodes", cmp.Or(getenv(deviceNodesVariable), "/dev"),
		"directory of device nodes, the driver's --device-nodes; default $"+deviceNodesVariable+" or /dev")
	flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "the driver's socket; its filesystem is taken as the operating system's disk")
	flags.StringVar(&poolName, "pool", "", "inspect only this pool")
	if command == inspectCommand {
		flags.StringVar(&volumeID, "volume", "", "show only this volume")
		flags.StringVar(&format, "output", "table", "output format: table or json")
	} else {
		flags.StringVar(&volumeID, "volume", "", "the volume to remove; required")
	}

	problems := cmdline.ParseAll(flags, args)
	if errors.Is(problems, flag.ErrHelp) {
		return inspection{}, flag.ErrHelp
	}
	note := func(flag string, err error) {
		if err != nil {
			problems = errors.Join(problems, fmt.Errorf("--%s: %w", flag, err))
		}
	}
	var err error
	if node != "" {
		i.node, err = volume.ParseNodeID(node)
		note("nodeid", err)
	}
	if volumeID != "" || command != inspectCommand {
		i.volume, err = volume.ParseID(volumeID)
		note("volume", err)
	}
	i.socket, err = driver.ParseEndpoint(endpoint)
	note("endpoint", err)
	i.pools, err = inspectedPools(datadir)
	note("datadir", err)
	if err == nil && poolName != "" {
		i.pools, err = onlyPool(i.pools, poolName)
		note("pool", err)
	}
	i.write, err = writer(cmp.Or(format, "table"))
	note("output", err)
	return i, problems
}

// inspectedPools has no default, unlike the driver: whoever forgot the flag would see a
// missing pool instead of an error.
func inspectedPools(datadir string) ([]poolconfig.Pool, error) {
	if datadir == "" {
		return nil, fmt.Errorf("required; give the driver's value, or run inspect in the driver's container, which sets $%s", datadirVariable)
	}
	workdir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	return poolconfig.Parse(datadir, workdir)
}

func onlyPool(pools []poolconfig.Pool, name string) ([]poolconfig.Pool, error) {
	at := slices.IndexFunc(pools, func(c poolconfig.Pool) bool { return c.Name.String() == name })
	if at < 0 {
		return nil, fmt.Errorf("no pool is named %q", name)
	}
	return pools[at : at+1], nil
}

func writer(format string) (func(*inspect.Report, io.Writer) error, error) {
	switch format {
	case "table":
		return func(r *inspect.Report, w io.Writer) error { return r.WriteTable(w, time.Now()) }, nil
	case "json":
		return (*inspect.Report).WriteJSON, nil
	}
	return nil, fmt.Errorf("%q is neither table nor json", format)
}

// runInspect inspects the node and returns the exit status.
func runInspect(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	i, err := parseInspection(inspectCommand, args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err == nil {
		var status int
		if status, err = i.run(stdout); err == nil {
			return status
		}
	}
	fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", inspectCommand, err)
	return failed
}

func (i inspection) run(stdout io.Writer) (status int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	report, err := i.report(ctx)
	if err != nil {
		return failed, err
	}
	if err := i.write(&report, stdout); err != nil {
		return failed, err
	}
	if report.Abnormal > 0 {
		return abnormal, nil
	}
	return healthy, nil
}

// report is what the pools hold, or only the volume that is asked for.
func (i inspection) report(ctx context.Context) (inspect.Report, error) {
	mounts, err := bind.NewKernel()
	if err != nil {
		return inspect.Report{}, err
	}
	// Neither is closed: the check of a pool that hangs keeps using them until the
	// process exits.
	nodes, err := dir.Open(i.deviceNodes)
	if err != nil {
		return inspect.Report{}, fmt.Errorf("--device-nodes: %w", err)
	}
	report := inspect.Run(ctx, i.pools, inspect.Options{
		Node:       i.node,
		Mounts:     mounts,
		Devices:    loop.NewKernel(nodes),
		Dev:        nodes,
		SystemPath: filepath.Dir(i.socket),
	})
	if ctx.Err() != nil {
		return report, errors.New("interrupted")
	}
	if i.volume != (volume.ID{}) && !report.Only(i.volume) && report.Answered() {
		return report, fmt.Errorf("no pool has volume %s", i.volume)
	}
	return report, nil
}
