// Package loopfs makes filesystems to test on: a sparse file behind a loop
// device, formatted and mounted. Mounting them where no other process sees it is
// left to package mountns.
package loopfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrMissing says that the machine lacks what a filesystem needs: a program, the
// kernel's support or loop devices.
var ErrMissing = errors.New("missing on this machine")

// formatters are the programs that make each kind of filesystem, without a word
// and without asking whether a file that is no device was meant. A btrfs has its trees once, as
// docs/quotas.md says: else less than half of it can be promised, and of a small one nothing.
var formatters = map[string][]string{
	"xfs":   {"mkfs.xfs", "-q"},
	"ext4":  {"mkfs.ext4", "-q", "-F"},
	"btrfs": {"mkfs.btrfs", "-q", "-m", "single"},
}

// Mount makes a filesystem of the kind "xfs", "ext4" or "btrfs" in a sparse file
// of that many bytes and mounts it on the directory dir with the given mount
// options. XFS wants 300 MiB, btrfs 110 MiB at least. If the machine cannot have
// such a filesystem, errors.Is(err, ErrMissing).
func Mount(ctx context.Context, dir, kind string, bytes int64, options ...string) error {
	return MountMade(ctx, dir, kind, bytes, nil, options...)
}

// MountMade is Mount with further arguments of the kind's mkfs.
func MountMade(ctx context.Context, dir, kind string, bytes int64, arguments []string, options ...string) error {
	image, err := Format(ctx, filepath.Dir(dir), kind, bytes, arguments...)
	if err != nil {
		return fmt.Errorf("make %s on %s: %w", kind, dir, err)
	}
	// The loop device holds the file from now on. A file without a name cannot
	// be left behind, whatever happens to this process.
	defer os.Remove(image)

	return MountImage(ctx, image, dir, kind, options...)
}

// MountImage mounts a filesystem in a file. Its loop device goes with the mount. The option loop of mount(8) asks all loop devices of the
// machine, and waits for one that hangs on behalf of another test.
func MountImage(ctx context.Context, image, dir, kind string, options ...string) error {
	device, err := Attach(image)
	if err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, dir, err)
	}
	return errors.Join(MountDevice(ctx, device.Name(), dir, kind, options...), device.Close())
}

// Format makes a sparse file of that many bytes in dir, with a filesystem of a kind that
// Mount knows, and answers its path. The arguments are further ones of the kind's mkfs.
func Format(ctx context.Context, dir, kind string, bytes int64, arguments ...string) (string, error) {
	format, ok := formatters[kind]
	if !ok {
		return "", fmt.Errorf("make a filesystem in %s: unknown kind %q", dir, kind)
	}
	if err := need(format[0]); err != nil {
		return "", err
	}
	image, err := sparseFile(dir, bytes)
	if err != nil {
		return "", err
	}
	if err := run(ctx, slices.Concat(format, arguments, []string{image})...); err != nil {
		return "", errors.Join(err, os.Remove(image))
	}
	return image, nil
}

// Attach makes a file a loop device, and answers it open: it goes when it is closed and
// nothing on it is mounted any more, also if this process is killed.
func Attach(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: loop devices (%w)", ErrMissing, err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	for {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device for %s: %w", path, err)
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			// For reading: who has it open for writing is a user of it.
			defer device.Close()
			return os.Open(device.Name())
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) { // another process was faster
			return nil, fmt.Errorf("attach %s to %s: %w", path, device.Name(), err)
		}
	}
}

// Resized has a loop device take the size that its file has now.
func Resized(device string) error {
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	return errors.Join(unix.IoctlSetInt(int(file.Fd()), unix.LOOP_SET_CAPACITY, 0), file.Close())
}

// MountDevice mounts what a device has.
func MountDevice(ctx context.Context, device, dir, kind string, options ...string) error {
	if err := need("mount"); err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, dir, err)
	}
	args := []string{"mount", "-t", kind, device, dir}
	if len(options) > 0 {
		args = append(args, "-o", strings.Join(options, ","))
	}
	if err := run(ctx, args...); err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, dir, explain(kind, err))
	}
	return nil
}

