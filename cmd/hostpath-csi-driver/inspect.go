package main

import (
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

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

const inspectCommand = "inspect"

// The exit statuses of inspect.
const (
	inOrder    = 0
	notLooked  = 1
	notInOrder = 2
)

// inspection is the command line of inspect, found to be good.
type inspection struct {
	pools       []pool.Config
	node        pool.NodeID
	volume      pool.VolumeID // the zero id for all
	deviceNodes string
	socket      string
	write       func(*inspect.Report, io.Writer) error
}

// The environment that the manifests give the driver's container, so that nobody who
// runs inspect in it has to write down what the driver was given.
const (
	datadirVariable     = "DATADIR"
	nodeVariable        = "NODE_NAME"
	deviceNodesVariable = "DEVICE_NODES"
)

// parseInspection reports all that is wrong with a command line.
func parseInspection(args []string, getenv func(string) string, output io.Writer) (inspection, error) {
	var i inspection
	var datadir, node, endpoint, poolName, volume, format string
	flags := flag.NewFlagSet("hostpath-csi-driver "+inspectCommand, flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&datadir, "datadir", getenv(datadirVariable), "storage pools, as the driver has them; default $"+datadirVariable)
	flags.StringVar(&node, "nodeid", getenv(nodeVariable), "name of this node, as the driver has it; default $"+nodeVariable)
	flags.StringVar(&i.deviceNodes, "device-nodes", orElse(getenv(deviceNodesVariable), "/dev"),
		"directory of device nodes, as the driver has it; default $"+deviceNodesVariable+" or /dev")
	flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "the driver's socket, which tells where the operating system's disk is")
	flags.StringVar(&poolName, "pool", "", "look at this pool alone")
	flags.StringVar(&volume, "volume", "", "show this volume alone")
	flags.StringVar(&format, "output", "table", "table for people, json for programs")

	problems := parseAll(flags, args)
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
		i.node, err = pool.ParseNodeID(node)
		note("nodeid", err)
	}
	if volume != "" {
		i.volume, err = pool.ParseVolumeID(volume)
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
	i.write, err = writer(format)
	note("output", err)
	return i, problems
}

// inspectedPools does without the driver's default, which would show a pool that is
// missing to whoever forgot to name theirs.
func inspectedPools(datadir string) ([]pool.Config, error) {
	if datadir == "" {
		return nil, fmt.Errorf("which pools? Give it as the driver has it, or run this in the driver's container, where %s has it", datadirVariable)
	}
	workdir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	return pool.ParseConfigs(datadir, workdir)
}

func onlyPool(pools []pool.Config, name string) ([]pool.Config, error) {
	at := slices.IndexFunc(pools, func(c pool.Config) bool { return c.Name.String() == name })
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
	return nil, fmt.Errorf("%q is not table or json", format)
}

// runInspect looks at the node, and answers the exit status.
func runInspect(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	i, err := parseInspection(args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return inOrder
	}
	if err == nil {
		var status int
		if status, err = i.run(stdout); err == nil {
			return status
		}
	}
	fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", inspectCommand, err)
	return notLooked
}

func (i inspection) run(stdout io.Writer) (status int, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	mounts, err := bind.NewKernel()
	if err != nil {
		return notLooked, err
	}
	// Neither is closed: the look at a pool that hangs goes on to use them until the
	// process ends.
	nodes, err := dir.Open(i.deviceNodes)
	if err != nil {
		return notLooked, fmt.Errorf("--device-nodes: %w", err)
	}
	report := inspect.Look(ctx, i.pools, pool.Options{
		Node:       i.node,
		Mounts:     mounts,
		Devices:    loop.NewKernel(nodes),
		Dev:        nodes,
		SystemPath: filepath.Dir(i.socket),
	})
	if ctx.Err() != nil {
		return notLooked, errors.New("interrupted")
	}
	if i.volume != (pool.VolumeID{}) && !report.Only(i.volume) && report.Answered() {
		return notLooked, fmt.Errorf("no pool has a volume %s", i.volume)
	}
	if err := i.write(&report, stdout); err != nil {
		return notLooked, err
	}
	if report.Abnormal > 0 {
		return notInOrder, nil
	}
	return inOrder, nil
}
