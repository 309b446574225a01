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
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// subvolumes enforces limits with the qgroup that btrfs creates for each subvolume. It
// limits the referenced bytes: every byte readable in the subvolume counts in full, even if
// a reflink shares it with another subvolume, so the content cannot exceed the limit when
// the other is deleted. (A limit on exclusive bytes would be exceeded by that. With simple
// quotas, Linux 6.7, shared bytes count only for the subvolume that wrote them first.)
//
// With simple quotas the limit is that of a group of level 1 for each subvolume: a subvolume
// that a pod makes in it is in its groups from the beginning (qgroup_auto_inherit in
// fs/btrfs/qgroup.c), so that it counts and is limited too, unless the pod chooses others.
type subvolumes struct {
	simple bool

	mu    sync.Mutex  // held across no system call
	dying map[ID]bool // released, but not yet cleaned up by the kernel
}

// detectSubvolumes checks that quotas are enabled and consistent.
func detectSubvolumes(d *dir.Dir) (Facility, error) {
	status, err := searchItem(d, qgroupStatus, 0)
	if errors.Is(err, fs.ErrNotExist) || err == nil && status.flags()&statusOn == 0 {
		return nil, fmt.Errorf("%w: disabled on btrfs: run btrfs quota enable %s", ErrNone, d)
	}
	if err == nil && status.flags()&statusInconsistent != 0 {
		err = counting(d)
	}
	if err != nil {
		return nil, err
	}
	return &subvolumes{simple: status.flags()&statusSimple != 0}, nil
}

// counting returns ErrNone if the kernel's accounting is inconsistent and no rescan is
// running. Until a rescan, the numbers that the limits are enforced by may be wrong or not
// updated. A rescan runs after quotas are enabled, or on request.
func counting(d *dir.Dir) error {
	if running, err := rescanning(d); running || err != nil {
		return err
	}
	// A rescan that has just ended may not have stored its result yet. This waits only for that.
	if err := ioctl.Do[rescanArgs](d, btrfsRescanWait, nil); err != nil {
		return fmt.Errorf("wait for the quota rescan of %s: %w", d, err)
	}
	status, err := searchItem(d, qgroupStatus, 0)
	if err == nil && status.flags()&statusInconsistent != 0 {
		err = fmt.Errorf("%w: btrfs quota accounting is inconsistent: run btrfs quota rescan %s", ErrNone, d)
	}
	return err
}

func rescanning(d *dir.Dir) (bool, error) {
	var scan rescanArgs
	if err := ioctl.Do(d, btrfsRescanStatus, &scan); err != nil {
		return false, fmt.Errorf("read the quota rescan status of %s: %w", d, err)
	}
	return scan.Running != 0, nil
}

// Settled reports whether all that is on the filesystem of d is counted: not while btrfs counts it anew, has to, or has quotas disabled, when
// usage is too low.
func Settled(d *dir.Dir) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return false, fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if uint32(st.Type) != unix.BTRFS_SUPER_MAGIC {
		return true, nil
	}
	status, err := searchItem(d, qgroupStatus, 0)
	if err != nil || status.flags()&statusOn == 0 {
		return false, ifThere(err)
	}
	running, err := rescanning(d)
	if err == nil && !running && status.flags()&statusInconsistent != 0 {
		err = counting(d)
	}
	if errors.Is(err, ErrNone) {
		return false, nil
	}
	return err == nil && !running, err
}

func (*subvolumes) Kind() Kind { return Btrfs }

func (s *subvolumes) Simple() bool { return s.simple }

func (s *subvolumes) Make(parent *dir.Dir, name string) (*dir.Dir, error) {
	// This validates the name: the ioctl does not.
	if _, err := parent.IsDir(name); err != nil {
		return nil, err
	}
	var args ioctl.Subvolume
	copy(args.Name[:len(args.Name)-1], name)
	if s.simple { // or it would be in the groups of the subvolume around it, and those may have a limit
		args.Flags, args.Groups = ioctl.WithGroups, new(ioctl.Groups)
		args.Size = uint64(unsafe.Sizeof(*args.Groups))
	}
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
	err = s.limit(above, own, bytes)
	if err == nil && bytes > 0 {
		err = errors.Join(s.putOut(above, own), s.takeIn(above, own))
	}
	if err := errors.Join(err, above.Close()); err != nil {
		return fmt.Errorf("limit %s, subvolume %d, to %d bytes: %w", d, own, bytes, err)
	}
	return nil
}

