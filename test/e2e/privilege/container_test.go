package privilege

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
)

// containerVariable makes this program the driver: it has the container, and the
// arguments are the driver's.
const containerVariable = "PRIVILEGE_TEST_CONTAINER"

// A container is where the driver runs, with no more than it is given.
type container struct {
	Driver string // its program
	Root   string // an empty directory, that becomes the root
	Cgroup string // a control group, which has the devices
	Mounts []mount
	// Capabilities and Devices are those that the driver may use.
	Capabilities []privilege.Capability
	Devices      []device `json:"-"` // by the control group
}

func (c *container) mount(name string) *mount {
	return &c.Mounts[slices.IndexFunc(c.Mounts, func(m mount) bool { return m.Name == name })]
}

// A mount is a directory of the host in the container, as a hostPath volume is.
type mount struct {
	// Name is that of the volume in deploy/csi.
	Name        string
	Host, Path  string // of the socket's, both are what --endpoint says
	Propagation propagation
	ReadOnly    bool
	Alone       bool // without what is mounted below it
}

// A propagation is what Kubernetes calls mountPropagation.
type propagation string

const (
	none            propagation = "None"
	hostToContainer propagation = "HostToContainer"
	bidirectional   propagation = "Bidirectional"
)

// flags are those of mount(2) for a bind mount. What is a peer of the host's mount
// stays one.
func (p propagation) flags() uintptr {
	switch p {
	case bidirectional:
		return unix.MS_SHARED | unix.MS_REC
	case hostToContainer:
		return unix.MS_SLAVE | unix.MS_REC
	}
	return unix.MS_PRIVATE | unix.MS_REC
}

// socketVolume is the volume of the socket's directory.
const socketVolume = "socket"

// become makes this process the driver in its container. It returns only on errors.
func become(encoded string) error {
	var c container
	if err := json.Unmarshal([]byte(encoded), &c); err != nil {
		return err
	}
	// Mount namespace and capabilities are a thread's own, until it executes.
	runtime.LockOSThread()
	if err := os.WriteFile(filepath.Join(c.Cgroup, "cgroup.procs"), []byte("0"), 0); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := c.build(); err != nil {
		return err
	}
	if err := c.enter(); err != nil {
		return err
	}
	if err := c.bound(); err != nil {
		return err
	}
	return syscall.Exec(entrypoint, append([]string{entrypoint}, os.Args[1:]...), nil)
}

// entrypoint is the driver in its image.
const entrypoint = "/hostpath-csi-driver"

// build makes the container's root: the image, which is one file, and what is mounted.
func (c container) build() error {
	if err := unix.Mount("tmpfs", c.Root, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	if err := c.bind(c.Driver, entrypoint, unix.MS_PRIVATE, false); err != nil {
		return err
	}
	// Of /proc, only a process's own entries.
	for _, fs := range []struct{ kind, at, options string }{{"proc", "/proc", "subset=pid"}, {"sysfs", "/sys", ""}} {
		at := filepath.Join(c.Root, fs.at)
		if err := os.Mkdir(at, 0o555); err != nil {
			return err
		}
		if err := unix.Mount(fs.kind, at, fs.kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fs.options); err != nil {
			return fmt.Errorf("mount %s: %w", fs.kind, err)
		}
	}
	for _, m := range c.Mounts {
		if m.Name == socketVolume {
			m.Host = socketDirectory()
			m.Path = m.Host
		}
		if err := c.bind(m.Host, m.Path, m.Propagation.flags(), !m.Alone); err != nil {
			return err
		}
		if m.ReadOnly {
			if err := readOnly(filepath.Join(c.Root, m.Path)); err != nil {
				return err
			}
		}
	}
	return readOnly(c.Root)
}

// readOnly changes only the mount at a path, and none below it.
func readOnly(path string) error {
	if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("have %s read-only: %w", path, err)
	}
	return nil
}

func socketDirectory() string {
	const flag = "--endpoint=unix://"
	i := slices.IndexFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, flag) })
	return filepath.Dir(os.Args[i][len(flag):])
}

// bind mounts a file or directory of the host, with what is mounted below it or without.
func (c container) bind(host, path string, propagation uintptr, below bool) error {
	at := filepath.Join(c.Root, path)
	info, err := os.Stat(host)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(at, 0o755)
	} else {
		err = os.WriteFile(at, nil, 0o444)
	}
	// What is mounted already has the directory.
	if err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	flags := uintptr(unix.MS_BIND)
	if below {
		flags |= unix.MS_REC
	}
	if err := unix.Mount(host, at, "", flags, ""); err != nil {
		return fmt.Errorf("mount %s in the container: %w", host, err)
	}
	if err := unix.Mount("", at, "", propagation, ""); err != nil {
		return fmt.Errorf("set the propagation of %s: %w", path, err)
	}
	return nil
}

// enter makes the container's root that of this thread. Pivot_root(2) does not work
// where the root is the kernel's first one, as in the guest of test/cmd/kernel.
func (c container) enter() error {
	if err := unix.Chdir(c.Root); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return os.NewSyscallError("chroot", err)
	}
	return os.NewSyscallError("chdir", unix.Chdir("/"))
}

// bound leaves the capabilities that the driver may have in the bounding set: root gets
// what is in there when it executes a program.
func (c container) bound() error {
	for number := privilege.Capability(0); ; number++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // there are no more
		}
		if err == nil && has == 1 && !slices.Contains(c.Capabilities, number) {
			err = unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0)
		}
		if err != nil {
			return os.NewSyscallError("prctl", err)
		}
	}
}
