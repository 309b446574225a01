package transfer

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// A round makes the tree of the receiver equal to that of the sender, once.
type round struct {
	ctx   context.Context
	meter *meter
	attrs *attributer
	btrfs bool // the tree is on one
	files *files

	tree    *dir.Descent[place]
	lost    int // levels below a directory that could not be made
	names   sourceNames
	links   links
	noRoom  shortage
	current *target // that the next frames are of; nil between two entries
}

// A place is what is known of a directory of the tree.
type place struct {
	fresh bool  // it was made in this round
	mark  int64 // where its names begin in round.names
}

// A shortage is of room for entries.
type shortage struct {
	entries int64
	first   string // why there was none for the first
}

// note notes that there was no room for an entry, which the sender tries again once the rest is there. It returns other errors, which
// end all.
func (s *shortage) note(t *target, err error) error {
	if err == nil || !outOfRoom(err) {
		return err
	}
	t.failed = true
	if s.entries++; s.entries == 1 {
		s.first = err.Error()
		s.first = s.first[:min(len(s.first), maxMessage)]
	}
	return nil
}

func (r *round) isComplete() bool {
	return r.tree.Depth() == 0 && r.lost == 0 && len(r.files.pending) == 0
}

func (r *round) close() error {
	if r == nil {
		return nil
	}
	r.files.close()
	if r.current != nil {
		r.current.close()
	}
	r.names.all.Close()
	return errors.Join(r.tree.Close(), r.links.close())
}

// frame is one of the tree, or of the entry that is current.
func (r *round) frame(k kind, p parser) error {
	switch k {
	case kindEnter, kindLeave, kindFile, kindNode, kindSelect:
		if r.current != nil {
			return outOfOrder(k)
		}
	default:
		if r.current == nil {
			return outOfOrder(k)
		}
	}
	switch k {
	case kindEnter:
		return r.enter(p)
	case kindLeave:
		return r.leave(p)
	case kindFile:
		return r.file(p)
	case kindNode:
		return r.node(p)
	case kindSelect:
		return r.selectFile(p)
	case kindAttributes:
		return r.attributes(r.current, p)
	case kindXattr:
		return r.xattr(r.current, p)
	case kindDone:
		return errors.Join(p.end(), r.targetDone(r.current))
	}
	if r.current.kind != aFile {
		return outOfOrder(k)
	}
	return r.content(r.current, k, p)
}

// note remembers that the source has a name in the current directory.
func (r *round) note(name string) error {
	if r.tree.Current().Value.fresh {
		return nil
	}
	return r.names.add(name)
}

func (r *round) enter(p parser) error {
	name := p.name()
	if err := p.end(); err != nil {
		return err
	}
	r.meter.done.Entries++
	if r.lost > 0 {
		r.lost++
		return nil
	}
	if err := r.note(name); err != nil {
		return err
	}
	in := r.tree.Current()
	is, err := lookFor(in.Dir, name)
	if err != nil {
		return err
	}
	if is != nil && format(is) == unix.S_IFDIR {
		return r.tree.Enter(name, place{mark: r.names.mark()})
	}
	if is != nil {
		err = remove(r.ctx, in.Dir, name)
	}
	if err == nil {
		err = r.tree.Make(name, place{fresh: true, mark: r.names.mark()})
	}
	var t target
	if err = r.noRoom.note(&t, err); t.failed {
		r.lost++
	}
	return err
}

func (r *round) leave(p parser) error {
	st := p.attributes()
	if err := p.end(); err != nil {
		return err
	}
	if format(st) != unix.S_IFDIR {
		return fmt.Errorf("%w: a directory that is none", ErrProtocol)
	}
	t := &target{kind: aDirectory, fd: notOpen, want: st, lost: r.lost > 0}
	r.current = t
	if t.lost {
		t.failed = true
		return nil
	}
	d := r.tree.Current().Dir
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	t.dir, t.holder, t.path = fd, xattr.Descriptor(fd), d.String()
	return r.noRoom.note(t, wrap("set the owner and mode of", t.path, clone.SetOwner(fd, st)))
}

// leaveDone removes from a directory what the source does not have, and gives it its times, which that changes.
func (r *round) leaveDone(t *target) error {
	if t.lost {
		r.lost--
		return nil
	}
	in := r.tree.Current()
	if !in.Value.fresh {
		err := r.names.others(r.ctx, in.Dir, in.Value.mark, func(name string) error {
			if r.links.is(in.Dir, name) {
				return nil
			}
			return remove(r.ctx, in.Dir, name)
		})
		if err != nil {
			return err
		}
	}
	r.names.forget(in.Value.mark)
	atRoot := r.tree.Depth() == 0
	if atRoot {
		if err := r.links.remove(r.ctx); err != nil {
			return err
		}
	}
	if !t.failed {
		if err := r.noRoom.note(t, setTimes(t.dir, "", unix.AT_EMPTY_PATH, t.want, t.path)); err != nil {
			return err
		}
	}
	if atRoot {
		return nil
	}
	return r.tree.Leave()
}

func (r *round) attributes(t *target, p parser) error {
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
		return r.noRoom.note(t, setOwner(t.in, t.name, st, t.path))
	}
	var is unix.Stat_t
	err := unix.Fstat(t.fd, &is)
	if err == nil && is.Size != st.Size {
		err = unix.Ftruncate(t.fd, st.Size)
	}
	if err == nil {
		err = clone.SetOwner(t.fd, st)
	}
	return r.noRoom.note(t, wrap("set the attributes of", t.path, err))
}

func (r *round) xattr(t *target, p parser) error {
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
	return r.noRoom.note(t, wrap("set the attribute "+name+" of", t.path, r.attrs.set(t.holder, name, value)))
}

// targetDone takes off an entry what attributes the source does not have, as of an ACL of its directory, and gives it its times last.
func (r *round) targetDone(t *target) error {
	if !t.failed {
		if err := r.attrs.takeOthers(t, r.btrfs); err != nil {
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
	err = r.noRoom.note(t, err)
	if t.kind == aFile {
		r.files.drop(t)
	}
	return err
}
