// Package upstream reads and removes snapshots as the upstream KubeVirt driver leaves them in a
// pool's snapshotPath. It makes none, and writes nothing into what it does not remove.
//
//	<snapshotPath>/<name>/data/...            what `cp -rp --reflink=auto` copied of the volume
//	<snapshotPath>/<name>/<volume id>/        empty: it names the volume
//
// Nothing marks the end of a copy, so that one which failed half-way looks like a whole one.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	dataName = "data"
	// removedPrefix begins the name of a snapshot that is being removed. No snapshot's name
	// begins so.
	removedPrefix = ".removed-"
)

// A Snapshot is what is known of one.
type Snapshot struct {
	ID volume.ID
	// Source is the volume that it is of.
	Source volume.ID
	// Made is when its directory last changed, which is when the copy began.
	Made time.Time
}

// Origin is what a record says of a volume that is made from the snapshot, or of the snapshot
// itself. It is not known what size the volume was of, and which one of that name.
func (s Snapshot) Origin() volume.Origin {
	return volume.Origin{ID: s.Source.String(), UID: "upstream", Method: volume.ByCopy, Consistency: volume.Unverified, Cut: s.Made}
}

// List has the ids of all directories that may be snapshots, in order.
func List(in *dir.Dir) ([]volume.ID, error) {
	var all []volume.ID
	for entry, err := range in.Entries() {
		if err != nil {
			return nil, err
		}
		if id, err := volume.ParseSnapshot(entry.Name); err == nil && entry.IsDir {
			all = append(all, id)
		}
	}
	slices.SortFunc(all, volume.ID.Compare)
	return all, nil
}

// Open opens what a snapshot has of its volume. Errors: volume.ErrNotFound, and
// volume.ErrDamagedRecord for a directory that is not as the upstream driver leaves a snapshot.
func Open(in *dir.Dir, id volume.ID) (Snapshot, *dir.Dir, error) {
	name, _ := id.Snapshot()
	d, err := open(in, id)
	if err != nil {
		return Snapshot{}, nil, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	of, err := parts(d)
	switch {
	case err != nil:
		return Snapshot{}, nil, err
	case !of.data || of.source == (volume.ID{}):
		return Snapshot{}, nil, fmt.Errorf("%w of %s: it has no directory %q, or none that names its volume: the upstream KubeVirt driver did not finish making or removing it", volume.ErrDamagedRecord, id.Named(), dataName)
	}
	made, err := dir.Changed(in, name)
	if err != nil {
		return Snapshot{}, nil, err
	}
	data, err := d.OpenInside(dataName)
	if err != nil {
		return Snapshot{}, nil, err
	}
	return Snapshot{ID: id, Source: of.source, Made: made.UTC()}, data, nil
}

// Read is Open for callers that do not need the content.
func Read(in *dir.Dir, id volume.ID) (Snapshot, error) {
	s, data, err := Open(in, id)
	if err != nil {
		return Snapshot{}, err
	}
	return s, data.Close()
}

func open(in *dir.Dir, id volume.ID) (*dir.Dir, error) {
	name, _ := id.Snapshot()
	d, err := in.OpenInside(name)
	if dir.IsMissing(err) {
		return nil, fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
	}
	return d, err
}

// contents are the entries of a snapshot's directory.
type contents struct {
	data   bool
	source volume.ID // the zero id for none
}

// parts returns ErrPrecondition for a directory with anything else in it than a snapshot has.
func parts(d *dir.Dir) (contents, error) {
	var of contents
	for entry, err := range d.Entries() {
		if err != nil {
			return contents{}, err
		}
		id, err := volume.ParseID(entry.Name)
		switch {
		case entry.IsDir && entry.Name == dataName:
			of.data = true
		case entry.IsDir && err == nil && of.source == (volume.ID{}):
			of.source = id
		default:
			return contents{}, fmt.Errorf("%w: %s has %q in it, and so is no snapshot of the upstream KubeVirt driver", volume.ErrPrecondition, d, entry.Name)
		}
	}
	if of.source == (volume.ID{}) {
		return of, nil
	}
	mark, err := d.OpenInside(of.source.String())
	if err != nil {
		return contents{}, err
	}
	defer func() { _ = mark.Close() }() // opened for reading
	for _, err := range mark.Entries() {
		if err == nil {
			err = fmt.Errorf("%w: %s is not empty, and so does not name the volume of a snapshot of the upstream KubeVirt driver", volume.ErrPrecondition, mark)
		}
		return contents{}, err
	}
	return of, nil
}

// Remove removes a snapshot, whole or not, with all that is in it. It first gets a name that
// is no snapshot's, durably, so that after a crash there is no half of one: the next Remove of
// the same snapshot goes on. A directory with anything else in it is left alone. The caller
// has the lock of the id. Errors: volume.ErrNotFound, volume.ErrPrecondition.
func Remove(ctx context.Context, in *dir.Dir, id volume.ID, pause func(context.Context) error) error {
	name, _ := id.Snapshot()
	aside := removedPrefix + name
	// What an earlier call began goes first: the name is needed.
	begun, err := in.Exists(aside)
	if err != nil {
		return err
	}
	if begun {
		if err := erase(ctx, in, aside, pause); err != nil {
			return err
		}
	}
	d, err := open(in, id)
	if errors.Is(err, volume.ErrNotFound) && begun {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = parts(d)
	if err := errors.Join(err, d.Close()); err != nil {
		return err
	}
	if err := in.Rename(name, in, aside); err != nil {
		if errors.Is(err, fs.ErrNotExist) { // another node of a shared pool was faster
			return fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
		}
		return err
	}
	if err := in.Sync(); err != nil {
		return err
	}
	return erase(ctx, in, aside, pause)
}

func erase(ctx context.Context, in *dir.Dir, name string, pause func(context.Context) error) error {
	if err := dir.RemoveTree(ctx, in, name, pause); err != nil {
		return err
	}
	return in.Sync()
}

// Below is the path of a pool's upstream snapshots from the root of the pool; false if they lie
// elsewhere.
func Below(c *poolconfig.Config) (string, bool) { return strings.CutPrefix(c.SnapshotPath, c.Path+"/") }

// In opens the directory of a pool's upstream snapshots: from the root of the pool if it lies in
// that, or else by its path. It returns nil if none is configured, or if no driver has made the
// one in the pool, since the upstream driver makes it with the first snapshot. One elsewhere that
// is missing is volume.ErrUnavailable: it may not be mounted.
func In(root *dir.Dir, c *poolconfig.Config) (*dir.Dir, error) {
	if c.SnapshotPath == "" {
		return nil, nil
	}
	below, inside := Below(c)
	if !inside {
		d, err := dir.Open(c.SnapshotPath)
		if err != nil {
			err = fmt.Errorf("%w: the snapshotPath of pool %q: %w; mount it into the driver's container, or remove the key", volume.ErrUnavailable, c.Name, err)
		}
		return d, err
	}
	at, err := root.Reopen()
	if err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(below, "/") {
		next, err := at.Open(name)
		_ = at.Close() // opened for reading
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("the snapshotPath of pool %q: %w", c.Name, err)
		}
		at = next
	}
	return at, nil
}
