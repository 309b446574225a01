package dir_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestBadNamesAreRefused(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(root, "a"), 0o755))
	d := open(t, filepath.Join(root, "a"))
	for _, name := range []string{"", ".", "..", "../a", "x/y", "/", "/etc", "a\x00b"} {
		calls := map[string]func() error{
			"Open":       func() error { _, err := d.Open(name); return err },
			"Make":       func() error { _, err := d.Make(name); return err },
			"Ensure":     func() error { _, err := d.Ensure(name); return err },
			"IsDir":      func() error { _, err := d.IsDir(name); return err },
			"ReadFile":   func() error { _, err := d.ReadFile(name, 1); return err },
			"WriteFile":  func() error { return d.WriteFile(name, nil) },
			"AskDisk":    func() error { return dir.AskDisk(d, name) },
			"MakeFile":   func() error { _, err := d.MakeFile(name); return err },
			"OpenFile":   func() error { _, err := d.OpenFile(name); return err },
			"OpenNode":   func() error { _, err := d.OpenNode(name, os.O_RDONLY); return err },
			"Lock":       func() error { _, err := dir.Lock(t.Context(), d, name); return err },
			"LockByte":   func() error { _, err := dir.LockByte(t.Context(), d, name, 1); return err },
			"TryLock":    func() error { _, err := dir.TryLockByte(d, name, 1); return err },
			"TryShare":   func() error { _, err := dir.TryShareByte(d, name, 1); return err },
			"Remove":     func() error { return d.Remove(name) },
			"RemoveDir":  func() error { return d.RemoveDir(name) },
			"Rename":     func() error { return d.Rename(name, d, "b") },
			"Rename to":  func() error { return d.Rename("b", d, name) },
			"RemoveTree": func() error { return dir.RemoveTree(t.Context(), d, name, noPause) },
		}
		for call, try := range calls {
			if err := try(); !errors.Is(err, dir.ErrName) {
				t.Errorf("%s(%q): %v, want ErrName", call, name, err)
			}
		}
	}
}

func TestLinksAreNeverFollowed(t *testing.T) {
	outside := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "canary"), []byte("alive"), 0o644))
	root := t.TempDir()
	must.Succeed(t, os.Symlink(outside, filepath.Join(root, "dir")))
	must.Succeed(t, os.Symlink(filepath.Join(outside, "canary"), filepath.Join(root, "file")))
	must.Succeed(t, os.Symlink(".", filepath.Join(root, "inside")))
	d := open(t, root)

	_, err := d.Open("dir")
	must.ErrorIs(t, err, dir.ErrNotDirectory)
	_, err = d.Open("inside")
	must.ErrorIs(t, err, dir.ErrNotDirectory)
	_, err = d.Ensure("dir")
	must.ErrorIs(t, err, dir.ErrNotDirectory)
	_, err = d.ReadFile("file", 100)
	must.ErrorIs(t, err, syscall.ELOOP)
	if is, err := d.IsDir("dir"); is || err != nil {
		t.Errorf("IsDir of a link: %v, %v; want false", is, err)
	}
	must.Succeed(t, d.WriteFile("file", []byte("ours")))
	must.Succeed(t, dir.RemoveTree(t.Context(), d, "dir", noPause))
	got, err := os.ReadFile(filepath.Join(outside, "canary"))
	if err != nil || string(got) != "alive" {
		t.Errorf("the file outside: %q, %v", got, err)
	}
}

func TestOpenLast_lastLinkIsRefused(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "real", "sub"), 0o755))
	must.Succeed(t, os.Symlink("real", filepath.Join(root, "link")))
	must.Succeed(t, os.Symlink("sub", filepath.Join(root, "real", "last")))
	must.Succeed(t, os.WriteFile(filepath.Join(root, "real", "file"), nil, 0o600))
	d, err := dir.OpenLast(filepath.Join(root, "link", "sub"))
	must.Succeed(t, err)
	must.Succeed(t, d.Close())
	for name, want := range map[string]error{
		"link":      dir.ErrNotDirectory,
		"real/last": dir.ErrNotDirectory,
		"real/file": dir.ErrNotDirectory,
		"real/none": fs.ErrNotExist,
		"none/sub":  fs.ErrNotExist,
	} {
		_, err := dir.OpenLast(filepath.Join(root, name))
		must.ErrorIs(t, err, want)
	}
}

