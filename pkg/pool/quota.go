package pool

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// Quota keeps the sizes of directories on one filesystem: a facility of
// pkg/hostfs/quota, or a stand-in that keeps its contract.
type Quota = quota.Facility

// DetectQuota asks a filesystem for its facility: quota.Detect. An error says why
// there is none and what to do.
type DetectQuota func(d *dir.Dir) (Quota, error)

// chooseQuota finds out who keeps the sizes of a pool that is being opened.
func (p *Pool) chooseQuota(id *opened, root *dir.Dir) error {
	if p.config.Enforcement == EnforceNone {
		id.unenforced = errors.New(`it is switched off by the pool option "enforcement"`)
		return nil
	}
	facility, err := p.options.DetectQuota(root)
	switch {
	case err == nil && facility.Kind() == quota.Btrfs && p.config.BytesPerInode > 0:
		err = errors.New("btrfs does not limit inodes; remove the pool option bytesPerInode")
	case err == nil:
		id.quota = facility
		return nil
	}
	if err != nil && !errors.Is(err, quota.ErrNone) && facility == nil {
		return err // not that there is none: it is asked again
	}
	if p.config.Enforcement == EnforceRequired {
		return fmt.Errorf("enforcement is required: %w", err)
	}
	id.unenforced = err
	return nil
}

// keeper keeps the sizes of the pool's volumes; nil if nobody does, or before the
// pool is opened.
func (p *Pool) keeper() Quota {
	if id := p.identity.Load(); id != nil {
		return id.quota
	}
	return nil
}

// limits is what the kernel is told of a promise.
func (p *Pool) limits(bytes int64) quota.Limit {
	limit := quota.Limit{Bytes: bytes}
	if p.config.BytesPerInode > 0 {
		limit.Inodes = 1 + bytes/p.config.BytesPerInode // one is the volume's root
	}
	return limit
}

// enforced tells whether the kernel keeps the size of a volume. One that was made
// without a limit cannot be given one: what it holds would not be counted.
func enforced(keeper Quota, e entry) bool {
	return keeper != nil && e.record != nil && e.record.Quota == string(keeper.Kind())
}

// makeLimited makes the directory of a new volume, under its limit from the
// beginning, and notes in the record who keeps it.
func (s *session) makeLimited(rec *record) (*dir.Dir, error) {
	if s.quota == nil {
		return s.staging.Make(rec.ID)
	}
	d, err := s.quota.Make(s.staging, rec.ID)
	if err != nil {
		return nil, err
	}
	if err := s.limitNew(d, rec); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (s *session) limitNew(d *dir.Dir, rec *record) error {
	id, err := s.claimID(rec.UID)
	if err != nil {
		return err
	}
	rec.Quota, rec.ProjectID = string(s.quota.Kind()), uint64(id)
	return s.quota.Limit(d, id, s.pool.limits(rec.Bytes))
}

// claims are the ids that volumes and trash of all pools are counted by: several
// pools can lie on one filesystem. The zero value is ready for use.
type claims struct {
	mu    sync.Mutex
	taken map[quota.ID]string // the uids of the records that have them
}

// hold notes that a record has an id.
func (c *claims) hold(id quota.ID, uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.taken == nil {
		c.taken = make(map[quota.ID]string)
	}
	c.taken[id] = uid
}

// try is hold, unless another has the id.
func (c *claims) try(id quota.ID, uid string) bool {
	if id == 0 {
		return true // on btrfs, where the kernel chose
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.taken[id] != "" {
		return false
	}
	if c.taken == nil {
		c.taken = make(map[quota.ID]string)
	}
	c.taken[id] = uid
	return true
}

func (c *claims) owner(id quota.ID) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.taken[id]
}

func (c *claims) holds(id quota.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, taken := c.taken[id]
	return taken
}

func (c *claims) drop(id quota.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.taken, id)
}

// claimID takes an id that nothing on the filesystem has. No lock is held while
// the filesystem is asked: of two calls that are told the same id, one asks again.
func (s *session) claimID(uid string) (quota.ID, error) {
	for {
		id, err := s.quota.NewID(s.root, s.pool.claims.holds)
		if err != nil || s.pool.claims.try(id, uid) {
			return id, err
		}
	}
}

// unlimit takes the limit off a piece of trash: on btrfs removing can need more than
// a full subvolume has. It answers the id that the trash carries.
func (s *session) unlimit(name string) (quota.ID, error) {
	id, err := s.trashID(name)
	if err != nil || id == 0 {
		return 0, err
	}
	// A copy, and a tree whose owner changed its id, carry what is another's.
	if uid := s.pool.claims.owner(id); uid != "" && !strings.HasSuffix(name, "."+uid) {
		return 0, nil
	}
	d, err := s.trash.Open(name)
	if err != nil {
		return 0, err
	}
	return id, errors.Join(s.quota.Limit(d, id, quota.Limit{}), d.Close())
}

// trashID is the id that a piece of trash carries; 0 if it carries none.
func (s *session) trashID(name string) (quota.ID, error) {
	if s.quota == nil {
		return 0, nil
	}
	d, err := s.trash.Open(name)
	if isMissing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	id, err := s.quota.IDOf(d)
	if s.quota.Kind() != quota.Btrfs && (id < quota.FirstID || id > quota.LastID) {
		id = 0 // not one of the driver's
	}
	return id, errors.Join(err, d.Close())
}

// releaseID gives an id back after its tree is gone.
func (s *session) releaseID(id quota.ID) error {
	if id == 0 {
		return nil
	}
	if err := s.quota.Release(s.root, id); err != nil {
		return err
	}
	s.pool.claims.drop(id)
	return nil
}

// restoreLimits compares all limits with the promises. One that cannot be put back
// is told, and shows in the condition of its volume; the others are served.
func (s *session) restoreLimits() {
	for id, e := range s.pool.limited(s.quota) {
		if err := s.restoreLimit(id, e); err != nil {
			s.pool.log.Error(err, "the limit of a volume could not be put back", "volume", id.name)
		}
	}
}

// restoreLimit puts back a limit that is missing or different: the quota file was
// rebuilt, another tool was used, or a crash came between record and limit.
func (s *session) restoreLimit(id VolumeID, e entry) error {
	d, err := s.root.Open(id.name)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	want := s.pool.limits(e.record.Bytes)
	if ok, err := s.carriesID(d, e); err != nil || !ok {
		return errors.Join(err, errNotCarried)
	}
	usage, err := s.quota.Usage(d, quota.ID(e.record.ProjectID))
	if err != nil || usage.Limit == want {
		return err
	}
	s.pool.log.Info("put back the limit of a volume", "volume", id.name, "had", usage.Limit.Bytes, "promised", want.Bytes)
	return s.quota.Limit(d, quota.ID(e.record.ProjectID), want)
}

// errNotCarried reports a directory that is not counted as its record says. Giving
// it the id would not help: what it holds already would not be counted.
var errNotCarried = errors.New("the directory does not carry the project id of its record; copy its content into a new volume")

// carriesID tells whether a directory is counted as its record says.
func (s *session) carriesID(d *dir.Dir, e entry) (bool, error) {
	if s.quota.Kind() == quota.Btrfs {
		return true, nil // its own, always
	}
	id, err := s.quota.IDOf(d)
	return id == quota.ID(e.record.ProjectID), err
}

// limited are the volumes whose size is kept.
func (p *Pool) limited(keeper Quota) map[VolumeID]entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	volumes := make(map[VolumeID]entry)
	for id, e := range p.index.byID {
		if e.present && enforced(keeper, e) {
			volumes[id] = e
		}
	}
	return volumes
}
