package clone_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// during runs a function over and over, until what it returns is called.
func during(t *testing.T, work func(nth int) error) (stop func()) {
	t.Helper()
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for nth := 0; ; nth++ {
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
			if err := work(nth); err != nil {
				ended <- err
				return
			}
		}
	}()
	return func() {
		t.Helper()
		close(end)
		must.Succeed(t, <-ended)
	}
}

// What a file holds and who may read it belong together: a copy of one moment never has a secret with the mode, the
// owner and the attributes that the file had before or after it.
func TestFileIsCopiedWithTheAttributesOfItsContent(t *testing.T) {
	copies := 400
	if testing.Short() {
		copies = 100
	}
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512*mib)
			src := filepath.Join(root, "src")
			must.Succeed(t, os.Mkdir(src, 0o755))
			f, err := os.Create(filepath.Join(src, "file"))
			must.Succeed(t, err)
			defer f.Close()
			public := func() error {
				_, err := f.WriteAt([]byte("public"), 0)
				return errors.Join(err, unix.Fsetxattr(int(f.Fd()), "user.is", []byte("public"), 0), f.Chmod(0o644))
			}
			must.Succeed(t, public())
			awaitTick(t, root)
			stop := during(t, func(nth int) error {
				err := errors.Join(f.Chmod(0o600), unix.Fremovexattr(int(f.Fd()), "user.is"))
				_, writeErr := f.WriteAt([]byte("secret"), 0)
				for began := time.Now(); time.Since(began) < time.Duration(nth%7)*50*time.Microsecond; {
				}
				return errors.Join(err, writeErr, public())
			})
			defer stop()
			still, value := 0, make([]byte, 16)
			for i := range copies {
				dst := filepath.Join(root, fmt.Sprint("dst", i))
				must.Succeed(t, os.Mkdir(dst, 0o700))
				if result := tree(t, src, dst, clone.Options{Rounds: 1}); !result.PointInTime {
					continue
				}
				still++
				copied := filepath.Join(dst, "file")
				content, err := os.ReadFile(copied)
				must.Succeed(t, err)
				info, err := os.Stat(copied)
				must.Succeed(t, err)
				_, err = unix.Getxattr(copied, "user.is", value)
				if string(content) == "secret" && (info.Mode().Perm() != 0o600 || err == nil) {
					t.Errorf("copy %d of one moment has the secret with mode %s and attribute %v", i, info.Mode(), err == nil)
				}
			}
			if t.Logf("%d of %d were of one moment", still, copies); still == 0 {
				t.Error("no copy was of one moment")
			}
		})
	}
}

// The disk of a guest that writes all the time is of one moment all the same: its attributes stay as they are.
func TestFileThatIsWrittenAllTheTimeIsCopied(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512*mib)
			src := filepath.Join(root, "src")
			must.Succeed(t, os.Mkdir(src, 0o755))
			write(t, filepath.Join(src, "disk.img"), strings.Repeat("0", mib))
			f, err := os.OpenFile(filepath.Join(src, "disk.img"), os.O_RDWR, 0)
			must.Succeed(t, err)
			defer f.Close()
			awaitTick(t, root)
			stop := during(t, func(nth int) error {
				_, err := f.WriteAt([]byte("written"), int64(nth%100)*4096)
				return err
			})
			defer stop()
			for i := range 20 {
				dst := filepath.Join(root, fmt.Sprint("dst", i))
				must.Succeed(t, os.Mkdir(dst, 0o700))
				if result := tree(t, src, dst, clone.Options{Rounds: 1}); !result.PointInTime {
					t.Errorf("copy %d: %+v", i, result)
				}
			}
		})
	}
}