// The descriptor number may belong to another file by then.
func TestClosedHandleFails(t *testing.T) {
	root := t.TempDir()
	d, err := dir.Open(root)
	must.Succeed(t, err)
	must.Succeed(t, d.Close())
	other := open(t, t.TempDir())
	must.ErrorIs(t, d.Close(), fs.ErrClosed)
	for name, call := range map[string]func() error{
		"Open":      func() error { _, err := d.Open("x"); return err },
		"Make":      func() error { _, err := d.Make("x"); return err },
		"WriteFile": func() error { return d.WriteFile("x", nil) },
		"Rename":    func() error { return other.Rename("x", d, "y") },
		"Chmod":     func() error { return d.Chmod(0o700) },
		"ID":        func() error { _, err := d.ID(); return err },
		"Space":     func() error { _, err := dir.SpaceOf(d); return err },
		"Sync":      d.Sync,
		"Modified":  func() error { _, err := dir.Modified(d); return err },
	} {
		if err := call(); err == nil {
			t.Errorf("%s works on a closed handle", name)
		}
	}
	_, err = dir.SpaceOf(other)
	must.Succeed(t, err)
}

func TestMakeFileAndOpenFile(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(root, "dir"), 0o755))
	must.Succeed(t, os.Symlink("file", filepath.Join(root, "link")))
	must.Succeed(t, syscall.Mkfifo(filepath.Join(root, "pipe"), 0o644))
	d := open(t, root)
	f, err := d.MakeFile("file")
	must.Succeed(t, err)
	_, err = f.WriteString("content")
	must.Succeed(t, errors.Join(err, f.Close()))
	info, err := os.Stat(filepath.Join(root, "file"))
	must.Succeed(t, err)
	if info.Mode() != 0o600 {
		t.Errorf("mode %v, want 600", info.Mode())
	}
	for _, name := range []string{"file", "dir", "link", "pipe"} {
		_, err := d.MakeFile(name)
		must.ErrorIs(t, err, fs.ErrExist)
	}
	f, err = d.OpenFile("file")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, f.Close()) }()
	if _, err := f.WriteString("x"); !errors.Is(err, syscall.EBADF) {
		t.Errorf("writing to a file that was opened for reading: %v, want EBADF", err)
	}
	for name, want := range map[string]error{"dir": dir.ErrNotFile, "pipe": dir.ErrNotFile, "link": dir.ErrNotFile, "none": fs.ErrNotExist} {
		_, err := d.OpenFile(name)
		must.ErrorIs(t, err, want)
		_, err = dir.FileID(d, name)
		must.ErrorIs(t, err, want)
	}
	_, err = d.OpenNode("link", os.O_RDONLY)
	must.ErrorIs(t, err, syscall.ELOOP)
	node, err := d.OpenNode("dir", os.O_RDONLY)
	must.Succeed(t, err)
	must.Succeed(t, node.Close())
}

// Opening a device or a pipe that a pod has made may do anything.
func TestOpenFile_opensNothingButFiles(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, syscall.Mkfifo(filepath.Join(root, "pipe"), 0o644))
	must.Succeed(t, os.WriteFile(filepath.Join(root, "file"), nil, 0o644))
	d := open(t, root)
	watch, err := syscall.InotifyInit1(syscall.IN_NONBLOCK | syscall.IN_CLOEXEC)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, syscall.Close(watch)) }()
	for name, opens := range map[string]bool{"pipe": false, "file": true} {
		_, err := syscall.InotifyAddWatch(watch, filepath.Join(root, name), syscall.IN_OPEN)
		must.Succeed(t, err)
		if f, err := d.OpenFile(name); err == nil {
			must.Succeed(t, f.Close())
		}
		_, err = syscall.Read(watch, make([]byte, 4096))
		if opened := !errors.Is(err, syscall.EAGAIN); opened != opens {
			t.Errorf("%s is opened: %v, want %v", name, opened, opens)
		}
	}
}

