package diff_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// onEach runs a test on filesystems whose files share blocks, and on one where they do not.
func onEach(t *testing.T, test func(t *testing.T, root string, method clone.Method)) {
	for kind, method := range map[string]clone.Method{"xfs": clone.Share, "btrfs": clone.Share, "ext4": clone.Copy} {
		t.Run(kind, func(t *testing.T) { test(t, testenv.LoopFS(t, kind, 512*mib), method) })
	}
}

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// trees are the differences, a line for each.
func trees(t *testing.T, from, to string) []string {
	t.Helper()
	var all []string
	must.Succeed(t, diff.Trees(t.Context().Err, open(t, from), open(t, to), func(c diff.Change) error {
		all = append(all, strings.TrimSuffix(string(c.Kind)+" "+c.Path+" "+strings.Join(c.What, ","), " "))
		return nil
	}))
	return all
}

// written is when the plain files were, so that a test can change them and it does not show by that.
var written = time.Unix(1000, 0)

// copied is a hostile tree and a copy of it.
func copied(t *testing.T, root string, method clone.Method) (from, to string) {
	t.Helper()
	from, to = filepath.Join(root, "from"), filepath.Join(root, "to")
	must.Succeed(t, errors.Join(os.Mkdir(from, 0o755), os.Mkdir(to, 0o700)))
	clonetest.Hostile(t, from)
	must.Succeed(t, os.MkdirAll(filepath.Join(from, "plain", "below"), 0o755))
	for _, name := range []string{"content", "mode", "owner", "size", "mtime", "xattr", "type", "gone", "below/deep"} {
		path := filepath.Join(from, "plain", name)
		must.Succeed(t, os.WriteFile(path, bytes.Repeat([]byte("0123456789abcdef"), 1024), 0o644))
		must.Succeed(t, os.Chtimes(path, written, written))
	}
	must.Succeed(t, os.Symlink("here", filepath.Join(from, "plain", "link")))
	must.Succeed(t, must.Err(clone.Tree(t.Context(), open(t, from), open(t, to), clone.Options{Method: method})))
	must.Succeed(t, clone.Sync(open(t, to)))
	return from, to
}

func TestTrees(t *testing.T) {
	onEach(t, func(t *testing.T, root string, method clone.Method) {
		from, to := copied(t, root, method)
		if all := trees(t, from, to); len(all) > 0 {
			t.Errorf("a copy differs: %q", all)
		}
		in := func(name string) string { return filepath.Join(to, "plain", name) }
		f, err := os.OpenFile(in("content"), os.O_WRONLY, 0)
		must.Succeed(t, err)
		_, err = f.WriteAt([]byte("X"), 8000)
		must.Succeed(t, errors.Join(err, f.Sync(), f.Close(), os.Chtimes(in("content"), written, written)))
		must.Succeed(t, errors.Join(
			os.Chmod(in("mode"), 0o600),
			os.Chown(in("owner"), 1, 2),
			os.Truncate(in("size"), 5),
			os.Chtimes(in("size"), written, written),
			os.Chtimes(in("mtime"), time.Unix(1, 0), time.Unix(1, 0)),
			unix.Lsetxattr(in("xattr"), "user.name", []byte("value"), 0),
			os.Remove(in("type")), unix.Mkfifo(in("type"), 0o644),
			os.Remove(in("gone")),
			os.Remove(in("link")), os.Symlink("there", in("link")),
			os.MkdirAll(in("new/below"), 0o755),
			os.WriteFile(in("below/\xff\n"), nil, 0o644),
			os.Chmod(to, 0o711),
		))
		want := []string{
			"changed . mode",
			"added plain/below/\xff\n",
			"changed plain/content content",
			"removed plain/gone",
			"changed plain/link mtime,content",
			"changed plain/mode mode",
			"changed plain/mtime mtime",
			"added plain/new/",
			"changed plain/owner owner",
			"changed plain/size size",
			"changed plain/type type",
			"changed plain/xattr xattr",
		}
		if diff := cmp.Diff(want, trees(t, from, to)); diff != "" {
			t.Errorf("the differences are others (-want +got):\n%s", diff)
		}
	})
}

