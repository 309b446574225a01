package clone

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Options of [Tree].
type Options struct {
	Method Method
	// Rounds is how often changed entries are copied again before Tree gives up on a
	// consistent copy. With 0 the source is not checked at all.
	Rounds int
	// Hold has all who write to the source stop, and returns what lets them go on, and a context that
	// ends if they do before. If it is set, the source is copied once while they write; if anything
	// has changed by then they are stopped, and what has changed is copied again. Rounds must be 1.
	Hold func(context.Context) (still context.Context, release func() error, err error)
	// HoldAtMost is for how long they may be stopped; 0 for no limit. If comparing all entries takes longer, which is the least that
	// is done meanwhile, Tree returns ErrTooMany and stops nothing.
	HoldAtMost time.Duration
	// Alone is asked whether, from now until Tree ends, no process can write to the source, if there is an entry whose ctime is in
	// the future, so that a change of it could not be told. If so, such entries count as unchanged, and else
	// Tree returns ErrFuture before it copies anything. If it is not set, they count as changed.
	Alone func() (bool, error)
	// MaxStall is for how long sharing one file may stop its writers: see Limit.
	MaxStall Limit
	// Pause is called before each entry and each 16 MiB, if it is set: to let others
	// work. Its error ends the copying.
	Pause func(context.Context) error
}

// ErrTooMany reports a source of so many entries that comparing them takes longer than those who write may be stopped.
var ErrTooMany = errors.New("too many files and directories")

// A Result says what [Tree] copied.
type Result struct {
	Entries int64
	// Shared is true if no data was copied.
	Shared bool
	// PointInTime says that the copy is what the source was at one moment. It is known
	// only with Options.Rounds, and false if the source never held still.
	PointInTime bool
	// Changed is how many entries had changed when they were last checked.
	Changed int64
	// Stall is the longest time that writers of a file had to wait, while it was shared or while
	// Hold had them stopped.
	Stall time.Duration
}

// Inodes is how many a copier makes in its destination, for a time, beside those that it copies.
const Inodes = 2

// Tree copies all that lies below src into dst, an empty directory to which no other process
// writes, and then the attributes of src itself. No link is followed. If something is mounted
// below src, Tree returns ErrMounted. It holds a bounded number of descriptors and, but for
// them, a bounded amount of memory. Nothing is synced: see [Sync].
//
// With Options.Rounds it checks afterwards whether the copy is that of one moment. That
// is so if no entry changed since before the first was copied, or if a single file did and
// shares its blocks: its copy, with its attributes, is atomic, and all else stood still. What changed is copied
// again, Rounds times at most. An entry has changed if its ctime has: writes set it, also
// those through a shared mapping, because a file is flushed when it is copied and a page that
// is clean must fault before it is written. Writes set it when they begin, so a file is copied when none is under way (AwaitCalls),
// and nothing of the source is read after it was checked. The filesystem is synced as a whole only before the first pass. Later ones
// do not wait for what others have written to it: sharing the blocks of a file flushes that (FICLONE), and what
// is read is flushed alone.
func Tree(ctx context.Context, src, dst *dir.Dir, o Options) (Result, error) {
	return tree(ctx, src, dst, o, maxNames)
}

func tree(ctx context.Context, src, dst *dir.Dir, o Options, mostNames int) (Result, error) {
	c := &copier{
		ctx: ctx, src: src, method: o.Method, hold: o.Hold, askAlone: o.Alone, maxStall: o.MaxStall, pause: o.Pause, mostNames: mostNames,
		holdAtMost: o.HoldAtMost,
	}
	result, err := c.run(dst, o.Rounds)
	if err != nil {
		return Result{}, fmt.Errorf("copy the tree %s: %w", src, err)
	}
	return result, nil
}

// A copier copies one tree, in one or more passes. It is the visitor of the source.
type copier struct {
	ctx    context.Context
	src    *dir.Dir
	method Method
	hold   func(context.Context) (still context.Context, release func() error, err error)
	pause  func(context.Context) error

	holdAtMost, compared time.Duration // the latter is how long the last check took

	askAlone func() (bool, error)
	alone    bool // no process can write: what is of the future is unchanged

	maxStall Limit
	stall    time.Duration // the longest so far

	dst     *dir.Descent[bool] // the value: what the level is a copy of has changed since it was made
	links   *dir.Dir           // files that have several names, by their inode
	round   int
	start   moment // of this pass; unset if nothing is checked
	since   moment // entries that are older are skipped; unset in the first pass
	held    bool   // Hold has all who write stopped
	whole   int    // how many levels of the path are copied whole although since is set
	buffers xattrBuffers
	data    []byte // what copyData reads into
	entries int64

	names, before Names // of what the copy is made in this pass, and was in the one before
	mostNames     int
	notesMoves    bool // an entry that gets another name has another ctime

	clock  *Clock // nil if nothing is checked
	wasSet bool   // the clock was, since the first pass began
	watch  *watch // of a file that changes; nil before the first
	torn   bool   // the attributes of a file changed during each attempt of this pass
}

