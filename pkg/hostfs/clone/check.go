package clone

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A moment is a time by the clock that gives files their ctime, which is a server's on a
// network filesystem. By this machine's monotonic clock it lies between two others: the process may
// have had to wait for a CPU meanwhile.
type moment struct {
	set           bool
	changed       unix.Timespec
	before, after time.Time
}

// Clocks are that of a filesystem and that of this machine.
type clocks struct {
	in      *dir.Dir // where a file can be made
	machine *Clock   // nil if nothing is checked
	wasSet  bool     // since it was opened
	local   bool     // the filesystem has that of this machine
	still   bool     // those who write stand still
	seconds bool     // the filesystem keeps whole seconds, as ext4 does in inodes of 128 bytes
}

// now asks the clock of the filesystem: it makes a file, but not while that may have to wait for what others write.
func (c *clocks) now() (moment, error) {
	const name = "clock"
	before := time.Now()
	if c.local && c.still { // it gives no ctime that is earlier (current_time of Linux); those of the past may be later, within a tick
		var now unix.Timespec
		err := os.NewSyscallError("clock_gettime", unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now))
		if c.seconds {
			now.Nsec = 0
		}
		return moment{set: true, changed: now, before: before, after: time.Now()}, err
	}
	f, err := c.in.MakeFile(name)
	if err != nil {
		return moment{}, err
	}
	if err := f.Close(); err != nil {
		return moment{}, err
	}
	st, err := stat(c.in, name)
	if err != nil {
		return moment{}, err
	}
	return moment{set: true, changed: st.Ctim, before: before, after: time.Now()}, c.in.Remove(name)
}

// later is the first moment after all that has happened so far.
func (c *clocks) later(ctx context.Context) (moment, error) {
	first, err := c.now()
	if err == nil && c.local && c.still { // a ctime may be finer than this clock
		err = os.NewSyscallError("clock_gettime", unix.ClockGettime(unix.CLOCK_REALTIME, &first.changed))
	}
	for now := first; err == nil; now, err = c.now() {
		if c.still && now.changed.Nano() > first.changed.Nano() || !c.still && first.changed != now.changed {
			return now, nil
		}
		if err := ctx.Err(); err != nil {
			return moment{}, err
		}
	}
	return moment{}, err
}

// wereSetBack says that that of this machine was set since it was opened, or that that of the filesystem was set back since a moment.
func (c *clocks) wereSetBack(since moment) (bool, error) {
	now, err := c.now()
	if err != nil {
		return false, err
	}
	set, err := c.machine.WasSet()
	c.wasSet = c.wasSet || set
	return c.wasSet || since.setBack(now), err
}

// follows says that an entry was last changed before the moment. Clocks of filesystems are
// coarse (a few milliseconds): what changed in the same tick counts as changed.
func (m moment) follows(st *unix.Stat_t) bool {
	return st.Ctim.Sec < m.changed.Sec || st.Ctim.Sec == m.changed.Sec && st.Ctim.Nsec < m.changed.Nsec
}

// UnderWay is for how long a store through a mapping or an asynchronous direct write may be under way, whose ctime is set when it
// begins, and which waits for no lock. For others see AwaitCalls. Sharing
// blocks waits for direct writes; where they are read, one that takes longer is missing.
const UnderWay = time.Second

func (m moment) earlier(by time.Duration) moment {
	m.changed = unix.NsecToTimespec(m.changed.Nano() - by.Nanoseconds())
	return m
}

// tolerated is by how much the two clocks may disagree before the filesystem's counts as
// set back, which would hide changes.
const tolerated = 20 * time.Millisecond

func (m moment) setBack(later moment) bool {
	passed := time.Unix(later.changed.Unix()).Sub(time.Unix(m.changed.Unix()))
	return passed+tolerated < later.before.Sub(m.after)
}

// ErrFuture reports an entry whose ctime is in the future, as after a clock was set wrong: it would count as changed until then.
var ErrFuture = errors.New("its ctime is in the future")

