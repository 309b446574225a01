package clone

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// ErrGone reports an entry that was removed or replaced since it was listed.
var ErrGone = errors.New("gone meanwhile")

// ErrLeased reports a file that a process has a write lease of (fcntl(2), F_SETLEASE). Opening it would take until it
// gives that up.
var ErrLeased = errors.New("a process has a write lease of the file")

// ErrMounted reports that something is mounted in the source, so that what is below cannot be seen.
var ErrMounted = errors.New("something is mounted in the source")

// attempts are how often an entry is copied that changes each time meanwhile.
const attempts = 8

// A source is an entry that is copied, as it was when it was last looked at.
type source struct {
	in   *dir.Dir
	name string
	st   *unix.Stat_t
}

func (s source) String() string { return s.in.String() + "/" + s.name }

func (s source) wrap(op string, err error) error {
	if errors.Is(err, unix.ENOENT) {
		return ErrGone
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: s.String(), Err: err}
	}
	return nil
}

func stat(in *dir.Dir, name string) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	if err := unix.Fstatat(in.Fd(), name, st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: in.String() + "/" + name, Err: err}
	}
	return st, nil
}

// Mounted is the ErrMounted of an entry.
func Mounted(in *dir.Dir, name string) error { return fmt.Errorf("%w: %s/%s", ErrMounted, in, name) }

func statSelf(d *dir.Dir) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	if err := unix.Fstat(d.Fd(), st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: d.String(), Err: err}
	}
	return st, nil
}

// An entryCopier copies single entries.
type entryCopier struct {
	method   Method
	maxStall Limit
	pause    func(context.Context) error

	// Of the pass.
	start  moment // unset if nothing is checked
	ctx    context.Context
	synced bool // all was written to the disk right before

	stall   time.Duration // the longest so far
	torn    bool          // the attributes of a file changed during each attempt
	watch   *watch        // of a file that changes; nil before the first
	buffers xattrBuffers
	data    []byte // what is read goes through it
}

// next is before each step of a copy.
func (e *entryCopier) next() error {
	if e.pause != nil {
		if err := e.pause(e.ctx); err != nil {
			return err
		}
	}
	return e.ctx.Err()
}

// make copies an entry that is no directory to a name that is free.
func (e *entryCopier) make(from source, to *dir.Dir, name string) error {
	switch from.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return e.makeFile(from, to, name)
	case unix.S_IFDIR: // by now
		return ErrGone
	}
	return e.makeNode(from, to, name)
}

// makeNode copies what is never opened: a link, a FIFO, a socket or a device. It is copied until it is the same before and
// after, so that nothing is taken of another that has its name by now.
func (e *entryCopier) makeNode(from source, to *dir.Dir, name string) error {
	for range attempts {
		err := e.makeNodeOnce(from, to, name)
		now, statErr := stat(from.in, from.name)
		switch {
		case errors.Is(err, ErrGone), errors.Is(statErr, fs.ErrNotExist),
			statErr == nil && now.Mode&unix.S_IFMT != from.st.Mode&unix.S_IFMT:
			return errors.Join(ErrGone, remove(e.ctx, to, name))
		case statErr != nil, !e.start.set, unchanged(from.st, now):
			return errors.Join(err, statErr)
		}
		from.st = now
		if err := remove(e.ctx, to, name); err != nil {
			return err
		}
	}
	return e.makeNodeOnce(from, to, name) // it counts as changed
}

func (e *entryCopier) makeNodeOnce(from source, to *dir.Dir, name string) error {
	if from.st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return e.makeSymlink(from, to, name)
	}
	if err := unix.Mknodat(to.Fd(), name, from.st.Mode, int(from.st.Rdev)); err != nil {
		return &fs.PathError{Op: "mknod", Path: to.String() + "/" + name, Err: err}
	}
	return e.nodeAttributes(from.st, xattr.Of(from.in, from.name), from.String(), to, name)
}

// unchanged says that two looks were at the same entry, to which nothing happened in between that its clock shows.
func unchanged(before, after *unix.Stat_t) bool {
	return before.Ino == after.Ino && before.Dev == after.Dev && before.Ctim == after.Ctim
}

