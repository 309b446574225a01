package clone

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Options of [Tree].
type Options struct {
	Method Method
	// Rounds is how often changed entries are copied again before Tree gives up on a
	// consistent copy. With 0 the source is not checked at all.
	Rounds int
	// Hold has all who write to the source stop, and returns what lets them go on, and a context that
	// ends if they do before. If it is set, the source is copied once while they write; if anything
	// has changed by then they are stopped, and what has changed is copied again. Rounds must be 1.
	Hold func(context.Context) (still context.Context, release func() error, err error)
	// HoldAtMost is for how long they may be stopped; 0 for no limit. If comparing all entries twice takes longer, which is the least that
	// is done meanwhile, Tree returns ErrTooMany and stops nothing.
	HoldAtMost time.Duration
	// Alone is asked whether, from now until Tree ends, no process can write to the source, if there is an entry whose ctime is in
	// the future, so that a change of it could not be told. If so, such entries count as unchanged, and else
	// Tree returns ErrFuture before it copies anything. If it is not set, they count as changed.
	Alone func() (bool, error)
	// MaxStall is for how long sharing one file may stop its writers: see Limit.
	MaxStall Limit
	// Pause is called before each entry and each 16 MiB, if it is set: to let others
	// work. Its error ends the copying.
	Pause func(context.Context) error
}

// ErrTooMany reports a source of so many entries that comparing them twice takes longer than those who write may be stopped.
var ErrTooMany = errors.New("too many files and directories")

// A Result says what [Tree] copied.
type Result struct {
	Entries int64
	// Shared is true if no data was copied.
	Shared bool
	// PointInTime says that the copy is what the source was at one moment. It is known
	// only with Options.Rounds, and false if the source never held still.
	PointInTime bool
	// Changed is how many entries had changed when they were last checked.
	Changed int64
	// Stall is the longest time that writers of a file had to wait, while it was shared or while
	// Hold had them stopped.
	Stall time.Duration
}

// Inodes is how many a copier makes in its destination, for a time, beside those that it copies.
const Inodes = 2

// Tree copies all that lies below src into dst, an empty directory to which no other process
// writes, and then the attributes of src itself. No link is followed. If something is mounted
// below src, Tree returns ErrMounted, and ErrEncrypted if a user has encrypted any of it. It holds a bounded number of descriptors and, but for
// them, a bounded amount of memory. Nothing is synced: see [Sync].
//
// With Options.Rounds it checks afterwards whether the copy is that of one moment. That
// is so if no entry changed since before the first was copied, or if a single file did and
// shares its blocks: its copy, with its attributes, is atomic, and all else stood still. What changed is copied
// again, Rounds times at most. An entry has changed if its ctime has: writes set it, also
// those through a shared mapping, because a file is flushed when it is copied and a page that
// is clean must fault before it is written. Writes set it when they begin, so a file is copied when none is under way (AwaitCalls),
// and nothing of the source is read after it was checked. The filesystem is synced as a whole only before the first pass. Later ones
// do not wait for what others have written to it: sharing the blocks of a file flushes that (FICLONE), and what
// is read is flushed alone.
func Tree(ctx context.Context, src, dst *dir.Dir, o Options) (Result, error) {
	var most memory
	if o.Rounds > 0 { // or it remembers nothing
		var giveBack func()
		most.names, giveBack = allNames.take(maxNames)
		defer giveBack()
	}
	if o.Hold != nil {
		var giveBack func()
		most.later, giveBack = allLater.take(laterBytes)
		defer giveBack()
	}
	result, err := tree(ctx, src, dst, o, most)
	if err != nil {
		return Result{}, fmt.Errorf("copy the tree %s: %w", src, err)
	}
	return result, nil
}

// memory is what a copier may take of it.
type memory struct {
	names int // that are remembered
	later int // bytes of what was captured
}

func tree(ctx context.Context, src, dst *dir.Dir, o Options, most memory) (Result, error) {
	linksName := ".clone-" + rand.Text() // one of Inodes, as the file that shows the clock
	links, err := dst.Make(linksName)
	if err != nil {
		return Result{}, err
	}
	c := newCopier(src, links, o)
	c.most = most
	var result Result
	if c.look, err = NewLook(src); err == nil {
		c.dst, err = dir.NewDescent(dst, false)
	}
	if err == nil {
		result, err = c.passes(ctx, o.Rounds)
	}
	if c.steps.at != nil {
		err = errors.Join(err, c.steps.at.Close())
	}
	err = errors.Join(err, links.Close(), c.entries.watch.close(), c.clocks.machine.Close())
	if err == nil {
		err = removeLinks(ctx, dst, linksName)
	}
	return result, err
}

// removeLinks leaves the root as it was after the last pass: the source may have another by now.
func removeLinks(ctx context.Context, root *dir.Dir, name string) error {
	st, err := statSelf(root)
	if err != nil {
		return err
	}
	if err := dir.RemoveTree(ctx, root, name, func(context.Context) error { return nil }); err != nil {
		return err
	}
	return setTimes(root, ".", st)
}

// A copier copies one tree, in one or more passes.
type copier struct {
	src     *dir.Dir
	options Options
	dst     *dir.Descent[bool] // see pass
	links   *dir.Dir           // see pass
	look    Look
	clocks  clocks
	entries entryCopier
	steps   steps
	round   int
	names   Names // of what the copy was made in the last pass
	copied  int64
	alone   bool // no process can write: what is of the future is unchanged

	most       memory
	notesMoves bool          // see pass
	compared   time.Duration // how long the last check took
}

