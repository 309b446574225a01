// Package diff lists what differs between two directory trees, or between two files. Where both
// share their blocks it reads no data: what lies at the same place of the disk is the same.
// Nothing is changed. The kernel first writes to the disk what was written to a file before it is
// compared, since a block that is shared gets another place only then.
package diff

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Kind says how an entry differs.
type Kind string

// The kinds. An entry that has another type is Changed.
const (
	Added   Kind = "added"
	Removed Kind = "removed"
	Changed Kind = "changed"
)

// A Change is an entry of two trees that is not the same in both.
type Change struct {
	Kind Kind
	// Path from the root of the trees, which is "."; that of a directory ends with "/".
	// What is below a directory that was added or removed is not listed.
	Path string
	// What has changed: "type", "size", "mtime", "mode", "owner", "xattr", "content". The mtime
	// of directories does not count.
	What []string
}

// Trees compares two trees, and calls found for what differs, a directory before its content
// and otherwise in the order of names. It enters nothing that is mounted in them, follows no link,
// and opens nothing but directories and regular files. It holds a few descriptors, and the
// names of the directories on the way. Before each entry and each MiB that is read it calls step,
// whose error ends it.
func Trees(step func() error, from, to *dir.Dir, found func(Change) error) error {
	p, err := reopen(from, to)
	if err != nil {
		return err
	}
	c := &comparer{step: step, found: found, at: p}
	defer func() { c.at.close() }()
	if err := c.attributes(&c.at); err != nil {
		return err
	}
	if err := c.list(level{}); err != nil {
		return err
	}
	for len(c.way) > 0 {
		if err := c.next(); err != nil {
			return err
		}
	}
	return nil
}

// A pair is a directory of both trees.
type pair struct{ from, to *dir.Dir }

// reopen has handles that can be closed.
func reopen(from, to *dir.Dir) (p pair, err error) {
	if p.from, err = from.Reopen(); err != nil {
		return pair{}, err
	}
	if p.to, err = to.Reopen(); err != nil {
		p.close()
		return pair{}, err
	}
	return p, nil
}

func (p *pair) close() {
	for _, d := range []*dir.Dir{p.from, p.to} {
		if d != nil {
			_ = d.Close() // opened for reading
		}
	}
	*p = pair{}
}

func (p *pair) open(name string) (sub pair, err error) {
	if sub.from, err = p.from.OpenInside(name); err != nil {
		return pair{}, err
	}
	if sub.to, err = p.to.OpenInside(name); err != nil {
		sub.close()
		return pair{}, err
	}
	return sub, nil
}

// A comparer is at one directory of both trees. The way there is no stack of calls: it has as many levels as users have made.
type comparer struct {
	step  func() error
	found func(Change) error
	at    pair
	way   []level // from the root
}

// A level is a directory on the way, and what of it was not compared yet.
type level struct {
	name  string // in the one above
	names []string
	// from and to are the one above; zero for the root.
	from, to dir.ID
}

// list has what is in the directory compared next.
func (c *comparer) list(l level) error {
	names, err := c.names(&c.at)
	if err != nil {
		return err
	}
	l.names = names
	c.way = append(c.way, l)
	return nil
}

// next compares the next entry of the directory, and goes down into one that is a directory in both trees, or up from one without more
// entries.
func (c *comparer) next() error {
	l := &c.way[len(c.way)-1]
	if len(l.names) == 0 {
		return c.ascend()
	}
	name := l.names[0]
	l.names = l.names[1:]
	if err := c.step(); err != nil {
		return err
	}
	isDir, err := c.entry(&c.at, name)
	if err != nil || !isDir {
		return err
	}
	return c.descend(name)
}

