package volumes

import (
	"os"
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
}

// slack is what the filesystem may take of a volume to keep track of its content, in
// bytes: some blocks, of which tests see one.
func (fs filesystem) slack() int64 { return 4 * fs.block }

// filesystems are those that this kernel has.
func filesystems() []filesystem {
	if !guest() {
		mount := func(t *testing.T) string { return testenv.CountingBtrfs(t, 4<<30) }
		return []filesystem{{kind: quota.Btrfs, mount: mount, full: syscall.EDQUOT, block: 16 << 10}}
	}
	disk := func(name string) func(*testing.T) string {
		return func(t *testing.T) string { return variable(t, name) }
	}
	return []filesystem{
		{kind: quota.XFS, mount: disk("HOSTPATH_KERNEL_XFS"), full: syscall.ENOSPC, statfsTellsLimit: true, block: 4 << 10},
		{kind: quota.Ext4, mount: disk("HOSTPATH_KERNEL_EXT4"), full: syscall.EDQUOT, rootIsExempt: true, statfsTellsLimit: true, block: 4 << 10},
	}
}

// guest reports whether this is the guest of test/cmd/kernel.
func guest() bool { return os.Getenv("HOSTPATH_KERNEL") != "" }

// variable is one that the guest has.
func variable(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("$HOSTPATH_KERNEL is set, but $%s is not", name)
	}
	return value
}
