package reconcile_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// aPool is an empty pool without quotas, on which no call works.
func aPool(t *testing.T) *reconcile.Leftovers {
	t.Helper()
	return aPoolAt(t, t.TempDir())
}

func aPoolAt(t *testing.T, path string) *reconcile.Leftovers {
	t.Helper()
	return &reconcile.Leftovers{
		In:         newPoolAt(t, path, nil),
		UnlessBusy: func(_ volume.ID, do func() error) error { return do() },
	}
}

func wantTrash(t *testing.T, p *reconcile.Leftovers, when string, pieces int) {
	t.Helper()
	if got := p.In.Ledger.Summary().Trash.Pieces; got != pieces {
		t.Errorf("%s: %d pieces, want %d", when, got, pieces)
	}
}

// A sync reads the names in the trash, and the reaper erases them meanwhile.
func TestSyncDoesNotQueueErasedTrash(t *testing.T) {
	p := aPool(t)
	p.In.Ledger.Trash().Throw("erased+1", 1)
	p.In.Ledger.Trash().Tried("erased+1", nil)
	must.Succeed(t, p.RecoverTrashed("erased+1"))
	wantTrash(t, p, "after what was listed is erased", 0)

	must.Succeed(t, os.Mkdir(filepath.Join(p.In.Store.Trash().Dir().String(), "left"), 0o700))
	for range 2 {
		must.Succeed(t, p.RecoverTrashed("left"))
		wantTrash(t, p, "after what is there is found", 1)
	}
}

// What a creation left may be what fills the disk, and then the trash has no room for its name. It is erased where it is.
func TestLeftoversWithoutRoomInTrash(t *testing.T) {
	testenv.NeedRoot(t)
	for name, c := range map[string]struct {
		files int
		path  func(p *reconcile.Leftovers) string
		undo  func(p *reconcile.Leftovers) error
	}{
		"failed creation": {1, creationOf("node-1"), func(p *reconcile.Leftovers) error {
			id, err := volume.ParseID(longName)
			return errors.Join(err, p.UndoCreation(id))
		}},
		"interrupted creation": {2*reconcile.Turn + 1, creationOf("node-1"), func(p *reconcile.Leftovers) error {
			return p.RecoverCreations(p.In.Store.Creating().Dir())
		}},
		"creation of another name of the node": {1, creationOf("node-0"), func(p *reconcile.Leftovers) error {
			p.TakeOver()
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			mounted := testenv.LoopFS(t, "xfs", 300<<20)
			pool, foreign := filepath.Join(mounted, "pool"), filepath.Join(mounted, "foreign")
			must.Succeed(t, os.Mkdir(pool, 0o750), os.Mkdir(foreign, 0o700))
			p := aPoolAt(t, pool)
			for _, of := range []string{p.In.Store.Creating().Dir().String(), p.In.Store.Trash().Dir().String()} {
				must.Succeed(t, os.Mkdir(filepath.Join(filepath.Dir(of), "node-0"), 0o700))
			}
			left := c.path(p)
			must.Succeed(t, os.Mkdir(left, 0o700))
			for i := range c.files {
				must.Succeed(t, os.WriteFile(filepath.Join(left, fmt.Sprint(i)), nil, 0o600))
			}
			must.Succeed(t, unix.Setxattr(p.In.Store.Trash().Dir().String(), "trusted.filler", make([]byte, 200), 0))
			fulldisk.Fill(t, foreign, fulldisk.Shortage{Bytes: true})

			must.Succeed(t, c.undo(p))
			if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("what was left is still there: %v", err)
			}
			var files atomic.Uint64
			p.Erase(t.Context(), p.In.Ledger.Trash().Names(true), &files)
			wantTrash(t, p, "at the end", 0)
		})
	}
}

// On btrfs renaming takes room of the trees, which data can have taken all.
func TestCreationThatFillsBtrfs(t *testing.T) {
	p := aPoolAt(t, testenv.MadeFS(t, "btrfs", 512<<20, "-m", "single"))
	left := creationOf("node-1")(p)
	must.Succeed(t, os.Mkdir(left, 0o700))
	fulldisk.Fill(t, left, fulldisk.Shortage{Bytes: true})

	must.Succeed(t, p.RecoverCreations(p.In.Store.Creating().Dir()))
	var files atomic.Uint64
	p.Erase(t.Context(), p.In.Ledger.Trash().Names(true), &files)
	wantTrash(t, p, "at the end", 0)
	must.Succeed(t, os.Mkdir(left, 0o700))
}

func creationOf(node string) func(p *reconcile.Leftovers) string {
	return func(p *reconcile.Leftovers) string {
		return filepath.Join(filepath.Dir(p.In.Store.Creating().Dir().String()), node, longName)
	}
}

// longName has no room in the inode of a directory on XFS that has an attribute as well.
var longName = "pvc-1" + strings.Repeat("-long", 28)
