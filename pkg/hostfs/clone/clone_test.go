package clone_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// A filesystem is one that the package has to do with.
type filesystem struct {
	kind   string
	method clone.Method // of a file there
}

// sharing are those whose files can share blocks.
var (
	sharing     = []filesystem{{"xfs", clone.Share}, {"btrfs", clone.Share}}
	filesystems = append(slices.Clone(sharing), filesystem{"ext4", clone.Copy})
)

// onEach runs a test on each of some filesystems, with an empty source and an empty copy.
func onEach(t *testing.T, of []filesystem, test func(t *testing.T, src, dst string, method clone.Method)) {
	for _, f := range of {
		t.Run(f.kind, func(t *testing.T) {
			root := testenv.LoopFS(t, f.kind, 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			test(t, src, dst, f.method)
		})
	}
}

func open(t testing.TB, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func write(t testing.TB, path, content string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o644))
}

func tree(t testing.TB, src, dst string, o clone.Options) clone.Result {
	t.Helper()
	result, err := clone.Tree(t.Context(), open(t, src), open(t, dst), endingWithStandstill(o))
	must.Succeed(t, err)
	return result
}

// endingWithStandstill has the context of a standstill end with it, as that of a freezer does.
func endingWithStandstill(o clone.Options) clone.Options {
	hold := o.Hold
	if hold == nil {
		return o
	}
	o.Hold = func(ctx context.Context) (context.Context, func() error, error) {
		ctx, end := context.WithCancel(ctx)
		still, release, err := hold(ctx)
		return still, func() error {
			end()
			return release()
		}, err
	}
	return o
}

func TestTree(t *testing.T) {
	t.Run("every kind of entry with all attributes", func(t *testing.T) {
		onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
			clonetest.Hostile(t, src)
			must.Succeed(t, os.Chown(src, 107, 107), os.Chmod(src, 0o770))
			result := tree(t, src, dst, clone.Options{Method: method, Rounds: 3})
			if !result.PointInTime || result.Shared != (method == clone.Share) || result.Entries < 20 {
				t.Errorf("%+v, want a point in time", result)
			}
			clonetest.Same(t, src, dst)
			blocks := func(path string) int64 {
				var st unix.Stat_t
				must.Succeed(t, unix.Stat(path, &st))
				return st.Blocks * 512
			}
			if got := blocks(filepath.Join(dst, "sparse")); got > mib {
				t.Errorf("a file of 96 MiB with 3 bytes takes %d bytes: its holes were filled", got)
			}
		})
	})

	t.Run("deep trees take few descriptors", func(t *testing.T) {
		onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
			const levels = 4000
			at := open(t, src)
			for range levels {
				next, err := at.Make("d")
				must.Succeed(t, err, at.Close())
				at = next
			}
			f, err := at.MakeFile("bottom")
			must.Succeed(t, err, f.Close(), at.Close())
			awaitTick(t, dst)

			var before unix.Rlimit
			must.Succeed(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
			must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 400, Max: before.Max}))
			defer func() { must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()
			result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1})
			if result.Entries != levels+1 || !result.PointInTime {
				t.Errorf("%+v, want %d entries", result, levels+1)
			}
			depth := 0
			must.Succeed(t, dir.Walk(open(t, dst), func(_ *dir.Dir, name string) error {
				if name != "bottom" || depth != 0 {
					t.Errorf("found %s after %d directories", name, depth)
				}
				return nil
			}, func(*dir.Dir) error { depth++; return nil }))
			if depth != levels {
				t.Errorf("the copy is %d levels deep, want %d", depth, levels)
			}
		})
	})

	t.Run("deep trees take little memory", func(t *testing.T) {
		const levels = 2000
		root := testenv.LoopFS(t, "xfs", 512*mib)
		src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
		must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
		tower(t, src, levels)
		awaitTick(t, root)
		from, to := open(t, src), open(t, dst)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := clone.Tree(t.Context(), from, to, clone.Options{Rounds: 1})
		runtime.ReadMemStats(&after)
		must.Succeed(t, err)
		if each := (after.TotalAlloc - before.TotalAlloc) / levels; each > 64<<10 {
			t.Errorf("%d bytes for each of %d levels: as paths from the root take", each, levels)
		}
	})

	t.Run("sharing is refused where the filesystem cannot", func(t *testing.T) {
		root := testenv.LoopFS(t, "ext4", 64*mib)
		must.Succeed(t, os.Mkdir(filepath.Join(root, "src"), 0o755), os.Mkdir(filepath.Join(root, "dst"), 0o755))
		write(t, filepath.Join(root, "src", "file"), "content")
		_, err := clone.Tree(t.Context(), open(t, filepath.Join(root, "src")), open(t, filepath.Join(root, "dst")), clone.Options{})
		if !errors.Is(err, clone.ErrNotSupported) {
			t.Errorf("%v, want ErrNotSupported", err)
		}
	})

	t.Run("a canceled context ends the copy", func(t *testing.T) {
		root := testenv.LoopFS(t, "xfs", 512*mib)
		must.Succeed(t, os.Mkdir(filepath.Join(root, "src"), 0o755), os.Mkdir(filepath.Join(root, "dst"), 0o755))
		for i := range 10 {
			write(t, filepath.Join(root, "src", fmt.Sprint(i)), "content")
		}
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		_, err := clone.Tree(ctx, open(t, filepath.Join(root, "src")), open(t, filepath.Join(root, "dst")), clone.Options{
			Pause: func(context.Context) error {
				if calls++; calls == 5 {
					cancel()
				}
				return nil
			},
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want context.Canceled", err)
		}
	})
}

