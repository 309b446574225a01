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

// An Enforcer makes the kernel enforce the sizes of the volumes on one filesystem, as far as it
// can. It does not change; a filesystem that gains or loses its quotas gets another one.
type Enforcer struct {
	// facility enforces the sizes of the volumes that have limits; nil if nothing does.
	facility quota.Facility
	// unenforced is why new volumes get none; nil if they do.
	unenforced error
	Sizes      Sizes
	IDs        IDs
	// shares says that files of the filesystem were seen to share blocks.
	shares atomic.Bool
}

// Enforcer finds out who enforces the sizes of a pool's volumes, also of those that are there
// when new ones get no limit, and why they get none.
func (o Options) Enforcer(root *dir.Dir, claims *Claims) (*Enforcer, error) {
	inodeBytes, err := quota.InodeBytes(root)
	if err != nil {
		return nil, err
	}
	dataPerByte, err := quota.DataPerByte(root)
	if err != nil {
		return nil, err
	}
	e := &Enforcer{}
	e.facility, err = o.Detect(root)
	switch {
	case err == nil:
		e.unenforced = o.unwanted(e.facility)
	case o.Enforcement == None:
		e.facility, e.unenforced = nil, errSwitchedOff
	case errors.Is(err, quota.ErrNone):
		e.facility, e.unenforced = nil, err
	default:
		return nil, err // which does not say that there is none: it is asked again
	}
	e.Sizes = Sizes{e.Kind(), e.unenforced == nil, o.BytesPerInode, ledger.Costs{InodeBytes: cmp.Or(inodeBytes, ledger.UsualInode), DataPerByte: dataPerByte}}
	e.IDs = IDs{e.facility, claims}
	return e, nil
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

// MustNotServe is why a pool must not serve whose new volumes get no limit; nil if it may.
func (o Options) MustNotServe(e *Enforcer) error {
	if e.unenforced == nil || o.Enforcement != Required {
		return nil
	}
	return fmt.Errorf("enforcement is required: %w", e.unenforced)
}

// WithClaims is an enforcer of the same filesystem with other claims.
func (e *Enforcer) WithClaims(claims *Claims) *Enforcer {
	return &Enforcer{facility: e.facility, unenforced: e.unenforced, Sizes: e.Sizes, IDs: IDs{e.facility, claims}}
}

// Unenforced is why new volumes get no limit; nil if they do.
func (e *Enforcer) Unenforced() error { return e.unenforced }

// Kind is what enforces sizes; empty if nothing does.
func (e *Enforcer) Kind() quota.Kind {
	if e.facility == nil {
		return ""
	}
	return e.facility.Kind()
}

// Like reports whether another enforcer treats volumes in the same way.
func (e *Enforcer) Like(other *Enforcer) bool {
	return e.Kind() == other.Kind() && (e.unenforced == nil) == (other.unenforced == nil)
}

// Shares reports whether files of the pool's filesystem can share blocks. It is tried until it has succeeded: a filesystem
// cannot lose this, and what tries makes files.
func (e *Enforcer) Shares(try func() (bool, error)) (bool, error) {
	if e.shares.Load() {
		return true, nil
	}
	shares, err := try()
	if err == nil && shares {
		e.shares.Store(true)
	}
	return shares, err
}

// Trees is what the filesystem needs for its trees. Where it enforces no sizes, and has enforced none of those promised in a pool, a promise is one
// of space for data, which has one copy: small files count as often as they are on the disk.
func (e *Enforcer) Trees(root *dir.Dir, promised *ledger.Ledger) (quota.Trees, error) {
	trees, err := quota.TreesOf(root)
	limited := func(c ledger.Info) bool { return c.Is(ledger.ByBtrfs) }
	if trees.Copies > 0 && e.Kind() != quota.Btrfs && !promised.Any(limited) {
		trees.Copies, trees.Room = min(1, trees.Copies), quota.Room{}
	}
	return trees, err
}

// Enforces reports whether the kernel enforces the size of a volume. One that was made
// without a limit cannot be given one: what it holds would not be counted.
func (e *Enforcer) Enforces(c ledger.Info) bool {
	if e.facility == nil || !c.Is(ledger.By(e.facility.Kind())) {
		return false
	}
	owner := e.IDs.Claims.Owner(c.QuotaID())
	return owner == "" || c.OfUID(owner)
}

// An Applied limit says who enforces the size of a volume; the zero value stands for nothing.
type Applied struct {
	Kind quota.Kind
	ID   quota.ID
}

// Make makes the directory of a new volume, under its limit from the beginning. The uid is
// that of its record, and root a directory on the same filesystem.
func (e *Enforcer) Make(root, parent *dir.Dir, name, uid string, c ledger.Info) (*dir.Dir, Applied, error) {
	if e.unenforced != nil {
		d, err := parent.Make(name)
		return d, Applied{}, err
	}
	d, err := e.facility.Make(parent, name)
	if err != nil {
		return nil, Applied{}, err
	}
	if !c.Is(ledger.IsBlock) {
		if err := quota.CopyByBlock(d); err != nil {
			return nil, Applied{}, errors.Join(err, d.Close())
		}
	}
	applied, err := e.Adopt(root, d, uid, c)
	if err != nil {
		return nil, Applied{}, errors.Join(err, d.Close())
	}
	return d, applied, nil
}

// Adopt is Make for a directory that was made by other means, as a snapshot of a subvolume,
// whose content the filesystem counts already.
func (e *Enforcer) Adopt(root, d *dir.Dir, uid string, c ledger.Info) (Applied, error) {
	if e.unenforced != nil {
		return Applied{}, nil //nolint:nilerr // its size is not to be enforced
	}
	id, err := e.limitNew(root, d, uid, c)
	if err != nil {
		return Applied{}, err
	}
	return Applied{e.facility.Kind(), id}, nil
}

func (e *Enforcer) limitNew(root, d *dir.Dir, uid string, c ledger.Info) (quota.ID, error) {
	from := e.IDs.Claims.from()
	for {
		id, err := e.IDs.take(root, uid, from)
		if err != nil {
			return 0, err
		}
		err = e.facility.Limit(d, id, e.Sizes.Limit(c))
		if err == nil {
			return id, nil
		}
		err = errors.Join(err, e.IDs.drop(d, id))
		if !errors.Is(err, quota.ErrTaken) {
			return 0, err
		}
		// Another process on this filesystem has it. At random, or both would ask for the same one again.
		from = id + 1 + rand.N(quota.ID(64))
	}
}

// Apply sets the limit of a volume, where the kernel enforces its size.
func (e *Enforcer) Apply(d *dir.Dir, c ledger.Info) error {
	if !e.Enforces(c) {
		return nil
	}
	return e.facility.Limit(d, c.QuotaID(), e.Sizes.Limit(c))
}

// ApplyWhileCopied raises the limit of inodes, if there is one, by those that copying makes besides. Apply lowers it again.
func (e *Enforcer) ApplyWhileCopied(d *dir.Dir, c ledger.Info, inodes int64) error {
	limit := e.Sizes.Limit(c)
	if limit.Inodes == 0 || !e.Enforces(c) {
		return nil
	}
	limit.Inodes += inodes
	return e.facility.Limit(d, c.QuotaID(), limit)
}

// Lift takes the limit off a piece of trash, or off a copy, which has that of its source: on btrfs removing files can need more space than
// a full subvolume has left, also where the driver takes quotas for none, and the kernel does not. It returns the id that the trash carries, if that is claimed by the uid in its name or by none.
func (e *Enforcer) Lift(trash *dir.Dir, name, uid string) (quota.ID, error) {
	if e.facility == nil {
		return 0, freeEntry(trash, name)
	}
	id, err := e.IDs.In(trash, name)
	if err != nil || id == 0 {
		return 0, err
	}
	// A copy, and a tree whose owner changed its id, carry what is another's.
	if owner := e.IDs.Claims.Owner(id); owner != "" && owner != uid {
		return 0, nil
	}
	d, err := trash.Open(name)
	if err != nil {
		return 0, err
	}
	return id, errors.Join(e.facility.Limit(d, id, quota.Limit{}), d.Close())
}

// freeEntry takes off what limits the kernel may have kept of an entry, where the driver takes quotas for none.
func freeEntry(in *dir.Dir, name string) error {
	d, err := in.Open(name)
	if dir.IsMissing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(quota.Free(in, d), d.Close())
}

// Restore puts back a limit that is missing or different: the quota file was rebuilt, another
// tool was used, or a crash came between record and limit. It returns what was
// found, and whether it was replaced.
func (e *Enforcer) Restore(d *dir.Dir, c ledger.Info) (found quota.Usage, restored bool, err error) {
	if ok, err := e.carriesID(d, c); err != nil || !ok {
		return quota.Usage{}, false, errors.Join(err, errNotCarried)
	}
	usage, err := e.facility.Usage(d, c.QuotaID())
	if err != nil || e.Sizes.agrees(usage.Limit, c) {
		return usage, false, err
	}
	return usage, true, e.facility.Limit(d, c.QuotaID(), e.Sizes.Limit(c))
}

// Ensure is Apply for a volume that has its limit already, as far as is known. One that does not carry its id has none.
func (e *Enforcer) Ensure(d *dir.Dir, c ledger.Info) error {
	if !e.Enforces(c) {
		return nil
	}
	_, _, err := e.Restore(d, c)
	if errors.Is(err, errNotCarried) {
		return nil
	}
	return err
}

// Agrees reports whether a directory is counted as its record says, under a limit that is what
// was promised.
func (e *Enforcer) Agrees(d *dir.Dir, c ledger.Info, has quota.Usage) (bool, error) {
	carries, err := e.carriesID(d, c)
	return carries && e.Sizes.agrees(has.Limit, c), err
}

// Counts reports whether a directory is counted as its record says, if that says that the kernel enforces the size: one that came from a backup is
// not.
func (e *Enforcer) Counts(d *dir.Dir, c ledger.Info) (bool, error) {
	if !e.Enforces(c) {
		return true, nil
	}
	id, err := e.facility.IDOf(d)
	if e.facility.Kind() == quota.Btrfs {
		return id != 0, err
	}
	return id == c.QuotaID(), err
}

// errNotCarried reports a directory that is not counted as its record says. Giving
// it the id would not help: what it holds already would not be counted.
var errNotCarried = errors.New("the directory does not carry the project id of its record; copy its content into a new volume")

// carriesID reports whether a directory is counted as its record says.
func (e *Enforcer) carriesID(d *dir.Dir, c ledger.Info) (bool, error) {
	if e.facility.Kind() == quota.Btrfs {
		return true, nil // its own, always
	}
	id, err := e.facility.IDOf(d)
	return id == c.QuotaID(), err
}

// Strays counts what was taken out of a volume's limit by changing its project. It calls step
// before each entry of the volume, and ends with its error. No pod reaches the file of a block volume.
func (e *Enforcer) Strays(d *dir.Dir, c ledger.Info, step func() error) (quota.Strays, error) {
	if !e.Enforces(c) || c.Is(ledger.IsBlock) {
		return quota.Strays{}, nil
	}
	return e.facility.Strays(d, c.QuotaID(), step)
}

// Usage is what the kernel counts for a volume's directory, and its limit.
func (e *Enforcer) Usage(d *dir.Dir, c ledger.Info) (quota.Usage, error) {
	return e.facility.Usage(d, c.QuotaID())
}

// Settled is Usage, or volume.ErrPrecondition while more may be there than is counted.
func (e *Enforcer) Settled(d *dir.Dir, c ledger.Info) (quota.Usage, error) {
	usage, err := e.Usage(d, c)
	if err != nil {
		return usage, err
	}
	settled, err := quota.Settled(d)
	if err == nil && !settled {
		err = fmt.Errorf("%w: what it holds is not known until btrfs has counted all that is there (btrfs quota rescan)", volume.ErrPrecondition)
	}
	return usage, err
}

// Outside counts what users made in a volume that its limit does not include.
func (e *Enforcer) Outside(d *dir.Dir) (int, error) { return e.facility.Outside(d) }

// Counted is what the kernel counts for any directory, and by which id; an id of 0 if it does
// not, or cannot be asked.
func (e *Enforcer) Counted(d *dir.Dir) (usage quota.Usage, id quota.ID, ok bool) {
	if e.facility == nil {
		return quota.Usage{}, 0, false
	}
	id, err := e.facility.IDOf(d)
	if err != nil || id == 0 {
		return quota.Usage{}, id, false
	}
	usage, err = e.facility.Usage(d, id)
	return usage, id, err == nil
}

// UsedByID is what is counted by an id, in bytes, or volume.Unknown where nothing is counted.
func (e *Enforcer) UsedByID(root *dir.Dir, id quota.ID) int64 {
	if id == 0 {
		return volume.Unknown
	}
	usage, err := e.facility.Usage(root, id)
	if err != nil {
		return volume.Unknown
	}
	return usage.Bytes
}

// UsedBy is what a volume holds: by its id, or, where the kernel chose that, by its directory.
func (e *Enforcer) UsedBy(root *dir.Dir, name string, c ledger.Info) (quota.Usage, error) {
	if c.QuotaID() == 0 {
		return e.UsedIn(root, name, 0)
	}
	return e.facility.Usage(root, c.QuotaID())
}

// UsedIn is what one directory holds. One that went away meanwhile holds nothing.
func (e *Enforcer) UsedIn(parent *dir.Dir, name string, id quota.ID) (quota.Usage, error) {
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
		if id, err = e.facility.IDOf(d); err != nil || id == 0 {
			return none, err
		}
	}
	return e.facility.Usage(d, id)
}

