package lab

import (
	"os"
	"syscall"
	"testing"
	"unsafe"
)

// Numbers and structures of linux/fs.h and linux/dqblk_xfs.h. This package has its
// own, because what it tests is the machine on which pkg/hostfs is tested.
const (
	ficlone        = 0x40049409
	fsGetXattr     = 0x801c581f
	fsSetXattr     = 0x401c5820
	projectInherit = 0x200

	setProjectLimit = 0x5804<<8 | 2 // Q_XSETQLIM for PRJQUOTA
)

type fsxattr struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

type diskQuota struct {
	version, flags int8
	fields         uint16
	id             uint32
	hardBlocks     uint64 // of 512 bytes
	_              [12]uint64
}

// setProject has all that will be made in a directory count for a project.
func setProject(t *testing.T, dir string, project uint32) {
	t.Helper()
	file, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var a fsxattr
	if err := ioctl(file, fsGetXattr, uintptr(unsafe.Pointer(&a))); err != nil {
		t.Fatal(err)
	}
	a.project, a.flags = project, a.flags|projectInherit
	if err := ioctl(file, fsSetXattr, uintptr(unsafe.Pointer(&a))); err != nil {
		t.Fatal(err)
	}
}

func setLimit(t *testing.T, device string, project uint32, bytes uint64) {
	t.Helper()
	name, err := syscall.BytePtrFromString(device)
	if err != nil {
		t.Fatal(err)
	}
	const version, projectQuota, hardBlocks = 1, 2, 1 << 3
	q := diskQuota{version: version, flags: projectQuota, fields: hardBlocks, id: project, hardBlocks: bytes / 512}
	_, _, errno := syscall.Syscall6(syscall.SYS_QUOTACTL, setProjectLimit,
		uintptr(unsafe.Pointer(name)), uintptr(project), uintptr(unsafe.Pointer(&q)), 0, 0)
	if errno != 0 {
		t.Fatalf("quotactl on %s: %v", device, errno)
	}
}

func ioctl(file *os.File, request, argument uintptr) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, file.Fd(), request, argument); errno != 0 {
		return &os.PathError{Op: "ioctl", Path: file.Name(), Err: errno}
	}
	return nil
}
