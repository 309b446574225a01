package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
)

// Mounts publishes directories and devices: bind.Kernel, or a stand-in that keeps its contract.
type Mounts interface {
	Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error
	PublishDevice(dev *dir.Dir, name string, target bind.Target) error
	Unpublish(target bind.Target, of *dir.ID) error
	Open(target bind.Target) (*dir.Dir, error)
	Published(parent *dir.Dir) (map[string][]bind.Publication, error)
	SameFilesystem(a, b *dir.Dir) (bool, error)
	IsFilesystem(d *dir.Dir) (bool, error)
	Locate(d *dir.Dir) (bind.Place, error)
}

// Labels labels directories for containers: label.Kernel, or a stand-in.
type Labels interface {
	Ensure(root *dir.Dir, scope label.Scope) (changed bool, err error)
}

// Options are what all pools of a process share.
type Options struct {
	Node   NodeID
	Mounts Mounts
	Labels Labels
	// Devices are those of block volumes, and Dev has their nodes: the host's /dev.
	Devices Devices
	Dev     *dir.Dir
	// DetectQuota asks a pool's filesystem who keeps the sizes of directories; nil
	// for quota.Detect.
	DetectQuota DetectQuota
	// CountErrors asks how many errors a pool's filesystem has counted; nil for
	// errorcount.Of.
	CountErrors func(*dir.Dir) (int64, error)
	// SystemPath is a directory on the operating system's disk.
	SystemPath string
	// LookEvery is how often a pool that serves is looked at, RetryEvery one that
	// does not; HangAfter is when a look that has not ended counts as a hang.
	LookEvery, RetryEvery, HangAfter time.Duration
	// SyncEvery is how often the index is compared with the disk, what volumes hold is
	// counted, and each of them is looked at.
	SyncEvery time.Duration
	// EachVolume has Surveyed tell of each volume; otherwise it tells of none.
	EachVolume bool
	Log        logr.Logger
}

// A Pool is a directory in which volumes are directories.
type Pool struct {
	config   Config
	options  Options
	log      logr.Logger
	reserved string // the name of the snapshots' directory, never a volume
	beside   bool   // only looks at what others serve, and has no locks against them
	locks    *Locks[VolumeID]
	serving  *Locks[string] // the uuids of all pools that are open
	claimed  *claimed       // the quota ids of all pools
	roots    *roots         // where all pools are

	state    atomic.Pointer[state]
	hung     atomic.Pointer[state]  // the state while which a call found the pool to hang
	identity atomic.Pointer[opened] // once opened
	root     atomic.Pointer[dir.ID] // of the pool's directory, as the last look that opened it found it
	looked   chan struct{}          // closed after the first look
	nudge    chan struct{}          // one token: the next look is to come now
	// steps counts what a look has done, which tells one that is slow from one that hangs.
	steps atomic.Uint64
	// refuses is set by the looks while the filesystem takes no changes and does not say so.
	refuses atomic.Bool
	// doubted says that a look could not tell whether another pool lies in this one.
	doubted atomic.Bool
	// unrecovered says that the pool is to be recovered once it can be: it was read-only, or
	// something was skipped. It belongs to the looks.
	unrecovered bool
	// skipped says that something was left to a call that was at work, here or on another
	// node, which may hang; and tried when that was. They belong to the looks.
	skipped bool
	tried   time.Time
	// unrestored are volumes whose limits are to be compared with their promises. It
	// belongs to the looks.
	unrestored ids

	// What monitoring is shown, beside the state. It takes no lock.
	shown     atomic.Pointer[shown]
	surveyed  atomic.Pointer[survey] // nil before the first
	used      atomic.Int64           // bytes that the volumes hold, or unknownBytes
	lastError atomic.Pointer[time.Time]
	erased    struct{ files, pieces atomic.Uint64 }

	// mu guards the rest, is never held over a system call, and is given back by unlock
	// where something of it was changed.
	mu     sync.Mutex
	index  index
	loads  []*load // that are being made, in the order in which they began
	kept   ids     // volumes that loads leave as they are known
	ledger ledger
	trash  trash
	// restored is how often a limit was put back.
	restored uint64
	wake     chan struct{} // one token: there is trash to remove
	synced   time.Time
}

// opened is what a pool was found to be when it was opened.
type opened struct {
	format format
	// written is the format's file as this driver would write it.
	written    []byte
	filesystem dir.Filesystem
	// quota keeps the sizes of the volumes that have limits; nil if nobody does.
	quota Quota
	// unenforced is why new volumes get none; nil if they do.
	unenforced error
	// claims are the ids that are given on the filesystem.
	claims *claims
}

// state is what the last look at a pool gave.
type state struct {
	err  error // why the pool does not serve; nil if it does
	hung bool  // the look itself has not come back
	// systemDisk: the pool shares its filesystem with the operating system.
	systemDisk bool
	// space is the filesystem's; nil if the pool does not serve.
	space *dir.Space
	// errors is how many the filesystem has counted, or NotKnown.
	errors int64
}

