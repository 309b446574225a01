package drivertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/pkg/health"
)

const (
	// startBound is far above what a driver needs: it distinguishes a broken one from a slow
	// machine.
	startBound = 30 * time.Second
	// stopBound is what Kubernetes allows. A driver allows itself 23 s of it after SIGTERM:
	// 15 for calls in flight, 5 for pools that hang and 3 for the last spans (grace, settle
	// and flush of cmd/hostpath-csi-driver). The rest is for a slow machine.
	stopBound = 30 * time.Second
)

// A PoolConfig is an entry of the driver's --datadir. An option that is empty is left out,
// and so has the driver's default.
type PoolConfig struct {
	Name        string `json:"name"`
	Path        string `json:"path"`
	Enforcement string `json:"enforcement,omitempty"`
	Allocation  string `json:"allocation,omitempty"`
	Relabel     string `json:"relabel,omitempty"`
	Reserve     string `json:"reserve,omitempty"`
	Shared      bool   `json:"shared,omitempty"`
	// RequireMount has the pool serve only as a filesystem of its own.
	RequireMount bool `json:"requireMount,omitempty"`
	// BytesPerInode and Overprovision are numbers.
	BytesPerInode json.Number `json:"bytesPerInode,omitempty"`
	Overprovision json.Number `json:"overprovision,omitempty"`
	// SnapshotPath has snapshots of the upstream driver.
	SnapshotPath string `json:"snapshotPath,omitempty"`
}

// Config says what to run.
type Config struct {
	// Binary is the driver's program; see the function of that name.
	Binary string
	// Name is the node's id.
	Name string
	// Version is what the driver reports as its own.
	Version string
	Pools   []PoolConfig
	// Flags are added to those that follow from the fields above, and Env to the environment.
	Flags []string
	Env   []string
	// Log, if set, gets the driver's standard error as it comes.
	Log io.Writer
}

// A Process is a driver that runs, or that can run again on the same pools and
// socket after Stop or Kill. It is not for concurrent use, but for Conn.
type Process struct {
	config Config
	dir    string
	log    logBuffer
	child  *child
	// conn is that to the last start, connected while it is not closed.
	conn      atomic.Pointer[grpc.ClientConn]
	connected bool
	hanging   atomic.Bool
}

// StartProcess runs the driver and waits until it is ready. If it does not become so,
// the error ends with what the driver wrote last.
func StartProcess(ctx context.Context, config Config) (*Process, error) {
	// Not t.TempDir and the like: a socket's path is limited to 107 bytes.
	dir, err := os.MkdirTemp("", "node-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the driver's socket: %w", err)
	}
	p := &Process{config: config, dir: dir, log: logBuffer{also: config.Log}}
	if err := p.Restart(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Restart runs the driver again after Stop or Kill and waits until it is ready.
func (p *Process) Restart(ctx context.Context) error {
	if p.child != nil {
		return errors.New("start the driver: it is running")
	}
	cmd, err := p.command()
	if err != nil {
		return err
	}
	if p.child, err = startChild(cmd); err != nil {
		return err
	}
	if err := p.connect(ctx); err != nil {
		return errors.Join(fmt.Errorf("wait for the driver: %w\n%s", err, p.log.tail(20)), p.Kill())
	}
	return nil
}

func (p *Process) command() (*exec.Cmd, error) {
	pools, err := json.Marshal(p.config.Pools)
	if err != nil {
		return nil, fmt.Errorf("write --datadir: %w", err)
	}
	cmd := exec.Command(p.config.Binary, append([]string{
		"--endpoint=" + p.Endpoint(),
		"--nodeid=" + p.config.Name,
		"--version=" + p.config.Version,
		"--datadir=" + string(pools),
		// Several nodes of one test run must not meet at one port.
		"--metrics-address=",
	}, p.config.Flags...)...)
	// The race detector has a program linger for a second when it ends.
	cmd.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=0"), p.config.Env...)
	cmd.Stderr = &p.log
	return cmd, nil
}

// connect dials the driver and waits for its first answers, until it is ready or
// has ended.
func (p *Process) connect(ctx context.Context) error {
	conn, err := grpc.NewClient(p.Endpoint(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(p.calling),
		// The first attempts come before the socket is there. Look again soon.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 50 * time.Millisecond},
			// Zero would mean that a busy machine has only the delay to connect in.
			MinConnectTimeout: startBound,
		}))
	if err != nil {
		return err
	}
	p.conn.Store(conn)
	p.connected = true

	ctx, cancel := context.WithTimeoutCause(ctx, startBound, fmt.Errorf("not ready after %v", startBound))
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	go func(c *child) {
		select {
		case <-c.exited:
			fail(fmt.Errorf("it ended: %w", exitReason(c.err)))
		case <-ctx.Done():
		}
	}(p.child)
	return awaitReady(ctx, csi.NewIdentityClient(conn))
}

