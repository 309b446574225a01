package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// subvolumes enforces limits with the qgroup that btrfs creates for each subvolume. It
// limits the referenced bytes: every byte readable in the subvolume counts in full, even if
// a reflink shares it with another subvolume, so the content cannot exceed the limit when
// the other is deleted. (A limit on exclusive bytes would be exceeded by that.)
type subvolumes struct {
	mu    sync.Mutex  // held across no system call
	dying map[ID]bool // released, but not yet cleaned up by the kernel
}

// detectSubvolumes checks that quotas are enabled and consistent, and not simple ones (Linux 6.7): with these an extent counts for its first
// owner alone, and a process that makes a subvolume chooses which limits count it.
func detectSubvolumes(d *dir.Dir) (Facility, error) {
	status, err := searchItem(d, qgroupStatus, 0)
	if errors.Is(err, fs.ErrNotExist) || err == nil && status.flags()&statusOn == 0 {
		return nil, fmt.Errorf("%w: disabled on btrfs: run btrfs quota enable %s", ErrNone, d)
	}
	if err == nil && status.flags()&statusSimple != 0 {
		return nil, fmt.Errorf("%w: btrfs has simple quotas, and only ordinary ones are supported: run btrfs quota disable %s && btrfs quota enable %[2]s", ErrNone, d)
	}
	if err == nil {
		err = counting(d, status)
	}
	if err != nil {
		return nil, err
	}
	return &subvolumes{}, nil
}

// counting returns ErrNone if the kernel's accounting is inconsistent, or has stopped, and no rescan is
// running. Until a rescan, the numbers that the limits are enforced by may be wrong or not
// updated. A rescan runs after quotas are enabled, or on request.
func counting(d *dir.Dir, status item) error {
	if running, err := rescanning(d); running || err != nil {
		return err
	}
	if status.flags()&statusInconsistent != 0 {
		// A rescan that has just ended may not have stored its result yet. This waits only for that.
		if err := ioctl.Do[rescanArgs](d, btrfsRescanWait, nil); err != nil {
			return fmt.Errorf("wait for the quota rescan of %s: %w", d, err)
		}
		status, err := searchItem(d, qgroupStatus, 0)
		if err != nil {
			return err
		}
		if status.flags()&statusInconsistent != 0 {
			return fmt.Errorf("%w: btrfs quota accounting is inconsistent: run btrfs quota rescan %s", ErrNone, d)
		}
	}
	stopped, err := stopped(d)
	if stopped {
		err = fmt.Errorf("%w: btrfs quota accounting has stopped, which a rescan does not change: run btrfs quota disable %s && btrfs quota enable %[2]s", ErrNone, d)
	}
	return err
}

// stopped reports whether the subvolume of d was changed and not counted. That happens after a rescan: the kernel's status says then that all is
// consistent (seen with Linux 6.18, where a snapshot that was made in a qgroup had been removed). Each commit that changes a subvolume
// writes its count, though after its root, and one that a rescan has changed later still: so it is there after one more commit.
func stopped(d *dir.Dir) (bool, error) {
	var changed subvolumeInfo
	if err := ioctl.Do(d, getSubvolumeInfo, &changed); err != nil {
		return false, fmt.Errorf("read when the subvolume of %s was changed: %w", d, err)
	}
	behind := func() (bool, error) {
		info, err := searchItem(d, qgroupInfo, ID(changed.ID))
		return err == nil && info.number(0) < changed.Generation, ifThere(err)
	}
	if is, err := behind(); !is || err != nil {
		return false, err
	}
	var commit uint64
	err := ioctl.Do(d, startSync, &commit)
	if err == nil {
		err = ioctl.Do(d, waitSync, &commit)
	}
	if errors.Is(err, unix.EROFS) { // after an error there are no more commits
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("commit the filesystem of %s: %w", d, err)
	}
	is, err := behind()
	running, runErr := rescanning(d) // since now: then it is not counted yet
	return is && !running, errors.Join(err, runErr)
}

