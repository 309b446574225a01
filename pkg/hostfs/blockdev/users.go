package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
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
	// Root is the root directory of the node, and empty for that of its first process.
	Root string
	// UnseenLoop is the same for loop devices.
	UnseenLoop func(name string) bool
}

// FindUsers searches for the users of devices: in the mount tables, descriptors and memory of all processes, in the
// loop devices, and in what the kernel serves to other machines. Devices are compared by their numbers, whatever the paths, the
// filesystems and the namespaces of their nodes are. What may not be looked at is ErrHidden. That holds for processes outside the
// namespace of this one too, unless the node is nested. A filesystem whose server is gone is not waited for: what is open on one is a
// device only if it has the kernel's name of one.
func (v View) FindUsers(of []Facts) (Users, error) {
	if space, err := os.Readlink("/proc/self/ns/pid"); err != nil || !v.Nested && space != initialPIDs {
		return Users{}, fmt.Errorf("processes of the host: %w (the process ids of this program are %s, %w)", ErrHidden, space, err)
	}
	s := newSearch(v, of)
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
	loops  []loop         // these, too
	users  Users
	mounts map[string]string // the process that a mount was found by
	tables map[uint64]bool   // the mount tables that were read, by what they sum up to; most processes share the host's
	seen   map[int]mount     // the mounts in them, by their numbers, which are one set for all namespaces
	seed   maphash.Seed
	buffer []byte
}

func newSearch(v View, of []Facts) *search {
	return &search{
		View: v, of: of, files: make(map[inode]bool), mounts: make(map[string]string), tables: make(map[uint64]bool), seen: make(map[int]mount),
		seed: maphash.MakeSeed(), buffer: make([]byte, 1<<16),
	}
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
		if err == nil {
			s.loops = append(s.loops, loop{f.Number, file, extentOf(filepath.Join(sysfs, f.Number.String()))})
		}
	}
	return nil
}

// A loop is a loop device with what it has of a file. The file may have several paths, and the kernel tells each device another one.
type loop struct {
	number Number
	file   backingFile
	part   extent
}

// shares says whether another loop device has some of the same file.
func (l loop) shares(other loop) bool {
	same := l.file.inode == other.file.inode || l.file.device != Number{} && l.file.device == other.file.device
	return same && l.number != other.number && l.part.overlaps(other.part)
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

// table reads the mounts that a process sees (proc_pid_mountinfo(5)), in memory that does not grow with them.
func (s *search) table(pid int) error {
	sum, err := s.sumOfTable(pid)
	if err != nil || s.tables[sum] {
		return allow(err)
	}
	s.tables[sum] = true
	err = s.eachMount(pid, func(m mount) error {
		s.seen[m.id] = m.remembered()
		return nil
	})
	if err != nil {
		return err
	}
	return s.eachMount(pid, func(m mount) error {
		used, err := s.mounted(m)
		if err != nil {
			return fmt.Errorf("mount %s: %w", m.place, err)
		}
		if used && s.mounts[m.place] == "" {
			s.mounts[m.place] = strconv.Itoa(pid)
		}
		return nil
	})
}

func openTable(pid int) (*os.File, error) { return os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid)) }

// sumOfTable distinguishes a table from others.
func (s *search) sumOfTable(pid int) (uint64, error) {
	file, err := openTable(pid)
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close() }()
	var sum maphash.Hash
	sum.SetSeed(s.seed)
	_, err = io.CopyBuffer(&sum, struct{ io.Reader }{file}, s.buffer)
	return sum.Sum64(), err
}

func (s *search) eachMount(pid int, do func(mount) error) error {
	file, err := openTable(pid)
	if err != nil {
		return allow(err)
	}
	defer func() { _ = file.Close() }()
	for m, err := range mountinfo.Each(file) {
		if err != nil && allow(err) == nil {
			return nil // the process has just ended
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrHidden, err)
		}
		if err := do(mountOf(pid, m)); err != nil {
			return err
		}
	}
	return nil
}

// mounted says whether a mount is of one of the devices, or of a node of one.
func (s *search) mounted(m mount) (bool, error) {
	for _, f := range s.of {
		// Btrfs has numbers of its own, and says itself what it is on; it holds its devices exclusively, so that this only says where. Of
		// others the source is what the process wrote that mounted them, which may be any, in a user namespace of its own.
		if m.on == f.Number.String() || m.kind == "btrfs" && strings.HasPrefix(m.source, "/dev/") && filepath.Base(m.source) == filepath.Base(f.Name) {
			return true, nil
		}
	}
	// What is mounted whole is a directory, and what is not in a filesystem is a namespace.
	if m.root == "/" || !strings.HasPrefix(m.root, "/") || m.nodev {
		return false, nil
	}
	// Nothing is published where no path leads to, and a process that uses what is there has it open.
	if m.far || len(m.path()) >= unix.PathMax {
		return false, nil
	}
	used, err := s.leads("mounts on "+s.server(m), func() (file, error) { return stat(unix.AT_FDCWD, m.path()) })
	if !unanswered(err) {
		return used, allow(err)
	}
	if m.remote() {
		return s.named(m.root), nil
	}
	return s.elsewhere(m)
}