// tower makes directories in each other, with names as long as can be.
func tower(t testing.TB, root string, levels int) {
	t.Helper()
	name := strings.Repeat("d", 255)
	at, err := unix.Open(root, unix.O_PATH|unix.O_CLOEXEC, 0)
	must.Succeed(t, err)
	for range levels {
		must.Succeed(t, unix.Mkdirat(at, name, 0o755))
		next, err := unix.Openat(at, name, unix.O_PATH|unix.O_CLOEXEC, 0)
		must.Succeed(t, err, unix.Close(at))
		at = next
	}
	must.Succeed(t, unix.Close(at))
}

// TestTreeInUse changes the source at chosen moments of the copying.
func TestTreeInUse(t *testing.T) {
	tests := []struct {
		name string
		// change is called before the copying comes to its nth entry.
		change func(t *testing.T, src string, nth int)
		want   clone.Result
		equal  bool // to the source at the end
	}{
		{"nothing changes", func(*testing.T, string, int) {}, clone.Result{PointInTime: true}, true},
		{"one file changes once", func(t *testing.T, src string, nth int) {
			if nth == 3 {
				write(t, filepath.Join(src, "a", "1"), "changed")
			}
		}, clone.Result{PointInTime: true, Changed: 1}, false},
		{"two files change once", func(t *testing.T, src string, nth int) {
			if nth == 11 {
				write(t, filepath.Join(src, "a", "1"), "changed")
				write(t, filepath.Join(src, "b", "2"), "changed")
			}
		}, clone.Result{PointInTime: true}, true},
		{"a file with two names changes", func(t *testing.T, src string, nth int) {
			if nth == 11 {
				write(t, filepath.Join(src, "b", "linked"), "changed")
			}
		}, clone.Result{PointInTime: true}, true},
		{"a directory changes that has one name of a file", func(t *testing.T, src string, nth int) {
			if nth == 11 {
				write(t, filepath.Join(src, "a", "new"), "new")
			}
		}, clone.Result{PointInTime: true}, true},
		{"files are made, removed and renamed", func(t *testing.T, src string, nth int) {
			if nth == 11 {
				must.Succeed(t, os.Remove(filepath.Join(src, "a", "1")), os.Rename(filepath.Join(src, "b"), filepath.Join(src, "c")),
					os.Rename(filepath.Join(src, "root"), filepath.Join(src, "c", "root")), os.Mkdir(filepath.Join(src, "b"), 0o700))
				write(t, filepath.Join(src, "b", "new"), "new")
				write(t, filepath.Join(src, "new"), "new")
			}
		}, clone.Result{PointInTime: true}, true},
		{"a directory takes the place of a file", func(t *testing.T, src string, nth int) {
			if nth == 11 {
				must.Succeed(t, os.Remove(filepath.Join(src, "root")), os.Mkdir(filepath.Join(src, "root"), 0o700))
				write(t, filepath.Join(src, "root", "new"), "new")
			}
		}, clone.Result{PointInTime: true}, true},
		{"it never holds still", func(t *testing.T, src string, nth int) {
			write(t, filepath.Join(src, "a", "1"), fmt.Sprint("changed ", nth))
			write(t, filepath.Join(src, "b", "2"), fmt.Sprint("changed ", nth))
		}, clone.Result{PointInTime: false, Changed: 2}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, kind := range []string{"xfs", "btrfs"} {
				t.Run(kind, func(t *testing.T) {
					root := testenv.LoopFS(t, kind, 512*mib)
					src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
					must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
					for _, name := range []string{"a", "b"} {
						must.Succeed(t, os.Mkdir(filepath.Join(src, name), 0o755))
						for i := range 4 {
							write(t, filepath.Join(src, name, fmt.Sprint(i)), "content")
						}
					}
					write(t, filepath.Join(src, "root"), "content")
					must.Succeed(t, os.Link(filepath.Join(src, "a", "3"), filepath.Join(src, "b", "linked")))
					awaitTick(t, root)
					nth := 0
					result := tree(t, src, dst, clone.Options{Rounds: 3, Pause: func(context.Context) error {
						nth++
						tt.change(t, src, nth)
						return nil
					}})
					result.Entries, result.Shared, result.Stall = 0, false, 0
					if result != tt.want {
						t.Errorf("%+v, want %+v", result, tt.want)
					}
					if tt.equal {
						clonetest.Same(t, src, dst)
					}
				})
			}
		})
	}
}

