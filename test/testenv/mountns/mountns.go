// Package mountns runs a program in a mount namespace of its own: nothing that
// it mounts is seen by the host, and when its last process ends, however it
// ends, the kernel unmounts everything. What is mounted is left to others.
package mountns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
)

// outer is the variable that gives the inner run the mount namespace of the
// outer one.
const outer = "HOSTPATH_OUTER_MOUNTS"

// Inside reports whether this process, or the one that started it, was started
// by Rerun. A variable that leaked out of the namespace does not deceive it.
func Inside() bool {
	here, err := current()
	mark := os.Getenv(outer)
	return err == nil && mark != "" && mark != here
}

// Rerun runs this program again with the same arguments, in a new mount
// namespace and with a TMPDIR that is removed at the end, and returns the status
// to exit with: its own, or 128 and the number of the signal that ended it.
//
// SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on. The inner run gets orphaned
// when this process is killed; a program that has to clean up asks for SIGTERM.
// An error means that the inner run has not started.
func Rerun(orphaned syscall.Signal) (status int, err error) {
	// Before anything exists that a signal could leave behind.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)

	tmp, err := os.MkdirTemp("", "hostpath-")
	if err != nil {
		return 0, fmt.Errorf("make a temporary directory: %w", err)
	}
	defer func() {
		if e := os.RemoveAll(tmp); e != nil {
			err = errors.Join(err, fmt.Errorf("remove the temporary directory: %w", e))
		}
	}()
	cmd, err := innerRun(tmp, orphaned)
	if err != nil {
		return 0, err
	}
	// The death signal is tied to the thread that forks, not to the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("run again in a private mount namespace: %w", err)
	}
	done := make(chan struct{})
	defer close(done)
	go passOn(signals, cmd.Process, done)
	return exitStatus(cmd.Wait())
}

func innerRun(tmp string, orphaned syscall.Signal) (*exec.Cmd, error) {
	here, err := current()
	if err != nil {
		return nil, err
	}
	// Not os.Executable: `go run` and `go test` may have removed that name.
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), outer+"="+here, "TMPDIR="+tmp)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// The runtime also makes / private, so that mounts do not propagate back.
		Unshareflags: syscall.CLONE_NEWNS,
		Pdeathsig:    orphaned,
	}
	return cmd, nil
}

func passOn(signals <-chan os.Signal, to *os.Process, done <-chan struct{}) {
	for {
		select {
		case s := <-signals:
			_ = to.Signal(s) // it may have ended meanwhile
		case <-done:
			return
		}
	}
}

func exitStatus(err error) (int, error) {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case !errors.As(err, &exit):
		return 1, fmt.Errorf("wait for the inner run: %w", err)
	}
	if state, ok := exit.Sys().(syscall.WaitStatus); ok && state.Signaled() {
		return 128 + int(state.Signal()), nil
	}
	return exit.ExitCode(), nil
}

func current() (string, error) {
	link, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return "", fmt.Errorf("find this process's mount namespace: %w", err)
	}
	return link, nil
}