func TestMake_modeIgnoresUmask(t *testing.T) {
	d := open(t, t.TempDir())
	made, err := d.Make("a")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, made.Close()) }()
	mode, err := made.Mode()
	must.Succeed(t, err)
	if mode != 0o700 {
		t.Errorf("mode %o, want 700", mode)
	}
	must.Succeed(t, made.Chmod(0o777))
	if mode, _ := made.Mode(); mode != 0o777 {
		t.Errorf("mode %o after Chmod, want 777", mode)
	}
	_, err = d.Make("a")
	must.ErrorIs(t, err, fs.ErrExist)
}

func TestRenameNeverReplaces(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"a", "b"} {
		must.Succeed(t, os.Mkdir(filepath.Join(root, name), 0o755))
	}
	d := open(t, root)
	must.ErrorIs(t, d.Rename("a", d, "b"), fs.ErrExist)
	must.Succeed(t, d.Rename("a", d, "c"))
	must.ErrorIs(t, d.Rename("a", d, "d"), fs.ErrNotExist)
}

func TestWriteFile_leavesNoTemporaryFile(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	// A crash left a temporary file.
	must.Succeed(t, os.WriteFile(filepath.Join(root, ".new-record"), []byte("torn"), 0o600))
	for _, content := range []string{"first", "second, longer", ""} {
		must.Succeed(t, d.WriteFile("record", []byte(content)))
		got, err := d.ReadFile("record", 100)
		must.Succeed(t, err)
		if string(got) != content {
			t.Errorf("read %q, want %q", got, content)
		}
	}
	if got := entries(t, d); !slices.Equal(got, []string{"record"}) {
		t.Errorf("entries %q, want only the record", got)
	}
}

func TestWriteFile_fullDiskKeepsOldContent(t *testing.T) {
	root := testenv.Tmpfs(t, 64<<10)
	d := open(t, root)
	must.Succeed(t, d.WriteFile("record", []byte("kept")))
	must.ErrorIs(t, d.WriteFile("record", make([]byte, 1<<20)), syscall.ENOSPC)
	got, err := d.ReadFile("record", 100)
	if err != nil || string(got) != "kept" {
		t.Errorf("after a failed write: %q, %v; want the old content", got, err)
	}
	if got := entries(t, d); !slices.Equal(got, []string{"record"}) {
		t.Errorf("entries %q, want only the record", got)
	}
}

func TestReadFile_refused(t *testing.T) {
	root := t.TempDir()
	d := open(t, root)
	must.Succeed(t, os.WriteFile(filepath.Join(root, "large"), make([]byte, 11), 0o600))
	must.Succeed(t, syscall.Mkfifo(filepath.Join(root, "fifo"), 0o600))
	must.Succeed(t, os.Mkdir(filepath.Join(root, "dir"), 0o700))
	for _, name := range []string{"large", "fifo", "dir"} {
		if data, err := d.ReadFile(name, 10); err == nil {
			t.Errorf("ReadFile(%q) = %d bytes, want an error", name, len(data))
		}
	}
	_, err := d.ReadFile("none", 10)
	must.ErrorIs(t, err, fs.ErrNotExist)
}

func TestLockIsExclusive(t *testing.T) {
	d := open(t, t.TempDir())
	unlock, err := dir.Lock(t.Context(), d, "lock")
	must.Succeed(t, err)
	second := make(chan func())
	go func() {
		unlock, err := dir.Lock(t.Context(), d, "lock")
		if err != nil {
			t.Error(err)
		}
		second <- unlock
	}()
	select {
	case <-second:
		t.Error("the lock was granted twice")
	default:
	}
	unlock()
	(<-second)()
}

func TestLock_contextCancelled(t *testing.T) {
	d := open(t, t.TempDir())
	unlock, err := dir.Lock(t.Context(), d, "lock")
	must.Succeed(t, err)
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	_, err = dir.Lock(ctx, d, "lock")
	must.ErrorIs(t, err, context.DeadlineExceeded)
	unlock()
	unlock, err = dir.Lock(t.Context(), d, "lock")
	must.Succeed(t, err)
	unlock()
}

