// Package trap has a program stop before each system call by which it changes anything that outlives it, and kills it
// there, or has the call fail. A seccomp filter reports these calls one by one, so that a run ends at a chosen one and
// not at a random time.
package trap

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/seccomp"
)

// Variables that make a test the launcher of the program: the socket that gets the
// listener, and the program.
const (
	socketVariable  = "TRAP_SOCKET"
	programVariable = "TRAP_PROGRAM"
	// aheadVariable is by how much the clock of the program is ahead: see Clock.
	aheadVariable = "TRAP_AHEAD"
)

// Launch is the first call of TestMain. It returns in the process that runs the tests. One that such a process has
// started to be a trapped program becomes that.
func Launch() {
	if socket := os.Getenv(socketVariable); socket != "" {
		fmt.Fprintln(os.Stderr, launch(socket)) // there is no error but this, and no return
		os.Exit(1)
	}
}

// launch becomes the program, all of whose threads ask before they change anything: the
// filter outlives execve(2), and new threads inherit it.
func launch(socket string) error {
	// A filter is the thread's own, and that thread is the one that becomes the driver.
	runtime.LockOSThread()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	listener, err := install()
	if err != nil {
		return err
	}
	if _, _, err := conn.(*net.UnixConn).WriteMsgUnix([]byte(cmp.Or(os.Getenv(aheadVariable), "0")), unix.UnixRights(listener), nil); err != nil {
		return err
	}
	// The process that traps has the listener once it answers: a notification that no process can
	// receive would not be waited for.
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		return err
	}
	program := os.Getenv(programVariable)
	return syscall.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
}

// install has this thread notify of the calls that are trapped.
func install() (listener int, err error) {
	// Once a notification is received no other signal than SIGKILL interrupts the call
	// (Linux 5.19): it would be made anew, and counted twice.
	return seccomp.Install(slices.Collect(maps.Keys(calls)), unix.SECCOMP_RET_USER_NOTIF,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
}

// A notification is struct seccomp_notif: a thread waits before a call.
type notification struct {
	id         uint64
	pid, flags uint32
	nr         int32
	arch       uint32
	ip         uint64
	args       [6]uint64
}

// A reply is struct seccomp_notif_resp.
type reply struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

// A Failure is an error that steps get instead of being taken. Without an error they are said to be taken, and are not.
type Failure struct {
	Errno unix.Errno
	Fails func(number int, s Step) bool // numbers begin at 1
}

// A Trap lets a program take so many steps and then kills it. Between Arm and Disarm it
// counts them; else it lets all pass.
type Trap struct {
	listener net.Listener
	fail     func(error)

	mu      sync.Mutex
	armed   bool
	killAt  int // the step that is not taken; 0 for none
	failure *Failure
	steps   []Step
	killed  bool
	idle    sync.WaitGroup // ends with the program
}

// New has the test's own executable, whenever it is started until the test ends, become this program in a trap.
func New(t *testing.T, program string) *Trap {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trap")
	if len(path) >= len(unix.RawSockaddrUnix{}.Path) {
		path = filepath.Join(os.TempDir(), fmt.Sprintf("trap-%d", os.Getpid()))
	}
	listener, err := net.Listen("unix", path)
	must.Succeed(t, err)
	tr := &Trap{listener: listener, fail: func(err error) { t.Error(err) }}
	t.Setenv(socketVariable, path)
	t.Setenv(programVariable, program)
	var accepting sync.WaitGroup
	accepting.Go(tr.accept)
	t.Cleanup(func() {
		must.Succeed(t, listener.Close())
		accepting.Wait()
		tr.idle.Wait()
	})
	return tr
}

// Arm counts the steps from here on and kills the program before one of them, from 1 on; 0 for none.
func (tr *Trap) Arm(killAt int) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.armed, tr.killAt, tr.failure, tr.steps, tr.killed = true, killAt, nil, nil, false
}

// ArmToFail counts the steps from here on, and has some of them fail.
func (tr *Trap) ArmToFail(f Failure) {
	tr.Arm(0)
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.failure = &f
}