func TestTreesDeep(t *testing.T) {
	root := t.TempDir()
	var ends []*dir.Dir
	for _, name := range []string{"from", "to"} {
		must.Succeed(t, os.Mkdir(filepath.Join(root, name), 0o755))
		at := open(t, filepath.Join(root, name))
		for range 3000 {
			next, err := at.Make("d")
			must.Succeed(t, err)
			_ = at.Close()
			at = next
		}
		ends = append(ends, at)
	}
	defer func() { _, _ = ends[0].Close(), ends[1].Close() }()
	f, err := ends[1].MakeFile("bottom")
	must.Succeed(t, errors.Join(err, f.Close()))
	var before unix.Rlimit
	must.Succeed(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 300, Max: before.Max}))
	defer func() { must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()
	defer debug.SetMaxStack(debug.SetMaxStack(1 << 20)) // a stack that grows with the depth ends the program
	all := trees(t, filepath.Join(root, "from"), filepath.Join(root, "to"))
	if len(all) != 1 || !strings.HasPrefix(all[0], "added d/d/") || !strings.HasSuffix(all[0], "/bottom") {
		t.Errorf("%d differences, want the file at the bottom", len(all))
	}
}

func TestTreesLeavesMountsAlone(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"from/mounted", "to/mounted"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(root, name), 0o755))
	}
	mounted := filepath.Join(root, "to", "mounted")
	must.Succeed(t, syscall.Mount("tmpfs", mounted, "tmpfs", 0, "mode=0755"))
	defer func() { must.Succeed(t, syscall.Unmount(mounted, 0)) }()
	must.Succeed(t, os.WriteFile(filepath.Join(mounted, "secret"), nil, 0o600))
	if all := trees(t, filepath.Join(root, "from"), filepath.Join(root, "to")); len(all) > 0 {
		t.Errorf("what is mounted was compared: %q", all)
	}
}

func TestFiles(t *testing.T) {
	onEach(t, func(t *testing.T, root string, method clone.Method) {
		const size = 64 * mib
		from, to := filepath.Join(root, "from"), filepath.Join(root, "to")
		write := func(path string, at int64, data []byte) {
			t.Helper()
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
			must.Succeed(t, err)
			_, err = f.WriteAt(data, at)
			must.Succeed(t, errors.Join(err, f.Sync(), f.Close()))
		}
		write(from, 0, bytes.Repeat([]byte("x"), 4*mib))
		write(from, 32*mib, bytes.Repeat([]byte("y"), mib))
		must.Succeed(t, os.Truncate(from, size))
		a, err := os.Open(from)
		must.Succeed(t, err)
		defer a.Close()
		c, err := os.Create(to)
		must.Succeed(t, err)
		must.Succeed(t, errors.Join(clone.File(t.Context(), c, a, method), c.Sync(), c.Close()))

		ranges := func() (all []diff.Range) {
			t.Helper()
			b, err := os.Open(to)
			must.Succeed(t, err)
			defer b.Close()
			must.Succeed(t, diff.Files(t.Context().Err, a, b, func(r diff.Range) error { all = append(all, r); return nil }))
			return all
		}
		if all := ranges(); len(all) > 0 {
			t.Errorf("a copy differs: %v", all)
		}
		write(to, mib, bytes.Repeat([]byte("x"), 8192)) // the same again, in new blocks
		write(to, 2*mib, []byte("z"))
		write(to, 3*mib-100, bytes.Repeat([]byte("z"), 200))
		write(to, 40*mib, []byte("in a hole"))
		f, err := os.OpenFile(to, os.O_RDWR, 0)
		must.Succeed(t, errors.Join(err, unix.Fallocate(int(f.Fd()), 0, 48*mib, mib), f.Sync(), f.Close())) // reads as before
		must.Succeed(t, exec.CommandContext(t.Context(), "fallocate", "--punch-hole", "--offset", "33554432", "--length", "8192", to).Run())
		must.Succeed(t, os.Truncate(to, size+5000))
		want := []diff.Range{{2 * mib, 4096}, {3*mib - 4096, 8192}, {32 * mib, 8192}, {40 * mib, 4096}, {size, 5000}}
		if diff := cmp.Diff(want, ranges()); diff != "" {
			t.Errorf("other ranges differ (-want +got):\n%s", diff)
		}
	})
}