func (c *copier) run(dst *dir.Dir, rounds int) (Result, error) {
	linksName := ".clone-" + rand.Text() // one of Inodes, as the file that shows the clock
	links, err := dst.Make(linksName)
	if err != nil {
		return Result{}, err
	}
	c.links = links
	var result Result
	if c.dst, err = dir.NewDescent(dst, false); err == nil {
		result, err = c.passes(rounds)
	}
	err = errors.Join(err, links.Close(), c.watch.close(), c.clock.Close())
	if err == nil {
		err = c.removeLinks(dst, linksName)
	}
	return result, err
}

// removeLinks leaves the root as it was after the last pass: the source may have another by now.
func (c *copier) removeLinks(root *dir.Dir, name string) error {
	st, err := statSelf(root)
	if err != nil {
		return err
	}
	if err := dir.RemoveTree(c.ctx, root, name, func(context.Context) error { return nil }); err != nil {
		return err
	}
	return setTimes(root, ".", st)
}

func (c *copier) passes(rounds int) (Result, error) {
	start, err := c.begin(rounds > 0)
	if err != nil {
		return Result{}, err
	}
	if err := c.pass(); err != nil {
		return Result{}, err
	}
	result := Result{Entries: c.entries, Shared: c.method == Share}
	for ; rounds > 0; rounds-- {
		changed, err := c.check(start)
		if err != nil {
			return Result{}, err
		}
		result.Changed = changed.entries
		if changed.entries == 0 || c.method == Share && changed.onlyOneFile() && !c.torn {
			result.PointInTime = true
			break
		}
		if c.hold != nil {
			return c.standstill(start, result)
		}
		if rounds == 1 {
			break
		}
		if start, err = c.nextPass(start); err != nil {
			return Result{}, err
		}
	}
	result.Stall = c.stall
	return result, nil
}

// standstill copies what has changed since the first pass began, and then what has changed since that while nothing
// is written, and checks that nothing was. While they stand still nothing waits for what others have written to
// the filesystem.
func (c *copier) standstill(start moment, first Result) (result Result, err error) {
	if c.holdAtMost > 0 && c.compared > c.holdAtMost {
		return Result{}, fmt.Errorf("%w: comparing them took %s", ErrTooMany, c.compared.Round(time.Millisecond))
	}
	if start, err = c.nextPass(start); err != nil {
		return Result{}, err
	}
	if c.method == Copy { // or removing a copy of that pass would wait for its blocks to be written
		if err := Sync(c.src); err != nil {
			return Result{}, err
		}
	}
	began := time.Now()
	before := c.ctx
	still, release, err := c.hold(before)
	if err != nil {
		return Result{}, err
	}
	c.ctx, c.held = still, true
	defer func() {
		c.ctx, c.held = before, false
		err = errors.Join(err, release())
		c.stall = max(c.stall, time.Since(began))
		result.Stall = c.stall
	}()
	if start, err = c.nextPass(start); err != nil {
		return Result{}, err
	}
	changed, err := c.check(start)
	if err != nil {
		return Result{}, err
	}
	return Result{Entries: c.entries, Shared: first.Shared, Changed: changed.entries, PointInTime: changed.entries == 0}, nil
}

// nextPass copies what has changed since the pass before, which began at last, and returns when it began itself: later than
// all writes so far by the clock of the filesystem, which ticks each few milliseconds, so that nothing counts as
// changed unless it is written to from now on.
func (c *copier) nextPass(last moment) (start moment, err error) {
	if start, err = c.later(); err != nil {
		return moment{}, err
	}
	c.round++
	c.since = last
	return start, c.pass()
}

func (c *copier) later() (moment, error) {
	first, err := c.now()
	for now := first; err == nil; now, err = c.now() {
		if first.changed != now.changed {
			return now, nil
		}
		if err := c.ctx.Err(); err != nil {
			return moment{}, err
		}
	}
	return moment{}, err
}

