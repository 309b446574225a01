// Package ioctl makes the ioctl(2) calls on directories that golang.org/x/sys/unix lacks, and
// has the structures that several packages pass to them. A structure that only one package
// needs stays there.
package ioctl

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What a request's number is put together from, as in asm-generic/ioctl.h, which holds on
// amd64 and arm64: the direction, the size of the argument, and the group.
const (
	Write = 1 << 30
	Read  = 2 << 30
	Size  = 16 // bits to shift the size by
	Btrfs = 0x94 << 8
)

// FileAttr is struct fsxattr of linux/fs.h.
type FileAttr struct {
	Flags      uint32
	ExtSize    uint32
	Extents    uint32
	Project    uint32
	CowExtSize uint32
	_          [8]byte
}

var _ [28]byte = [unsafe.Sizeof(FileAttr{})]byte{} // another size would not compile

// Of linux/fs.h.
const (
	GetFileAttr = Read | unsafe.Sizeof(FileAttr{})<<Size | 'X'<<8 | 31  // FS_IOC_FSGETXATTR
	SetFileAttr = Write | unsafe.Sizeof(FileAttr{})<<Size | 'X'<<8 | 32 // FS_IOC_FSSETXATTR

	ProjectInherit = 0x200      // FS_XFLAG_PROJINHERIT
	CowExtentSize  = 0x10000    // FS_XFLAG_COWEXTSIZE: FileAttr.CowExtSize is meant
	HasAttr        = 0x80000000 // FS_XFLAG_HASATTR, which can only be read
)

// Among the flags of a file of btrfs: FS_NOCOW_FL and FS_COMPR_FL of linux/fs.h.
const (
	NoCopyOnWrite = 0x00800000
	Compressed    = 0x00000004
)

// SubvolumeRoot is the inode number of the root of every subvolume of btrfs, and of no other
// directory there (BTRFS_FIRST_FREE_OBJECTID of linux/btrfs_tree.h).
const SubvolumeRoot = 256

// Subvolume is struct btrfs_ioctl_vol_args_v2 of linux/btrfs.h.
type Subvolume struct {
	FD      int64
	TransID uint64
	Flags   uint64
	_       [4]uint64
	Name    [4040]byte // ends in NUL
}

// Named is struct btrfs_ioctl_vol_args of linux/btrfs.h.
type Named struct {
	FD   int64
	Name [4088]byte // ends in NUL
}

// Nested is struct btrfs_ioctl_get_subvol_rootref_args of linux/btrfs.h.
type Nested struct {
	From  uint64
	Refs  [255]struct{ Tree, Dir uint64 }
	Count uint8
	_     [7]byte
}

// Filesystem is struct btrfs_ioctl_fs_info_args of linux/btrfs.h.
type Filesystem struct {
	MaxID   uint64 // of a device
	Devices uint64
	UUID    [16]byte
	_       [16]byte
	// Flags say what is asked for, and then what was answered.
	Flags      uint64
	Generation uint64
	_          [960]byte
}

// WithGeneration asks for Filesystem.Generation (BTRFS_FS_INFO_FLAG_GENERATION).
const WithGeneration = 1 << 1

// SearchKey is struct btrfs_ioctl_search_key of linux/btrfs.h.
type SearchKey struct {
	Tree                 uint64 // 0 for that of the directory which is asked
	MinObject, MaxObject uint64
	MinOffset, MaxOffset uint64
	MinTrans, MaxTrans   uint64
	MinType, MaxType     uint32
	Items                uint32
	_                    uint32
	_                    [4]uint64
}

// SearchHeader is struct btrfs_ioctl_search_header of linux/btrfs.h.
type SearchHeader struct {
	TransID uint64
	Object  uint64
	Offset  uint64
	Type    uint32
	Len     uint32
}

// Extents is struct fiemap of linux/fiemap.h, with room for some extents.
type Extents struct {
	Start, Length  uint64
	Flags          uint32
	Mapped, Wanted uint32
	_              uint32
	Extents        [128]Extent
}

// Extent is struct fiemap_extent of linux/fiemap.h.
type Extent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	Flags                     uint32
	_                         [3]uint32
}

// Of linux/btrfs.h and linux/fs.h.
const (
	CreateSubvolume  = Write | unsafe.Sizeof(Subvolume{})<<Size | Btrfs | 24     // BTRFS_IOC_SUBVOL_CREATE_V2
	DestroySubvolume = Write | unsafe.Sizeof(Named{})<<Size | Btrfs | 15         // BTRFS_IOC_SNAP_DESTROY
	CreateSnapshot   = Write | unsafe.Sizeof(Subvolume{})<<Size | Btrfs | 23     // BTRFS_IOC_SNAP_CREATE_V2
	GetNested        = Read | Write | unsafe.Sizeof(Nested{})<<Size | Btrfs | 61 // BTRFS_IOC_GET_SUBVOL_ROOTREF, Linux 4.18
	GetFilesystem    = Read | unsafe.Sizeof(Filesystem{})<<Size | Btrfs | 31     // BTRFS_IOC_FS_INFO
	GetExtents       = Read | Write | extentsHead<<Size | 'f'<<8 | 11            // FS_IOC_FIEMAP

	// Search is BTRFS_IOC_TREE_SEARCH_V2. Its argument is the key, the size of the buffer, and that, which is not counted.
	Search = Read | Write | (unsafe.Sizeof(SearchKey{})+8)<<Size | Btrfs | 17

	extentsHead = unsafe.Sizeof(Extents{}) - unsafe.Sizeof(Extents{}.Extents)
)

// Another size would not compile.
var (
	_ [4096]byte = [unsafe.Sizeof(Subvolume{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(Named{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(Nested{})]byte{}
	_ [104]byte  = [unsafe.Sizeof(SearchKey{})]byte{}
	_ [32]byte   = [unsafe.Sizeof(SearchHeader{})]byte{}
	_ [1024]byte = [unsafe.Sizeof(Filesystem{})]byte{}
	_ [32]byte   = [extentsHead]byte{}
	_ [56]byte   = [unsafe.Sizeof(Extent{})]byte{}
)

// A File is an open file as a Directory.
type File struct{ *os.File }

// ReadFd is its descriptor.
func (f File) ReadFd() (int, error) { return int(f.Fd()), nil }

// A Directory has a descriptor to read with. The one for paths (O_PATH) takes no ioctl(2).
type Directory interface{ ReadFd() (int, error) }

// Do makes a request, whose argument is at arg.
func Do[T any](d Directory, request uintptr, arg *T) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
