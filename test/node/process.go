package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// A process is a running child. It dies with the program that started it.
type process struct {
	*os.Process
	// exited is closed once the child has ended and its output is read; err then
	// says how it ended.
	exited chan struct{}
	err    error
}

func startProcess(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		// A Ctrl-C is for the program in front, which then ends its children in
		// its own order.
		Setpgid: true,
	}
	// Do not wait for grandchildren that hold the standard error open.
	cmd.WaitDelay = time.Second

	p := &process{exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The death signal comes when the thread ends that forked: keep it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	p.Process = cmd.Process
	return p, nil
}

// running reports whether the process has not ended yet.
func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// kill ends the process at once and waits until it is gone.
func (p *process) kill() error {
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", p.Pid, err)
	}
	<-p.exited
	return nil
}

// terminate asks the process to end and waits for it. It is an error if it ends
// with another status than 0, or not within the time allowed: then it is killed.
func (p *process) terminate(allowed time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", p.Pid, err)
	}
	select {
	case <-p.exited:
		return p.err
	case <-time.After(allowed):
		return errors.Join(fmt.Errorf("still running %v after SIGTERM", allowed), p.kill())
	}
}
