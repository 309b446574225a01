// Package drivertest runs the real driver as a child process and makes the calls of
// kubelet and the sidecars. A Process needs no test; a Driver is one that lasts as long
// as a test. Filesystems for the pools are made by package testenv.
package drivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// Patience is far above what driver and kernel need for anything that they do in the
// background, also on an emulated processor.
const Patience = 5 * time.Minute

// NodeName is the id of the node, where a test needs no other.
const NodeName = "node"

// A Driver is one that runs until the test ends.
type Driver struct {
	// TB is the test at hand: a subtest may put itself there while it lasts.
	testing.TB
	Client
}

// Start runs the driver and waits until its pools serve. Of the configuration, the name
// and the version have defaults. At the end of the test the driver is stopped, which has
// to succeed, and what a failed test has left published is taken down, devices included.
func Start(t testing.TB, config Config) *Driver {
	t.Helper()
	d := Launch(t, config)
	d.AwaitServing()
	return d
}

// Launch is Start for a driver whose pools need not serve.
func Launch(t testing.TB, config Config) *Driver {
	t.Helper()
	d := &Driver{TB: t, Client: Client{Targets: t.TempDir()}}
	for _, p := range config.Pools {
		t.Cleanup(func() { must.Succeed(t, loopfs.Detach(p.Path)) })
	}
	t.Cleanup(func() { must.Succeed(t, d.UnmountAll()) })
	d.run(config)
	return d
}

// Run starts a driver in place of one that was closed.
func (d *Driver) Run(config Config) {
	d.Helper()
	d.run(config)
	d.AwaitServing()
}

func (d *Driver) run(config Config) {
	d.Helper()
	if config.Name == "" {
		config.Name = NodeName
	}
	if config.Version == "" {
		config.Version = "test"
	}
	var err error
	d.Process, err = StartProcess(d.Context(), config)
	d.Must(err)
	t, p := d.TB, d.Process
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("what the driver wrote last:\n%s", p.log.tail(200))
		}
	})
}

// UnmountAll takes down what is published.
func (d *Driver) UnmountAll() error { return UnmountBelow(d.Targets) }

// UnmountBelow unmounts a directory and all that is mounted below it.
func UnmountBelow(directory string) error {
	mounts, err := mountns.Below(directory)
	problems := []error{err}
	for _, mount := range slices.Backward(mounts) {
		problems = append(problems, loopfs.Unmount(mount))
	}
	return errors.Join(problems...)
}

// Restart ends the driver as kubelet does, and starts it again.
func (d *Driver) Restart() {
	d.Helper()
	d.Must(d.Process.Stop())
	d.Must(d.Process.Restart(d.Context()))
	d.AwaitServing()
}

// Crash kills the driver and starts it again.
func (d *Driver) Crash() {
	d.Helper()
	d.Must(d.Process.Kill())
	d.Must(d.Process.Restart(d.Context()))
	d.AwaitServing()
}

// AwaitServing waits until every pool serves. A driver is ready before that if opening
// one takes long, which reading many records on a slow machine does.
func (d *Driver) AwaitServing() {
	d.Helper()
	d.Eventually("every pool serves", func() bool {
		// Only a driver that has asked every pool says that a volume is nowhere.
		_, err := d.Get(d.Context(), "no-such-volume")
		return status.Code(err) == codes.NotFound
	})
}

// AwaitNoTrash waits until what was removed from a pool is gone.
func (d *Driver) AwaitNoTrash(pool string) {
	d.Helper()
	d.Eventually("the trash is empty", func() bool {
		trashes, err := filepath.Glob(filepath.Join(pool, ".hostpath-provisioner/trash/*"))
		d.Must(err)
		inPlace, err := filepath.Glob(filepath.Join(pool, ".trash-*"))
		d.Must(err)
		return len(inPlace) == 0 && !slices.ContainsFunc(trashes, func(trash string) bool { return !d.empty(trash) })
	})
}

// empty searches for a single entry: of ten thousand, the others do not matter.
func (d *Driver) empty(path string) bool {
	d.Helper()
	f, err := os.Open(path)
	d.Must(err)
	defer f.Close()
	_, err = f.Readdirnames(1)
	if !errors.Is(err, io.EOF) {
		d.Must(err)
	}
	return err != nil
}

// Eventually waits for what goes on in the background.
func (d *Driver) Eventually(what string, done func() bool) {
	d.Helper()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(Patience); !done(); <-again.C {
		if time.Now().After(deadline) {
			d.Fatalf("%s: not within %v", what, Patience)
		}
	}
}

// Metric is the value of a series of a pool, of a driver with ServeMetrics.
func (d *Driver) Metric(name, pool string) float64 {
	d.Helper()
	series := fmt.Sprintf("\n%s{pool=%q} ", name, pool)
	_, rest, ok := strings.Cut(d.MustMetrics(), series)
	if !ok {
		d.Fatalf("no metric %s", series)
	}
	value, err := strconv.ParseFloat(strings.SplitN(rest, "\n", 2)[0], 64)
	d.Must(err)
	return value
}

// Repeat makes a call until it is not ABORTED any more, as kubelet and the sidecars do: another call, a check of the driver, or what
// an attempt has left that failed or was killed, was in its way. The last answer counts when ctx ends, or after Patience.
func Repeat(ctx context.Context, call func() error) error {
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		err := call()
		if status.Code(err) != codes.Aborted {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return err
		}
	}
}

// Together makes a call for each name, several at once. Calls that a pool refused because its disk did not answer in time are
// made again when it serves, as kubelet and the sidecars do: on a machine that is busy enough, a disk is slower than that.
func (d *Driver) Together(names []string, call func(name string) error) {
	d.Helper()
	for try := 1; ; try++ {
		failed := together(names, call)
		names = names[:0:0]
		for name, err := range failed {
			if code := status.Code(err); try == 5 || code != codes.ResourceExhausted && code != codes.Unavailable {
				d.Errorf("%s: %v", name, err)
			}
			names = append(names, name)
		}
		if d.Failed() {
			d.FailNow()
		}
		if len(names) == 0 {
			return
		}
		d.AwaitServing()
	}
}

// together answers with the calls that failed.
func together(names []string, call func(name string) error) map[string]error {
	work := make(chan string)
	var (
		callers sync.WaitGroup
		mu      sync.Mutex
		failed  = make(map[string]error)
	)
	for range min(len(names), 32) {
		callers.Go(func() {
			for name := range work {
				if err := call(name); err != nil {
					mu.Lock()
					failed[name] = err
					mu.Unlock()
				}
			}
		})
	}
	for _, name := range names {
		work <- name
	}
	close(work)
	callers.Wait()
	return failed
}

// Must ends the test at an error.
func (d *Driver) Must(err error) {
	d.Helper()
	must.Succeed(d.TB, err)
}

// WantCode expects a call to be answered with a code.
func (d *Driver) WantCode(what string, err error, want codes.Code) {
	d.Helper()
	if got := status.Code(err); got != want {
		d.Errorf("%s: %v, want %v", what, err, want)
	}
}

// WantErrno expects one of some answers of the kernel.
func WantErrno(t testing.TB, what string, err error, want ...syscall.Errno) {
	t.Helper()
	if !slices.ContainsFunc(want, func(e syscall.Errno) bool { return errors.Is(err, e) }) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
