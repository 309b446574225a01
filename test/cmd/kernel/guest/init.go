package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Here reports whether this process is the first one of the guest.
func Here() bool { return os.Getpid() == 1 && os.Args[0] == Program }

// Main is the life of the guest: it sets the machine up, carries out the plan and
// ends the machine. What it cannot report otherwise goes to the console, whose last
// lines the host shows if the guest ends without having said that it is done.
func Main() {
	if err := live(); err != nil {
		fmt.Println("the guest's init:", err)
	}
	// The host has the emulator end when the machine restarts.
	err := syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	fmt.Println("the guest's init: restart:", err)
}

func live() error {
	if err := os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"); err != nil {
		return err
	}
	plan, err := readPlan()
	if err != nil {
		return err
	}
	if err := setUp(plan); err != nil {
		return err
	}
	ports, err := openPorts()
	if err != nil {
		return err
	}
	report := json.NewEncoder(ports.report)
	if err := mountDisks(); err != nil {
		return errors.Join(err, report.Encode(Message{Trouble: err.Error()}))
	}
	if err := carryOut(plan, ports, report); err != nil {
		return errors.Join(err, report.Encode(Message{Trouble: err.Error()}))
	}
	return report.Encode(Message{Done: true})
}

func readPlan() (Plan, error) {
	var plan Plan
	content, err := os.ReadFile(PlanFile)
	if err != nil {
		return plan, err
	}
	return plan, json.Unmarshal(content, &plan)
}

// setUp does what an init system does before it starts services.
func setUp(plan Plan) error {
	if err := os.Chmod("/", 0o755); err != nil {
		return err
	}
	if err := mountAll([]mount{
		{"devtmpfs", "/dev", "mode=755"},
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
	}); err != nil {
		return err
	}
	if plan.SELinux {
		if err := loadPolicy(); err != nil {
			return err
		}
	}
	if err := mountAll([]mount{
		{"devpts", "/dev/pts", "mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "mode=1777"},
		{"tmpfs", "/run", "mode=755"},
		// Larger than the memory, because tests make pools there and promise space.
		{"tmpfs", "/tmp", "mode=1777,size=4g"},
	}); err != nil {
		return err
	}
	if err := mountAll([]mount{{"cgroup2", "/sys/fs/cgroup", ""}}); err != nil {
		return err
	}
	if plan.Containers {
		if err := leaveRootfs(); err != nil {
			return err
		}
	}
	// As systemd does: mounts made here are seen in namespaces that are slaves.
	if err := syscall.Mount("", "/", "", syscall.MS_SHARED|syscall.MS_REC, ""); err != nil {
		return fmt.Errorf("share the mounts: %w", err)
	}
	if err := os.Symlink("/proc/self/fd", "/dev/fd"); err != nil {
		return err
	}
	// Else it is "(none)", which those who make names from it cannot use.
	if err := syscall.Sethostname([]byte("guest")); err != nil {
		return fmt.Errorf("set the host's name: %w", err)
	}
	if err := makeModuleNodes(); err != nil {
		return err
	}
	return errors.Join(
		run("ip", "link", "set", "lo", "up"),
		run("modprobe", "-a", "virtio_pci", "virtio_blk", "virtio_console"),
	)
}

// leaveRootfs makes a layer above the first root filesystem the root. The first one
// itself cannot be left with pivot_root(2), as container runtimes do, and is no
// filesystem whose space a kubelet could report.
func leaveRootfs() error {
	const upper, work, root = "/layer/upper", "/layer/work", "/layer/root"
	if err := mountAll([]mount{{"tmpfs", "/layer", "mode=755"}}); err != nil {
		return err
	}
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755)); err != nil {
		return err
	}
	if err := mountAll([]mount{{"overlay", root, "lowerdir=/,upperdir=" + upper + ",workdir=" + work}}); err != nil {
		return err
	}
	for _, at := range []string{"/dev", "/proc", "/sys", "/run", "/tmp"} {
		if err := os.MkdirAll(root+at, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(at, root+at, "", syscall.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", at, err)
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	// Over the first one, and not only somewhere below it: there setns(2) searches for the root.
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	return os.Chdir("/")
}

type mount struct{ kind, at, options string }

func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(m.kind, m.at, m.kind, 0, m.options); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.at, err)
		}
	}
	return nil
}