// begin notes the time before the first pass, and syncs after that: a write through a mapping does not
// change a ctime until the page was written to disk.
func (c *copier) begin(check bool) (moment, error) {
	c.round++
	c.torn = false
	if !check {
		return moment{}, nil
	}
	filesystem, err := dir.FilesystemOf(c.src)
	if err != nil {
		return moment{}, err
	}
	c.notesMoves = filesystem.NotesMoves()
	if c.clock, err = OpenClock(); err != nil {
		return moment{}, err
	}
	now, err := c.now()
	if err != nil {
		return moment{}, err
	}
	c.start = now
	if err := c.refuseFuture(); err != nil {
		return moment{}, err
	}
	return now, Sync(c.src)
}

// pass copies all, or in later passes what has changed since the one before, and then the attributes of src itself.
func (c *copier) pass() error {
	root, err := statSelf(c.src)
	if err != nil {
		return err
	}
	c.dst.SetValue(c.since.set && !c.since.follows(root))
	c.before = c.names
	if c.start.set {
		c.names = newNames(c.mostNames)
	}
	err = dir.Visit(c.src, c)
	if err = errors.Join(err, c.dst.Close()); err != nil {
		return err
	}
	if c.since.set {
		if err := c.removeGone(c.src, c.dst.Current().Dir); err != nil {
			return err
		}
	}
	return c.attributes(c.src, c.dst.Current().Dir)
}