// What was written right before counts as changed by clocks that are coarse, and so it is copied again,
// but not for ever: a copy that is faster than the clock is of one moment too.
func TestWrittenRightBefore(t *testing.T) {
	root := testenv.Tmpfs(t, 16*mib)
	for i := range 20 {
		src, dst := filepath.Join(root, fmt.Sprint("src", i)), filepath.Join(root, fmt.Sprint("dst", i))
		must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
		write(t, filepath.Join(src, "a"), "content")
		write(t, filepath.Join(src, "b"), "content")
		if result := tree(t, src, dst, clone.Options{Method: clone.Copy, Rounds: 2}); !result.PointInTime {
			t.Fatalf("copy %d: %+v, although nothing was written meanwhile", i, result)
		}
	}
}

// A copy has the attributes of its source and no others, whatever its directory gives to new entries and whatever
// an earlier pass has left: what more it has could give access that the source denies.
func TestTreeHasNoAttributesThatItsSourceLacks(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		clonetest.Hostile(t, src)
		must.Succeed(t, os.Mkdir(filepath.Join(src, "a", "loses"), 0o755), unix.Setxattr(filepath.Join(src, "a", "loses"), "user.lost", []byte("lost"), 0))
		var entries []string
		must.Succeed(t, filepath.WalkDir(src, func(path string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				entries = append(entries, path)
			}
			if err == nil && e.IsDir() {
				err = clonetest.GiveAll(path)
			}
			return err
		}))
		must.Succeed(t, clonetest.GiveAll(dst), unix.Setxattr(dst, "trusted.old", []byte("old"), 0))
		awaitTick(t, filepath.Dir(src))
		nth := 0
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 3, Pause: func(context.Context) error {
			if nth++; nth != len(entries)/2 {
				return nil
			}
			// From now on directories have default ACLs that these entries do not have.
			for _, path := range entries {
				var st unix.Stat_t
				must.Succeed(t, unix.Lstat(path, &st), unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW))
			}
			must.Succeed(t, unix.Removexattr(filepath.Join(src, "a", "loses"), "user.lost"))
			return nil
		}})
		if !result.PointInTime || nth < 2*len(entries) {
			t.Errorf("%+v after %d entries, want a point in time after a second pass", result, nth)
		}
		clonetest.Same(t, src, dst)
	})
}

// awaitSettled waits until no write that was made so far can be under way any more.
func awaitSettled(t testing.TB, root string) {
	t.Helper()
	for began := time.Now(); time.Since(began) < 1100*time.Millisecond; {
		awaitTick(t, root)
	}
}

