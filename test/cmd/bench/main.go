// bench measures the driver against what it is built on, both in the same run: only
// their ratio says something on a machine that others use too. It ends with status 1
// if a figure is worse than its budget by more than the noise of the rounds excuses.
// All of it happens in a private mount namespace, and nothing of it stays.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func main() {
	status, err := start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

// An order is what to measure.
type order struct {
	rounds  int
	samples int      // of what takes microseconds, in each round; of what takes longer, fewer
	only    []string // the groups; all if there are none
	kind    string   // of the filesystem that is made for the pools
	dir     string   // where the pools' filesystem is, or if kind is empty the pools
	files   int      // in the volume that is deleted with all it has
	volumes int      // in the largest pool

	disk     int64         // the size of the block volume, in bytes
	duration time.Duration // of each measurement of IO, in whole seconds
	binary   string
	// io does IO to a path, and returns how many bytes a second.
	io func(ctx context.Context, l load, path string, o order) (float64, error)
}

// A group is figures that have a scene in common. Each group is measured by itself,
// for what one does to the disk is not to be seen in another.
type group struct {
	name string // for --only
	rows func(ctx context.Context, s *scene) ([]comparison, error)
}

var groups = []group{
	{"mounts", mountRows},
	{"calls", callRows},
	{"creation", creationRows},
	{"removal", removalRows},
	{"snapshots", snapshotRows},
	{"parallel", parallelRows},
	{"scale", scaleRows},
	{"size", sizeRows},
	{"blocks", blockRows},
}

func parse(args []string) (order, error) {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	o := order{disk: 512 << 20, duration: time.Second, io: fio}
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	flags.IntVar(&o.rounds, "rounds", 7, "how often everything is measured")
	flags.IntVar(&o.samples, "samples", 100, "how often what takes microseconds is measured in each round")
	only := flags.String("only", strings.Join(names, ","), "measure only these `groups`, with commas between them")
	flags.StringVar(&o.kind, "filesystem", "", "make this `kind` for the pools, xfs, ext4 or btrfs, in a loop file; without it the pools are on what --dir is on")
	flags.StringVar(&o.dir, "dir", os.TempDir(), "the `directory` to work in, which should be on a disk")
	flags.IntVar(&o.files, "files", 100_000, "how many files are in the volume that is deleted with all it has")
	flags.IntVar(&o.volumes, "volumes", 10_000, "how many volumes are in the largest pool")
	_ = flags.Parse(args) // it exits
	o.only = strings.Split(*only, ",")
	if o.rounds < 1 || o.samples < 1 || o.files < inEach || o.volumes < 10*pageEntries {
		return o, fmt.Errorf("less than one round or sample, %d files or %d volumes", inEach, 10*pageEntries)
	}
	for _, name := range o.only {
		if !slices.Contains(names, name) {
			return o, fmt.Errorf("there is no group %q", name)
		}
	}
	return o, nil
}

// fewer is the number of samples of what takes so much longer than microseconds.
func (o order) fewer(times int) int { return max(1, o.samples/times) }

func start() (status int, err error) {
	o, err := parse(os.Args[1:])
	if err != nil {
		return 2, err
	}
	if os.Geteuid() != 0 {
		return 1, errors.New("mounting volumes needs root: run it with sudo")
	}
	if !mountns.Inside() {
		// Should this outer run be killed, the inner one still cleans up.
		return mountns.Rerun(syscall.SIGTERM)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if o.binary, err = drivertest.Binary(ctx, os.TempDir()); err != nil {
		return 1, err
	}
	_, err = measure(ctx, o, os.Stdout)
	return 0, err
}

var errBudget = errors.New("a budget is exceeded")

// measure measures each group and prints it.
func measure(ctx context.Context, o order, out io.Writer) ([]result, error) {
	fmt.Fprintf(out, "%s Medians of %d rounds.\n\n%s", machine(o), o.rounds, heading)
	var all []result
	for _, g := range groups {
		if !slices.Contains(o.only, g.name) {
			continue
		}
		results, err := measureGroup(ctx, o, g)
		if err != nil {
			return all, fmt.Errorf("%s: %w", g.name, err)
		}
		for _, r := range results {
			fmt.Fprint(out, r)
		}
		all = append(all, results...)
	}
	if slices.ContainsFunc(all, func(r result) bool { return r.exceeded }) {
		return all, errBudget
	}
	return all, nil
}

func measureGroup(ctx context.Context, o order, g group) (_ []result, err error) {
	s, err := setUp(ctx, o)
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return nil, err
	}
	comparisons, err := g.rows(ctx, s)
	if err != nil {
		return nil, err
	}
	return compare(ctx, comparisons, o.rounds)
}
