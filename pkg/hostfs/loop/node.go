package loop

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

const (
	// loopMajor is LOOP_MAJOR of linux/major.h.
	loopMajor    = 7
	sysBlock     = "/sys/block"
	virtualBlock = "/sys/devices/virtual/block"
	prefix       = "loop"
	controlNode  = "loop-control"
)

func nodeName(number int) string { return prefix + strconv.Itoa(number) }

// numberOf is the number in the name of a node; false for others, such as partitions.
func numberOf(name string) (number int, ok bool) {
	digits, ok := strings.CutPrefix(name, prefix)
	number, err := strconv.Atoi(digits)
	return number, ok && err == nil
}

// fileNames are the kernel's names of the files of all devices that have one, by their numbers. The kernel keeps a directory for
// each device that ever was, so those without a file have to cost next to nothing.
func fileNames() (map[int]string, error) {
	all, err := numbers()
	if err != nil || len(all) == 0 {
		return nil, err
	}
	// What /sys/block has are links to here: to follow one takes longer than to read.
	devices, err := dir.Open(virtualBlock)
	if err != nil {
		return nil, err
	}
	defer func() { _ = devices.Close() }()
	names := make(map[int]string)
	for _, number := range all {
		former, err := formerPathIn(devices.Fd(), nodeName(number))
		switch {
		case errors.Is(err, ErrNotAttached):
		case err != nil:
			return nil, err
		default:
			names[number] = former
		}
	}
	return names, nil
}

func numbers() (all []int, err error) {
	block, err := dir.Open(sysBlock)
	if err != nil {
		return nil, err
	}
	defer func() { _ = block.Close() }()
	for entry, err := range block.Entries() {
		if err != nil {
			return nil, err
		}
		if number, ok := numberOf(entry.Name); ok {
			all = append(all, number)
		}
	}
	return all, nil
}

// A control is the open /dev/loop-control (loop(4)).
type control struct{ f *os.File }

func (k *Kernel) control() (control, error) {
	f, err := k.dev.OpenNode(controlNode, unix.O_RDWR)
	if err != nil {
		return control{}, fmt.Errorf("loop devices need the module loop, and the host's /dev: %w", err)
	}
	return control{f: f}, nil
}

func (c control) fd() int { return int(c.f.Fd()) }

func (c control) close() error { return c.f.Close() }

// free makes a device that no process has open, with the lowest number that is free and not refused. It replaces one that is
// there: on older kernels, as Linux 6.1, a process that has ended its device keeps the descriptor, which would show the next file.
func (c control) free(refused map[int]bool) (int, error) {
	for number := 0; ; number++ {
		if refused[number] || hasFile(nodeName(number)) {
			continue
		}
		err := c.remove(number)
		if err == nil {
			if err = unix.IoctlSetInt(c.fd(), unix.LOOP_CTL_ADD, number); err == nil {
				return number, nil
			}
			err = noDevice("LOOP_CTL_ADD", err)
		}
		// Another process has it open, or has just made it.
		if !errors.Is(err, ErrBusy) && !errors.Is(err, unix.EEXIST) {
			return 0, err
		}
	}
}

func noDevice(op string, err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: %s: %w", ErrNoDevice, op, err)
	}
	return &fs.PathError{Op: op, Path: controlNode, Err: err}
}

// remove returns ErrBusy for a device that a process has open or attached.
func (c control) remove(number int) error {
	err := unix.IoctlSetInt(c.fd(), unix.LOOP_CTL_REMOVE, number)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil
	case errors.Is(err, unix.EBUSY):
		return ErrBusy
	case err != nil:
		return &fs.PathError{Op: "LOOP_CTL_REMOVE", Path: nodeName(number), Err: err}
	}
	return nil
}

// A node is an open loop device, which stays what it is until it is closed.
type node struct {
	f    *os.File
	name string
}