// awaitTick waits until files that are changed get another ctime than those before.
func awaitTick(t testing.TB, root string) {
	t.Helper()
	name := filepath.Join(root, "tick")
	ctime := func() unix.Timespec {
		write(t, name, "")
		var st unix.Stat_t
		must.Succeed(t, unix.Stat(name, &st))
		return st.Ctim
	}
	for first := ctime(); ctime() == first; {
	}
	must.Succeed(t, os.Remove(name))
}

// TestWritesThroughMappings: a page that was dirty before the copying began must still
// show as a change when it is written again.
func TestWritesThroughMappings(t *testing.T) {
	onEach(t, sharing, func(t *testing.T, src, dst string, _ clone.Method) {
		var pages [][]byte
		for _, name := range []string{"a", "b"} {
			write(t, filepath.Join(src, name), strings.Repeat("0", 4096))
			f, err := os.OpenFile(filepath.Join(src, name), os.O_RDWR, 0)
			must.Succeed(t, err)
			page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			must.Succeed(t, err, f.Close())
			defer func() { must.Succeed(t, unix.Munmap(page)) }()
			page[0] = 'x' // dirty and mapped writable from here on
			pages = append(pages, page)
		}
		awaitTick(t, filepath.Dir(src))
		nth := 0
		result := tree(t, src, dst, clone.Options{Rounds: 1, Pause: func(context.Context) error {
			if nth++; nth == 2 { // one is copied, one is not
				pages[0][1], pages[1][1] = 'y', 'y'
			}
			return nil
		}})
		if result.PointInTime || result.Changed != 2 {
			t.Errorf("%+v, want two changed files to be noticed", result)
		}
	})
}

func TestFile(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		content := bytes.Repeat([]byte("0123456789abcdef"), 5*mib/16)
		must.Succeed(t, os.WriteFile(filepath.Join(src, "disk"), content, 0o600))
		from, err := os.Open(filepath.Join(src, "disk"))
		must.Succeed(t, err)
		defer from.Close()
		to, err := os.OpenFile(filepath.Join(dst, "disk"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		must.Succeed(t, err)
		defer to.Close()
		must.Succeed(t, clone.File(t.Context(), to, from, method))
		got, err := io.ReadAll(to)
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("the copy has %d other bytes (%v)", len(got), err)
		}
	})

	t.Run("without copy-on-write on btrfs", func(t *testing.T) {
		testenv.NeedPrograms(t, "chattr")
		root := testenv.LoopFS(t, "btrfs", 256*mib)
		must.Succeed(t, os.Mkdir(filepath.Join(root, "src"), 0o755), os.Mkdir(filepath.Join(root, "dst"), 0o755))
		must.Succeed(t, exec.CommandContext(t.Context(), "chattr", "+C", filepath.Join(root, "src")).Run())
		write(t, filepath.Join(root, "src", "disk.img"), strings.Repeat("x", mib))
		awaitTick(t, root)
		if result := tree(t, filepath.Join(root, "src"), filepath.Join(root, "dst"), clone.Options{Rounds: 1}); !result.PointInTime {
			t.Errorf("%+v", result)
		}
		clonetest.Same(t, filepath.Join(root, "src"), filepath.Join(root, "dst"))
	})
}

// What is read and written shares nothing with its source, also where the filesystem could: the source may be
// unknown to who promises space for the copy.
func TestCopySharesNoBlocks(t *testing.T) {
	onEach(t, sharing, func(t *testing.T, src, dst string, _ clone.Method) {
		f, err := os.Create(filepath.Join(src, "sparse"))
		must.Succeed(t, err)
		for _, at := range []int64{0, 17*mib + 4096, 90 * mib} {
			_, err := f.WriteAt(bytes.Repeat([]byte("0123456789abcdef"), 3*mib/32+1), at)
			must.Succeed(t, err)
		}
		must.Succeed(t, f.Truncate(128*mib), f.Sync(), f.Close())
		if result := tree(t, src, dst, clone.Options{Method: clone.Copy}); result.Shared {
			t.Errorf("%+v", result)
		}
		clonetest.Same(t, src, dst)
		for _, path := range []string{filepath.Join(src, "sparse"), filepath.Join(dst, "sparse")} {
			if blocks, shared := clonetest.Extents(t, path); shared || blocks > 6*mib {
				t.Errorf("%s takes %d bytes for 4.5 MiB of data, and shares blocks: %v", path, blocks, shared)
			}
		}
	})
}

