package transfer

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// node makes what is never opened: a link, a FIFO, a socket or a device.
func (r *round) node(p parser) error {
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
	r.meter.done.Entries++
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
	return r.noRoom.note(t, r.makeNode(t, symlink, flags&flagLinked != 0, link))
}

func (r *round) makeNode(t *target, symlink string, linked bool, link linkID) error {
	is, err := lookFor(t.in, t.name)
	if err != nil {
		return err
	}
	if linked {
		if found, err := r.links.linkTo(r.ctx, t.in, t.name, is, link); found || err != nil {
			return err
		}
	}
	same, err := r.links.isUsable(is, t.want, linked)
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
			err = remove(r.ctx, t.in, t.name)
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