// makeFile copies a regular file as it is at one moment: its content with the owner, mode and attributes that it has with
// it. If it has changed since the pass began its ctime does not tell, for clocks are coarse and it may change
// all the time: then its attributes are watched while it is copied. What is read and written is no copy of one
// moment then, and found out by check.
func (e *entryCopier) makeFile(from source, to *dir.Dir, name string) error {
	src, err := OpenRegular(from.in, from.name, from.st)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(src) }() // opened for reading: nothing can be lost
	err = e.makeFileOnce(from, src, to, name)
	if err != nil || !e.start.set || e.method == Copy {
		return err
	}
	var after unix.Stat_t
	if err := unix.Fstat(src, &after); err != nil {
		return from.wrap("stat", err)
	}
	if unchanged(from.st, &after) && e.start.follows(&after) {
		return nil
	}
	if e.watch == nil {
		e.watch, err = newWatch()
	}
	if err == nil {
		var end func()
		if end, err = e.watch.begin(src); err == nil {
			defer end()
		}
	}
	if err != nil { // there are too many on this node: nothing can be said of the file
		e.torn = true
		return nil
	}
	return e.makeWatched(from, src, to, name)
}

func (e *entryCopier) makeWatched(from source, src int, to *dir.Dir, name string) error {
	for range attempts {
		if err := remove(e.ctx, to, name); err != nil {
			return err
		}
		if err := e.makeFileOnce(from, src, to, name); err != nil {
			return err
		}
		changed, err := e.watch.changed()
		if err != nil {
			return fmt.Errorf("watch %s: %w", from, err)
		}
		if !changed {
			return nil
		}
	}
	e.torn = true
	return nil
}

func (e *entryCopier) makeFileOnce(from source, src int, to *dir.Dir, name string) error {
	AwaitCalls(src)
	if err := unix.Fstat(src, from.st); err != nil {
		return from.wrap("stat", err)
	}
	dst, err := unix.Openat(to.Fd(), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &fs.PathError{Op: "create", Path: to.String() + "/" + name, Err: err}
	}
	err = e.fill(dst, src, from)
	if closeErr := unix.Close(dst); err == nil && closeErr != nil {
		err = &fs.PathError{Op: "close", Path: to.String() + "/" + name, Err: closeErr}
	}
	if err != nil {
		return err
	}
	return setTimes(to, name, from.st)
}

// AwaitCalls waits for the system calls that change a file now. The kernel sets the ctime when a write begins, once, under
// the lock of the file which it holds until the write ends: so what a copy lacks that is made from now on has a ctime of now or
// later. Taking off an attribute takes that lock too, before it finds that no filesystem has such attributes.
func AwaitCalls(fd int) { _ = unix.Fremovexattr(fd, "none.none") }

func (e *entryCopier) fill(dst, src int, from source) error {
	var err error
	switch {
	case from.st.Size == 0: // one that has grown since AwaitCalls has changed
	case e.method == Share:
		err = e.share(dst, src, from)
	default:
		err = e.read(dst, src, from)
	}
	if err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return e.fileAttributes(dst, from.st, xattr.Descriptor(src), from.String())
}

// fileAttributes gives what is open those of another, but its times.
func (e *entryCopier) fileAttributes(dst int, st *unix.Stat_t, from xattr.Holder, path string) error {
	if err := SetOwner(dst, st); err != nil {
		return fmt.Errorf("copy the owner and mode of %s: %w", path, err)
	}
	return e.buffers.copy(from, xattr.Descriptor(dst), path)
}

