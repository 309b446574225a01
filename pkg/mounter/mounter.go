package mounter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
)

// Errors that callers may test for.
var (
	// ErrNotMounted reports that nothing is mounted at the pool's path.
	ErrNotMounted = errors.New("pool is not mounted")
	// ErrOccupied reports that something else than the claim is at the pool's path.
	ErrOccupied = errors.New("pool path is taken")
	// ErrNotShared reports that a mount at the pool's path would not reach the host.
	ErrNotShared = errors.New("mounts do not reach the host")
	// ErrInUse reports a pool that cannot be unmounted, because it is used.
	ErrInUse = errors.New("pool is in use")
	// ErrForeign reports a device with something on it that is not a filesystem for a pool.
	ErrForeign = errors.New("device is not blank, and has no filesystem for a pool")
)

// lockFile is next to the mount point: two mounters of one pool work one after another.
const lockFile = ".pool-mounter.lock"

// runFile is next to the mount point. A mounter has a lock on it, beside others, for as long as it keeps the pool mounted. Unmount waits
// for these locks to go: a mounter would mount again what it unmounts.
const runFile = ".pool-mounter.run"

// A Claim is the volume that a pool is to be on.
type Claim interface {
	// Tree makes a mount of the claim that is attached nowhere yet. State is the directory in
	// which the mount point is. Only one mounter at a time calls it.
	Tree(ctx context.Context, state *dir.Dir) (*mounts.Tree, error)
	// Is reports whether a mount is one of this claim, given the root directory of the mount.
	Is(mount *mountinfo.Mount, root dir.ID) (bool, error)
	// Grow has the filesystem fill a claim that became larger. It is mounted at a path.
	Grow(mount *mountinfo.Mount) error
	// Unused returns ErrInUse if the claim is known to be in use, here or where this process does not see it.
	Unused() error
}

// A Mounter keeps one pool mounted.
type Mounter struct {
	// Target is where the pool is to be mounted: an absolute path, as this process sees it.
	// Its parent must be there and shared with the host.
	Target string
	// Claim may be nil for Unmount, which then goes by the record of what was mounted alone.
	Claim Claim
	// Interval is how often the size of the claim is compared, and the mount without a sign of change.
	Interval time.Duration
	// Patience is how long Run tries again after an error, and Unmount for a pool that is in use.
	Patience time.Duration
	Log      logr.Logger
}

func (m *Mounter) open() (mounts.Place, error) {
	parent, err := dir.OpenParent(m.Target)
	if err != nil {
		return mounts.Place{}, fmt.Errorf("open the directory of the pool: %w", err)
	}
	return mounts.Place{Parent: parent, Name: path.Base(m.Target)}, nil
}

// stateAt is what is at a path.
func stateAt(at string) (mounts.State, error) {
	parent, err := dir.OpenParent(at)
	if err != nil {
		return mounts.State{}, err
	}
	defer func() { _ = parent.Close() }() // it is only looked at
	return mounts.Place{Parent: parent, Name: path.Base(at)}.State()
}

// Check returns nil if the claim is mounted at the pool's path, where the host sees it, and
// otherwise what is wrong. It changes nothing.
func (m *Mounter) Check() error {
	place, err := m.open()
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	_, err = m.find(place)
	return err
}

// A topmost is what is mounted at a place, on top of anything else there.
type topmost struct {
	state mounts.State
	mount *mountinfo.Mount
	table mounts.Table
}

// look returns ErrNotMounted if nothing is mounted at a place.
func look(place mounts.Place) (topmost, error) {
	state, err := place.State()
	switch {
	case err != nil:
		return topmost{}, err
	case state.Missing, !state.Mounted && state.IsDir:
		return topmost{}, fmt.Errorf("%s: %w", place, ErrNotMounted)
	case !state.Mounted:
		return topmost{}, fmt.Errorf("%s: %w: it is not a directory", place, ErrOccupied)
	}
	table, err := mounts.ReadTable()
	if err != nil {
		return topmost{}, err
	}
	mount := table.ByID(state.MountID)
	if mount == nil {
		return topmost{}, fmt.Errorf("%s: the mount table does not have what is mounted there", place)
	}
	return topmost{state, mount, table}, nil
}

