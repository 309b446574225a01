package mounter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/moby/sys/mountinfo"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
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
	Tree(state *dir.Dir) (*mounts.Tree, error)
	// Is reports whether a mount is one of this claim, given the root directory of the mount.
	Is(mount *mountinfo.Info, root dir.ID) (bool, error)
	// Grow has the filesystem fill a claim that became larger. It is mounted at a path.
	Grow(mount *mountinfo.Info) error
	// CheckUnused reports ErrInUse if the claim is still mounted somewhere.
	CheckUnused() error
}

// A Mounter keeps one pool mounted.
type Mounter struct {
	// Target is where the pool is to be mounted: an absolute path, as this process sees it.
	// Its parent must be there and shared with the host.
	Target string
	// Claim may be nil for Unmount, which then does not check what is mounted.
	Claim Claim
	// Interval is how often the size of the claim is compared, and the mount without a sign of change.
	Interval time.Duration
	// Patience is how long Run tries again after an error, and Unmount for a pool that is in use.
	Patience time.Duration
	Log      logr.Logger
}

// open opens the directory in which the pool is mounted.
func (m *Mounter) open() (mounts.Place, error) {
	parent, err := dir.OpenParent(m.Target)
	if err != nil {
		return mounts.Place{}, fmt.Errorf("open the directory of the pool: %w", err)
	}
	return mounts.Place{Parent: parent, Name: path.Base(m.Target)}, nil
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

// find is the mount of the claim at a place.
func (m *Mounter) find(place mounts.Place) (*mountinfo.Info, error) {
	state, err := place.State()
	switch {
	case err != nil:
		return nil, err
	case state.Missing, !state.Mounted && state.IsDir:
		return nil, fmt.Errorf("%s: %w", place, ErrNotMounted)
	case state.Dead != nil:
		return nil, m.dead(place, state)
	case !state.IsDir:
		return nil, fmt.Errorf("%s: %w: it is not a directory", place, ErrOccupied)
	}
	table, err := mounts.ReadTable()
	if err != nil {
		return nil, err
	}
	mount := table.ByID(state.MountID)
	if mount == nil {
		return nil, fmt.Errorf("%s: %w: the mount table does not have it", place, ErrNotMounted)
	}
	if m.Claim != nil {
		ours, err := m.Claim.Is(mount, state.ID)
		if err != nil {
			return nil, err
		}
		if !ours {
			return nil, fmt.Errorf("%s: %w: %s is mounted there (%s, root %s). Unmount that, or give the pool another path", place, ErrOccupied, mount.Source, mount.FSType, mount.Root)
		}
		if !mounts.IsShared(mount) {
			return nil, fmt.Errorf("%s: %w: it is mounted only in this container", place, ErrNotShared)
		}
	}
	if count := table.Stacked(state.MountID); count > 1 {
		m.Log.Info("several mounts lie on each other at the pool's path; the topmost is in use", "target", m.Target, "mounts", count)
	}
	return mount, nil
}

// dead is the error about a mount of which the filesystem answers with errors only.
func (m *Mounter) dead(place mounts.Place, state mounts.State) error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	mount := table.ByID(state.MountID)
	if mount == nil {
		return fmt.Errorf("%s: its filesystem failed (%w), and the mount table does not have it", place, state.Dead)
	}
	return deadError{fmt.Errorf("%s: %w: its filesystem failed: %w", place, ErrNotMounted, state.Dead), mount}
}

// A deadError reports a mount of which the filesystem answers with errors only.
type deadError struct {
	error
	mount *mountinfo.Info
}

func (e deadError) Unwrap() error { return e.error }

// Mount mounts the claim at the pool's path unless it is mounted there already. It returns
// ErrOccupied if anything else is there: another mount, or data.
func (m *Mounter) Mount(ctx context.Context) error {
	place, err := m.open()
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	_, err = m.find(place)
	if !errors.Is(err, ErrNotMounted) {
		return err
	}
	unlock, err := place.Parent.Lock(ctx, lockFile)
	if err != nil {
		return fmt.Errorf("wait for another mounter of this pool: %w", err)
	}
	defer unlock()
	_, err = m.find(place) // another mounter may have mounted it meanwhile
	var dead deadError
	switch {
	case errors.As(err, &dead):
		m.Log.Error(err, "mounting the pool again")
		if err := place.Unmount(); err != nil {
			return err
		}
	case !errors.Is(err, ErrNotMounted):
		return err
	}
	return m.attach(place)
}