// Entries of every kind come, go and move while they are copied: that is no error.
func TestEntriesThatComeAndGo(t *testing.T) {
	copies := 30
	if testing.Short() {
		copies = 12
	}
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		must.Succeed(t, os.Mkdir(filepath.Join(src, "stays"), 0o755), os.Mkdir(filepath.Join(src, "gets"), 0o755))
		for i := range 50 {
			write(t, filepath.Join(src, "stays", fmt.Sprint(i)), "content")
		}
		for n := range 2 {
			in := func(elements ...string) string {
				return filepath.Join(append([]string{src, fmt.Sprint("n", n)}, elements...)...)
			}
			must.Succeed(t, os.Mkdir(in(), 0o755))
			stop := during(t, func(nth int) error {
				one := in(fmt.Sprint("d", nth%7))
				moved := filepath.Join(src, "gets", fmt.Sprint(n, "-", nth%3))
				return errors.Join(
					os.MkdirAll(filepath.Join(one, "a", "b", "c"), 0o755),
					os.WriteFile(filepath.Join(one, "a", "file"), []byte("content"), 0o600),
					os.Symlink("target", filepath.Join(one, "a", "link")),
					unix.Mkfifo(filepath.Join(one, "a", "b", "fifo"), 0o600),
					os.Link(filepath.Join(one, "a", "file"), filepath.Join(one, "a", "b", "other")),
					os.RemoveAll(moved), os.Rename(filepath.Join(one, "a"), moved), os.RemoveAll(one))
			})
			defer stop()
		}
		for i := range copies {
			one := filepath.Join(dst, fmt.Sprint(i))
			must.Succeed(t, os.Mkdir(one, 0o700))
			if _, err := clone.Tree(t.Context(), open(t, src), open(t, one), clone.Options{Method: method, Rounds: 1 + i%3}); err != nil {
				t.Errorf("copy %d: %v", i, err)
			}
		}
	})
}

// A write lease would have a process that opens the file wait for as long as its holder likes, up to 45 seconds.
func TestFileWithWriteLeaseIsAnErrorAtOnce(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		write(t, filepath.Join(src, "leased"), "content")
		f, err := os.OpenFile(filepath.Join(src, "leased"), os.O_RDWR, 0)
		must.Succeed(t, err)
		defer f.Close()
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
		must.Succeed(t, err)
		began := time.Now()
		_, err = clone.Tree(t.Context(), open(t, src), open(t, dst), clone.Options{Method: method, Rounds: 1})
		if took := time.Since(began); !errors.Is(err, clone.ErrLeased) || !strings.Contains(err.Error(), "/leased") || took > 20*time.Second {
			t.Errorf("%v after %s, want ErrLeased with the file's name at once", err, took)
		}
	})
}

// A file with two names is copied and then deleted, and another one with two names gets its number before it is copied. Btrfs
// gives no number twice, and XFS frees them later.
func TestFileWithNumberOfDeletedFileIsCopied(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 64*mib)
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	for _, d := range []string{src, dst, filepath.Join(src, "1"), filepath.Join(src, "2")} {
		must.Succeed(t, os.Mkdir(d, 0o755))
	}
	d, err := os.Open(src)
	must.Succeed(t, err)
	listed, err := d.Readdirnames(-1) // in the order in which they are copied
	must.Succeed(t, errors.Join(err, d.Close()))
	first, second := listed[0], listed[1]
	in := func(names ...string) string { return filepath.Join(append([]string{src}, names...)...) }
	number := func(path string) uint64 {
		var st unix.Stat_t
		must.Succeed(t, unix.Lstat(path, &st))
		return st.Ino
	}
	write(t, in(first, "a"), "of the first")
	must.Succeed(t, os.Link(in(first, "a"), in(first, "b")))
	write(t, in(second, "other"), "")
	awaitTick(t, src)
	was, again := number(in(first, "a")), false
	swap := sync.OnceFunc(func() {
		must.Succeed(t, os.Remove(in(first, "a")), os.Remove(in(first, "b")))
		for i := 0; i < 64 && !again; i++ {
			name := in(second, fmt.Sprint("c", i))
			write(t, name, "of the second")
			again = number(name) == was
			must.Succeed(t, os.Link(name, in(second, fmt.Sprint("d", i))))
		}
	})
	tree(t, src, dst, clone.Options{Method: clone.Copy, Rounds: 1, Pause: func(context.Context) error {
		_, a := os.Stat(filepath.Join(dst, first, "a"))
		_, b := os.Stat(filepath.Join(dst, first, "b"))
		if a == nil && b == nil {
			swap()
		}
		return nil
	}})
	if !again {
		t.Fatal("no file got the number of the deleted one")
	}
	copies, err := filepath.Glob(filepath.Join(dst, second, "[cd]*"))
	must.Succeed(t, err)
	if len(copies) == 0 {
		t.Error("nothing of the second directory was copied")
	}
	for _, name := range copies {
		if got, err := os.ReadFile(name); err != nil || string(got) != "of the second" {
			t.Errorf("the copy %s holds %q, %v", name, got, err)
		}
	}
}