// What lies at the same place of two devices is not the same.
func TestFilesOnSeveralDevices(t *testing.T) {
	var layers []string
	var places []uint64
	for _, name := range []string{"a", "b"} {
		layer := testenv.LoopFS(t, "ext4", 512*mib)
		path := filepath.Join(layer, name)
		must.Succeed(t, os.WriteFile(path, bytes.Repeat([]byte(name), mib), 0o600))
		f, err := os.Open(path)
		must.Succeed(t, err)
		got := ioctl.Extents{Length: mib, Flags: 1} // FIEMAP_FLAG_SYNC
		got.Wanted = uint32(len(got.Extents))
		must.Succeed(t, errors.Join(ioctl.Do(ioctl.File{File: f}, ioctl.GetExtents, &got), f.Close()))
		layers, places = append(layers, layer), append(places, got.Extents[0].Physical)
	}
	if places[0] != places[1] {
		t.Fatalf("the files lie at %d and %d of their devices: nothing is tested", places[0], places[1])
	}
	both := t.TempDir()
	must.Succeed(t, syscall.Mount("overlay", both, "overlay", syscall.MS_RDONLY, "lowerdir="+strings.Join(layers, ":")))
	defer func() { must.Succeed(t, syscall.Unmount(both, 0)) }()
	a, err := os.Open(filepath.Join(both, "a"))
	must.Succeed(t, err)
	defer a.Close()
	b, err := os.Open(filepath.Join(both, "b"))
	must.Succeed(t, err)
	defer b.Close()
	var all []diff.Range
	must.Succeed(t, diff.Files(t.Context().Err, a, b, func(r diff.Range) error { all = append(all, r); return nil }))
	if diff := cmp.Diff([]diff.Range{{0, mib}}, all); diff != "" {
		t.Errorf("other ranges differ (-want +got):\n%s", diff)
	}
}

// What shares its blocks is not read.
func TestFilesReadsNothingThatIsShared(t *testing.T) {
	root := testenv.LoopFS(t, "xfs", 512*mib)
	paths := []string{filepath.Join(root, "from"), filepath.Join(root, "to")}
	must.Succeed(t, os.WriteFile(paths[0], bytes.Repeat([]byte("x"), 16*mib), 0o600))
	a, err := os.Open(paths[0])
	must.Succeed(t, err)
	defer a.Close()
	b, err := os.Create(paths[1])
	must.Succeed(t, err)
	defer b.Close()
	must.Succeed(t, errors.Join(clone.File(t.Context(), b, a, clone.Share), b.Sync()))
	// A descriptor that cannot be read with.
	unreadable, err := os.OpenFile(paths[1], os.O_WRONLY, 0)
	must.Succeed(t, err)
	defer unreadable.Close()
	must.Succeed(t, diff.Files(t.Context().Err, a, unreadable, func(r diff.Range) error { t.Errorf("%v differs", r); return nil }))
}

func TestTreesEndWithContext(t *testing.T) {
	from, to := copied(t, testenv.LoopFS(t, "xfs", 512*mib), clone.Share)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := diff.Trees(ctx.Err, open(t, from), open(t, to), func(diff.Change) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
}
