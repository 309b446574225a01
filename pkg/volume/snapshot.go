package volume

import (
	"fmt"
	"strings"
	"time"
)

// snapshotPrefix begins the id of a snapshot. No volume id begins with it, and all volume ids
// come before it in the order of their bytes.
const snapshotPrefix = "~"

// ParseSnapshot is the id of the snapshot of a name, which is one as ParseID takes. A pool
// keeps volumes and snapshots by ids of one kind, so that both have the same records, limits,
// promises, steps and locks. ParseID never returns the id of a snapshot: no call on a volume
// reaches one.
func ParseSnapshot(name string) (ID, error) {
	if err := checkElement("snapshot name", name); err != nil {
		return ID{}, err
	}
	if len(name) > MaxID-len(snapshotPrefix) {
		return ID{}, fmt.Errorf("%w: the snapshot name has %d bytes, at most %d are allowed", ErrInvalid, len(name), MaxID-len(snapshotPrefix))
	}
	return ID{name: snapshotPrefix + name}, nil
}

// referencePrefix begins the id of a reference: a snapshot that a move between nodes makes for itself. ParseSnapshot returns none
// of such an id: no call on a snapshot reaches one.
const referencePrefix = snapshotPrefix + "_"

// Reference is the id of the reference of a volume that has a token: letters and digits.
func (id ID) Reference(token string) (ID, error) {
	s := referencePrefix + token + "." + id.name
	if err := checkElement("token", token); err != nil {
		return ID{}, err
	}
	if strings.Contains(token, ".") || id.IsSnapshot() || len(s) > MaxID {
		return ID{}, fmt.Errorf("%w: %s cannot have the reference %q", ErrInvalid, id.Named(), token)
	}
	return ID{name: s}, nil
}

// Referenced is the volume that a reference is of, and its token; false for what is none.
func (id ID) Referenced() (of ID, token string, is bool) {
	name, is := strings.CutPrefix(id.name, referencePrefix)
	if !is {
		return ID{}, "", false
	}
	token, name, _ = strings.Cut(name, ".")
	return ID{name: name}, token, true
}

// IsReference reports whether it is the id of a reference.
func (id ID) IsReference() bool { return strings.HasPrefix(id.name, referencePrefix) }

// BeforeReferences comes before all references, and after all snapshots that come before them.
func BeforeReferences() ID { return ID{name: referencePrefix} }

// ParseEntry takes the id of a volume, a snapshot or a reference, as String returns it.
func ParseEntry(s string) (ID, error) {
	if name, is := strings.CutPrefix(s, referencePrefix); is {
		token, name, _ := strings.Cut(name, ".")
		of, err := ParseID(name)
		if err != nil {
			return ID{}, err
		}
		return of.Reference(token)
	}
	if name, is := strings.CutPrefix(s, snapshotPrefix); is {
		return ParseSnapshot(name)
	}
	return ParseID(s)
}

// FirstSnapshot comes after all volumes and before all snapshots.
func FirstSnapshot() ID { return ID{name: snapshotPrefix} }

// Snapshot is the name of the snapshot that has the id; false for a volume.
func (id ID) Snapshot() (name string, is bool) {
	return strings.CutPrefix(id.name, snapshotPrefix)
}

// Named is the id with what it is of, for errors: "volume pvc-1", "snapshot daily".
func (id ID) Named() string {
	if name, is := id.Snapshot(); is {
		return "snapshot " + name
	}
	return "volume " + id.name
}

// IsSnapshot reports whether the id is that of a snapshot.
func (id ID) IsSnapshot() bool { return strings.HasPrefix(id.name, snapshotPrefix) }

// A CopyMethod is how a snapshot, or a volume made from another entry, got its content.
type CopyMethod string

// The methods.
const (
	// ByReference shares the blocks of each file (ioctl_ficlone(2)).
	ByReference CopyMethod = "reflink"
	// BySubvolume is a snapshot of a btrfs subvolume.
	BySubvolume CopyMethod = "subvolume"
	// ByCopy reads and writes all data.
	ByCopy CopyMethod = "copy"
)

// A Consistency is what a snapshot can promise of its content.
type Consistency string

// The consistencies, the strongest first.
const (
	// PointInTime is what the source was at one moment.
	PointInTime Consistency = "point-in-time"
	// CrashConsistent has all that was synced before; of what was written since, some may be
	// there and some not, as after a power cut.
	CrashConsistent Consistency = "crash-consistent"
	// Unverified is of a tree that changed while it was read: its files may be of different
	// moments.
	Unverified Consistency = "unverified"
)

// WhenWritten says what to do if a directory changes while it is copied.
type WhenWritten string

// What can be done.
const (
	// Verify copies again what changed, and fails if it never holds still.
	Verify WhenWritten = "verify"
	// Freeze stops the pods that use the volume for the time that it takes to copy what changed.
	Freeze WhenWritten = "freeze"
	// Accept takes it as it comes.
	Accept WhenWritten = "accept"
)

// Valid reports whether the consistency is one of those.
func (c Consistency) Valid() bool {
	return c == PointInTime || c == CrashConsistent || c == Unverified
}

// Valid reports whether it is one of those.
func (w WhenWritten) Valid() bool { return w == Verify || w == Freeze || w == Accept }

// Valid reports whether the method is one of those.
func (m CopyMethod) Valid() bool { return m == ByReference || m == BySubvolume || m == ByCopy }

// An Origin is what a snapshot, or a volume, was made from.
type Origin struct {
	// ID of the volume or the snapshot, as Parse functions take it.
	ID string `json:"id"`
	// UID distinguishes it from an earlier one of the same name.
	UID string `json:"uid"`
	// Bytes is the size that it promised, which no volume made from it can be smaller than.
	Bytes  int64      `json:"bytes"`
	Method CopyMethod `json:"method"`
	// Consistency of the content.
	Consistency Consistency `json:"consistency"`
	// Cut is when the content was read: the time at which reading ended.
	Cut time.Time `json:"cut"`
	// TookMillis is how long reading took, and StallMillis for how long writers had to wait at most:
	// while the blocks of one file were shared, or their pods were frozen.
	TookMillis  int64 `json:"tookMillis,omitempty"`
	StallMillis int64 `json:"stallMillis,omitempty"`
}
