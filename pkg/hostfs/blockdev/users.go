package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
)

// ErrHidden is for a user of devices that may not be looked at: nothing is known of what it uses.
var ErrHidden = errors.New("may not be looked at")

// initialPIDs is the namespace of all processes of a machine (PROC_PID_INIT_INO of linux/proc_ns.h).
const initialPIDs = "pid:[4026531836]"

// Users are those of devices whom an exclusive open does not keep away, and whom it is not kept away by.
type Users struct {
	// Mounts are the places where a device or a node of it is mounted, Processes those that have one open for writing, Loops
	// the loop devices on one, and Targets what the kernel serves one as.
	Mounts, Processes, Loops, Targets []string
}

// A View is what is seen of the processes of a machine. The zero View is all of them.
type View struct {
	// Nested is the view of a node that is a container itself: its own processes are all that is known of.
	Nested bool
	// Unseen are processes that are known to use no device, so that they need not be looked at; nil for none.
	Unseen func(pid int) bool
}

// FindUsers searches for the users of devices: in the mount tables, descriptors and memory of all processes, in the
// loop devices, and in what the kernel serves to other machines. Devices are compared by their numbers, whatever the paths, the
// filesystems and the namespaces of their nodes are. What may not be looked at is ErrHidden. That holds for processes outside the
// namespace of this one too, unless the node is nested.
func (v View) FindUsers(of []Facts) (Users, error) {
	if space, err := os.Readlink("/proc/self/ns/pid"); err != nil || !v.Nested && space != initialPIDs {
		return Users{}, fmt.Errorf("processes of the host: %w (the process ids of this program are %s, %w)", ErrHidden, space, err)
	}
	s := search{View: v, of: of, files: make(map[inode]bool), mounts: make(map[string]string), tables: make(map[string]bool)}
	if err := s.findFiles(); err != nil {
		return Users{}, err
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return Users{}, err
	}
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || pid == os.Getpid() || v.Unseen != nil && v.Unseen(pid) {
			continue
		}
		if err := s.process(pid); err != nil {
			return Users{}, fmt.Errorf("process %d: %w", pid, err)
		}
	}
	if err := s.table(os.Getpid()); err != nil {
		return Users{}, err
	}
	if err := s.searchTargets(); err != nil {
		return Users{}, fmt.Errorf("devices that the kernel serves to other machines: %w", err)
	}
	err = s.searchLoops()
	return s.found(), err
}

// A search is one for the users of some devices.
type search struct {
	View
	of     []Facts
	files  map[inode]bool // of those that are loop devices
	users  Users
	mounts map[string]string // the process that a mount was found by
	tables map[string]bool   // the mount tables that were read; most processes share the host's
}

func (s *search) found() Users {
	for place, process := range s.mounts {
		s.users.Mounts = append(s.users.Mounts, fmt.Sprintf("%s (process %s)", place, process))
	}
	slices.Sort(s.users.Mounts)
	return s.users
}

// An inode is a file, whatever paths lead to it.
type inode struct {
	on     Number
	number uint64
}

// findFiles asks those of the devices that are loop devices for their files: what is written there is on the device.
func (s *search) findFiles() error {
	for _, f := range s.of {
		if attribute(filepath.Join(sysfs, f.Number.String()), "loop/backing_file") == "" {
			continue
		}
		file, err := backing(f.Name)                   // which hangs where the device does
		if err != nil && !errors.Is(err, unix.ENXIO) { // then it has just been detached
			return fmt.Errorf("loop device %s: %w: %w", f.Name, ErrHidden, err)
		}
		s.files[file.inode] = err == nil
	}
	return nil
}

func (s *search) has(n Number) bool {
	return slices.ContainsFunc(s.of, func(f Facts) bool { return f.Number == n })
}

func (s *search) hasCommands(n Number) bool {
	return slices.ContainsFunc(s.of, func(f Facts) bool { return slices.Contains(f.Commands, n) })
}

// process looks at the threads of a process: each may have descriptors and mounts of its own, and the first one, which has the
// number of the process, may have ended and have nothing any more while the others go on.
func (s *search) process(pid int) error {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return allow(err)
	}
	last := 0
	for _, t := range threads {
		thread, err := strconv.Atoi(t.Name())
		if err != nil || last != 0 && alike(last, thread) {
			continue
		}
		last = thread
		if err := errors.Join(s.table(thread), s.descriptors(thread), s.memory(thread)); err != nil {
			return err
		}
	}
	return nil
}

// alike says whether two threads of a process are known to share all descriptors and mounts (kcmp(2)); their memory they always do,
// until one ends.
func alike(one, other int) bool {
	const fs, files = 3, 2 // KCMP_FS and KCMP_FILES of linux/kcmp.h
	for _, kind := range []uintptr{files, fs} {
		if order, _, err := unix.Syscall6(unix.SYS_KCMP, uintptr(one), uintptr(other), kind, 0, 0, 0); err != 0 || order != 0 {
			return false
		}
	}
	return true
}

