package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A reader reads one pool next to the driver that serves it, or without one. It changes nothing
// and takes no lock that others would wait for.
type reader struct {
	reconcile.View
	options Options
	limits  limit.Options
	claims  *limit.Registry // the quota ids of all pools
	at      *store.Location
	place   *reconcile.Place
	steps   atomic.Uint64

	format      *store.Format
	server      *store.Server // the driver that serves the pool; nil for none
	unavailable error         // why a driver would not serve the pool; nil if it would
	volumes     []seen        // and snapshots
	trash       []Leftover
	space       dir.Space
	// held is what volumes and trash hold, in bytes, if that is counted.
	held    reconcile.Held
	counted bool
	taken   int64       // on the filesystem, while that was counted
	beside  quota.Usage // limit.Beside
	trees   quota.Trees

	filesystems *reconcile.Filesystems[*reader]
}

// node is what the readers of all pools share.
type node struct {
	options     Options
	claims      limit.Registry
	places      reconcile.Places
	filesystems reconcile.Filesystems[*reader]
}

func (n *node) reader(config *poolconfig.Config) *reader {
	o := n.options
	r := &reader{
		View: reconcile.View{
			Config:    config,
			Node:      o.Node,
			Host:      content.Host{Mounts: o.Mounts, Devices: o.Devices, Dev: o.Dev},
			Ledger:    ledger.New(ledger.Policy{Pool: config.Name, Overprovision: config.Overprovision, Reserve: config.Reserve, BytesPerInode: config.BytesPerInode}),
			Peers:     &reconcile.Peers{},
			SinceBoot: o.SinceBoot,
			// The locks of the driver are in another process.
			Lock:   func(volume.ID) (func(), error) { return func() {}, nil },
			Failed: func(error, string, ...any) {},
			Left:   func(string, error) {},
		},
		options: o,
		limits:  limit.Options{Detect: o.DetectQuota, Enforcement: config.Enforcement, BytesPerInode: config.BytesPerInode},
		claims:  &n.claims,

		filesystems: &n.filesystems,
	}
	r.Steps = &r.steps
	if o.Files {
		r.Strays = r.strays
	}
	r.place = n.places.Add(config.Name, o.Mounts, r.Log, func() {})
	r.at = &store.Location{
		Path:     config.Path,
		Node:     o.Node,
		Reserved: config.Reserved(),
		Shared:   config.Shared,
		ReadOnly: true,
		Verify:   func(root *dir.Dir) error { return reconcile.CheckMount(config, o.Mounts, root) },
		Nested:   r.place.Check,
	}
	return r
}

// readAll reads all pools at once. One that gets nowhere for Options.HangAfter is left behind.
func readAll(ctx context.Context, configs []poolconfig.Config, options Options) []Pool {
	n := &node{options: options.withDefaults()}
	pools, readers := make([]Pool, len(configs)), make([]*reader, len(configs))
	// Whether one lies in another is known when it is known where all are.
	var placed, all sync.WaitGroup
	placed.Add(len(configs))
	for i := range configs {
		all.Go(func() {
			r := n.reader(&configs[i])
			readers[i] = r
			_, err := whileStepping(ctx, r, r.notePlace)
			placed.Done()
			if err != nil {
				pools[i] = r.unreadable(err)
				return
			}
			placed.Wait()
			pools[i] = r.report(ctx)
		})
	}
	all.Wait()
	addAvailable(pools, readers)
	return pools
}