// XFS counts the blocks of a file until some time after it was removed, and a copy has room for its files once.
func TestCopyGivesItsBlocksBackBeforeTheNext(t *testing.T) {
	for name, method := range map[string]clone.Method{"shared": clone.Share, "copied": clone.Copy} {
		t.Run(name, func(t *testing.T) {
			root := testenv.LoopFS(t, "xfs", 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.WriteFile(filepath.Join(src, "file"), make([]byte, 8*mib), 0o600))
			var before *os.File
			tree(t, src, dst, clone.Options{
				Method: method, Rounds: 1,
				Pause: func(context.Context) error {
					return errors.Join(os.Chmod(filepath.Join(src, "file"), 0o600), os.Chmod(src, 0o755)) // which sets their ctimes
				},
				Hold: func(ctx context.Context) (context.Context, func() error, error) {
					var err error
					before, err = os.Open(filepath.Join(dst, "file"))
					return ctx, func() error { return nil }, err
				},
			})
			defer before.Close()
			var st unix.Stat_t
			must.Succeed(t, unix.Fstat(int(before.Fd()), &st))
			if st.Nlink != 0 || st.Blocks != 0 {
				t.Errorf("the copy before the last has %d names and %d blocks, want none", st.Nlink, st.Blocks)
			}
		})
	}
}

// Of a file with several names there is one copy at a time, too.
func TestCopyOfLinkedFileIsThereOnce(t *testing.T) {
	for name, method := range map[string]clone.Method{"shared": clone.Share, "copied": clone.Copy} {
		t.Run(name, func(t *testing.T) {
			root := testenv.LoopFS(t, "xfs", 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			file := filepath.Join(src, "file")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.WriteFile(file, make([]byte, 8*mib), 0o600), os.Link(file, file+"-too"))
			tree(t, src, dst, clone.Options{
				Method: method, Rounds: 1,
				Pause: func(context.Context) error { return os.Chmod(file, 0o600) }, // which sets its ctime
				Hold: func(ctx context.Context) (context.Context, func() error, error) {
					if bytes := allocated(t, dst); bytes > 9*mib {
						t.Errorf("copies of 8 MiB take %d MiB after two passes", bytes/mib)
					}
					return ctx, func() error { return nil }, nil
				},
			})
		})
	}
}

// allocated is what the files in a directory have on the disk, each counted once, in bytes.
func allocated(t *testing.T, in string) (bytes int64) {
	t.Helper()
	files := make(map[uint64]int64)
	must.Succeed(t, filepath.WalkDir(in, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		err = errors.Join(err, unix.Lstat(path, &st))
		files[st.Ino] = st.Blocks * 512
		return err
	}))
	for _, has := range files {
		bytes += has
	}
	return bytes
}

// What another program writes while pods stand still is found out also where ctimes are whole seconds, as on ext4 with inodes of 128 bytes.
func TestWriteWhileAllStandStillWithTimesOfSeconds(t *testing.T) {
	root := testenv.MadeFS(t, "ext4", 512*mib, "-I", "128")
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
	for n := range 4 {
		write(t, filepath.Join(src, fmt.Sprint(n)), "")
	}
	change := func() {
		for n := range 4 {
			write(t, filepath.Join(src, fmt.Sprint(n)), "changed")
		}
	}
	next := sync.OnceFunc(change)
	result := tree(t, src, dst, clone.Options{
		Method: clone.Copy, Rounds: 1,
		Pause: func(context.Context) error { next(); return nil },
		Hold: func(ctx context.Context) (context.Context, func() error, error) {
			change()
			next = sync.OnceFunc(change)
			return ctx, func() error { return nil }, nil
		},
	})
	if result.PointInTime || result.Changed == 0 {
		t.Errorf("it is %+v, although all files were written meanwhile", result)
	}
}