// takeIn puts subvolumes into the groups of the one that they are in, and into no others: those that were made before that had a group,
// and those whose user chose others. What they hold counts at once, also if it is beyond the limit.
func (s *subvolumes) takeIn(d *dir.Dir, own ID) error {
	wanted, err := s.limitedBy(d, own)
	if err != nil || wanted == nil {
		return err
	}
	outside, err := s.outside(d, own)
	if err != nil {
		return err
	}
	for _, nested := range outside {
		has, err := groupsOf(d, nested)
		if err != nil {
			return err
		}
		for _, group := range slices.Concat(has, wanted) {
			args := qgroupAssignArgs{From: uint64(nested), To: uint64(group)}
			if slices.Contains(wanted, group) {
				args.Assign = 1
			}
			err := ioctl.Do(d, btrfsQgroupAssign, &args)
			if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOENT) { // ENOENT: removed meanwhile
				return fmt.Errorf("take subvolume %d into the groups of subvolume %d: %w", nested, own, err)
			}
		}
	}
	return nil
}

// putOut takes out of the group of a subvolume what is not in that, also what has no name any more: it may have been in another volume, and
// counts until the last file that shares its blocks is gone. What users go on putting in is left for the next time.
func (s *subvolumes) putOut(d *dir.Dir, own ID) error {
	group, grouped := s.group(own)
	if !grouped {
		return nil
	}
	for range mostNested {
		out, _, err := intruders(d, own, group)
		if len(out) == 0 || err != nil {
			return err
		}
		for _, id := range out {
			if err := freed(ioctl.Do(d, btrfsQgroupAssign, &qgroupAssignArgs{From: uint64(id), To: uint64(group)})); err != nil {
				return fmt.Errorf("take subvolume %d out of the group of subvolume %d: %w", id, own, err)
			}
		}
	}
	return nil
}

// intruders are the subvolumes in the group of one that do not lie in it. It reports whether these are all: the members of a group are asked
// up to one more than mostNested.
func intruders(d *dir.Dir, own, group ID) (out []ID, all bool, err error) {
	members, err := offsets(d, quotaTree, group, qgroupRelation)
	if ifThere(err) != nil {
		return nil, false, fmt.Errorf("read what is in the group of subvolume %d on %s: %w", own, d, err)
	}
	for _, id := range members {
		if id > lastSubvolume { // a group that an administrator has put this one into
			return out, true, nil
		}
		inside, err := liesIn(d, id, own)
		if err != nil {
			return nil, false, err
		}
		if !inside {
			out = append(out, id)
		}
	}
	return out, len(members) <= mostNested, nil
}

// liesIn reports whether a subvolume is another one, or lies in that, no more than mostNested deep.
func liesIn(d *dir.Dir, id, in ID) (bool, error) {
	for range mostNested {
		if id == in {
			return true, nil
		}
		above, err := offsets(d, rootTree, id, rootBackref)
		if err != nil {
			return false, fmt.Errorf("find subvolume %d of %s: %w", id, d, err)
		}
		if len(above) == 0 {
			return false, nil
		}
		id = above[0]
	}
	return false, nil
}

// intruded is what intruders may have of so much that is counted for a group, in bytes.
func intruded(d *dir.Dir, own, group ID, counted int64) (bytes int64, err error) {
	out, all, err := intruders(d, own, group)
	if err != nil {
		return 0, err
	}
	if !all {
		info, err := searchItem(d, qgroupInfo, own)
		return max(0, counted-info.referenced()), ifThere(err)
	}
	for _, id := range out {
		info, err := searchItem(d, qgroupInfo, id)
		if ifThere(err) != nil {
			return 0, err
		}
		bytes += info.referenced()
	}
	return min(bytes, counted), nil
}

// limit sets the limit of a subvolume, or of its group.
func (s *subvolumes) limit(above *dir.Dir, own ID, bytes int64) error {
	group, grouped := s.group(own)
	if !grouped {
		return setLimit(above, own, bytes)
	}
	if bytes == 0 {
		// That of the subvolume itself is from before simple quotas were known.
		return errors.Join(ifThere(setLimit(above, group, 0)), ifThere(setLimit(above, own, 0)))
	}
	if err := makeGroup(above, own, group); err != nil {
		return err
	}
	if err := setLimit(above, group, bytes); err != nil {
		return err
	}
	before, err := searchItem(above, qgroupLimit, own)
	if err != nil || before.limitFlags()&maxReferenced == 0 {
		return ifThere(err)
	}
	return setLimit(above, own, 0)
}