// Beside is what is known to be of no volume on the filesystem, on btrfs with what is of volumes. Errors: quota.ErrTooMany, with what is known
// all the same.
func (e *Enforcer) Beside(root *dir.Dir) (quota.Usage, error) {
	if e.facility == nil {
		return quota.Usage{}, nil
	}
	all, err := e.facility.Beside(root)
	own, ownErr := quota.Own(root)
	all.Bytes += own
	return all, errors.Join(err, ownErr)
}

// NoSpace turns the answers of a filesystem that takes nothing more into volume.ErrNoSpace.
func NoSpace(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS) || errors.Is(err, quota.ErrNoID) {
		return fmt.Errorf("%w: %w", volume.ErrNoSpace, err)
	}
	return err
}

// DefaultBytesPerInode gives new volumes on XFS one inode for so many bytes of their size, as
// mkfs.ext4(8) does for a filesystem. XFS makes inodes as they are needed, and counts them for no
// project: so at most a thirtieth of the volume's size. Where mkfs.xfs(8) has made them larger than ledger.UsualInode, there are as many fewer.
const DefaultBytesPerInode = 16 << 10

// Sizes says how large the limits of volumes are, and what inodes take.
type Sizes struct {
	kind          quota.Kind // that enforces sizes; empty if nothing does
	enforced      bool       // new volumes have limits
	bytesPerInode int64
	costs         ledger.Costs
}

