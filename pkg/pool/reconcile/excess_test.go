package reconcile_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const half = 400 * mib

// available is what can be promised of 800 MiB of which half is taken, in MiB. The volumes are promised more than that, so that this is not foreign.
func available(p *reconcile.View) int64 {
	return p.Ledger.Available(dir.Space{SizeBytes: 2 * half, FreeBytes: half, BlockBytes: 4096}) / mib
}

// exceeding is a block volume that shares blocks, and has 3 MiB more than it was promised.
func exceeding(t *testing.T, p *reconcile.View, name string) (path string) {
	t.Helper()
	path = filepath.Join(p.Store.Root().String(), name)
	must.Succeed(t, os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, content.FileName), []byte(strings.Repeat("x", 4*mib)), 0o600))
	p.Ledger.Note(must.Value(volume.ParseID(name))(t), ledger.NewInfo(mib, "uid", 0, ledger.HasDirectory|ledger.HasRecord|ledger.IsBlock|ledger.Shares))
	return path
}

func TestMeasureExcess(t *testing.T) {
	p := aPool(t).In
	p.Ledger.Note(must.Value(volume.ParseID("pvc-rest"))(t), ledger.NewInfo(half, "uid", 0, ledger.HasDirectory|ledger.HasRecord))
	want := func(when string, less int64) {
		t.Helper()
		if got := int64(half/mib) - available(p); got != less {
			t.Errorf("%s: %d MiB less can be promised, want %d", when, got, less)
		}
	}
	first, second := exceeding(t, p, "pvc-1"), exceeding(t, p, "pvc-2")
	want("not measured", 2)
	p.Usage().MeasureExcess()
	want("measured", 2+2*3)
	must.Succeed(t, os.Truncate(filepath.Join(first, content.FileName), 0))
	must.Succeed(t, os.Rename(second, second+"-away"))
	p.Usage().MeasureExcess()
	want("one is missing", 2+2*3)
	must.Succeed(t, os.WriteFile(second, nil, 0o600))
	p.Usage().MeasureExcess()
	want("one is no directory", 2+2*3)
	must.Succeed(t, os.Remove(second), os.Rename(second+"-away", second), os.Remove(filepath.Join(second, content.FileName)))
	p.Usage().MeasureExcess()
	want("one has lost its file, the other has given back what it had", 2)
}

// Until it is measured what volumes take without a snapshot, its promise is kept.
func TestErasedTrashGivesItsPromiseBackOnceVolumesAreMeasured(t *testing.T) {
	for name, c := range map[string]struct {
		family   string
		known    bool
		measured bool
	}{
		"a snapshot":                     {"family", true, true},
		"one from before a start":        {"", false, true},
		"a volume that shared no blocks": {"", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := aPool(t)
			exceeding(t, p.In, "pvc-1")
			for _, piece := range []string{"piece-1+1048576", "piece-2+1048576"} {
				trashOf(t, p, piece, 1)
				if c.known {
					p.In.Ledger.Trash().Removed(piece, c.family)
				}
			}
			p.In.Ledger.Note(must.Value(volume.ParseID("pvc-rest"))(t), ledger.NewInfo(half, "uid", 0, ledger.HasDirectory|ledger.HasRecord))
			var files atomic.Uint64
			p.Erase(t.Context(), p.In.Ledger.Trash().Names(false), &files)
			wantTrash(t, p, "erased", 0)
			want := int64(half/mib) - 1
			if c.measured {
				want -= 3
			}
			if got := available(p.In); got != want {
				t.Errorf("%d MiB can be promised, want %d", got, want)
			}
		})
	}
}
