package serve

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/pool/snapshot"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Mounts publishes directories and devices: bind.Kernel, or a stand-in that keeps its contract.
type Mounts interface {
	content.Mounts
	Unpublish(target bind.Target, of *dir.ID) error
	SameFilesystem(a, b *dir.Dir) (bool, error)
	IsFilesystem(d *dir.Dir) (bool, error)
	Locate(d *dir.Dir) (bind.Place, error)
	MountRoot(d *dir.Dir, id bind.MountID) (bind.Place, error)
}

// Labels labels directories for containers: label.Kernel, or a stand-in.
type Labels = content.Labels

// Devices makes files block devices: loop.Kernel, or a stand-in that keeps its contract.
type Devices = content.Devices

// Surveyed is what the last check at a volume saw.
type Surveyed = reconcile.Surveyed

// Options are what all pools of a process share.
type Options struct {
	Node   volume.NodeID
	Mounts Mounts
	Labels Labels
	// Devices are those of block volumes, and Dev has their nodes: the host's /dev.
	Devices Devices
	Dev     *dir.Dir
	// OwnDev: Dev is not the host's, so its locks do not exclude other drivers of the node.
	OwnDev bool
	// Freezer stops pods while a snapshot is made that asks for it: freezer.Client, or a stand-in.
	Freezer snapshot.Freezer
	// DetectQuota asks a pool's filesystem what enforces the sizes of directories; nil
	// for quota.Detect.
	DetectQuota func(*dir.Dir) (quota.Facility, error)
	// CountErrors reads how many errors a pool's filesystem has counted; nil for
	// errorcount.Of.
	CountErrors func(*dir.Dir) (int64, error)
	// SinceBoot is how long the node is up; nil for what the kernel says.
	SinceBoot func() time.Duration
	// SystemPath is a directory on the operating system's disk.
	SystemPath string
	// CheckEvery is how often a pool that serves is checked, RetryEvery one that
	// does not; HangAfter is when a check that has not ended counts as a hang.
	CheckEvery, RetryEvery, HangAfter time.Duration
	// SyncEvery is how often the index is compared with the disk, what volumes hold is
	// counted, and each of them is checked.
	SyncEvery time.Duration
	// EachVolume has Surveyed report on each volume; otherwise it reports on none.
	EachVolume bool
	// Served remembers the pools; nil for nothing that does.
	Served *served.Memory
	Log    logr.Logger
}

// Host is what contents need of the node.
func (o Options) Host(log logr.Logger) content.Host {
	return content.Host{Mounts: o.Mounts, Labels: o.Labels, Devices: o.Devices, Dev: o.Dev, Log: log}
}

// A Pool is a directory in which volumes are directories.
type Pool struct {
	Config  poolconfig.Pool
	Options Options
	Log     logr.Logger
	Ledger  *ledger.Ledger // what the pool has promised

	node  *Node // this pool and the others
	at    *store.Location
	place *reconcile.Place // among all pools

	state    atomic.Pointer[state]
	hung     atomic.Pointer[state]   // the state during which a call found the pool to hang
	identity atomic.Pointer[opened]  // once opened
	root     atomic.Pointer[dir.Way] // of the pool's directory, as the last check that opened it found it
	// where is the pool's directory, whether the pool serves or not: nil before one was found.
	where   atomic.Pointer[bind.Root]
	checked chan struct{} // closed after the first check
	nudge   chan struct{} // one token: the next check is to come now
	// steps counts what a check has done, by which one that is slow differs from one that hangs.
	steps atomic.Uint64
	// unrecovered says that the pool is to be recovered once it can be: it was read-only, or
	// something was skipped. It belongs to the checks.
	unrecovered bool
	// skipped says that something was left to a call that was at work, here or on another
	// node, which may hang; and tried when that was. They belong to the checks.
	skipped bool
	tried   time.Time
	// unrestored are volumes whose limits are to be compared with their promises. It
	// belongs to the checks.
	unrestored map[volume.ID]struct{}
	// limitsDiffer says that a survey found a limit that is not what was promised.
	limitsDiffer atomic.Bool

	// vacant says that the last check found no volume, record or trash in the pool, and giveUp
	// releases the pool's uuid. They belong to the checks.
	vacant bool
	giveUp func()
	// needMount says that a filesystem must be mounted at the pool's path.
	needMount atomic.Bool
	// seen is where the kernel had the pool's directory when it was opened first.
	seen atomic.Pointer[string]

	// refuses says that the filesystem refused changes at the last check, and does not say so.
	refuses atomic.Bool
	peers   reconcile.Peers

	guard   Guard       // belongs to the checks
	guarded atomic.Bool // no other driver serves the pool, or, if it is shared, none to which it is not
	ending  atomic.Bool // the checks have ended, and no call begins
	// handOver lets other drivers serve the pool, once.
	handOver func()
	// contender is the driver that waits for the pool; empty, or nil, for none.
	contender atomic.Pointer[string]

	// What monitoring reads, in addition to the state. It takes no lock.
	surveyed  atomic.Pointer[reconcile.Survey] // nil before the first
	used      atomic.Int64                     // bytes that the volumes hold, or volume.Unknown
	lastError atomic.Pointer[time.Time]
	// strays has how the last search of a volume ended, by volume.ID.
	strays sync.Map
	// leftovers are those that stay, with why, by path.
	leftovers sync.Map
	// erasedFiles is how many files and directories the reaper has taken on.
	erasedFiles atomic.Uint64

	copies copies
	note   served.Note

	// synced is when the index was last compared with the disk. It belongs to the checks.
	synced time.Time

	wake chan struct{} // one token: there is trash to remove
}