func setLimit(d *dir.Dir, id ID, bytes int64) error {
	args := qgroupLimitArgs{ID: uint64(id), Flags: maxReferenced, MaxReferenced: uint64(bytes)}
	if bytes == 0 {
		args.Flags |= maxExclusive
		args.MaxReferenced, args.MaxExclusive = math.MaxUint64, math.MaxUint64 // removes the limits; 0 would forbid any write
	}
	return ioctl.Do(d, btrfsQgroupLimit, &args)
}

func (s *subvolumes) Free(in, d *dir.Dir) error {
	id, err := s.IDOf(d)
	if err != nil || id == 0 {
		return err
	}
	err = freed(setLimit(in, id, 0))
	if err == nil && s.simple { // ordinary quotas would be inconsistent if it left a group
		err = leaveLimited(in, id)
	}
	if err != nil {
		return fmt.Errorf("take the limits off subvolume %d in %s: %w", id, in, err)
	}
	return nil
}

// leaveLimited takes a subvolume out of all groups that have a limit.
func leaveLimited(d *dir.Dir, id ID) error {
	key := ioctl.SearchKey{
		Tree:      quotaTree,
		MinObject: uint64(id), MaxObject: uint64(id),
		MinType: qgroupRelation, MaxType: qgroupRelation,
		MaxOffset: math.MaxUint64,
	}
	for {
		found, err := search(d, key)
		if found == nil || err != nil {
			return ifThere(err)
		}
		group := ID(found.Header.Offset)
		limit, err := searchItem(d, qgroupLimit, group)
		if err == nil && limit.limitFlags() != 0 {
			err = freed(ioctl.Do(d, btrfsQgroupAssign, &qgroupAssignArgs{From: uint64(id), To: uint64(group)}))
		}
		if ifThere(err) != nil {
			return err
		}
		key.MinOffset = uint64(group) + 1
	}
}

// freed ignores that there is no qgroup, or that quotas were disabled.
func freed(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTCONN) {
		return nil
	}
	return err
}

