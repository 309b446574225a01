package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A View is a pool as it lies on disk, seen by somebody who does not serve it.
type View struct {
	Name   volume.PoolName
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
	// SharesWith are the other pools on the pool's filesystem, in the order of their names.
	SharesWith []volume.PoolName
	// Quota is who enforces the sizes of new volumes; empty for nobody, and then
	// Unenforced is why.
	Quota      quota.Kind
	Unenforced error
	// Promised is the sum of all promises, Held what is kept for trash, or NotKnown, and
	// Available what a driver that started now would still give, in bytes.
	Promised, Held, Available int64
	Condition                 health.Condition
	// Volumes are in the order of their ids. Those that a call is about to make or to
	// remove are among Staging and Trash.
	Volumes        []VolumeView
	Staging, Trash []Leftover
	// Devices is why the loop devices of the node could not be asked; nil if they could,
	// or if there is no volume that could have one.
	Devices error

	held  int64 // what volumes and trash hold, in bytes
	count bool  // whether that is known
}

// A VolumeView is a volume as it lies on disk.
type VolumeView struct {
	Volume
	// Recorded: there is a record, readable or not.
	Recorded bool
	Thin     bool
	Inline   bool
	Created  time.Time
	// LimitBytes is the limit that the kernel enforces, and UsedBytes what it counts;
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
	// HeldBytes is what the ledger keeps for trash until it is erased: its promise, or what it
	// occupies where nobody knows that; NotKnown where that cannot be measured, and for what
	// is being made.
	HeldBytes int64
	Condition health.Condition
}