// Where is the pool's directory, as the last check found it, whether the pool serves or not; nil
// before one was found.
func (p *Pool) Where() *bind.Root { return p.where.Load() }

// opened is what a pool was found to be when it was opened.
type opened struct {
	*store.Identity
	keeper *limit.Keeper
	calls  *atomic.Int64 // at work in it
}

func (n *Node) newPool(config poolconfig.Pool) *Pool {
	options, log := n.Options, n.Options.Log.WithValues("pool", config.Name.String())
	p := &Pool{
		Config:  config,
		Options: options,
		Log:     log,
		Ledger:  ledger.New(ledger.Policy{Pool: config.Name, Overprovision: config.Overprovision, Reserve: config.Reserve, BytesPerInode: config.BytesPerInode}),
		node:    n,
		guard:   Guard{Dev: options.Dev, OwnDev: options.OwnDev, Node: options.Node, Log: log},
		nudge:   make(chan struct{}, 1),
		checked: make(chan struct{}),
		wake:    make(chan struct{}, 1),
		note:    served.Note{Memory: options.Served},
	}
	p.handOver = sync.OnceFunc(p.letOthersServe)
	p.place = n.places.Add(config.Name, options.Mounts, log, p.checkNow)
	p.state.Store(&state{err: p.Unavailable(ErrNotChecked), errors: volume.Unknown})
	p.at = &store.Location{
		Path:     config.Path,
		Node:     options.Node,
		Reserved: config.Reserved(),
		Shared:   config.Shared,
		MakePath: !config.RequireMount,
		Verify:   p.checkRoot,
		Nested:   p.place.Check,
		Thrown:   p.Thrown,
		Refuses:  p.refuses.Load,
	}
	p.used.Store(volume.Unknown)
	p.needMount.Store(config.RequireMount)
	return p
}

// Unavailable is an error about a pool that does not serve.
func (p *Pool) Unavailable(err error) error { return reconcile.Unavailable(&p.Config, err) }

// Note brings the ledger in line with what is on disk of a volume.
func (p *Pool) Note(id volume.ID, e store.Entry) {
	p.Ledger.Note(id, reconcile.CardOf(e))
	if !e.Exists() {
		p.strays.Delete(id)
	}
}

// open makes the layout, finishes what a crash interrupted, and fills the index. If that fails,
// what the pool has promised counts all the same.
func (p *Pool) open(ctx context.Context) (*Visit, error) {
	v, err := p.openToServe(ctx)
	if err != nil && !errors.Is(err, errTwice) {
		p.readPromises()
	}
	return v, err
}

var errTwice = errors.New("it is the directory of another pool as well, reached by another path")

func (p *Pool) openToServe(ctx context.Context) (_ *Visit, err error) {
	s, f, err := store.Create(ctx, p.at)
	if err != nil {
		return nil, err
	}
	p.refuses.Store(s.Refuses())
	v := &Visit{Pool: p, Store: s}
	defer func() {
		if err != nil {
			v.Close()
		}
	}()
	if err := v.checkCovered(); err != nil {
		return nil, err
	}
	id, err := p.identify(s, f)
	if err != nil {
		return nil, err
	}
	v.Keeper = id.keeper
	seen, err := dir.Seen(s.Root())
	if err != nil {
		return nil, err
	}
	if err := v.Scan().Unfit(p.Limits()); err != nil {
		return nil, err
	}
	giveUp, err := p.node.claim(f.UUID)
	if err != nil {
		return nil, errTwice
	}
	err = v.guardPool(f.UUID)
	if err == nil {
		_, err = v.join(*f)
	}
	if err == nil {
		err = v.begin(ctx)
	}
	if err != nil {
		giveUp()
		return nil, err
	}
	all := v.count()
	p.synced = time.Now()
	p.giveUp = giveUp
	p.seen.CompareAndSwap(nil, &seen)
	p.identity.Store(id)
	if !all { // of pools that are opened at once the later ones can enter the others by now
		v.count()
	}
	return v, nil
}

// identify finds out which pool it is, and who enforces the sizes of its volumes.
func (p *Pool) identify(s *store.Store, f *store.Format) (*opened, error) {
	id, err := s.Identify(f)
	if err != nil {
		return nil, err
	}
	keeper, err := p.Limits().Keeper(s.Root(), p.node.claims.On(id.Filesystem))
	if err != nil {
		return nil, err
	}
	return &opened{id, keeper, new(atomic.Int64)}, nil
}
