package dir

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"
)

// LastChange is when something in the tree of an entry last changed (st_ctime), as far as that
// shows on the way down to the entry that changed last in each directory: of a tree that is
// being filled, one directory after the other, that is the way to where it grows. It reads a
// directory of each level, not the whole tree, and calls step for each entry of those. It
// returns fs.ErrNotExist for a missing name.
func LastChange(ctx context.Context, d *Dir, name string, step func()) (time.Time, error) {
	last, err := Changed(d, name)
	if err != nil {
		return last, err
	}
	at, err := d.OpenInside(name)
	for err == nil {
		var newest string
		var changed time.Time
		newest, changed, err = newestIn(ctx, at, step)
		if changed.After(last) {
			last = changed
		}
		var next *Dir
		if err == nil && newest != "" {
			next, err = at.OpenInside(newest)
		}
		err = errors.Join(err, at.Close())
		if next == nil {
			break
		}
		at = next
	}
	if IsMissing(err) || errors.Is(err, unix.EXDEV) { // no directory, or replaced meanwhile
		err = nil
	}
	return last, err
}

// newestIn is the entry of a directory that changed last; empty if there is none.
func newestIn(ctx context.Context, d *Dir, step func()) (name string, changed time.Time, err error) {
	for entry, err := range d.Entries() {
		if err != nil {
			return "", time.Time{}, err
		}
		if err := ctx.Err(); err != nil {
			return "", time.Time{}, err
		}
		step()
		at, err := Changed(d, entry.Name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", time.Time{}, err
		}
		if name == "" || at.After(changed) {
			name, changed = entry.Name, at
		}
	}
	return name, changed, nil
}