// A file without copy-on-write cannot be compressed, as what its directory gets is by default.
func TestFileWithoutCopyOnWriteInCompressedDirectory(t *testing.T) {
	testenv.NeedPrograms(t, "chattr")
	root := testenv.LoopFS(t, "btrfs", 256*mib)
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	disk, other, copied := filepath.Join(src, "d", "disk.img"), filepath.Join(src, "d", "other"), filepath.Join(dst, "copied")
	must.Succeed(t, os.MkdirAll(filepath.Join(src, "d"), 0o755), os.Mkdir(dst, 0o700))
	write(t, disk, "")
	must.Succeed(t, exec.CommandContext(t.Context(), "chattr", "+C", disk).Run(), unix.Setxattr(filepath.Join(src, "d"), "btrfs.compression", []byte("zstd"), 0))
	write(t, disk, strings.Repeat("x", mib))
	write(t, other, strings.Repeat("x", mib))
	awaitTick(t, root)
	nth := 0
	result := tree(t, src, dst, clone.Options{Rounds: 3, Pause: func(context.Context) error {
		if nth++; nth == 3 {
			must.Succeed(t, os.Chmod(disk, 0o640), os.Chmod(other, 0o640))
		}
		return nil
	}})
	if !result.PointInTime || nth != 6 {
		t.Errorf("%+v after %d entries, want a point in time after a second pass", result, nth)
	}
	clonetest.Same(t, src, dst)

	// And the other way round.
	must.Succeed(t, unix.Removexattr(filepath.Join(src, "d"), "btrfs.compression"), unix.Setxattr(other, "btrfs.compression", []byte("lzo"), 0))
	must.Succeed(t, os.Mkdir(copied, 0o700), exec.CommandContext(t.Context(), "chattr", "+C", copied).Run())
	tree(t, src, copied, clone.Options{Rounds: 1})
	clonetest.Same(t, src, copied)
}

// A tree that never holds still is copied as it was when its writers were stopped, on filesystems
// that share blocks and on those that do not.
func TestChangingTreeIsCopiedWhileFrozen(t *testing.T) {
	for kind, method := range map[string]clone.Method{"xfs": clone.Share, "btrfs": clone.Share, "ext4": clone.Copy} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700), os.Mkdir(filepath.Join(src, "a"), 0o755))
			change := func(nth int) {
				write(t, filepath.Join(src, "a", "same"), "content")
				write(t, filepath.Join(src, "a", "1"), fmt.Sprint("changed ", nth))
				write(t, filepath.Join(src, "2"), fmt.Sprint("changed ", nth))
			}
			change(0)
			held, released, nth := false, false, 0
			o := clone.Options{Method: method, Rounds: 1, Pause: func(context.Context) error {
				if nth++; !held {
					change(nth)
				}
				return nil
			}, Hold: func(ctx context.Context) (context.Context, func() error, error) {
				held = true
				return ctx, func() error { released = true; return nil }, nil
			}}
			result := tree(t, src, dst, o)
			if !result.PointInTime || !held || !released || result.Stall == 0 {
				t.Errorf("%+v, held %v, released %v", result, held, released)
			}
			clonetest.Same(t, src, dst)

			// A pod that writes all the same is found out, and a caller that says that one did is believed.
			must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o700))
			o.Pause = func(context.Context) error { nth++; change(nth); return nil }
			if result := tree(t, src, dst, o); result.PointInTime || result.Changed == 0 {
				t.Errorf("while it is written to: %+v", result)
			}
			must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o700))
			o.Hold = func(ctx context.Context) (context.Context, func() error, error) {
				return ctx, func() error { return errThawed }, nil
			}
			if _, err := clone.Tree(t.Context(), open(t, src), open(t, dst), o); !errors.Is(err, errThawed) {
				t.Errorf("the writers were not held all the time: %v", err)
			}
		})
	}
}

var errThawed = errors.New("thawed")

// aFragmentedFile has some hundred extents.
func aFragmentedFile(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Create(path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, f.Close()) })
	for i := range int64(100) {
		_, err := f.WriteAt([]byte("x"), i*2*4096*16)
		must.Succeed(t, err)
	}
	must.Succeed(t, f.Sync())
	return f
}

