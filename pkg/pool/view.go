package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// NotKnown stands for a number that nobody counts, or that is not known at the moment.
const NotKnown = unknownBytes

// A View is a pool as it lies on disk, seen by somebody who does not serve it.
type View struct {
	Name   Name
	Path   string
	Shared bool
	// Err is why a driver would not serve the pool; nil if it would. What could be
	// read in spite of it is told.
	Err error
	// UUID is the pool's identity; empty for a pool that could not be read.
	UUID    string
	Created time.Time
	Space   dir.Space
	// SystemDisk: the pool shares its filesystem with the operating system.
	SystemDisk bool
	// Quota is who keeps the sizes of new volumes; empty for nobody, and then
	// Unenforced is why.
	Quota      quota.Kind
	Unenforced error
	// Promised is the sum of all promises, and Available what a driver that started now
	// would still give, in bytes.
	Promised, Available int64
	Condition           health.Condition
	// Volumes are in the order of their ids. Those that a call is about to make or to
	// remove are among Staging and Trash.
	Volumes        []VolumeView
	Staging, Trash []Leftover
	// Devices is why the loop devices of the node could not be asked; nil if they could,
	// or if there is no volume that could have one.
	Devices error
}

// A VolumeView is a volume as it lies on disk.
type VolumeView struct {
	Volume
	// Recorded: there is a record, readable or not.
	Recorded bool
	Thin     bool
	Inline   bool
	Created  time.Time
	// LimitBytes is the limit that the kernel keeps, and UsedBytes what it counts;
	// NotKnown if it does neither. Of a block volume they include what the filesystem
	// needs to keep track of the file.
	LimitBytes, UsedBytes int64
	// Carried is what the directory is counted by, and ProjectID what its record says; 0
	// for nothing.
	Carried, ProjectID quota.ID
	// Published are its mounts on this node, those of its devices included.
	Published []bind.Publication
	// FileBytes and AllocatedBytes are those of the file of a block volume; NotKnown
	// if there is none.
	FileBytes, AllocatedBytes int64
	Devices                   []loop.Device

	file dir.ID // what its devices are attached to; zero for nothing
	uid  string // of its record
}

// A Leftover is a volume that is being made or removed, or what was left of that.
type Leftover struct {
	// Node is who does it.
	Node string
	Name string
	// Changed is when it last did, at its top.
	Changed time.Time
	// UsedBytes is what it holds; NotKnown where nobody counts that.
	UsedBytes int64
	Condition health.Condition
}

// What is wrong with a volume is looked at again: a call of the driver beside may have
// come between what was read first and last. It is told when two looks agree.
const (
	betweenLooks = time.Second
	moreLooks    = 5
)

// expandedLately is how long an expansion may be between its record and its limit: a
// disk can take a while to make the record durable.
const expandedLately = time.Minute

// stagedLong is how long no creation takes: its call has an end.
const stagedLong = 10 * time.Minute

// See looks at pools beside the driver that serves them, or without one, at all of them
// at once. It changes nothing and takes no lock that others would wait for. A pool that
// gets nowhere for Options.HangAfter is left behind. The views have the order of the
// configurations.
func See(ctx context.Context, configs []Config, options Options) []View {
	set := &Set{options: options.withDefaults()}
	views := make([]View, len(configs))
	// Whether one lies in another is told when it is known where all are.
	var placed, all sync.WaitGroup
	placed.Add(len(configs))
	for i, config := range configs {
		all.Go(func() {
			p := newPool(config, set)
			p.beside = true
			_, err := inSteps(ctx, p, p.seePlace)
			placed.Done()
			if err != nil {
				views[i] = p.unseen(err)
				return
			}
			placed.Wait()
			views[i] = p.seeWhole(ctx)
		})
	}
	all.Wait()
	return views
}

// seePlace notes where the pool is, if that can be told. If not, a closer look says why.
func (p *Pool) seePlace(context.Context) struct{} {
	if root, err := dir.Open(p.config.Path); err == nil {
		if at, err := p.locate(root); err == nil {
			p.roots.settle(p, at)
		}
		_ = root.Close() // opened for reading
	}
	return struct{}{}
}

func (p *Pool) seeWhole(ctx context.Context) View {
	view, err := inSteps(ctx, p, p.see)
	if err != nil {
		view = p.unseen(err)
	}
	if slices.ContainsFunc(view.Volumes, func(v VolumeView) bool { return v.file != dir.ID{} }) {
		p.seeDevices(ctx, &view)
	}
	return view
}

