package transfer

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// A base is the way through Pass.Base, beside that through the source. What of it cannot be read is as if it were not there: then
// both sides read the file.
type base struct {
	tree    *dir.Descent[struct{}] // nil where there is none
	missing int                    // levels below a directory that it does not have
}

// beginBase is at the root of a tree, which may be nil.
func beginBase(root *dir.Dir) base {
	if root == nil {
		return base{}
	}
	tree, err := dir.NewDescent(root, struct{}{})
	if err != nil {
		return base{}
	}
	return base{tree: tree}
}

func (b *base) enter(name string) {
	if b.tree != nil && (b.missing > 0 || b.tree.Enter(name, struct{}{}) != nil) {
		b.missing++
	}
}

func (b *base) leave() {
	switch {
	case b.tree == nil:
	case b.missing > 0:
		b.missing--
	case b.tree.Depth() > 0 && b.tree.Leave() != nil:
		b.close()
	}
}

func (b *base) close() {
	if b.tree != nil {
		_ = b.tree.Close() // opened for reading
	}
	b.tree = nil
}

// file opens that of the base which has a name in the current directory, or returns nil.
func (b *base) file(name string) *os.File {
	if b.tree == nil || b.missing > 0 {
		return nil
	}
	f, err := b.tree.Current().OpenFile(name)
	if err != nil {
		return nil
	}
	return f
}

// inBase opens the file of the base that has the name of one of the source, or returns nil. If they are the same in all, it says so
// instead.
func (w *walk) inBase(in *dir.Dir, name string, st *unix.Stat_t) (_ *os.File, same bool) {
	f := w.track.base.file(name)
	if f == nil {
		return nil, false
	}
	if isSame(w.ctx, w.out.attrs, f, in, name, st) {
		_ = f.Close() // opened for reading
		return nil, true
	}
	return f, false
}

// isSame says that a file is the same as one of the base in all but its ctime.
func isSame(ctx context.Context, attrs *attributer, f *os.File, in *dir.Dir, name string, st *unix.Stat_t) bool {
	var was unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &was); err != nil ||
		was.Size != st.Size || was.Mtim != st.Mtim || was.Mode != st.Mode || was.Uid != st.Uid || was.Gid != st.Gid {
		return false
	}
	now := *st
	fd, err := clone.OpenRegular(in, name, &now)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading
	before, err := attrs.sums(xattr.Descriptor(int(f.Fd())))
	if err != nil {
		return false
	}
	is, err := attrs.sums(xattr.Descriptor(fd))
	if err != nil || is != before {
		return false
	}
	return eachDifference(ctx, f, fd, func(diff.Range) error { return errDiffer }) == nil
}

var errDiffer = errors.New("the files differ")

// eachDifference calls found for each part of a file that is not as in the base.
func eachDifference(ctx context.Context, base *os.File, fd int, found func(diff.Range) error) error {
	duplicate, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	now := os.NewFile(uintptr(duplicate), base.Name())
	defer func() { _ = now.Close() }() // opened for reading
	return diff.Files(ctx.Err, base, now, found)
}