// SwitchQuotasOn switches quotas on for the btrfs on dir, as an administrator would, and
// waits until all that is there is counted: before that nothing is limited.
func SwitchQuotasOn(ctx context.Context, dir string) error {
	if err := need("btrfs"); err != nil {
		return fmt.Errorf("switch quotas on for %s: %w", dir, err)
	}
	for _, args := range [][]string{{"btrfs", "quota", "enable", dir}, {"btrfs", "quota", "rescan", "-w", dir}} {
		if err := run(ctx, args...); err != nil {
			return fmt.Errorf("switch quotas on for %s: %w", dir, err)
		}
	}
	return nil
}

// Unmount unmounts what is mounted on dir. If it is busy that is an error, and
// it goes as soon as its last user does.
func Unmount(dir string) error {
	err := syscall.Unmount(dir, 0)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("unmount %s: %w", dir, err)
	if e := syscall.Unmount(dir, syscall.MNT_DETACH); e != nil {
		return errors.Join(err, fmt.Errorf("detach %s: %w", dir, e))
	}
	return err
}

func need(programs ...string) error {
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: %s", ErrMissing, program)
		}
	}
	return nil
}

func sparseFile(dir string, bytes int64) (string, error) {
	file, err := os.CreateTemp(dir, "*.img")
	if err != nil {
		return "", err
	}
	err = errors.Join(file.Truncate(bytes), file.Close())
	if err != nil {
		os.Remove(file.Name())
		return "", err
	}
	return file.Name(), nil
}

// explain distinguishes a machine that cannot from a mount that failed. It checks only
// afterwards because mounting is what loads a filesystem's module.
func explain(kind string, err error) error {
	if _, e := os.Stat("/dev/loop-control"); e != nil {
		return fmt.Errorf("%w: loop devices (%w)", ErrMissing, err)
	}
	known, e := os.ReadFile("/proc/filesystems")
	if e == nil && !bytes.Contains(known, []byte("\t"+kind+"\n")) {
		return fmt.Errorf("%w: %s in the kernel (%w)", ErrMissing, kind, err)
	}
	return err
}

func run(ctx context.Context, args ...string) error {
	output, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", args[0], err, bytes.TrimSpace(output))
	}
	return nil
}

// Devices lists the nodes of the loop devices whose file is or was below dir, by
// the path that the file has for this process.
func Devices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var found []string
	for _, file := range files {
		// A device may go while it is checked; then it is not one of these.
		if name, _ := os.ReadFile(file); bytes.HasPrefix(name, []byte(dir+"/")) {
			found = append(found, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))))
		}
	}
	return found, nil
}

// Other programs open all devices and have each open for an instant, so that one which is to
// go may stay a little longer.
const (
	busyBound = 3 * time.Second
	busyRetry = 5 * time.Millisecond
)

// Left are the devices that Devices lists and goes on listing for seconds.
func Left(dir string) (found []string, err error) {
	again := time.NewTicker(busyRetry)
	defer again.Stop()
	for deadline := time.Now().Add(busyBound); ; <-again.C {
		found, err = Devices(dir)
		if err != nil || len(found) == 0 || time.Now().After(deadline) {
			return found, err
		}
	}
}

// Detach takes the loop devices off the files below dir, and has the kernel forget
// them: who had them may have made them ignore discards, for everybody after. One
// that is in use for seconds is an error, and goes as soon as its last user does.
func Detach(dir string) error {
	devices, err := Devices(dir)
	if err != nil || len(devices) == 0 {
		return err
	}
	var problems []error
	for _, device := range devices {
		if err := DetachDevice(device); err != nil {
			problems = append(problems, fmt.Errorf("detach %s: %w", device, err))
		}
	}
	return errors.Join(problems...)
}

// DetachDevice is Detach for one device, by the path of its node.
func DetachDevice(device string) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	number, err := strconv.Atoi(strings.TrimPrefix(device, "/dev/loop"))
	if err != nil {
		return err
	}
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	err = unix.IoctlSetInt(int(file.Fd()), unix.LOOP_CLR_FD, 0)
	// It goes when it is closed.
	if err = errors.Join(err, file.Close()); err != nil && !errors.Is(err, unix.ENXIO) {
		return err
	}
	again := time.NewTicker(busyRetry)
	defer again.Stop()
	for deadline := time.Now().Add(busyBound); ; <-again.C {
		err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
	}
}
