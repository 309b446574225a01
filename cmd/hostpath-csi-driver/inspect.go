package main

import (
	"bufio"
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
	"strings"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
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
	pools       []poolconfig.Config
	node        volume.NodeID
	volume      volume.ID // the zero id for all
	snapshots   bool      // nothing else is shown
	from, to    volume.ID // snapshots to compare: the zero id for none, and for the volume itself
	deviceNodes string
	stateDir    string
	socket      string
	json        bool
	forgotten   string // the pool of forget-pool
	dataIsGone  bool   // remove-lost is meant
	files       bool
}

// The manifests set these variables in the driver's container, so that inspect needs no
// flags there.
const (
	datadirVariable     = "DATADIR"
	nodeVariable        = "NODE_NAME"
	deviceNodesVariable = "DEVICE_NODES"
	stateDirVariable    = "STATE_DIR"
)

// words are the flags of a command line that are still to be parsed.
type words struct{ datadir, node, endpoint, poolName, volumeID, format, from string }

func (i *inspection) define(flags *flag.FlagSet, command string, getenv func(string) string) *words {
	w := new(words)
	flags.StringVar(&w.datadir, "datadir", getenv(datadirVariable), "storage pools, the driver's --datadir; default $"+datadirVariable)
	flags.StringVar(&w.node, "nodeid", getenv(nodeVariable), "name of this Kubernetes node, the driver's --nodeid; default $"+nodeVariable)
	flags.StringVar(&i.deviceNodes, "device-nodes", cmp.Or(getenv(deviceNodesVariable), "/dev"),
		"directory of device nodes, the driver's --device-nodes; default $"+deviceNodesVariable+" or /dev")
	flags.StringVar(&i.stateDir, "state-dir", getenv(stateDirVariable), "the driver's --state-dir; default $"+stateDirVariable)
	flags.StringVar(&w.endpoint, "endpoint", defaultEndpoint, "the driver's socket; its filesystem is taken as the operating system's disk")
	switch command {
	case forgetPoolCommand:
		flags.StringVar(&i.forgotten, "pool", "", "the pool, which must not be configured any more; required")
	case inspectCommand:
		flags.StringVar(&w.poolName, "pool", "", "inspect only this pool")
		flags.StringVar(&w.volumeID, "volume", "", "show only this volume and its snapshots")
		flags.BoolVar(&i.snapshots, "snapshots", false, "show only snapshots")
		flags.StringVar(&w.from, "diff", "", "two snapshots of a volume: list what changed from the first to the second, or with one, to the volume as it is on the disk")
		flags.BoolVar(&i.files, "files", false, "check for each file of volumes on XFS and ext4 whether it counts towards its volume's limit; takes seconds for each 100,000 files")
		flags.StringVar(&w.format, "output", "table", "output format: table or json")
	default:
		flags.StringVar(&w.poolName, "pool", "", "inspect only this pool")
		flags.StringVar(&w.volumeID, "volume", "", "the volume to remove; required")
		if command == removeLostCommand {
			flags.BoolVar(&i.dataIsGone, "data-is-gone", false, "no PersistentVolume has the volume, and its directory will not come back; required")
		}
	}
	return w
}

// parseInspection reads the command line and reports all problems at once.
func parseInspection(command string, args []string, getenv func(string) string, output io.Writer) (inspection, error) {
	var i inspection
	args, to := takeSecond(args)
	flags := flag.NewFlagSet("hostpath-csi-driver "+command, flag.ContinueOnError)
	flags.SetOutput(output)
	w := i.define(flags, command, getenv)

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
	if w.node != "" {
		i.node, err = volume.ParseNodeID(w.node)
		note("nodeid", err)
	}
	if w.volumeID != "" || command != inspectCommand && command != forgetPoolCommand {
		i.volume, err = volume.ParseID(w.volumeID)
		note("volume", err)
	}
	i.socket, err = driver.ParseEndpoint(w.endpoint)
	note("endpoint", err)
	i.pools, err = inspectedPools(w.datadir)
	note("datadir", err)
	if err == nil && w.poolName != "" {
		i.pools, err = onlyPool(i.pools, w.poolName)
		note("pool", err)
		i.stateDir = "" // which of the others are configured is not looked at
	}
	i.json, err = isJSON(cmp.Or(w.format, "table"))
	note("output", err)
	i.from, err = parseCompared(w.from)
	note("diff", err)
	i.to, err = parseCompared(to)
	note("diff", err)
	return i, problems
}

