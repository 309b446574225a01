// Package process keeps a program running in the background, with its output in
// a file, and ends it.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Process is a running program.
type Process struct {
	name string
	log  string
	cmd  *exec.Cmd
	// exited is closed when it has ended; err then says how.
	exited chan struct{}
	err    error
}

// Start starts a program whose output is added to the file NAME.log in a
// directory.
func Start(name, logs string, cmd *exec.Cmd) (*Process, error) {
	path := filepath.Join(logs, name+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	fmt.Fprintf(log, "# %s\n", strings.Join(cmd.Args, " "))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &Process{name: name, log: path, cmd: cmd, exited: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// PID is the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Err says how the program has ended, or is nil while it runs.
func (p *Process) Err() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s has ended (%v); the end of its log, %s:\n%s", p.name, p.cmd.ProcessState, p.log, Tail(p.log, 20))
	default:
		return nil
	}
}

// Exited is closed when the program has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Stop asks the program to end and waits until it has. If the context ends
// before that it is killed, which is an error.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("stop %s: %w", p.name, context.Cause(ctx)), p.Kill())
	}
}

// Kill ends the program at once, and waits until it is gone.
func (p *Process) Kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.exited
	return nil
}

// UntilReady returns when check succeeds, or with the reason if the program ends
// or the context does before that.
func (p *Process) UntilReady(ctx context.Context, check func(context.Context) error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return p.Err()
		case <-ctx.Done():
			return fmt.Errorf("%s does not get ready: %w; the end of its log, %s:\n%s", p.name, err, p.log, Tail(p.log, 20))
		case <-tick.C:
		}
	}
}

// Tail is the last lines of a file, or what keeps it from being read.
func Tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// OnEnd does something when a process ends that need not be a child of this one.
// It keeps on waiting until this process ends.
func OnEnd(pid int, do func()) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", pid, err)
	}
	go func() {
		ended := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(ended, -1); !errors.Is(err, unix.EINTR) {
				break
			}
		}
		do()
	}()
	return nil
}