// inSteps does something about a pool for as long as it gets somewhere.
func inSteps[T any](ctx context.Context, p *Pool, do func(context.Context) T) (T, error) {
	done := make(chan T, 1)
	go func() { done <- do(ctx) }()
	return awaitSteps(ctx, done, p.options.HangAfter, &p.steps, p.hangs)
}

// blank is the view of a pool that was not looked at yet.
func (p *Pool) blank() View {
	return View{Name: p.config.Name, Path: p.config.Path, Shared: p.config.Shared}
}

// unseen is the view of a pool that could not be looked at.
func (p *Pool) unseen(err error) View {
	v := p.blank()
	v.Err = p.unavailable(err)
	v.Condition = health.Facts{Pool: v.Err}.Condition()
	return v
}

// awaitSteps waits for an answer for as long as there are steps towards it, and ctx
// does not end.
func awaitSteps[T any](ctx context.Context, done <-chan T, limit time.Duration, steps *atomic.Uint64, hangs func() error) (nothing T, err error) {
	tick := time.NewTicker(limit)
	defer tick.Stop()
	for before := steps.Load(); ; before = steps.Load() {
		select {
		case v := <-done:
			return v, nil
		case <-ctx.Done():
			return nothing, context.Cause(ctx)
		case <-tick.C:
			if steps.Load() == before {
				return nothing, hangs()
			}
		}
	}
}

func (p *Pool) see(ctx context.Context) View {
	v := p.blank()
	s, id, err := p.openToSee()
	if err != nil {
		return p.unseen(err)
	}
	defer s.close()
	v.UUID, v.Created = id.format.UUID, id.format.Created
	v.Unenforced = id.unenforced
	if id.unenforced == nil {
		v.Quota = id.quota.Kind()
	}
	v.SystemDisk = p.onSystemDisk(s.root)
	if err := cmp.Or(p.checkNested(s.root), s.unfit(id.unenforced)); err != nil {
		v.Err = p.unavailable(err)
	}
	if err := s.see(ctx, &v); err != nil {
		return p.unseen(err)
	}
	return v
}

var errNoLayout = errors.New("no driver has served it yet, or its filesystem is not mounted")

// openToSee opens a pool as far as that changes nothing.
func (p *Pool) openToSee() (_ *session, _ *opened, err error) {
	s := &session{pool: p}
	defer func() {
		if errors.Is(err, errNoLayout) {
			err = cmp.Or(p.checkNested(s.root), err) // which may be why
		}
		if err != nil {
			s.close()
		}
	}()
	if s.root, err = dir.Open(p.config.Path); err != nil {
		return nil, nil, err
	}
	if err := p.checkMount(s.root); err != nil {
		return nil, nil, err
	}
	s.own, err = s.root.Open(ownName)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: it has no %s", errNoLayout, ownName)
	}
	if err != nil {
		return nil, nil, err
	}
	f, err := readFormat(s.own)
	if err == nil && f == nil {
		err = fmt.Errorf("%w: it has no %s/%s", errNoLayout, ownName, formatName)
	}
	if err != nil {
		return nil, nil, err
	}
	if s.volumes, err = s.own.Open(volumesName); err != nil {
		return nil, nil, err
	}
	id, err := s.identify(f)
	if err != nil {
		return nil, nil, err
	}
	p.identity.Store(id)
	return s, id, nil
}

// see fills a view with what the pool holds.
func (s *session) see(ctx context.Context, v *View) (err error) {
	// As a look of the driver does, so that conditions are the same.
	looked := *s.pool.state.Load()
	looked.errors = s.pool.countErrors(s.root)
	if looked.errors > 0 {
		s.feel() // what made an ext4 read-only was counted
	}
	s.pool.state.Store(&looked)
	if err := s.load(); err != nil {
		return err
	}
	if v.Staging, err = s.leftovers(stagingName); err != nil {
		return err
	}
	if v.Trash, err = s.leftovers(trashName); err != nil {
		return err
	}
	l := &listing{pool: s.pool, session: s, err: v.Err}
	if err := l.ask(); err != nil {
		return err
	}
	v.Space = l.space
	if v.Volumes, err = l.seeAll(ctx); err != nil {
		return err
	}
	s.pool.mu.Lock()
	v.Promised = s.pool.ledger.promised
	s.pool.mu.Unlock()
	if v.Err == nil {
		v.Available = s.seeAvailable(v)
	}
	v.Condition = health.Facts{
		Pool:             v.Err,
		FilesystemErrors: max(0, looked.errors),
		ReadOnly:         v.Space.ReadOnly,
		FreeBytes:        v.Space.FreeBytes,
		SizeBytes:        v.Space.SizeBytes,
		InodesCounted:    v.Space.Inodes > 0,
		FreeInodes:       v.Space.InodesFree,
	}.Condition()
	return nil
}