// awaitReady asks Probe until it says yes. CSI has no call that waits for that.
func awaitReady(ctx context.Context, identity csi.IdentityClient) error {
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		answer, err := identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// The spec: a plugin that does not say is ready.
		if err != nil || answer.GetReady() == nil || answer.GetReady().GetValue() {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func exitReason(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// Hanging says that from now on a disk gives no answer on purpose: what calls on its pool are answered is for the test.
func (p *Process) Hanging() { p.hanging.Store(true) }

// calling is the interceptor of all calls on the driver.
func (p *Process) calling(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	if p.hanging.Load() {
		return invoke(ctx, method, request, answer, conn, options...)
	}
	return Patiently(ctx, method, request, answer, conn, invoke, options...)
}

// Patiently makes a call again that a pool refused because its disk gave no answer in time, as kubelet and the sidecars do: on a
// machine that is busy enough, a disk in order is slower than that. What such a call goes on with meanwhile has the next ones be ABORTED.
func Patiently(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	within := time.After(Patience)
	for slow := false; ; {
		err := invoke(ctx, method, request, answer, conn, options...)
		slow = slow || gaveNoAnswer(err)
		if !slow || !gaveNoAnswer(err) && status.Code(err) != codes.Aborted {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return err
		case <-within:
			return err
		}
	}
}

// gaveNoAnswer reports whether a call was refused for a disk that was not quick enough.
func gaveNoAnswer(err error) bool {
	return slices.ContainsFunc(status.Convert(err).Details(), func(detail any) bool {
		reason, is := detail.(*wrapperspb.StringValue)
		return is && reason.GetValue() == string(health.PoolHangs)
	})
}

// Endpoint is the address of the driver's socket, as gRPC and --endpoint have it.
func (p *Process) Endpoint() string { return "unix://" + filepath.Join(p.dir, "csi.sock") }

// Conn is the connection to the running driver. Each start makes a new one, so
// that no call waits for a connection that a killed driver has left. It may be asked for
// while another ends the driver: calls on it fail then.
func (p *Process) Conn() *grpc.ClientConn { return p.conn.Load() }

// Log is what the driver wrote to its standard error, over all its starts.
func (p *Process) Log() string { return p.log.String() }

// Running reports whether the driver runs, or has ended without being asked.
func (p *Process) Running() bool { return p.child != nil && p.child.running() }

// Pid is the running driver's process id.
func (p *Process) Pid() int { return p.child.Pid }

// Stop asks the driver to end, as kubelet does with SIGTERM. Another exit status
// than 0 is an error.
func (p *Process) Stop() error {
	return p.end(func(c *child) error { return c.terminate(stopBound) })
}

// Signal is for what Stop and Kill do not do. Wait has to follow.
func (p *Process) Signal(s os.Signal) error { return p.child.Signal(s) }

// Wait is Stop for a driver that got its signal already, and has so long to end.
func (p *Process) Wait(allowed time.Duration) error {
	return p.end(func(c *child) error { return c.await(allowed) })
}

// Kill ends the driver at once, as a crash would.
func (p *Process) Kill() error {
	return p.end((*child).kill)
}

func (p *Process) end(how func(*child) error) error {
	if p.child == nil {
		return errors.New("end the driver: it is not running")
	}
	err := how(p.child)
	if err != nil {
		err = fmt.Errorf("end the driver: %w\n%s", err, p.log.tail(20))
	}
	p.child = nil
	return errors.Join(err, p.disconnect())
}

func (p *Process) disconnect() error {
	if !p.connected {
		return nil
	}
	p.connected = false
	return p.conn.Load().Close()
}

// Close ends the driver if it is running and removes its socket. The pools and
// what is published stay.
func (p *Process) Close() error {
	var err error
	if p.child != nil {
		err = p.Stop()
	}
	return errors.Join(err, p.disconnect(), os.RemoveAll(p.dir))
}
