package pool_test

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestCreateMode(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	inBubble(t, func(t *testing.T, h *harness) {
		v := h.create("pvc-1", 10*mib+1)
		if v.Bytes != 10*mib+4096 {
			t.Errorf("%d bytes, want the size asked for in whole blocks", v.Bytes)
		}
		info, err := os.Stat(h.Path("pool", "pvc-1"))
		must.Succeed(t, err)
		if info.Mode().Perm() != 0o777 {
			t.Errorf("the volume has mode %o, want 777", info.Mode().Perm())
		}
		info, err = os.Stat(h.Path("pool"))
		must.Succeed(t, err)
		if info.Mode().Perm() != 0o750 {
			t.Errorf("the pool has mode %o, want 750", info.Mode().Perm())
		}
		if got := labelOf(t, h, h.Path("pool", "pvc-1")); got != label.Container {
			t.Errorf("label %q, want %q", got, label.Container)
		}
		h.wantVolumes("pvc-1")
		h.wantClean()
	})
}

func TestPoolDirectoryModeIsTightened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("pool"), 0o755))
		h.start(`[{"name":"local","path":"pool"}]`)
		info := must.Value(os.Stat(h.Path("pool")))(t)
		if info.Mode().Perm() != 0o750 {
			t.Errorf("the pool has mode %o, want 750", info.Mode().Perm())
		}
	})
}

func TestConcurrentCreatesDoNotOversell(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		available := h.capacity()
		// Of a directory more may be possible than is reported, by what a block volume takes for its extents.
		size := available / 8 * 3
		var made, refused sync.Map
		var calls sync.WaitGroup
		for i := range 32 {
			calls.Go(func() {
				name := fmt.Sprintf("pvc-%d", i)
				_, err := h.Create(t.Context(), pool.Request{ID: id(t, name), Range: volume.Range{Required: size}})
				switch {
				case err == nil:
					made.Store(name, true)
				case errors.Is(err, volume.ErrNoSpace):
					refused.Store(name, true)
				default:
					t.Error(err)
				}
			})
		}
		calls.Wait()
		if got := length(&made); got != 2 {
			t.Errorf("%d volumes were promised, 2 fit", got)
		}
		if got := length(&refused); got != 30 {
			t.Errorf("%d calls were refused, want 30", got)
		}
		h.wantClean()
	})
}

func length(m *sync.Map) (n int) {
	m.Range(func(any, any) bool { n++; return true })
	return n
}

func TestCreateDoesNotReplaceLostVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Path("elsewhere")))
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrLost)
		wantGone(t, h.Path("pool", "pvc-1"))
		// Listed, abnormal.
		page, _ := h.List(t.Context(), volume.ID{}, 10)
		if len(page) != 1 || !page[0].Lost || !page[0].Condition.Abnormal {
			t.Errorf("list %+v, want the lost volume as abnormal", page)
		}
		wantError(t, h.publish("pvc-1", "a"), volume.ErrNotFound)
		// It comes back when its directory does.
		must.Succeed(t, os.Rename(h.Path("elsewhere"), h.Path("pool", "pvc-1")))
		must.Succeed(t, h.publish("pvc-1", "a"))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.wantClean()
	})
}

func TestDirectoryOfUpstreamDriverIsServed(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-old"), 0o755))
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-old", "data"), nil, 0o644))
		must.Succeed(t, h.publish("pvc-old", "a"))
		v := must.Value(h.Volume(t.Context(), id(t, "pvc-old")))(t)
		if v.Lost || v.Condition.Abnormal || v.Bytes < gib {
			t.Errorf("volume %+v, want one of the pool's size, in order", v)
		}
		// Creating it again is the retry of a call that the upstream KubeVirt driver answered.
		if again := h.create("pvc-old", mib); again.Bytes != v.Bytes {
			t.Errorf("created again it has %d bytes, want %d", again.Bytes, v.Bytes)
		}
		must.Succeed(t, h.unpublish("pvc-old", "a"))
		if _, err := os.Stat(h.Path("pool", "pvc-old", "data")); err != nil {
			t.Error(err)
		}
		h.delete("pvc-old")
		wantGone(t, h.Path("pool", "pvc-old"))
		h.wantClean()
	})
}

func TestOtherDirectoriesAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		outside := t.TempDir()
		for _, name := range []string{"lost+found", "csi-snapshots", ".hidden"} {
			must.Succeed(t, os.MkdirAll(h.Path("pool", name, "content"), 0o755))
		}
		must.Succeed(t, os.WriteFile(h.Path("pool", "file"), nil, 0o644))
		must.Succeed(t, os.Symlink(outside, h.Path("pool", "link")))
		h.start(`[{"name":"local","path":"pool","snapshotPath":"pool/csi-snapshots/here","snapshotProvider":"reflink"}]`)
		h.wantVolumes()
		for _, name := range []string{"csi-snapshots", "file", "link"} {
			wantError(t, h.Delete(t.Context(), id(t, name)), volume.ErrNotFound)
			wantError(t, h.publish(name, "a"), volume.ErrNotFound)
		}
		// Their names are not free, either.
		for _, name := range []string{"csi-snapshots", "file", "link"} {
			if _, err := h.Create(t.Context(), pool.Request{ID: id(t, name), Range: volume.Range{Required: mib}}); err == nil {
				t.Errorf("created the volume %s over what is there", name)
			}
		}
		for _, name := range []string{"lost+found/content", "csi-snapshots/content", ".hidden/content", "file", "link"} {
			if _, err := os.Lstat(h.Path("pool", name)); err != nil {
				t.Error(err)
			}
		}
		h.wantClean()
	})
}

func TestDefaultPool(t *testing.T) {
	for datadir, want := range map[string]string{
		`[{"name":"only","path":"a"}]`:                                 "only",
		`[{"name":"one","path":"a"},{"name":"legacy","path":"b"}]`:     "legacy",
		`[{"name":"one","path":"a"},{"name":"two","path":"b"}]`:        "",
		`[{"name":"one","path":"a"},{"name":"Legacy","path":"b"}]`:     "",
		`[{"name":"legacy","path":"a","shared":true,"reserve":"1Gi"}]`: "legacy",
	} {
		t.Run(datadir, func(t *testing.T) {
			onPools(t, datadir, func(t *testing.T, h *harness) {
				v, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
				if want == "" {
					wantError(t, err, volume.ErrInvalid)
				} else if err != nil || v.Pool.String() != want {
					t.Errorf("pool %q, %v; want %q", v.Pool, err, want)
				}
			})
		})
	}
}
