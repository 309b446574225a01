package driver_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestParseEndpoint(t *testing.T) {
	longest := "/" + strings.Repeat("a", 106)
	for name, c := range map[string]struct {
		endpoint string
		want     string // empty for a refusal
	}{
		"a URL":                               {"unix:///csi/csi.sock", "/csi/csi.sock"},
		"a URL as the upstream driver takes":  {"unix://csi/csi.sock", "/csi/csi.sock"},
		"the upstream driver's default":       {"unix://tmp/csi.sock", "/tmp/csi.sock"},
		"a URL without slashes":               {"unix:csi.sock", "/csi.sock"},
		"a URL with one slash":                {"unix:/csi.sock", "/csi.sock"},
		"a URL in capitals":                   {"UNIX:///csi/csi.sock", "/csi/csi.sock"},
		"a path":                              {"/csi/csi.sock", "/csi/csi.sock"},
		"a path with a colon":                 {"/csi/a:b.sock", "/csi/a:b.sock"},
		"a path that is not clean":            {"/csi/../run//csi.sock", "/run/csi.sock"},
		"a URL that is not clean":             {"unix:///csi/./csi.sock", "/csi/csi.sock"},
		"the longest path of a socket":        {longest, longest},
		"a path too long for a socket":        {longest + "a", ""},
		"a URL too long for a socket":         {"unix://" + longest + "a", ""},
		"nothing":                             {"", ""},
		"a URL of nothing":                    {"unix://", ""},
		"the root":                            {"/", ""},
		"a URL of the root":                   {"unix:///", ""},
		"a path that is the root in the end":  {"/csi/..", ""},
		"a relative path":                     {"csi/csi.sock", ""},
		"a TCP address":                       {"tcp://127.0.0.1:10000", ""},
		"an address without a scheme":         {"127.0.0.1:10000", ""},
		"a URL of HTTP":                       {"http://csi/csi.sock", ""},
		"a scheme that begins like the right": {"unixpacket:///csi/csi.sock", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := driver.ParseEndpoint(c.endpoint)
			if got != c.want || (err == nil) != (c.want != "") {
				t.Fatalf("the socket is %q, %v; want %q", got, err, c.want)
			}
			if err != nil {
				wantContains(t, err.Error(), "unix:///csi/csi.sock")
			}
		})
	}
}

func TestListenSocketMode(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	info, err := os.Lstat(socket)
	must.Succeed(t, err)
	wantEqual(t, "its mode", info.Mode(), os.ModeSocket|0o600)
	must.Succeed(t, listener.Close())
	wantGone(t, socket)
}

func TestListenReplacesStaleSocket(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	must.Succeed(t, err)
	stale.SetUnlinkOnClose(false)
	must.Succeed(t, stale.Close())
	wantThere(t, socket)

	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	connection, err := net.Dial("unix", socket)
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(connection.Close(), listener.Close()))
}

// A driver that was killed has its socket for as long as a thread of it waits for a disk that hangs.
func TestListenReplacesSocketOfDeadProcess(t *testing.T) {
	testenv.NeedTime(t)
	socket := filepath.Join(testenv.SocketDir(t), "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	must.Succeed(t, err)
	dead.SetUnlinkOnClose(false)
	defer func() { must.Succeed(t, dead.Close()) }()

	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	must.Succeed(t, listener.Close())
}

func TestListenKeepsServedSocket(t *testing.T) {
	h := newHarness(t, setup{})
	_, err := driver.Listen(t.Context(), h.socket)
	if err == nil {
		t.Fatal("it took the socket of another driver")
	}
	wantContains(t, err.Error(), h.socket, "another process serves it")
	h.create(t, "vol", "")
}

// fillQueue has a process listen that takes no connections, until the kernel takes no more of them for it.
func fillQueue(t *testing.T, socket string) (listening int) {
	t.Helper()
	fd := must.Value(syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0))(t)
	t.Cleanup(func() { must.Succeed(t, syscall.Close(fd)) })
	must.Succeed(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: socket}), syscall.Listen(fd, 0))
	for range 8 {
		connection, err := net.Dial("unix", socket)
		if errors.Is(err, syscall.EAGAIN) {
			return fd
		}
		must.Succeed(t, err, connection.Close())
	}
	t.Fatal("the queue of the socket takes any number")
	return fd
}