// names are those that either directory has, in order.
func (c *comparer) names(p *pair) ([]string, error) {
	var all []string
	for _, d := range []*dir.Dir{p.from, p.to} {
		for entry, err := range d.Entries() {
			if err == nil {
				err = c.step()
			} else if errors.Is(err, fs.ErrNotExist) && len(c.way) > 0 { // removed meanwhile: nothing is in it
				break
			}
			if err != nil {
				return nil, err
			}
			all = append(all, entry.Name)
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// entry compares an entry, and reports whether it is a directory in both trees.
func (c *comparer) entry(p *pair, name string) (isDir bool, err error) {
	from, err := stat(p.from, name)
	if err != nil {
		return false, err
	}
	to, err := stat(p.to, name)
	switch {
	case err != nil:
		return false, err
	case from == nil && to == nil: // gone meanwhile
		return false, nil
	case from == nil:
		return false, c.report(Change{Kind: Added}, name, to)
	case to == nil:
		return false, c.report(Change{Kind: Removed}, name, from)
	}
	what, err := c.differences(p, name, from, to)
	if err == nil && len(what) > 0 {
		err = c.report(Change{Kind: Changed, What: what}, name, to)
	}
	return err == nil && format(from) == unix.S_IFDIR && format(to) == unix.S_IFDIR, ignoreGone(err)
}

// descend goes into a directory, and closes the one that it is in: a tower of directories takes no more descriptors than one.
func (c *comparer) descend(name string) error {
	sub, err := c.at.open(name)
	if dir.IsMissing(err) || errors.Is(err, unix.EXDEV) { // gone meanwhile, or mounted
		return nil
	}
	if err != nil {
		return err
	}
	above := c.at
	c.at = sub
	defer above.close()
	l := level{name: name}
	if l.from, err = above.from.ID(); err != nil {
		return err
	}
	if l.to, err = above.to.ID(); err != nil {
		return err
	}
	return c.list(l)
}

// ascend goes back to the directory above.
func (c *comparer) ascend() (err error) {
	l := c.way[len(c.way)-1]
	c.way = c.way[:len(c.way)-1]
	if len(c.way) == 0 {
		return nil
	}
	below := c.at
	defer below.close()
	c.at = pair{}
	if c.at.from, err = dir.Parent(below.from, l.from); err != nil {
		return err
	}
	c.at.to, err = dir.Parent(below.to, l.to)
	return err
}

func (c *comparer) report(change Change, name string, st *unix.Stat_t) error {
	var at strings.Builder
	for _, l := range c.way[1:] {
		at.WriteString(l.name + "/")
	}
	change.Path = at.String() + name
	if format(st) == unix.S_IFDIR {
		change.Path += "/"
	}
	return c.found(change)
}

// attributes compares the roots of the trees.
func (c *comparer) attributes(p *pair) error {
	from, to := new(unix.Stat_t), new(unix.Stat_t)
	if err := errors.Join(unix.Fstat(p.from.Fd(), from), unix.Fstat(p.to.Fd(), to)); err != nil {
		return err
	}
	what, err := metadata(p, ".", from, to)
	if err != nil || len(what) == 0 {
		return err
	}
	return c.found(Change{Kind: Changed, Path: ".", What: what})
}

func format(st *unix.Stat_t) uint32 { return st.Mode & unix.S_IFMT }

// stat returns nil for a missing name.
func stat(in *dir.Dir, name string) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	err := unix.Fstatat(in.Fd(), name, st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "stat", Path: in.String() + "/" + name, Err: err}
	}
	return st, nil
}

// differences are those between two entries that are there.
func (c *comparer) differences(p *pair, name string, from, to *unix.Stat_t) ([]string, error) {
	if format(from) != format(to) || from.Rdev != to.Rdev {
		return []string{"type"}, nil
	}
	what, err := metadata(p, name, from, to)
	if err != nil {
		return nil, err
	}
	same := true
	switch format(from) {
	case unix.S_IFLNK:
		same, err = sameTarget(p, name)
	case unix.S_IFREG:
		if from.Size == to.Size {
			same, err = c.sameContent(p, name)
		}
	}
	if !same {
		what = append(what, "content")
	}
	return what, err
}

// metadata are the differences that can be seen from outside.
func metadata(p *pair, name string, from, to *unix.Stat_t) (what []string, err error) {
	xattrs, err := sameAttributes(p, name)
	for _, one := range []struct {
		word string
		same bool
	}{
		{"size", format(from) != unix.S_IFREG || from.Size == to.Size},
		{"mtime", format(from) == unix.S_IFDIR || from.Mtim == to.Mtim},
		{"mode", from.Mode == to.Mode},
		{"owner", from.Uid == to.Uid && from.Gid == to.Gid},
		{"xattr", xattrs},
	} {
		if !one.same {
			what = append(what, one.word)
		}
	}
	return what, err
}

func sameTarget(p *pair, name string) (bool, error) {
	var targets [2]string
	for i, d := range []*dir.Dir{p.from, p.to} {
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(d.Fd(), name, target)
		if err != nil {
			return false, &fs.PathError{Op: "readlink", Path: d.String() + "/" + name, Err: err}
		}
		targets[i] = string(target[:n])
	}
	return targets[0] == targets[1], nil
}

var errDiffers = errors.New("differs")

func (c *comparer) sameContent(p *pair, name string) (bool, error) {
	from, err := openRegular(p.from, name)
	if err != nil {
		return false, err
	}
	defer func() { _ = from.Close() }()
	to, err := openRegular(p.to, name)
	if err != nil {
		return false, err
	}
	defer func() { _ = to.Close() }()
	err = Files(c.step, from, to, func(Range) error { return errDiffers })
	if errors.Is(err, errDiffers) {
		return false, nil
	}
	return err == nil, err
}

func openRegular(in *dir.Dir, name string) (*os.File, error) {
	f, err := in.OpenFile(name)
	switch {
	case errors.Is(err, dir.ErrNotFile):
		err = &fs.PathError{Op: "open", Path: in.String() + "/" + name, Err: unix.ENOENT} // replaced meanwhile
	case errors.Is(err, unix.EWOULDBLOCK):
		err = fmt.Errorf("open %s/%s: a process has a write lease of the file: %w", in, name, err)
	}
	return f, err
}

// sameAttributes compares extended attributes: ACLs, capabilities and labels are such, too.
func sameAttributes(p *pair, name string) (bool, error) {
	from, err := attributesOf(p.from, name)
	if err != nil {
		return false, err
	}
	to, err := attributesOf(p.to, name)
	return slices.Equal(from, to), err
}

// attributesOf are the names and values of an entry's attributes, in order.
func attributesOf(in *dir.Dir, name string) ([]string, error) {
	at := in.HandlePath() + "/" + name
	list, err := grow(func(into []byte) (int, error) { return unix.Llistxattr(at, into) })
	if err != nil {
		return nil, &fs.PathError{Op: "listxattr", Path: in.String() + "/" + name, Err: err}
	}
	var all []string
	for attribute := range strings.SplitSeq(strings.TrimSuffix(string(list), "\x00"), "\x00") {
		if attribute == "" {
			continue
		}
		value, err := grow(func(into []byte) (int, error) { return unix.Lgetxattr(at, attribute, into) })
		if err != nil {
			return nil, &fs.PathError{Op: "getxattr " + attribute, Path: in.String() + "/" + name, Err: err}
		}
		all = append(all, attribute+"\x00"+string(value))
	}
	slices.Sort(all)
	return all, nil
}

// grow reads with as much memory as it takes. What is not supported, or gone, is empty.
func grow(read func(into []byte) (int, error)) ([]byte, error) {
	for into := make([]byte, 256); ; into = make([]byte, 4*len(into)) {
		n, err := read(into)
		switch {
		case err == nil:
			return bytes.Clone(into[:n]), nil
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENODATA):
			return nil, nil
		case !errors.Is(err, unix.ERANGE):
			return nil, err
		}
	}
}

// ignoreGone is for an entry that is removed or replaced while it is compared.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}
