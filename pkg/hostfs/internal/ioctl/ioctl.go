// Package ioctl makes the ioctl(2) calls on directories that golang.org/x/sys/unix lacks, and
// has the structures that several packages pass to them. A structure that only one package
// needs stays there.
package ioctl

import (
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
	HasAttr        = 0x80000000 // FS_XFLAG_HASATTR, which can only be read
)

// SubvolumeRoot is the inode number of the root of every subvolume of btrfs, and of no other
// directory there (BTRFS_FIRST_FREE_OBJECTID of linux/btrfs_tree.h).
const SubvolumeRoot = 256

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