func loadPolicy() error {
	if err := mountAll([]mount{{"selinuxfs", "/sys/fs/selinux", ""}}); err != nil {
		return err
	}
	policy, err := os.ReadFile(Policy)
	if err != nil {
		return err
	}
	// The kernel wants the whole policy in one write, and os.WriteFile makes one.
	if err := os.WriteFile("/sys/fs/selinux/load", policy, 0); err != nil {
		return fmt.Errorf("load the SELinux policy: %w", err)
	}
	return nil
}

// makeModuleNodes makes the device nodes whose opening loads a module, such as
// /dev/loop-control and /dev/fuse. On a real system udev does.
func makeModuleNodes() error {
	lists, err := filepath.Glob("/lib/modules/*/modules.devname")
	if err != nil || len(lists) != 1 {
		return fmt.Errorf("find the modules' device nodes: %v, %v", lists, err)
	}
	content, err := os.ReadFile(lists[0])
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(content)) {
		var module, name string
		var kind rune
		var major, minor uint32
		// For example "fuse fuse c10:229"; comments do not match.
		if n, _ := fmt.Sscanf(line, "%s %s %c%d:%d", &module, &name, &kind, &major, &minor); n != 5 || kind != 'c' {
			continue
		}
		path := filepath.Join("/dev", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		err := syscall.Mknod(path, syscall.S_IFCHR|0o600, int(major<<8|minor))
		if err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make %s: %w", path, err)
		}
	}
	return nil
}

// mountDisks mounts each disk whose serial is the name of a filesystem.
func mountDisks() error {
	for kind, at := range map[string]string{"xfs": XFS, "ext4": Ext4} {
		disk, err := device("/sys/block/vd*/serial", kind)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(disk, at, kind, 0, "prjquota"); err != nil {
			return fmt.Errorf("mount %s on %s: %w", disk, at, err)
		}
	}
	return nil
}

// device returns the path of the device that sysfs knows by a name. Those of a
// module that has just been loaded appear a little later.
func device(attributes, name string) (string, error) {
	const bound = 30 * time.Second
	for started := time.Now(); time.Since(started) < bound; time.Sleep(time.Millisecond) {
		files, err := filepath.Glob(attributes)
		if err != nil {
			return "", err
		}
		for _, file := range files {
			path := filepath.Join("/dev", filepath.Base(filepath.Dir(file)))
			found, err := os.ReadFile(file)
			if err != nil || strings.TrimSpace(string(found)) != name {
				continue
			}
			if _, err := os.Stat(path); err == nil {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("no device is called %s in %s after %v", name, attributes, bound)
}

// ports are the guest's ends. Those that programs inherit are no os.Files, because
// the runtime would make them non-blocking.
type ports struct {
	stdout, stderr  int
	report, archive *os.File
}

func openPorts() (ports, error) {
	var p ports
	for name, open := range map[string]func(string) error{
		Stdout:  func(path string) (err error) { p.stdout, err = openInheritable(path); return },
		Stderr:  func(path string) (err error) { p.stderr, err = openInheritable(path); return },
		Report:  func(path string) (err error) { p.report, err = os.OpenFile(path, os.O_WRONLY, 0); return },
		Archive: func(path string) (err error) { p.archive, err = os.OpenFile(path, os.O_WRONLY, 0); return },
	} {
		path, err := device("/sys/class/virtio-ports/*/name", name)
		if err != nil {
			return p, err
		}
		if err := open(path); err != nil {
			return p, err
		}
	}
	return p, nil
}

func openInheritable(path string) (int, error) {
	return syscall.Open(path, syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
}

func run(args ...string) error {
	output, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strconv.Quote(string(output)))
	}
	return nil
}
