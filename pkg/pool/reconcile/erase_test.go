package reconcile_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/go-logr/logr/funcr"

	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// trashOf puts a piece with so many files into the trash.
func trashOf(t *testing.T, p *reconcile.Leftovers, name string, files int) (path string) {
	t.Helper()
	path = filepath.Join(p.In.Store.Trash().Dir().String(), name)
	must.Succeed(t, os.Mkdir(path, 0o700))
	for i := range files {
		must.Succeed(t, os.WriteFile(filepath.Join(path, fmt.Sprint(i)), nil, 0o600))
	}
	p.In.Ledger.Trash().Throw(name, store.ParseTrashName(name).Promised)
	return path
}

func TestSmallTrashIsNotHeldUpByLarge(t *testing.T) {
	p := aPool(t)
	trashOf(t, p, "large+0", 3*reconcile.Turn)
	trashOf(t, p, "small+0", 1)
	var gone []string
	p.In.Log = funcr.New(func(_, line string) {
		for _, name := range []string{"large+0", "small+0", "late+0"} {
			if strings.Contains(line, "Removed trash") && strings.Contains(line, name) {
				gone = append(gone, name)
			}
		}
		if len(gone) == 1 {
			trashOf(t, p, "late+0", 1)
		}
	}, funcr.Options{Verbosity: 4})
	var files atomic.Uint64
	p.Erase(t.Context(), p.In.Ledger.Trash().Names(false), &files)
	if want := []string{"small+0", "late+0", "large+0"}; !slices.Equal(gone, want) {
		t.Errorf("%v were erased in that order, want %v", gone, want)
	}
	wantTrash(t, p, "at the end", 0)
}

// Each turn would meet it again, and never come to an end.
func TestLargeTrashWithWhatCannotBeRemoved(t *testing.T) {
	testenv.NeedRoot(t)
	p := aPool(t)
	large := trashOf(t, p, "large+0", 3*reconcile.Turn)
	mount := filepath.Join(large, "0")
	must.Succeed(t, os.Remove(mount))
	must.Succeed(t, os.Mkdir(mount, 0o700))
	must.Succeed(t, syscall.Mount("tmpfs", mount, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, syscall.Unmount(mount, 0)) })
	failed := 0
	p.In.Failed = func(error, string, ...any) { failed++ }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var files atomic.Uint64
	p.Erase(ctx, p.In.Ledger.Trash().Names(false), &files)
	if left, err := os.ReadDir(large); failed != 1 || err != nil || len(left) != 1 {
		t.Errorf("it failed %d times, and %d entries are left, %v; want one of each", failed, len(left), err)
	}
}
