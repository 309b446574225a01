package quota

import (
	"unsafe"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
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
	Version   int8
	Flags     int8
	FieldMask uint16
	ID        uint32
	BlockHard uint64
	BlockSoft uint64
	InodeHard uint64
	InodeSoft uint64
	Blocks    uint64
	Inodes    uint64
	_         [16]byte // timers and warnings of what is above the soft limits
	_         [40]byte // d_rtb_hardlimit to the end: of realtime devices
}

func (q diskQuota) limited() bool { return q.BlockHard|q.BlockSoft|q.InodeHard|q.InodeSoft != 0 }

// without has no limit that is a default: such a one says nothing of the project.
func (q diskQuota) without(defaults diskQuota) diskQuota {
	forget := func(limit *uint64, unset uint64) {
		if *limit == unset {
			*limit = 0
		}
	}
	forget(&q.BlockHard, defaults.BlockHard)
	forget(&q.BlockSoft, defaults.BlockSoft)
	forget(&q.InodeHard, defaults.InodeHard)
	forget(&q.InodeSoft, defaults.InodeSoft)
	return q
}

// unused reports a limit whose project has no files: a directory with the project id
// counts as at least one inode.
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
	_       [7]uint64 // of users and groups
	// ProjectBlocks is how many blocks of the filesystem XFS has for the quotas of projects.
	ProjectBlocks uint64
	_             [11]uint64
}

// xfsGeometry is struct xfs_fsop_geom_v1 of xfs_fs.h, which libxfs has.
type xfsGeometry struct {
	BlockSize uint32
	_         [5]uint32
	InodeSize uint32
	_         [64]byte
	Flags     uint32
	_         [16]byte
}

// XFS_FSOP_GEOM_FLAGS_FINOBT, _RMAPBT and _REFLINK.
const (
	freeInodes = 1 << 17
	owners     = 1 << 19
	reflinks   = 1 << 20
)

// reservedBlocks is struct xfs_fsop_resblks of xfs_fs.h.
type reservedBlocks struct{ All, Available uint64 }

var _ [112]byte = [unsafe.Sizeof(xfsGeometry{})]byte{} // another size would not compile

const (
	getXFSGeometry = ioctl.Read | unsafe.Sizeof(xfsGeometry{})<<ioctl.Size | 'X'<<8 | 100    // XFS_IOC_FSGEOMETRY_V1
	getReserved    = ioctl.Read | unsafe.Sizeof(reservedBlocks{})<<ioctl.Size | 'X'<<8 | 115 // XFS_IOC_GET_RESBLKS
)

const (
	quotaStateVersion = 1    // FS_QSTATV_VERSION1
	projectAccounting = 0x10 // FS_QUOTA_PDQ_ACCT
	projectEnforced   = 0x20 // FS_QUOTA_PDQ_ENFD
)

// lookupArgs is struct btrfs_ioctl_ino_lookup_args of linux/btrfs.h.
type lookupArgs struct {
	Tree   uint64
	Object uint64
	_      [4080]byte
}

// subvolumeInfo is struct btrfs_ioctl_get_subvol_info_args of linux/btrfs.h.
type subvolumeInfo struct {
	ID         uint64
	_          [256 + 16]byte
	Generation uint64 // of the commit that changed it last
	_          [216]byte
}

// byID is struct btrfs_ioctl_vol_args_v2 of linux/btrfs.h with BTRFS_SUBVOL_SPEC_BY_ID, Linux 5.7.
type byID struct {
	_, _  uint64
	Flags uint64
	_     [4]uint64
	ID    uint64
	_     [4032]byte
}

const isByID = 1 << 4

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

// searchArgs is struct btrfs_ioctl_search_args_v2 of linux/btrfs.h with a buffer for
// one of the items searched for here.
type searchArgs struct {
	Key    ioctl.SearchKey
	Size   uint64 // of the buffer
	Header ioctl.SearchHeader
	Item   [64]byte
}

// What linux/btrfs_tree.h calls BTRFS_ROOT_TREE_OBJECTID,
// BTRFS_ROOT_BACKREF_KEY, BTRFS_ROOT_REF_KEY, BTRFS_QUOTA_TREE_OBJECTID, BTRFS_QGROUP_STATUS_KEY, _INFO_KEY,
// _LIMIT_KEY, BTRFS_QGROUP_STATUS_FLAG_ON and _INCONSISTENT, and linux/btrfs.h
// BTRFS_QGROUP_LIMIT_MAX_RFER and _MAX_EXCL.
const (
	firstSubvolume     = 256           // lowest subvolume id
	lastSubvolume      = ID(1)<<48 - 1 // higher ids are qgroups that administrators create
	rootTree           = 1
	rootBackref        = 144
	rootRef            = 156
	quotaTree          = 8
	qgroupStatus       = 240
	qgroupInfo         = 242
	qgroupLimit        = 244
	statusOn           = 1
	statusInconsistent = 4
	statusSimple       = 8 // BTRFS_QGROUP_STATUS_FLAG_SIMPLE_MODE, Linux 6.7
	maxReferenced      = 1
	maxExclusive       = 2
)

// Numbers of ioctl(2).
const (
	btrfsInoLookup    = ioctl.Read | ioctl.Write | unsafe.Sizeof(lookupArgs{})<<ioctl.Size | ioctl.Btrfs | 18 // BTRFS_IOC_INO_LOOKUP
	btrfsQgroupCreate = ioctl.Write | unsafe.Sizeof(qgroupCreateArgs{})<<ioctl.Size | ioctl.Btrfs | 42        // BTRFS_IOC_QGROUP_CREATE
	btrfsQgroupLimit  = ioctl.Read | unsafe.Sizeof(qgroupLimitArgs{})<<ioctl.Size | ioctl.Btrfs | 43          // BTRFS_IOC_QGROUP_LIMIT
	btrfsRescanStatus = ioctl.Read | unsafe.Sizeof(rescanArgs{})<<ioctl.Size | ioctl.Btrfs | 45               // BTRFS_IOC_QUOTA_RESCAN_STATUS
	destroyByID       = ioctl.Write | unsafe.Sizeof(byID{})<<ioctl.Size | ioctl.Btrfs | 63                    // BTRFS_IOC_SNAP_DESTROY_V2
	getSubvolumeInfo  = ioctl.Read | unsafe.Sizeof(subvolumeInfo{})<<ioctl.Size | ioctl.Btrfs | 60            // BTRFS_IOC_GET_SUBVOL_INFO
	waitSync          = ioctl.Write | unsafe.Sizeof(uint64(0))<<ioctl.Size | ioctl.Btrfs | 22                 // BTRFS_IOC_WAIT_SYNC
	startSync         = ioctl.Read | unsafe.Sizeof(uint64(0))<<ioctl.Size | ioctl.Btrfs | 24                  // BTRFS_IOC_START_SYNC
	btrfsRescanWait   = ioctl.Btrfs | 46                                                                      // BTRFS_IOC_QUOTA_RESCAN_WAIT

	searchHeaderSize = uint64(unsafe.Sizeof(ioctl.SearchHeader{}))
)

// Compile-time checks of the sizes in the headers.
var (
	_ [112]byte  = [unsafe.Sizeof(diskQuota{})]byte{}
	_ [160]byte  = [unsafe.Sizeof(quotaState{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(lookupArgs{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(byID{})]byte{}
	_ [504]byte  = [unsafe.Sizeof(subvolumeInfo{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(qgroupLimitArgs{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(rescanArgs{})]byte{}
	_ [112]byte  = [unsafe.Offsetof(searchArgs{}.Header)]byte{} // as ioctl.Search has it: the buffer is not counted
)