func TestListenKeepsSocketOfBusyProcess(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	fd := fillQueue(t, socket)
	listened := make(chan error, 1)
	go func() {
		listener, err := driver.Listen(t.Context(), socket)
		if err == nil {
			err = listener.Close()
		}
		listened <- err
	}()
	for { // it goes on, until it has greeted the one that asks
		taken, _, err := syscall.Accept(fd)
		must.Succeed(t, err)
		n, err := syscall.Write(taken, []byte("greeting"))
		must.Succeed(t, syscall.Close(taken))
		if n > 0 && err == nil {
			break
		}
	}
	if err := <-listened; err == nil {
		t.Error("it took a socket that another process listens on")
	}
	wantThere(t, socket)
}

// Clients that gave up have filled the queue of one whose thread waits for a disk.
func TestListenReplacesSocketOfDeadProcessWithFullQueue(t *testing.T) {
	testenv.NeedTime(t)
	socket := filepath.Join(testenv.SocketDir(t), "s")
	fillQueue(t, socket)
	listener, err := driver.Listen(t.Context(), socket)
	must.Succeed(t, err)
	must.Succeed(t, listener.Close())
}

func TestListenKeepsOtherFiles(t *testing.T) {
	for name, c := range map[string]struct {
		place func(path string) error
	}{
		"a file":      {func(path string) error { return os.WriteFile(path, []byte("kept"), 0o600) }},
		"a directory": {func(path string) error { return os.Mkdir(path, 0o755) }},
		"a link":      {func(path string) error { return os.Symlink("/no/such", path) }},
		"a FIFO":      {func(path string) error { return syscall.Mkfifo(path, 0o600) }},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(testenv.SocketDir(t), "s")
			must.Succeed(t, c.place(socket))
			before, err := os.Lstat(socket)
			must.Succeed(t, err)
			if listener, err := driver.Listen(t.Context(), socket); err == nil {
				t.Errorf("it listens there: %v", listener.Close())
			} else {
				wantContains(t, err.Error(), socket, "not a socket")
			}
			after, err := os.Lstat(socket)
			must.Succeed(t, err)
			if !os.SameFile(before, after) || before.Size() != after.Size() {
				t.Errorf("%s was replaced: %v", name, after)
			}
		})
	}
}

// After a loss of power there is a stale socket, and drivers that are installed twice start at once.
func TestOneOfTwoTakesStaleSocket(t *testing.T) {
	socket := filepath.Join(testenv.SocketDir(t), "s")
	for range 200 {
		stale := must.Value(net.ListenUnix("unix", &net.UnixAddr{Name: socket}))(t)
		stale.SetUnlinkOnClose(false)
		must.Succeed(t, stale.Close())
		taken := make(chan net.Listener, 2)
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				listener, err := driver.Listen(t.Context(), socket)
				if err != nil {
					return
				}
				taken <- listener
				greet(listener)
			})
		}
		first := <-taken
		both.Wait()
		must.Succeed(t, first.Close())
		if len(taken) > 0 {
			must.Succeed(t, (<-taken).Close())
			t.Fatal("two drivers listen on one socket")
		}
	}
}

// greet answers the one that asks whether a process serves the socket, if there is one, as a gRPC server does.
func greet(listener net.Listener) {
	_ = listener.(*net.UnixListener).SetDeadline(time.Now().Add(10 * time.Second))
	if connection, err := listener.Accept(); err == nil {
		_, _ = connection.Write([]byte{0})
		_ = connection.Close()
	}
}