// open opens a device by the name of its node. It returns ErrNotAttached for one that
// is not there or about to go.
func (k *Kernel) open(name string, flags int) (node, error) {
	// O_NONBLOCK: something else of that name must not hold the caller.
	f, err := k.dev.OpenNode(name, flags|unix.O_NONBLOCK)
	switch {
	case errors.Is(err, unix.ENXIO), errors.Is(err, fs.ErrNotExist) && !hasFile(name):
		return node{}, fmt.Errorf("%s: %w", name, ErrNotAttached)
	case errors.Is(err, fs.ErrNotExist):
		return node{}, fmt.Errorf("the kernel has a device that the directory of nodes lacks, which must be the host's /dev: %w", err)
	case err != nil:
		return node{}, err
	}
	n := node{f: f, name: name}
	if st, err := n.stat(); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK || unix.Major(st.Rdev) != loopMajor {
		return node{}, errors.Join(fmt.Errorf("open %s: not a loop device", f.Name()), err, n.close())
	}
	return n, nil
}

// hasFile reports whether a device is attached. One that is removed loses its node before the kernel forgets it.
func hasFile(name string) bool {
	_, err := os.Stat(path.Join(sysBlock, name, "loop"))
	return err == nil
}

func (n node) fd() int { return int(n.f.Fd()) }

// close may be called again.
func (n node) close() error {
	err := n.f.Close()
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	return err
}

func (n node) stat() (unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstat(n.fd(), &st)
	return st, err
}

func (n node) status() (*unix.LoopInfo64, error) {
	info, err := unix.IoctlLoopGetStatus64(n.fd())
	if errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%s: %w", n.name, ErrNotAttached)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "LOOP_GET_STATUS64", Path: n.name, Err: err}
	}
	return info, nil
}

// inspect asks for all fields of a Device. The kernel's lo_device and lo_inode are
// those of stat(2) on the file.
func (n node) inspect() (Device, error) {
	info, err := n.status()
	switch {
	case filesystemGone(err):
		return n.inspectGone()
	case errors.Is(err, ErrNotAttached):
		return Device{}, err
	case err != nil:
		return Device{}, fmt.Errorf("%w: %w", ErrSilent, err)
	}
	st, err := n.stat()
	if err != nil {
		return Device{}, &fs.PathError{Op: "stat", Path: n.name, Err: err}
	}
	size, err := unix.IoctlGetInt(n.fd(), unix.BLKGETSIZE64)
	if err != nil {
		return Device{}, &fs.PathError{Op: "BLKGETSIZE64", Path: n.name, Err: err}
	}
	block, err := unix.IoctlGetInt(n.fd(), unix.BLKSSZGET)
	if err != nil {
		return Device{}, &fs.PathError{Op: "BLKSSZGET", Path: n.name, Err: err}
	}
	return Device{
		Name:       n.name,
		Major:      unix.Major(st.Rdev),
		Minor:      unix.Minor(st.Rdev),
		Backing:    dir.ID{Dev: info.Device, Ino: info.Inode},
		SizeBytes:  int64(size),
		BlockBytes: int64(block),
		ReadOnly:   info.Flags&unix.LO_FLAGS_READ_ONLY != 0,
		DirectIO:   info.Flags&unix.LO_FLAGS_DIRECT_IO != 0,
		Discard:    n.discards(),
		Ours:       isMarked(info) && info.Offset == 0 && info.Sizelimit == 0,
		Ending:     info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
	}, nil
}

// inspectGone is what is known of a device without its file.
func (n node) inspectGone() (Device, error) {
	st, err := n.stat()
	if err != nil {
		return Device{}, &fs.PathError{Op: "stat", Path: n.name, Err: err}
	}
	former, err := formerPath(n.name)
	return Device{
		Name:       n.name,
		Major:      unix.Major(st.Rdev),
		Minor:      unix.Minor(st.Rdev),
		Discard:    n.discards(),
		Gone:       true,
		FormerPath: former,
	}, err
}

// inspectSilent is what is known of a device without asking its filesystem, or the device.
func inspectSilent(name string) (Device, error) {
	former, err := formerPath(name)
	return Device{Name: name, Silent: true, FormerPath: former}, err
}

// formerPath is the kernel's name of a device's file, from its memory; empty for one that is too long for sysfs.
func formerPath(name string) (string, error) {
	return formerPathIn(unix.AT_FDCWD, path.Join(sysBlock, name))
}

