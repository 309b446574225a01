package clone

import (
	"errors"
	"io/fs"
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

// now asks the clock of the filesystem: it makes a file.
func (c *copier) now() (moment, error) {
	const name = "clock"
	before := time.Now()
	f, err := c.links.MakeFile(name)
	if err != nil {
		return moment{}, err
	}
	if err := f.Close(); err != nil {
		return moment{}, err
	}
	st, err := stat(c.links, name)
	if err != nil {
		return moment{}, err
	}
	return moment{set: true, changed: st.Ctim, before: before, after: time.Now()}, c.links.Remove(name)
}

// follows says that an entry was last changed before the moment. Clocks of filesystems are
// coarse (a few milliseconds): what changed in the same tick counts as changed.
func (m moment) follows(st *unix.Stat_t) bool {
	return st.Ctim.Sec < m.changed.Sec || st.Ctim.Sec == m.changed.Sec && st.Ctim.Nsec < m.changed.Nsec
}

// tolerated is by how much the two clocks may disagree before the filesystem's counts as
// set back, which would hide changes.
const tolerated = 20 * time.Millisecond

func (m moment) setBack(later moment) bool {
	passed := time.Unix(later.changed.Unix()).Sub(time.Unix(m.changed.Unix()))
	return passed+tolerated < later.before.Sub(m.after)
}

// changes counts what changed since a moment.
type changes struct {
	since   moment
	entries int64
	files   int64 // regular ones among them
}

func (c changes) onlyOneFile() bool { return c.entries == 1 && c.files == 1 }

// check counts what changed in the source. If the clock was set back, everything counts.
func (c *copier) check(since moment) (changes, error) {
	found := &changes{since: since}
	root, err := statSelf(c.src)
	if err != nil {
		return changes{}, err
	}
	found.count(root)
	if err := c.src.Visit(found); err != nil {
		return changes{}, err
	}
	now, err := c.now()
	if err != nil {
		return changes{}, err
	}
	if since.setBack(now) {
		found.entries, found.files = max(found.entries, 1), 0
	}
	return *found, c.ctx.Err()
}

func (c *changes) count(st *unix.Stat_t) {
	if c.since.follows(st) {
		return
	}
	c.entries++
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		c.files++
	}
}

// File counts an entry. One that is gone shows by its directory.
func (c *changes) File(in *dir.Dir, name string) error {
	st, err := stat(in, name)
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
	st, err := statSelf(d)
	if err == nil {
		c.count(st)
	}
	return err
}

// Leave has nothing to count.
func (c *changes) Leave(*dir.Dir) error { return nil }
