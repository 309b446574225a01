package transfer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A linkID identifies an entry of the source that has several names.
type linkID string

// Links are the entries of a round that have several names, in a directory of the receiver's tree: a table of millions of them would
// not fit into memory. Each is there under what identifies that of the source. One that had other names before the round is
// there under its inode number as well, so that it does not become two entries of the source.
type links struct {
	root *dir.Dir
	dir  *dir.Dir // nil before the first
	name string
}

func (l *links) ofSource(id linkID) string { return "s-" + hex.EncodeToString([]byte(id)) }

func (l *links) ofTarget(is *unix.Stat_t) string { return "t-" + strconv.FormatUint(is.Ino, 16) }

// open makes the directory.
func (l *links) open() error {
	if l.dir != nil {
		return nil
	}
	l.name = ".transfer-" + rand.Text()
	var err error
	l.dir, err = l.root.Make(l.name)
	return err
}

// is says that an entry is the directory of links.
func (l *links) is(in *dir.Dir, name string) bool {
	if l.dir == nil || name != l.name {
		return false
	}
	same, err := dir.Same(in, l.root)
	return err == nil && same
}

// find is the entry for one of the source, or nil.
func (l *links) find(id linkID) (*unix.Stat_t, error) {
	if l.dir == nil {
		return nil, nil
	}
	return lookFor(l.dir, l.ofSource(id))
}

// taken says that an entry is one for another of the source.
func (l *links) taken(is *unix.Stat_t) (bool, error) {
	if l.dir == nil {
		return false, nil
	}
	return l.dir.Exists(l.ofTarget(is))
}

// add has an entry of the tree be that for one of the source.
func (l *links) add(in *dir.Dir, name string, is *unix.Stat_t, id linkID) error {
	if err := l.open(); err != nil {
		return err
	}
	if is.Nlink > 1 {
		if err := unix.Linkat(in.Fd(), name, l.dir.Fd(), l.ofTarget(is), 0); err != nil {
			return linkError(in, name, err)
		}
	}
	if err := unix.Linkat(in.Fd(), name, l.dir.Fd(), l.ofSource(id), 0); err != nil {
		return linkError(in, name, err)
	}
	return nil
}

// remove removes the directory.
func (l *links) remove(ctx context.Context) error {
	if l.dir == nil {
		return nil
	}
	err := dir.RemoveTree(ctx, l.root, l.name, func(ctx context.Context) error { return ctx.Err() })
	return errors.Join(err, l.close())
}

// close leaves the directory to the next pass.
func (l *links) close() error {
	if l.dir == nil {
		return nil
	}
	err := l.dir.Close()
	l.dir = nil
	return err
}

// addOpened has the file that was just opened be found by its other names.
func (l *links) addOpened(in *dir.Dir, name string, link linkID) (*unix.Stat_t, error) {
	is, err := lookFor(in, name)
	if err == nil && is == nil {
		err = fmt.Errorf("%s/%s: %w", in, name, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	return is, l.add(in, name, is, link)
}

// isUsable says that an entry can be changed to what is wanted, without changing any that another name leads to.
func (l *links) isUsable(is, want *unix.Stat_t, linked bool) (bool, error) {
	switch {
	case is == nil, format(is) != format(want):
		return false, nil
	case is.Nlink == 1:
		return true, nil
	case !linked:
		return false, nil
	}
	taken, err := l.taken(is)
	return !taken, err
}

// isAsBefore says that a file is in the base, and that this one has not been made another in this round, by a name that it had in common
// with it.
func (l *links) isAsBefore(is, want *unix.Stat_t, flags byte, usable bool) (bool, error) {
	if flags&flagBase == 0 || want.Size == 0 || is == nil {
		return false, nil
	}
	if usable || format(is) != unix.S_IFREG {
		return usable, nil
	}
	taken, err := l.taken(is)
	return !taken, err
}

// linkTo gives one more name to the entry for one of the source, if there is one already. It says whether there is. What else has
// the name is removed.
func (l *links) linkTo(ctx context.Context, in *dir.Dir, name string, is *unix.Stat_t, id linkID) (found bool, err error) {
	made, err := l.find(id)
	if err != nil || made == nil {
		return false, err
	}
	if is != nil && is.Ino == made.Ino && is.Dev == made.Dev {
		return true, nil
	}
	if is != nil {
		if err := remove(ctx, in, name); err != nil {
			return true, err
		}
	}
	if err := unix.Linkat(l.dir.Fd(), l.ofSource(id), in.Fd(), name, 0); err != nil {
		return true, linkError(in, name, err)
	}
	return true, nil
}

// linkError says what to do about a file with as many names as there may be: those of the directory of links are two of them.
func linkError(in *dir.Dir, name string, err error) error {
	err = pathError("link", in, name, err)
	if errors.Is(err, unix.EMLINK) {
		err = fmt.Errorf("%w: the filesystem here allows too few names of one file, of which the copy needs two more than there are: remove some, or copy to another filesystem", err)
	}
	return err
}