// seeAll looks at all volumes, and again at those that are not in order.
func (l *listing) seeAll(ctx context.Context) ([]VolumeView, error) {
	var seen []VolumeView
	for _, id := range l.pool.after(VolumeID{}, l.pool.index.len(), card.exists) {
		v, ok, err := l.see(id)
		if err != nil {
			return nil, err
		}
		if ok {
			seen = append(seen, v)
		}
	}
	looks := moreLooks
	if l.err != nil || l.space.ReadOnly {
		looks = 0 // no volume will be better soon
	}
	for range looks {
		sure, err := l.seeAgain(ctx, &seen)
		if err != nil || sure {
			return seen, err
		}
	}
	return seen, nil
}

// seeAgain looks again at what is not in order, after a while. It answers true if that is
// the same as before: not that another volume by that name is not in order now.
func (l *listing) seeAgain(ctx context.Context, seen *[]VolumeView) (sure bool, err error) {
	if !slices.ContainsFunc(*seen, func(v VolumeView) bool { return v.Condition.Abnormal }) {
		return true, nil
	}
	if err := rest(ctx, betweenLooks); err != nil {
		return false, err
	}
	// The ids as well: one that was read of a record which is gone by now may be another's.
	l.session.forgetClaims()
	if err := l.session.load(); err != nil {
		return false, err
	}
	last := (*seen)[:0:0]
	sure = true
	for _, v := range *seen {
		if before := v; before.Condition.Abnormal {
			var ok bool
			if v, ok, err = l.see(v.ID); err != nil {
				return false, err
			}
			if !ok {
				continue
			}
			sure = sure && (!v.Condition.Abnormal || v.uid == before.uid && v.Condition == before.Condition)
		}
		last = append(last, v)
	}
	*seen = last
	return sure, nil
}

// forgetClaims has nobody own an id, as before the records were read.
func (s *session) forgetClaims() {
	id := *s.pool.identity.Load()
	id.claims = &claims{}
	s.claims = id.claims
	s.pool.identity.Store(&id)
}

// see looks at one volume. It answers false for one that is being made or removed, or
// is gone.
func (l *listing) see(id VolumeID) (VolumeView, bool, error) {
	s := l.session
	s.pool.steps.Add(1)
	e, d, err := s.lookupWhole(id)
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	if err != nil || !e.exists() {
		s.pool.note(id, entry{})
		return VolumeView{}, false, err
	}
	s.pool.note(id, e)
	return l.view(id, e, d), true, nil
}

// mostLookups is how often a volume is looked at on which calls are at work.
const mostLookups = 5

// lookupWhole is lookup for those who do not hold the lock of the volume, since
// another process does: what it answers was there at one time. A volume that is
// being made or removed does not exist.
func (s *session) lookupWhole(id VolumeID) (entry, *dir.Dir, error) {
	for range mostLookups {
		e, d, err := s.lookup(id)
		if err != nil || !e.exists() || e.present && e.record != nil || e.damage != nil {
			return e, d, err
		}
		same, err := s.stillSo(id, e, d)
		if err != nil || same {
			return e, d, err
		}
		if d != nil {
			_ = d.Close()
		}
	}
	return entry{}, nil, nil // calls are at work on it without a pause
}

// stillSo looks again at half a volume. A record is written before its directory comes
// out of staging, and removed after that is in the trash: so there is no moment at which a
// volume that is not lost has a record, and nothing in any of the three places, nor one
// at which a directory has no record that it should have.
func (s *session) stillSo(id VolumeID, e entry, d *dir.Dir) (bool, error) {
	if e.record != nil {
		under, err := s.atWork(id, e.record.UID)
		if err != nil || under {
			return false, err
		}
	}
	now, again, err := s.lookup(id)
	if again != nil {
		defer func() { _ = again.Close() }()
	}
	if err != nil || now.present != e.present || (now.record == nil) != (e.record == nil) || now.damage != nil {
		return false, err
	}
	if e.record != nil {
		return now.record.UID == e.record.UID, nil
	}
	return sameDir(d, again)
}