// Each handle stands for a node.
func TestLockByte_bytesAreIndependent(t *testing.T) {
	root := t.TempDir()
	d, other := open(t, root), open(t, root)
	const far = 1<<62 - 1
	for _, at := range []int64{0, 1, far} {
		unlock, err := dir.LockByte(t.Context(), d, "lock", at)
		must.Succeed(t, err)
		defer unlock()
		_, err = dir.TryLockByte(other, "lock", at)
		must.ErrorIs(t, err, dir.ErrLocked)
	}
	unlock, err := dir.LockByte(t.Context(), other, "lock", far-1)
	must.Succeed(t, err)
	unlock()
	_, err = dir.TryLockByte(other, "lock", 1)
	must.ErrorIs(t, err, dir.ErrLocked)
	unlock, err = dir.TryLockByte(other, "lock", 2)
	must.Succeed(t, err)
	unlock()
	for _, node := range []*dir.Dir{d, other} {
		unlock, err := dir.TryShareByte(node, "lock", 3)
		must.Succeed(t, err)
		defer unlock()
		_, err = dir.TryLockByte(other, "lock", 3)
		must.ErrorIs(t, err, dir.ErrLocked)
	}
	info, err := os.Stat(filepath.Join(root, "lock"))
	must.Succeed(t, err)
	if info.Size() != 0 || info.Mode().Perm() != 0o600 {
		t.Errorf("the file has %d bytes and mode %o, want none and 600", info.Size(), info.Mode().Perm())
	}
}

func TestLockByte_contextCancelled(t *testing.T) {
	root := t.TempDir()
	d, other := open(t, root), open(t, root)
	unlock, err := dir.LockByte(t.Context(), d, "lock", 7)
	must.Succeed(t, err)
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	_, err = dir.LockByte(ctx, other, "lock", 7)
	must.ErrorIs(t, err, context.DeadlineExceeded)
	got := make(chan func())
	go func() {
		unlock, err := dir.LockByte(t.Context(), other, "lock", 7)
		if err != nil {
			t.Error(err)
		}
		got <- unlock
	}()
	unlock()
	(<-got)()
}

// Earlier versions of this driver lock the whole file.
func TestLock_coversAllBytes(t *testing.T) {
	d := open(t, t.TempDir())
	unlock, err := dir.Lock(t.Context(), d, "lock")
	must.Succeed(t, err)
	_, err = dir.TryLockByte(d, "lock", 1<<62-1)
	must.ErrorIs(t, err, dir.ErrLocked)
	unlock()
	unlock, err = dir.TryLockByte(d, "lock", 1<<62-1)
	must.Succeed(t, err)
	defer unlock()
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	_, err = dir.Lock(ctx, d, "lock")
	must.ErrorIs(t, err, context.DeadlineExceeded)
}

// Updating the access time is a write, which waits for the disk even if the data is cached.
func TestReadingKeepsAccessTimes(t *testing.T) {
	root := testenv.Tmpfs(t, 1<<20)
	d := open(t, root)
	must.Succeed(t, d.WriteFile("file", []byte("content")))
	must.Succeed(t, d.WriteFile("control", []byte("content")))
	long := time.Now().Add(-48 * time.Hour)
	for _, name := range []string{"file", "control", "."} {
		must.Succeed(t, os.Chtimes(filepath.Join(root, name), long, long))
	}
	_, err := d.ReadFile("file", 100)
	must.Succeed(t, err)
	entries(t, d)
	_, err = os.ReadFile(filepath.Join(root, "control"))
	must.Succeed(t, err)
	for name, want := range map[string]bool{"file": false, ".": false, "control": true} {
		var st syscall.Stat_t
		must.Succeed(t, syscall.Stat(filepath.Join(root, name), &st))
		if got := time.Unix(st.Atim.Unix()).After(long.Add(time.Hour)); got != want {
			t.Errorf("access time of %s changed: %v, want %v", name, got, want)
		}
	}
}