func (m *Mounter) find(place mounts.Place) (topmost, error) {
	top, err := look(place)
	switch {
	case err != nil:
		return topmost{}, err
	case top.state.Dead != nil:
		return top, fmt.Errorf("%s: %w: its filesystem failed: %w", place, ErrNotMounted, top.state.Dead)
	}
	ours, err := m.Claim.Is(top.mount, top.state.ID)
	switch {
	case err != nil:
		return topmost{}, err
	case !ours:
		return topmost{}, fmt.Errorf("%s: %w: %s is mounted there (%s, root %s). Unmount that, or give the pool another path", place, ErrOccupied, top.mount.Source, top.mount.Type, top.mount.Root)
	case !mounts.IsShared(top.mount):
		return topmost{}, fmt.Errorf("%s: %w: it is mounted only in this container", place, ErrNotShared)
	}
	if count := len(top.table.Stack(top.state.MountID)); count > 1 {
		m.Log.Info("Several mounts lie on each other at the pool's path; the topmost is in use", "target", m.Target, "mounts", count)
	}
	return top, nil
}

// Mount mounts the claim at the pool's path unless it is mounted there already. It returns
// ErrOccupied if anything else is there: another mount, or data.
func (m *Mounter) Mount(ctx context.Context) error {
	place, err := m.open()
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	top, err := m.find(place)
	if err == nil {
		// Also of one that another program has mounted, such as the upstream mounter.
		return remember(place, top.state, top.mount)
	}
	if !errors.Is(err, ErrNotMounted) {
		return err
	}
	unlock, err := dir.Lock(ctx, place.Parent, lockFile)
	if err != nil {
		return fmt.Errorf("wait for another mounter of this pool: %w", err)
	}
	defer unlock()
	top, err = m.find(place) // another mounter may have mounted it meanwhile
	switch {
	case err == nil:
		return remember(place, top.state, top.mount)
	case !errors.Is(err, ErrNotMounted):
		return err
	case top.state.Dead != nil:
		if err := m.unmountDead(place, top, err); err != nil {
			return err
		}
	}
	return m.attach(ctx, place)
}

// unmountDead takes down what was mounted for the pool and has failed since.
func (m *Mounter) unmountDead(place mounts.Place, top topmost, why error) error {
	ours, err := m.ours(place, top)
	switch {
	case err != nil:
		return errors.Join(why, err)
	case !ours:
		return fmt.Errorf("%w: no mounter has mounted it: %w", ErrOccupied, why)
	}
	m.Log.Error(why, "Mounting the pool again")
	return place.Unmount()
}

func (m *Mounter) attach(ctx context.Context, place mounts.Place) error {
	if err := checkShared(place); err != nil {
		return err
	}
	if err := ensureEmpty(place); err != nil {
		return err
	}
	tree, err := m.Claim.Tree(ctx, place.Parent)
	if err != nil {
		return err
	}
	root, err := attachTree(tree, place)
	if err = errors.Join(err, tree.Close()); err != nil {
		return err
	}
	top, err := m.find(place)
	if err != nil {
		now, lookErr := look(place)
		if lookErr == nil && now.state.ID == root.ID {
			lookErr = place.Unmount()
		}
		return errors.Join(err, lookErr)
	}
	m.Log.Info("Mounted the pool", "target", m.Target, "source", top.mount.Source, "filesystem", top.mount.Type, "root", top.mount.Root)
	return remember(place, top.state, top.mount)
}

// attachTree records what it mounts before it does: a mounter that is killed leaves nothing mounted that is not known.
func attachTree(tree *mounts.Tree, place mounts.Place) (root mounts.State, err error) {
	readOnly, err := tree.ReadOnly()
	if err != nil {
		return root, err
	}
	if readOnly {
		return root, errors.New("the claim is mounted read-only, and a pool is written to")
	}
	if root, err = tree.State(); err != nil {
		return root, err
	}
	if err := remember(place, root, nil); err != nil {
		return root, err
	}
	return root, tree.Attach(place)
}

// checkShared returns ErrNotShared if what is mounted at the place stays in this container.
func checkShared(place mounts.Place) error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	on, err := table.MountOf(place.Parent)
	if err != nil {
		return err
	}
	if !mounts.IsShared(on) {
		return fmt.Errorf("%s: %w: have the volume of the pool's path mounted with mountPropagation Bidirectional", place.Parent, ErrNotShared)
	}
	return nil
}

