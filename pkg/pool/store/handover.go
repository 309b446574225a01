package store

import (
	"errors"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A VolumePath is where the directory of a volume is: a name in a directory, which may be a pool.
type VolumePath struct {
	Directory string `json:"directory"` // absolute
	Name      string `json:"name"`
}

// String is the path.
func (p VolumePath) String() string { return p.Directory + "/" + p.Name }

// A Handover moves a directory with its record from one place to another, or leaves it in its place for another
// process. The processes that serve the two places learn of it when they next read the disk for the volume, and
// within a minute. No pod may use the volume meanwhile. Each step can be repeated, and Reverse goes back.
type Handover struct{ From, To VolumePath }

// Reverse is the way back.
func (h Handover) Reverse() Handover { return Handover{From: h.To, To: h.From} }

// inPlace reports whether the directory stays.
func (h Handover) inPlace() bool { return h.From == h.To }

// Whereabouts are what there is of a volume on both sides of a Handover.
type Whereabouts struct{ From, To Presence }

// A Presence is what a directory has of a volume.
type Presence struct {
	Directory bool
	Recorded  bool
	// Bytes is what the record promises.
	Bytes int64
	// Provisional: no client is known to know of the volume.
	Provisional bool
	// Client is what a client is recorded to know it by, or empty.
	Client string
	// Limited: the record says that the kernel enforces the size.
	Limited bool
	// Created is when the record was made, by the clock of the node.
	Created time.Time
}

// Find reads what is where. Errors: ErrDamagedRecord, ErrIO, ErrPrecondition for a volume that moves between nodes.
func (h Handover) Find() (w Whereabouts, err error) {
	return w, h.open(func(from, to *ParentDir) error {
		var err error
		if w.From, err = find(from, h.From.Name); err != nil {
			return err
		}
		w.To, err = find(to, h.To.Name)
		return err
	})
}

func find(parent *ParentDir, name string) (p Presence, err error) {
	if p.Directory, err = parent.Root().IsDir(name); err != nil {
		return p, err
	}
	rec, err := parent.Record(name)
	if err != nil || rec == nil {
		return p, err
	}
	if rec.Mode != volume.ModeMount {
		return p, fmt.Errorf("%w: %s/%s is a block volume", volume.ErrInvalid, parent.Root(), name)
	}
	if err := (Entry{Record: rec}).Unmoved(); err != nil {
		return p, fmt.Errorf("%s/%s: %w", parent.Root(), name, err)
	}
	return Presence{
		Directory: p.Directory, Recorded: true, Bytes: rec.Bytes, Provisional: rec.Provisional, Client: rec.Client, Limited: rec.Quota != "", Created: rec.Created,
	}, nil
}

// Promise is the size that a record of so many bytes gets: whole blocks.
func (h Handover) Promise(bytes int64) (promised int64, err error) {
	return promised, h.open(func(_, to *ParentDir) error {
		space, err := dir.SpaceOf(to.Root())
		if err != nil {
			return err
		}
		promised, err = volume.Range{Required: bytes}.Promise(space.BlockBytes)
		return err
	})
}

// Check finds all that would stop the steps, and changes nothing.
func (h Handover) Check() error {
	return h.open(func(from, to *ParentDir) error {
		var problems []error
		if !to.IsPool() {
			problems = append(problems, fmt.Errorf("%s: %w", h.To.Directory, ErrNoLayout))
		}
		if is, err := from.Root().IsDir(h.From.Name); err != nil || !is {
			problems = append(problems, errors.Join(err, fmt.Errorf("%s is not a directory", h.From)))
		}
		if _, err := volume.ParseID(h.To.Name); err != nil {
			problems = append(problems, err)
		}
		return errors.Join(append(problems, h.checkRoom(to), h.checkMove(from, to))...)
	})
}

// checkRoom refuses a full filesystem if the volume needs a record there.
func (h Handover) checkRoom(to *ParentDir) error {
	if rec, err := to.Record(h.To.Name); err != nil || rec != nil {
		return nil //nolint:nilerr // Find says it
	}
	space, err := dir.SpaceOf(to.Root())
	if err == nil && (space.FreeBytes <= 0 || space.OutOfInodes()) {
		err = fmt.Errorf("%s has no room for the record of %s: free some first", h.To.Directory, h.To.Name)
	}
	return err
}

// Movable finds all that would stop Move.
func (h Handover) Movable() error { return h.open(h.checkMove) }

func (h Handover) checkMove(from, to *ParentDir) error {
	if h.inPlace() {
		return nil
	}
	var problems []error
	if taken, err := to.Root().Exists(h.To.Name); err != nil || taken {
		problems = append(problems, errors.Join(err, fmt.Errorf("%s is there already", h.To)))
	}
	if fixed, err := dir.Protected(from.Root(), h.From.Name); err != nil || fixed {
		problems = append(problems, errors.Join(err, fmt.Errorf("%s is immutable or append-only, so that it cannot be renamed: chattr -i -a %s", h.From, h.From)))
	}
	if err := checkNoMount(from, h.From); err != nil {
		problems = append(problems, err)
	}
	// Both: rename(2) fails with EXDEV between two mounts of one filesystem, and on btrfs between subvolumes.
	mount, err := dir.SameMount(from.Root(), to.Root())
	a, errA := from.Root().ID()
	b, errB := to.Root().ID()
	if err := errors.Join(err, errA, errB); err != nil {
		problems = append(problems, err)
	} else if !mount || a.Dev != b.Dev {
		problems = append(problems, fmt.Errorf("%s and %s are not in one mount of one filesystem, so that nothing can be renamed from one to the other: "+
			"have a directory above both mounted here", h.From.Directory, h.To.Directory))
	}
	return errors.Join(problems...)
}

// checkNoMount refuses a directory on which something is mounted: rename(2) fails with EBUSY.
func checkNoMount(parent *ParentDir, p VolumePath) error {
	d, err := parent.Root().Open(p.Name)
	if dir.IsMissing(err) {
		return nil // Check says so
	}
	if err != nil {
		return err
	}
	same, err := dir.SameMount(parent.Root(), d)
	if err == nil && !same {
		err = fmt.Errorf("%s is a mount point, which cannot be renamed: unmount it, or migrate it by hand", p)
	}
	return errors.Join(err, d.Close())
}

// Confirm records that the volume is not provisional, so that no driver removes its directory while no PersistentVolume
// names it.
func (h Handover) Confirm() error {
	return h.open(func(from, _ *ParentDir) error { return from.Confirm(h.From.Name) })
}

// Move renames the directory, durably.
func (h Handover) Move() error {
	return h.open(func(from, to *ParentDir) error { return to.Take(from, h.From.Name, h.To.Name) })
}

// Record gives the directory, which is in its new place, its record: that of the old place, or else one of
// so many bytes. Then it removes that of the old place.
func (h Handover) Record(bytes int64) error {
	return h.open(func(from, to *ParentDir) error {
		if err := to.KeepRecord(from, h.From.Name, h.To.Name, bytes); err != nil || h.inPlace() {
			return err
		}
		return from.DropRecord(h.From.Name)
	})
}

// Forget removes the records of both places, for a directory whose new place keeps none.
func (h Handover) Forget() error {
	return h.open(func(from, to *ParentDir) error {
		return errors.Join(from.DropRecord(h.From.Name), to.DropRecord(h.To.Name))
	})
}

func (h Handover) open(do func(from, to *ParentDir) error) error {
	from, err := OpenParentDir(h.From.Directory)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := OpenParentDir(h.To.Directory)
	if err != nil {
		return err
	}
	defer to.Close()
	return do(from, to)
}
