package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// grace is how long the program inside may take to end when asked to.
const grace = 20 * time.Second

// initMain is process 1: it makes the sandbox fit to live in, starts the program
// and reaps whatever loses its parent. When it ends the kernel kills the rest.
func initMain() (int, error) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, passedOn...)
	if err := furnish(os.TempDir()); err != nil {
		return 1, err
	}
	cmd := again(insideRole)
	cmd.ExtraFiles = inheritedFiles(0)
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start %s inside: %w", os.Args[0], err)
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // it may have ended meanwhile
			time.AfterFunc(grace, func() { _ = cmd.Process.Kill() })
		}
	}()
	status, err := reapUntil(cmd.Process.Pid)
	if err != nil {
		return 1, err
	}
	return exitStatus(status), nil
}

// reapUntil waits for children until this one has ended, and returns how.
func reapUntil(last int) (syscall.WaitStatus, error) {
	for {
		var state syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &state, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for children: %w", err)
		case pid == last:
			return state, nil
		}
	}
}

// A mount is what mount(2) is called with.
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

// furnish makes the mounts of the sandbox. The host must not see any of it.
func furnish(dir string) error {
	upper, work := filepath.Join(dir, "var/upper"), filepath.Join(dir, "var/work")
	if err := os.MkdirAll(filepath.Join(dir, "var"), 0o755); err != nil {
		return err
	}
	if err := mountAll(
		mount{target: "/", flags: syscall.MS_REC | syscall.MS_PRIVATE},
		mount{source: "proc", target: "/proc", kind: "proc", flags: syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC},
		// The layer above /var may not lie on a layered filesystem itself.
		mount{source: "tmpfs", target: filepath.Join(dir, "var"), kind: "tmpfs"},
	); err != nil {
		return err
	}
	for _, dir := range []string{upper, work} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	// Kubelet and others have fixed directories in these two.
	if err := mountAll(
		mount{source: "tmpfs", target: "/run", kind: "tmpfs", flags: syscall.MS_NOSUID | syscall.MS_NODEV, data: "mode=755"},
		mount{source: "overlay", target: "/var", kind: "overlay", data: fmt.Sprintf("lowerdir=/var,upperdir=%s,workdir=%s", upper, work)},
	); err != nil {
		return err
	}
	if err := shieldSettings(filepath.Join(dir, "var")); err != nil {
		return err
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, out)
	}
	// Of this network only.
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
}

func mountAll(mounts ...mount) error {
	for _, m := range mounts {
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.target, err)
		}
	}
	return nil
}

// shieldSettings covers the settings of the whole machine that a kubelet insists
// on changing with files that have the values which it wants.
func shieldSettings(dir string) error {
	for name, value := range map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		err := syscall.Mount(file, "/proc/sys/"+name, "", syscall.MS_BIND, "")
		if err != nil && !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("cover the setting %s: %w", name, err)
		}
	}
	return nil
}
