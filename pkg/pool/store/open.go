// Package store has the layout of a pool on disk: it opens pools, reads and writes records,
// and has the steps by which volumes come and go. The order of those steps is what makes a
// crash harmless, and it is written only here: steps.go does them, and undoes a
// creation; recover.go finishes a removal that was interrupted. It also has what the nodes of a shared pool write for each
// other; whether a node counts as alive is not decided here. Between two calls nothing is kept in memory.
// docs/layout.md describes the layout.
package store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Location says where a pool is, and what its stores need to know of it.
type Location struct {
	// Path is the pool's directory, absolute.
	Path string
	// Node works on the pool: its own directories are in creating/, trash/ and published/.
	Node volume.NodeID
	// Reserved is a name that is never a volume; empty for none.
	Reserved string
	// Shared: several nodes serve the pool, and locks have to hold against the others.
	Shared bool
	// ReadOnly: others serve the pool, and no locks are taken against them.
	ReadOnly bool
	// MakePath says that a missing path is to be made.
	MakePath bool
	// Verify checks the pool's directory before anything in it is opened.
	Verify func(root *dir.Dir) error
	// Nested is a check of its own that another pool does not lie in the directory. Only
	// Create and OpenReadOnly make it.
	Nested func(root *dir.Dir) error
	// QueueTrash is called with the name of what the store itself puts into the trash.
	QueueTrash func(name string)
	// Refuses reports what Store.Refuses was last; nil for false.
	Refuses func() bool
}

// A Store is a pool's directories, open for one call. Nothing is held between calls, so that
// an administrator can unmount the pool.
type Store struct {
	at      *Location
	root    *dir.Dir // the pool's directory
	own     *dir.Dir // OwnName in it
	volumes *dir.Dir // has the records; see recordsDir
	// snapshots is opened by Parent.
	snapshots *dir.Dir
	// creating/ and trash/ are those of this node, opened by OpenWork.
	creating, trash *dir.Dir
	// refuses is what ProbeWritable has found; before it, what is known of another store.
	refuses bool
}

// An Identity distinguishes a pool from another that is at its path later.
type Identity struct {
	Format Format
	// written is the format's file as this driver would write it.
	written    []byte
	Filesystem dir.Filesystem
}

// Identify is the identity of a pool that has that format.
func (s *Store) Identify(f *Format) (*Identity, error) {
	id := &Identity{Format: *f}
	var err error
	if id.written, err = f.encode(); err != nil {
		return nil, err
	}
	id.Filesystem, err = dir.FilesystemOf(s.root)
	return id, err
}

// Close closes the directories.
func (s *Store) Close() {
	for _, d := range []*dir.Dir{s.snapshots, s.trash, s.creating, s.volumes, s.own, s.root} {
		if d != nil {
			_ = d.Close() // opened for reading: nothing can be lost
		}
	}
}

// Root is the pool's directory.
func (s *Store) Root() *dir.Dir { return s.root }

// Parent is the directory that the directory of an entry lies in: the root for a volume, and a
// directory of the layout for a snapshot. It returns fs.ErrNotExist where there are no
// snapshots. It stays open until Close.
func (s *Store) Parent(id volume.ID) (*dir.Dir, error) {
	if !id.IsSnapshot() {
		return s.root, nil
	}
	return s.openSnapshots((*dir.Dir).Open)
}

func (s *Store) openSnapshots(get func(*dir.Dir, string) (*dir.Dir, error)) (_ *dir.Dir, err error) {
	if s.snapshots == nil {
		s.snapshots, err = get(s.own, snapshotsName)
	}
	return s.snapshots, err
}

// opening is one way to open a pool: how its directories are opened, and what is made sure of
// before the next is.
type opening struct {
	root func(path string) (*dir.Dir, error)
	own  func(parent *dir.Dir, name string) (*dir.Dir, error)
	// verify checks the root, and confirm what is in own.
	verify  func(root *dir.Dir) error
	confirm func(s *Store) error
	// rest opens what is in own.
	rest func(s *Store) error
}

// open opens a pool: each way to open one goes through it.
func (o opening) open(at *Location) (_ *Store, err error) {
	s := &Store{at: at, refuses: at.Refuses != nil && at.Refuses()}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if s.root, err = o.root(at.Path); err != nil {
		return nil, err
	}
	if err = o.verify(s.root); err != nil {
		return nil, err
	}
	if s.own, err = o.own(s.root, OwnName); err != nil {
		return nil, err
	}
	if err = o.confirm(s); err != nil {
		return nil, err
	}
	return s, o.rest(s)
}

func (s *Store) openVolumes(get func(*dir.Dir, string) (*dir.Dir, error)) (err error) {
	s.volumes, err = get(s.own, volumesName)
	return err
}