// Disarm returns the steps since Arm, the last of which was not taken if the program was killed.
func (tr *Trap) Disarm() (steps []Step, killed bool) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.armed = false
	return tr.steps, tr.killed
}

// HasKilled reports whether the program was killed since Arm.
func (tr *Trap) HasKilled() bool {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.killed
}

func (tr *Trap) accept() {
	for {
		conn, err := tr.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			err = tr.attend(conn.(*net.UnixConn))
		}
		if err != nil {
			tr.fail(fmt.Errorf("trap a program: %w", err))
			return
		}
	}
}

// attend takes the listener of a program that is about to start.
func (tr *Trap) attend(conn *net.UnixConn) error {
	defer func() { _ = conn.Close() }()
	rights := make([]byte, unix.CmsgSpace(4))
	ahead := make([]byte, 64)
	said, n, _, _, err := conn.ReadMsgUnix(ahead, rights)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("%d control messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return fmt.Errorf("%d descriptors: %w", len(fds), err)
	}
	unix.CloseOnExec(fds[0])
	d := process{trap: tr, listener: fds[0]}
	if d.pid, err = peer(conn); err != nil {
		return err
	}
	if d.ahead, err = strconv.ParseInt(string(ahead[:said]), 10, 64); err != nil {
		return err
	}
	tr.idle.Go(func() {
		if err := d.serve(); err != nil {
			tr.fail(fmt.Errorf("serve the trap of process %d: %w", d.pid, err))
			_ = unix.Kill(d.pid, unix.SIGKILL) // it would wait for ever
		}
		_ = unix.Close(d.listener)
	})
	_, err = conn.Write([]byte{0})
	return err
}

func peer(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) {
		credentials, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, controlErr); err != nil {
		return 0, err
	}
	return int(credentials.Pid), nil
}

type process struct {
	trap          *Trap
	listener, pid int
	ahead         int64 // of the clock, in nanoseconds
}

// serve answers until the program has ended.
func (d process) serve() error {
	for {
		waiting := []unix.PollFd{{Fd: int32(d.listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(waiting, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if waiting[0].Revents&unix.POLLIN != 0 {
			if err := d.answerOne(); err != nil {
				return err
			}
		} else if waiting[0].Revents != 0 {
			return nil
		}
	}
}

func (d process) answerOne() error {
	var n notification
	err := control(d.listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR) {
		return nil // it was killed, or a signal came first and it will ask again
	}
	if err != nil {
		return err
	}
	if n.nr == unix.SYS_CLOCK_GETTIME {
		return d.tell(&n)
	}
	kill, instead := d.trap.stop(&n)
	if kill {
		// The thread waits until it is dead: the call is never made. It may be one of a program that the trapped one
		// runs, which ends with it, as in a container.
		err := unix.Kill(d.pid, unix.SIGKILL)
		_ = unix.Kill(int(n.pid), unix.SIGKILL) // it has gone already if it is a thread of the trapped one
		return err
	}
	r := reply{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if instead != nil {
		r = reply{id: n.id, errno: -int32(*instead)}
	}
	return d.reply(&r)
}

func (d process) reply(r *reply) error {
	err := control(d.listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(r))
	if errors.Is(err, unix.ENOENT) {
		return nil // killed
	}
	return err
}

// stop counts a step, and reports whether it is the one that must not be taken, and if not, the error that it gets instead
// of being taken; nil to take it.
func (tr *Trap) stop(n *notification) (kill bool, instead *unix.Errno) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if tr.killed {
		return false, nil // what other threads still ask for: they are dying
	}
	if !tr.armed {
		return false, nil
	}
	s, ok := n.step()
	if !ok {
		return false, nil
	}
	tr.steps = append(tr.steps, s)
	tr.killed = len(tr.steps) == tr.killAt
	if f := tr.failure; f != nil && f.Fails(len(tr.steps), s) {
		return false, &f.Errno
	}
	return tr.killed, nil
}

func control(fd int, request uint, argument unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}