func rescanning(d *dir.Dir) (bool, error) {
	var scan rescanArgs
	if err := ioctl.Do(d, btrfsRescanStatus, &scan); err != nil {
		return false, fmt.Errorf("read the quota rescan status of %s: %w", d, err)
	}
	return scan.Running != 0, nil
}

// Settled reports whether all that is in the subvolume of d is counted: not while btrfs counts it anew, has to, has stopped, or has quotas
// disabled or simple ones, when usage is too low.
func Settled(d *dir.Dir) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return false, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if uint32(st.Type) != unix.BTRFS_SUPER_MAGIC {
		return true, nil
	}
	status, err := searchItem(d, qgroupStatus, 0)
	if err != nil || status.flags()&(statusOn|statusSimple) != statusOn {
		return false, ifThere(err)
	}
	running, err := rescanning(d)
	if err == nil && !running {
		err = counting(d, status)
	}
	if errors.Is(err, ErrNone) {
		return false, nil
	}
	return err == nil && !running, err
}

func (*subvolumes) Kind() Kind { return Btrfs }

func (*subvolumes) Make(parent *dir.Dir, name string) (*dir.Dir, error) {
	// This validates the name: the ioctl does not.
	if _, err := parent.IsDir(name); err != nil {
		return nil, err
	}
	var args ioctl.Subvolume
	copy(args.Name[:len(args.Name)-1], name)
	if err := ioctl.Do(parent, ioctl.CreateSubvolume, &args); err != nil {
		return nil, &fs.PathError{Op: "make subvolume", Path: parent.String() + "/" + name, Err: err}
	}
	made, err := parent.Open(name)
	if err != nil {
		return nil, err
	}
	if err := made.Chmod(0o700); err != nil {
		return nil, errors.Join(err, made.Close(), parent.RemoveDir(name))
	}
	return made, nil
}

func (*subvolumes) NewID(*dir.Dir, ID, func(ID) bool) (ID, error) { return 0, nil }

func (s *subvolumes) Limit(d *dir.Dir, id ID, l Limit) error {
	bytes, err := l.bytesOnDisk(d)
	if err != nil {
		return err
	}
	if l.Inodes != 0 {
		return fmt.Errorf("limit the inodes of %s: %w by btrfs", d, errors.ErrUnsupported)
	}
	own, err := s.ownID(d)
	if err != nil {
		return err
	}
	if id != 0 && id != own {
		return fmt.Errorf("limit %s as subvolume %d: %w: %d", d, id, ErrOtherID, own)
	}
	// Through the parent directory: the ioctl's own metadata is charged to the subvolume
	// that it is called on, which fails for one that is over its limit.
	above, err := dir.Open(d.HandlePath() + "/..")
	if err != nil {
		return err
	}
	if err := errors.Join(setLimit(above, own, bytes), above.Close()); err != nil {
		return fmt.Errorf("limit %s, subvolume %d, to %d bytes: %w", d, own, bytes, err)
	}
	return nil
}

func setLimit(d *dir.Dir, id ID, bytes int64) error {
	args := qgroupLimitArgs{ID: uint64(id), Flags: maxReferenced, MaxReferenced: uint64(bytes)}
	if bytes == 0 {
		args.Flags |= maxExclusive
		args.MaxReferenced, args.MaxExclusive = math.MaxUint64, math.MaxUint64 // removes the limits; 0 would forbid any write
	}
	return ioctl.Do(d, btrfsQgroupLimit, &args)
}

// ifThere ignores that a qgroup, or the tree of them, is not there.
func ifThere(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (s *subvolumes) ownID(d *dir.Dir) (ID, error) {
	id, err := s.IDOf(d)
	if err == nil && id == 0 {
		err = fmt.Errorf("%s is %w: not a subvolume", d, ErrPlain)
	}
	return id, err
}

func (s *subvolumes) Usage(d *dir.Dir, id ID) (Usage, error) {
	if id == 0 {
		own, err := s.ownID(d)
		if err != nil {
			return Usage{}, err
		}
		id = own
	}
	usage := Usage{Inodes: Unknown}
	info, err := searchItem(d, qgroupInfo, id)
	if errors.Is(err, fs.ErrNotExist) {
		return usage, nil
	}
	if err != nil {
		return Usage{}, err
	}
	usage.Bytes = info.referenced()
	usage.Shared = max(0, usage.Bytes-info.exclusive())
	limit, err := searchItem(d, qgroupLimit, id)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Usage{}, err
	}
	if limit.limitFlags()&maxReferenced != 0 {
		usage.Limit.Bytes = limit.limitReferenced()
	}
	return usage, nil
}