// isAhead says that an entry has a ctime that the clock of the filesystem has not reached yet.
func (m moment) isAhead(st *unix.Stat_t) bool {
	latest := time.Unix(m.changed.Unix()).Add(time.Since(m.before) + tolerated)
	return time.Unix(st.Ctim.Unix()).After(latest)
}

// refuseFuture returns ErrFuture for a source with entries of the future, unless no process can write to it. One file that shares
// its blocks may always change.
func (c *copier) refuseFuture(ctx context.Context, start moment) error {
	if c.options.Alone == nil {
		return nil
	}
	root, err := statSelf(c.src)
	if err != nil {
		return err
	}
	f := &future{ctx: ctx, start: start, shared: c.options.Method == Share}
	if err = f.refuse(root, c.src.String()); err == nil {
		err = dir.Visit(c.src, f)
	}
	if !errors.Is(err, ErrFuture) {
		return err
	}
	alone, askErr := c.options.Alone()
	if askErr != nil {
		return askErr
	}
	if c.alone = alone; alone {
		return nil
	}
	return err
}

// A future is a visitor that ends with ErrFuture at the first entry of the future that may not change.
type future struct {
	ctx    context.Context
	start  moment
	shared bool // files share their blocks
	may    bool // one file may, and was seen
}

func (f *future) refuse(st *unix.Stat_t, path string) error {
	switch {
	case !f.start.isAhead(st):
	case !f.may && f.shared && st.Mode&unix.S_IFMT == unix.S_IFREG:
		f.may = true
	default:
		return fmt.Errorf("%s: %w, %s", path, ErrFuture, time.Unix(st.Ctim.Unix()).UTC().Format(time.RFC3339))
	}
	return f.ctx.Err()
}

// File looks at an entry. One that is gone is found out later.
func (f *future) File(in *dir.Dir, name string) error {
	st, err := stat(in, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.refuse(st, in.String()+"/"+name)
}

// Enter looks at a directory.
func (f *future) Enter(d, _ *dir.Dir, _ string) error {
	st, err := statSelf(d)
	if err != nil {
		return err
	}
	return f.refuse(st, d.String())
}

// Leave has nothing to look at.
func (f *future) Leave(*dir.Dir) error { return nil }

// changes counts what changed since a moment.
type changes struct {
	since   moment
	alone   bool // what is of the future is unchanged
	look    Look
	entries int64
	files   int64 // regular ones among them
}

func (c changes) onlyOneFile() bool { return c.entries == 1 && c.files == 1 }

// check counts what changed in the source. If the clock of this machine was set since the first pass began, everything counts, and
// so it does if that of a network filesystem's server was set back since the last one began.
func (c *copier) check(ctx context.Context, since moment) (changes, error) {
	began := time.Now()
	defer func() { c.compared = time.Since(began) }()
	found := &changes{since: since, alone: c.alone, look: c.look}
	root, err := c.look.Open(c.src)
	if err != nil {
		return changes{}, err
	}
	found.count(root)
	if err := dir.Visit(c.src, found); err != nil {
		return changes{}, err
	}
	back, err := c.clocks.wereSetBack(since)
	if err != nil {
		return changes{}, err
	}
	if back {
		found.entries, found.files = max(found.entries, 1), 0
	}
	return *found, ctx.Err()
}

func (c *changes) count(st *unix.Stat_t) {
	if c.since.follows(st) || c.alone && c.since.isAhead(st) {
		return
	}
	c.entries++
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		c.files++
	}
}

// Mount is an error, as for a copier.
func (c *changes) Mount(in *dir.Dir, name string) error { return Mounted(in, name) }

// File counts an entry. One that is gone shows by its directory.
func (c *changes) File(in *dir.Dir, name string) error {
	st, err := c.look.Stat(in, name)
	if errors.Is(err, fs.ErrNotExist) {
		c.entries++
		return nil
	}
	if err == nil {
		c.count(st)
	}
	return err
}

// Enter counts a directory.
func (c *changes) Enter(d, _ *dir.Dir, _ string) error {
	st, err := c.look.Open(d)
	if err == nil {
		c.count(st)
	}
	return err
}

// Leave has nothing to count.
func (c *changes) Leave(*dir.Dir) error { return nil }
