// bench measures the driver against what it is built on, both in the same run: only
// their ratio says something on a machine that others use too. It ends with status 1
// if a ratio is worse than its budget by more than the noise of the rounds.
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
	duration time.Duration // of each measurement
	kind     string        // of the filesystem that is made for the pool
	dir      string        // where the pool's filesystem is, or if kind is empty the pool
	disk     int64         // the size of the volume, in bytes
	json     bool
}

func parse(args []string) (order, error) {
	var o order
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	flags.IntVar(&o.rounds, "rounds", 5, "how often everything is measured")
	flags.DurationVar(&o.duration, "duration", time.Second, "how long each measurement takes, in whole seconds")
	flags.StringVar(&o.kind, "filesystem", "", "make this `kind` for the pool, xfs, ext4 or btrfs, in a loop file; without it the pool is on what --dir is on")
	flags.StringVar(&o.dir, "dir", os.TempDir(), "the `directory` to work in, which should be on a disk")
	mib := flags.Int64("disk", 512, "the size of the volume in `MiB`")
	flags.BoolVar(&o.json, "json", false, "print JSON")
	_ = flags.Parse(args) // it exits
	o.disk = *mib << 20
	if o.rounds < 1 || o.disk <= 0 || o.duration < time.Second || o.duration%time.Second != 0 {
		return o, errors.New("less than one round, no disk, or a duration that is not one or more whole seconds")
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
	return 0, measure(ctx, o, os.Stdout, fio)
}

var errBudget = errors.New("a budget is exceeded")

// measure sets the scene, measures everything and prints it.
func measure(ctx context.Context, o order, out io.Writer, drive driveFunc) (err error) {
	s, err := setUp(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		if e := s.close(); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
	}()
	progress := io.Discard
	if !o.json {
		progress = out
	}
	report := report{Machine: machine(s.pool()), Rounds: o.rounds}
	report.Results, err = compare(ctx, s.blockIO(o, drive), o.rounds, progress)
	if err != nil {
		return err
	}
	if o.json {
		err = report.writeJSON(out)
	} else {
		err = report.writeTable(out)
	}
	if err == nil && report.exceeded() {
		err = errBudget
	}
	return err
}
