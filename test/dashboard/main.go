// dashboard draws the picture of the dashboard in docs/: real drivers on pools of
// their own do what a small cluster would have them do, a real Prometheus watches them
// with the rules of deploy/monitoring, and a page draws each panel of the dashboard from
// what Prometheus answers. The page is not Grafana; it draws what Grafana's JSON says of
// queries, units, thresholds and places, and little else.
// All of it happens in a private mount namespace, and nothing of it stays.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func main() {
	status, err := start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

// An order is what to draw.
type order struct {
	monitoring string        // the directory deploy/monitoring
	prometheus string        // the program
	out        string        // the picture
	duration   time.Duration // of the work that it shows
}

func parse(args []string) order {
	var o order
	flags := flag.NewFlagSet("dashboard", flag.ExitOnError)
	flags.StringVar(&o.monitoring, "monitoring", "deploy/monitoring", "the `directory` with the dashboard and the rules")
	flags.StringVar(&o.prometheus, "prometheus", "bin/tools/prometheus", "the `program` Prometheus")
	flags.StringVar(&o.out, "out", "docs/dashboard.png", "the `file` to write")
	flags.DurationVar(&o.duration, "duration", 10*time.Minute, "how long the drivers work")
	_ = flags.Parse(args) // it exits
	return o
}

// program is Prometheus: that of bin/tools, or one that is installed.
func (o order) program() (string, error) {
	if _, err := os.Stat(o.prometheus); err == nil {
		return o.prometheus, nil
	}
	return exec.LookPath(filepath.Base(o.prometheus))
}

func start() (status int, err error) {
	o := parse(os.Args[1:])
	if os.Geteuid() != 0 {
		return 1, errors.New("mounting volumes needs root: run it with sudo")
	}
	if !mountns.Inside() {
		// Should this outer run be killed, the inner one still cleans up.
		return mountns.Rerun(syscall.SIGTERM)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	return 0, draw(ctx, o)
}

func draw(ctx context.Context, o order) (err error) {
	// Prometheus and Chromium get their death signal when the thread ends that forked them.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := setUp(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if e := s.close(); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
	}()
	watcher, err := watch(ctx, o, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watcher.stop()) }()

	fmt.Printf("The drivers work until %s ...\n", time.Now().Add(o.duration).Format(time.TimeOnly))
	from := time.Now()
	if err := s.work(ctx, o.duration); err != nil {
		return err
	}
	return photograph(ctx, o, watcher.address, from, time.Now())
}
