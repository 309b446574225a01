package loop_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestOpen_onlyRegularFiles(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	file(t, d, "file", mib)
	must.Succeed(t, os.Symlink("file", filepath.Join(path, "link")))
	must.Succeed(t, os.Mkdir(filepath.Join(path, "dir"), 0o755))
	must.Succeed(t, syscall.Mkfifo(filepath.Join(path, "pipe"), 0o600))
	for name, want := range map[string]error{
		"link": dir.ErrNotFile, "dir": dir.ErrNotFile, "pipe": dir.ErrNotFile,
		"none": fs.ErrNotExist, "dir/../file": dir.ErrName,
	} {
		f, err := loop.Open(d, name)
		if !errors.Is(err, want) {
			t.Errorf("Open(%q) = %v, %v; want %v", name, f, err, want)
		}
	}
	for _, name := range []string{"file", "link", "dir", "pipe"} {
		if _, err := loop.Create(d, name); !errors.Is(err, fs.ErrExist) {
			t.Errorf("Create(%q): %v, want ErrExist", name, err)
		}
	}
	f, err := loop.Open(d, "file")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, f.Close()) }()
	if bytes, err := f.Size(); bytes != mib || err != nil {
		t.Errorf("size %d, %v; want %d", bytes, err, mib)
	}
	if st := stat(t, f); (dir.ID{Dev: st.Dev, Ino: st.Ino}) != f.ID() || st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("the file is %v with mode %o, want what stat says: %+v", f.ID(), st.Mode, st)
	}
}

func TestGrow_allocation(t *testing.T) {
	testenv.NeedRoot(t)
	for name, mount := range filesystems {
		t.Run(name, func(t *testing.T) {
			d := open(t, mount(t))
			thin := file(t, d, "thin", 64*mib)
			if got := allocated(t, thin); got != 0 {
				t.Errorf("%d bytes are allocated for the thin file", got)
			}
			thick, err := loop.Create(d, "thick")
			must.Succeed(t, err)
			defer func() { must.Succeed(t, thick.Close()) }()
			must.Succeed(t, thick.Grow(t.Context(), 32*mib, loop.Thick))
			wantAllocated(t, thick, 32*mib)
			must.Succeed(t, thick.Grow(t.Context(), 64*mib, loop.Thick))
			wantAllocated(t, thick, 64*mib)
			punch(t, thick, 8*mib, 16*mib)
			must.Succeed(t, thick.Grow(t.Context(), 64*mib, loop.Thick))
			wantAllocated(t, thick, 64*mib)
		})
	}
}

func TestGrow_failureRestoresSize(t *testing.T) {
	testenv.NeedRoot(t)
	for name, mount := range filesystems {
		t.Run(name, func(t *testing.T) {
			d := open(t, mount(t))
			f := file(t, d, "file", mib)
			must.Succeed(t, f.Grow(t.Context(), 16*mib, loop.Thick))
			before := free(t, d)
			// The first step fits, the second does not.
			if err := f.Grow(t.Context(), 1<<30, loop.Thick); !errors.Is(err, unix.ENOSPC) {
				t.Errorf("growing over the filesystem: %v, want ENOSPC", err)
			}
			if bytes, err := f.Size(); bytes != 16*mib || err != nil {
				t.Errorf("the size is %d, %v; want %d", bytes, err, 16*mib)
			}
			wantAllocated(t, f, 16*mib)
			const slack = 4 * mib // what the filesystem itself took meanwhile
			if after := free(t, d); after < before-slack {
				t.Errorf("%d bytes are free, and %d were before", after, before)
			}
		})
	}
}

func TestGrow_contextCancelled(t *testing.T) {
	f := file(t, open(t, t.TempDir()), "file", mib)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.ErrorIs(t, f.Grow(ctx, 2*mib, loop.Thick), context.Canceled)
	if bytes, err := f.Size(); bytes != mib || err != nil {
		t.Errorf("the size is %d, %v; want %d", bytes, err, mib)
	}
}

func TestGrow_allocationUnsupported(t *testing.T) {
	testenv.NeedRoot(t)
	at := t.TempDir()
	must.Succeed(t, unix.Mount("ramfs", at, "ramfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, 0)) })
	f := file(t, open(t, at), "file", mib)
	defer func() { must.Succeed(t, f.Close()) }() // before the unmount
	must.ErrorIs(t, f.Grow(t.Context(), 2*mib, loop.Thick), errors.ErrUnsupported)
	must.Succeed(t, f.Grow(t.Context(), 2*mib, loop.Thin))
}

// What was allocated can then be written again and again on a full filesystem.
func TestCreate_btrfsNoCOW(t *testing.T) {
	for name, want := range map[string]bool{"btrfs": true, "btrfs subvolume": true, "xfs": false} {
		t.Run(name, func(t *testing.T) {
			f := thick(t, filesystems[name](t), mib)
			opened, err := os.Open(f.HandlePath())
			must.Succeed(t, err)
			defer opened.Close()
			flags, err := unix.IoctlGetUint32(int(opened.Fd()), unix.FS_IOC_GETFLAGS)
			must.Succeed(t, err)
			const noCOW = 0x00800000 // FS_NOCOW_FL
			if got := flags&noCOW != 0; got != want {
				t.Errorf("flags %#x; without copies on write: %v, want %v", flags, got, want)
			}
		})
	}
}

func TestBlockBytes(t *testing.T) {
	for align, want := range map[int64]int64{0: 512, 1: 512, 512: 512, 1024: 1024, 4096: 4096, 16384: 512} {
		if got := loop.UsableBlock(align); got != want {
			t.Errorf("for an alignment of %d a block of %d, want %d", align, got, want)
		}
	}
	// tmpfs has no device.
	if got := loop.DeviceBlock(unix.Mkdev(0, 1)); got != 512 {
		t.Errorf("where there is no device, a block of %d, want 512", got)
	}
}

func wantAllocated(t *testing.T, f *loop.File, want int64) {
	t.Helper()
	if got := allocated(t, f); got < want || got > want+mib {
		t.Errorf("%d bytes are allocated for %s, want %d", got, f, want)
	}
}

func allocated(t *testing.T, f *loop.File) int64 {
	t.Helper()
	return stat(t, f).Blocks * 512
}

func stat(t *testing.T, f *loop.File) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(f.HandlePath(), &st))
	return st
}

func punch(t *testing.T, f *loop.File, from, bytes int64) {
	t.Helper()
	w, err := os.OpenFile(f.HandlePath(), os.O_RDWR, 0)
	must.Succeed(t, err)
	defer w.Close()
	must.Succeed(t, unix.Fallocate(int(w.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, bytes))
	must.Succeed(t, w.Sync())
	if got := stat(t, f).Blocks * 512; got >= 64*mib {
		t.Fatalf("%d bytes are allocated with a hole", got)
	}
}

func free(t *testing.T, d *dir.Dir) int64 {
	t.Helper()
	must.Succeed(t, unix.Syncfs(d.Fd()))
	space, err := dir.SpaceOf(d)
	must.Succeed(t, err)
	return space.FreeBytes
}