// strays are the files of a volume that are outside its limit.
func (r *reader) strays(id volume.ID) (quota.Strays, error) {
	e, d, err := r.Store.LookupUnlocked(id)
	if err != nil || d == nil {
		return quota.Strays{}, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	return r.Enforcer.Strays(d, reconcile.InfoOf(e), func() error { r.steps.Add(1); return nil })
}

// notePlace notes where the pool is, if that can be known. If not, reading it says why.
func (r *reader) notePlace() (struct{}, error) {
	if root, err := dir.Open(r.Config.Path); err == nil {
		r.place.Note(root)
		_ = root.Close() // opened for reading
	}
	return struct{}{}, nil
}

func (r *reader) report(ctx context.Context) Pool {
	p, err := whileStepping(ctx, r, func() (Pool, error) { return r.read(ctx) })
	if err != nil {
		return r.unreadable(err)
	}
	if slices.ContainsFunc(r.volumes, func(v seen) bool { return v.file != nil }) {
		if err := r.addDevices(ctx); err != nil {
			p.DevicesError = err.Error()
		}
	}
	var snapshots []Snapshot
	for _, v := range r.volumes {
		if v.ID.IsSnapshot() {
			snapshots = append(snapshots, v.describeSnapshot())
		} else {
			p.Volumes = append(p.Volumes, v.describe())
		}
	}
	p.Snapshots = append(snapshots, p.Snapshots...)
	return p
}

// whileStepping waits for an answer about a pool for as long as there are steps towards it, and
// ctx does not end.
func whileStepping[T any](ctx context.Context, r *reader, do func() (T, error)) (T, error) {
	call := hang.Start(do)
	answer, err := call.WaitWhile(ctx, r.options.HangAfter, r.steps.Load, nil)
	if err != nil {
		call.Abandon(nil)
	}
	return answer, err
}

// blank is the report of a pool that was not read yet.
func (r *reader) blank() Pool {
	return Pool{
		Name: r.Config.Name.String(), Path: r.Config.Path, Shared: r.Config.Shared,
		Contents: Contents{Volumes: []Volume{}, Snapshots: []Snapshot{}, Creating: []Leftover{}, Trash: []Leftover{}},
	}
}

func (r *reader) unreadable(err error) Pool {
	p := r.blank()
	p.setCondition(health.Facts{Pool: reconcile.Unavailable(r.Config, err)})
	return p
}

func (p *Pool) setCondition(facts health.Facts) {
	c := facts.Condition()
	p.Abnormal, p.Condition, p.Reason = c.Abnormal, c.Message, string(c.Reason)
}

// read reports on the pool, all but the loop devices and what is published by them.
func (r *reader) read(ctx context.Context) (Pool, error) {
	var err error
	if r.Store, r.format, err = store.OpenReadOnly(r.at); err != nil {
		if !errors.Is(err, store.ErrNoLayout) && !errors.Is(err, reconcile.ErrNested) {
			r.joinUnread()
		}
		return Pool{}, err
	}
	defer r.Store.Close()
	id, err := r.Store.Identify(r.format)
	if err != nil {
		return Pool{}, err
	}
	if r.Enforcer, err = r.limits.Enforcer(r.Store.Root(), r.claims.On(id.Filesystem)); err != nil {
		return Pool{}, err
	}
	var served error
	r.server, served = r.servedBy()
	if err := cmp.Or(r.place.Check(r.Store.Root()), r.MustNotServe(r.limits), served); err != nil {
		r.unavailable = reconcile.Unavailable(r.Config, err)
	}
	// As a check of the driver does, so that conditions are the same.
	r.Errors = reconcile.CountErrors(r.options.CountErrors, r.Store.Root())
	if r.Errors > 0 {
		r.Store.ProbeWritable() // what made an ext4 read-only was counted
	}
	r.Ledger.SetCosts(r.Enforcer.Sizes.NewInodes(), r.Enforcer.Sizes.Costs())
	if err := r.Index().Load(); err != nil {
		return Pool{}, err
	}
	p := r.blank()
	if p.Creating, err = r.leftovers(ctx, store.InCreation); err != nil {
		return Pool{}, err
	}
	if r.trash, err = r.leftovers(ctx, store.InTrash); err != nil {
		return Pool{}, err
	}
	p.Trash = r.trash
	l := &reconcile.Listing{In: &r.View, Err: r.unavailable}
	if err := l.Read(); err != nil {
		return Pool{}, err
	}
	if r.volumes, err = r.readVolumes(ctx, l); err != nil {
		return Pool{}, err
	}
	r.addUpstream(&p)
	orphans, err := r.Host.Orphans(r.Store.Root())
	if err != nil {
		return Pool{}, err
	}
	for _, d := range orphans {
		p.OnDeleted = append(p.OnDeleted, describeOrphan(d))
	}
	r.space = l.Space
	r.describe(&p, l.Space)
	return p, r.join()
}

func (r *reader) describe(p *Pool, space dir.Space) {
	p.Readable, p.UUID, p.Created = true, r.format.UUID, r.format.Created
	p.ReadOnly = space.ReadOnly
	if r.server != nil {
		p.Server = &Server{Node: r.server.Node, Host: r.server.Host, Since: r.server.Since}
	}
	p.SystemDisk = reconcile.OnSystemDisk(r.options.Mounts, r.options.SystemPath, r.Store.Root())
	if why := r.Enforcer.Unenforced(); why != nil {
		p.Unenforced = why.Error()
	} else {
		p.Quota = string(r.Enforcer.Kind())
	}
	p.SizeBytes, p.FreeBytes = &space.SizeBytes, &space.FreeBytes
	if space.Inodes > 0 {
		p.Inodes, p.InodesFree = &space.Inodes, &space.InodesFree
	}
	now := r.Ledger.Summary()
	promised, overhead := now.Promised, now.Overhead
	p.PromisedBytes, p.SetAsideBytes = &promised, &overhead
	p.setCondition(health.OfPool(r.unavailable, space, r.Errors))
}

// join counts what the pool owes and holds with that of the other pools on its filesystem, as a
// driver does that starts, and changes nothing.
func (r *reader) join() error {
	var others int64
	for _, left := range r.trash {
		held := orUnknown(left.HeldBytes)
		switch {
		case left.Node == r.Node.String():
			r.Ledger.Trash().Throw(left.Name, held)
		case held == volume.Unknown || others == volume.Unknown:
			others = volume.Unknown
		default:
			others += held
		}
	}
	r.Ledger.SetOthersTrash(others)
	on, err := dir.SpaceIDOf(r.Store.Root())
	if err != nil {
		return err
	}
	if r.trees, err = r.Enforcer.Trees(r.Store.Root(), r.Ledger); err != nil {
		return err
	}
	r.Ledger.Join(r.filesystems.Settle(r, on), ledger.Origin{
		Made: r.format.Created, Foreign: r.format.Foreign, Shared: r.Config.Shared, Size: r.space.SizeBytes,
	})
	r.Ledger.SetTrees(r.trees)
	r.Usage().MeasureExcess()
	// Held would make the directories of this node if they were not there.
	if r.Node != (volume.NodeID{}) && r.Store.OpenWorkReadOnly() == nil {
		r.held, r.counted = r.Usage().Held(new(atomic.Int64), r.look)
	}
	if r.beside, err = r.Enforcer.Beside(r.Store.Root()); errors.Is(err, quota.ErrTooMany) {
		r.beside, err = quota.Usage{Bytes: math.MaxInt64}, nil
	}
	return err
}

// look measures what is taken on the filesystem.
func (r *reader) look() {
	if space, err := r.Store.Space(); err == nil {
		r.taken = max(r.taken, space.TakenBytes())
	}
}

// joinUnread has the other pools on the filesystem of one that cannot be read have nothing available, as
// with a driver: what this one has promised is not known.
func (r *reader) joinUnread() {
	root, err := dir.Open(r.Config.Path)
	if err != nil {
		return // it is not here
	}
	defer func() { _ = root.Close() }() // opened for reading
	on, err := dir.SpaceIDOf(root)
	if err != nil || r.at.Verify(root) != nil {
		return
	}
	r.Ledger.Join(r.filesystems.Settle(r, on), ledger.Origin{Shared: r.Config.Shared})
}

// addAvailable adds what a driver that starts would still promise. That depends on all pools of a
// filesystem, which by now have been read.
func addAvailable(pools []Pool, readers []*reader) {
	read := make(map[*reader]*Pool)
	for i, r := range readers {
		if pools[i].Readable {
			read[r] = &pools[i]
		}
	}
	for r := range read {
		held, taken, known := reconcile.Held{}, r.space.TakenBytes(), true
		for _, other := range r.filesystems.With(r) {
			if known = known && read[other] != nil && other.counted; known && other.unavailable == nil {
				held.Add(other.held)
				taken = max(taken, other.taken)
			}
		}
		if known {
			r.Ledger.BeginCount().End(held.Foreign(taken, held.Others(r.beside), r.trees), r.trees)
		}
		r.Usage().LearnForeign(r.space)
	}
	for r, p := range read {
		now, available := r.Ledger.Summary(), int64(0)
		for _, name := range now.SharesWith() {
			p.SharesWith = append(p.SharesWith, name.String())
		}
		if r.unavailable == nil {
			available = now.Available(r.space)
		}
		p.TrashHeldBytes, p.AvailableBytes = known(now.Held), &available
	}
}

// addDevices adds the loop devices of the volumes. The kernel asks the filesystem of
// each device about its file, and any of them may hang.
func (r *reader) addDevices(ctx context.Context) error {
	all, err := hang.Run(ctx, r.options.HangAfter, r.Host.Attachments, nil)
	if errors.Is(err, hang.ErrTimeout) {
		err = fmt.Errorf("the node's loop devices: no answer for %v: the filesystem of one of them hangs", r.options.HangAfter)
	}
	if err != nil {
		return err
	}
	var problems error
	for i := range r.volumes {
		v := &r.volumes[i]
		if v.file == nil {
			continue
		}
		problems = errors.Join(problems, all.Silent(v.ID))
		of, err := all.Of(*v.file)
		problems = errors.Join(problems, err)
		v.devices = of.Attached
		at := of.Publications()
		v.published = append(v.published, at...)
		if len(at) > 0 && !slices.Contains(v.Nodes, r.Node) {
			v.Nodes = r.Nodes(at, v.Nodes)
		}
	}
	return problems
}

func orUnknown(bytes *int64) int64 {
	if bytes == nil {
		return volume.Unknown
	}
	return *bytes
}