func (s *state) readOnly() bool { return s.space != nil && s.space.ReadOnly }

var errFilesystem = errors.New("what is on the disk, or the disk, is damaged; the kernel's log has more")

var (
	errNotLooked  = errors.New("it is being opened")
	errUnreadable = errors.New("its disk cannot be read")
)

func newPool(config Config, s *Set) *Pool {
	options := s.options
	p := &Pool{
		config:   config,
		options:  options,
		log:      options.Log.WithValues("pool", config.Name.String()),
		reserved: config.reservedName(),
		locks:    &s.volumes,
		serving:  &s.serving,
		claimed:  &s.claimed,
		roots:    &s.roots,
		nudge:    make(chan struct{}, 1),
		looked:   make(chan struct{}),
		wake:     make(chan struct{}, 1),
	}
	p.state.Store(&state{err: p.unavailable(errNotLooked), errors: NotKnown})
	p.shown.Store(&shown{})
	p.used.Store(unknownBytes)
	return p
}

func (p *Pool) unavailable(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: pool %q at %s: %w", ErrUnavailable, p.config.Name, p.config.Path, err)
}

// watch looks at the pool until ctx ends and the look that is under way has come
// back. Each look has its own goroutine, so that a filesystem that hangs holds that
// one, and callers are told.
func (p *Pool) watch(ctx context.Context) {
	first := sync.OnceFunc(func() { close(p.looked) })
	for ctx.Err() == nil {
		result := make(chan state, 1)
		go func() { result <- p.look(ctx) }()
		p.await(result, first)
		first()
		p.rest(ctx)
	}
}

// await settles what a look gives. Of one that takes long, late is told; one that also
// gets nowhere counts as a hang until it comes back.
func (p *Pool) await(result <-chan state, late func()) {
	tick := time.NewTicker(p.options.HangAfter)
	defer tick.Stop()
	for steps := p.steps.Load(); ; steps = p.steps.Load() {
		select {
		case st := <-result:
			p.settle(st)
			return
		case <-tick.C:
			if p.steps.Load() == steps {
				p.settle(state{hung: true, errors: NotKnown, err: p.hangs()})
			}
			late()
		}
	}
}

func (p *Pool) hangs() error {
	return p.unavailable(fmt.Errorf("no answer for %v: its filesystem hangs", p.options.HangAfter))
}

func (p *Pool) rest(ctx context.Context) {
	pause := p.options.LookEvery
	if p.state.Load().err != nil {
		pause = p.options.RetryEvery
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.nudge:
	case <-ctx.Done():
	}
}

// settle stores what a look gave, and tells a change.
func (p *Pool) settle(st state) {
	old := p.state.Swap(&st)
	if st.err != nil || st.errors > old.errors && old.errors != NotKnown {
		p.noteError()
	}
	switch {
	case st.err != nil && (old.err == nil || old.err.Error() != st.err.Error()):
		p.log.Error(st.err, "pool does not serve", "path", p.config.Path)
	case st.err == nil && old.err != nil:
		p.tellServing(st)
	}
	if st.errors > max(0, old.errors) {
		p.log.Error(errFilesystem, "the pool's filesystem has counted errors; all volumes of the pool are abnormal until the count is reset", "errors", st.errors)
	}
	if st.err == nil {
		p.wakeReaper()
	}
}

func (p *Pool) tellServing(st state) {
	log := p.log.WithValues("path", p.config.Path, "volumes", p.Status().Volumes, "systemDisk", st.systemDisk)
	id := p.identity.Load()
	if id.unenforced != nil {
		log.Info("pool serves; the sizes of its volumes are promised and not enforced", "why", id.unenforced.Error())
		return
	}
	log.Info("pool serves; the kernel keeps the sizes of its volumes", "quota", id.quota.Kind())
}

// look opens the pool at first, and later makes sure that it is still there.
func (p *Pool) look(ctx context.Context) state {
	s, err := p.lookInside(ctx)
	if err != nil {
		return state{err: p.unavailable(err), errors: NotKnown}
	}
	defer s.close()
	root, err := s.root.ID()
	if err != nil {
		return state{err: p.unavailable(err), errors: NotKnown}
	}
	p.root.Store(&root)
	space, err := s.space()
	if err != nil {
		return state{err: p.unavailable(err), errors: NotKnown}
	}
	p.unrecovered = p.unrecovered || space.ReadOnly
	p.learnForeign(space)
	return state{systemDisk: p.onSystemDisk(s.root), space: &space, errors: p.countErrors(s.root)}
}

// countErrors answers NotKnown where the filesystem does not count.
func (p *Pool) countErrors(root *dir.Dir) int64 {
	count, err := p.options.CountErrors(root)
	if err != nil {
		return NotKnown
	}
	return count
}