// attach mounts the claim at a place where nothing is mounted.
func (m *Mounter) attach(place mounts.Place) error {
	if err := checkShared(place); err != nil {
		return err
	}
	if err := ensureEmpty(place); err != nil {
		return err
	}
	tree, err := m.Claim.Tree(place.Parent)
	if err != nil {
		return err
	}
	err = attachTree(tree, place)
	if err = errors.Join(err, tree.Close()); err != nil {
		return err
	}
	mount, err := m.find(place)
	if err != nil {
		return errors.Join(err, place.Unmount())
	}
	m.Log.Info("mounted the pool", "target", m.Target, "source", mount.Source, "filesystem", mount.FSType, "root", mount.Root)
	return nil
}

func attachTree(tree *mounts.Tree, place mounts.Place) error {
	readOnly, err := tree.ReadOnly()
	if err != nil {
		return err
	}
	if readOnly {
		return errors.New("the claim is mounted read-only, and a pool is written to")
	}
	return tree.Attach(place)
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
	unlock, err := place.Parent.LockShared(ctx, runFile)
	if err := errors.Join(err, place.Parent.Close()); err != nil {
		return ignoreCanceled(ctx, fmt.Errorf("wait for the clean-up of this pool: %w", err))
	}
	defer unlock()
	watch, err := mounts.NewWatch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watch.Close()) }()
	growth := problem{log: m.Log, message: "failed to grow the filesystem of the pool"}
	for first := true; ; first = false {
		if err := persist(ctx, m.Patience, m.Log, m.Mount); err != nil {
			return ignoreCanceled(ctx, err)
		}
		if first {
			m.Log.Info("keeping the pool mounted", "target", m.Target)
		}
		growth.note(m.grow())
		if err := watch.Wait(ctx, m.Interval); err != nil {
			return ignoreCanceled(ctx, err)
		}
	}
}

// ignoreCanceled drops the error of a call that was cut short.
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
	mount, err := m.find(place)
	if err != nil {
		return err
	}
	return m.Claim.Grow(mount)
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

// Pauses between two tries double.
const firstPause, longestPause = 250 * time.Millisecond, 10 * time.Second

// persist tries again after an error, until patience or ctx ends.
func persist(ctx context.Context, patience time.Duration, log logr.Logger, try func(context.Context) error) error {
	failed := problem{log: log, message: "trying again"}
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

// Unmount unmounts the pool. It returns ErrInUse, with the pool mounted as before, if volumes are
// published as far as this process sees, or files are open, for as long as Patience. A pool
// that is not mounted is no error.
func (m *Mounter) Unmount(ctx context.Context) error {
	if err := persist(ctx, m.Patience, m.Log, m.unmount); err != nil {
		return err
	}
	if m.Claim == nil {
		return nil
	}
	return persist(ctx, m.Patience, m.Log, func(context.Context) error { return m.Claim.CheckUnused() })
}

func (m *Mounter) unmount(ctx context.Context) error {
	place, err := m.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = place.Parent.Close() }()
	m.Log.Info("waiting for the mounter of the pool to end", "target", m.Target)
	ended, err := place.Parent.Lock(ctx, runFile)
	if err != nil {
		return fmt.Errorf("wait for the mounter of this pool to end: %w", err)
	}
	defer ended()
	unlock, err := place.Parent.Lock(ctx, lockFile)
	if err != nil {
		return fmt.Errorf("wait for another mounter of this pool: %w", err)
	}
	defer unlock()
	for {
		mount, err := m.find(place)
		var dead deadError
		switch {
		case errors.As(err, &dead):
			// Pods that still use it may have data in memory that only they can save elsewhere.
			mount = dead.mount
		case errors.Is(err, ErrNotMounted):
			return nil
		case err != nil:
			return err
		}
		if err := checkUnpublished(mount); err != nil {
			return err
		}
		err = place.Unmount()
		if errors.Is(err, mounts.ErrBusy) {
			return fmt.Errorf("%w: %w", ErrInUse, err)
		}
		if err != nil {
			return err
		}
		m.Log.Info("unmounted the pool", "target", m.Target)
	}
}

// checkUnpublished returns ErrInUse while directories of the pool are mounted elsewhere.
func checkUnpublished(pool *mountinfo.Info) error {
	table, err := mounts.ReadTable()
	if err != nil {
		return err
	}
	var paths []string
	for _, m := range table.Inside(pool) {
		paths = append(paths, m.Mountpoint)
	}
	if len(paths) == 0 {
		return nil
	}
	const shown = 5
	more := ""
	if len(paths) > shown {
		more = fmt.Sprintf(" and %d more", len(paths)-shown)
		paths = paths[:shown]
	}
	return fmt.Errorf("%w: its volumes are published at %s%s. Delete the pods that use them first", ErrInUse, strings.Join(paths, ", "), more)
}