// What is wrong with a volume is checked again: a call of the driver beside may have
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
func See(ctx context.Context, configs []poolconfig.Pool, options Options) []View {
	set := &Set{options: options.withDefaults(), pools: make([]*Pool, len(configs))}
	views := make([]View, len(configs))
	// Whether one lies in another is told when it is known where all are.
	var placed, all sync.WaitGroup
	placed.Add(len(configs))
	for i, config := range configs {
		all.Go(func() {
			p := newPool(config, set)
			set.pools[i] = p
			p.at.ReadOnly = true
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
	set.seeAvailable(views)
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

// unseen is the view of a pool that could not be checked.
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
	view := p.blank()
	s, f, err := store.OpenReadOnly(p.at)
	if err != nil {
		return p.unseen(err)
	}
	v := &visit{pool: p, store: s}
	defer v.close()
	id, err := p.identify(s, f)
	if err != nil {
		return p.unseen(err)
	}
	p.identity.Store(id)
	v.keeper = id.keeper
	view.UUID, view.Created = f.UUID, f.Created
	view.Unenforced = v.keeper.Unenforced()
	if view.Unenforced == nil {
		view.Quota = v.keeper.Kind()
	}
	view.SystemDisk = p.onSystemDisk(s.Root())
	if err := cmp.Or(p.checkNested(s.Root()), v.unfit(v.keeper)); err != nil {
		view.Err = p.unavailable(err)
	}
	if err := v.see(ctx, &view); err != nil {
		return p.unseen(err)
	}
	return view
}

// see fills a view with what the pool holds.
func (v *visit) see(ctx context.Context, view *View) (err error) {
	// As a check of the driver does, so that conditions are the same.
	looked := *v.pool.state.Load()
	looked.errors = v.pool.countErrors(v.store.Root())
	if looked.errors > 0 {
		v.store.ProbeWritable() // what made an ext4 read-only was counted
	}
	v.pool.state.Store(&looked)
	if err := v.load(); err != nil {
		return err
	}
	if view.Staging, err = v.leftovers(store.InStaging); err != nil {
		return err
	}
	if view.Trash, err = v.leftovers(store.InTrash); err != nil {
		return err
	}
	l := &listing{pool: v.pool, visit: v, err: view.Err}
	if err := l.read(); err != nil {
		return err
	}
	view.Space = l.space
	if view.Volumes, err = l.seeAll(ctx); err != nil {
		return err
	}
	view.Promised = v.pool.ledger.Summary().Promised
	if err := v.seePromises(view); err != nil {
		return err
	}
	view.Condition = health.Facts{
		Pool:             view.Err,
		FilesystemErrors: max(0, looked.errors),
		ReadOnly:         view.Space.ReadOnly,
		FreeBytes:        view.Space.FreeBytes,
		SizeBytes:        view.Space.SizeBytes,
		InodesCounted:    view.Space.Inodes > 0,
		FreeInodes:       view.Space.InodesFree,
	}.Condition()
	return nil
}

// seeAll looks at all volumes, and again at those that are not in order.
func (l *listing) seeAll(ctx context.Context) ([]VolumeView, error) {
	var seen []VolumeView
	for _, known := range l.pool.ledger.After(volume.ID{}, math.MaxInt) {
		v, ok, err := l.see(known.ID)
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
	l.visit.forgetClaims()
	if err := l.visit.load(); err != nil {
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
func (v *visit) forgetClaims() {
	id := *v.pool.identity.Load()
	id.keeper = id.keeper.WithClaims(&limit.Claims{})
	v.keeper = id.keeper
	v.pool.identity.Store(&id)
}

// see looks at one volume. It answers false for one that is being made or removed, or
// is gone.
func (l *listing) see(id volume.ID) (VolumeView, bool, error) {
	s := l.visit
	s.pool.steps.Add(1)
	e, d, err := s.store.LookupUnlocked(id)
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	if err != nil || !e.Exists() {
		s.pool.note(id, store.Entry{})
		return VolumeView{}, false, err
	}
	s.pool.note(id, e)
	return l.view(id, e, d), true, nil
}

// view reports on one volume what its answers in CSI would, and more.
func (l *listing) view(id volume.ID, e store.Entry, d *dir.Dir) VolumeView {
	s := l.visit
	v := VolumeView{
		Volume:         s.pool.volume(id, cardOf(e), l.space),
		Recorded:       e.Record != nil || e.Damage != nil,
		LimitBytes:     volume.Unknown,
		UsedBytes:      volume.Unknown,
		FileBytes:      volume.Unknown,
		AllocatedBytes: volume.Unknown,
		Published:      slices.Clone(l.published[id.String()]),
	}
	_, facts := s.measure(id, d, e, l.space)
	facts.Pool = l.err
	facts.InlineUnpublished = l.leftBehind(id, e)
	if e.Record != nil {
		v.Thin, v.Inline, v.Created, v.uid = e.Record.Thin, e.Record.Inline, e.Record.Created, e.Record.UID
		v.ProjectID = quota.ID(e.Record.ProjectID)
	}
	if d != nil {
		v.count(s.keeper, d)
		v.lookAtFile(id, e, d)
	}
	facts.LimitDiffers = facts.LimitDiffers && !s.mayBeGrowing(id, e, v.LimitBytes)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition = facts.Condition()
	v.Nodes = s.pool.nodes(v.Published, l.elsewhere[id.String()])
	return v
}

// mayBeGrowing reports whether a limit that is not what was promised can be that of an
// expansion which is under way. Of a block volume the limit comes first, and while its
// file is allocated that can take long; of others it comes last.
func (v *visit) mayBeGrowing(id volume.ID, e store.Entry, limit int64) bool {
	if e.Block() {
		return limit > e.Promised()
	}
	written, err := v.store.RecordChanged(id)
	since := time.Since(written)
	return err == nil && limit != volume.Unknown && limit < e.Promised() && 0 <= since && since < expandedLately
}

// count asks who counts the directory for its numbers. What cannot be read is not known:
// whether that makes the volume abnormal is for measure to say, as in a driver.
func (v *VolumeView) count(keeper *limit.Keeper, d *dir.Dir) {
	usage, id, ok := keeper.Counted(d)
	v.Carried = id
	if !ok {
		return
	}
	v.UsedBytes = usage.Bytes
	if usage.Limit.Bytes > 0 {
		v.LimitBytes = usage.Limit.Bytes
	}
}

// lookAtFile looks at what the devices of the volume are attached to, if it can be read.
func (v *VolumeView) lookAtFile(id volume.ID, e store.Entry, d *dir.Dir) {
	if !cardOf(e).MayBeBlock() {
		return
	}
	disk, err := content.OpenFile(id, d)
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
func (v *visit) leftovers(place store.Place) (all []Leftover, err error) {
	err = v.store.EachNode(place, func(node string, d *dir.Dir) error {
		entries, err := store.Names(d)
		if err != nil {
			return err
		}
		slices.Sort(entries)
		var here []Leftover
		for _, name := range entries {
			v.pool.steps.Add(1)
			left, err := v.leftover(place, d, name)
			if dir.IsMissing(err) {
				continue
			}
			if err != nil {
				return err
			}
			left.Node = node
			here = append(here, left)
		}
		lately, err := v.workedOn(place, d, here)
		if err != nil {
			return err
		}
		for _, left := range here {
			left.Condition = v.leftoverCondition(place, left, lately)
			all = append(all, left)
		}
		return nil
	})
	return all, err
}

func (v *visit) leftover(place store.Place, in *dir.Dir, name string) (Leftover, error) {
	left := Leftover{Name: name, UsedBytes: volume.Unknown, HeldBytes: volume.Unknown}
	var err error
	if left.Changed, err = in.Changed(name); err != nil {
		return left, err
	}
	id, err := v.keeper.IDIn(in, name)
	if err != nil {
		return left, err
	}
	left.UsedBytes = v.keeper.UsedByID(v.store.Root(), id)
	if place == store.InTrash {
		left.HeldBytes = store.ParseThrown(name).Promised
		if left.HeldBytes == volume.Unknown {
			left.HeldBytes = v.heldBy(in, name, id)
		}
	}
	return left, nil
}

// workedOn is when anything in the trash of a node last changed. Creations do not wait for
// each other: of those it is the zero time.
func (v *visit) workedOn(place store.Place, in *dir.Dir, here []Leftover) (last time.Time, err error) {
	if place != store.InTrash {
		return last, nil
	}
	// In a shared pool a node sets this as its sign of life, whether it can erase or not.
	if !v.pool.config.Shared {
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
func (v *visit) leftoverCondition(place store.Place, l Leftover, lately time.Time) health.Condition {
	limit, normal, says := ledger.RetryStuck, "being erased", "cannot be erased, or no driver runs on its node"
	if place == store.InStaging {
		limit, normal, says = stagedLong, "being made", "a creation that did not end; the driver of its node removes it when it runs"
	}
	if v.pool.config.Shared && l.Node != v.pool.options.Node.String() {
		limit = store.UnseenAfter // then others take it over
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

// seePromises counts what the pool owes and holds with that of the other pools on its filesystem,
// as a driver does that starts, and changes nothing.
func (v *visit) seePromises(view *View) error {
	p := v.pool
	var others int64
	for _, left := range view.Trash {
		switch {
		case left.Node == p.options.Node.String():
			p.ledger.Throw(left.Name, left.HeldBytes)
		case left.HeldBytes == volume.Unknown || others == volume.Unknown:
			others = volume.Unknown
		default:
			others += left.HeldBytes
		}
	}
	p.ledger.SetOthersTrash(others)
	view.Held = p.ledger.Summary().Held
	if _, err := v.join(p.identity.Load().Format); err != nil {
		return err
	}
	// held would make the directories of this node if they were not there.
	if p.options.Node != (volume.NodeID{}) && v.store.OpenWorkReadOnly() == nil {
		view.held, view.count = p.held(v)
	}
	return nil
}

// seeAvailable is what a driver that starts would still promise. That depends on all pools of a
// filesystem, which by now have been read.
func (s *Set) seeAvailable(views []View) {
	read := make(map[*Pool]*View)
	for i, p := range s.pools {
		if views[i].UUID != "" {
			read[p] = &views[i]
		}
	}
	for p, view := range read {
		held, known := int64(0), true
		for _, other := range s.filesystems.with(p) {
			there := read[other]
			known = known && there != nil && there.count
			if known {
				held += there.held
			}
		}
		if known {
			p.ledger.SetForeign(view.Space.TakenBytes() - held)
		}
		p.learnForeign(view.Space)
	}
	for p, view := range read {
		now := p.ledger.Summary()
		view.SharesWith = now.SharesWith()
		if view.Err == nil {
			view.Available = now.Available(view.Space)
		}
	}
}

// seeDevices adds the loop devices of the volumes. The kernel asks the filesystem of
// each device about its file, and any of them may hang.
func (p *Pool) seeDevices(ctx context.Context, v *View) {
	type answer struct {
		content.Attachments
		err error
	}
	done := make(chan answer, 1)
	go func() {
		all, err := p.host().Attachments()
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
		v.Devices = errors.Join(v.Devices, all.Silent(volume.ID))
		volume.Devices = all.Of(volume.file)
		devices := all.Publications(volume.file)
		volume.Published = append(volume.Published, devices...)
		if len(devices) > 0 && !slices.Contains(volume.Nodes, p.options.Node) {
			volume.Nodes = p.nodes(devices, volume.Nodes)
		}
	}
}
