package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// An Observer counts what the server does.
type Observer interface {
	// Call reports on one answered call.
	Call(method, code string, duration time.Duration)
	// Panic records a handler that panicked.
	Panic(method string)
}

// A Server answers CSI calls on one socket.
type Server struct {
	grpc     *grpc.Server
	observer Observer
	log      klog.Logger
	limit    time.Duration
	calls    sync.WaitGroup // handlers at work, answered or not
}

// handshake is how long a new connection may take to say that it speaks HTTP/2. Shutting
// down waits for connections that have not.
const handshake = 3 * time.Second

// NewServer makes a server for a node's pools.
func NewServer(config Config, pools *pool.Set, observer Observer, log klog.Logger) *Server {
	s := &Server{observer: observer, log: log, limit: config.CallLimit}
	if s.limit == 0 {
		s.limit = 2 * time.Minute
	}
	// The first is the outermost.
	around := []grpc.UnaryServerInterceptor{s.watch, s.bound, s.recover, withStatus}
	options := []grpc.ServerOption{grpc.ConnectionTimeout(handshake)}
	if config.Tracer != nil {
		around = slices.Insert(around, 0, (&tracing{pools}).call)
		options = append(options, traced(config.Tracer))
	}
	s.grpc = grpc.NewServer(append(options, grpc.ChainUnaryInterceptor(around...))...)
	csi.RegisterIdentityServer(s.grpc, &identity{config: config, pools: pools})
	csi.RegisterControllerServer(s.grpc, &controller{config: config, pools: pools})
	csi.RegisterNodeServer(s.grpc, &node{config: config, pools: pools})
	s.grpc.RegisterService(moves.Describe(movers{pools}.call), nil)
	return s
}

// Serve answers calls until ctx ends. Then it takes no new ones and waits for
// those in flight, but not longer than grace.
func (s *Server) Serve(ctx context.Context, listener net.Listener, grace time.Duration) error {
	failed := make(chan error, 1)
	go func() { failed <- s.grpc.Serve(listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	case <-ctx.Done():
	}
	s.log.Info("Shutting down, draining in-flight calls", "cause", context.Cause(ctx).Error())
	_, err := hang.Run(context.Background(), grace, func() (struct{}, error) {
		s.grpc.GracefulStop()
		s.calls.Wait()
		return struct{}{}, nil
	}, nil)
	if err != nil {
		s.log.Info("In-flight calls did not end within the grace period and are abandoned", "grace", grace)
		s.grpc.Stop()
	}
	// gRPC says so if ctx ended before it had begun.
	if err := <-failed; !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// bound answers in time even if the handler does not: a system call on a hanging
// filesystem cannot be interrupted. The handler keeps its locks until it returns,
// so that a repeated call gets ABORTED.
func (s *Server) bound(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel() // an abandoned handler's context has ended already
	s.calls.Add(1)
	response, err := hang.Run(ctx, 0, func() (any, error) {
		defer s.calls.Done()
		return handler(ctx, req)
	}, nil)
	if _, ok := status.FromError(err); !ok { // withStatus makes all errors of handlers statuses
		err = status.FromContextError(ctx.Err()).Err()
	}
	return response, err
}

// recover turns a panic into an answer: it ends one call, not the driver.
func (s *Server) recover(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (response any, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			method := path.Base(info.FullMethod)
			s.observer.Panic(method)
			klog.FromContext(ctx).Error(fmt.Errorf("%v", cause), "A handler panicked", "stack", string(debug.Stack()))
			response, err = nil, status.Errorf(codes.Internal, "%s panicked, see the driver's log", method)
		}
	}()
	return handler(ctx, req)
}

// watch measures and logs.
func (s *Server) watch(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	about := []any{"method", method}
	if volume := volumeOf(req); volume != "" {
		about = append(about, "volume", volume)
	}
	log := s.log.WithValues(about...)
	start := time.Now()
	response, err := handler(klog.NewContext(ctx, log), req)
	duration := time.Since(start)
	code := status.Code(err)
	s.observer.Call(method, code.String(), duration)
	s.logCall(log, req, method, code, err, duration)
	return response, err
}

// maxRequest bounds a request in the log, in bytes.
const maxRequest = 16 << 10

func (s *Server) logCall(log klog.Logger, req any, method string, code codes.Code, err error, duration time.Duration) {
	level := levelOf(method, code)
	if verbose := log.V(6); verbose.Enabled() {
		verbose.Info("Request", "request", bounded(protosanitizer.StripSecrets(req).String(), maxRequest))
	}
	if code == codes.Internal || code == codes.Unknown {
		log.Error(err, "Call failed", "code", code.String(), "duration", duration)
		return
	}
	if err != nil {
		log = log.WithValues("reason", status.Convert(err).Message())
	}
	log.V(level).Info("Call", "code", code.String(), "duration", duration)
}

// levelOf keeps the calls that come all day out of the log.
func levelOf(method string, code codes.Code) int {
	switch {
	case code == codes.Unimplemented:
		return 4
	case code != codes.OK:
		return 1
	}
	switch method {
	case "CreateVolume", "DeleteVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeExpandVolume", "CreateSnapshot", "DeleteSnapshot",
		moves.Fence, moves.Unfence, moves.HandOver, moves.RemoveSource, moves.PrepareTarget, moves.Received, moves.ConfirmTarget, moves.AbortTarget:
		return 2
	}
	return 5
}

func volumeOf(req any) string {
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		return bounded(r.GetVolumeId(), maxName)
	case *csi.CreateVolumeRequest:
		return bounded(r.GetName(), maxName)
	case *structpb.Struct:
		return bounded(r.GetFields()["volume"].GetStringValue(), maxName)
	}
	return ""
}