func (*subvolumes) Beside(fs *dir.Dir) (all Usage, err error) {
	for id := ID(0); ; id++ {
		found, err := search(fs, ioctl.SearchKey{
			Tree:    quotaTree,
			MinType: qgroupInfo, MaxType: qgroupInfo,
			MinOffset: uint64(id), MaxOffset: uint64(lastSubvolume),
		})
		if found == nil || err != nil {
			return all, ifThere(err)
		}
		info := item(found.Item)
		all.Bytes += max(info.referenced(), info.exclusive())
		all.Shared += max(0, info.referenced()-info.exclusive())
		id = ID(found.Header.Offset)
	}
}

// mostNested is how many subvolumes in one Outside counts.
const mostNested = 256

func (s *subvolumes) Outside(d *dir.Dir) (nested int, err error) {
	own, err := s.IDOf(d)
	if err != nil || own == 0 {
		return 0, err
	}
	for from := ID(0); nested < mostNested; nested++ {
		inside, err := neighbour(d, own, rootRef, from)
		if err != nil {
			return 0, fmt.Errorf("list the subvolumes in subvolume %d of %s: %w", own, d, err)
		}
		if inside == 0 {
			break
		}
		from = inside + 1
	}
	return nested, nil
}

func (*subvolumes) IDOf(d *dir.Dir) (ID, error) {
	inode, err := d.ID()
	if err != nil || inode.Ino != ioctl.SubvolumeRoot {
		return 0, err
	}
	args := lookupArgs{Object: ioctl.SubvolumeRoot}
	if err := ioctl.Do(d, btrfsInoLookup, &args); err != nil {
		return 0, fmt.Errorf("find the subvolume of %s: %w", d, err)
	}
	if ID(args.Tree) < firstSubvolume {
		return 0, nil // the top-level subvolume is not a volume
	}
	return ID(args.Tree), nil
}