func TestEntries_twice(t *testing.T) {
	root := t.TempDir()
	var want []string
	for i := range 600 {
		name := fmt.Sprintf("%04d", i)
		want = append(want, name)
		must.Succeed(t, os.WriteFile(filepath.Join(root, name), nil, 0o600))
	}
	d := open(t, root)
	for range 2 {
		if got := entries(t, d); !slices.Equal(got, want) {
			t.Fatalf("%d entries, want %d", len(got), len(want))
		}
	}
}

func TestSpace(t *testing.T) {
	root := testenv.Tmpfs(t, 1<<20)
	must.Succeed(t, os.WriteFile(filepath.Join(root, "file"), make([]byte, 128<<10), 0o600))
	space, err := dir.SpaceOf(open(t, root))
	must.Succeed(t, err)
	if space.SizeBytes != 1<<20 || space.UsedBytes != 128<<10 || space.FreeBytes != 896<<10 || space.ReadOnly {
		t.Errorf("space %+v, want 1 MiB with 128 KiB in use", space)
	}
	if space.InodesUsed != 2 {
		t.Errorf("%d inodes in use, want 2", space.InodesUsed)
	}
	must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	if space, err = dir.SpaceOf(open(t, root)); err != nil || !space.ReadOnly {
		t.Errorf("space %+v, %v; want it read-only", space, err)
	}
}

func TestFilesystem_recognisedAfterRemount(t *testing.T) {
	one, other := testenv.Tmpfs(t, 1<<20), testenv.Tmpfs(t, 1<<20)
	must.Succeed(t, os.Mkdir(filepath.Join(one, "sub"), 0o755))
	fs, err := dir.FilesystemOf(open(t, one))
	must.Succeed(t, err)
	for path, want := range map[string]bool{one: true, filepath.Join(one, "sub"): true, other: false} {
		if is, err := fs.Has(open(t, path)); is != want || err != nil {
			t.Errorf("%s is on the filesystem: %v, %v; want %v", path, is, err, want)
		}
	}
}

func noPause(ctx context.Context) error { return ctx.Err() }

func entries(t *testing.T, d *dir.Dir) []string {
	t.Helper()
	var names []string
	for entry, err := range d.Entries() {
		must.Succeed(t, err)
		names = append(names, entry.Name)
	}
	slices.Sort(names)
	return names
}

// tower makes deeply nested directories, with a file next to each.
func tower(t *testing.T, d *dir.Dir, name string, depth int) {
	t.Helper()
	for range depth {
		next, err := d.Make(name)
		must.Succeed(t, err)
		must.Succeed(t, next.WriteFile("file", nil))
		t.Cleanup(func() { _ = next.Close() })
		d, name = next, strings.Repeat("d", 8)
	}
}

func TestRemoveTree_deeperThanMaxDepth(t *testing.T) {
	d := open(t, t.TempDir())
	tower(t, d, "volume", 300)
	must.Succeed(t, dir.RemoveTree(t.Context(), d, "volume", noPause))
	if got := entries(t, d); len(got) > 0 {
		t.Errorf("%q remain", got)
	}
	must.Succeed(t, dir.RemoveTree(t.Context(), d, "volume", noPause))
}

func TestRemoveTree_resumes(t *testing.T) {
	d := open(t, t.TempDir())
	tower(t, d, "volume", 20)
	ctx, stop := context.WithCancel(t.Context())
	steps := 0
	pause := func(ctx context.Context) error {
		if steps++; steps == 10 {
			stop()
		}
		return ctx.Err()
	}
	must.ErrorIs(t, dir.RemoveTree(ctx, d, "volume", pause), context.Canceled)
	if is, err := d.IsDir("volume"); err != nil || !is {
		t.Fatalf("tree exists after ten steps: %v, %v; want true", is, err)
	}
	must.Succeed(t, dir.RemoveTree(t.Context(), d, "volume", noPause))
	if got := entries(t, d); len(got) > 0 {
		t.Errorf("%q remain", got)
	}
}