// maxSocket is how long the path of a socket can be, in bytes (unix(7), sun_path).
const maxSocket = 107

// ParseEndpoint takes the path of a socket: "unix:///csi/csi.sock", as the upstream
// driver does "unix://csi/csi.sock" for the same, or the bare path.
func ParseEndpoint(endpoint string) (string, error) {
	socket := endpoint
	if !filepath.IsAbs(endpoint) {
		scheme, rest, _ := strings.Cut(endpoint, ":")
		if !strings.EqualFold(scheme, "unix") {
			return "", fmt.Errorf("the endpoint %q is not a unix socket such as unix:///csi/csi.sock", endpoint)
		}
		socket = "/" + rest
	}
	switch socket = filepath.Clean(socket); {
	case socket == "/":
		return "", fmt.Errorf("the endpoint %q has no path such as unix:///csi/csi.sock", endpoint)
	case len(socket) > maxSocket:
		return "", fmt.Errorf("the endpoint %q has a path of %d bytes, a socket's has at most %d; choose one such as unix:///csi/csi.sock",
			endpoint, len(socket), maxSocket)
	}
	return socket, nil
}

// Listen makes the socket, with mode 0600. A socket that no process serves, or one that gives no answer within 10 seconds, is
// replaced; one that is served, and anything else of that name, is not.
func Listen(ctx context.Context, socket string) (net.Listener, error) {
	unlock, err := lockFor(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(ctx, socket); err != nil {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	// Only root reaches the socket in between: connecting takes write permission,
	// which the umask gives to no other user.
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// lockFor takes turns with others that may find the same stale socket: the last to remove it would remove that of another.
func lockFor(ctx context.Context, socket string) (unlock func(), err error) {
	in, err := dir.Open(filepath.Dir(socket))
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", socket, err)
	}
	defer func() { _ = in.Close() }() // the lock has a handle of its own
	return dir.LockDir(ctx, in)
}

// patience is how long a socket that gives no answer may be that of a process which runs.
const patience = 10 * time.Second

// answers says whether a process is there that takes connections, which a gRPC server greets (RFC 9113, section 3.4), and closes the
// connection. A driver that was killed keeps its socket while a thread of it waits for a disk that hangs.
func answers(connection net.Conn) (answered bool, err error) {
	err = connection.SetReadDeadline(time.Now().Add(patience))
	if err == nil {
		_, err = connection.Read(make([]byte, 1))
	}
	answered = !errors.Is(err, os.ErrDeadlineExceeded)
	if errors.Is(err, io.EOF) || !answered {
		err = nil
	}
	return answered, errors.Join(err, connection.Close())
}

// connect waits for a queue that is full (EAGAIN) to be taken from, which poll(2) does not tell: clients that gave up fill that of a
// driver that was killed.
func connect(ctx context.Context, socket string) (connection net.Conn, err error) {
	again := time.NewTicker(patience / 100)
	defer again.Stop()
	for range 100 {
		if connection, err = net.DialTimeout("unix", socket, time.Second); !errors.Is(err, syscall.EAGAIN) {
			return connection, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-again.C:
		}
	}
	return nil, err
}

func removeStale(ctx context.Context, socket string) error {
	info, err := os.Lstat(socket)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("listen on %s: it exists and is not a socket; move it away", socket)
	}
	connection, err := connect(ctx, socket)
	switch {
	case err == nil:
		if answered, err := answers(connection); err != nil || answered {
			return errors.Join(fmt.Errorf("listen on %s: another process serves it", socket), err)
		}
		return os.Remove(socket)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EAGAIN): // none listens, or none takes a connection
		return os.Remove(socket)
	}
	return fmt.Errorf("listen on %s: another process may serve it: %w", socket, err)
}
