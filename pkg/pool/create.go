package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// volumeMode lets pods that are not root write, whatever the umask.
const volumeMode = 0o777

// A Request is for a new volume.
type Request struct {
	ID VolumeID
	// Pool may be the zero Name where only one can be meant.
	Pool  Name
	Range Range
	// Mode is what the volume is to be, for its whole life; empty for ModeMount.
	Mode Mode
	// OtherNodesOnly asks for a volume that need not be reached from this node, but
	// from others.
	OtherNodesOnly bool
	// MultiNode asks for a volume that several nodes can publish.
	MultiNode bool
	// Inline asks for one that lives as long as its publication.
	Inline bool
}

// Create makes a volume, or answers the one that is there if it is what the
// request asks for. When it returns, the volume is durable. The caller holds the
// volume's lock. Errors: ErrInvalid, ErrExists, ErrOutOfRange, ErrNoSpace,
// ErrUnavailable, ErrDamaged.
func (s *Set) Create(ctx context.Context, r Request) (Volume, error) {
	if r.Mode == "" {
		r.Mode = ModeMount
	}
	p, err := s.pool(r.Pool)
	if err != nil {
		return Volume{}, err
	}
	if err := r.Range.check(); err != nil {
		return Volume{}, err
	}
	if r.MultiNode && !p.config.Shared {
		return Volume{}, fmt.Errorf("%w: an access mode for several nodes; pool %q is not shared", ErrInvalid, p.config.Name)
	}
	if r.OtherNodesOnly && !p.config.Shared {
		if p.has(r.ID) {
			return Volume{}, fmt.Errorf("volume %s: %w on node %s, which the request leaves out", r.ID, ErrExists, s.options.Node)
		}
		return Volume{}, fmt.Errorf("%w on the nodes asked for: pool %q is reached from node %s alone", ErrNoSpace, p.config.Name, s.options.Node)
	}
	if r.ID.name == p.reserved {
		return Volume{}, fmt.Errorf("%w: the name %s is taken by the snapshots of pool %q", ErrInvalid, r.ID, p.config.Name)
	}
	if err := s.elsewhere(r.ID, p); err != nil {
		return Volume{}, err
	}
	v, err := p.create(ctx, r)
	if err != nil {
		return Volume{}, fmt.Errorf("create volume %s in pool %q: %w", r.ID, p.config.Name, err)
	}
	return v, nil
}

// elsewhere answers ErrExists if another pool is known to have a volume of that
// name. The other pools' disks are not asked: one of them may hang.
func (s *Set) elsewhere(id VolumeID, chosen *Pool) error {
	for _, p := range s.holders(id) {
		if p != chosen {
			return fmt.Errorf("volume %s: %w in pool %q", id, ErrExists, p.config.Name)
		}
	}
	return nil
}

// has tells whether the pool holds a volume, as far as it can be seen.
func (p *Pool) has(id VolumeID) bool {
	v, err := p.find(id)
	if err != nil {
		return p.known(id).exists()
	}
	if v == nil {
		return false
	}
	v.close()
	return true
}

func (p *Pool) create(ctx context.Context, r Request) (Volume, error) {
	s, err := p.enter()
	if err != nil {
		return Volume{}, p.noCapacity(r.ID, err)
	}
	defer s.close()
	if err := s.work(); err != nil {
		return Volume{}, err
	}
	// Other nodes promise from a shared pool too: one at a time, and each looks at
	// what the others wrote.
	unlock, err := s.lockToPromise(ctx, r.ID)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	if err := s.loadShared(); err != nil {
		return Volume{}, err
	}
	space, err := s.space()
	if err != nil {
		return Volume{}, err
	}
	e, d, err := s.lookup(r.ID)
	if err != nil {
		return Volume{}, err
	}
	if d != nil {
		defer func() { _ = d.Close() }()
	}
	p.note(r.ID, e)
	if e.exists() {
		return s.existing(r, e, space)
	}
	return s.createNew(ctx, r, space)
}

// noCapacity is the answer of a pool that does not serve: it has no space, and
// ErrNoSpace is what makes the scheduler try another node. If the volume is known
// to be here, or the pool is only being opened, the caller has to wait instead.
func (p *Pool) noCapacity(id VolumeID, err error) error {
	if p.known(id).exists() || errors.Is(err, errNotLooked) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrNoSpace, err)
}

// existing answers a repeated call.
func (s *session) existing(r Request, e entry, space dir.Space) (Volume, error) {
	if e.damage != nil {
		return Volume{}, e.damage
	}
	if e.lost() {
		return Volume{}, fmt.Errorf("%w: its record is there, but its directory is lost; "+
			"delete the volume before another of its name is made", ErrDamaged)
	}
	v := s.pool.volume(r.ID, e.card(), space)
	if !r.Range.allows(v.Bytes) {
		return Volume{}, fmt.Errorf("%w with %d bytes", ErrExists, v.Bytes)
	}
	if e.mode() != r.Mode {
		return Volume{}, fmt.Errorf("%w with the mode %s", ErrExists, e.mode())
	}
	if e.inline() != r.Inline {
		return Volume{}, fmt.Errorf("%w with another life cycle: inline is %v", ErrExists, e.inline())
	}
	if err := s.checkDisk(r.ID, e); err != nil {
		return Volume{}, err
	}
	// The call that made it may have failed at its last step.
	return v, s.syncRoot()
}