// elsewhere looks at what is mounted below a directory whose server is gone through another mount of its filesystem.
func (s *search) elsewhere(m mount) (bool, error) {
	for _, other := range s.seen {
		below, inside := strings.CutPrefix(m.root, strings.TrimSuffix(other.root, "/")+"/")
		if other.id == m.id || other.on != m.on || other.far || !inside || m.cut {
			continue
		}
		used, err := s.leads("mounts on "+s.server(other), func() (file, error) { return statInside(other, below) })
		if err == nil {
			return used, nil
		}
	}
	return false, fmt.Errorf("%w: it is below a directory whose server is gone", ErrHidden)
}

// server is whom a path to a mount asks: that of the filesystem nearest to it that has one, or the mount itself.
func (s *search) server(m mount) string {
	at := m
	for range s.seen { // a parent may have gone, and its number be another one's
		if at.remote() {
			return at.on
		}
		parent, known := s.seen[at.parent]
		if !known {
			break
		}
		at = parent
	}
	return m.path()
}

// named says whether a path ends with the kernel's name of one of the devices.
func (s *search) named(path string) bool {
	return slices.ContainsFunc(s.of, func(f Facts) bool { return filepath.Base(path) == filepath.Base(f.Name) })
}

// leads says whether a file is one of the devices, or the file of one, unless its server has left such a question unanswered.
func (s *search) leads(server string, ask func() (file, error)) (bool, error) {
	f, err := servers.ask(server, ask)
	return s.is(f), err
}

// is says whether a file is one of the devices, or the file of one.
func (s *search) is(f file) bool {
	switch f.kind {
	case unix.S_IFBLK:
		return s.has(f.device)
	case unix.S_IFCHR:
		return s.hasCommands(f.device)
	}
	return s.files[f.inode]
}

// servers are the questions about files that have not been answered.
var servers = newQuestions[file]()

// A file is what the number of a device is known by.
type file struct {
	kind   uint16
	device Number
	inode  inode
}

// stat asks for the type and the numbers of a file, which never change: they need not be those of the server. The zero file is one
// that may not be seen.
func stat(at int, path string) (file, error) {
	var st unix.Statx_t
	err := unix.Statx(at, path, unix.AT_STATX_DONT_SYNC|unix.AT_EMPTY_PATH, unix.STATX_TYPE|unix.STATX_INO, &st)
	switch {
	case errors.Is(err, fs.ErrPermission) && ofOtherUser(path):
		return file{}, nil
	case err != nil:
		return file{}, err
	}
	return file{st.Mode & unix.S_IFMT, Number{st.Rdev_major, st.Rdev_minor}, inode{Number{st.Dev_major, st.Dev_minor}, st.Ino}}, nil
}

// ofOtherUser says whether a path is on a filesystem of FUSE that only another user may enter, for whom the kernel opens no device
// there. It does not ask the server then (fuse_statfs of linux/fs/fuse/inode.c).
func ofOtherUser(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.FUSE_SUPER_MAGIC
}

// descriptors looks for a device that a process has open for writing. One that only reads it loses nothing that is its own,
// and udev does so whenever a device was closed.
func (s *search) descriptors(pid int) error {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return allow(err)
	}
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(256) // a process may have a million
		for _, name := range names {
			device, err := s.descriptor(pid, name)
			if err != nil {
				return err
			}
			if device {
				s.users.Processes = append(s.users.Processes, describeProcess(pid))
				return nil
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return allow(err)
		}
	}
}

// descriptor says whether a descriptor is of one of the devices, and for writing. The mode of its link says the latter of all
// but those that neither read nor write: what fdinfo has besides grows with what the process does with it.
func (s *search) descriptor(pid int, name string) (bool, error) {
	link := fmt.Sprintf("/proc/%d/fd/%s", pid, name)
	info, err := os.Lstat(link)
	if err == nil && info.Mode().Perm()&0o600 == 0o400 {
		return false, nil
	}
	device, err := s.opens(link, func() (mount, bool) {
		open := describe(pid, name)
		on, known := s.seen[open.mount]
		if !known { // it has no place any more
			on = mount{on: fmt.Sprintf("mount %d", open.mount)}
		}
		return on, open.writes
	})
	if !device && err == nil {
		device, err = s.registered(pid, name)
	}
	return device && !ours(pid), err
}

