// Package limit has the kernel enforce the sizes of volumes: it makes directories under a
// limit, applies, checks, reads and releases limits, and gives out the project ids that
// volumes are counted by. How a filesystem does that is up to pkg/hostfs/quota.
package limit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Enforcement says whether the kernel is to enforce the sizes of volumes.
type Enforcement string

// The values of the pool option "enforcement".
const (
	Auto     Enforcement = "auto"
	Required Enforcement = "required"
	None     Enforcement = "none"
)

// Options are the choices of a pool's administrator.
type Options struct {
	// Detect finds the quota facility of a filesystem, as quota.Detect does. An error says why
	// there is none and what to do.
	Detect      func(d *dir.Dir) (quota.Facility, error)
	Enforcement Enforcement
	// BytesPerInode gives a volume one inode for so many bytes of its size; 0 for no limit, and
	// volume.Unknown for what its record says, which is DefaultBytesPerInode on XFS.
	BytesPerInode int64
}

// A Keeper makes the kernel enforce the sizes of the volumes on one filesystem, as far as it
// can. It does not change; a filesystem that gains or loses its quotas gets another one.
type Keeper struct {
	// facility enforces the sizes of the volumes that have limits; nil if nothing does.
	facility quota.Facility
	// unenforced is why new volumes get none; nil if they do.
	unenforced error
	Sizes      Sizes
	IDs        IDs
	Accounting Accounting
	// shares says that files of the filesystem were seen to share blocks.
	shares atomic.Bool
}

// Keeper finds out who enforces the sizes of a pool's volumes, also of those that are there
// when new ones get no limit, and why they get none.
func (o Options) Keeper(root *dir.Dir, claims *Claims) (*Keeper, error) {
	inodeBytes, err := quota.InodeBytes(root)
	if err != nil {
		return nil, err
	}
	k := &Keeper{}
	k.facility, err = o.Detect(root)
	switch {
	case err == nil:
		k.unenforced = o.unwanted(k.facility)
	case o.Enforcement == None:
		k.facility, k.unenforced = nil, errSwitchedOff
	case errors.Is(err, quota.ErrNone):
		k.facility, k.unenforced = nil, err
	default:
		return nil, err // which does not say that there is none: it is asked again
	}
	k.Sizes = Sizes{k.Kind(), k.unenforced == nil, o.BytesPerInode, inodeBytes}
	k.IDs, k.Accounting = IDs{k.facility, claims}, Accounting{k.facility}
	return k, nil
}

var (
	errSwitchedOff = errors.New(`it is switched off by the pool option "enforcement"`)
	errInodes      = errors.New("btrfs does not limit inodes; remove the pool option bytesPerInode")
)

// unwanted is why the configuration wants no new limits of a facility.
func (o Options) unwanted(facility quota.Facility) error {
	switch {
	case o.Enforcement == None:
		return errSwitchedOff
	case facility.Kind() == quota.Btrfs && o.BytesPerInode > 0:
		return errInodes
	}
	return nil
}

// Unfit is why a pool must not serve whose new volumes get no limit; nil if it may.
func (o Options) Unfit(k *Keeper) error {
	if k.unenforced == nil || o.Enforcement != Required {
		return nil
	}
	return fmt.Errorf("enforcement is required: %w", k.unenforced)
}

// WithClaims is a keeper of the same filesystem with other claims.
func (k *Keeper) WithClaims(claims *Claims) *Keeper {
	return &Keeper{facility: k.facility, unenforced: k.unenforced, Sizes: k.Sizes, IDs: IDs{k.facility, claims}, Accounting: k.Accounting}
}

// Unenforced is why new volumes get no limit; nil if they do.
func (k *Keeper) Unenforced() error { return k.unenforced }

// Kind is what enforces sizes; empty if nothing does.
func (k *Keeper) Kind() quota.Kind {
	if k.facility == nil {
		return ""
	}
	return k.facility.Kind()
}

// Like reports whether another keeper treats volumes in the same way.
func (k *Keeper) Like(other *Keeper) bool {
	return k.Kind() == other.Kind() && (k.unenforced == nil) == (other.unenforced == nil) && k.simple() == other.simple()
}