func (s *subvolumes) Release(fs *dir.Dir, id ID) error {
	if id < firstSubvolume {
		return fmt.Errorf("release a subvolume on %s: %d is not a subvolume id", fs, id)
	}
	_, failed := s.release(fs, id)
	s.mu.Lock()
	dying := slices.Collect(maps.Keys(s.dying))
	s.mu.Unlock()
	for _, other := range dying {
		if other != id {
			_, err := s.release(fs, other)
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// release destroys the qgroup of a deleted subvolume, or remembers its id for later calls
// of Release. It reports whether the qgroup is gone.
func (s *subvolumes) release(fs *dir.Dir, id ID) (gone bool, err error) {
	gone, err = destroy(fs, id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if gone {
		delete(s.dying, id)
		return true, err
	}
	if s.dying == nil {
		s.dying = make(map[ID]bool)
	}
	s.dying[id] = true
	return false, err
}

// ReleaseUnused releases the qgroups of deleted subvolumes. Ids are never reused, but before
// Linux 6.10 the qgroups would stay for ever. It returns how many are gone; Release retries
// the others.
func (s *subvolumes) ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error) {
	for id := ID(firstSubvolume); ; id++ {
		var limit item
		id, limit, err = nextLimit(fs, id)
		if err != nil || id > lastSubvolume {
			return released, err
		}
		if taken(id) || limit.limitFlags()&maxReferenced == 0 {
			continue
		}
		alive, err := subvolumeExists(fs, id)
		if err != nil {
			return released, err
		}
		if alive {
			continue
		}
		gone, err := s.release(fs, id)
		if err != nil {
			return released, err
		}
		if gone {
			released++
		}
	}
}

// destroy removes a qgroup once its subvolume is fully cleaned up, and reports whether it
// is gone. Linux 6.10 and newer refuse it during the cleanup. After the cleanup, the qgroup
// keeps a usage until the next commit; destroying it before makes these kernels assume
// an inconsistency and stop accounting on the whole filesystem.
func destroy(d *dir.Dir, id ID) (gone bool, err error) {
	info, err := searchItem(d, qgroupInfo, id)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil || info.referenced() != 0 {
		return false, err
	}
	err = ioctl.Do(d, btrfsQgroupCreate, &qgroupCreateArgs{Create: 0, ID: uint64(id)})
	switch {
	case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTCONN): // ENOTCONN: quotas were disabled
		return true, nil
	case errors.Is(err, unix.EBUSY):
		return false, nil
	}
	return false, fmt.Errorf("destroy the qgroup of subvolume %d on %s: %w", id, d, err)
}

// An item is a record of the quota tree: struct btrfs_qgroup_status_item, _info_item
// or _limit_item of linux/btrfs_tree.h, all little-endian.
type item [64]byte

func (i item) number(n int) uint64 { return binary.LittleEndian.Uint64(i[8*n:]) }

func (i item) flags() uint64          { return i.number(2) }
func (i item) referenced() int64      { return int64(i.number(1)) }
func (i item) exclusive() int64       { return int64(i.number(3)) }
func (i item) limitFlags() uint64     { return i.number(0) }
func (i item) limitReferenced() int64 { return int64(i.number(1)) }

// searchItem reads one item of the quota tree. It returns fs.ErrNotExist if the item or the
// quota tree does not exist. It needs CAP_SYS_ADMIN.
func searchItem(d *dir.Dir, kind uint32, id ID) (item, error) {
	found, err := search(d, ioctl.SearchKey{
		Tree:    quotaTree,
		MinType: kind, MaxType: kind,
		MinOffset: uint64(id), MaxOffset: uint64(id),
	})
	if err == nil && found == nil {
		err = fs.ErrNotExist
	}
	if err != nil {
		return item{}, fmt.Errorf("read the quota tree of %s: record %d of %d: %w", d, kind, id, err)
	}
	return found.Item, nil
}

// nextLimit returns the first limit of a subvolume with at least the given id. There is none if the returned
// id is greater than the last.
func nextLimit(d *dir.Dir, from ID) (ID, item, error) {
	found, err := search(d, ioctl.SearchKey{
		Tree:    quotaTree,
		MinType: qgroupLimit, MaxType: qgroupLimit,
		MinOffset: uint64(from), MaxOffset: uint64(lastSubvolume),
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && found == nil { // quotas were disabled, or that was the last
		return lastSubvolume + 1, item{}, nil
	}
	if err != nil {
		return 0, item{}, fmt.Errorf("read the limits of %s: %w", d, err)
	}
	return ID(found.Header.Offset), found.Item, nil
}

// subvolumeExists reports whether a subvolume still has a name.
func subvolumeExists(d *dir.Dir, id ID) (bool, error) {
	found, err := search(d, ioctl.SearchKey{
		Tree:      rootTree,
		MinObject: uint64(id), MaxObject: uint64(id),
		MinType: rootBackref, MaxType: rootBackref,
		MaxOffset: math.MaxUint64,
	})
	if err != nil {
		return false, fmt.Errorf("find subvolume %d of %s: %w", id, d, err)
	}
	return found != nil, nil
}

// search returns the first item with such a key, or nil. Of one that is longer, as with a name, it has only the header.
func search(d *dir.Dir, key ioctl.SearchKey) (*searchArgs, error) {
	key.MaxTrans = math.MaxUint64
	key.Items = 1
	args := searchArgs{Key: key}
	args.Size = uint64(len(args.Item)) + searchHeaderSize
	if err := ioctl.Do(d, ioctl.Search, &args); err != nil && !errors.Is(err, unix.EOVERFLOW) {
		return nil, err
	}
	if args.Key.Items == 0 {
		return nil, nil
	}
	return &args, nil
}
