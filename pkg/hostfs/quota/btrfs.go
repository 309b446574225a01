package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// subvolumes keeps limits by the qgroup that btrfs makes for each subvolume, and
// limits what the subvolume references: every byte that can be read in it counts in
// full, also one that it shares with another by a reflink, so that its content never
// outgrows the limit when the other goes. (The other limit that a qgroup can have, on
// what is in no other subvolume, is overrun by just that. With simple quotas, Linux
// 6.7, what is shared counts for the subvolume that had it first, alone.)
type subvolumes struct {
	mu    sync.Mutex
	dying map[ID]bool // released before the kernel had cleared them away
}

// detectSubvolumes finds out whether quotas are on and right.
func detectSubvolumes(d *dir.Dir) (Facility, error) {
	status, err := searchItem(d, qgroupStatus, 0)
	if errors.Is(err, fs.ErrNotExist) || err == nil && status.flags()&statusOn == 0 {
		return nil, fmt.Errorf("%w: btrfs has them off: run btrfs quota enable %s", ErrNone, d)
	}
	if err == nil && status.flags()&statusInconsistent != 0 {
		err = counting(d)
	}
	if err != nil {
		return nil, err
	}
	return &subvolumes{}, nil
}

// counting answers ErrNone if the kernel has lost count and is not about to count
// anew, which it does after quotas were enabled, or when told: until then its numbers,
// by which it limits, may be wrong, and may stand still.
func counting(d *dir.Dir) error {
	var scan rescanArgs
	if err := ioctl(d, btrfsRescanStatus, &scan); err != nil {
		return fmt.Errorf("ask for the quota scan of %s: %w", d, err)
	}
	if scan.Running != 0 {
		return nil
	}
	// A scan that just ended has yet to write down that it did. This waits for no more.
	if err := ioctl[rescanArgs](d, btrfsRescanWait, nil); err != nil {
		return fmt.Errorf("wait for the quota scan of %s: %w", d, err)
	}
	status, err := searchItem(d, qgroupStatus, 0)
	if err == nil && status.flags()&statusInconsistent != 0 {
		err = fmt.Errorf("%w: btrfs has lost count of them: run btrfs quota rescan %s", ErrNone, d)
	}
	return err
}

func (*subvolumes) Kind() Kind { return Btrfs }