// makeGroup makes the group of a subvolume, and puts the subvolume into it.
func makeGroup(d *dir.Dir, own, group ID) error {
	err := ioctl.Do(d, btrfsQgroupCreate, &qgroupCreateArgs{Create: 1, ID: uint64(group)})
	if err == nil || errors.Is(err, unix.EEXIST) {
		err = ioctl.Do(d, btrfsQgroupAssign, &qgroupAssignArgs{Assign: 1, From: uint64(own), To: uint64(group)})
	}
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// ifThere ignores that a qgroup, or the tree of them, is not there.
func ifThere(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// groups begins the ids of the groups: level 1, and "HP" in the upper bytes of what is left,
// far above the ids that administrators use. The rest is the subvolume's id.
const (
	groups      = ID(1)<<48 | 0x4850<<32
	mostGrouped = ID(1)<<32 - 1
)

// group is the qgroup that has the limit of a subvolume, where that is not its own.
func (s *subvolumes) group(own ID) (ID, bool) {
	return groups | own, s.simple && own <= mostGrouped
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
	counted := id
	info, err := searchItem(d, qgroupInfo, id)
	if group, grouped := s.group(id); grouped {
		// The limit of a subvolume without its group does not hold for those in it.
		counted = group
		all, groupErr := searchItem(d, qgroupInfo, group)
		if groupErr == nil {
			info, err = all, nil
			usage.Intruded, groupErr = intruded(d, id, group, all.referenced())
		}
		if ifThere(groupErr) != nil {
			return Usage{}, groupErr
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return usage, nil
	}
	if err != nil {
		return Usage{}, err
	}
	usage.Bytes = info.referenced()
	if !s.simple { // they count each block for one subvolume
		usage.Shared = max(0, usage.Bytes-info.exclusive())
	}
	limit, err := searchItem(d, qgroupLimit, counted)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Usage{}, err
	}
	if limit.limitFlags()&maxReferenced != 0 {
		usage.Limit.Bytes = limit.limitReferenced()
	}
	return usage, nil
}

// Beside is what each subvolume alone has. Simple quotas count no block twice.
func (s *subvolumes) Beside(fs *dir.Dir) (bytes int64, err error) {
	for id := ID(0); !s.simple; id++ {
		found, err := search(fs, ioctl.SearchKey{
			Tree:    quotaTree,
			MinType: qgroupInfo, MaxType: qgroupInfo,
			MinOffset: uint64(id), MaxOffset: uint64(lastSubvolume),
		})
		if found == nil || err != nil {
			return bytes, ifThere(err)
		}
		bytes += item(found.Item).exclusive()
		id = ID(found.Header.Offset)
	}
	return 0, nil
}

func (s *subvolumes) Outside(d *dir.Dir) (int, error) {
	own, err := s.IDOf(d)
	if err != nil || own == 0 {
		return 0, err
	}
	outside, err := s.outside(d, own)
	return len(outside), err
}

// mostNested is how many subvolumes in one are asked for their groups.
const mostNested = 255

// outside are the subvolumes in one that its limit does not hold for: all that lie directly in it, or, where it has a group, those at
// whatever depth that are not in just the groups that it is in. A process that makes a subvolume needs no privilege to choose them
// (BTRFS_SUBVOL_QGROUP_INHERIT): none, or that of another volume. Of more than mostNested the others count as outside.
func (s *subvolumes) outside(d *dir.Dir, own ID) (outside []ID, err error) {
	groups, err := s.limitedBy(d, own)
	if err != nil {
		return nil, err
	}
	in := []ID{own}
	for i := 0; i < len(in) && len(outside) <= mostNested; i++ {
		nested, err := offsets(d, rootTree, in[i], rootRef)
		if err != nil {
			return nil, fmt.Errorf("list the subvolumes in subvolume %d of %s: %w", in[i], d, err)
		}
		for _, id := range nested {
			if groups == nil || len(in) > mostNested {
				outside = append(outside, id)
				continue
			}
			in = append(in, id)
			has, err := groupsOf(d, id)
			if err != nil {
				return nil, err
			}
			if !slices.Equal(has, groups) {
				outside = append(outside, id)
			}
		}
	}
	return outside, nil
}

// limitedBy are the groups of a subvolume if the limit is that of one of them.
func (s *subvolumes) limitedBy(d *dir.Dir, own ID) ([]ID, error) {
	group, grouped := s.group(own)
	if !grouped {
		return nil, nil
	}
	groups, err := groupsOf(d, own)
	if !slices.Contains(groups, group) {
		return nil, err
	}
	return groups, err
}

// groupsOf are the groups that a subvolume is in.
func groupsOf(d *dir.Dir, id ID) ([]ID, error) {
	groups, err := offsets(d, quotaTree, id, qgroupRelation)
	if err = ifThere(err); err != nil { // there are none once quotas were disabled
		err = fmt.Errorf("read the groups of subvolume %d on %s: %w", id, d, err)
	}
	return groups, err
}

// offsets are those of the items of a kind that an object of a tree has, in their order; at most one more than mostNested.
func offsets(d *dir.Dir, tree uint64, of ID, kind uint32) (all []ID, err error) {
	key := ioctl.SearchKey{
		Tree:      tree,
		MinObject: uint64(of), MaxObject: uint64(of),
		MinType: kind, MaxType: kind,
		MaxOffset: math.MaxUint64,
	}
	for len(all) <= mostNested {
		found, err := search(d, key)
		if found == nil || err != nil {
			return all, err
		}
		all = append(all, ID(found.Header.Offset))
		key.MinOffset = found.Header.Offset + 1
	}
	return all, nil
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
	if group, grouped := s.group(id); grouped && gone && err == nil {
		gone, err = destroy(fs, group)
	}
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
	released, err = s.releaseUnused(fs, 0, taken)
	if err != nil || !s.simple {
		return released, err
	}
	more, err := s.releaseUnused(fs, groups, taken)
	return released + more, err
}

// releaseUnused releases those whose limits are of qgroups from an id on: their own, or their
// groups.
func (s *subvolumes) releaseUnused(fs *dir.Dir, base ID, taken func(ID) bool) (released int, err error) {
	last := lastSubvolume
	if base != 0 {
		last = base | mostGrouped
	}
	for at := base | firstSubvolume; ; at++ {
		var limit item
		at, limit, err = nextLimit(fs, at, last)
		if err != nil || at > last {
			return released, err
		}
		id := at &^ base
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

// nextLimit returns the first limit with at least the given id. There is none if the returned
// id is greater than the last.
func nextLimit(d *dir.Dir, from, last ID) (ID, item, error) {
	found, err := search(d, ioctl.SearchKey{
		Tree:    quotaTree,
		MinType: qgroupLimit, MaxType: qgroupLimit,
		MinOffset: uint64(from), MaxOffset: uint64(last),
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && found == nil { // quotas were disabled, or that was the last
		return last + 1, item{}, nil
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
