// Package errorcount asks filesystems how many errors they have met on their disks. Some keep
// count, and so tell of what went wrong below a directory that can itself be read. What the
// count means for anybody is left to others.
package errorcount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Of is how many errors the filesystem of a directory has counted. The count outlives a
// remount and a reboot:
//
//   - ext4 counts what it finds wrong with its own structures, EIO included, until e2fsck has
//     checked it (errors_count of Documentation/ABI/testing/sysfs-fs-ext4). What it cannot
//     read or write of the content of files does not count.
//   - btrfs counts failed reads, writes and flushes, and what is not as its checksum or
//     generation says, of content too and for each device, until btrfs device stats --reset.
//
// For others, of which XFS is one, the error is errors.ErrUnsupported. It takes some
// microseconds, and reads no disk.
func Of(d *dir.Dir) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return 0, fmt.Errorf("count the errors of %s: %w", d, err)
	}
	count := unsupported
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC: // of ext2 and ext3 too
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

// ext4 reads what sysfs has under the name of the device.
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
		return 0, errors.ErrUnsupported // ext2, by its own driver
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// Of linux/btrfs.h: BTRFS_IOC_FS_INFO and BTRFS_IOC_GET_DEV_STATS, put together as in
// asm-generic/ioctl.h.
const (
	btrfsFSInfo   = 2<<30 | 1024<<16 | 0x94<<8 | 31
	btrfsDevStats = 3<<30 | 1032<<16 | 0x94<<8 | 52
)

// fsInfo is struct btrfs_ioctl_fs_info_args.
type fsInfo struct {
	maxID uint64
	_     [1016]byte
}

// devStats is struct btrfs_ioctl_get_dev_stats.
type devStats struct {
	devID  uint64
	items  uint64
	flags  uint64
	values [5]uint64 // write, read, flush, corruption, generation
	_      [121]uint64
}

func btrfs(d *dir.Dir) (sum int64, err error) {
	var info fsInfo
	if err := ioctl(d, btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return 0, err
	}
	for id := uint64(1); id <= info.maxID; id++ {
		stats := devStats{devID: id, items: uint64(len(devStats{}.values))}
		err := ioctl(d, btrfsDevStats, unsafe.Pointer(&stats))
		if errors.Is(err, unix.ENODEV) {
			continue // it was removed
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

func ioctl(d *dir.Dir, request uintptr, argument unsafe.Pointer) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}