func (k *Keeper) simple() bool { return k.facility != nil && k.facility.Simple() }

// MayShare reports whether volumes and their copies may share blocks. Simple quotas of btrfs charge an extent
// to its first owner until the last one lets go of it: a volume could not overwrite what its snapshot
// has, and what a clone has would be charged to no volume when its source is gone.
func (k *Keeper) MayShare() bool { return !k.simple() }

// Shares reports whether files of the pool's filesystem can share blocks. It is tried until it has succeeded: a filesystem
// cannot lose this, and what tries makes files.
func (k *Keeper) Shares(try func() (bool, error)) (bool, error) {
	if k.shares.Load() {
		return true, nil
	}
	shares, err := try()
	if err == nil && shares {
		k.shares.Store(true)
	}
	return shares, err
}

// Trees is what the filesystem needs for its trees. Where it enforces no sizes, a promise is one of space for data, which has one copy:
// small files count as often as they are on the disk.
func (k *Keeper) Trees(root *dir.Dir) (quota.Trees, error) {
	trees, err := quota.TreesOf(root)
	if k.Kind() != quota.Btrfs {
		trees.Copies = min(1, trees.Copies)
	}
	return trees, err
}

// Enforces reports whether the kernel enforces the size of a volume. One that was made
// without a limit cannot be given one: what it holds would not be counted.
func (k *Keeper) Enforces(c ledger.Card) bool {
	if k.facility == nil || !c.Is(ledger.By(k.facility.Kind())) {
		return false
	}
	owner := k.IDs.Claims.Owner(c.QuotaID())
	return owner == "" || c.OfUID(owner)
}

// A Kept says who enforces the size of a volume; the zero value stands for nothing.
type Kept struct {
	Kind quota.Kind
	ID   quota.ID
}

// Make makes the directory of a new volume, under its limit from the beginning. The uid is
// that of its record, and root a directory on the same filesystem.
func (k *Keeper) Make(root, parent *dir.Dir, name, uid string, c ledger.Card) (*dir.Dir, Kept, error) {
	if k.unenforced != nil {
		d, err := parent.Make(name)
		return d, Kept{}, err
	}
	d, err := k.facility.Make(parent, name)
	if err != nil {
		return nil, Kept{}, err
	}
	if !c.Is(ledger.IsBlock) {
		if err := quota.CopyByBlock(d); err != nil {
			return nil, Kept{}, errors.Join(err, d.Close())
		}
	}
	kept, err := k.Adopt(root, d, uid, c)
	if err != nil {
		return nil, Kept{}, errors.Join(err, d.Close())
	}
	return d, kept, nil
}

// Adopt is Make for a directory that was made by other means, as a snapshot of a subvolume,
// whose content the filesystem counts already.
func (k *Keeper) Adopt(root, d *dir.Dir, uid string, c ledger.Card) (Kept, error) {
	if k.unenforced != nil {
		return Kept{}, nil //nolint:nilerr // its size is not to be enforced
	}
	id, err := k.limitNew(root, d, uid, c)
	if err != nil {
		return Kept{}, err
	}
	return Kept{k.facility.Kind(), id}, nil
}

func (k *Keeper) limitNew(root, d *dir.Dir, uid string, c ledger.Card) (quota.ID, error) {
	from := k.IDs.Claims.from()
	for {
		id, err := k.IDs.take(root, uid, from)
		if err != nil {
			return 0, err
		}
		err = k.facility.Limit(d, id, k.Sizes.Limit(c))
		if err == nil {
			return id, nil
		}
		err = errors.Join(err, k.IDs.drop(d, id))
		if !errors.Is(err, quota.ErrTaken) {
			return 0, err
		}
		// Another process on this filesystem has it. At random, or both would ask for the same one again.
		from = id + 1 + rand.N(quota.ID(64))
	}
}

// Apply sets the limit of a volume, where the kernel enforces its size.
func (k *Keeper) Apply(d *dir.Dir, c ledger.Card) error {
	if !k.Enforces(c) {
		return nil
	}
	return k.facility.Limit(d, c.QuotaID(), k.Sizes.Limit(c))
}

