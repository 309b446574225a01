package mover

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrSilent reports a connection whose other side has not answered: the network is cut, or that node is gone.
var ErrSilent = errors.New("the other side has not answered")

// Silence is for how long a peer that should answer may be silent, where nothing else is asked for.
const Silence = 30 * time.Second

// keepAlive has the kernel of the other side answer now and then, also while neither side has anything to say.
func keepAlive(silence time.Duration) net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: silence / 3, Interval: silence / 6, Count: 4}
}

// A watched connection ends when the kernel of the other side does not answer. A peer that is slow, as one whose disk is busy, is waited
// for: its kernel answers. TCP_USER_TIMEOUT would end that, too, once the peer takes no more for so long; without it, what was sent
// is repeated for a quarter of an hour.
type watched struct {
	net.Conn
	silence time.Duration
	silent  atomic.Bool
	end     func()
}

// watch watches a connection of TCP until it is closed.
func watch(conn net.Conn, silence time.Duration) net.Conn {
	raw, ok := conn.(syscall.Conn)
	if !ok {
		return conn
	}
	ended := make(chan struct{})
	c := &watched{Conn: conn, silence: silence, end: sync.OnceFunc(func() { close(ended) })}
	go c.watch(raw, ended)
	return c
}

func (c *watched) watch(raw syscall.Conn, ended <-chan struct{}) {
	again := time.NewTicker(c.silence / 10)
	defer again.Stop()
	since := time.Now() // when it began to wait for an answer
	for {
		select {
		case <-ended:
			return
		case <-again.C:
		}
		info, err := infoOf(raw)
		if err != nil {
			return // it is closed
		}
		// A probe that was repeated was not answered.
		waits := info.Unacked > 0 || info.Probes > 1
		if now := time.Now(); !waits {
			since = now
		} else if heard := time.Duration(info.Last_ack_recv) * time.Millisecond; heard >= c.silence && now.Sub(since) >= c.silence {
			c.silent.Store(true)
			_ = c.Close() // the calls that wait get an error
			return
		}
	}
}

func infoOf(conn syscall.Conn) (info *unix.TCPInfo, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(controlErr, err)
}

func (c *watched) explain(err error) error {
	if err != nil && c.silent.Load() {
		return fmt.Errorf("%w for %v", ErrSilent, c.silence)
	}
	return err
}

func (c *watched) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, c.explain(err)
}

func (c *watched) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.explain(err)
}

func (c *watched) Close() error {
	c.end()
	return c.Conn.Close()
}

// watching is a listener whose connections are watched.
type watching struct {
	net.Listener
	silence time.Duration
}

func (l watching) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return watch(conn, l.silence), nil
}
