package quota

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A control reads and sets project quotas of the filesystem that a directory is on.
type control struct {
	// byDevice selects quotactl(2), which takes the path of the device, instead of
	// quotactl_fd(2) of Linux 5.14.
	byDevice bool
}

func newControl() control {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, ^uintptr(0), command(qGetFmt), 0, 0, 0, 0)
	return control{byDevice: errno == unix.ENOSYS}
}

// command is QCMD of linux/quota.h.
func command(c uintptr) uintptr { return c<<8 | prjQuota }

// quotactl calls the kernel with arg, a pointer that the command reads or fills.
func quotactl[T any](c control, d *dir.Dir, cmd uintptr, id ID, arg *T) error {
	var errno unix.Errno
	if c.byDevice {
		device, err := deviceNode(d)
		if err != nil {
			return err
		}
		special, err := unix.BytePtrFromString(device)
		if err != nil {
			return err
		}
		_, _, errno = unix.Syscall6(unix.SYS_QUOTACTL, command(cmd), uintptr(unsafe.Pointer(special)), uintptr(id), uintptr(unsafe.Pointer(arg)), 0, 0)
	} else {
		fd, err := d.ReadFd()
		if err != nil {
			return err
		}
		_, _, errno = unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), command(cmd), uintptr(id), uintptr(unsafe.Pointer(arg)), 0, 0)
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// state has which of projectAccounting and projectEnforced are set; neither is
// without quotas.
func (c control) state(d *dir.Dir) (quotaState, error) {
	state := quotaState{Version: quotaStateVersion}
	err := quotactl(c, d, qXGetQStat, 0, &state)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL):
		return quotaState{}, nil
	case err != nil:
		return quotaState{}, fmt.Errorf("read the quota state of %s: %w", d, err)
	}
	return state, nil
}

// supported reports whether the kernel was built with quotas for this filesystem: if
// not, all commands fail.
func (c control) supported(d *dir.Dir) bool {
	var format uint32
	return !errors.Is(quotactl(c, d, qGetFmt, 0, &format), unix.ENOSYS)
}

// get reads the limits and the usage of a project.
func (c control) get(d *dir.Dir, id ID) (diskQuota, error) {
	var q diskQuota
	err := quotactl(c, d, qXGetQuota, id, &q)
	// XFS has no entry for a project that has neither.
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return diskQuota{}, fmt.Errorf("read the quota of project %d on %s: %w", id, d, err)
	}
	return q, nil
}

// next reads the limits and the usage of the first project from id on that has any. It
// returns ENOENT if there is none (Linux 4.6).
func (c control) next(d *dir.Dir, id ID) (diskQuota, error) {
	var q diskQuota
	if err := quotactl(c, d, qXGetNext, id, &q); err != nil {
		return diskQuota{}, fmt.Errorf("read the quota of the project after %d on %s: %w", id, d, err)
	}
	return q, nil
}

// set sets the hard limits of a project and clears its soft limits, which statfs(2)
// would report instead.
func (c control) set(d *dir.Dir, id ID, l Limit) error {
	q := diskQuota{
		Version:   diskQuotaVersion,
		Flags:     projectQuota,
		FieldMask: hardAndSoft,
		ID:        uint32(id),
		BlockHard: uint64(l.Bytes) / quotaBlock,
		InodeHard: uint64(l.Inodes),
	}
	if err := quotactl(c, d, qXSetQLim, id, &q); err != nil {
		return fmt.Errorf("limit project %d on %s to %d bytes and %d inodes: %w", id, d, l.Bytes, l.Inodes, err)
	}
	return nil
}

// deviceNode is the path of the block device that the directory's filesystem is on.
func deviceNode(d *dir.Dir) (string, error) {
	id, err := d.ID()
	if err != nil {
		return "", err
	}
	numbers := fmt.Sprintf("%d:%d", unix.Major(id.Dev), unix.Minor(id.Dev))
	// udev makes the links in /dev/block; without it, use the kernel's name.
	for _, node := range []string{"/dev/block/" + numbers, "/dev/" + kernelName(numbers)} {
		var st unix.Stat_t
		if unix.Stat(node, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == id.Dev {
			return node, nil
		}
	}
	return "", fmt.Errorf("%w: the device %s of %s has no node below /dev; a kernel before 5.14 needs one: mount the host's /dev into the container",
		ErrNone, numbers, d)
}

// kernelName is the kernel's name of a block device, "" if unknown.
func kernelName(numbers string) string {
	properties, err := os.ReadFile("/sys/dev/block/" + numbers + "/uevent")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(properties)) {
		if name, ok := strings.CutPrefix(line, "DEVNAME="); ok {
			return strings.TrimSpace(name)
		}
	}
	return ""
}