func formerPathIn(at int, device string) (string, error) {
	former, err := readAttribute(at, path.Join(device, "loop", "backing_file"))
	switch {
	case errors.Is(err, unix.ENAMETOOLONG):
		return "", nil
	// ENODEV: the device was detached after the file was opened (kernfs_fop_read_iter() of the kernel).
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
		err = fmt.Errorf("%s: %w", path.Base(device), ErrNotAttached)
	}
	return former, err
}

// readAttribute reads a file of sysfs, which has a page at most and gives all of it at once. It is asked for each device of the
// node, so without what os.File does besides.
func readAttribute(at int, name string) (string, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	page := make([]byte, os.Getpagesize())
	n, err := unix.Read(fd, page)
	if err != nil {
		return "", &fs.PathError{Op: "read", Path: name, Err: err}
	}
	return strings.TrimSuffix(string(page[:n]), "\n"), nil
}

// FilePath is the kernel's name of a device's file: where it was attached, as that is called now. Where a mount went away it
// is only the part below that. Errors: ErrNotAttached.
func (k *Kernel) FilePath(name string) (string, error) {
	former, err := formerPath(name)
	return strings.TrimSuffix(former, deleted), err
}

func isMarked(info *unix.LoopInfo64) bool {
	return unix.ByteSliceToString(info.File_name[:]) == mark
}

// clear detaches the device, which the caller has claimed, and closes it. LOOP_CLR_FD itself never says that others have it open:
// then it has it end with the last of them, so that the device has a file also when this one has closed it, and clear returns
// ErrBusy. Its status would say so too, but asks the filesystem.
func (n node) clear() error {
	err := unix.IoctlSetInt(n.fd(), unix.LOOP_CLR_FD, 0)
	if errors.Is(err, unix.ENXIO) {
		err = nil
	}
	if err != nil {
		err = &fs.PathError{Op: "LOOP_CLR_FD", Path: n.name, Err: err}
	}
	if err := errors.Join(err, n.close()); err != nil {
		return err
	}
	if hasFile(n.name) {
		return ErrBusy
	}
	return nil
}

// restore gives the device the mark and the whole file, and keeps it from ending with its last user. It returns
// ErrBusy where a kernel does not change one that another process has claimed (6.18 still does), or has data to write
// first (EAGAIN, before 5.20).
func (n node) restore() error {
	info, err := n.status()
	if err != nil {
		return err
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	info.Offset, info.Sizelimit = 0, 0
	info.File_name = [unix.LO_NAME_SIZE]uint8{}
	copy(info.File_name[:], mark)
	discards := n.discards()
	err = unix.IoctlLoopSetStatus64(n.fd(), info)
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN):
		return ErrBusy
	case err != nil:
		return &fs.PathError{Op: "LOOP_SET_STATUS64", Path: n.name, Err: err}
	}
	if !discards && n.discards() {
		// Older kernels put all limits back.
		n.refuseDiscards()
	}
	return nil
}

// limit reads one of the limits that the kernel shows of a device's queue: "0" where
// it takes no such request.
func (n node) limit(name string) (string, error) {
	return readAttribute(unix.AT_FDCWD, n.limitPath(name))
}

func (n node) limitPath(name string) string { return path.Join(sysBlock, n.name, "queue", name) }

// discardLimit is how many bytes one discard may have.
const discardLimit = "discard_max_bytes"

func (n node) discards() bool {
	limit, err := n.limit(discardLimit)
	return err != nil || limit != "0"
}

// ignoring has the device refuse discards, and returns it as it is then. Where that
// cannot be set, sysfs being read-only, Device.Discard says so.
func (n node) ignoring() (Device, error) {
	// It takes the kernel some 20 ms to set it, and none to say that it is set.
	if n.discards() {
		n.refuseDiscards()
	}
	return n.inspect()
}

func (n node) refuseDiscards() {
	f, err := os.OpenFile(n.limitPath(discardLimit), os.O_WRONLY, 0)
	if err != nil {
		return
	}
	_, _ = f.WriteString("0")
	_ = f.Close()
}
