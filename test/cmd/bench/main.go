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
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

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
	rounds   int
	samples  int           // of what takes microseconds, in each round; of what takes longer, fewer
	duration time.Duration // of each measurement of IO
	only     []string      // the groups; all if there are none
	kind     string        // of the filesystem that is made for the pools
	dir      string        // where the pools' filesystem is, or if kind is empty the pools
	disk     int64         // the size of the block volume, in bytes
	files    int           // in the volume that is deleted with all it has
	volumes  []int         // how many a pool has at each scale
	// reference is the scale that has budgets for starts and memory.
	reference int
	output    string
}

// scales are those in the documentation.
var scales = []int{0, 1_000, 10_000}

func parse(args []string) (order, error) {
	o := order{reference: 10_000}
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	flags.IntVar(&o.rounds, "rounds", 7, "how often everything is measured")
	flags.IntVar(&o.samples, "samples", 100, "how often what takes microseconds is measured in each round")
	flags.DurationVar(&o.duration, "duration", time.Second, "how long each measurement of IO takes, in whole seconds")
	only := flags.String("only", "", "measure only these `groups`, with commas between them: "+strings.Join(groupNames(), ", "))
	flags.StringVar(&o.kind, "filesystem", "", "make this `kind` for the pools, xfs, ext4 or btrfs, in a loop file; without it the pools are on what --dir is on")
	flags.StringVar(&o.dir, "dir", os.TempDir(), "the `directory` to work in, which should be on a disk")
	mib := flags.Int64("disk", 512, "the size of the block volume in `MiB`")
	flags.IntVar(&o.files, "files", 100_000, "how many files are in the volume that is deleted with all it has")
	most := flags.Int("volumes", scales[len(scales)-1], "the largest scale to measure, in volumes of a pool")
	flags.StringVar(&o.output, "output", "table", "how to print it: "+strings.Join(slices.Sorted(maps.Keys(formats)), ", "))
	_ = flags.Parse(args) // it exits
	o.disk = *mib << 20
	o.volumes = slices.DeleteFunc(slices.Clone(scales), func(n int) bool { return n > *most })
	if *only != "" {
		o.only = strings.Split(*only, ",")
	}
	return o, o.check()
}

func (o order) check() error {
	var problems []error
	if o.rounds < 1 || o.samples < 1 || o.disk <= 0 || o.files < 1 || len(o.volumes) == 0 {
		problems = append(problems, errors.New("less than one round, sample, disk, file or scale"))
	}
	if o.duration < time.Second || o.duration%time.Second != 0 {
		problems = append(problems, errors.New("the duration is not one or more whole seconds"))
	}
	if formats[o.output] == nil {
		problems = append(problems, fmt.Errorf("nothing is printed as %q", o.output))
	}
	for _, name := range o.only {
		if !slices.Contains(groupNames(), name) {
			problems = append(problems, fmt.Errorf("there is no group %q", name))
		}
	}
	return errors.Join(problems...)
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
	return 0, measure(ctx, o, os.Stdout, fio)
}

var errBudget = errors.New("a budget is exceeded")

// measure sets the scene, measures everything and prints it.
func measure(ctx context.Context, o order, out io.Writer, drive driveFunc) (err error) {
	s, err := setUp(ctx, o, drive)
	if err != nil {
		return err
	}
	defer func() {
		if e := s.close(); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
	}()
	progress := io.Discard
	if o.output == "table" {
		progress = out
	}
	report := report{Machine: machine(s.filesystem()), Rounds: o.rounds}
	for _, g := range chosen(o.only) {
		fmt.Fprintf(progress, "%s\n", g.title)
		results, err := s.measure(ctx, g, progress)
		if err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		report.Results = append(report.Results, results...)
	}
	report.Missing = s.missing
	if err := formats[o.output](report, out); err != nil {
		return err
	}
	if report.exceeded() {
		return errBudget
	}
	return nil
}
