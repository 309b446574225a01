package clone_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Of a tree with more names than are remembered little is copied while pods stand still, too: what has changed, and on XFS the files
// of a directory that has which are not remembered: docs/snapshots.md says how many are.
func TestMoreNamesThanAreRemembered(t *testing.T) {
	const directories, files = 10, 20
	for name, in := range map[string]string{"a file changes": "", "files come": ".", "files come beside others": "0"} {
		t.Run(name, func(t *testing.T) {
			onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
				for n := range directories * files {
					at := filepath.Join(src, fmt.Sprint(n/files), fmt.Sprint(n))
					must.Succeed(t, os.MkdirAll(filepath.Dir(at), 0o755))
					write(t, at, "content")
				}
				write(t, filepath.Join(src, "changes"), "")
				awaitSettled(t, filepath.Dir(src))
				plain := tree(t, src, dst, clone.Options{Method: method})
				must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o755))
				nth := 0
				change := func() {
					nth++
					write(t, filepath.Join(src, "changes"), fmt.Sprint(nth))
					if in != "" {
						write(t, filepath.Join(src, in, fmt.Sprint("new-", nth)), "")
					}
				}
				first := sync.OnceFunc(change)
				o := clone.Options{
					Method: method, Rounds: 1,
					Pause: func(context.Context) error { first(); return nil },
					Hold: func(ctx context.Context) (context.Context, func() error, error) {
						change()
						return ctx, func() error { return nil }, nil
					},
				}
				result, err := clone.TreeWithin(t.Context(), open(t, src), open(t, dst), o, directories*files/4, 32*mib)
				must.Succeed(t, err)
				clonetest.Same(t, src, dst)
				most := int64(2 * 4)
				if in == "0" && filepath.Base(t.Name()) == "xfs" {
					most += 2 * files
				}
				if again := result.Entries - plain.Entries; !result.PointInTime || again > most {
					t.Errorf("%d entries were copied again of %d: %+v", again, plain.Entries, result)
				}
			})
		})
	}
}

// Of that many files the names are remembered, and of a quarter more directories, as docs/snapshots.md says. What is beyond is told.
func TestNamesThatAreRemembered(t *testing.T) {
	const files, directories = 98_304, 131_072
	names := clone.NewNames()
	entry := func(n uint64, kind uint32) *unix.Stat_t { return &unix.Stat_t{Ino: n, Mode: kind} }
	add := func(from, to uint64, kind uint32) {
		for n := from; n < to; n++ {
			names.Add(1, fmt.Sprint(n), entry(n, kind))
		}
	}
	known := func(n uint64, kind uint32) bool { return names.Has(1, fmt.Sprint(n), entry(n, kind), false) }
	add(0, files, unix.S_IFREG)
	if !known(0, unix.S_IFREG) || !known(files-1, unix.S_IFREG) || names.Has(1, "another", entry(1, unix.S_IFREG), true) {
		t.Errorf("not all of %d files are remembered", files)
	}
	add(files, files+1, unix.S_IFREG)
	if known(files, unix.S_IFREG) || !names.Has(1, fmt.Sprint(files), entry(files, unix.S_IFREG), true) {
		t.Error("one more is remembered, or taken for one that is not there")
	}
	add(files+1, directories+1, unix.S_IFDIR)
	if !known(directories, unix.S_IFDIR) {
		t.Errorf("not all directories up to %d entries are remembered", directories)
	}
	if add(directories+1, directories+2, unix.S_IFDIR); known(directories+1, unix.S_IFDIR) {
		t.Error("one more is remembered")
	}
}

// None who write are stopped in vain: comparing all entries is the least that is done meanwhile.
func TestNothingIsHeldThatCannotBeComparedInTime(t *testing.T) {
	root := testenv.Tmpfs(t, 16*mib)
	src, dst, again := filepath.Join(root, "src"), filepath.Join(root, "dst"), filepath.Join(root, "again")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.Mkdir(again, 0o755))
	write(t, filepath.Join(src, "1"), "")
	write(t, filepath.Join(src, "2"), "")
	o := clone.Options{
		Method: clone.Copy, Rounds: 1, HoldAtMost: time.Nanosecond,
		Pause: func(context.Context) error {
			return os.WriteFile(filepath.Join(src, "1"), []byte("changes"), 0o600)
		},
		Hold: func(context.Context) (context.Context, func() error, error) {
			t.Error("they are stopped")
			return nil, nil, errThawed
		},
	}
	_, err := clone.Tree(t.Context(), open(t, src), open(t, dst), o)
	must.ErrorIs(t, err, clone.ErrTooMany)
	o.HoldAtMost = time.Hour
	held := false
	o.Hold = func(ctx context.Context) (context.Context, func() error, error) {
		held = true
		return ctx, func() error { return nil }, nil
	}
	if tree(t, src, again, o); !held {
		t.Error("it was not stopped")
	}
}