// takeSecond takes the second argument of --diff out of a command line, if it has one.
func takeSecond(args []string) (rest []string, second string) {
	for at, arg := range args {
		name, _, joined := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !strings.HasPrefix(arg, "-") || name != "diff" {
			continue
		}
		if !joined {
			at++
		}
		if at++; at < len(args) && !strings.HasPrefix(args[at], "-") {
			return slices.Delete(slices.Clone(args), at, at+1), args[at]
		}
	}
	return args, ""
}

// parseCompared takes the name of a snapshot, or its id in CSI; the zero id for none.
func parseCompared(name string) (volume.ID, error) {
	if name == "" {
		return volume.ID{}, nil
	}
	name, _, _ = strings.Cut(name, "@")
	return volume.ParseSnapshot(name)
}

// inspectedPools has no default, unlike the driver: a user who forgot the flag would see a
// missing pool instead of an error.
func inspectedPools(datadir string) ([]poolconfig.Config, error) {
	if datadir == "" {
		return nil, fmt.Errorf("required; give the driver's value, or run inspect in the driver's container, which sets $%s", datadirVariable)
	}
	workdir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	return poolconfig.Parse(datadir, workdir)
}

func onlyPool(pools []poolconfig.Config, name string) ([]poolconfig.Config, error) {
	at := slices.IndexFunc(pools, func(c poolconfig.Config) bool { return c.Name.String() == name })
	if at < 0 {
		return nil, fmt.Errorf("no pool is named %q", name)
	}
	return pools[at : at+1], nil
}

func isJSON(format string) (bool, error) {
	switch format {
	case "table", "json":
		return format == "json", nil
	}
	return false, fmt.Errorf("%q is neither table nor json", format)
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
	if i.from != (volume.ID{}) {
		return i.compare(ctx, stdout)
	}
	report, err := i.report(ctx)
	if err != nil {
		return failed, err
	}
	if i.json {
		err = report.WriteJSON(stdout)
	} else {
		err = report.WriteTable(stdout, time.Now())
	}
	if err != nil {
		return failed, err
	}
	if report.Abnormal > 0 {
		return abnormal, nil
	}
	return healthy, nil
}

func (i inspection) compare(ctx context.Context, stdout io.Writer) (status int, err error) {
	out := bufio.NewWriter(stdout)
	write := inspect.Difference.WriteText
	if i.json {
		write = inspect.Difference.WriteJSON
	}
	options, err := i.options()
	if err == nil {
		err = inspect.Compare(ctx, i.pools, options, i.from, i.to, func(d inspect.Difference) error { return write(d, out) })
	}
	if err := errors.Join(err, out.Flush()); err != nil {
		return failed, err
	}
	return healthy, nil
}

// options say how to read the pools. What they have open is not closed: the check of a pool that
// hangs keeps using it until the process exits.
func (i inspection) options() (inspect.Options, error) {
	mounts, err := bind.NewKernel()
	if err != nil {
		return inspect.Options{}, err
	}
	nodes, err := dir.Open(i.deviceNodes)
	if err != nil {
		return inspect.Options{}, fmt.Errorf("--device-nodes: %w", err)
	}
	return inspect.Options{
		Node:       i.node,
		Mounts:     mounts,
		Devices:    loop.NewKernel(nodes),
		Dev:        nodes,
		SystemPath: filepath.Dir(i.socket),
		Files:      i.files,
		Served:     served.In(i.stateDir),
	}, nil
}

// report is what the pools hold, or only the volume that is asked for.
func (i inspection) report(ctx context.Context) (inspect.Report, error) {
	options, err := i.options()
	if err != nil {
		return inspect.Report{}, err
	}
	report := inspect.Run(ctx, i.pools, options)
	if ctx.Err() != nil {
		return report, errors.New("interrupted")
	}
	if i.volume != (volume.ID{}) && !report.Only(i.volume) && report.Answered() {
		return report, fmt.Errorf("no pool has volume %s", i.volume)
	}
	if i.snapshots {
		report.OnlySnapshots()
	}
	return report, nil
}
