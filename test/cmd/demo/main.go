// demo shows the driver at work: it makes a pool, starts the real program on a
// socket and takes volumes through their lives as kubelet and the sidecars would.
// All of it happens in a private mount namespace, and nothing of it stays.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func main() {
	status, err := start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

func start() (status int, err error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("mounting volumes needs root: run it with sudo")
	}
	if !mountns.Inside() {
		// Should this outer run be killed, the inner one still cleans up.
		return mountns.Rerun(syscall.SIGTERM)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err = run(ctx, os.Stdout)
	// The outer run, which made it, may have been killed.
	_ = os.Remove(os.TempDir())
	return 0, err
}

const poolBytes = 8 << 30

// A demo is one driver with one pool, and what one step leaves for the next.
type demo struct {
	drivertest.Client
	dir  string
	pool string
	// enforced reports whether the kernel enforces the sizes of volumes.
	enforced bool
	snapshot string
}

// run makes the pool, starts the driver, takes each step, and cleans up.
func run(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	d := &demo{dir: dir, pool: filepath.Join(dir, "pool"), Client: drivertest.Client{Targets: filepath.Join(dir, "pods")}}
	defer func() {
		if err = errors.Join(err, d.close()); err == nil {
			fmt.Fprintln(out, "\nNothing was left behind.")
		}
	}()
	if err := d.start(ctx, out); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	for _, s := range d.steps() {
		begin := time.Now()
		answer, err := s.run(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s (%s): %w\nLog of the driver:\n%s", s.what, s.call, err, d.Process.Log())
		}
		fmt.Fprintf(out, "%-33s  %-19s  %-36s  %7.2f ms\n", s.what, s.call, answer, time.Since(begin).Seconds()*1e3)
	}
	return nil
}

// start starts the driver on a pool on btrfs, which enforces sizes, or in a directory where there is none.
func (d *demo) start(ctx context.Context, out io.Writer) error {
	binary, err := drivertest.Binary(ctx, d.dir)
	if err != nil {
		return err
	}
	if err := os.Mkdir(d.pool, 0o750); err != nil {
		return err
	}
	err = loopfs.Mount(ctx, d.pool, "btrfs", poolBytes)
	switch {
	case errors.Is(err, loopfs.ErrMissing):
		fmt.Fprintf(out, "One pool in a directory. Sizes are not enforced: %v.\n\n", err)
	case err != nil:
		return err
	default:
		if err := loopfs.SwitchQuotasOn(ctx, d.pool); err != nil {
			return err
		}
		d.enforced = true
		fmt.Fprintf(out, "One pool on btrfs with quotas, in a loop file of %s.\n\n", size(poolBytes))
	}
	d.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary: binary, Name: "demo-node", Version: "demo", Pools: []drivertest.PoolConfig{{Name: "local", Path: d.pool}},
	})
	return err
}

// close stops the driver and removes all that there is, whatever step failed, and checks that nothing is left.
func (d *demo) close() error {
	var problems []error
	if d.Process != nil {
		problems = append(problems, d.Process.Close())
	}
	mounts, err := mountns.Below(d.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		// The devices of its files would keep a filesystem busy.
		problems = append(problems, loopfs.Detach(mount), loopfs.Unmount(mount))
	}
	left, err := loopfs.Left(d.dir)
	if len(left) > 0 {
		err = fmt.Errorf("still attached: %q", left)
	}
	return errors.Join(append(problems, err, os.RemoveAll(d.dir))...)
}