// flush writes the data of a file to its disk, and nothing else: not the log of the filesystem, where others have
// theirs too. Before the first pass all is synced.
func (e *entryCopier) flush(fd int) error {
	if e.synced {
		return nil
	}
	return unix.SyncFileRange(fd, 0, 0, unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
}

func (e *entryCopier) read(dst, src int, from source) error {
	if err := e.flush(src); err != nil {
		return err
	}
	if e.data == nil {
		e.data = make([]byte, bufferBytes)
	}
	return copyData(dst, src, e.next, e.data)
}

// share shares the blocks of a file, if that does not stop its writers for too long.
func (e *entryCopier) share(dst, src int, from source) error {
	if err := e.refuseFragmented(src, from); err != nil {
		return err
	}
	if err := e.flush(src); err != nil { // sharing would do it too, but have writers wait for that
		return err
	}
	began := time.Now()
	err := share(dst, src)
	e.stall = max(e.stall, time.Since(began))
	return err
}

func (e *entryCopier) refuseFragmented(src int, from source) error {
	if !e.maxStall.mayExceed(from.st.Size) {
		return nil
	}
	return e.maxStall.check(xattr.Descriptor(src), from.String())
}

// OpenRegular opens a regular file for reading that was looked at before. It returns ErrGone if something else has its name by
// now, and ErrLeased. A pod that writes to the source may put a device there at any time, and opening one can do harm: so the entry
// itself is opened first, which has no effect (open(2), O_PATH).
func OpenRegular(in *dir.Dir, name string, st *unix.Stat_t) (int, error) {
	from := source{in, name, st}
	path, err := unix.Openat(from.in.Fd(), from.name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, from.wrap("open", err)
	}
	defer func() { _ = unix.Close(path) }()
	var now unix.Stat_t
	if err := unix.Fstat(path, &now); err != nil {
		return 0, from.wrap("stat", err)
	}
	if now.Mode&unix.S_IFMT != unix.S_IFREG || now.Ino != st.Ino || now.Dev != st.Dev {
		return 0, ErrGone
	}
	// O_NONBLOCK: the holder of a write lease would have the caller wait (fcntl(2), F_SETLEASE).
	const flags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Open(dir.HandlePath(path), flags|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // neither owner nor CAP_FOWNER
		fd, err = unix.Open(dir.HandlePath(path), flags, 0)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return 0, fmt.Errorf("open %s: %w", from, ErrLeased)
	}
	if err != nil {
		return 0, from.wrap("open", err)
	}
	return fd, nil
}

func readlink(from source) (string, error) {
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(from.in.Fd(), from.name, target)
	if errors.Is(err, unix.EINVAL) {
		return "", ErrGone
	}
	if err != nil {
		return "", from.wrap("readlink", err)
	}
	return string(target[:n]), nil
}

func (e *entryCopier) makeSymlink(from source, to *dir.Dir, name string) error {
	target, err := readlink(from)
	if err != nil {
		return err
	}
	if err := unix.Symlinkat(target, to.Fd(), name); err != nil {
		return &fs.PathError{Op: "symlink", Path: to.String() + "/" + name, Err: err}
	}
	return e.nodeAttributes(from.st, xattr.Of(from.in, from.name), from.String(), to, name)
}

// nodeAttributes gives what is not opened those of another.
func (e *entryCopier) nodeAttributes(st *unix.Stat_t, from xattr.Holder, path string, to *dir.Dir, name string) error {
	err := unix.Fchownat(to.Fd(), name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFLNK {
		err = unix.Fchmodat(to.Fd(), name, st.Mode&0o7777, 0)
	}
	if err != nil {
		return fmt.Errorf("copy the owner and mode of %s: %w", path, err)
	}
	if err := e.buffers.copy(from, xattr.Of(to, name), path); err != nil {
		return err
	}
	return setTimes(to, name, st)
}

// attributes copies those of a directory, until they are the same before and after. Of one that changes all the
// time they may be of different moments: it counts as changed.
func (e *entryCopier) attributes(src, dst *dir.Dir) error {
	from, err := src.ReadFd()
	if err != nil {
		return err
	}
	to, err := dst.ReadFd()
	if err != nil {
		return err
	}
	before, err := statSelf(src)
	for range attempts {
		if err != nil {
			return err
		}
		if err := e.fileAttributes(to, before, xattr.Descriptor(from), src.String()); err != nil {
			return err
		}
		if err := setTimes(dst, ".", before); err != nil {
			return err
		}
		var after *unix.Stat_t
		if after, err = statSelf(src); err == nil && unchanged(before, after) {
			return nil
		}
		before = after
	}
	return err
}

// SetOwner sets owner and mode where they differ: each is a transaction. The order
// matters, since a change of the owner takes setuid and setgid off (chown(2)).
func SetOwner(fd int, want *unix.Stat_t) error {
	var is unix.Stat_t
	if err := unix.Fstat(fd, &is); err != nil {
		return err
	}
	if is.Uid != want.Uid || is.Gid != want.Gid {
		if err := unix.Fchown(fd, int(want.Uid), int(want.Gid)); err != nil {
			return err
		}
	}
	if is.Mode&0o7777 == want.Mode&0o7777 && is.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 {
		return nil
	}
	return unix.Fchmod(fd, want.Mode&0o7777)
}

func timesOf(st *unix.Stat_t) []unix.Timespec { return []unix.Timespec{st.Atim, st.Mtim} }

func setTimes(in *dir.Dir, name string, st *unix.Stat_t) error {
	if err := unix.UtimesNanoAt(in.Fd(), name, timesOf(st), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "utimens", Path: in.String() + "/" + name, Err: err}
	}
	return nil
}

// xattrBuffers are as large as names and values can be (xattr.Max).
type xattrBuffers struct{ names, others, value []byte }

// copy gives to all extended attributes that from has, and takes all others off it: ACLs, capabilities and
// labels are such, too. What is new has some of its directory, as an ACL from the default one.
func (b *xattrBuffers) copy(from, to xattr.Holder, path string) error {
	b.make()
	names, err := xattr.Listed(from, b.names)
	if errors.Is(err, unix.ENOENT) {
		return ErrGone
	}
	if err != nil {
		return &fs.PathError{Op: "listxattr", Path: path, Err: err}
	}
	if err := b.takeOthers(to, names, path); err != nil {
		return err
	}
	for name := range xattr.Each(names) {
		if err := b.copyOne(from, to, name); err != nil {
			return &fs.PathError{Op: "copy the attribute " + name + " of", Path: path, Err: err}
		}
	}
	return nil
}

func (b *xattrBuffers) make() {
	if b.names == nil {
		b.names, b.others, b.value = make([]byte, xattr.Max), make([]byte, xattr.Max), make([]byte, xattr.Max)
	}
}

// takeOthers takes all attributes off an entry that are not among the names.
func (b *xattrBuffers) takeOthers(to xattr.Holder, names []byte, path string) error {
	has, err := xattr.Listed(to, b.others)
	if err != nil {
		return &fs.PathError{Op: "listxattr of the copy of", Path: path, Err: err}
	}
	if len(has) == 0 {
		return nil
	}
	wanted := map[string]bool{xattr.SELinuxLabel: true}
	for name := range xattr.Each(names) {
		wanted[name] = true
	}
	for name := range xattr.Each(has) {
		if wanted[name] {
			continue
		}
		if err := xattr.TakeOff(to, name); err != nil {
			return &fs.PathError{Op: "take the attribute " + name + " off the copy of", Path: path, Err: err}
		}
	}
	return nil
}

func (b *xattrBuffers) copyOne(from, to xattr.Holder, name string) error {
	n, err := from.Get(name, b.value)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOENT) { // removed meanwhile
		return xattr.TakeOff(to, name)
	}
	if err != nil {
		return err
	}
	return to.Set(name, b.value[:n])
}

// remove removes an entry of the copy. A file gives its blocks back first: XFS counts them until some time after the last name is
// gone, and there may be no room for them and those of the next copy.
func remove(ctx context.Context, in *dir.Dir, name string) error {
	if st, err := stat(in, name); err == nil && st.Nlink == 1 {
		if err := giveBack(in, name, st); err != nil {
			return err
		}
	}
	return removeTree(ctx, in, name)
}

// removeLinked is remove also for a file that has other names, which are removed later.
func removeLinked(ctx context.Context, in *dir.Dir, name string) error {
	if st, err := stat(in, name); err == nil {
		if err := giveBack(in, name, st); err != nil {
			return err
		}
	}
	return removeTree(ctx, in, name)
}

func giveBack(in *dir.Dir, name string, st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	fd, err := unix.Openat(in.Fd(), name, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "truncate", Path: in.String() + "/" + name, Err: err}
	}
	_ = unix.Close(fd) // nothing was written
	return nil
}

func removeTree(ctx context.Context, in *dir.Dir, name string) error {
	return dir.RemoveTree(ctx, in, name, func(ctx context.Context) error { return ctx.Err() })
}