// ensureEmpty makes the directory that is to carry the mount, and returns ErrOccupied if there
// is something in it: the mount would hide that.
func ensureEmpty(place mounts.Place) error {
	made, err := place.Parent.Make(place.Name)
	switch {
	case err == nil:
		return errors.Join(made.Chmod(0o750), made.Sync(), made.Close(), place.Parent.Sync())
	case !errors.Is(err, fs.ErrExist):
		return err
	}
	below, err := place.Parent.Open(place.Name)
	if err != nil {
		return err
	}
	defer func() { _ = below.Close() }()
	for entry, err := range below.Entries() {
		if err != nil {
			return err
		}
		return fmt.Errorf("%s: %w: nothing is mounted there, but it has data (%q). The pool would hide it. Move it away: it may have been written while the pool was not mounted", place, ErrOccupied, entry.Name)
	}
	return nil
}

// Run keeps the pool mounted and grown until ctx ends, and leaves it mounted then. It returns
// an error that lasts longer than Patience.
func (m *Mounter) Run(ctx context.Context) (err error) {
	place, err := m.open()
	if err != nil {
		return err
	}
	unlock, err := dir.LockShared(ctx, place.Parent, runFile)
	if err := errors.Join(err, place.Parent.Close()); err != nil {
		return ignoreCanceled(ctx, fmt.Errorf("wait for the clean-up of this pool: %w", err))
	}
	defer unlock()
	defer m.leave()
	watch, err := mounts.NewWatch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watch.Close()) }()
	growth := problem{log: m.Log, message: "Failed to grow the filesystem of the pool"}
	for first := true; ; first = false {
		if err := persist(ctx, m.Patience, m.Log, m.Mount); err != nil {
			return ignoreCanceled(ctx, err)
		}
		if first {
			m.Log.Info("Keeping the pool mounted", "target", m.Target)
		}
		growth.note(m.grow())
		if err := watch.Wait(ctx, m.Interval); err != nil {
			return ignoreCanceled(ctx, err)
		}
	}
}

// leave has all on the disk that the pool has in memory: a claim that only one pod may have can be detached before the next one has it.
func (m *Mounter) leave() {
	place, err := m.open()
	if err != nil {
		return
	}
	defer func() { _ = place.Parent.Close() }()
	if _, err := m.find(place); err != nil {
		return // the pool is not mounted
	}
	if err := place.Sync(); err != nil {
		m.Log.Error(err, "Failed to write to the disk what the pool has in memory", "target", m.Target)
	}
}

func ignoreCanceled(ctx context.Context, err error) error {
	select {
	case <-ctx.Done():
		return nil
	default:
		return err
	}
}

// grow asks the claim, and the disk only if its size is another than before.
func (m *Mounter) grow() error {
	place, err := m.open()
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	top, err := m.find(place)
	if err != nil {
		return err
	}
	return m.Claim.Grow(top.mount)
}

// A problem is logged when it begins, when it changes and when it ends.
type problem struct {
	log     logr.Logger
	message string
	last    string
}

func (p *problem) note(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == p.last {
		return
	}
	if p.last = text; err != nil {
		p.log.Error(err, p.message)
	}
}

const firstPause, longestPause = 250 * time.Millisecond, 10 * time.Second