func TestRemoveTree_mountIsNotEntered(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	d := open(t, root)
	tower(t, d, "volume", 2)
	mounted := filepath.Join(root, "volume", "mounted")
	must.Succeed(t, os.Mkdir(mounted, 0o755))
	must.Succeed(t, syscall.Mount("tmpfs", mounted, "tmpfs", 0, ""))
	defer func() { must.Succeed(t, syscall.Unmount(mounted, 0)) }()
	must.Succeed(t, os.WriteFile(filepath.Join(mounted, "canary"), nil, 0o600))

	if err := dir.RemoveTree(t.Context(), d, "volume", noPause); err == nil {
		t.Error("removing a tree with a mount in it succeeded")
	}
	if _, err := os.Stat(filepath.Join(mounted, "canary")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(root, "volume", "file")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("file next to the mount: %v, want it removed", err)
	}
}

func TestOpen_directorySwappedForLinkIsRefused(t *testing.T) {
	outside := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	root := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(root, "volume"), 0o755))
	must.Succeed(t, os.Symlink(outside, filepath.Join(root, "link")))
	d := open(t, root)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 2000 {
			exchange(t, root, "volume", "link")
		}
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		v, err := d.Open("volume")
		if err != nil {
			must.ErrorIs(t, err, dir.ErrNotDirectory)
			continue
		}
		if names := entries(t, v); len(names) > 0 {
			t.Errorf("opened the directory outside: %q", names)
		}
		must.Succeed(t, v.Close())
	}
}

func TestAskDisk(t *testing.T) {
	testenv.NeedRoot(t)
	for name, mount := range map[string]func() string{
		"tmpfs": func() string { return testenv.Tmpfs(t, 16<<20) },
		"ext4":  func() string { return testenv.LoopFS(t, "ext4", 32<<20) },
		"btrfs": func() string { return testenv.LoopFS(t, "btrfs", 128<<20) },
	} {
		path := mount()
		d := open(t, path)
		for _, size := range []int{0, 1, 3000, 4096, 10000} {
			must.Succeed(t, d.WriteFile("file", make([]byte, size)))
			if err := dir.AskDisk(d, "file"); err != nil {
				t.Errorf("%s, a file of %d bytes: %v", name, size, err)
			}
		}
		must.Succeed(t, os.Symlink("file", filepath.Join(path, "link")))
		must.ErrorIs(t, dir.AskDisk(d, "link"), syscall.ELOOP)
		must.ErrorIs(t, dir.AskDisk(d, "none"), fs.ErrNotExist)
	}
}

// As with 4096 bytes on a disk with larger logical blocks.
func TestAskDisk_unalignedDirectRead(t *testing.T) {
	testenv.NeedRoot(t)
	d := open(t, testenv.LoopFS(t, "ext4", 32<<20))
	for _, size := range []int{0, 1, 10000} {
		must.Succeed(t, d.WriteFile("file", make([]byte, size)))
		if err := dir.AskDiskBy(d, "file", 100); err != nil {
			t.Errorf("a file of %d bytes: %v", size, err)
		}
	}
}

// Two mounts of one filesystem: the device numbers are the same, and rename(2) fails.
func TestSameMount(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	for _, name := range []string{"pool", "pool/below", "again"} {
		must.Succeed(t, os.Mkdir(filepath.Join(root, name), 0o755))
	}
	must.Succeed(t, syscall.Mount(filepath.Join(root, "pool"), filepath.Join(root, "again"), "", syscall.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, syscall.Unmount(filepath.Join(root, "again"), 0)) })
	pool := open(t, filepath.Join(root, "pool"))
	for name, want := range map[string]bool{"pool/below": true, "again": false, "again/below": false} {
		other := open(t, filepath.Join(root, name))
		if same, err := dir.SameMount(pool, other); same != want || err != nil {
			t.Errorf("%s: %v (%v)", name, same, err)
		}
		must.Succeed(t, os.Mkdir(filepath.Join(root, "pool", "x"), 0o755))
		if err := pool.Rename("x", other, "y"); (err == nil) != want {
			t.Errorf("rename to %s: %v", name, err)
		}
		must.Succeed(t, os.RemoveAll(filepath.Join(root, "pool", "x")))
	}
}
