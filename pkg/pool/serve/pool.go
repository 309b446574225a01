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
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
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

// Freezer stops all processes of pods until thaw, as freezer.Client does. The context ends if they
// go on before.
type Freezer interface {
	Freeze(ctx context.Context, pods []freezer.Pod) (still context.Context, thaw func() error, err error)
}

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
	Freezer Freezer
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
	Config  poolconfig.Config
	Options Options
	Log     logr.Logger
	Ledger  *ledger.Ledger // what the pool has promised
	Node    *Node          // this pool and the others

	state    atomic.Pointer[state]
	hung     atomic.Pointer[state]  // the state during which a call found the pool to hang
	identity atomic.Pointer[opened] // once opened
	ending   atomic.Bool            // the checks have ended, and no call begins
	handOver func()                 // lets other drivers serve the pool, once
	peers    reconcile.Peers

	directory directory
	checks    checks
	problems  problems
	reaper    reaper
	usage     usage
	surveys   surveys
	searches  searches
	copies    copies
	note      served.Note
}

// Where is the pool's directory, as the last check found it, whether the pool serves or not; nil before one was found.
func (p *Pool) Where() *bind.Root { return p.directory.where.Load() }

// opened is what a pool was found to be when it was opened.
type opened struct {
	*store.Identity
	enforcer *limit.Enforcer
	calls    *atomic.Int64 // at work in it
}

func (n *Node) newPool(config poolconfig.Config) *Pool {
	options, log := n.Options, n.Options.Log.WithValues("pool", config.Name.String())
	p := &Pool{
		Config:  config,
		Options: options,
		Log:     log,
		Ledger:  ledger.New(ledger.Policy{Pool: config.Name, Overprovision: config.Overprovision, Reserve: config.Reserve, BytesPerInode: config.BytesPerInode}),
		Node:    n,
		note:    served.Note{Memory: options.Served},
	}
	p.checks = checks{
		pool: p, nudge: make(chan struct{}, 1), done: make(chan struct{}),
		guard: Guard{Dev: options.Dev, OwnDev: options.OwnDev, Node: options.Node, Log: log},
	}
	p.directory.pool, p.usage.pool, p.surveys.pool, p.searches.pool = p, p, p, p
	p.problems.log = log
	p.reaper.pool = p
	p.handOver = sync.OnceFunc(p.letOthersServe)
	p.directory.place = n.places.Add(config.Name, options.Mounts, log, p.checks.now)
	p.state.Store(&state{err: p.Unavailable(ErrNotChecked), errors: volume.Unknown})
	p.directory.at = &store.Location{
		Path:       config.Path,
		Node:       options.Node,
		Reserved:   config.Reserved(),
		Shared:     config.Shared,
		MakePath:   !config.RequireMount,
		Verify:     p.directory.checkRoot,
		Nested:     p.directory.place.Check,
		QueueTrash: p.QueueTrash,
		Refuses:    p.checks.refuses.Load,
	}
	p.usage.bytes.Store(volume.Unknown)
	p.usage.beside.Store(newBeside())
	p.directory.needMount.Store(config.RequireMount)
	return p
}

// Unavailable is an error about a pool that does not serve.
func (p *Pool) Unavailable(err error) error { return reconcile.Unavailable(&p.Config, err) }

// Limits are the options that say who is to enforce the sizes of the pool's volumes.
func (p *Pool) Limits() limit.Options {
	return limit.Options{
		Detect: p.Options.DetectQuota, Enforcement: p.Config.Enforcement, BytesPerInode: p.Config.BytesPerInode,
	}
}

// Note brings the ledger in line with what is on disk of a volume.
func (p *Pool) Note(id volume.ID, e store.Entry) {
	p.Ledger.Note(id, reconcile.InfoOf(e))
	if !e.Exists() {
		p.searches.ended.Delete(id)
	}
}

// open makes the layout, finishes what a crash interrupted, and fills the index. If that fails, what the pool has promised counts all the same.
func (c *checks) open(ctx context.Context) (*Visit, error) {
	v, err := c.openToServe(ctx)
	if err != nil && !errors.Is(err, errTwice) {
		c.readPromises()
	}
	return v, err
}

var errTwice = errors.New("it is the directory of another pool as well, reached by another path")

func (c *checks) openToServe(ctx context.Context) (_ *Visit, err error) {
	s, f, err := store.Create(ctx, c.pool.directory.at)
	if err != nil {
		return nil, err
	}
	c.refuses.Store(s.Refuses())
	v := &Visit{Pool: c.pool, Store: s}
	defer func() {
		if err != nil {
			v.Close()
		}
	}()
	if err := c.pool.directory.checkCovered(s); err != nil {
		return nil, err
	}
	id, err := c.identify(s, f)
	if err != nil {
		return nil, err
	}
	v.Enforcer = id.enforcer
	seen, err := dir.Seen(s.Root())
	if err != nil {
		return nil, err
	}
	if err := v.View().MustNotServe(c.pool.Limits()); err != nil {
		return nil, err
	}
	giveUp, err := c.pool.Node.claim(f.UUID)
	if err != nil {
		return nil, errTwice
	}
	err = c.guardPool(v, f.UUID)
	if err == nil {
		_, err = v.join(*f)
	}
	if err == nil {
		err = c.begin(ctx, v)
	}
	if err != nil {
		giveUp()
		return nil, err
	}
	all := v.count()
	c.synced = time.Now()
	c.giveUp = giveUp
	c.pool.directory.seen.CompareAndSwap(nil, &seen)
	c.pool.identity.Store(id)
	if !all { // of pools that are opened at once the later ones can enter the others by now
		v.count()
	}
	return v, nil
}

// identify finds out which pool it is, and who enforces the sizes of its volumes.
func (c *checks) identify(s *store.Store, f *store.Format) (*opened, error) {
	id, err := s.Identify(f)
	if err != nil {
		return nil, err
	}
	enforcer, err := c.pool.Limits().Enforcer(s.Root(), c.pool.Node.claims.On(id.Filesystem))
	if err != nil {
		return nil, err
	}
	return &opened{id, enforcer, new(atomic.Int64)}, nil
}