func persist(ctx context.Context, patience time.Duration, log logr.Logger, try func(context.Context) error) error {
	failed := problem{log: log, message: "Trying again"}
	begin := time.Now()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := try(ctx)
		if err == nil || ctx.Err() != nil || time.Since(begin)+pause > patience {
			return err
		}
		failed.note(err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// Look returns ErrInUse if volumes of the pool are published, as far as this process sees, and ErrOccupied if something is known to lie over the
// pool, for as long as Patience. It changes nothing, and waits for no mounter.
func (m *Mounter) Look(ctx context.Context) error {
	return persist(ctx, m.Patience, m.Log, func(context.Context) error { return m.lookForUsers() })
}

func (m *Mounter) lookForUsers() error {
	place, err := m.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	top, err := look(place)
	if errors.Is(err, ErrNotMounted) || errors.Is(err, ErrOccupied) {
		if err := m.checkEachUnpublished(); err != nil {
			return err
		}
		return cmp.Or(m.checkUncovered(), checkUnused(place))
	}
	if err != nil {
		return err
	}
	ours, whose := m.ours(place, top)
	before, err := recorded(place)
	if err != nil {
		return err
	}
	known := before != nil || m.Claim != nil
	switch {
	case ours:
		return checkUnpublished(top.mount)
	case known && whose == nil:
		return checkUnused(place)
	}
	if err := m.checkEachUnpublished(); err != nil || !known { // only the claim shows which is the pool: Unmount may have it
		return err
	}
	return whose
}

// checkEachUnpublished is checkUnpublished for whatever is mounted at the pool's path, in sight or not: each may be the pool.
func (m *Mounter) checkEachUnpublished() error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	for _, at := range table {
		if at.Mountpoint == m.Target {
			if err := checkUnpublished(at); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unmount unmounts the pool, if a mounter has mounted it or it is the claim's. It returns ErrInUse, with the pool mounted as before, if
// volumes are published as far as this process sees, or files are open, for as long as Patience. A pool that is not mounted is no error,
// also if something else is mounted in its place, which stays. It returns ErrOccupied if that lies over the pool, or if it
// is not known what it is.
func (m *Mounter) Unmount(ctx context.Context) error {
	return persist(ctx, m.Patience, m.Log, m.unmount)
}

func (m *Mounter) unmount(ctx context.Context) error {
	place, err := m.open()
	if errors.Is(err, fs.ErrNotExist) {
		return m.checkUnseen()
	}
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	m.Log.Info("Waiting for the mounter of the pool to end", "target", m.Target)
	ended, err := dir.Lock(ctx, place.Parent, runFile)
	if err != nil {
		return fmt.Errorf("wait for the mounter of this pool to end: %w", err)
	}
	defer ended()
	unlock, err := dir.Lock(ctx, place.Parent, lockFile)
	if err != nil {
		return fmt.Errorf("wait for another mounter of this pool: %w", err)
	}
	defer unlock()
	return m.takeDown(place)
}

// takeDown unmounts the pool, however often it is mounted there.
func (m *Mounter) takeDown(place mounts.Place) error {
	for was := false; ; was = true {
		top, err := look(place)
		if errors.Is(err, ErrNotMounted) || errors.Is(err, ErrOccupied) { // by a file: nothing is mounted on it
			return m.isGone(place, was)
		}
		if err != nil {
			return err
		}
		ours, err := m.ours(place, top)
		if err != nil {
			return err
		}
		if !ours {
			m.Log.Info("The pool is not mounted, and what is mounted in its place stays", "target", m.Target, "source", top.mount.Source, "filesystem", top.mount.Type)
			return m.forgetUnused(place, was)
		}
		// Also of a filesystem that failed: pods that use it may have data in memory that only they can save elsewhere.
		if err := checkUnpublished(top.mount); err != nil {
			return err
		}
		err = m.syncAndUnmount(place)
		if errors.Is(err, mounts.ErrBusy) {
			return fmt.Errorf("%w: %w", ErrInUse, err)
		}
		if err != nil {
			return err
		}
		m.Log.Info("Unmounted the pool", "target", m.Target)
	}
}

// isGone is for a pool at whose path nothing is mounted.
func (m *Mounter) isGone(place mounts.Place, was bool) error {
	if err := m.checkUncovered(); err != nil {
		return err
	}
	return m.forgetUnused(place, was)
}

// forgetUnused removes the record of what is not mounted at the pool's path, unless it is used. Of a claim that cannot be asked that is known
// if a mounter has mounted it.
func (m *Mounter) forgetUnused(place mounts.Place, was bool) error {
	if err := checkUnused(place); err != nil {
		return err
	}
	before, err := recorded(place)
	if err != nil {
		return err
	}
	if err := m.checkUnseen(); errors.Is(err, ErrInUse) || err != nil && before == nil && !was {
		return err
	}
	return forgetMount(place)
}

// checkUnseen returns ErrInUse if the pool may be mounted on the node and not in this container, which began when something was mounted over a
// directory above, or in another container, which has a copy of the mount.
func (m *Mounter) checkUnseen() error {
	if m.Claim == nil {
		return nil
	}
	if err := m.Claim.Unused(); err != nil {
		return fmt.Errorf("%s: nothing is mounted there that this container sees, and the claim is used: %w. If something is mounted on the node over a directory above, unmount that first, and end containers that have the directory above",
			m.Target, err)
	}
	return nil
}

// checkUncovered returns ErrOccupied if a mount at the pool's path cannot be reached, because something is mounted over a directory above.
func (m *Mounter) checkUncovered() error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	for _, below := range table {
		if below.Mountpoint == m.Target {
			return fmt.Errorf("%s: %w: %s (%s) is mounted there, below what is mounted over a directory above it. Unmount that first", m.Target, ErrOccupied, below.Source, below.Type)
		}
	}
	return nil
}

// syncAndUnmount has all on the disk when the pool is unmounted: the claim may be detached then, whatever else has a copy of the mount. What
// cannot be written is lost with the mount as without it, and keeps nothing mounted.
func (m *Mounter) syncAndUnmount(place mounts.Place) error {
	if err := place.Sync(); err != nil {
		m.Log.Error(err, "Failed to write to the disk what the pool has in memory", "target", m.Target)
	}
	return place.Unmount()
}

// ours says whether the topmost mount is what a mounter has recorded, or else is the claim's. It returns ErrOccupied if neither can be
// known, and if it is not but lies over what may be ours.
func (m *Mounter) ours(place mounts.Place, top topmost) (bool, error) {
	before, err := recorded(place)
	if err != nil {
		return false, err
	}
	now, err := recordOf(top.state, top.mount)
	if err != nil {
		return false, err
	}
	dead := top.state.Dead != nil
	if before != nil && before.is(now, dead) {
		return true, nil
	}
	if m.Claim != nil && !dead {
		if ours, err := m.Claim.Is(top.mount, top.state.ID); ours || err != nil {
			return ours, err
		}
	} else if before == nil || dead && before.Device == "" {
		return false, fmt.Errorf("%s: %w: nothing says whether %s there (%s) was mounted for the pool. If it was, unmount it by hand", place, ErrOccupied, top.mount.Source, top.mount.Type)
	}
	for _, below := range top.table.Stack(top.state.MountID)[1:] {
		// Without a record, as of the upstream mounter, or with that of a mounter that was killed, any may be the pool.
		if before == nil || before.Device == "" || deviceOf(below) == before.Device {
			return false, fmt.Errorf("%s: %w: %s (%s) is mounted over the pool, or over what may be it. Unmount that first", place, ErrOccupied, top.mount.Source, top.mount.Type)
		}
	}
	return false, nil
}

// checkUnused is checkUnpublished for what was recorded and is not mounted any more: another program has unmounted it. The number of its device
// may be that of another filesystem by now.
func checkUnused(place mounts.Place) error {
	before, err := recorded(place)
	if err != nil || before == nil {
		return err
	}
	pool, err := before.mount()
	if err != nil || pool == nil {
		return err
	}
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	// A filesystem that is in use keeps its number.
	if slices.ContainsFunc(table, func(m *mountinfo.Mount) bool { return deviceOf(m) == before.Device && before.isElsewhere(m) }) {
		return nil
	}
	return checkUnpublished(pool)
}

// checkUnpublished returns ErrInUse while directories of the pool are mounted elsewhere, or files of it are loop devices.
func checkUnpublished(pool *mountinfo.Mount) error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	var paths []string
	for _, m := range table.Inside(pool) {
		paths = append(paths, m.Mountpoint)
	}
	if len(paths) > 0 {
		return fmt.Errorf("%w: its volumes are published at %s. Delete the pods that use them first", ErrInUse, some(paths))
	}
	devices, err := loopsOn(pool)
	if len(devices) > 0 {
		err = fmt.Errorf("%w: files of it are loop devices: %s. Delete the pods that use them first. One that no pod uses, an administrator detaches, as with losetup --detach %s",
			ErrInUse, some(devices), strings.Fields(devices[0])[0])
	}
	return err
}

func some(names []string) string {
	const shown = 5
	more := ""
	if len(names) > shown {
		more = fmt.Sprintf(" and %d more", len(names)-shown)
		names = names[:shown]
	}
	return strings.Join(names, ", ") + more
}
