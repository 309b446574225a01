package clone

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Subvolume makes a writable snapshot of the btrfs subvolume src under a name in to. All
// that was synced before is in it; of what was written since, some may be and some not, as
// after a power cut. Subvolumes below src are empty directories in it: see [Nested]. It
// returns ErrNotSupported if src is no subvolume, and fs.ErrExist if the name is taken.
func Subvolume(src, to *dir.Dir, name string) error {
	args := ioctl.Subvolume{}
	if len(name) >= len(args.Name) {
		return &fs.PathError{Op: "snapshot", Path: name, Err: unix.ENAMETOOLONG}
	}
	fd, err := src.ReadFd()
	if err != nil {
		return err
	}
	args.FD = int64(fd)
	copy(args.Name[:], name)
	err = ioctl.Do(to, ioctl.CreateSnapshot, &args)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EXDEV):
		return fmt.Errorf("snapshot %s: %w: %w", src, ErrNotSupported, err)
	}
	return &fs.PathError{Op: "snapshot", Path: src.String() + " to " + to.String() + "/" + name, Err: err}
}

// Nested counts the subvolumes that lie directly in the subvolume d, at whatever depth of
// directories, at most 255 of them. It returns ErrNotSupported if d is no subvolume
// (Linux 4.18).
func Nested(d *dir.Dir) (int, error) {
	args := ioctl.Nested{}
	// Of a directory in a subvolume it would list those of that.
	st, err := statSelf(d)
	if err == nil && st.Ino != ioctl.SubvolumeRoot {
		err = unix.EINVAL
	}
	if err == nil {
		err = ioctl.Do(d, ioctl.GetNested, &args)
	}
	switch {
	case err == nil, errors.Is(err, unix.EOVERFLOW):
		return int(args.Count), nil
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return 0, fmt.Errorf("list the subvolumes in %s: %w: %w", d, ErrNotSupported, err)
	}
	return 0, &fs.PathError{Op: "list the subvolumes in", Path: d.String(), Err: err}
}

// ErrNested reports a subvolume with another inside, which is an empty directory in a snapshot.
var ErrNested = errors.New("a subvolume has another inside")

// Whole is Subvolume for all of a tree. It returns ErrNested if another subvolume was inside at the moment of the snapshot,
// which is there then, also if that subvolume came after a look for such, and has gone since. It needs CAP_SYS_ADMIN.
func Whole(src, to *dir.Dir, name string) error {
	since, err := generation(src)
	if err != nil {
		return err
	}
	inside, err := Nested(src)
	if err != nil {
		return err
	}
	if inside > 0 {
		return fmt.Errorf("snapshot %s: %w", src, ErrNested)
	}
	if err := Subvolume(src, to, name); err != nil {
		return err
	}
	snapshot, err := to.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = snapshot.Close() }() // opened for reading
	nested, err := namesSubvolume(snapshot, since)
	if err == nil && nested {
		err = fmt.Errorf("snapshot %s: %w", src, ErrNested)
	}
	return err
}

// generation is a number that each block of a tree which is written from now on has, or a larger one.
func generation(d *dir.Dir) (uint64, error) {
	info := ioctl.Filesystem{Flags: ioctl.WithGeneration}
	if err := ioctl.Do(d, ioctl.GetFilesystem, &info); err != nil {
		return 0, &fs.PathError{Op: "ask for the btrfs of", Path: d.String(), Err: err}
	}
	if info.Flags&ioctl.WithGeneration == 0 {
		return 0, nil
	}
	return info.Generation, nil
}

// Of linux/btrfs_tree.h: BTRFS_DIR_INDEX_KEY is what lists a directory, and BTRFS_ROOT_ITEM_KEY what an entry leads to that
// is a subvolume. In a snapshot it leads there still, and shows as an empty directory.
const (
	dirIndex = 96
	rootItem = 132

	// typeInEntry is where struct btrfs_dir_item has that: in a struct btrfs_disk_key, after an object id.
	typeInEntry = 8

	searchHead = 32
)

// namesSubvolume reports whether an entry of the tree of d, which does not change, leads to a subvolume. It reads those blocks
// of the tree that have a generation or a later one: a pod writes few of them while a snapshot is made.
func namesSubvolume(d *dir.Dir, since uint64) (bool, error) {
	var args struct {
		Key    ioctl.SearchKey
		Size   uint64
		Buffer [128 << 10]byte // no item is larger than a block of 64 KiB
	}
	args.Key = ioctl.SearchKey{MaxObject: math.MaxUint64, MaxOffset: math.MaxUint64, MinTrans: since, MaxTrans: math.MaxUint64, MaxType: math.MaxUint8}
	args.Size = uint64(len(args.Buffer))
	for {
		args.Key.Items = math.MaxUint32
		if err := ioctl.Do(d, ioctl.Search, &args); err != nil {
			return false, &fs.PathError{Op: "search the tree of", Path: d.String(), Err: err}
		}
		if args.Key.Items == 0 {
			return false, nil
		}
		rest := args.Buffer[:]
		var last ioctl.SearchHeader
		for range args.Key.Items {
			last = ioctl.SearchHeader{
				Object: binary.NativeEndian.Uint64(rest[8:]), Offset: binary.NativeEndian.Uint64(rest[16:]),
				Type: binary.NativeEndian.Uint32(rest[24:]), Len: binary.NativeEndian.Uint32(rest[28:]),
			}
			item := rest[searchHead:][:last.Len]
			if last.Type == dirIndex && item[typeInEntry] == rootItem {
				return true, nil
			}
			rest = rest[searchHead+len(item):]
		}
		if !goAfter(&args.Key, last) {
			return false, nil
		}
	}
}

// goAfter has a search go on after an item: items are in the order of object, type and offset.
func goAfter(key *ioctl.SearchKey, last ioctl.SearchHeader) (more bool) {
	key.MinObject, key.MinType, key.MinOffset = last.Object, last.Type, last.Offset+1
	if key.MinOffset == 0 {
		key.MinType++
	}
	if key.MinType > key.MaxType {
		key.MinType = 0
		key.MinObject++
	}
	return key.MinObject > 0
}