// NewInodes is for how many bytes of its size a new volume has an inode that its quota does not
// count; 0 where inodes are not limited, or take no space of their own.
func (s Sizes) NewInodes() int64 {
	switch {
	case !s.enforced || s.kind != quota.XFS:
		return 0
	case s.bytesPerInode == volume.Unknown:
		return DefaultBytesPerInode * max(1, s.costs.InodeBytes/ledger.UsualInode)
	}
	return s.bytesPerInode
}

// Costs are what the filesystem takes for volumes besides what is in their promises.
func (s Sizes) Costs() ledger.Costs { return s.costs }

// RecordedInodes is what of that the record of a new volume has: the option, which others may
// set later, is not in it.
func (s Sizes) RecordedInodes() int64 {
	if s.bytesPerInode != volume.Unknown {
		return 0
	}
	return s.NewInodes()
}

// Limit is what the kernel enforces for a promise.
func (s Sizes) Limit(c ledger.Info) quota.Limit {
	if c.Is(ledger.IsBlock) {
		// The file has the size. What the filesystem needs to keep track of the file
		// counts as well: on btrfs up to 78 bytes for each block of 4 KiB, were each apart
		// from the next, in nodes that may be half empty; on the others less.
		limit := quota.Limit{Bytes: c.Promised + c.Promised/16 + 1<<20}
		if s.kind == quota.Btrfs {
			// Earlier versions let thin disks be discarded, of which btrfs keeps whole extents: what is written in their place comes beside them.
			limit.Bytes += c.Promised
		}
		switch {
		case !c.Is(ledger.Shares):
		case s.kind == quota.XFS:
			// A shared block is written elsewhere. XFS takes 128 KiB for a block, of which the rest
			// waits for the next writes: the file may be counted twice.
			limit.Bytes += c.Promised
		case s.kind == quota.Btrfs:
			// The extent that a shared block was in counts until all of that is overwritten. With a
			// snapshot after each time that the file was written the old extents add up. Two sizes besides are
			// more than scattered writes need; what keeps more is not copied: see measure in pkg/pool. The third is
			// for what is written between that and the copy.
			limit.Bytes += 3*c.Promised + c.Promised/16
		}
		return limit
	}
	return quota.Limit{Bytes: c.Promised + c.ToOverwrite(), Inodes: c.Inodes(s.bytesPerInode)}
}

// agrees reports whether a limit is what was promised. The kernel keeps whole blocks,
// and a promise may have been given in smaller ones.
func (s Sizes) agrees(is quota.Limit, c ledger.Info) bool {
	want := s.Limit(c)
	return is.Inodes == want.Inodes && is.Bytes >= want.Bytes && is.Bytes < want.Bytes+maxBlock
}

// maxBlock is the largest block that a filesystem with quotas has on Linux, in bytes:
// that of XFS and btrfs, and ext4's is not larger.
const maxBlock = 64 << 10
