package volumes

import (
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A filesystem is one that can limit directories.
type filesystem struct {
	kind  quota.Kind
	mount func(t *testing.T) string
	// full is the error of a writer that wants more than the limit.
	full syscall.Errno
	// rootIsExempt: the limit is not for those with CAP_SYS_RESOURCE.
	rootIsExempt bool
	// statfsTellsLimit: df shows a volume's own size, and not the filesystem's.
	statfsTellsLimit bool
	// block is what the filesystem keeps track of content in, in bytes.
	block int64
	// reserve is the pool option of that name; empty for none.
	reserve string
}

// slack is what the filesystem may take of a volume to keep track of its content, in
// bytes: some blocks, of which tests see one.
func (fs filesystem) slack() int64 { return 4 * fs.block }

// filesystems are those that this kernel has.
func filesystems() []filesystem {
	if !testenv.Guest() {
		mount := func(t *testing.T) string { return testenv.CountingBtrfs(t, 4<<30) }
		return []filesystem{{kind: quota.Btrfs, mount: mount, full: syscall.EDQUOT, block: 16 << 10}}
	}
	disk := testenv.GuestDisk
	return []filesystem{
		{kind: quota.XFS, mount: disk("HOSTPATH_KERNEL_XFS"), full: syscall.ENOSPC, statfsTellsLimit: true, block: 4 << 10},
		{kind: quota.Ext4, mount: disk("HOSTPATH_KERNEL_EXT4"), full: syscall.EDQUOT, rootIsExempt: true, statfsTellsLimit: true, block: 4 << 10},
	}
}