// allow leaves out what has just ended, and says of what is refused that it is hidden.
func allow(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTDIR):
		return nil
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %w", ErrHidden, err)
	}
	return err
}

// table reads the mounts that a process sees (proc_pid_mountinfo(5)).
func (s *search) table(pid int) error {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil || s.tables[string(content)] {
		return allow(err)
	}
	s.tables[string(content)] = true
	for line := range strings.Lines(string(content)) {
		before, after, ok := strings.Cut(line, " - ")
		fields, last := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 6 || len(last) < 2 {
			return fmt.Errorf("mount table: %w: %q", ErrHidden, line)
		}
		used, err := s.mounted(pid, fields, last)
		if err != nil {
			return fmt.Errorf("mount %s: %w", fields[4], err)
		}
		if used && s.mounts[fields[4]] == "" {
			s.mounts[fields[4]] = strconv.Itoa(pid)
		}
	}
	return nil
}

// mounted says whether a mount is of one of the devices, or of a node of one.
func (s *search) mounted(pid int, fields, last []string) (bool, error) {
	for _, f := range s.of {
		// Btrfs has numbers of its own; it holds its devices exclusively, so that this only says where.
		if fields[2] == f.Number.String() || strings.HasPrefix(last[1], "/dev/") && filepath.Base(last[1]) == filepath.Base(f.Name) {
			return true, nil
		}
	}
	// What is mounted whole is a directory, and what is not in a filesystem is a namespace.
	if root := fields[3]; root == "/" || !strings.HasPrefix(root, "/") || slices.Contains(strings.Split(fields[5], ","), "nodev") {
		return false, nil
	}
	used, err := s.leads(fmt.Sprintf("/proc/%d/root%s", pid, unescape(fields[4])))
	return used, allow(err)
}

// leads says whether a path of some process leads to one of the devices, or to the file of one. The type and the numbers of a file
// never change: no server is asked for those, which may be gone, but it may be for a name on the way.
func (s *search) leads(path string) (bool, error) {
	return s.is(unix.AT_FDCWD, path)
}

// is says whether a file is one of the devices, or the file of one.
func (s *search) is(at int, path string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(at, path, unix.AT_STATX_DONT_SYNC|unix.AT_EMPTY_PATH, unix.STATX_TYPE|unix.STATX_INO, &st)
	switch {
	case errors.Is(err, fs.ErrPermission) && ofOtherUser(path):
		return false, nil
	case err != nil:
		return false, err
	}
	switch number := (Number{st.Rdev_major, st.Rdev_minor}); st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return s.has(number), nil
	case unix.S_IFCHR:
		return s.hasCommands(number), nil
	}
	return s.files[inode{Number{st.Dev_major, st.Dev_minor}, st.Ino}], nil
}

// ofOtherUser says whether a path is on a filesystem of FUSE that only another user may enter, for whom the kernel opens no device
// there. It does not ask the server then (fuse_statfs of linux/fs/fuse/inode.c).
func ofOtherUser(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.FUSE_SUPER_MAGIC
}

// unescape reads a path of a mount table: spaces and the like are octal there.
func unescape(path string) string {
	var text strings.Builder
	for at := 0; at < len(path); at++ {
		if path[at] == '\\' && at+4 <= len(path) {
			if c, err := strconv.ParseUint(path[at+1:at+4], 8, 8); err == nil {
				text.WriteByte(byte(c))
				at += 3
				continue
			}
		}
		text.WriteByte(path[at])
	}
	return text.String()
}

// descriptors looks for a device that a process has open for writing. One that only reads it loses nothing that is its own,
// and udev does so whenever a device was closed.
func (s *search) descriptors(pid int) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return allow(err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		device, err := s.opens(path)
		if err != nil {
			return err
		}
		if device && writes(pid, e.Name()) && !ours(pid) {
			s.users.Processes = append(s.users.Processes, describeProcess(pid))
			return nil
		}
	}
	return nil
}

// opens says whether a link of a process leads to one of the devices. What has no path, as a socket, is none.
func (s *search) opens(link string) (bool, error) {
	to, err := os.Readlink(link)
	if err == nil && !strings.HasPrefix(to, "/") {
		return false, nil
	}
	if err != nil && !errors.Is(err, unix.ENAMETOOLONG) {
		return false, allow(err)
	}
	device, err := s.leads(link)
	return device, allow(err)
}