func (*subvolumes) Make(parent *dir.Dir, name string) (*dir.Dir, error) {
	// This is what checks the name: an ioctl takes whatever it gets.
	if _, err := parent.IsDir(name); err != nil {
		return nil, err
	}
	var args createArgs
	copy(args.Name[:len(args.Name)-1], name)
	if err := ioctl(parent, btrfsCreate, &args); err != nil {
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
	args := qgroupLimitArgs{ID: uint64(own), Flags: maxReferenced, MaxReferenced: uint64(bytes)}
	if bytes == 0 {
		args.MaxReferenced = math.MaxUint64 // takes the limit away; 0 would forbid everything
	}
	// By the directory above: what the call itself needs is charged to the subvolume
	// that it is made through, and one that is over its limit has nothing left.
	above, err := dir.Open(d.HandlePath() + "/..")
	if err != nil {
		return err
	}
	err = ioctl(above, btrfsQgroupLimit, &args)
	if err := errors.Join(err, above.Close()); err != nil {
		return fmt.Errorf("limit %s, subvolume %d, to %d bytes: %w", d, own, bytes, err)
	}
	return nil
}

func (s *subvolumes) ownID(d *dir.Dir) (ID, error) {
	id, err := s.IDOf(d)
	if err == nil && id == 0 {
		err = fmt.Errorf("%s is %w: it is no subvolume", d, ErrPlain)
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
	usage := Usage{Inodes: NotCounted}
	info, err := searchItem(d, qgroupInfo, id)
	if errors.Is(err, fs.ErrNotExist) {
		return usage, nil
	}
	if err != nil {
		return Usage{}, err
	}
	usage.Bytes = info.referenced()
	limit, err := searchItem(d, qgroupLimit, id)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Usage{}, err
	}
	if limit.limitFlags()&maxReferenced != 0 {
		usage.Limit.Bytes = limit.limitReferenced()
	}
	return usage, nil
}

func (*subvolumes) IDOf(d *dir.Dir) (ID, error) {
	inode, err := d.ID()
	if err != nil || inode.Ino != subvolumeRoot {
		return 0, err
	}
	args := lookupArgs{Object: subvolumeRoot}
	if err := ioctl(d, btrfsInoLookup, &args); err != nil {
		return 0, fmt.Errorf("find the subvolume of %s: %w", d, err)
	}
	if ID(args.Tree) < firstSubvolume {
		return 0, nil // the whole filesystem is nobody's volume
	}
	return ID(args.Tree), nil
}

func (s *subvolumes) Release(fs *dir.Dir, id ID) error {
	if id < firstSubvolume {
		return fmt.Errorf("release a subvolume on %s: id %d is not that of one", fs, id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, failed := s.release(fs, id)
	for other := range s.dying {
		if other != id {
			_, err := s.release(fs, other)
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// release destroys the qgroup of a subvolume that is gone, or keeps its id for later calls
// of Release, and tells whether it is gone too. The mutex is held.
func (s *subvolumes) release(fs *dir.Dir, id ID) (gone bool, err error) {
	gone, err = destroy(fs, id)
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

// ReleaseUnused finds the qgroups of subvolumes that are gone. No id is given again, but
// before Linux 6.10 they would stay for ever. It counts those that are gone: of the others
// Release keeps trying.
func (s *subvolumes) ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error) {
	for id := ID(firstSubvolume); ; id++ {
		var limit item
		id, limit, err = nextLimit(fs, id)
		if err != nil || id > lastSubvolume {
			return released, err
		}
		if limit.limitFlags()&maxReferenced == 0 || taken(id) {
			continue
		}
		alive, err := subvolumeExists(fs, id)
		if err != nil {
			return released, err
		}
		if alive {
			continue
		}
		s.mu.Lock()
		gone, err := s.release(fs, id)
		s.mu.Unlock()
		if err != nil {
			return released, err
		}
		if gone {
			released++
		}
	}
}

// destroy removes a qgroup once nothing is left of its subvolume, and tells whether it
// is gone. Linux 6.10 and newer refuse it while the subvolume is being cleared away,
// but take one with a use left, which it has until the commit after that, for a
// miscount, and stop counting on the whole filesystem.
func destroy(d *dir.Dir, id ID) (gone bool, err error) {
	info, err := searchItem(d, qgroupInfo, id)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil || info.referenced() != 0 {
		return false, err
	}
	err = ioctl(d, btrfsQgroupCreate, &qgroupCreateArgs{Create: 0, ID: uint64(id)})
	switch {
	case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTCONN): // ENOTCONN: quotas were switched off
		return true, nil
	case errors.Is(err, unix.EBUSY):
		return false, nil
	}
	return false, fmt.Errorf("destroy the qgroup of subvolume %d on %s: %w", id, d, err)
}

// An item is a record of the quota tree: struct btrfs_qgroup_status_item, _info_item
// or _limit_item of linux/btrfs_tree.h, all numbers of which are little-endian.
type item [64]byte

func (i item) number(n int) uint64 { return binary.LittleEndian.Uint64(i[8*n:]) }

func (i item) flags() uint64          { return i.number(2) }
func (i item) referenced() int64      { return int64(i.number(1)) }
func (i item) limitFlags() uint64     { return i.number(0) }
func (i item) limitReferenced() int64 { return int64(i.number(1)) }

// searchItem reads one record of the quota tree. It answers fs.ErrNotExist if there
// is none, or no quota tree. It needs CAP_SYS_ADMIN.
func searchItem(d *dir.Dir, kind uint32, id ID) (item, error) {
	found, err := search(d, searchKey{
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

// nextLimit is the first limit of an id from the given one on. There is none if the id
// that it answers is greater than lastSubvolume.
func nextLimit(d *dir.Dir, from ID) (ID, item, error) {
	found, err := search(d, searchKey{
		Tree:    quotaTree,
		MinType: qgroupLimit, MaxType: qgroupLimit,
		MinOffset: uint64(from), MaxOffset: uint64(lastSubvolume),
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && found == nil { // quotas were switched off, or that was the last
		return lastSubvolume + 1, item{}, nil
	}
	if err != nil {
		return 0, item{}, fmt.Errorf("read the limits of %s: %w", d, err)
	}
	return ID(found.Header.Offset), found.Item, nil
}

// subvolumeExists tells if a subvolume has a name still.
func subvolumeExists(d *dir.Dir, id ID) (bool, error) {
	found, err := search(d, searchKey{
		Tree:      rootTree,
		MinObject: uint64(id), MaxObject: uint64(id),
		MinType: rootBackref, MaxType: rootBackref,
		MaxOffset: math.MaxUint64,
	})
	if errors.Is(err, unix.EOVERFLOW) { // the name is long
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for subvolume %d of %s: %w", id, d, err)
	}
	return found != nil, nil
}

// search finds the first item with such a key; it is nil if there is none.
func search(d *dir.Dir, key searchKey) (*searchArgs, error) {
	key.MaxTrans = math.MaxUint64
	key.Items = 1
	args := searchArgs{Key: key}
	args.Size = uint64(len(args.Item)) + searchHeaderSize
	if err := ioctl(d, btrfsSearch, &args); err != nil {
		return nil, err
	}
	if args.Key.Items == 0 {
		return nil, nil
	}
	return &args, nil
}
