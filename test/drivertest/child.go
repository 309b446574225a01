package drivertest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// A child is a process that dies with the program that started it.
type child struct {
	*os.Process
	// exited is closed once the child has ended and its output is read; err then
	// says how it ended.
	exited chan struct{}
	err    error
}

func startChild(cmd *exec.Cmd) (*child, error) {
	// Do not wait for grandchildren that hold the standard error open.
	cmd.WaitDelay = time.Second
	c := &child{exited: make(chan struct{})}
	err := Spawn(cmd, func() {
		c.err = cmd.Wait()
		close(c.exited)
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	c.Process = cmd.Process
	return c, nil
}

// Spawn starts a process that dies with the program that started it, however that ends. Follow waits for the process.
func Spawn(cmd *exec.Cmd, follow func()) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		// A Ctrl-C is for the program in front, which then ends its children in
		// its own order.
		Setpgid: true,
	}
	started := make(chan error)
	go func() {
		// The death signal comes when the thread ends that forked: keep it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			follow()
		}
	}()
	return <-started
}

// running reports whether the process has not ended yet.
func (c *child) running() bool {
	select {
	case <-c.exited:
		return false
	default:
		return true
	}
}

// kill ends the process at once and waits until it is gone.
func (c *child) kill() error {
	if err := c.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", c.Pid, err)
	}
	<-c.exited
	return nil
}

// terminate asks the process to end and waits for it. It is an error if it ends
// with another status than 0, or not within the time allowed: then it is killed.
func (c *child) terminate(allowed time.Duration) error {
	if err := c.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send SIGTERM to process %d: %w", c.Pid, err)
	}
	return c.await(allowed)
}

// await waits for the end of a process that got a signal, as terminate does.
func (c *child) await(allowed time.Duration) error {
	select {
	case <-c.exited:
		return c.err
	case <-time.After(allowed):
		return errors.Join(fmt.Errorf("still running %v after a signal", allowed), c.kill())
	}
}
