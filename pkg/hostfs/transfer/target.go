package transfer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

type targetKind int

const (
	aFile targetKind = iota
	aNode
	aDirectory
)

// A target is an entry that is being made equal to one of the source.
type target struct {
	kind   targetKind
	id     uint64 // of a file
	failed bool   // there was no room: the rest of it is ignored
	lost   bool   // so it was for its directory
	pushed bool
	fresh  bool // a file that was made empty
	based  bool // a file that is as in the base

	fd   int      // of a file
	dir  int      // of a directory, not closed
	in   *dir.Dir // of a node, with its name: it is the current directory
	name string
	path string // for messages

	want     *unix.Stat_t
	holder   xattr.Holder
	names    strings.Builder // of the attributes that were set, each with a NUL after it
	next     int64           // what of a file was not asked for yet
	finished bool            // its attributes were set
}

func (t *target) close() {
	if t.fd != notOpen {
		_ = unix.Close(t.fd) // what was written is made durable as a whole
	}
	t.fd = notOpen
}

func wrap(op, path string, err error) error {
	if err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// setTimes sets those that differ. An mtime that the filesystem cannot have is an error of each pass: the last one is too late.
func setTimes(in int, name string, flags int, want *unix.Stat_t, path string) error {
	var is unix.Stat_t
	if err := unix.Fstatat(in, name, &is, flags); err != nil {
		return wrap("stat", path, err)
	}
	if is.Atim == want.Atim && is.Mtim == want.Mtim {
		return nil
	}
	times := []unix.Timespec{want.Atim, want.Mtim}
	if err := unix.UtimesNanoAt(in, name, times, flags); err != nil {
		return wrap("set the times of", path, err)
	}
	if err := unix.Fstatat(in, name, &is, flags); err != nil {
		return wrap("stat", path, err)
	}
	if is.Mtim != want.Mtim { // the kernel has taken the nearest that the filesystem can have, and the trees would differ for ever
		return wrap("set the times of", path, fmt.Errorf("the filesystem has no mtime of %s", time.Unix(want.Mtim.Unix()).UTC().Format(time.RFC3339Nano)))
	}
	return nil
}

// file makes room for a regular file, and asks for what of it is not there.
func (r *receiver) file(p parser) error {
	t := &target{kind: aFile, fd: notOpen, id: uint64(p.i64())}
	flags := p.u8()
	t.want = p.attributes()
	link := linkID(p.bytes(linkBytes))
	name := p.name()
	if err := p.end(); err != nil {
		return err
	}
	if format(t.want) != unix.S_IFREG || t.id != r.lastID+1 || len(r.pending) > window {
		return fmt.Errorf("%w: a file out of order", ErrProtocol)
	}
	r.lastID = t.id
	r.done.Entries++
	r.done.Files++
	if t.pushed = flags&flagPush != 0; t.pushed && flags&(flagLinked|flagSettled) != 0 { // it may be there, and not be opened
		return fmt.Errorf("%w: content of a file that may be there", ErrProtocol)
	}
	if r.lost > 0 {
		t.failed = true
	}
	have := t.failed
	if !have {
		if err := r.note(name); err != nil {
			return err
		}
		in := r.tree.Current().Dir
		t.path = in.String() + "/" + name
		var err error
		have, err = r.prepare(t, in, name, flags, link)
		if err := r.try(t, err); err != nil {
			t.close()
			return err
		}
	}
	switch {
	case t.pushed:
		r.current = t
		return nil
	case have:
		return r.answer(kindHave, t.id)
	}
	r.pending[t.id] = t
	for range sections {
		if err := r.ask(t); err != nil || t.failed {
			return err
		}
	}
	return nil
}

func (r *receiver) answer(k kind, id uint64) error {
	r.wire.begin(k)
	r.wire.put64(int64(id))
	return r.wire.send(r.ctx)
}

// prepare opens a file whose content is to be set, and says whether it need not be. A file that has more names here than in the source
// is another one than those.
func (r *receiver) prepare(t *target, in *dir.Dir, name string, flags byte, link linkID) (have bool, err error) {
	linked := flags&flagLinked != 0
	is, err := lookFor(in, name)
	if err != nil {
		return false, err
	}
	if linked {
		if found, err := r.linkTo(in, name, is, link); found || err != nil {
			return found, err
		}
	}
	usable, err := r.isUsable(is, t.want, linked)
	if err != nil {
		return false, err
	}
	if usable && flags&flagSettled != 0 && is.Size == t.want.Size && is.Mtim == t.want.Mtim {
		if linked {
			err = r.links.add(in, name, is, link)
		}
		if err == nil {
			err = setAttributes(in, name, t.want, t.path)
		}
		return true, err
	}
	if t.based, err = r.isAsBefore(is, t.want, flags, usable); err != nil {
		return false, err
	}
	if err := r.openTarget(t, in, name, is, usable); err != nil {
		return false, err
	}
	t.based = t.based && !t.fresh
	if linked {
		is, err = r.noteLink(in, name, link)
	}
	if err == nil && (t.fresh && t.want.Size > 0 || !t.fresh && is.Size != t.want.Size) {
		err = wrap("truncate", t.path, unix.Ftruncate(t.fd, t.want.Size))
	}
	t.holder = xattr.Descriptor(t.fd)
	return false, err
}

// noteLink has the file that was just opened be found by its other names.
func (r *receiver) noteLink(in *dir.Dir, name string, link linkID) (*unix.Stat_t, error) {
	is, err := lookFor(in, name)
	if err == nil && is == nil {
		err = fmt.Errorf("%s/%s: %w", in, name, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	return is, r.links.add(in, name, is, link)
}

// openTarget opens the file whose content is to be set: the one that is there, or a new one.
func (r *receiver) openTarget(t *target, in *dir.Dir, name string, is *unix.Stat_t, usable bool) (err error) {
	switch {
	case usable:
		t.fd, err = openFile(in, name, unix.O_RDWR)
		return err
	case is != nil && format(is) == unix.S_IFREG && is.Size > 0:
		t.fd, err = r.separate(in, name)
		return err
	case is != nil:
		if err := r.remove(in, name); err != nil {
			return err
		}
	}
	t.fresh = true
	t.fd, err = makeFile(in, name)
	return err
}

// isUsable says that an entry can be changed to what is wanted, without changing any that another name leads to.
func (r *receiver) isUsable(is, want *unix.Stat_t, linked bool) (bool, error) {
	switch {
	case is == nil, format(is) != format(want):
		return false, nil
	case is.Nlink == 1:
		return true, nil
	case !linked:
		return false, nil
	}
	taken, err := r.links.taken(is)
	return !taken, err
}

// isAsBefore says that a file is in the base, and that this one has not been made another in this round, by a name that it had in common
// with it.
func (r *receiver) isAsBefore(is, want *unix.Stat_t, flags byte, usable bool) (bool, error) {
	if flags&flagBase == 0 || want.Size == 0 || is == nil {
		return false, nil
	}
	if usable || format(is) != unix.S_IFREG {
		return usable, nil
	}
	taken, err := r.links.taken(is)
	return !taken, err
}

// openFile opens what was just seen to be a regular file.
func openFile(in *dir.Dir, name string, access int) (int, error) {
	fd, err := unix.Openat(in.Fd(), name, access|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOATIME|unix.O_CLOEXEC, 0)
	if err != nil {
		return notOpen, pathError("open", in, name, err)
	}
	return fd, nil
}

func makeFile(in *dir.Dir, name string) (int, error) {
	fd, err := unix.Openat(in.Fd(), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return notOpen, pathError("create", in, name, err)
	}
	return fd, nil
}

// separate makes a file that has the content of what has its name, with which it had that in common.
func (r *receiver) separate(in *dir.Dir, name string) (int, error) {
	old, err := openFile(in, name, unix.O_RDONLY)
	if err != nil {
		return notOpen, err
	}
	src := os.NewFile(uintptr(old), name)
	defer func() { _ = src.Close() }() // opened for reading
	if err := in.Remove(name); err != nil {
		return notOpen, err
	}
	fd, err := makeFile(in, name)
	if err != nil {
		return notOpen, err
	}
	dst := os.NewFile(uintptr(fd), name)
	defer func() { _ = dst.Close() }() // it has another descriptor by then
	// Not shared: where XFS writes to shared blocks, it sets blocks around aside, which are no holes then.
	if err := clone.File(r.ctx, dst, src, clone.Copy); err != nil {
		return notOpen, err
	}
	if fd, err = unix.FcntlInt(dst.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return notOpen, pathError("open", in, name, err)
	}
	return fd, nil
}

// setAttributes is for an entry that is not opened. It is no link, or one that must not be followed.
func setAttributes(in *dir.Dir, name string, want *unix.Stat_t, path string) error {
	if err := setOwner(in, name, want, path); err != nil {
		return err
	}
	return setTimes(in.Fd(), name, unix.AT_SYMLINK_NOFOLLOW, want, path)
}

func setOwner(in *dir.Dir, name string, want *unix.Stat_t, path string) error {
	is, err := stat(in, name)
	if err == nil && (is.Uid != want.Uid || is.Gid != want.Gid) {
		err = unix.Fchownat(in.Fd(), name, int(want.Uid), int(want.Gid), unix.AT_SYMLINK_NOFOLLOW)
		is.Mode |= unix.S_ISUID // may be off now: chown(2)
	}
	if err == nil && format(is) != unix.S_IFLNK && is.Mode&0o7777 != want.Mode&0o7777 {
		err = unix.Fchmodat(in.Fd(), name, want.Mode&0o7777, 0)
	}
	return wrap("set the owner and mode of", path, err)
}

// ask asks for the next part of a file.
func (r *receiver) ask(t *target) error {
	if t.failed {
		return r.answer(kindSkip, t.id)
	}
	size := t.want.Size
	if t.next == size && (size > 0 || t.finished) {
		return nil
	}
	from := t.next
	if size == 0 { // a section without content
		t.finished = true
		return r.want(kindWantHole, t, size)
	}
	if t.fresh {
		return r.want(kindWantHole, t, size)
	}
	if t.based {
		return r.want(kindWantBase, t, size)
	}
	content := newReader(t.fd, from, size, r.block)
	until, err := content.holeUntil(from)
	if err != nil {
		return wrap("read", t.path, err)
	}
	if until > from {
		return r.want(kindWantHole, t, until)
	}
	until = min(from+sectionBlocks*blockBytes, size)
	r.wire.begin(kindWant)
	r.wire.put64(int64(t.id))
	r.wire.put64(from)
	r.wire.put64(until - from)
	for at := from; at < until; at += blockBytes {
		b, err := content.block(at)
		if err == nil {
			err = r.makeSparse(t, at, b)
		}
		if err != nil {
			return wrap("read", t.path, err)
		}
		r.wire.putRaw(b.sum[:])
	}
	t.next = until
	return errors.Join(r.wire.send(r.ctx), r.wire.w.Flush())
}

// makeSparse makes a hole of what is zero.
func (r *receiver) makeSparse(t *target, at int64, b *block) error {
	for i, part := range b.granules() {
		if b.isData(i) && isZero(part) {
			if err := r.punch(t, at+i, int64(len(part))); err != nil {
				return err
			}
		}
	}
	return r.ctx.Err()
}

func (r *receiver) want(k kind, t *target, until int64) error {
	r.wire.begin(k)
	r.wire.put64(int64(t.id))
	r.wire.put64(t.next)
	r.wire.put64(until - t.next)
	t.next = until
	return r.wire.send(r.ctx)
}

// currentFrame is one of the entry that is current.
func (r *receiver) currentFrame(k kind, p parser) error {
	t := r.current
	switch k {
	case kindData, kindHole, kindSection, kindAbort:
		if t.kind != aFile {
			return outOfOrder(k)
		}
	}
	switch k {
	case kindData:
		at := p.i64()
		if at < 0 || len(p.rest) > dataBytes {
			p.failed = true
		}
		data := p.bytes(len(p.rest))
		return r.write(t, p, func() error { r.done.Bytes += int64(len(data)); return writeAt(t.fd, data, at) })
	case kindHole:
		at, length := p.extent()
		return r.write(t, p, func() error { return r.punch(t, at, length) })
	case kindSection:
		if r.current = nil; t.pushed {
			return outOfOrder(k)
		}
		return errors.Join(p.end(), r.ask(t))
	case kindAttributes:
		return r.attributes(t, p)
	case kindXattr:
		return r.xattr(t, p)
	case kindDone:
		return errors.Join(p.end(), r.targetDone(t))
	case kindAbort:
		r.drop(t)
		return p.end()
	}
	return outOfOrder(k)
}

func (r *receiver) write(t *target, p parser, call func() error) error {
	if err := p.end(); err != nil || t.failed {
		return err
	}
	return r.try(t, wrap("write", t.path, call()))
}

func (r *receiver) drop(t *target) {
	delete(r.pending, t.id)
	t.close()
	r.current = nil
}

// punch makes a hole: as zeros where the filesystem cannot. The last block of a file is given back as a whole.
func (r *receiver) punch(t *target, at, length int64) error {
	end := at + length
	if end >= t.want.Size {
		end = (t.want.Size/granule + 1) * granule
	}
	if at >= end {
		return nil
	}
	mode := uint32(unix.FALLOC_FL_PUNCH_HOLE)
	if r.allocated {
		mode = unix.FALLOC_FL_ZERO_RANGE
	}
	err := unix.Fallocate(t.fd, mode|unix.FALLOC_FL_KEEP_SIZE, at, end-at)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	for end = min(end, t.want.Size); at < end; at += dataBytes {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		if err := writeAt(t.fd, zeros[:min(end-at, dataBytes)], at); err != nil {
			return err
		}
	}
	return nil
}

func (r *receiver) attributes(t *target, p parser) error {
	st := p.attributes()
	if err := p.end(); err != nil {
		return err
	}
	if t.kind == aDirectory || format(st) != format(t.want) {
		return fmt.Errorf("%w: attributes of another entry", ErrProtocol)
	}
	if t.want = st; t.failed {
		return nil
	}
	if t.kind == aNode {
		return r.try(t, setOwner(t.in, t.name, st, t.path))
	}
	var is unix.Stat_t
	err := unix.Fstat(t.fd, &is)
	if err == nil && is.Size != st.Size {
		err = unix.Ftruncate(t.fd, st.Size)
	}
	if err == nil {
		err = clone.SetOwner(t.fd, st)
	}
	return r.try(t, wrap("set the attributes of", t.path, err))
}

func (r *receiver) xattr(t *target, p parser) error {
	name := p.text(xattr.MaxName)
	value := p.bytes(len(p.rest))
	if err := p.end(); err != nil {
		return err
	}
	if name == "" || strings.ContainsRune(name, 0) || len(value) > xattr.Max || t.names.Len()+len(name) >= xattr.Max {
		return fmt.Errorf("%w: an attribute that makes no sense", ErrProtocol)
	}
	t.names.WriteString(name + "\x00")
	if t.failed {
		return nil
	}
	n, err := t.holder.Get(name, r.attrs.value)
	if err == nil && string(r.attrs.value[:n]) == string(value) {
		return nil
	}
	return r.try(t, wrap("set the attribute "+name+" of", t.path, t.holder.Set(name, value)))
}

// targetDone takes off an entry what attributes the source does not have, as of an ACL of its directory, and gives it its times last.
func (r *receiver) targetDone(t *target) error {
	if !t.failed {
		if err := r.takeOthers(t); err != nil {
			return err
		}
	}
	r.current = nil
	if t.kind == aDirectory {
		return r.leaveDone(t)
	}
	var err error
	switch {
	case t.failed:
	case t.kind == aFile:
		err = setTimes(t.fd, "", unix.AT_EMPTY_PATH, t.want, t.path)
	default:
		err = setTimes(t.in.Fd(), t.name, unix.AT_SYMLINK_NOFOLLOW, t.want, t.path)
	}
	err = r.try(t, err)
	if t.kind == aFile {
		r.drop(t)
	}
	return err
}

func (r *receiver) takeOthers(t *target) error {
	has, err := xattr.Listed(t.holder, r.attrs.list)
	if err != nil {
		return wrap("list the attributes of", t.path, err)
	}
	if len(has) == 0 {
		return nil
	}
	wanted := map[string]bool{xattr.SELinuxLabel: true}
	for name := range strings.SplitSeq(t.names.String(), "\x00") {
		wanted[name] = true
	}
	for name := range xattr.Each(has) {
		if wanted[name] || !isKept(name, r.btrfs) {
			continue
		}
		if err := xattr.TakeOff(t.holder, name); err != nil {
			return wrap("take the attribute "+name+" off", t.path, err)
		}
	}
	return nil
}

// node makes what is never opened: a link, a FIFO, a socket or a device.
func (r *receiver) node(p parser) error {
	flags := p.u8()
	want := p.attributes()
	link := linkID(p.bytes(linkBytes))
	name := p.name()
	symlink := p.text(maxTarget)
	if err := p.end(); err != nil {
		return err
	}
	switch format(want) {
	case unix.S_IFLNK:
		if symlink == "" || strings.ContainsRune(symlink, 0) {
			return fmt.Errorf("%w: a link to nothing", ErrProtocol)
		}
	case unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR, unix.S_IFBLK:
	default:
		return fmt.Errorf("%w: an entry of type %o", ErrProtocol, format(want))
	}
	r.done.Entries++
	t := &target{kind: aNode, fd: notOpen, want: want, name: name, failed: r.lost > 0}
	r.current = t
	if t.failed {
		return nil
	}
	if err := r.note(name); err != nil {
		return err
	}
	t.in = r.tree.Current().Dir
	t.path, t.holder = t.in.String()+"/"+name, xattr.Of(t.in, name)
	return r.try(t, r.makeNode(t, symlink, flags&flagLinked != 0, link))
}

func (r *receiver) makeNode(t *target, symlink string, linked bool, link linkID) error {
	is, err := lookFor(t.in, t.name)
	if err != nil {
		return err
	}
	if linked {
		if found, err := r.linkTo(t.in, t.name, is, link); found || err != nil {
			return err
		}
	}
	same, err := r.isUsable(is, t.want, linked)
	if err == nil && same {
		switch format(is) {
		case unix.S_IFLNK:
			var to string
			to, err = readlink(t.in, t.name)
			same = to == symlink
		case unix.S_IFCHR, unix.S_IFBLK:
			same = is.Rdev == t.want.Rdev
		}
	}
	if err == nil && !same {
		if is != nil {
			err = r.remove(t.in, t.name)
		}
		switch {
		case err != nil:
		case format(t.want) == unix.S_IFLNK:
			err = wrap("symlink", t.path, unix.Symlinkat(symlink, t.in.Fd(), t.name))
		default:
			err = wrap("mknod", t.path, unix.Mknodat(t.in.Fd(), t.name, format(t.want)|0o600, int(t.want.Rdev)))
		}
	}
	if err != nil || !linked {
		return err
	}
	if is, err = stat(t.in, t.name); err != nil {
		return err
	}
	return r.links.add(t.in, t.name, is, link)
}
