// demo shows the driver at work: it makes a pool, starts the real program on a
// socket and takes a volume through its life as kubelet and the sidecars would.
// All of it happens in a private mount namespace, and nothing of it stays.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

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
	ctx, stop := untilSignal(context.Background())
	defer stop()
	err = demonstrate(ctx, newTable(os.Stdout, colourful(os.Stdout)))
	// The outer run, which made it, may have been killed.
	_ = os.Remove(os.TempDir())
	if s := (interrupted{}); errors.As(err, &s) {
		return 128 + int(s.signal), err
	}
	return 0, err
}

// interrupted is why a context ends that untilSignal has made.
type interrupted struct{ signal syscall.Signal }

func (i interrupted) Error() string { return "ended by a signal: " + i.signal.String() }

// untilSignal ends the context at the first signal that asks to end. Further
// ones do not disturb the clean-up.
func untilSignal(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		select {
		case s := <-signals:
			cancel(interrupted{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() { signal.Stop(signals); cancel(nil) }
}

// demonstrate sets the scene, shows every step and clears up.
func demonstrate(ctx context.Context, table *table) (err error) {
	s, err := setUp(ctx, table)
	if err != nil {
		return because(ctx, err)
	}
	defer func() {
		if e := s.close(); e != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", e))
		}
		if err == nil {
			table.note(fmt.Sprintf("\n%d calls answered by the driver in %s. Nothing was left behind.",
				s.calls, milliseconds(s.spent)))
		}
	}()
	table.header()
	for _, step := range steps {
		if err := s.show(ctx, table, step); err != nil {
			return because(ctx, fmt.Errorf("%w\nThe driver wrote:\n%s", err, s.Process.Log()))
		}
	}
	return nil
}

// because prefers the reason for which a context has ended to what followed.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