func (s *Store) findVolumes() error { return s.openVolumes((*dir.Dir).Open) }

// recordsDir is the directory of the records. Most calls read one, and do not open it.
func (s *Store) recordsDir() (_ *dir.Dir, err error) {
	if s.volumes == nil {
		err = s.findVolumes()
	}
	return s.volumes, err
}

// ErrOther reports that another directory is at the path than the pool that was opened.
var ErrOther = volume.PoolMissing("what is at its path is not the pool that was opened")

// Open opens a pool and makes sure that it is the one with that identity, and not the bare
// directory below a mount that went away.
func Open(at *Location, id *Identity) (*Store, error) {
	return opening{
		root:   dir.Open,
		verify: at.Verify,
		own: func(root *dir.Dir, name string) (*dir.Dir, error) {
			own, err := root.Open(name)
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w: %w", ErrOther, err)
			}
			return own, err
		},
		confirm: func(s *Store) error {
			same, err := id.isOf(s.root, s.own)
			if err == nil && !same {
				err = ErrOther
			}
			return err
		},
		rest: (*Store).findVolumes,
	}.open(at)
}

// ErrNotCached reports that memory cannot say whether it is the pool that was opened.
var ErrNotCached = errors.New("not known from memory whether it is the pool that was opened")

// OpenCached is Open from what the kernel has in memory, as it nearly always has: it waits for
// nothing, and so needs no process to wait in its place, which would cost more than all that it
// does. After an error, use Open. The root is the pool's directory as it
// was checked last, with the identity; with requireMount it must still be the root of a mount. Another filesystem
// may give its root the same numbers, but not the mount.
func OpenCached(at *Location, id *Identity, root *dir.Way, requireMount bool) (*Store, error) {
	if root == nil || !id.Filesystem.Cached() {
		return nil, ErrNotCached
	}
	sameMount := false
	return opening{
		root: dir.OpenCached,
		verify: func(d *dir.Dir) error {
			here, err := dir.WayOf(d)
			if err != nil || here.ID != root.ID || requireMount && !here.MountRoot {
				return cmp.Or(err, ErrNotCached)
			}
			// Another node may have a newer driver write the format of a shared pool.
			sameMount = !at.Shared && here.Mount != 0 && here.Mount == root.Mount
			return nil
		},
		own: (*dir.Dir).OpenCached,
		confirm: func(s *Store) error {
			if sameMount {
				return nil
			}
			data, err := dir.ReadCached(s.own, formatName, maxFormat)
			if err != nil || !bytes.Equal(data, id.written) {
				return cmp.Or(err, ErrNotCached)
			}
			return nil
		},
		rest: func(*Store) error { return nil },
	}.open(at)
}

// Create opens a pool for the first time in this process, and makes what is missing of the
// layout. A read-only pool whose layout is complete is opened too. Errors: ErrNoRoom.
func Create(ctx context.Context, at *Location) (_ *Store, f *Format, err error) {
	s, err := opening{
		root: func(path string) (*dir.Dir, error) {
			if at.MakePath {
				if err := makeClosed(path); err != nil {
					return nil, err
				}
			}
			return dir.Open(path)
		},
		verify: func(root *dir.Dir) error {
			if err := at.Verify(root); err != nil {
				return err
			}
			return at.Nested(root)
		},
		own: func(root *dir.Dir, name string) (*dir.Dir, error) {
			own, err := root.Ensure(name)
			return own, roomFor(err)
		},
		confirm: func(s *Store) (err error) {
			// Before the format is known, nothing is changed.
			if f, err = ensureFormat(ctx, s.root, s.own, at.Shared); err != nil {
				return roomFor(err)
			}
			s.ProbeWritable()
			return s.CloseMode()
		},
		rest: (*Store).makeRest,
	}.open(at)
	return s, f, err
}

// makeRest makes what is in the layout besides the format.
func (s *Store) makeRest() error {
	err := s.findVolumes()
	if errors.Is(err, fs.ErrNotExist) {
		err = roomFor(s.openVolumes((*dir.Dir).Ensure))
	}
	if err != nil {
		return err
	}
	return s.OpenWork()
}

// mostForLayout is more than the layout of a pool takes on any filesystem, in bytes.
const mostForLayout = 64 << 10

// ErrNoLayout reports a directory in which no driver has made a pool.
var ErrNoLayout = errors.New("no driver has served it yet, or its filesystem is not mounted")

