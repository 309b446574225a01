package ioctl_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const noDump = 0x80 // FS_XFLAG_NODUMP of linux/fs.h

func TestFileAttributesAreSetAndRead(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d, err := dir.Open(testenv.LoopFS(t, kind, 512<<20))
			must.Succeed(t, err)
			defer func() { must.Succeed(t, d.Close()) }()
			var attr ioctl.FileAttr
			must.Succeed(t, ioctl.Do(d, ioctl.GetFileAttr, &attr))
			if attr.Flags&noDump != 0 {
				t.Fatalf("a new directory has %+v", attr)
			}
			attr.Flags |= noDump
			must.Succeed(t, ioctl.Do(d, ioctl.SetFileAttr, &attr))
			var got ioctl.FileAttr
			must.Succeed(t, ioctl.Do(d, ioctl.GetFileAttr, &got))
			if got.Flags&noDump == 0 {
				t.Errorf("read %+v after setting %+v", got, attr)
			}
		})
	}
}

func TestAnUnknownRequestIsAnError(t *testing.T) {
	d, err := dir.Open(t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if err := ioctl.Do(d, ioctl.Read|ioctl.Btrfs|255, new(uint64)); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("answered %v, want ENOTTY", err)
	}
}
