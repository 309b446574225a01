// kernel runs programs as root in a small virtual machine with Debian's kernel,
// which has what the kernel of this machine may lack: project quotas on XFS and
// ext4, and SELinux. It prints what the programs print and ends with the worst of
// their exit statuses. README.md next to this file says more.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/guest"
)

// The exit statuses of the tool itself; they are those of timeout(1).
const (
	statusTimeout = 124
	statusFailed  = 125
)

func init() {
	// Children are set to die with the thread that started them, so that must be
	// one that lives as long as the process: the main one.
	runtime.LockOSThread()
}

func main() {
	if guest.Here() {
		guest.Main()
		return
	}
	os.Exit(start(os.Args[1:]))
}

func start(args []string) int {
	ctx, stop := untilSignal(context.Background())
	defer stop()
	status, err := run(ctx, args)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "kernel:", err)
	}
	return status
}

func run(ctx context.Context, args []string) (int, error) {
	o, err := parse(args, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0, err
	}
	if err != nil {
		return statusFailed, err
	}
	results, err := boot(ctx, o)
	if err != nil {
		err = because(ctx, err)
	}
	if len(o.runs) > 1 {
		summarize(os.Stderr, o.runs, results)
	}
	return exitStatus(results, err), err
}

// exitStatus is the worst of the results, unless err says that there are some
// missing.
func exitStatus(results []guest.Result, err error) int {
	var s interrupted
	switch {
	case errors.As(err, &s):
		return 128 + int(s.signal)
	case errors.Is(err, errTimeout):
		return statusTimeout
	case err != nil:
		return statusFailed
	}
	worst := 0
	for _, r := range results {
		worst = max(worst, r.Status)
	}
	return worst
}

// interrupted is why a context ends that untilSignal has made.
type interrupted struct{ signal syscall.Signal }

func (i interrupted) Error() string { return "ended by a signal: " + i.signal.String() }

// untilSignal ends the context at the first signal that asks to end.
func untilSignal(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go func() {
		select {
		case s := <-signals:
			cancel(interrupted{s.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() { signal.Stop(signals); cancel(nil) }
}

// because returns why the context has ended, if it has, or else err, which is then
// the failure itself and not what a killed child looks like.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// errTimeout is why a machine ends that took longer than it was allowed to.
var errTimeout = errors.New("the time is up")

// timeout ends the context after that time, because of errTimeout.
func timeout(parent context.Context, after time.Duration) (context.Context, func()) {
	return context.WithTimeoutCause(parent, after, fmt.Errorf("%w after %v", errTimeout, after))
}