// OpenReadOnly opens a pool as far as that changes nothing. Errors: ErrNoLayout.
func OpenReadOnly(at *Location) (_ *Store, f *Format, err error) {
	// Another pool in this one may be why it has no layout.
	missing := func(root *dir.Dir, what string) error {
		full := error(nil)
		if space, err := dir.SpaceOf(root); err == nil && (space.FreeBytes < mostForLayout || space.OutOfInodes()) {
			full = fmt.Errorf("%w: no space is left for %s; no driver serves it until there is room", ErrNoLayout, what)
		}
		return cmp.Or(at.Nested(root), full, fmt.Errorf("%w: it has no %s", ErrNoLayout, what))
	}
	s, err := opening{
		root:   dir.Open,
		verify: at.Verify,
		own: func(root *dir.Dir, name string) (*dir.Dir, error) {
			own, err := root.Open(name)
			if errors.Is(err, fs.ErrNotExist) {
				err = missing(root, OwnName)
			}
			return own, err
		},
		confirm: func(s *Store) (err error) {
			if f, err = readFormat(s.own); err == nil && f == nil {
				err = missing(s.root, OwnName+"/"+formatName)
			}
			return err
		},
		rest: (*Store).findVolumes,
	}.open(at)
	return s, f, err
}

// Space measures the pool's filesystem.
func (s *Store) Space() (dir.Space, error) {
	space, err := dir.SpaceOf(s.root)
	space.ReadOnly = space.ReadOnly || s.refuses
	return space, err
}

// ProbeWritable finds out what statfs(2) does not report since Linux 6.12: that an error made an
// ext4 read-only.
func (s *Store) ProbeWritable() { s.refuses = errors.Is(s.root.Sync(), syscall.EROFS) }

// Refuses reports whether the filesystem refuses changes and does not say so, as ProbeWritable found last.
func (s *Store) Refuses() bool { return s.refuses }

// ProbeDisk reads what calls may find in memory, so that a disk that does not answer shows.
func (s *Store) ProbeDisk() error {
	return dir.AskDisk(s.own, formatName)
}

// isOf reports whether it is that of a pool.
func (id *Identity) isOf(root, own *dir.Dir) (bool, error) {
	here, err := id.Filesystem.Has(root)
	if err != nil || !here {
		return false, err
	}
	data, err := own.ReadFile(formatName, maxFormat)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	// Every call asks. Parsing would cost it more than all the rest of this.
	if err != nil || bytes.Equal(data, id.written) {
		return err == nil, err
	}
	found, err := decodeFormat(data)
	if err != nil {
		return false, fmt.Errorf("%s/%s %w", own, formatName, err)
	}
	if found.UUID != id.Format.UUID || id.Format.Shared == nil {
		return found.UUID == id.Format.UUID, nil
	}
	return true, found.Agrees(*id.Format.Shared)
}

// OpenWork opens what only calls need that make or remove volumes: the directories of this
// node. It makes what is missing. Errors: ErrNoRoom.
func (s *Store) OpenWork() error {
	if s.trash != nil {
		return nil
	}
	err := s.openWork((*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		err = roomFor(s.openWork((*dir.Dir).Ensure))
	}
	return err
}

// OpenWorkReadOnly is OpenWork that makes nothing.
func (s *Store) OpenWorkReadOnly() error { return s.openWork((*dir.Dir).Open) }

// openWork opens the directories of this node by dir.Open, or makes them by
// dir.Ensure.
func (s *Store) openWork(get func(*dir.Dir, string) (*dir.Dir, error)) (err error) {
	node := s.at.Node.String()
	if s.creating != nil {
		_ = s.creating.Close()
	}
	if s.creating, err = openNested(s.own, creatingName, node, get); err != nil {
		return err
	}
	s.trash, err = openNested(s.own, trashName, node, get)
	return err
}

func openNested(parent *dir.Dir, name, below string, get func(*dir.Dir, string) (*dir.Dir, error)) (*dir.Dir, error) {
	middle, err := get(parent, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = middle.Close() }()
	return get(middle, below)
}

// closedMode is what a pool's directory allows at most: volumes have mode 0777,
// and only the closed directory above keeps other users of the node out.
const closedMode = 0o750

// CloseMode takes the permissions away that others than root have.
func (s *Store) CloseMode() error {
	mode, err := s.root.Mode()
	if err != nil || mode&^closedMode == 0 {
		return err
	}
	space, err := s.Space()
	if err != nil || space.ReadOnly {
		return err
	}
	return s.root.Chmod(mode & closedMode)
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

// MarkCovered notes in the directory of a pool, durably, that another filesystem is mounted over it.
func MarkCovered(root *dir.Dir) error {
	own, err := root.Open(OwnName)
	if err != nil {
		return err
	}
	defer func() { _ = own.Close() }()
	return own.WriteFile(coveredName, nil)
}

// Covered reports whether another filesystem was mounted over the pool, when nothing was in it.
func (s *Store) Covered() (bool, error) { return s.own.Exists(coveredName) }