// opens says whether a link of a process leads to one of the devices. What has no path, as a socket, is none, nor what is not asked
// for after all. A file that is open is asked of its filesystem without a name, and NFS asks its server even so.
func (s *search) opens(link string, where func() (on mount, asked bool)) (bool, error) {
	to, err := os.Readlink(link)
	if err == nil && !strings.HasPrefix(to, "/") {
		return false, nil
	}
	if err != nil && !errors.Is(err, unix.ENAMETOOLONG) {
		return false, allow(err)
	}
	on, asked := where()
	if !asked {
		return false, nil
	}
	server := "files on " + on.on
	device, err := s.leads(server, func() (file, error) { return stat(unix.AT_FDCWD, link) })
	switch late := unanswered(err); {
	case late && (on.kind != "" && on.remote() || on.kind == "" && (!errors.Is(err, hang.ErrTimeout) || servers.silent(server) > gone)):
		return s.named(to), nil
	case late: // this machine may just be slow
		return false, fmt.Errorf("%w: %s: %w", ErrHidden, to, err)
	}
	return device, allow(err)
}

// unanswered says that a filesystem did not say what a file is: it hangs, or has an error for a server that is gone (ENOTCONN, ESTALE).
func unanswered(err error) bool {
	return err != nil && !errors.Is(err, fs.ErrPermission) && allow(err) != nil
}

// gone is after what time a filesystem of unknown type that does not answer is one whose server is gone: no other lets a file that is
// open wait.
const gone = 20 * time.Second

// A descriptor is what is known of one without asking its filesystem (proc_pid_fdinfo(5)).
type descriptor struct {
	writes bool
	mount  int
}

func describe(pid int, name string) descriptor {
	content, err := readStart(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, name))
	field := func(key string) string {
		_, after, _ := strings.Cut(string(content), key+":\t")
		value, _, _ := strings.Cut(after, "\n")
		return value
	}
	flags, flagsErr := strconv.ParseUint(field("flags"), 8, 32)
	mount, mountErr := strconv.Atoi(field("mnt_id"))
	return descriptor{errors.Join(err, flagsErr, mountErr) != nil || flags&unix.O_ACCMODE != unix.O_RDONLY, mount}
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

// readStart reads what a file of the kernel begins with.
func readStart(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	start := make([]byte, 512)
	n, err := file.Read(start)
	return start[:n], err
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
	// It is locked while the process waits for a server in a call that changes it.
	shared, err := memories.ask(strconv.Itoa(pid), func() ([]mapping, error) { return sharedMappings(pid) })
	if errors.Is(err, hang.ErrTimeout) {
		return fmt.Errorf("%w: its memory: %w", ErrHidden, err)
	}
	if err != nil {
		return allow(err)
	}
	for _, m := range shared {
		device, err := s.opens(m.link(pid), func() (mount, bool) { return s.filesystem(m), true })
		if err != nil {
			return err
		}
		if device {
			s.users.Processes = append(s.users.Processes, describeProcess(pid))
			return nil
		}
	}
	return nil
}

// memories are those of processes that have not been answered for.
var memories = newQuestions[[]mapping]()

// filesystem is a mount of that which the file of a mapping is on.
func (s *search) filesystem(of mapping) mount {
	for _, m := range s.seen {
		if of.known && m.on == of.on.String() {
			return m
		}
	}
	return mount{on: fmt.Sprintf("memory %s", of.on)}
}

// searchLoops asks each loop device for the number of its file (LOOP_GET_STATUS64).
func (s *search) searchLoops() error {
	attached, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, file := range attached {
		name := filepath.Base(filepath.Dir(filepath.Dir(file)))
		if s.UnseenLoop != nil && s.UnseenLoop(name) {
			continue
		}
		on, err := asked.ask(name, func() (backingFile, error) { return backing(name) })
		switch {
		case errors.Is(err, unix.ENXIO), errors.Is(err, fs.ErrNotExist) && attribute(filepath.Dir(file), "backing_file") == "":
			continue // it has just been detached, and perhaps removed
		case errors.Is(err, hang.ErrTimeout) && !strings.HasPrefix(attribute(filepath.Dir(file), "backing_file"), "/dev/"):
			// The kernel asks the filesystem of the file, and that of a node of a device asks no other machine or program. The
			// answer that does not come keeps no other device from being cleaned.
			continue
		case err != nil:
			// A refusal says nothing of the file: a security module may refuse that of a node of a device.
			return fmt.Errorf("loop device %s on %s: %w: %w; it may be a user of any device: see what uses it, and detach it by losetup -d /dev/%s",
				name, attribute(filepath.Dir(file), "backing_file"), ErrHidden, err, name)
		}
		dir := filepath.Dir(filepath.Dir(file))
		other := loop{numberOf(dir), on, extentOf(dir)}
		if s.has(on.device) || !s.has(other.number) && slices.ContainsFunc(s.loops, other.shares) {
			s.users.Loops = append(s.users.Loops, name)
		}
	}
	return nil
}

// asked are the loop devices that have not answered yet.
var asked = newQuestions[backingFile]()

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