// atWork tells whether any node has a volume in staging or in the trash.
func (s *session) atWork(id VolumeID, uid string) (bool, error) {
	for place, name := range map[string]string{stagingName: id.name, trashName: id.name + "." + uid} {
		found := false
		err := s.eachNode(place, func(_ string, d *dir.Dir) (err error) {
			there, err := d.Exists(name)
			found = found || there
			return err
		})
		if err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// eachNode opens what the nodes have in one place of the layout.
func (s *session) eachNode(place string, do func(node string, d *dir.Dir) error) error {
	all, err := s.own.Open(place)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = all.Close() }()
	nodes, err := names(all)
	if err != nil {
		return err
	}
	slices.Sort(nodes)
	for _, node := range nodes {
		d, err := all.Open(node)
		if isMissing(err) {
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(do(node, d), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

// view tells of one volume what its answers in CSI would, and more.
func (l *listing) view(id VolumeID, e entry, d *dir.Dir) VolumeView {
	s := l.session
	v := VolumeView{
		Volume:         s.pool.volume(id, e.card(), l.space),
		Recorded:       e.record != nil || e.damage != nil,
		LimitBytes:     NotKnown,
		UsedBytes:      NotKnown,
		FileBytes:      NotKnown,
		AllocatedBytes: NotKnown,
		Published:      slices.Clone(l.published[id.name]),
	}
	_, facts := s.measure(id, d, e, l.space)
	facts.Pool = l.err
	if e.record != nil {
		v.Thin, v.Inline, v.Created, v.uid = e.record.Thin, e.record.Inline, e.record.Created, e.record.UID
		v.ProjectID = quota.ID(e.record.ProjectID)
	}
	if d != nil {
		v.count(s, d)
		v.lookAtFile(id, e, d)
	}
	facts.LimitDiffers = facts.LimitDiffers && !s.mayBeGrowing(id, e, v.LimitBytes)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition = facts.Condition()
	v.Nodes = s.pool.nodes(v.Published, l.elsewhere[id.name])
	return v
}

// mayBeGrowing tells whether a limit that is not what was promised can be that of an
// expansion which is under way. Of a block volume the limit comes first, and while its
// file is allocated that can take long; of others it comes last.
func (s *session) mayBeGrowing(id VolumeID, e entry, limit int64) bool {
	if e.block() {
		return limit > e.promised()
	}
	written, err := s.volumes.Changed(id.name + recordSuffix)
	since := time.Since(written)
	return err == nil && limit != NotKnown && limit < e.promised() && 0 <= since && since < expandedLately
}

// count asks who counts the directory for its numbers. What cannot be read is not known:
// whether that makes the volume abnormal is for measure to say, as in a driver.
func (v *VolumeView) count(s *session, d *dir.Dir) {
	if s.quota == nil {
		return
	}
	var err error
	if v.Carried, err = s.quota.IDOf(d); err != nil || v.Carried == 0 {
		return
	}
	usage, err := s.quota.Usage(d, v.Carried)
	if err != nil {
		return
	}
	v.UsedBytes = usage.Bytes
	if usage.Limit.Bytes > 0 {
		v.LimitBytes = usage.Limit.Bytes
	}
}

// lookAtFile looks at what the devices of the volume are attached to, if it can be read.
func (v *VolumeView) lookAtFile(id VolumeID, e entry, d *dir.Dir) {
	if !e.card().mayBeBlock() {
		return
	}
	disk, err := openDisk(id, d)
	if err != nil {
		return
	}
	defer func() { _ = disk.Close() }() // opened for reading
	v.file = disk.ID()
	if bytes, err := disk.Size(); err == nil {
		v.FileBytes = bytes
	}
	if bytes, err := disk.Allocated(); err == nil {
		v.AllocatedBytes = bytes
	}
}

// leftovers are the entries of staging or trash, of all nodes.
func (s *session) leftovers(place string) (all []Leftover, err error) {
	err = s.eachNode(place, func(node string, d *dir.Dir) error {
		entries, err := names(d)
		if err != nil {
			return err
		}
		slices.Sort(entries)
		var here []Leftover
		for _, name := range entries {
			s.pool.steps.Add(1)
			left, err := s.leftover(d, name)
			if isMissing(err) {
				continue
			}
			if err != nil {
				return err
			}
			left.Node = node
			here = append(here, left)
		}
		lately, err := s.workedOn(place, d, here)
		if err != nil {
			return err
		}
		for _, left := range here {
			left.Condition = s.leftoverCondition(place, left, lately)
			all = append(all, left)
		}
		return nil
	})
	return all, err
}

func (s *session) leftover(in *dir.Dir, name string) (Leftover, error) {
	left := Leftover{Name: name, UsedBytes: NotKnown}
	var err error
	if left.Changed, err = in.Changed(name); err != nil {
		return left, err
	}
	id, err := s.idIn(in, name)
	if err == nil {
		left.UsedBytes = s.trashBytes(id)
	}
	return left, err
}

// workedOn is when anything in the trash of a node last changed. Creations do not wait for
// each other: of those it is the zero time.
func (s *session) workedOn(place string, in *dir.Dir, here []Leftover) (last time.Time, err error) {
	if place != trashName {
		return last, nil
	}
	// In a shared pool a node sets this as its sign of life, whether it can erase or not.
	if !s.pool.config.Shared {
		if last, err = in.Modified(); err != nil {
			return last, err
		}
	}
	for _, left := range here {
		if left.Changed.After(last) {
			last = left.Changed
		}
	}
	return last, nil
}

// leftoverCondition tells work in progress from what stays. The reaper erases one piece
// after the other, so one that waits behind a large one is no sign of trouble as long as
// the node gets on.
func (s *session) leftoverCondition(place string, l Leftover, lately time.Time) health.Condition {
	limit, normal, says := retryStuck, "being erased", "cannot be erased, or no driver runs on its node"
	if place == stagingName {
		limit, normal, says = stagedLong, "being made", "a creation that did not end; the driver of its node removes it when it runs"
	}
	if s.pool.config.Shared && l.Node != s.pool.options.Node.name {
		limit = unseenAfter // then others take it over
	}
	since := time.Since(l.Changed)
	switch {
	case since <= limit:
		return health.Condition{Message: normal}
	case time.Since(lately) <= limit:
		return health.Condition{Message: "waits to be erased"}
	}
	return health.Condition{Abnormal: true, Message: fmt.Sprintf("unchanged for %v: %s", since.Truncate(time.Minute), says)}
}

// seeAvailable does what a driver does that starts, as far as that changes nothing.
func (s *session) seeAvailable(v *View) int64 {
	p := s.pool
	for _, left := range v.Trash {
		if left.Node == p.options.Node.name {
			p.trashed(left.Name, left.UsedBytes)
			continue
		}
		p.mu.Lock()
		p.ledger.others = true
		p.unlock()
	}
	p.mu.Lock()
	p.ledger.foreign = p.identity.Load().format.Foreign
	p.unlock()
	// count would make the directories of this node if they were not there.
	if p.options.Node != (NodeID{}) && s.openWork((*dir.Dir).Open) == nil {
		s.count()
	}
	p.learnForeign(v.Space)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.told(v.Space, p.config)
}

// seeDevices adds the loop devices of the volumes. The kernel asks the filesystem of
// each device about its file, and any of them may hang.
func (p *Pool) seeDevices(ctx context.Context, v *View) {
	type answer struct {
		attachments
		err error
	}
	done := make(chan answer, 1)
	go func() {
		all, err := p.options.attachments()
		done <- answer{all, err}
	}()
	hangs := func() error {
		return fmt.Errorf("the node's loop devices: no answer for %v: the filesystem of one of them hangs", p.options.HangAfter)
	}
	all, err := awaitSteps(ctx, done, p.options.HangAfter, new(atomic.Uint64), hangs)
	if v.Devices = errors.Join(err, all.err); v.Devices != nil {
		return
	}
	for i := range v.Volumes {
		volume := &v.Volumes[i]
		if (volume.file == dir.ID{}) {
			continue
		}
		v.Devices = errors.Join(v.Devices, all.unknown(volume.ID))
		volume.Devices = all.of(volume.file)
		devices := all.publications(volume.file)
		volume.Published = append(volume.Published, devices...)
		if len(devices) > 0 && !slices.Contains(volume.Nodes, p.options.Node) {
			volume.Nodes = p.nodes(devices, volume.Nodes)
		}
	}
}
