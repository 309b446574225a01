// bench measures the driver against what it is built on, both in the same run: only
// their ratio says something on a machine that others use too. It ends with status 1
// if a figure is worse than its budget by more than the noise of the rounds excuses.
// All of it happens in a private mount namespace, and nothing of it stays.
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
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
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
	only    []string // the groups
	kind    string   // of the filesystem that is made for the pools
	dir     string   // where the pools' filesystem is, or if kind is empty the pools
	files   int      // in the volume that is deleted with all it has
	volumes int      // in the largest pool
	disk    int64    // the size of the block volume, in bytes
	moved   int64    // the size of the file that is moved, in bytes
	// moverFiles are in the volume that the programs move.
	moverFiles int
	binary     string
}

// Each group of rows is measured by itself, for what one does to the disk is not to be seen in another.
var groups = []struct {
	name string
	rows func(h *harness) []row
}{
	{"mounts", mountRows}, {"calls", callRows}, {"creation", creationRows}, {"removal", removalRows}, {"snapshots", snapshotRows},
	{"parallel", parallelRows}, {"scale", scaleRows}, {moveGroup, moveRows},
}

// moveGroup is only measured when it is named: make bench-move does.
const moveGroup = "moves"

func parse(args []string) (order, error) {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	usual := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == moveGroup })
	o := order{disk: 512 << 20}
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	flags.IntVar(&o.rounds, "rounds", 7, "how often everything is measured")
	flags.IntVar(&o.samples, "samples", 100, "how often what takes microseconds is measured in each round")
	only := flags.String("only", strings.Join(usual, ","), "measure only these `groups`, with commas between them; there is "+moveGroup+" too")
	flags.StringVar(&o.kind, "filesystem", "", "make this `kind` for the pools, xfs, ext4 or btrfs, in a loop file; without it the pools are on what --dir is on")
	flags.StringVar(&o.dir, "dir", os.TempDir(), "the `directory` to work in, which should be on a disk")
	flags.IntVar(&o.files, "files", 100_000, "how many files are in the volume that is deleted with all it has")
	flags.IntVar(&o.volumes, "volumes", 10_000, "how many volumes are in the largest pool")
	moved := flags.Int64("move-mib", 1024, "how large the file is that is moved, in `MiB`")
	flags.IntVar(&o.moverFiles, "mover-files", 100_000, "how many files are in the volume that is moved for the memory of movers")
	_ = flags.Parse(args) // it exits
	o.moved = *moved << 20
	o.only = strings.Split(*only, ",")
	if o.rounds < 1 || o.samples < 1 || o.files < inEach || o.moverFiles < 1 || o.moved < 1 || o.volumes < 10*pageEntries {
		return o, fmt.Errorf("less than one round or sample, %d files, one file or MiB to move, or %d volumes", inEach, 10*pageEntries)
	}
	for _, name := range o.only {
		if !slices.Contains(names, name) {
			return o, fmt.Errorf("there is no group %q", name)
		}
	}
	return o, nil
}

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
	return 0, o.measure(ctx, os.Stdout)
}

var errBudget = errors.New("a budget is exceeded")

// measure measures each group and prints it, as a table of docs/performance.md.
func (o order) measure(ctx context.Context, out io.Writer) error {
	fmt.Fprintf(out, "%s Medians of %d rounds.\n\n| | driver | limit | ratio | noise | budget | |\n|---|--:|--:|--:|--:|--:|---|\n", o.machine(), o.rounds)
	var verdict error
	for _, g := range groups {
		if !slices.Contains(o.only, g.name) {
			continue
		}
		var results []result
		h := &harness{order: o, ctx: ctx}
		err := try(func() {
			h.setUp()
			results = compare(g.rows(h), o.rounds)
		})
		for _, r := range results { // a million files are removed for minutes, and that can fail
			fmt.Fprint(out, r)
			if r.exceeded {
				verdict = errBudget
			}
		}
		if err := errors.Join(err, h.close()); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
	}
	return verdict
}

// machine is what figures depend on.
func (o order) machine() string {
	var name unix.Utsname
	_ = unix.Uname(&name)
	text := fmt.Sprintf("Linux %s, %d CPUs, the pools on %s.", unix.ByteSliceToString(name.Release[:]), runtime.NumCPU(), cmp.Or(o.kind, "the filesystem of "+o.dir))
	var load float64
	if now, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(now), &load) // 0 if it cannot be read
	}
	if load > float64(runtime.NumCPU()) {
		text += fmt.Sprintf(" The machine was busy before, with a load of %.1f: expect worse ratios, and try again.", load)
	}
	return text
}

// The steps of a measurement end it when they fail.
var check, try = must.Go, must.Try

func got[T any](value T, err error) T { return must.Get(value, err) }