func newCopier(src, links *dir.Dir, o Options) *copier {
	return &copier{
		src: src, links: links, options: o, clocks: clocks{in: links}, most: memory{maxNames, laterBytes},
		entries: entryCopier{method: o.Method, maxStall: o.MaxStall, pause: o.Pause},
	}
}

func (c *copier) passes(ctx context.Context, rounds int) (Result, error) {
	start, err := c.begin(ctx, rounds > 0)
	if err != nil {
		return Result{}, err
	}
	if err := c.pass(ctx, moment{}, false); err != nil {
		return Result{}, err
	}
	result := Result{Entries: c.copied, Shared: c.options.Method == Share}
	for ; rounds > 0; rounds-- {
		changed, err := c.check(ctx, start)
		if err != nil {
			return Result{}, err
		}
		result.Changed = changed.entries
		if changed.entries == 0 || c.options.Method == Share && changed.onlyOneFile() && !c.entries.torn {
			result.PointInTime = true
			break
		}
		if c.options.Hold != nil {
			return c.standstill(ctx, start, result)
		}
		if rounds == 1 {
			break
		}
		if start, err = c.nextPass(ctx, start, false); err != nil {
			return Result{}, err
		}
	}
	result.Stall = c.entries.stall
	return result, nil
}

// standstill copies what has changed since the first pass began, and then what has changed since that while nothing
// is written, and checks that nothing was. While they stand still nothing waits for what others have written to
// the filesystem.
func (c *copier) standstill(ctx context.Context, start moment, first Result) (result Result, err error) {
	// They are compared to find what has changed, and once more to find that nothing does.
	if most := c.options.HoldAtMost; most > 0 && 2*c.compared > most {
		return Result{}, fmt.Errorf("%w: comparing them twice takes %s", ErrTooMany, (2 * c.compared).Round(time.Millisecond))
	}
	if start, err = c.nextPass(ctx, start, false); err != nil {
		return Result{}, err
	}
	if c.options.Method == Copy { // or removing a copy of that pass would wait for its blocks to be written
		if err := Sync(c.src); err != nil {
			return Result{}, err
		}
	}
	if result, err = c.copyStill(ctx, start, first); err != nil {
		return Result{}, err
	}
	c.entries.ctx = ctx
	return result, c.steps.take()
}

// copyStill is what is done while they stand still.
func (c *copier) copyStill(ctx context.Context, start moment, first Result) (result Result, err error) {
	began := time.Now()
	still, release, err := c.options.Hold(ctx)
	if err != nil {
		return Result{}, err
	}
	defer func() {
		err = errors.Join(err, release())
		c.entries.stall = max(c.entries.stall, time.Since(began))
		result.Stall = c.entries.stall
	}()
	c.clocks.still = true
	if start, err = c.nextPass(still, start, true); err != nil {
		return Result{}, err
	}
	changed, err := c.check(still, start)
	if err != nil {
		return Result{}, err
	}
	return Result{Entries: c.copied, Shared: first.Shared, Changed: changed.entries, PointInTime: changed.entries == 0}, nil
}

// nextPass copies what has changed since the pass before, which began at last, and returns when it began itself: later than
// all writes so far by the clock of the filesystem, which ticks each few milliseconds, so that nothing counts as
// changed unless it is written to from now on.
func (c *copier) nextPass(ctx context.Context, last moment, held bool) (start moment, err error) {
	if start, err = c.clocks.later(ctx); err != nil {
		return moment{}, err
	}
	c.round++
	c.entries.start = start
	return start, c.pass(ctx, last, held)
}

// begin notes the time before the first pass, and syncs after that: a write through a mapping does not
// change a ctime until the page was written to disk.
func (c *copier) begin(ctx context.Context, check bool) (moment, error) {
	c.round++
	if !check {
		return moment{}, nil
	}
	filesystem, err := dir.FilesystemOf(c.src)
	if err != nil {
		return moment{}, err
	}
	c.notesMoves, c.clocks.local = filesystem.NotesMoves(), filesystem.Cached()
	if c.clocks.machine, err = OpenClock(); err != nil {
		return moment{}, err
	}
	now, err := c.clocks.now()
	if err != nil {
		return moment{}, err
	}
	c.entries.start, c.clocks.seconds = now, now.changed.Nsec == 0
	if err := c.refuseFuture(ctx, now); err != nil {
		return moment{}, err
	}
	return now, Sync(c.src)
}

// pass copies all, or in later passes what has changed since the one before, and then the attributes of src itself.
func (c *copier) pass(ctx context.Context, since moment, held bool) error {
	c.entries.ctx, c.entries.synced = ctx, c.round == 1
	p := &pass{
		since: since, round: c.round, dst: c.dst, links: c.links, entries: &c.entries, look: c.look, before: c.names, notesMoves: c.notesMoves,
	}
	if c.entries.start.set && !held { // after which there is no pass
		p.names = newNames(c.most.names)
	}
	err := c.run(p, held)
	c.names = p.names
	c.copied += p.copied
	return err
}

// run runs a pass. That of a standstill leaves steps to be taken once those who write go on.
func (c *copier) run(p *pass, held bool) (err error) {
	if !held {
		return p.run(c.src)
	}
	c.steps = steps{entries: &c.entries, most: c.most.later, files: make(map[string]bool)}
	if c.steps.at, err = dir.NewDescent(c.dst.Current().Dir, struct{}{}); err != nil {
		return err
	}
	return (&stillPass{p, &c.steps}).run(c.src)
}
