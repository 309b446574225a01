package quota

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Commands of quotactl(2): linux/quota.h and, for those that begin with X and
// work on every filesystem, linux/dqblk_xfs.h.
const (
	prjQuota = 2 // PRJQUOTA

	qGetFmt    = 0x800004     // Q_GETFMT
	qXGetQuota = 'X'<<8 | 0x3 // Q_XGETQUOTA
	qXSetQLim  = 'X'<<8 | 0x4 // Q_XSETQLIM
	qXGetQStat = 'X'<<8 | 0x8 // Q_XGETQSTATV
	qXGetNext  = 'X'<<8 | 0x9 // Q_XGETNEXTQUOTA
)

// diskQuota is struct fs_disk_quota of linux/dqblk_xfs.h. Blocks are of 512 bytes.
type diskQuota struct {
	Version    int8
	Flags      int8
	FieldMask  uint16
	ID         uint32
	BlockHard  uint64
	BlockSoft  uint64
	InodeHard  uint64
	InodeSoft  uint64
	Blocks     uint64
	Inodes     uint64
	InodeTimer int32
	BlockTimer int32
	InodeWarns uint16
	BlockWarns uint16
	_          [4]int8
	RTHard     uint64
	RTSoft     uint64
	RTBlocks   uint64
	RTTimer    int32
	RTWarns    uint16
	_          int16
	_          [8]byte
}

func (q diskQuota) limited() bool { return q.BlockHard|q.BlockSoft|q.InodeHard|q.InodeSoft != 0 }

// unused tells of a limit that nothing is counted by: a directory that carries an id
// counts as one inode at least.
func (q diskQuota) unused() bool { return q.limited() && q.Blocks|q.Inodes == 0 }

const (
	diskQuotaVersion = 1   // FS_DQUOT_VERSION
	projectQuota     = 2   // FS_PROJ_QUOTA
	hardAndSoft      = 0xf // FS_DQ_ISOFT, FS_DQ_IHARD, FS_DQ_BSOFT, FS_DQ_BHARD
	quotaBlock       = 512
)

// quotaState is struct fs_quota_statv of linux/dqblk_xfs.h.
type quotaState struct {
	Version int8
	_       uint8
	Flags   uint16
	_       uint32
	_       [19]uint64
}

const (
	quotaStateVersion = 1    // FS_QSTATV_VERSION1
	projectAccounting = 0x10 // FS_QUOTA_PDQ_ACCT
	projectEnforced   = 0x20 // FS_QUOTA_PDQ_ENFD
)

// fileAttr is struct fsxattr of linux/fs.h.
type fileAttr struct {
	Flags      uint32
	ExtSize    uint32
	Extents    uint32
	Project    uint32
	CowExtSize uint32
	_          [8]byte
}

const (
	projectInherit = 0x200      // FS_XFLAG_PROJINHERIT
	hasAttr        = 0x80000000 // FS_XFLAG_HASATTR, which can only be read
)

// createArgs is struct btrfs_ioctl_vol_args_v2 of linux/btrfs.h.
type createArgs struct {
	FD      int64
	TransID uint64
	Flags   uint64
	_       [4]uint64
	Name    [4040]byte // ends in NUL
}

// lookupArgs is struct btrfs_ioctl_ino_lookup_args of linux/btrfs.h.
type lookupArgs struct {
	Tree   uint64
	Object uint64
	_      [4080]byte
}

// qgroupLimitArgs is struct btrfs_ioctl_qgroup_limit_args of linux/btrfs.h.
type qgroupLimitArgs struct {
	ID            uint64
	Flags         uint64
	MaxReferenced uint64
	MaxExclusive  uint64
	_             [2]uint64
}

// qgroupCreateArgs is struct btrfs_ioctl_qgroup_create_args of linux/btrfs.h.
type qgroupCreateArgs struct {
	Create uint64
	ID     uint64
}

// rescanArgs is struct btrfs_ioctl_quota_rescan_args of linux/btrfs.h.
type rescanArgs struct {
	Running uint64
	_       [7]uint64
}

// searchKey is struct btrfs_ioctl_search_key of linux/btrfs.h.
type searchKey struct {
	Tree                 uint64
	MinObject, MaxObject uint64
	MinOffset, MaxOffset uint64
	MinTrans, MaxTrans   uint64
	MinType, MaxType     uint32
	Items                uint32
	_                    uint32
	_                    [4]uint64
}