func (s *session) syncRoot() error {
	err := s.root.Sync()
	if errors.Is(err, syscall.EROFS) {
		return nil
	}
	return err
}

func (s *session) createNew(ctx context.Context, r Request, space dir.Space) (Volume, error) {
	// The pool may serve all the same: what is read-only needs no limits.
	if err := s.pool.unfit(s.unenforced); err != nil {
		return Volume{}, s.pool.noCapacity(r.ID, s.pool.unavailable(err))
	}
	bytes, err := r.Range.promise(unit(r.Mode, space))
	if err != nil {
		return Volume{}, err
	}
	if err := ctx.Err(); err != nil {
		return Volume{}, err
	}
	held, err := s.pool.reserve(space, bytes)
	if err != nil {
		return Volume{}, err
	}
	defer func() {
		if held.release() {
			s.undo(r.ID)
		}
	}()
	rec := newRecord(r, bytes, s.pool.config.Allocation)
	if err := s.build(ctx, r.ID, rec); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return Volume{}, fmt.Errorf("%w as something that is no volume: %w", ErrExists, err)
		}
		return Volume{}, noSpace(err)
	}
	e := entry{record: rec, present: true}
	held.commit(r.ID, e)
	return s.pool.volume(r.ID, e.card(), space), nil
}

// build makes the volume aside and then puts it in its place in one step. Before
// that step nothing is a volume; after it everything is there.
func (s *session) build(ctx context.Context, id VolumeID, rec *record) error {
	if err := s.discardStaging(id.name); err != nil {
		return err
	}
	if err := s.fillStaging(ctx, rec); err != nil {
		return err
	}
	if err := trace.Step(ctx, "write the record", func() error { return writeRecord(s.volumes, rec) }); err != nil {
		return err
	}
	return trace.Step(ctx, "move into the pool", func() error {
		if err := s.staging.Rename(id.name, s.root, id.name); err != nil {
			return err
		}
		return s.root.Sync()
	})
}

func (s *session) fillStaging(ctx context.Context, rec *record) (err error) {
	step := trace.Begin(ctx, "make the directory and its limit")
	d, err := s.makeLimited(rec)
	if err := step.EndWith(err); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if rec.Mode == ModeBlock {
		// And the directory stays closed.
		err = trace.Step(ctx, "make the file", func() error { return s.makeDisk(ctx, d, rec) })
	} else {
		err = s.open(d)
	}
	if err != nil {
		return err
	}
	return d.Sync()
}

// open lets pods into a new directory.
func (s *session) open(d *dir.Dir) error {
	if s.pool.config.Relabel != label.None {
		if _, err := s.pool.options.Labels.Ensure(d, label.Root); err != nil {
			return err
		}
	}
	return d.Chmod(volumeMode)
}

// unit is what a size is rounded up to.
func unit(mode Mode, space dir.Space) int64 {
	if mode == ModeBlock {
		return max(space.BlockBytes, loop.Unit)
	}
	return space.BlockBytes
}

// undo removes what a failed creation left, the record first: a record without a
// directory would be a lost volume. What cannot be undone now, recovery undoes.
func (s *session) undo(id VolumeID) {
	if err := s.undoStaged(id); err != nil {
		s.pool.log.Error(err, "what a failed creation left is still there", "volume", id.name)
	}
	// The last step may have failed after it took effect: then the volume is there.
	e, d, err := s.lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err == nil {
		s.pool.note(id, e)
	}
}

// discardStaging gives an entry of the staging directory to the reaper.
func (s *session) discardStaging(name string) error {
	err := s.throwStaged(s.staging, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// throwStaged throws an entry of a staging directory away. The name in the trash
// says whose the id is that it carries, so that the reaper gives it back.
func (s *session) throwStaged(staging *dir.Dir, name string) error {
	carried, err := s.idIn(staging, name)
	if err != nil {
		return err
	}
	suffix := s.claims.owner(carried)
	if suffix == "" {
		suffix = randomSuffix()
	}
	bytes, err := s.stagedBytes(staging, name, carried)
	if err != nil {
		return err
	}
	return s.throwAway(staging, name, name+"."+suffix, bytes)
}

// stagedBytes is what an entry of a staging directory occupies: a directory volume
// nothing yet, a file up to all of its size.
func (s *session) stagedBytes(staging *dir.Dir, name string, carried quota.ID) (int64, error) {
	d, err := staging.Open(name)
	if isMissing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Close() }()
	hasDisk, err := d.Exists(diskName)
	if err != nil || !hasDisk {
		return 0, err
	}
	return s.trashBytes(carried), nil
}

// noSpace turns the answers of a filesystem that takes nothing more into ErrNoSpace.
func noSpace(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS) || errors.Is(err, quota.ErrNoID) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}
