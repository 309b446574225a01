// Package limit has the kernel enforce the sizes of volumes: it makes directories under a
// limit, applies, checks, reads and releases limits, and gives out the project ids that
// volumes are counted by. How a filesystem does that is up to pkg/hostfs/quota.
package limit

import (
	"cmp"
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

// DefaultBytesPerInode gives new volumes on XFS one inode for so many bytes of their size, as
// mkfs.ext4(8) does for a filesystem. XFS makes inodes as they are needed, and counts them for no
// project: so at most a thirtieth of the volume's size. Where mkfs.xfs(8) has made them larger than usualInode, there are as many fewer.
const DefaultBytesPerInode = 16 << 10

// usualInode is the size of an inode that mkfs.xfs(8) chooses by itself, in bytes.
const usualInode = 512

// A Keeper makes the kernel enforce the sizes of the volumes on one filesystem, as far as it
// can. It does not change; a filesystem that gains or loses its quotas gets another one.
type Keeper struct {
	// facility enforces the sizes of the volumes that have limits; nil if nothing does.
	facility quota.Facility
	// unenforced is why new volumes get none; nil if they do.
	unenforced    error
	claims        *Claims
	bytesPerInode int64
	inodeBytes    int64 // quota.InodeBytes
	// shares says that files of the filesystem were seen to share blocks.
	shares atomic.Bool
}

// Keeper finds out who enforces the sizes of a pool's volumes, also of those that are there
// when new ones get no limit, and why they get none.
func (o Options) Keeper(root *dir.Dir, claims *Claims) (*Keeper, error) {
	k := &Keeper{claims: claims, bytesPerInode: o.BytesPerInode}
	var err error
	if k.inodeBytes, err = quota.InodeBytes(root); err != nil {
		return nil, err
	}
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
	return &Keeper{facility: k.facility, unenforced: k.unenforced, claims: claims, bytesPerInode: k.bytesPerInode, inodeBytes: k.inodeBytes}
}

// Claims are the ids that are given on the filesystem.
func (k *Keeper) Claims() *Claims { return k.claims }

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

// NewInodes is for how many bytes of its size a new volume has an inode that its quota does not
// count; 0 where inodes are not limited, or take no space of their own.
func (k *Keeper) NewInodes() int64 {
	switch {
	case k.unenforced != nil || k.Kind() != quota.XFS:
		return 0
	case k.bytesPerInode == volume.Unknown:
		return DefaultBytesPerInode * max(1, k.inodeBytes/usualInode)
	}
	return k.bytesPerInode
}

// InodeBytes is what an inode of XFS takes that no quota counts, in bytes.
func (k *Keeper) InodeBytes() int64 { return cmp.Or(k.inodeBytes, usualInode) }

// Trees is what the filesystem needs for its trees. Where it enforces no sizes, a promise is one of space for data, which has one copy:
// small files count as often as they are on the disk.
func (k *Keeper) Trees(root *dir.Dir) (quota.Trees, error) {
	trees, err := quota.TreesOf(root)
	if k.Kind() != quota.Btrfs {
		trees.Copies = min(1, trees.Copies)
	}
	return trees, err
}

// RecordedInodes is what of that the record of a new volume has: the option, which others may
// set later, is not in it.
func (k *Keeper) RecordedInodes() int64 {
	if k.bytesPerInode != volume.Unknown {
		return 0
	}
	return k.NewInodes()
}

// Limit is what the kernel enforces for a promise.
func (k *Keeper) Limit(c ledger.Card) quota.Limit {
	if c.Is(ledger.IsBlock) {
		// The file has the size. What the filesystem needs to keep track of the file
		// counts as well: on btrfs up to 78 bytes for each block of 4 KiB, were each apart
		// from the next, in nodes that may be half empty; on the others less.
		limit := quota.Limit{Bytes: c.Promised + c.Promised/16 + 1<<20}
		switch {
		case !c.Is(ledger.Shares):
		case k.Kind() == quota.XFS:
			// A shared block is written elsewhere. XFS takes 128 KiB for a block, of which the rest
			// waits for the next writes: the file may be counted twice.
			limit.Bytes += c.Promised
		case k.Kind() == quota.Btrfs:
			// The extent that a shared block was in counts until all of that is overwritten. With a
			// snapshot after each time that the file was written the old extents add up. Two sizes besides are
			// more than scattered writes need; what keeps more is not copied: see snapshot.Source.
			limit.Bytes += 2 * c.Promised
		}
		return limit
	}
	return quota.Limit{Bytes: c.Promised + c.ToOverwrite(), Inodes: c.Inodes(k.bytesPerInode)}
}

// Enforces reports whether the kernel enforces the size of a volume. One that was made
// without a limit cannot be given one: what it holds would not be counted.
func (k *Keeper) Enforces(c ledger.Card) bool {
	if k.facility == nil || !c.Is(ledger.By(k.facility.Kind())) {
		return false
	}
	owner := k.claims.Owner(c.QuotaID())
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
	from := k.claims.from()
	for {
		id, err := k.claimID(root, uid, from)
		if err != nil {
			return 0, err
		}
		err = k.facility.Limit(d, id, k.Limit(c))
		if err == nil {
			return id, nil
		}
		err = errors.Join(err, k.unclaim(d, id))
		if !errors.Is(err, quota.ErrTaken) {
			return 0, err
		}
		// Another process on this filesystem has it. At random, or both would ask for the same one again.
		from = id + 1 + rand.N(quota.ID(64))
	}
}

// unclaim gives up an id that a directory was to carry, unless it does by now: then
// it goes with the directory.
func (k *Keeper) unclaim(d *dir.Dir, id quota.ID) error {
	carried, err := k.facility.IDOf(d)
	if err == nil && carried != id {
		k.claims.drop(id)
	}
	return err
}

// claimID takes an id that nothing on the filesystem has. No lock is held while
// the filesystem is asked: of two calls that get the same id, one asks again.
func (k *Keeper) claimID(root *dir.Dir, uid string, from quota.ID) (quota.ID, error) {
	for {
		id, err := k.facility.NewID(root, from, k.claims.holds)
		if err != nil || k.claims.Try(id, uid) {
			return id, err
		}
	}
}

// Apply sets the limit of a volume, where the kernel enforces its size.
func (k *Keeper) Apply(d *dir.Dir, c ledger.Card) error {
	if !k.Enforces(c) {
		return nil
	}
	return k.facility.Limit(d, c.QuotaID(), k.Limit(c))
}

// ApplyWhileCopied has a directory that may have so many files take the inodes that a copier makes besides. Apply takes that back.
func (k *Keeper) ApplyWhileCopied(d *dir.Dir, c ledger.Card, inodes int64) error {
	limit := k.Limit(c)
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
	id, err := k.IDIn(trash, name)
	if err != nil || id == 0 {
		return 0, err
	}
	// A copy, and a tree whose owner changed its id, carry what is another's.
	if owner := k.claims.Owner(id); owner != "" && owner != uid {
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

// IDIn is the id that what was made by the driver carries; 0 if it carries none.
func (k *Keeper) IDIn(parent *dir.Dir, name string) (quota.ID, error) {
	if k.facility == nil {
		return 0, nil
	}
	d, err := parent.Open(name)
	if dir.IsMissing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	id, err := k.facility.IDOf(d)
	if k.facility.Kind() != quota.Btrfs && (id < quota.FirstID || id > quota.LastID) {
		id = 0 // not one of the driver's
	}
	return id, errors.Join(err, d.Close())
}

// Release gives an id back after its tree is gone.
func (k *Keeper) Release(root *dir.Dir, id quota.ID) error {
	// Without quotas there is none to be given back: what is left of it is forgotten
	// when the pool is opened with them.
	if id == 0 || k.facility == nil {
		return nil
	}
	if err := k.facility.Release(root, id); err != nil {
		return err
	}
	k.claims.drop(id)
	return nil
}

// ReleaseUnused removes the limits of what was removed while no driver saw to them, and returns
// how many there were: the filesystem was mounted without quotas, or the directory was
// removed by hand. It calls step for each limit on the filesystem.
func (k *Keeper) ReleaseUnused(root *dir.Dir, step func()) (int, error) {
	if k.facility == nil {
		return 0, nil
	}
	return k.facility.ReleaseUnused(root, func(id quota.ID) bool {
		step()
		return k.claims.holds(id)
	})
}

// Claim notes the id that counts a volume, as its record says, and returns false if another
// record has it. Of two records with one id, as when a pool was copied, the one whose
// directory carries it has it.
func (k *Keeper) Claim(root *dir.Dir, name string, id quota.ID, uid string) bool {
	if k.claims.Try(id, uid) {
		return true
	}
	if carried, err := k.IDIn(root, name); err == nil && carried == id {
		k.claims.hold(id, uid)
	}
	return false
}

// Restore puts back a limit that is missing or different: the quota file was rebuilt, another
// tool was used, or a crash came between record and limit. It returns the limit that was
// found, and whether it was replaced.
func (k *Keeper) Restore(d *dir.Dir, c ledger.Card) (found quota.Limit, restored bool, err error) {
	if ok, err := k.carriesID(d, c); err != nil || !ok {
		return quota.Limit{}, false, errors.Join(err, errNotCarried)
	}
	usage, err := k.facility.Usage(d, c.QuotaID())
	if err != nil || k.agrees(usage.Limit, c) {
		return usage.Limit, false, err
	}
	return usage.Limit, true, k.facility.Limit(d, c.QuotaID(), k.Limit(c))
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

// agrees reports whether a limit is what was promised. The kernel keeps whole blocks,
// and a promise may have been given in smaller ones.
func (k *Keeper) agrees(has quota.Limit, c ledger.Card) bool {
	want := k.Limit(c)
	return has.Inodes == want.Inodes && has.Bytes >= want.Bytes && has.Bytes < want.Bytes+maxBlock
}

// maxBlock is the largest block that a filesystem with quotas has on Linux, in bytes:
// that of XFS and btrfs, and ext4's is not larger.
const maxBlock = 64 << 10

// Agrees reports whether a directory is counted as its record says, under a limit that is what
// was promised.
func (k *Keeper) Agrees(d *dir.Dir, c ledger.Card, has quota.Limit) (bool, error) {
	carries, err := k.carriesID(d, c)
	return carries && k.agrees(has, c), err
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

// Usage is what the kernel counts for a volume's directory, and its limit.
func (k *Keeper) Usage(d *dir.Dir, c ledger.Card) (quota.Usage, error) {
	return k.facility.Usage(d, c.QuotaID())
}

// Outside counts what users made in a volume that its limit does not include.
func (k *Keeper) Outside(d *dir.Dir) (int, error) { return k.facility.Outside(d) }

// Strays counts what was taken out of a volume's limit by changing its project. It calls step
// before each entry of the volume, and ends with its error. No pod reaches the file of a block volume.
func (k *Keeper) Strays(d *dir.Dir, c ledger.Card, step func() error) (quota.Strays, error) {
	if !k.Enforces(c) || c.Is(ledger.IsBlock) {
		return quota.Strays{}, nil
	}
	return k.facility.Strays(d, c.QuotaID(), step)
}

// Counted is what the kernel counts for any directory, and by which id; an id of 0 if it does
// not, or cannot be asked.
func (k *Keeper) Counted(d *dir.Dir) (usage quota.Usage, id quota.ID, ok bool) {
	if k.facility == nil {
		return quota.Usage{}, 0, false
	}
	id, err := k.facility.IDOf(d)
	if err != nil || id == 0 {
		return quota.Usage{}, id, false
	}
	usage, err = k.facility.Usage(d, id)
	return usage, id, err == nil
}

// UsedByID is what is counted by an id, in bytes, or volume.Unknown where nothing is counted.
func (k *Keeper) UsedByID(root *dir.Dir, id quota.ID) int64 {
	if id == 0 {
		return volume.Unknown
	}
	usage, err := k.facility.Usage(root, id)
	if err != nil {
		return volume.Unknown
	}
	return usage.Bytes
}

// UsedBy is what a volume holds: by its id, or, where the kernel chose that, by its directory.
func (k *Keeper) UsedBy(root *dir.Dir, name string, c ledger.Card) (quota.Usage, error) {
	if c.QuotaID() == 0 {
		return k.UsedIn(root, name, 0)
	}
	return k.facility.Usage(root, c.QuotaID())
}

// UsedIn is what one directory holds. One that went away meanwhile holds nothing.
func (k *Keeper) UsedIn(parent *dir.Dir, name string, id quota.ID) (quota.Usage, error) {
	none := quota.Usage{Inodes: quota.Unknown}
	d, err := parent.Open(name)
	if dir.IsMissing(err) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	defer func() { _ = d.Close() }()
	if id == 0 {
		if id, err = k.facility.IDOf(d); err != nil || id == 0 {
			return none, err
		}
	}
	return k.facility.Usage(d, id)
}

// Beside is what is known to be of no volume on the filesystem, in bytes.
func (k *Keeper) Beside(root *dir.Dir) (int64, error) {
	if k.facility == nil {
		return 0, nil
	}
	return k.facility.Beside(root)
}

// NoSpace turns the answers of a filesystem that takes nothing more into volume.ErrNoSpace.
func NoSpace(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS) || errors.Is(err, quota.ErrNoID) {
		return fmt.Errorf("%w: %w", volume.ErrNoSpace, err)
	}
	return err
}
