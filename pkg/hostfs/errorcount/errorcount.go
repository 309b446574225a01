// Package errorcount reads how many disk errors a filesystem has counted. The count reveals
// errors below a directory that is itself readable. The caller decides what it means.
package errorcount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Of returns how many errors the filesystem of a directory has counted. The count survives
// remounts and reboots:
//
//   - ext4 counts errors in its metadata, EIO included, until e2fsck clears the count
//     (errors_count of Documentation/ABI/testing/sysfs-fs-ext4). Errors reading or writing
//     the content of files do not count.
//   - btrfs counts failed reads, writes and flushes, and checksum and generation errors, per
//     device and for content too, until btrfs device stats --reset.
//
// Other filesystems, such as XFS, return errors.ErrUnsupported. Of takes some microseconds
// and reads no disk.
func Of(d *dir.Dir) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return 0, fmt.Errorf("count the errors of %s: %w", d, err)
	}
	count := unsupported
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC: // also of ext2 and ext3
		count = ext4
	case unix.BTRFS_SUPER_MAGIC:
		count = btrfs
	}
	errs, err := count(d)
	if err != nil {
		return 0, fmt.Errorf("count the errors of %s: %w", d, err)
	}
	return errs, nil
}

func unsupported(*dir.Dir) (int64, error) { return 0, errors.ErrUnsupported }

// ext4 reads the counter in sysfs, which is named by the device.
func ext4(d *dir.Dir) (int64, error) {
	id, err := d.ID()
	if err != nil {
		return 0, err
	}
	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(id.Dev), unix.Minor(id.Dev)))
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(filepath.Join("/sys/fs/ext4", filepath.Base(device), "errors_count"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, errors.ErrUnsupported // mounted by the ext2 driver
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// BTRFS_IOC_GET_DEV_STATS of linux/btrfs.h.
const btrfsDevStats = ioctl.Read | ioctl.Write | 1032<<ioctl.Size | ioctl.Btrfs | 52

// devStats is struct btrfs_ioctl_get_dev_stats.
type devStats struct {
	devID  uint64
	items  uint64
	_      uint64    // flags
	values [5]uint64 // write, read, flush, corruption, generation
	_      [121]uint64
}

func btrfs(d *dir.Dir) (sum int64, err error) {
	var info ioctl.Filesystem
	if err := ioctl.Do(d, ioctl.GetFilesystem, &info); err != nil {
		return 0, err
	}
	for id := uint64(1); id <= info.MaxID; id++ {
		stats := devStats{devID: id, items: uint64(len(devStats{}.values))}
		err := ioctl.Do(d, btrfsDevStats, &stats)
		if errors.Is(err, unix.ENODEV) {
			continue // device removed
		}
		if err != nil {
			return 0, err
		}
		for _, value := range stats.values {
			sum += int64(value)
		}
	}
	return sum, nil
}
