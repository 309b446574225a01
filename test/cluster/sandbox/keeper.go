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
	// It is over when all processes in there are, so that nobody uses a device any more.
	return status, errors.Join(err, amongMounts(mounts, func() error { return detachDevices(dir) }))
}

// A cgroup is the path of a control group in each hierarchy.
type cgroup string

// hierarchies are the mount points of the control groups of version 1.
func hierarchies() ([]string, error) {
	found, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errors.New("this machine has no control groups of version 1 at /sys/fs/cgroup")
	}
	var dirs []string
	for _, file := range found {
		dirs = append(dirs, filepath.Dir(file))
	}
	return dirs, nil
}

func (c cgroup) make() error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.Mkdir(dir+string(c), 0o755); err != nil {
			return err
		}
		if err := inheritCpuset(filepath.Dir(dir+string(c)), dir+string(c)); err != nil {
			return err
		}
	}
	return nil
}

// inheritCpuset gives a group the processors of the one above, without which no
// process can enter it. In other hierarchies there is nothing to do.
func inheritCpuset(parent, child string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(child, name), value, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes the group and all below it. Its last processes may still be on
// their way out.
func (c cgroup) remove() error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	var problems []error
	for _, dir := range dirs {
		problems = append(problems, within(10*time.Second, func() error { return removeGroups(dir + string(c)) }))
	}
	return errors.Join(problems...)
}

// removeGroups removes from the leaves up. The files of a group go with it.
func removeGroups(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		if err := removeGroups(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("remove the control group %s: %w", dir, err)
	}
	return nil
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
		time.Sleep(20 * time.Millisecond) // between two looks
	}
}