// removeGone removes from the copy of a directory what that does not have any more.
func (c *copier) removeGone(src, dst *dir.Dir) error {
	for entry, err := range dst.Entries() {
		if err != nil {
			return err
		}
		gone, err := c.isGone(src, dst, entry.Name)
		if err == nil && gone {
			err = c.remove(dst, entry.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) isGone(src, dst *dir.Dir, name string) (bool, error) {
	exists, err := src.Exists(name)
	if exists || err != nil {
		return false, err
	}
	st, err := stat(dst, name)
	if err != nil {
		return false, err
	}
	links, err := c.links.ID()
	return links.Ino != st.Ino, err
}

// remove removes an entry of the copy. A file gives its blocks back first: XFS counts them until some time after the last name is
// gone, and there may be no room for them and those of the next copy.
func (c *copier) remove(in *dir.Dir, name string) error {
	if st, err := stat(in, name); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && (st.Nlink == 1 || in == c.links) {
		fd, err := unix.Openat(in.Fd(), name, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &fs.PathError{Op: "truncate", Path: in.String() + "/" + name, Err: err}
		}
		_ = unix.Close(fd) // nothing was written
	}
	return dir.RemoveTree(c.ctx, in, name, func(ctx context.Context) error { return ctx.Err() })
}

func (c *copier) next() error {
	if c.pause != nil {
		if err := c.pause(c.ctx); err != nil {
			return err
		}
	}
	return c.ctx.Err()
}

// Mount is an error: a copy without what is below the mount would be none.
func (c *copier) Mount(in *dir.Dir, name string) error { return Mounted(in, name) }

// File copies an entry that is no directory.
func (c *copier) File(in *dir.Dir, name string) error {
	if err := c.next(); err != nil {
		return err
	}
	st, err := StatSource(in, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	to := c.dst.Current()
	if c.updating() {
		kept, err := c.keeps(name, st)
		if kept || err != nil {
			return err
		}
		if err := c.remove(to.Dir, name); err != nil {
			return err
		}
	}
	c.entries++
	err = c.afresh(to.Dir, name, func() error {
		if st.Nlink > 1 {
			return c.link(in, name, st, to.Dir)
		}
		return c.make(source{in, name, st}, to.Dir, name)
	})
	if errors.Is(err, ErrGone) {
		return nil
	}
	if err == nil {
		c.names.Add(to.Known.Ino, name, st)
	}
	return err
}

// updating says that only what changed is copied.
func (c *copier) updating() bool { return c.since.set && c.whole == 0 }

// keeps reports whether what was copied under a name before is a copy of the entry that has it now, as that is, and notes so.
func (c *copier) keeps(name string, st *unix.Stat_t) (bool, error) {
	in := c.dst.Current()
	if !c.isSettled(st) || !c.isCopy(name, st) || in.Value && !copiedByDescriptor(st) {
		return false, nil
	}
	like, err := isLike(st, in.Dir, name) // what was gone when the pass before ended may be back
	if like && err == nil {
		c.noteKept(in, name, st)
	}
	return like, err
}

// isSettled says that an entry was as it is when the pass before began.
func (c *copier) isSettled(st *unix.Stat_t) bool {
	since := c.since
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
func (c *copier) isCopy(name string, st *unix.Stat_t) bool {
	in := c.dst.Current()
	return c.before.Has(in.Known.Ino, name, st, c.since.follows(st) && (c.showsMoves(st) || !in.Value))
}

// showsMoves reports whether an entry has another ctime after it was renamed. That of the root of a btrfs subvolume is forgotten with
// the inode.
func (c *copier) showsMoves(st *unix.Stat_t) bool {
	return c.notesMoves && st.Ino != ioctl.SubvolumeRoot
}

// noteKept notes what is known for sure: a directory that had not changed may have since.
func (c *copier) noteKept(in dir.Level[bool], name string, st *unix.Stat_t) {
	if !c.showsMoves(st) && !c.before.Has(in.Known.Ino, name, st, false) {
		c.names.LeaveOut()
		return
	}
	c.names.Add(in.Known.Ino, name, st)
}

// Enter makes a directory, or goes into the one that is there.
func (c *copier) Enter(d, _ *dir.Dir, name string) error {
	if err := c.next(); err != nil {
		return err
	}
	st, err := statSelf(d)
	if err != nil {
		return err
	}
	if c.updating() {
		entered, err := c.enterCopy(name, st)
		if entered || err != nil {
			return err
		}
		// It may be another directory by now, which was moved here with all that it holds.
		if err := c.remove(c.dst.Current().Dir, name); err != nil {
			return err
		}
	}
	if c.since.set {
		c.whole++
	}
	c.entries++
	in := c.dst.Current()
	c.names.Add(in.Known.Ino, name, st)
	return c.afresh(in.Dir, name, func() error { return c.dst.Make(name, false) })
}

// afresh makes an entry of the copy under a name that no other entry may have. Where one was removed and made again, a directory can
// list it twice in a pass (readdir(3)): the last copy counts.
func (c *copier) afresh(in *dir.Dir, name string, make func() error) error {
	err := make()
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := c.remove(in, name); err != nil {
		return err
	}
	return make()
}

// enterCopy goes into what was made of a directory before, if that is there.
func (c *copier) enterCopy(name string, st *unix.Stat_t) (bool, error) {
	if !c.isCopy(name, st) {
		return false, nil
	}
	in := c.dst.Current()
	err := c.dst.Enter(name, !c.since.follows(st))
	if dir.IsMissing(err) {
		return false, nil
	}
	if err == nil {
		c.noteKept(in, name, st)
	}
	return err == nil, err
}

// Leave removes from the copy of a directory that changed what is gone, and gives it its attributes: its times last, which
// entries change.
func (c *copier) Leave(d *dir.Dir) error {
	to := c.dst.Current()
	if to.Value {
		if err := c.removeGone(d, to.Dir); err != nil {
			return err
		}
	}
	if c.whole > 0 {
		c.whole--
	}
	if err := c.attributes(d, to.Dir); err != nil {
		return err
	}
	return c.dst.Leave()
}

// link makes one more name of a file. The file itself is made in the directory of links,
// under what identifies it: a table of millions of them would not fit into memory.
func (c *copier) link(in *dir.Dir, name string, st *unix.Stat_t, to *dir.Dir) error {
	file := Identify(in, name, st)
	for round := c.round; round >= c.oldest(st); round-- {
		made := linkName(round, file)
		like, err := isLike(st, c.links, made)
		if err != nil {
			return err
		}
		if !like && round < c.round {
			continue
		}
		if err := unix.Linkat(c.links.Fd(), made, to.Fd(), name, 0); !errors.Is(err, unix.ENOENT) {
			return linkError(to, name, err)
		}
	}
	for round := 1; round < c.oldest(st); round++ { // none of these copies keeps a name
		if err := c.remove(c.links, linkName(round, file)); err != nil {
			return err
		}
	}
	node := linkName(c.round, file)
	if err := c.make(source{in, name, st}, c.links, node); err != nil {
		return err
	}
	return linkError(to, name, unix.Linkat(c.links.Fd(), node, to.Fd(), name, 0))
}

// oldest is the first round whose copy of a file is that of the file as it is. A file that
// did not change keeps the copy to which its other names lead, also where one of them is in
// a directory that is copied whole.
func (c *copier) oldest(st *unix.Stat_t) int {
	if c.since.set && c.isSettled(st) {
		return 1
	}
	return c.round
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
