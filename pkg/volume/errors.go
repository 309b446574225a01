package volume

import "errors"

// Errors that callers may test for. Every other error of the packages that use these
// is a failure of the system below.
var (
	// ErrInvalid reports a request that can never succeed as it is.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound reports a volume, or a publication of it, that does not exist.
	ErrNotFound = errors.New("not found")
	// ErrExists reports that the name is taken by something that differs.
	ErrExists = errors.New("already exists")
	// ErrInUse reports a volume that is published.
	ErrInUse = errors.New("in use")
	// ErrPrecondition reports a request that the state of its source or its pool does not allow
	// now.
	ErrPrecondition = errors.New("not possible now")
	// ErrNoSpace reports that a promise does not fit into the pool now.
	ErrNoSpace = errors.New("not enough space")
	// ErrOtherNode reports a volume that can be made, but not on this node.
	ErrOtherNode = errors.New("not on this node")
	// ErrOutOfRange reports a size that no volume can have.
	ErrOutOfRange = errors.New("size out of range")
	// ErrCannotGrow reports a volume that keeps the size that it has: its pool has no room
	// for more, or cannot change its limit. It can be used as before.
	ErrCannotGrow = errors.New("cannot grow")
	// ErrBusy reports that another call works on the same volume or target.
	ErrBusy = errors.New("another call is in progress")
	// ErrUnavailable reports a pool that does not serve at the moment.
	ErrUnavailable = errors.New("pool unavailable")
	// ErrPoolMissing reports a pool whose filesystem or directory is not at its path; see
	// PoolMissing.
	ErrPoolMissing = errors.New("pool missing")
	// ErrDamagedRecord reports a record whose content is not valid. Removing the
	// record, or writing it again, repairs the volume.
	ErrDamagedRecord = errors.New("damaged record")
	// ErrLost reports a record whose directory or disk file is missing, or whose disk
	// file is shorter than promised. Its data has to come back from elsewhere; removing
	// the record would only end the promise.
	ErrLost = errors.New("lost content")
	// ErrIO reports that the disk failed while a record or a volume was read. The record
	// may be intact: check the disk first.
	ErrIO = errors.New("I/O error")
	// ErrAmbiguous reports a volume that exists in several pools.
	ErrAmbiguous = errors.New("exists in several pools")
)

// IsDamage reports whether an error says that a volume is there, but its record or
// content cannot be used.
func IsDamage(err error) bool {
	for _, damage := range []error{ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous} {
		if errors.Is(err, damage) {
			return true
		}
	}
	return false
}

// PoolMissing is an ErrPoolMissing that says no more than why.
func PoolMissing(why string) error { return &poolMissing{why} }

type poolMissing struct{ why string }

func (m *poolMissing) Error() string { return m.why }

// Is has errors.Is find that it is an ErrPoolMissing.
func (m *poolMissing) Is(target error) bool { return target == ErrPoolMissing }