func (p *Pool) lookInside(ctx context.Context) (*session, error) {
	id := p.identity.Load()
	if id == nil {
		return p.open(ctx)
	}
	s, err := p.openSession(id)
	if err != nil {
		return nil, err
	}
	s.feel()
	err = p.checkNested(s.root)
	if err == nil {
		err = s.lookAgain(ctx)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// lookAgain looks at a pool that is open.
func (s *session) lookAgain(ctx context.Context) error {
	// What calls read may all be in memory. Their first write would be the one to hang.
	if err := s.own.AskDisk(formatName); err != nil {
		return fmt.Errorf("%w: %w", errUnreadable, err)
	}
	if err := s.lookAtQuota(); err != nil {
		return err
	}
	recovered, err := s.recoverAgain()
	if err != nil || !recovered && time.Since(s.pool.synced) < s.pool.options.SyncEvery {
		return err
	}
	s.pool.synced = time.Now()
	return s.sync(ctx)
}

// open makes the layout, finishes what a crash interrupted, and fills the index.
func (p *Pool) open(ctx context.Context) (*session, error) {
	s, f, err := p.prepare(ctx)
	if err != nil {
		return nil, err
	}
	id, err := s.identify(f)
	if err == nil {
		err = s.unfit(id.unenforced)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	giveUp, err := p.serving.TryLock(f.UUID)
	if err != nil {
		s.close()
		return nil, errors.New("it is the directory of another pool as well, reached by another path")
	}
	if err := s.begin(ctx); err != nil {
		giveUp()
		s.close()
		return nil, err
	}
	p.mu.Lock()
	p.ledger.foreign = f.Foreign
	p.unlock()
	s.count()
	p.synced = time.Now()
	p.identity.Store(id)
	return s, nil
}

// identify finds out what the pool is, and has the session go by it.
func (s *session) identify(f *format) (*opened, error) {
	id := &opened{format: *f}
	var err error
	if id.written, err = f.encode(); err != nil {
		return nil, err
	}
	if id.filesystem, err = s.root.Filesystem(); err != nil {
		return nil, err
	}
	if id.quota, id.unenforced, err = s.pool.detectQuota(s.root); err != nil {
		return nil, err
	}
	id.claims = s.pool.claimed.on(id.filesystem)
	s.quota, s.unenforced, s.claims = id.quota, id.unenforced, id.claims
	return id, nil
}

// begin brings disk and memory in line before the pool serves.
func (s *session) begin(ctx context.Context) error {
	if err := s.recover(); err != nil {
		return err
	}
	if err := s.load(); err != nil {
		return err
	}
	s.finishFiles()
	s.restoreLimits()
	s.releaseUnused()
	s.sweepDevices(ctx)
	s.finishDevices()
	if err := s.recoverMarks(); err != nil {
		return err
	}
	// What other nodes are at work on they finish. What they only look at is left to this one.
	s.pool.unrecovered, s.pool.tried = s.pool.unrecovered || s.pool.skipped, time.Now()
	return nil
}

// recoverAgain does what begin could not do: the pool was read-only, or another node was at
// work on a volume. Calls are at work by then.
func (s *session) recoverAgain() (done bool, err error) {
	if !s.pool.unrecovered || s.pool.skipped && time.Since(s.pool.tried) < s.pool.options.SyncEvery {
		return false, nil
	}
	if space, err := s.space(); err != nil || space.ReadOnly {
		return false, err
	}
	if err := errors.Join(s.closeMode(), s.work()); err != nil {
		return false, err
	}
	s.pool.skipped = false
	if err := s.recover(); err != nil {
		return false, err
	}
	s.finishFiles()
	s.doubtLimits()
	s.restoreAgain()
	s.finishDevices()
	s.pool.unrecovered, s.pool.tried = s.pool.skipped, time.Now()
	return true, nil
}

// checkMount answers why a pool that must be a filesystem of its own is none. A
// mount point alone would not do: in a container every hostPath volume is one.
func (p *Pool) checkMount(root *dir.Dir) error {
	if !p.config.RequireMount {
		return nil
	}
	mounted, err := p.options.Mounts.IsFilesystem(root)
	if err != nil {
		return err
	}
	if !mounted {
		return errors.New("no filesystem is mounted at its path, and requireMount is set")
	}
	return nil
}

func (p *Pool) onSystemDisk(root *dir.Dir) bool {
	if p.options.SystemPath == "" {
		return false
	}
	system, err := dir.Open(p.options.SystemPath)
	if err != nil {
		return false
	}
	defer func() { _ = system.Close() }()
	same, err := p.options.Mounts.SameFilesystem(root, system)
	return err == nil && same
}

// makeClosed makes a configured path with all that is missing on the way to it.
func makeClosed(path string) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(path, closedMode); err != nil {
		return err
	}
	return os.Chmod(path, closedMode) // whatever the umask
}