// writes says whether a descriptor is open for writing, as far as is known (proc_pid_fdinfo(5)).
func writes(pid int, descriptor string) bool {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, descriptor))
	_, after, found := bytes.Cut(content, []byte("flags:\t"))
	line, _, _ := bytes.Cut(after, []byte("\n"))
	flags, parseErr := strconv.ParseUint(string(line), 8, 32)
	return err != nil || !found || parseErr != nil || flags&unix.O_ACCMODE != unix.O_RDONLY
}

// ours says whether a process is a child of this one, which has its descriptors until it executes a program.
func ours(pid int) bool {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := bytes.Cut(content, []byte(") "))
	fields := bytes.Fields(after)
	if err != nil || len(fields) < 2 || string(fields[1]) != strconv.Itoa(os.Getpid()) {
		return false
	}
	its, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	own, ownErr := os.Readlink("/proc/self/exe")
	return err == nil && ownErr == nil && its == own
}

func describeProcess(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return strconv.Itoa(pid)
	}
	return fmt.Sprintf("%d (%s)", pid, bytes.TrimSpace(name))
}

// memory looks for a device that a process has mapped and opened for writing: its descriptor may be closed, and what may not be
// written there yet may after mprotect(2).
func (s *search) memory(pid int) error {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return allow(err)
	}
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || !strings.HasSuffix(fields[1], "s") {
			continue
		}
		link := fmt.Sprintf("/proc/%d/map_files/%s", pid, fields[0])
		device, err := s.opens(link)
		if err != nil {
			return err
		}
		if device && opensForWriting(link) {
			s.users.Processes = append(s.users.Processes, describeProcess(pid))
			return nil
		}
	}
	return nil
}

// opensForWriting says whether the file of a mapping was opened for writing, which the mode of its link is by
// (proc_map_files_instantiate of linux/fs/proc/base.c), as far as is known.
func opensForWriting(link string) bool {
	info, err := os.Lstat(link)
	return err != nil || info.Mode().Perm()&0o200 != 0
}

// searchLoops asks each loop device for the number of its file (LOOP_GET_STATUS64).
func (s *search) searchLoops() error {
	attached, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, file := range attached {
		name := filepath.Base(filepath.Dir(filepath.Dir(file)))
		on, err := asked.backing(name)
		switch {
		case errors.Is(err, unix.ENXIO), errors.Is(err, fs.ErrNotExist) && attribute(filepath.Dir(file), "backing_file") == "":
			continue // it has just been detached, and perhaps removed
		case errors.Is(err, hang.ErrTimeout) && !strings.HasPrefix(attribute(filepath.Dir(file), "backing_file"), "/dev/"):
			// The kernel asks the filesystem of the file, and that of a node of a device asks no other machine or program. The
			// answer that does not come keeps no other device from being cleaned.
			continue
		case err != nil:
			return fmt.Errorf("loop device %s: %w: %w", name, ErrHidden, err)
		}
		if s.has(on.device) {
			s.users.Loops = append(s.users.Loops, name)
		}
	}
	return nil
}

// patience is how long a loop device may take to answer.
const patience = 2 * time.Second

// asked are the loop devices that have not answered yet: they are not asked again meanwhile.
var asked = questions{overdue: make(map[string]*hang.Call[backingFile])}

type questions struct {
	mu      sync.Mutex
	overdue map[string]*hang.Call[backingFile]
}

func (q *questions) backing(name string) (backingFile, error) {
	q.mu.Lock()
	before := q.overdue[name]
	q.mu.Unlock()
	if before != nil {
		if _, err := before.Wait(context.Background(), time.Millisecond); errors.Is(err, hang.ErrTimeout) {
			return backingFile{}, err
		}
	}
	call := hang.Start(func() (backingFile, error) { return backing(name) })
	on, err := call.Wait(context.Background(), patience)
	q.mu.Lock()
	defer q.mu.Unlock()
	if delete(q.overdue, name); errors.Is(err, hang.ErrTimeout) {
		q.overdue[name] = call
	}
	return on, err
}

// A backingFile is the file of a loop device; the device is zero for a regular one.
type backingFile struct {
	device Number
	inode  inode
}

func backing(name string) (backingFile, error) {
	fd, err := unix.Open("/dev/"+name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return backingFile{}, &fs.PathError{Op: "open", Path: "/dev/" + name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return backingFile{}, err
	}
	dev, err := os.ReadFile("/sys/block/" + name + "/dev")
	if err != nil {
		return backingFile{}, unix.ENXIO
	}
	if at, err := number(name, &st); err != nil || at.String() != strings.TrimSpace(string(dev)) {
		return backingFile{}, fmt.Errorf("/dev/%s is another device", name)
	}
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil {
		return backingFile{}, err
	}
	return backingFile{
		device: Number{unix.Major(info.Rdevice), unix.Minor(info.Rdevice)},
		inode:  inode{Number{unix.Major(info.Device), unix.Minor(info.Device)}, info.Inode},
	}, nil
}
