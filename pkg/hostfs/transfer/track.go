package transfer

import (
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A track says, on the way through the source, what is as it was in the pass before.
type track struct {
	since  time.Time   // zero: nothing is known of the target
	before clone.Names // of what the target was made in that pass
	levels []level     // from the root to where the walk is
	whole  int         // how many of them may be others than in the pass before
	base   base
}

// A level is a directory on the way.
type level struct {
	number  uint64 // of its inode
	changed bool   // since the pass before
	whole   bool   // it counts in track.whole
	entries int64  // in it, so far
	handle  *handle
}

func (t *track) begin(root *unix.Stat_t) {
	t.levels = append(t.levels, level{number: root.Ino, changed: t.hasChanged(root)})
}

func (t *track) enter(name string, st *unix.Stat_t) {
	whole := !t.isSame(name, st)
	in := t.current()
	in.handle.release() // or a tower of directories would take as many
	in.handle = nil
	if whole {
		t.whole++
	}
	t.levels = append(t.levels, level{number: st.Ino, changed: t.hasChanged(st), whole: whole})
	t.base.enter(name)
}

func (t *track) up() {
	last := t.current()
	if last.whole {
		t.whole--
	}
	last.handle.release()
	t.levels = t.levels[:len(t.levels)-1]
	t.base.leave()
}

// close leaves all directories.
func (t *track) close() {
	for len(t.levels) > 0 {
		t.up()
	}
}

func (t *track) current() *level { return &t.levels[len(t.levels)-1] }

// hasChanged says whether an entry may be another than in the pass before, as far as its ctime tells. A store through a mapping or
// an asynchronous direct write, whose ctime is set when it begins, may have been under way then.
func (t *track) hasChanged(st *unix.Stat_t) bool {
	since := t.since
	if format(st) == unix.S_IFREG {
		since = since.Add(-clone.UnderWay)
	}
	return t.since.IsZero() || !time.Unix(st.Ctim.Unix()).Before(since)
}

// isSame says that what has a name in the current directory is, by all that is known, what had it in the pass before. An old ctime
// does not say so: where XFS exchanges two entries (renameat2(2), RENAME_EXCHANGE), only their directories have another.
func (t *track) isSame(name string, st *unix.Stat_t) bool {
	in := t.current()
	if t.since.IsZero() || t.whole > 0 {
		return false
	}
	return t.before.Has(in.number, name, st, !in.changed)
}

func (t *track) isSettled(name string, st *unix.Stat_t) bool {
	return t.isSame(name, st) && !t.hasChanged(st)
}

// A handle keeps a directory open for the files in it that are pending.
type handle struct {
	*dir.Dir
	users int
}

func (h *handle) release() {
	if h == nil {
		return
	}
	if h.users--; h.users == 0 {
		_ = h.Close() // opened for reading
	}
}

// hold keeps the current directory open for a file in it.
func (t *track) hold(in *dir.Dir) (*handle, error) {
	at := t.current()
	if at.handle == nil {
		d, err := in.Reopen()
		if err != nil {
			return nil, err
		}
		at.handle = &handle{Dir: d, users: 1}
	}
	at.handle.users++
	return at.handle, nil
}