// searchArgs is struct btrfs_ioctl_search_args_v2 of linux/btrfs.h with a buffer that
// has room for one of the items that are looked for here.
type searchArgs struct {
	Key    searchKey
	Size   uint64 // of what follows
	Header searchHeader
	Item   [64]byte
}

// searchHeader is struct btrfs_ioctl_search_header of linux/btrfs.h.
type searchHeader struct {
	TransID uint64
	Object  uint64
	Offset  uint64
	Type    uint32
	Len     uint32
}

// What linux/btrfs_tree.h calls BTRFS_FIRST_FREE_OBJECTID, BTRFS_ROOT_TREE_OBJECTID,
// BTRFS_ROOT_BACKREF_KEY, BTRFS_QUOTA_TREE_OBJECTID, BTRFS_QGROUP_STATUS_KEY, _INFO_KEY,
// _LIMIT_KEY, BTRFS_QGROUP_STATUS_FLAG_ON and _INCONSISTENT, and linux/btrfs.h
// BTRFS_QGROUP_LIMIT_MAX_RFER.
const (
	subvolumeRoot      = 256           // the inode number of a subvolume's root
	firstSubvolume     = 256           // the lowest id of one
	lastSubvolume      = ID(1)<<48 - 1 // above that are the qgroups that people make
	rootTree           = 1
	rootBackref        = 144
	quotaTree          = 8
	qgroupStatus       = 240
	qgroupInfo         = 242
	qgroupLimit        = 244
	statusOn           = 1
	statusInconsistent = 4
	maxReferenced      = 1
)

// Numbers of ioctl(2), put together as in asm-generic/ioctl.h, which holds on amd64
// and arm64.
const (
	iocWrite = 1 << 30
	iocRead  = 2 << 30

	fsGetXattr = iocRead | unsafe.Sizeof(fileAttr{})<<16 | 'X'<<8 | 31  // FS_IOC_FSGETXATTR
	fsSetXattr = iocWrite | unsafe.Sizeof(fileAttr{})<<16 | 'X'<<8 | 32 // FS_IOC_FSSETXATTR

	btrfsMagic        = 0x94 << 8
	btrfsInoLookup    = iocRead | iocWrite | unsafe.Sizeof(lookupArgs{})<<16 | btrfsMagic | 18 // BTRFS_IOC_INO_LOOKUP
	btrfsCreate       = iocWrite | unsafe.Sizeof(createArgs{})<<16 | btrfsMagic | 24           // BTRFS_IOC_SUBVOL_CREATE_V2
	btrfsSearch       = iocRead | iocWrite | searchArgsSize<<16 | btrfsMagic | 17              // BTRFS_IOC_TREE_SEARCH_V2
	btrfsQgroupCreate = iocWrite | unsafe.Sizeof(qgroupCreateArgs{})<<16 | btrfsMagic | 42     // BTRFS_IOC_QGROUP_CREATE
	btrfsQgroupLimit  = iocRead | unsafe.Sizeof(qgroupLimitArgs{})<<16 | btrfsMagic | 43       // BTRFS_IOC_QGROUP_LIMIT
	btrfsRescanStatus = iocRead | unsafe.Sizeof(rescanArgs{})<<16 | btrfsMagic | 45            // BTRFS_IOC_QUOTA_RESCAN_STATUS
	btrfsRescanWait   = btrfsMagic | 46                                                        // BTRFS_IOC_QUOTA_RESCAN_WAIT

	searchArgsSize   = unsafe.Offsetof(searchArgs{}.Header) // the buffer is not counted
	searchHeaderSize = uint64(unsafe.Sizeof(searchHeader{}))
)

// The sizes that the headers give; another would not compile.
var (
	_ [112]byte  = [unsafe.Sizeof(diskQuota{})]byte{}
	_ [160]byte  = [unsafe.Sizeof(quotaState{})]byte{}
	_ [28]byte   = [unsafe.Sizeof(fileAttr{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(createArgs{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(lookupArgs{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(qgroupLimitArgs{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(rescanArgs{})]byte{}
	_ [104]byte  = [unsafe.Sizeof(searchKey{})]byte{}
	_ [112]byte  = [searchArgsSize]byte{}
	_ [32]byte   = [unsafe.Sizeof(searchHeader{})]byte{}
)

// ioctl passes arg, a pointer to one of the structures above.
func ioctl[T any](d *dir.Dir, request uintptr, arg *T) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg)))
	if errno != 0 {
		return errno
	}
	return nil
}
