package pool

import (
	"errors"
	"fmt"
	"iter"
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

// detectQuota finds out who keeps the sizes of a pool's volumes, also of those that
// are there when new ones get no limit, and why they get none.
func (p *Pool) detectQuota(root *dir.Dir) (facility Quota, unenforced, err error) {
	facility, err = p.options.DetectQuota(root)
	switch {
	case err == nil:
		return facility, p.unwanted(facility), nil
	case p.config.Enforcement == EnforceNone:
		return nil, errSwitchedOff, nil
	case errors.Is(err, quota.ErrNone):
		return nil, err, nil
	}
	return nil, nil, err // not that there is none: it is asked again
}

var (
	errSwitchedOff = errors.New(`it is switched off by the pool option "enforcement"`)
	errInodes      = errors.New("btrfs does not limit inodes; remove the pool option bytesPerInode")
)

// unwanted is why the configuration wants no new limits of a facility.
func (p *Pool) unwanted(facility Quota) error {
	switch {
	case p.config.Enforcement == EnforceNone:
		return errSwitchedOff
	case facility.Kind() == quota.Btrfs && p.config.BytesPerInode > 0:
		return errInodes
	}
	return nil
}

// unfit is why a pool whose sizes nobody keeps must not serve.
func (p *Pool) unfit(unenforced error) error {
	if unenforced == nil || p.config.Enforcement != EnforceRequired {
		return nil
	}
	return fmt.Errorf("enforcement is required: %w", unenforced)
}

// lookAtQuota notices quotas that were switched on or off since the pool was opened,
// or that the filesystem was mounted anew without or with.
func (s *session) lookAtQuota() error {
	facility, unenforced, err := s.pool.detectQuota(s.root)
	if err != nil {
		return err
	}
	if kindOf(facility) != kindOf(s.quota) || (unenforced == nil) != (s.unenforced == nil) {
		s.quota, s.unenforced = facility, unenforced
		s.changeQuota()
	}
	if s.quota != nil {
		s.restoreAgain()
	}
	return s.unfit(unenforced)
}

// unfit is Pool.unfit for now: an ext4 that is read-only has its quotas off, and serves
// what it has all the same, since nothing in it can grow.
func (s *session) unfit(unenforced error) error {
	err := s.pool.unfit(unenforced)
	if err == nil {
		return nil
	}
	if space, spaceErr := s.space(); spaceErr == nil && space.ReadOnly {
		return nil
	}
	return err
}

func kindOf(facility Quota) quota.Kind {
	if facility == nil {
		return ""
	}
	return facility.Kind()
}

// changeQuota has the calls to come use what this look has.
func (s *session) changeQuota() {
	now := *s.pool.identity.Load()
	now.quota, now.unenforced = s.quota, s.unenforced
	s.pool.identity.Store(&now)
	if s.unenforced != nil {
		s.pool.log.Error(s.unenforced, "the sizes of new volumes are promised and not enforced from now on")
	} else {
		s.pool.log.Info("the kernel keeps the sizes of new volumes from now on", "quota", s.quota.Kind())
	}
	s.doubtLimits()
}

// doubtLimits has the looks compare all limits with the promises.
func (s *session) doubtLimits() {
	s.pool.unrestored = make(ids)
	for id := range s.limited() {
		s.pool.unrestored[id] = struct{}{}
	}
}

// restoreAgain puts limits back while the pool serves, each when no call works on its
// volume: what is busy now is left for the next look.
func (s *session) restoreAgain() {
	for id := range s.pool.unrestored {
		s.pool.steps.Add(1)
		unlock, err := s.tryLock(id)
		if err != nil {
			continue
		}
		delete(s.pool.unrestored, id)
		e, d, err := s.lookup(id)
		if d != nil {
			_ = d.Close()
		}
		if c := e.card(); err == nil && s.keeps(c) {
			err = s.restoreLimit(id, c)
		}
		unlock()
		s.tellUnrestored(id, err)
	}
	if len(s.pool.unrestored) == 0 {
		s.pool.unrestored = nil // a map keeps the room of what it once had
	}
}

func (s *session) tellUnrestored(id VolumeID, err error) {
	if err != nil {
		s.pool.log.Error(err, "the limit of a volume could not be put back", "volume", id.name)
	}
}

// enforcing tells whether new volumes get limits.
func (p *Pool) enforcing() bool {
	id := p.identity.Load()
	return id != nil && id.unenforced == nil
}

// limits is what the kernel is told of a promise.
func (p *Pool) limits(c card) quota.Limit {
	if c.is(isBlock) {
		// The file keeps the size. What the filesystem needs to keep track of the file
		// counts as well: on btrfs up to 78 bytes for each block of 4 KiB, were each apart
		// from the next, in nodes that may be half empty; on the others less.
		return quota.Limit{Bytes: c.promised + c.promised/16 + 1<<20}
	}
	limit := quota.Limit{Bytes: c.promised}
	if p.config.BytesPerInode > 0 {
		limit.Inodes = 1 + c.promised/p.config.BytesPerInode // one is the volume's root
	}
	return limit
}

// enforced tells whether the kernel keeps the size of a volume. One that was made
// without a limit cannot be given one: what it holds would not be counted.
func enforced(keeper Quota, given *claims, c card) bool {
	if keeper == nil || !c.is(by(keeper.Kind())) {
		return false
	}
	owner := given.owner(c.quotaID())
	return owner == "" || hashUID(owner) == c.uid
}

func (s *session) enforced(c card) bool { return enforced(s.quota, s.claims, c) }

// enforced is false before the pool is opened.
func (p *Pool) enforced(c card) bool {
	id := p.identity.Load()
	return id != nil && enforced(id.quota, id.claims, c)
}

// makeLimited makes the directory of a new volume, under its limit from the
// beginning, and notes in the record who keeps it.
func (s *session) makeLimited(rec *record) (*dir.Dir, error) {
	if s.unenforced != nil {
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
	if err := s.quota.Limit(d, id, s.pool.limits(rec.card())); err != nil {
		return errors.Join(err, s.unclaim(d, id))
	}
	return nil
}

// unclaim gives up an id that a directory was to carry, unless it does by now: then
// it goes with the directory.
func (s *session) unclaim(d *dir.Dir, id quota.ID) error {
	carried, err := s.quota.IDOf(d)
	if err == nil && carried != id {
		s.claims.drop(id)
	}
	return err
}

// claimed are the claims on each filesystem: several pools can lie on one. The zero
// value is ready for use.
type claimed struct {
	mu sync.Mutex
	by map[dir.Filesystem]*claims
}

func (c *claimed) on(fs dir.Filesystem) *claims {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = make(map[dir.Filesystem]*claims)
	}
	if c.by[fs] == nil {
		c.by[fs] = &claims{}
	}
	return c.by[fs]
}

// claims are the ids that volumes and trash on one filesystem are counted by. The zero
// value is ready for use.
type claims struct {
	mu    sync.Mutex
	taken map[quota.ID]string // the uids of the records that have them
	// below has no id that is free: NewID need not ask for each of ten thousand.
	below quota.ID
}

// from is where to look for a free id.
func (c *claims) from() quota.ID {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.below = max(c.below, quota.FirstID); c.taken[c.below] != ""; {
		c.below++
	}
	return c.below
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
	if owner := c.taken[id]; owner != "" {
		return owner == uid
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
	c.below = min(c.below, id)
}

// claimID takes an id that nothing on the filesystem has. No lock is held while
// the filesystem is asked: of two calls that are told the same id, one asks again.
func (s *session) claimID(uid string) (quota.ID, error) {
	for {
		id, err := s.quota.NewID(s.root, s.claims.from(), s.claims.holds)
		if err != nil || s.claims.try(id, uid) {
			return id, err
		}
	}
}

// unlimit takes the limit off a piece of trash: on btrfs removing can need more than
// a full subvolume has. It answers the id that the trash carries.
func (s *session) unlimit(name string) (quota.ID, error) {
	id, err := s.idIn(s.trash, name)
	if err != nil || id == 0 {
		return 0, err
	}
	// A copy, and a tree whose owner changed its id, carry what is another's.
	if uid := s.claims.owner(id); uid != "" && !strings.HasSuffix(name, "."+uid) {
		return 0, nil
	}
	d, err := s.trash.Open(name)
	if err != nil {
		return 0, err
	}
	return id, errors.Join(s.quota.Limit(d, id, quota.Limit{}), d.Close())
}

// idIn is the id that what was made by the driver carries; 0 if it carries none.
func (s *session) idIn(parent *dir.Dir, name string) (quota.ID, error) {
	if s.quota == nil {
		return 0, nil
	}
	d, err := parent.Open(name)
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
	// Without quotas there is none to be given back: what is left of it is forgotten
	// when the pool is opened with them.
	if id == 0 || s.quota == nil {
		return nil
	}
	if err := s.quota.Release(s.root, id); err != nil {
		return err
	}
	s.claims.drop(id)
	return nil
}

// releaseLost gives back the id of a lost volume that was deleted. Should its
// directory be somewhere else, it keeps the id, which is then not given again.
func (s *session) releaseLost(volume VolumeID, e entry) {
	c := e.card()
	if !s.enforced(c) {
		return
	}
	if err := s.releaseID(c.quotaID()); err != nil {
		s.pool.log.Error(err, "the limit of a volume that was deleted is still there", "volume", volume.name)
	}
}

// releaseUnused forgets the limits of what was removed while nobody saw to them: the
// filesystem was mounted without quotas, or the directory was removed by hand.
func (s *session) releaseUnused() {
	if s.quota == nil {
		return
	}
	released, err := s.quota.ReleaseUnused(s.root, s.claims.holds)
	if err != nil {
		s.pool.log.Error(err, "limits that no directory has are still there")
	}
	if released > 0 {
		s.pool.log.Info("forgot limits that no directory had", "limits", released)
	}
}

// claim notes the id that a volume is counted by. Of two records with one id, as when
// a pool was copied, the one whose directory carries it has it.
func (s *session) claim(volume VolumeID, e entry) {
	if e.record == nil || e.record.ProjectID == 0 {
		return
	}
	id := quota.ID(e.record.ProjectID)
	if s.claims.try(id, e.record.UID) {
		return
	}
	if carried, err := s.idIn(s.root, volume.name); err == nil && carried == id {
		s.claims.hold(id, e.record.UID)
	}
	if !s.pool.known(volume).is(hasRecord) {
		s.pool.log.Error(errTwoRecords, "the size of one of them is not kept", "volume", volume.name, "projectID", id)
	}
}

var errTwoRecords = errors.New("two volumes are recorded with one project id: copy the content of the one that is abnormal into a new volume")

// restoreLimits compares all limits with the promises. One that cannot be put back
// is told, and shows in the condition of its volume; the others are served.
func (s *session) restoreLimits() {
	if s.locksNodes() { // others may be changing both
		s.doubtLimits()
		s.restoreAgain()
		return
	}
	for id, c := range s.limited() {
		s.pool.steps.Add(1)
		s.tellUnrestored(id, s.restoreLimit(id, c))
	}
}

// restoreLimit puts back a limit that is missing or different: the quota file was
// rebuilt, another tool was used, or a crash came between record and limit.
func (s *session) restoreLimit(id VolumeID, c card) error {
	d, err := s.root.Open(id.name)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	want := s.pool.limits(c)
	if ok, err := s.carriesID(d, c); err != nil || !ok {
		return errors.Join(err, errNotCarried)
	}
	usage, err := s.quota.Usage(d, c.quotaID())
	if err != nil || s.agrees(usage.Limit, c) {
		return err
	}
	if err := s.quota.Limit(d, c.quotaID(), want); err != nil {
		return err
	}
	s.pool.log.Info("put back the limit of a volume", "volume", id.name, "had", usage.Limit.Bytes, "promised", want.Bytes)
	s.pool.mu.Lock()
	defer s.pool.unlock()
	s.pool.restored++
	return nil
}

// agrees tells whether a limit is what was promised. The kernel keeps whole blocks,
// and a promise may have been given in smaller ones.
func (s *session) agrees(has quota.Limit, c card) bool {
	want := s.pool.limits(c)
	return has.Inodes == want.Inodes && has.Bytes >= want.Bytes && has.Bytes < want.Bytes+maxBlock
}

// maxBlock is the largest block that a filesystem with quotas has on Linux, in bytes:
// that of XFS and btrfs, and ext4's is not larger.
const maxBlock = 64 << 10

// limitDiffers tells whether the kernel keeps another size than was promised. The
// caller holds no lock, so that both may be changing: what differs is looked at again
// while no call works on the volume.
func (s *session) limitDiffers(id VolumeID, d *dir.Dir, c card, has quota.Limit) (bool, error) {
	if ok, err := s.inOrder(d, c, has); err != nil || ok {
		return false, err
	}
	unlock, err := s.tryLock(id)
	if errors.Is(err, ErrBusy) {
		return false, nil // a call is at work on it
	}
	if err != nil {
		return false, err
	}
	defer unlock()
	rec, err := readRecord(s.volumes, id)
	if err != nil || rec == nil {
		return false, err
	}
	c = rec.card()
	usage, err := s.quota.Usage(d, c.quotaID())
	if err != nil {
		return false, err
	}
	ok, err := s.inOrder(d, c, usage.Limit)
	return err == nil && !ok, err
}

func (s *session) inOrder(d *dir.Dir, c card, has quota.Limit) (bool, error) {
	carries, err := s.carriesID(d, c)
	return carries && s.agrees(has, c), err
}

// errNotCarried reports a directory that is not counted as its record says. Giving
// it the id would not help: what it holds already would not be counted.
var errNotCarried = errors.New("the directory does not carry the project id of its record; copy its content into a new volume")

// carriesID tells whether a directory is counted as its record says.
func (s *session) carriesID(d *dir.Dir, c card) (bool, error) {
	if s.quota.Kind() == quota.Btrfs {
		return true, nil // its own, always
	}
	id, err := s.quota.IDOf(d)
	return id == c.quotaID(), err
}

// keeps tells whether the volume is there and the kernel keeps its size.
func (s *session) keeps(c card) bool { return c.is(hasDirectory) && s.enforced(c) }

// limited are the volumes whose size is kept.
func (s *session) limited() iter.Seq2[VolumeID, card] { return s.pool.each(s.keeps) }