// A file that would stop its writers for too long is not shared.
func TestLimit(t *testing.T) {
	onEach(t, sharing, func(t *testing.T, src, dst string, _ clone.Method) {
		f := aFragmentedFile(t, filepath.Join(src, "fragmented"))
		few, many := clone.Limit(clone.Stall(50)), clone.Limit(clone.Stall(1000))
		if err := few.Check(f); !errors.Is(err, clone.ErrFragmented) {
			t.Errorf("the file, with a limit for 50 extents: %v, want ErrFragmented", err)
		}
		must.Succeed(t, many.Check(f), clone.Limit(0).Check(f))
		_, err := clone.Tree(t.Context(), open(t, src), open(t, dst), clone.Options{Rounds: 1, MaxStall: few})
		if !errors.Is(err, clone.ErrFragmented) {
			t.Errorf("the tree, with a limit for 50 extents: %v, want ErrFragmented", err)
		}
		must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o700))
		if result := tree(t, src, dst, clone.Options{Rounds: 1, MaxStall: many}); result.Stall == 0 {
			t.Errorf("it does not say how long the writers waited: %+v", result)
		}
	})
}

func TestSubvolume(t *testing.T) {
	root := testenv.LoopFS(t, "btrfs", 512*mib)
	subvolume := func(path string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "btrfs", "subvolume", "create", path).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	src := filepath.Join(root, "src")
	subvolume(src)
	clonetest.Hostile(t, src)
	must.Succeed(t, os.Mkdir(filepath.Join(root, "to"), 0o755))
	to := open(t, filepath.Join(root, "to"))

	must.Succeed(t, clone.Subvolume(open(t, src), to, "snapshot"))
	clonetest.Same(t, src, filepath.Join(root, "to", "snapshot"))
	if err := clone.Subvolume(open(t, src), to, "snapshot"); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second snapshot of that name: %v, want ErrExist", err)
	}

	t.Run("nested subvolumes are counted", func(t *testing.T) {
		for want := range 3 {
			if n, err := clone.Nested(open(t, src)); err != nil || n != want {
				t.Errorf("%d nested (%v), want %d", n, err, want)
			}
			subvolume(filepath.Join(src, "a", fmt.Sprint("nested-", want)))
		}
	})
	t.Run("a directory is no subvolume", func(t *testing.T) {
		if err := clone.Subvolume(open(t, filepath.Join(src, "a")), to, "other"); !errors.Is(err, clone.ErrNotSupported) {
			t.Errorf("%v, want ErrNotSupported", err)
		}
		if _, err := clone.Nested(open(t, filepath.Join(src, "a"))); !errors.Is(err, clone.ErrNotSupported) {
			t.Errorf("the subvolumes in a directory: %v, want ErrNotSupported", err)
		}
		xfs := testenv.LoopFS(t, "xfs", 512*mib)
		if err := clone.Subvolume(open(t, xfs), open(t, xfs), "other"); !errors.Is(err, clone.ErrNotSupported) {
			t.Errorf("on XFS: %v, want ErrNotSupported", err)
		}
	})
}

// XFS changes the ctime of neither of two entries that are exchanged.
func TestExchangedEntriesAreCopied(t *testing.T) {
	exchanged := [][2]string{
		{"file-1", "file-2"}, {"file-3", "changed-1/inside"}, {"directory-1", "directory-2"}, {"link-1", "link-2"},
		{"file-4", "directory-3"}, {"changed-2/inside", "changed-3/inside"},
	}
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		for _, pair := range exchanged {
			for _, name := range pair {
				path := filepath.Join(src, name)
				must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
				switch kind, _, _ := strings.Cut(name, "-"); kind {
				case "directory":
					must.Succeed(t, os.Mkdir(path, 0o755))
					write(t, filepath.Join(path, "inside"), "of "+name)
				case "link":
					must.Succeed(t, os.Symlink(name, path))
				default:
					write(t, path, "of "+name)
				}
			}
		}
		change := func(content string) {
			for _, name := range []string{"changing-1", "changing-2"} {
				write(t, filepath.Join(src, name), content)
			}
		}
		change("")
		all := 0
		tree(t, src, dst, clone.Options{Method: method, Pause: func(context.Context) error { all++; return nil }})
		// From the last step of the first pass on, until one comes after the end. Files that change have more passes made.
		for at, step := all, all; step >= at; at++ {
			must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o755))
			step = 0
			result := tree(t, src, dst, clone.Options{Method: method, Rounds: 4, Pause: func(context.Context) error {
				if step++; step == all {
					change(fmt.Sprint(at))
				}
				if step != at {
					return nil
				}
				for _, pair := range exchanged {
					must.Succeed(t, unix.Renameat2(unix.AT_FDCWD, filepath.Join(src, pair[0]), unix.AT_FDCWD, filepath.Join(src, pair[1]), unix.RENAME_EXCHANGE))
				}
				return nil
			}})
			if !result.PointInTime {
				t.Errorf("with entries exchanged at step %d of %d it never held still: %+v", at, step, result)
			}
			clonetest.Same(t, src, dst)
		}
	})
}

