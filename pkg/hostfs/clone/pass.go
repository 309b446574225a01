package clone

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// A pass is a visitor of the source that copies what has changed.
type pass struct {
	since   moment // entries that are older are skipped; unset in the first pass
	round   int
	dst     *dir.Descent[bool] // the value: what the level is a copy of has changed since it was made
	links   *dir.Dir           // files that have several names, by their inode
	entries *entryCopier
	look    Look
	copied  int64

	whole         int   // how many levels of the path are copied whole although since is set
	names, before Names // of what the copy is made in this pass, and was in the one before
	notesMoves    bool  // an entry that gets another name has another ctime
}

func (p *pass) run(src *dir.Dir) error {
	root, err := p.look.Open(src)
	if err != nil {
		return err
	}
	p.dst.SetValue(p.since.set && !p.since.follows(root))
	err = dir.Visit(src, p)
	if err = errors.Join(err, p.dst.Close()); err != nil {
		return err
	}
	if p.since.set {
		if err := p.removeGone(src, p.dst.Current().Dir); err != nil {
			return err
		}
	}
	return p.entries.attributes(src, p.dst.Current().Dir)
}

// removeGone removes from the copy of a directory what that does not have any more.
func (p *pass) removeGone(src, dst *dir.Dir) error {
	for entry, err := range dst.Entries() {
		if err != nil {
			return err
		}
		gone, err := p.isGone(src, dst, entry.Name)
		if err == nil && gone {
			err = remove(p.entries.ctx, dst, entry.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *pass) isGone(src, dst *dir.Dir, name string) (bool, error) {
	exists, err := src.Exists(name)
	if exists || err != nil {
		return false, err
	}
	st, err := stat(dst, name)
	if err != nil {
		return false, err
	}
	links, err := p.links.ID()
	return links.Ino != st.Ino, err
}

// Mount is an error: a copy without what is below the mount would be none.
func (p *pass) Mount(in *dir.Dir, name string) error { return Mounted(in, name) }

// find looks at an entry that is no directory, and says whether it is to be copied: not one that is gone, or of which there is a copy.
func (p *pass) find(in *dir.Dir, name string) (st *unix.Stat_t, wanted bool, err error) {
	if err := p.entries.next(); err != nil {
		return nil, false, err
	}
	st, err = p.look.Stat(in, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil || !p.updating() {
		return st, err == nil, err
	}
	kept, err := p.keeps(name, st)
	return st, !kept && err == nil, err
}

// File copies an entry that is no directory.
func (p *pass) File(in *dir.Dir, name string) error {
	st, wanted, err := p.find(in, name)
	if !wanted {
		return err
	}
	to := p.dst.Current()
	if p.updating() {
		if err := remove(p.entries.ctx, to.Dir, name); err != nil {
			return err
		}
	}
	p.copied++
	err = p.afresh(to.Dir, name, func() error {
		if st.Nlink > 1 {
			return p.link(Identify(in, name, st), st, to.Dir, name, func(node string) error { return p.entries.make(source{in, name, st}, p.links, node) })
		}
		return p.entries.make(source{in, name, st}, to.Dir, name)
	})
	if errors.Is(err, ErrGone) {
		return nil
	}
	if err == nil {
		p.names.Add(to.Known.Ino, name, st)
	}
	return err
}

// updating says that only what changed is copied.
func (p *pass) updating() bool { return p.since.set && p.whole == 0 }

// keeps reports whether what was copied under a name before is a copy of the entry that has it now, as that is, and notes so.
func (p *pass) keeps(name string, st *unix.Stat_t) (bool, error) {
	in := p.dst.Current()
	if !p.isSettled(st) || !p.isCopy(name, st) || in.Value && !copiedByDescriptor(st) {
		return false, nil
	}
	like, err := isLike(st, in.Dir, name) // what was gone when the pass before ended may be back
	if like && err == nil {
		p.noteKept(in, name, st)
	}
	return like, err
}

// isSettled says that an entry was as it is when the pass before began.
func (p *pass) isSettled(st *unix.Stat_t) bool {
	since := p.since
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		since = since.earlier(UnderWay)
	}
	return since.follows(st)
}

// isLike reports whether there is a copy under a name that has the size and mtime of an entry.
func isLike(st *unix.Stat_t, in *dir.Dir, name string) (bool, error) {
	made, err := stat(in, name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && made.Size == st.Size && made.Mtim == st.Mtim, err
}

// copiedByDescriptor says that an entry is opened to be copied: its name may have led to others meanwhile. A file with
// several names is looked for by its name among the copies.
func copiedByDescriptor(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1
}

// isCopy reports whether a name in the copy was made of that very entry, whatever happened to that since. An old ctime does not
// say so: where XFS exchanges two entries (renameat2(2), RENAME_EXCHANGE), only their directories have another.
func (p *pass) isCopy(name string, st *unix.Stat_t) bool {
	in := p.dst.Current()
	return p.before.Has(in.Known.Ino, name, st, p.since.follows(st) && (p.showsMoves(st) || !in.Value))
}

// showsMoves reports whether an entry has another ctime after it was renamed. That of the root of a btrfs subvolume is forgotten with
// the inode.
func (p *pass) showsMoves(st *unix.Stat_t) bool {
	return p.notesMoves && st.Ino != ioctl.SubvolumeRoot
}

// noteKept notes what is known for sure: a directory that had not changed may have since.
func (p *pass) noteKept(in dir.Level[bool], name string, st *unix.Stat_t) {
	if !p.showsMoves(st) && !p.before.Has(in.Known.Ino, name, st, false) {
		p.names.LeaveOut()
		return
	}
	p.names.Add(in.Known.Ino, name, st)
}

// Enter makes a directory, or goes into the one that is there.
func (p *pass) Enter(d, _ *dir.Dir, name string) error {
	if err := p.entries.next(); err != nil {
		return err
	}
	st, err := p.look.Open(d)
	if err != nil {
		return err
	}
	if p.updating() {
		entered, err := p.enterCopy(name, st)
		if entered || err != nil {
			return err
		}
		// It may be another directory by now, which was moved here with all that it holds.
		if err := remove(p.entries.ctx, p.dst.Current().Dir, name); err != nil {
			return err
		}
	}
	if p.since.set {
		p.whole++
	}
	p.copied++
	in := p.dst.Current()
	p.names.Add(in.Known.Ino, name, st)
	return p.afresh(in.Dir, name, func() error { return p.dst.Make(name, false) })
}

// afresh makes an entry of the copy under a name that no other entry may have. Where one was removed and made again, a directory can
// list it twice in a pass (readdir(3)): the last copy counts.
func (p *pass) afresh(in *dir.Dir, name string, build func() error) error {
	err := build()
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := remove(p.entries.ctx, in, name); err != nil {
		return err
	}
	return build()
}

// enterCopy goes into what was made of a directory before, if that is there.
func (p *pass) enterCopy(name string, st *unix.Stat_t) (bool, error) {
	if !p.isCopy(name, st) {
		return false, nil
	}
	in := p.dst.Current()
	err := p.dst.Enter(name, !p.since.follows(st))
	if dir.IsMissing(err) {
		return false, nil
	}
	if err == nil {
		p.noteKept(in, name, st)
	}
	return err == nil, err
}

// Leave removes from the copy of a directory that changed what is gone, and gives it its attributes: its times last, which
// entries change.
func (p *pass) Leave(d *dir.Dir) error {
	to := p.dst.Current()
	if to.Value {
		if err := p.removeGone(d, to.Dir); err != nil {
			return err
		}
	}
	if p.whole > 0 {
		p.whole--
	}
	if err := p.entries.attributes(d, to.Dir); err != nil {
		return err
	}
	return p.dst.Leave()
}

// link makes one more name of a file. The file itself is made in the directory of links,
// under what identifies it: a table of millions of them would not fit into memory.
func (p *pass) link(file string, st *unix.Stat_t, to *dir.Dir, name string, create func(node string) error) error {
	made, err := p.made(file, st)
	if err != nil {
		return err
	}
	if made != "" {
		return linkError(to, name, unix.Linkat(p.links.Fd(), made, to.Fd(), name, 0))
	}
	if err := p.forget(file, st); err != nil {
		return err
	}
	node := linkName(p.round, file)
	if err := create(node); err != nil {
		return err
	}
	return linkError(to, name, unix.Linkat(p.links.Fd(), node, to.Fd(), name, 0))
}

// made is the name among the links that a copy of a file has which is as that is; empty if there is none.
func (p *pass) made(file string, st *unix.Stat_t) (string, error) {
	for round := p.round; round >= p.oldest(st); round-- {
		node := linkName(round, file)
		is, err := p.links.Exists(node)
		if is && err == nil && round < p.round {
			is, err = isLike(st, p.links, node)
		}
		if is || err != nil {
			return node, err
		}
	}
	return "", nil
}

// forget removes copies of a file that are not as it is: none of them keeps a name.
func (p *pass) forget(file string, st *unix.Stat_t) error {
	for round := 1; round < p.oldest(st); round++ {
		if err := removeLinked(p.entries.ctx, p.links, linkName(round, file)); err != nil {
			return err
		}
	}
	return nil
}

// oldest is the first round whose copy of a file is that of the file as it is. A file that
// did not change keeps the copy to which its other names lead, also where one of them is in
// a directory that is copied whole.
func (p *pass) oldest(st *unix.Stat_t) int {
	if p.since.set && p.isSettled(st) {
		return 1
	}
	return p.round
}

func linkName(round int, file string) string { return fmt.Sprintf("%d-%s", round, file) }

// Identify names a file by its number and its handle (name_to_handle_at(2)), which has the generation too: the number of a file
// that is deleted while the tree is copied may be another's a moment later. A filesystem without handles has the number only.
func Identify(in *dir.Dir, name string, st *unix.Stat_t) string {
	number := fmt.Sprintf("%d-%d", st.Dev, st.Ino)
	handle, _, err := unix.NameToHandleAt(in.Fd(), name, 0)
	if err != nil {
		return number
	}
	return number + "-" + base64.RawURLEncoding.EncodeToString(handle.Bytes())
}

func linkError(in *dir.Dir, name string, err error) error {
	if err != nil {
		return &fs.PathError{Op: "link", Path: in.String() + "/" + name, Err: err}
	}
	return nil
}
