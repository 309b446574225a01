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
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"

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
	out  io.Writer
	dir  string
	pool string
	// enforced reports whether the kernel enforces the sizes of volumes.
	enforced bool
	free     int64 // the capacity last reported, in bytes
	snapshot string
	// calls and spent are of the CSI calls of the step that is being taken.
	calls int
	spent time.Duration
}

// run makes the pool, starts the driver, takes each step, and cleans up.
func run(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return fmt.Errorf("make a temporary directory: %w", err)
	}
	d := &demo{out: out, dir: dir, pool: filepath.Join(dir, "pool"), Client: drivertest.Client{Targets: filepath.Join(dir, "pods")}}
	defer func() {
		if e := d.close(); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
		if err == nil {
			fmt.Fprintln(out, "\nNothing was left behind.")
		}
	}()
	if err := d.startDriver(ctx); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	d.row("step", "call", "answer", "time")
	d.row(strings.Repeat("─", 33), strings.Repeat("─", 19), strings.Repeat("─", 36), strings.Repeat("─", 10))
	calls, spent := 0, time.Duration(0)
	for _, s := range d.steps() {
		if err := d.take(ctx, s); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%s (%s): %w\nLog of the driver:\n%s", s.what, s.call, err, d.Process.Log())
		}
		calls, spent = calls+d.calls, spent+d.spent
	}
	fmt.Fprintf(out, "\nThe driver answered %d calls in %s.\n", calls, milliseconds(spent))
	return nil
}

// take takes a step and prints its row. The time is that of the CSI calls, or of the step if it makes none.
func (d *demo) take(ctx context.Context, s step) error {
	d.calls, d.spent = 0, 0
	begin := time.Now()
	answer, err := s.run(ctx)
	took := time.Since(begin)
	if d.calls > 0 {
		took = d.spent
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		answer = "FAILED"
	}
	d.row(s.what, s.call, answer, milliseconds(took))
	return err
}

func (d *demo) row(what, call, answer, took string) {
	fmt.Fprintf(d.out, "%s  %s  %s  %10s\n", pad(what, 33), pad(call, 19), pad(answer, 36), took)
}

func pad(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(text)))
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

func (d *demo) startDriver(ctx context.Context) error {
	if os.Getenv(drivertest.BinaryVariable) == "" {
		fmt.Fprintln(d.out, "Building hostpath-csi-driver ...")
	}
	binary, err := drivertest.Binary(ctx, d.dir)
	if err != nil {
		return err
	}
	if err := d.makePool(ctx); err != nil {
		return err
	}
	d.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary: binary, Name: "demo-node", Version: "demo",
		Pools: []drivertest.PoolConfig{{Name: "local", Path: d.pool}},
		Dial:  []grpc.DialOption{grpc.WithUnaryInterceptor(d.measure)},
	})
	return err
}

func (d *demo) measure(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	begin := time.Now()
	err := invoke(ctx, method, request, answer, conn, options...)
	d.calls++
	d.spent += time.Since(begin)
	return err
}

// makePool makes the best pool that this machine can have: on a filesystem that enforces sizes, or on one that
// shares blocks, or a directory.
func (d *demo) makePool(ctx context.Context) error {
	if err := os.Mkdir(d.pool, 0o750); err != nil {
		return fmt.Errorf("make the pool: %w", err)
	}
	for _, filesystem := range []struct {
		name, kind string
		options    []string
		enforces   bool
	}{
		{"XFS with project quotas", "xfs", []string{"prjquota"}, true},
		{"btrfs with quotas", "btrfs", nil, true},
		{"XFS", "xfs", nil, false},
	} {
		err := loopfs.Mount(ctx, d.pool, filesystem.kind, poolBytes, filesystem.options...)
		if err == nil && filesystem.kind == "btrfs" {
			if err = loopfs.SwitchQuotasOn(ctx, d.pool); err != nil {
				err = errors.Join(err, loopfs.Unmount(d.pool))
			}
		}
		if err == nil {
			d.enforced = filesystem.enforces
			fmt.Fprintf(d.out, "One pool on %s, in a loop file of %s.\n\n", filesystem.name, size(poolBytes))
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		fmt.Fprintf(d.out, "This machine has no %s.\n", filesystem.name)
	}
	fmt.Fprint(d.out, "One pool in a directory. Sizes are not enforced.\n\n")
	return nil
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
		if mount == d.pool {
			// The devices of its files would keep it busy.
			problems = append(problems, loopfs.Detach(mount))
		}
		problems = append(problems, loopfs.Unmount(mount))
	}
	left, err := loopfs.Left(d.dir)
	if len(left) > 0 {
		err = fmt.Errorf("still attached: %q", left)
	}
	return errors.Join(append(problems, err, os.RemoveAll(d.dir))...)
}