// ApplyWhileCopied has a directory that may have so many files take the inodes that a copier makes besides. Apply takes that back.
func (k *Keeper) ApplyWhileCopied(d *dir.Dir, c ledger.Card, inodes int64) error {
	limit := k.Sizes.Limit(c)
	if limit.Inodes == 0 || !k.Enforces(c) {
		return nil
	}
	limit.Inodes += inodes
	return k.facility.Limit(d, c.QuotaID(), limit)
}

// Lift takes the limit off a piece of trash: on btrfs removing can need more than
// a full subvolume has. It returns the id that the trash carries. The uid is the one that the
// name has.
func (k *Keeper) Lift(trash *dir.Dir, name, uid string) (quota.ID, error) {
	id, err := k.IDs.In(trash, name)
	if err != nil || id == 0 {
		return 0, err
	}
	// A copy, and a tree whose owner changed its id, carry what is another's.
	if owner := k.IDs.Claims.Owner(id); owner != "" && owner != uid {
		return 0, nil
	}
	d, err := trash.Open(name)
	if err != nil {
		return 0, err
	}
	return id, errors.Join(k.facility.Limit(d, id, quota.Limit{}), d.Close())
}

// Free takes the limits off a subvolume in a piece of trash, which its user may have given it.
func (k *Keeper) Free(in, d *dir.Dir) error {
	if k.facility == nil {
		return nil
	}
	return k.facility.Free(in, d)
}

// Restore puts back a limit that is missing or different: the quota file was rebuilt, another
// tool was used, or a crash came between record and limit. It returns the limit that was
// found, and whether it was replaced.
func (k *Keeper) Restore(d *dir.Dir, c ledger.Card) (found quota.Limit, restored bool, err error) {
	if ok, err := k.carriesID(d, c); err != nil || !ok {
		return quota.Limit{}, false, errors.Join(err, errNotCarried)
	}
	usage, err := k.facility.Usage(d, c.QuotaID())
	if err != nil || k.Sizes.agrees(usage.Limit, c) {
		return usage.Limit, false, err
	}
	return usage.Limit, true, k.facility.Limit(d, c.QuotaID(), k.Sizes.Limit(c))
}

// Ensure is Apply for a volume that has its limit already, as far as is known. One that does not carry its id has none.
func (k *Keeper) Ensure(d *dir.Dir, c ledger.Card) error {
	if !k.Enforces(c) {
		return nil
	}
	_, _, err := k.Restore(d, c)
	if errors.Is(err, errNotCarried) {
		return nil
	}
	return err
}

// Agrees reports whether a directory is counted as its record says, under a limit that is what
// was promised.
func (k *Keeper) Agrees(d *dir.Dir, c ledger.Card, has quota.Limit) (bool, error) {
	carries, err := k.carriesID(d, c)
	return carries && k.Sizes.agrees(has, c), err
}

// errNotCarried reports a directory that is not counted as its record says. Giving
// it the id would not help: what it holds already would not be counted.
var errNotCarried = errors.New("the directory does not carry the project id of its record; copy its content into a new volume")

// carriesID reports whether a directory is counted as its record says.
func (k *Keeper) carriesID(d *dir.Dir, c ledger.Card) (bool, error) {
	if k.facility.Kind() == quota.Btrfs {
		return true, nil // its own, always
	}
	id, err := k.facility.IDOf(d)
	return id == c.QuotaID(), err
}

// Strays counts what was taken out of a volume's limit by changing its project. It calls step
// before each entry of the volume, and ends with its error. No pod reaches the file of a block volume.
func (k *Keeper) Strays(d *dir.Dir, c ledger.Card, step func() error) (quota.Strays, error) {
	if !k.Enforces(c) || c.Is(ledger.IsBlock) {
		return quota.Strays{}, nil
	}
	return k.facility.Strays(d, c.QuotaID(), step)
}

// NoSpace turns the answers of a filesystem that takes nothing more into volume.ErrNoSpace.
func NoSpace(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS) || errors.Is(err, quota.ErrNoID) {
		return fmt.Errorf("%w: %w", volume.ErrNoSpace, err)
	}
	return err
}