// While pods stand still, a new file in a directory has none of its neighbours copied again.
func TestOnlyWhatChangedInDirectoryIsCopiedAgain(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		for n := range 100 {
			at := filepath.Join(src, "directory", fmt.Sprint(n%10), fmt.Sprint(n))
			must.Succeed(t, os.MkdirAll(filepath.Dir(at), 0o755))
			write(t, at, "content")
		}
		write(t, filepath.Join(src, "directory", "gone"), "content")
		awaitSettled(t, filepath.Dir(src))
		plain := tree(t, src, dst, clone.Options{Method: method})
		must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o755))
		change := sync.OnceFunc(func() { write(t, filepath.Join(src, "directory", "first"), "content") })
		result := tree(t, src, dst, clone.Options{
			Method: method, Rounds: 1,
			Pause: func(context.Context) error { change(); return nil },
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				write(t, filepath.Join(src, "directory", "3", "temporary"), "content")
				must.Succeed(t, os.Remove(filepath.Join(src, "directory", "gone")),
					os.Rename(filepath.Join(src, "directory", "4"), filepath.Join(src, "directory", "moved")))
				return ctx, func() error { return nil }, nil
			},
		})
		clonetest.Same(t, src, dst)
		// The two new files, perhaps twice, and the directory that was moved, with its files.
		if again := result.Entries - plain.Entries; !result.PointInTime || again > 2*2+11 {
			t.Errorf("%d entries were copied again of %d: %+v", again, plain.Entries, result)
		}
	})
}

// An entry that was gone when a pass ended, and is back before the next with the ctime that it had, is in the copy. It
// was exchanged with another, which was removed, and later with a new one: only XFS keeps its ctime then.
func TestEntryThatWasAwayIsCopied(t *testing.T) {
	for _, in := range []string{".", "directory"} {
		t.Run(in, func(t *testing.T) {
			onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
				must.Succeed(t, os.MkdirAll(filepath.Join(src, in), 0o755), os.Mkdir(filepath.Join(src, "other"), 0o755))
				name, other := filepath.Join(src, in, "name"), filepath.Join(src, "other", "name")
				exchange := func() {
					must.Succeed(t, unix.Renameat2(unix.AT_FDCWD, name, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE))
				}
				write(t, name, "content")
				// run copies with the entry away from a step on, and returns how many steps there were before all stood still.
				run := func(from int) (before int) {
					must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o755))
					change := sync.OnceFunc(func() {
						write(t, filepath.Join(src, in, "changes-1"), "")
						write(t, filepath.Join(src, in, "changes-2"), "")
					})
					step, away, still := 0, false, false
					result := tree(t, src, dst, clone.Options{
						Method: method, Rounds: 1,
						Pause: func(context.Context) error {
							change()
							if step++; step == from && !still {
								write(t, other, "another")
								exchange()
								must.Succeed(t, os.Remove(name))
								away = true
							}
							return nil
						},
						Hold: func(ctx context.Context) (context.Context, func() error, error) {
							if before, still = step, true; away {
								write(t, name, "another")
								exchange()
								must.Succeed(t, os.Remove(other))
							}
							return ctx, func() error { return nil }, nil
						},
					})
					if !result.PointInTime {
						t.Errorf("it is %+v", result)
					}
					clonetest.Same(t, src, dst)
					return before
				}
				steps := run(0)
				for from := 1; from <= steps; from++ {
					run(from)
				}
			})
		})
	}
}
