package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// keeperMain makes what has to be removed, starts the sandbox, and removes it.
func keeperMain() (status int, err error) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, passedOn...)
	lockThread()

	dir, err := os.MkdirTemp("", "hostpath-cluster-")
	if err != nil {
		return 1, err
	}
	group := cgroup("/" + filepath.Base(dir))
	defer func() { err = errors.Join(err, group.remove(), loopDevicesGone(dir), os.RemoveAll(dir)) }()
	if err := group.make(); err != nil {
		return 1, err
	}

	lifeline := os.NewFile(firstFile, "lifeline")
	cmd := again(initRole)
	cmd.Env = append(cmd.Env, "TMPDIR="+dir, cgroupVariable+"="+string(group))
	cmd.ExtraFiles = inheritedFiles(1)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start a sandbox: %w", err)
	}
	// Its mounts stay for as long as this is open, and with them the names of files
	// that have devices.
	mounts, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", cmd.Process.Pid))
	if err != nil {
		return 1, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	defer mounts.Close()
	go func() {
		_, _ = io.Copy(io.Discard, lifeline) // returns when the one that was called has ended
		_ = cmd.Process.Signal(syscall.SIGTERM)
		time.AfterFunc(2*grace, func() { _ = cmd.Process.Kill() })
	}()
	status, err = waitPassingOn(cmd, signals)
	// It is over when all processes in there are, so that no process uses a device any more.
	return status, errors.Join(err, amongMounts(mounts, func() error { return detachDevices(dir) }))
}

// loopDevicesGone waits until the kernel has let go of the loop devices on files
// of a directory, which it does a moment after their last unmount.
func loopDevicesGone(dir string) error {
	return within(20*time.Second, func() error {
		backing, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
		if err != nil {
			return err
		}
		for _, file := range backing {
			text, err := os.ReadFile(file)
			if err == nil && strings.HasPrefix(string(text), dir+"/") {
				return fmt.Errorf("%s still has %s", file, strings.TrimSpace(string(text)))
			}
		}
		return nil
	})
}

// within tries something again until it succeeds or the time is over.
func within(allowed time.Duration, try func() error) error {
	deadline := time.Now().Add(allowed)
	for {
		err := try()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond) // between two checks
	}
}
