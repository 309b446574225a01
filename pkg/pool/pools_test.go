package pool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// twoPools are one on a filesystem of its own, mounted at root/disk, and another.
const twoPools = `[{"name":"legacy","path":"disk","requireMount":true},{"name":"other","path":"other"}]`

func disk(t *testing.T, h *harness) {
	t.Helper()
	must.Succeed(t, syscall.Mount("tmpfs", h.Path("disk"), "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { _ = syscall.Unmount(h.Path("disk"), syscall.MNT_DETACH) })
}

// onDisk runs a test on a node with twoPools.
func onDisk(t *testing.T, test func(t *testing.T, b *harness)) {
	t.Helper()
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		disk(t, h)
		h.start(twoPools)
		test(t, h)
	})
}

func TestUnmountedPoolIsNotWritten(t *testing.T) {
	testenv.NeedRoot(t)
	for _, datadir := range []string{twoPools, strings.Replace(twoPools, `,"requireMount":true`, "", 1)} {
		t.Run(datadir, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
				disk(t, h)
				h.start(datadir)
				h.create("pvc-1", mib)
				// Nothing holds the filesystem: it can be unmounted and kept by a bind.
				must.Succeed(t, os.Mkdir(h.Path("aside"), 0o755))
				must.Succeed(t, syscall.Mount(h.Path("disk"), h.Path("aside"), "", syscall.MS_BIND, ""))
				defer func() { must.Succeed(t, syscall.Unmount(h.Path("aside"), 0)) }()
				must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))

				_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
				wantError(t, err, volume.ErrNoSpace)
				_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
				wantError(t, err, volume.ErrUnavailable)
				wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
				wantError(t, h.publish("pvc-1", "a"), volume.ErrUnavailable)
				h.later(5 * time.Minute)
				if left := names(t, h.Path("disk")); len(left) > 0 {
					t.Errorf("the bare mount point holds %q", left)
				}
				// Its volumes are still listed, and the other pool serves.
				page, _ := h.List(t.Context(), volume.ID{}, 10)
				if len(page) != 1 || !page[0].Condition.Abnormal {
					t.Errorf("list %+v, want pvc-1 as abnormal", page)
				}
				// Mounted again, it is the same pool.
				must.Succeed(t, syscall.Mount(h.Path("aside"), h.Path("disk"), "", syscall.MS_BIND, ""))
				h.later(10 * time.Second)
				h.delete("pvc-1")
			})
		})
	}
}

// The answer to a creation is lost, and after a reboot the pool is not mounted: the call that
// is repeated cannot know of the volume, and has another node tried. No client has seen the
// volume yet. It is there when the pool is, and the same call finds it.
func TestRepeatedCreateWhilePoolIsAwayAfterRestart(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		must.Succeed(t, os.Mkdir(h.Path("aside"), 0o755))
		disk(t, h)
		must.Succeed(t, syscall.Mount(h.Path("disk"), h.Path("aside"), "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(h.Path("aside"), syscall.MNT_DETACH)) })
		h.start(twoPools)
		made := h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))

		h.start(twoPools)
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		must.Succeed(t, syscall.Mount(h.Path("aside"), h.Path("disk"), "", syscall.MS_BIND, ""))
		h.later(10 * time.Second)
		h.wantVolumes("pvc-1")
		if again := h.create("pvc-1", mib); again.Bytes != made.Bytes {
			t.Errorf("made again it is %+v, want %+v", again, made)
		}
	})
}

// A pool that is mounted after the driver started, as a pool mounter does.
func TestMountedOverStartedPool(t *testing.T) {
	testenv.NeedRoot(t)
	const datadir = `[{"name":"local","path":"disk"}]`
	mounted := func(t *testing.T, test func(t *testing.T, b *harness)) func(*testing.T) {
		return func(t *testing.T) {
			onPools(t, datadir, func(t *testing.T, h *harness) {
				test(t, h)
			})
		}
	}
	serves := func(t *testing.T, h *harness, want bool) {
		t.Helper()
		h.later(10 * time.Second)
		if err := h.Status()[0].Err; (err == nil) != want {
			t.Fatalf("the pool serves: %v, want %v", err, want)
		}
		if got := h.capacity(); (got > 0) != want {
			t.Errorf("capacity %d, want above 0: %v", got, want)
		}
	}
	t.Run("empty is replaced", mounted(t, func(t *testing.T, h *harness) {
		bare := manifest(t, h.Path("disk"))
		disk(t, h)
		serves(t, h, true)
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
		h.later(2 * time.Minute)

		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
		// No more than the mark was written into it, also by a driver that starts now.
		own := h.Path("disk", ".hostpath-provisioner")
		for range 2 {
			serves(t, h, false)
			_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
			wantError(t, err, volume.ErrNoSpace)
			h.later(5 * time.Minute)
			now := manifest(t, h.Path("disk"))
			if _, marked := now[own+"/covered"]; !marked {
				t.Error("the bare directory has no mark")
			}
			delete(now, own+"/covered")
			now[own] = bare[own]
			if diff := cmp.Diff(bare, now); diff != "" {
				t.Errorf("the bare directory changed (-before +now):\n%s", diff)
			}
			h.restart(datadir)
		}

		disk(t, h) // another one
		serves(t, h, true)
		h.create("pvc-2", mib)
		h.wantVolumes("pvc-2")
		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
		disk(t, h) // and a third, while the second has a volume
		serves(t, h, false)
	}))
	for name, fill := range map[string]func(b *harness){
		"with a volume is kept": func(h *harness) { h.create("pvc-1", mib) },
		"with a directory from before the driver is kept": func(h *harness) {
			must.Succeed(h.t, os.Mkdir(h.Path("disk", "pvc-by-hand"), 0o755))
		},
		"with a record is kept": func(h *harness) {
			h.create("pvc-1", mib)
			must.Succeed(h.t, os.Remove(h.Path("disk", "pvc-1")))
		},
		"with the trash of another node is kept": func(h *harness) {
			must.Succeed(h.t, os.MkdirAll(h.Path("disk", ".hostpath-provisioner", "trash", "node-2", "pvc-1.x"), 0o700))
		},
		"with a creation of another node is kept": func(h *harness) {
			must.Succeed(h.t, os.MkdirAll(h.Path("disk", ".hostpath-provisioner", "creating", "node-2", "pvc-1"), 0o700))
		},
	} {
		t.Run(name, mounted(t, func(t *testing.T, h *harness) {
			fill(h)
			h.later(15 * time.Second)
			disk(t, h)
			serves(t, h, false)
			if left := names(t, h.Path("disk")); len(left) > 0 {
				t.Errorf("the new filesystem holds %q", left)
			}
			must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
			serves(t, h, true)
		}))
	}
	t.Run("empty is kept when it was moved away", mounted(t, func(t *testing.T, h *harness) {
		must.Succeed(t, os.Rename(h.Path("disk"), h.Path("away")))
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		serves(t, h, false)
	}))
	t.Run("empty is kept when a link takes its place", mounted(t, func(t *testing.T, h *harness) {
		outside := testenv.Tmpfs(t, 64*mib)
		must.Succeed(t, os.Rename(h.Path("disk"), h.Path("away")))
		must.Succeed(t, os.Symlink(outside, h.Path("disk")))
		serves(t, h, false)
		if left := names(t, outside); len(left) > 0 {
			t.Errorf("where the link leads is %q now", left)
		}
		must.Succeed(t, os.Remove(h.Path("disk")))
		must.Succeed(t, os.Rename(h.Path("away"), h.Path("disk")))
		serves(t, h, true)
	}))
	t.Run("empty is replaced where a link leads that was there first", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newHarness(t, t.TempDir())
			must.Succeed(t, os.Mkdir(b.Path("disk"), 0o755))
			must.Succeed(t, os.Symlink(b.Path("disk"), b.Path("link")))
			b.start(`[{"name":"local","path":"link"}]`)
			serves(t, b, true)
			disk(t, b)
			serves(t, b, true)
			b.create("pvc-1", mib)
			if got := names(t, b.Path("disk")); !slices.Contains(got, "pvc-1") {
				t.Errorf("what is mounted holds %q, want the volume", got)
			}
		})
	})
}

// manifest is all names below a directory, with the times of their last change.
func manifest(t *testing.T, root string) map[string]time.Time {
	t.Helper()
	all := make(map[string]time.Time)
	must.Succeed(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		all[path] = info.ModTime()
		return err
	}))
	return all
}

func TestReplacedPoolIsRefused(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, os.Rename(h.Path("pool"), h.Path("original")))
		other := newOtherPool(t, h.Path("made"))
		must.Succeed(t, os.Rename(other, h.Path("pool")))
		wantError(t, h.publish("pvc-1", "a"), volume.ErrUnavailable)
		must.Succeed(t, os.Rename(h.Path("pool"), h.Path("other")))
		must.Succeed(t, os.Rename(h.Path("original"), h.Path("pool")))
		must.Succeed(t, h.publish("pvc-1", "a"))
	})
}

func TestPoolIdentityIgnoresFormatWriter(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		written := must.Value(os.ReadFile(h.Own("format")))(t)
		spaced := bytes.ReplaceAll(written, []byte(`,"`), []byte(`, "`))
		for name, test := range map[string]struct {
			format []byte
			wants  error
		}{
			"with spaces":         {spaced, nil},
			"as it was":           {written, nil},
			"with another uuid":   {bytes.Replace(written, []byte(`"uuid":"`), []byte(`"uuid":"x`), 1), volume.ErrUnavailable},
			"of a later version":  {bytes.Replace(written, []byte(`"version":1`), []byte(`"version":2`), 1), volume.ErrUnavailable},
			"that cannot be read": {written[:len(written)/2], volume.ErrUnavailable},
		} {
			must.Succeed(t, os.WriteFile(h.Own("format"), test.format, 0o600))
			h.later(time.Minute)
			if err := h.publish("pvc-1", "a"); !errors.Is(err, test.wants) {
				t.Errorf("a format %s: %v, want %v", name, err, test.wants)
			}
		}
	})
}

// newOtherPool makes a pool of its own with another driver.
func newOtherPool(t *testing.T, root string) string {
	t.Helper()
	must.Succeed(t, os.Mkdir(root, 0o755))
	h := newHarness(t, root)
	h.start(local)
	must.Succeed(t, h.Close(t.Context()))
	return h.Path("pool")
}

// What a crash left is still there when the pool is opened, and goes once it can.
func TestReadOnlyPoolIsRecoveredWhenWritable(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	mountTmpfs(t, filepath.Join(root, "pool"))
	withFaultsAt(t, root, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		h.create("pvc-2", mib)
		h.create("pvc-3", mib)
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-disk"), Mode: volume.ModeBlock, Range: volume.Range{Required: mib}})
		must.Succeed(t, err)
		limit := h.limitOf("pvc-3")
		must.Succeed(t, h.Close(t.Context()))

		must.Succeed(t, os.WriteFile(h.Own("volumes", ".new-pvc-4.json"), []byte(`{"vers`), 0o600))
		must.Succeed(t, os.WriteFile(h.Own("volumes", ".new-no id.json"), []byte(`{"vers`), 0o600))
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Own("creating", "node-1", "pvc-1")))
		must.Succeed(t, errors.Join(os.MkdirAll(h.Own("trash", "node-before"), 0o700), os.MkdirAll(h.Own("creating", "node-before", "pvc-9"), 0o700)))
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-2"), h.Own("trash", "node-before", "pvc-2."+uid(t, h, "pvc-2"))))
		must.Succeed(t, h.Quota.Limit(h.open("pvc-3"), h.carried("pvc-3"), quota.Limit{Bytes: 2 * mib}))
		must.Succeed(t, os.Truncate(h.Path("pool", "pvc-disk", "disk.img"), 2*mib))
		must.Succeed(t, os.Chmod(h.Path("pool"), 0o755))

		must.Succeed(t, syscall.Mount("", h.Path("pool"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		f.failBefore.Store(true)
		h.start(local)
		h.later(2 * time.Minute)
		must.Succeed(t, h.publish("pvc-3", "a"))
		f.failBefore.Store(false)
		must.Succeed(t, syscall.Mount("", h.Path("pool"), "", syscall.MS_REMOUNT, ""))
		h.later(10 * time.Second)
		h.wantVolumes("pvc-3", "pvc-disk")
		h.wantClean()
		if left := slices.Concat(names(t, h.Own("trash", "node-before")), names(t, h.Own("creating", "node-before"))); len(left) > 0 {
			t.Errorf("the node before has left %q", left)
		}
		if got := h.limitOf("pvc-3"); got != limit {
			t.Errorf("the limit is %d bytes, want %d", got, limit)
		}
		if got := h.volume("pvc-disk").Bytes; got != 2*mib {
			t.Errorf("a disk of %d bytes promises %d", 2*mib, got)
		}
		info, err := os.Stat(h.Path("pool"))
		must.Succeed(t, err)
		if got := info.Mode().Perm(); got != 0o750 {
			t.Errorf("the pool has the mode %o, want 750", got)
		}
		h.create("pvc-1", mib)
	})
}

// A FUSE filesystem that never answers: no bubble here, since what hangs is a
// system call and real.
func TestHungPoolDoesNotDelayOthers(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	hung := filepath.Join(root, "hung")
	release := testenv.Hang(t, hung)

	n := pooltest.New(t, root)
	set := n.Start(n.Configs(`[{"name":"legacy","path":"pool"},{"name":"hung","path":"hung"}]`), n.Options("node-1"))
	must.Succeed(t, set.Wait(t.Context()))

	name, err := volume.ParsePoolName("hung")
	must.Succeed(t, err)
	if bytes, err := set.Capacity(t.Context(), name, false); bytes != 0 || err != nil {
		t.Errorf("capacity of the hanging pool: %d, %v; want 0", bytes, err)
	}
	_, err = set.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Pool: name, Range: volume.Range{Required: mib}})
	wantError(t, err, volume.ErrNoSpace)
	if !strings.Contains(err.Error(), "hangs") {
		t.Errorf("%v does not say that the pool hangs", err)
	}
	_, err = set.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
	must.Succeed(t, err)
	status := set.Status()
	if status[0].Err != nil || status[0].Space == nil || status[1].Err == nil || status[1].Space != nil || status[1].LastError.IsZero() {
		t.Errorf("status %+v, want that of a pool that serves and of one that hangs", status)
	}
	if page, _ := set.List(t.Context(), volume.ID{}, 10); len(page) != 1 || page[0].Condition.Abnormal {
		t.Errorf("list %+v, want the one volume of the pool that serves, in order", page)
	}
	must.Succeed(t, set.Delete(t.Context(), id(t, "pvc-2")))

	release()
	must.Succeed(t, set.Close(context.Background()))
}

// hanging are mounts that are not watched until something is received.
type hanging struct {
	*bindtest.Fake
	until atomic.Pointer[chan struct{}]
}

func (h *hanging) IsFilesystem(*dir.Dir) (bool, error) {
	if until := h.until.Load(); until != nil {
		<-*until
	}
	return true, nil
}

// mountedPool is one that serves as a filesystem of its own.
const mountedPool = `[{"name":"local","path":"pool","requireMount":true}]`

// newHanging is a node with such a pool, whose filesystem can hang.
func newHanging(t *testing.T) (*harness, *hanging) {
	t.Helper()
	h := newHarness(t, t.TempDir())
	must.Succeed(t, os.Mkdir(h.Path("pool"), 0o755))
	mounts := &hanging{Fake: h.Mounts}
	h.table = mounts
	h.start(mountedPool)
	return h, mounts
}

// hang has it hang until the returned function is called.
func (h *hanging) hang() (release func()) {
	until := make(chan struct{})
	h.until.Store(&until)
	return func() {
		h.until.Store(nil)
		close(until)
	}
}

func TestOnlyOneCallWaitsForHungPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, mounts := newHanging(t)
		h.create("pvc-1", mib)
		for range 2 {
			release := mounts.hang()
			start := time.Now()
			wantError(t, h.publish("pvc-1", "a"), volume.ErrUnavailable)
			waited := time.Since(start)
			if waited == 0 {
				t.Error("the first call did not wait")
			}
			for range 3 {
				err := h.publish("pvc-1", "a")
				wantError(t, err, volume.ErrUnavailable)
				if !strings.Contains(err.Error(), "hangs") {
					t.Errorf("%v does not say that the pool hangs", err)
				}
			}
			if all := time.Since(start); all != waited {
				t.Errorf("the first call waited for %v, and the others for %v", waited, all-waited)
			}
			release()
			h.later(time.Minute)
			must.Succeed(t, h.publish("pvc-1", "a"))
			must.Succeed(t, h.unpublish("pvc-1", "a"))
		}
	})
}

// What a caller has less time for than a disk may take is answered within that time.
func TestCallsOnHungPoolEndBeforeTheirCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, mounts := newHanging(t)
		h.create("pvc-1", mib)
		release := mounts.hang()
		for name, call := range map[string]func(ctx context.Context) error{
			"publish": func(ctx context.Context) error {
				return h.Publications().Publish(ctx, pool.Publication{ID: id(t, "pvc-1"), Target: h.Target("a")})
			},
			"delete":            func(ctx context.Context) error { return h.Delete(ctx, id(t, "pvc-1")) },
			"delete an unknown": func(ctx context.Context) error { return h.Delete(ctx, id(t, "pvc-2")) },
			"expand": func(ctx context.Context) error {
				return must.Err(h.Expand(ctx, id(t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 2 * mib}))
			},
			"find a snapshot": func(ctx context.Context) error { return must.Err(h.Snapshots().Find(ctx, id(t, "pvc-1"))) },
			"state of a move": func(ctx context.Context) error { return must.Err(h.Moves().State(ctx, id(t, "pvc-1"))) },
			"report": func(ctx context.Context) error {
				v, err := h.Volume(ctx, id(t, "pvc-1"))
				if v.Condition.Reason != health.PoolHangs {
					return err
				}
				return volume.ErrUnavailable
			},
		} {
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			err := call(ctx)
			cancel()
			if took := time.Since(start); !errors.Is(err, volume.ErrUnavailable) || took >= 2*time.Second {
				t.Errorf("%s: %v after %v, want %v within two seconds", name, err, took, volume.ErrUnavailable)
			}
		}
		release()
		h.later(time.Minute)
	})
}

// However a pool comes to lie in another, the outer one would have it for a volume.
func TestNestedPoolIsRefused(t *testing.T) {
	testenv.NeedRoot(t)
	const inOuter = `[{"name":"outer","path":"outer"},{"name":"inner","path":"inner","requireMount":%v}]`
	bindMount := func(h *harness, from string, to ...string) {
		to = append([]string{h.Root}, to...)
		must.Succeed(h.t, os.MkdirAll(filepath.Join(to...), 0o755))
		must.Succeed(h.t, syscall.Mount(h.Path(from), filepath.Join(to...), "", syscall.MS_BIND, ""))
		h.t.Cleanup(func() { _ = syscall.Unmount(filepath.Join(to...), syscall.MNT_DETACH) })
	}
	for name, nest := range map[string]func(b *harness){
		"by a link to a volume": func(h *harness) {
			must.Succeed(h.t, os.Symlink("outer/sub", h.Path("inner")))
		},
		"by a link to what is in a volume": func(h *harness) {
			must.Succeed(h.t, os.MkdirAll(h.Path("outer", "sub", "deep"), 0o755))
			must.Succeed(h.t, os.Symlink("outer/sub/deep", h.Path("inner")))
		},
		"by a mount of a volume": func(h *harness) {
			bindMount(h, "outer/sub", "inner")
		},
		"by a mount of what is in a volume": func(h *harness) {
			must.Succeed(h.t, os.MkdirAll(h.Path("outer", "sub", "deep"), 0o755))
			bindMount(h, "outer/sub/deep", "inner")
		},
		"by a mount on a volume": func(h *harness) {
			must.Succeed(h.t, os.Mkdir(h.Path("inner"), 0o755))
			must.Succeed(h.t, syscall.Mount("tmpfs", h.Path("inner"), "tmpfs", 0, ""))
			h.t.Cleanup(func() { must.Succeed(h.t, syscall.Unmount(h.Path("inner"), 0)) })
			bindMount(h, "inner", "outer", "sub")
		},
		"in a directory that is mounted on a volume": func(h *harness) {
			must.Succeed(h.t, os.MkdirAll(h.Path("real", "inner"), 0o755))
			must.Succeed(h.t, os.Symlink("real/inner", h.Path("inner")))
			bindMount(h, "real", "outer", "sub")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newHarness(t, t.TempDir())
				must.Succeed(t, os.MkdirAll(b.Path("outer", "sub"), 0o755))
				nest(b)
				b.start(fmt.Sprintf(inOuter, false))
				b.wantOuterRefused(t, fmt.Sprintf(inOuter, false))
			})
		})
	}
	t.Run("where no volume can be", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newHarness(t, t.TempDir())
			must.Succeed(t, os.MkdirAll(b.Path("outer", ".pools", "inner"), 0o755))
			must.Succeed(t, os.Symlink("outer/.pools/inner", b.Path("inner")))
			b.start(fmt.Sprintf(inOuter, false))
			for _, status := range b.Status() {
				if status.Err != nil {
					t.Errorf("a pool of which no other has anything: %v", status.Err)
				}
			}
		})
	})
	t.Run("from some time on", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newHarness(t, t.TempDir())
			must.Succeed(t, os.Mkdir(b.Path("inner"), 0o755))
			must.Succeed(t, os.MkdirAll(b.Path("outer"), 0o755))
			b.start(fmt.Sprintf(inOuter, true))
			must.Succeed(t, syscall.Mount("tmpfs", b.Path("inner"), "tmpfs", 0, ""))
			t.Cleanup(func() { _ = syscall.Unmount(b.Path("inner"), syscall.MNT_DETACH) })
			bindMount(b, "inner", "outer", "sub")
			b.later(10 * time.Second)
			b.wantOuterRefused(t, fmt.Sprintf(inOuter, true))
			if v := b.inspect(fmt.Sprintf(inOuter, true))[0]; v.UUID == "" || *v.AvailableBytes != 0 {
				t.Errorf("the outer pool is seen as %+v, want what is in it all the same", v)
			}
			must.Succeed(t, syscall.Unmount(b.Path("outer", "sub"), 0))
			must.Succeed(t, os.Remove(b.Path("outer", "sub")))
			b.later(10 * time.Second)
			for _, status := range b.Status() {
				if status.Err != nil {
					t.Errorf("pools that are siblings again: %v", status.Err)
				}
			}
		})
	})
}

func (h *harness) wantOuterRefused(t *testing.T, datadir string) {
	t.Helper()
	status := h.Status()
	if err := status[0].Err; err == nil || !strings.Contains(err.Error(), `another pool lies in it; give each a directory of its own: pool "inner" at sub`) {
		t.Errorf("the outer pool: %v, want it refused", err)
	}
	if status[1].Err != nil {
		t.Errorf("the inner pool: %v, want it to serve", status[1].Err)
	}
	seen := h.inspect(datadir)
	if why, is := strings.CutPrefix(seen[0].Condition, "the pool does not serve: "); !is || !strings.HasSuffix(status[0].Err.Error(), why) || seen[1].Abnormal {
		t.Errorf("the pools are seen as %+v, want what the driver says", seen)
	}
	_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Pool: poolName(t, "inner"), Range: volume.Range{Required: mib}})
	must.Succeed(t, err)
	if err := h.publish("sub", "a"); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("publishing the inner pool as a volume: %v", err)
	}
	if err := h.Delete(t.Context(), id(t, "sub")); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("deleting the inner pool as a volume: %v", err)
	}
	_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Pool: poolName(t, "outer"), Range: volume.Range{Required: mib}})
	wantError(t, err, volume.ErrNoSpace)
	h.later(2 * time.Minute)
	if _, err := os.Stat(h.Path("inner", "pvc-1")); err != nil {
		t.Error(err)
	}
}

func TestSiblingPools(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		for _, name := range []string{"pool", "pool-2", "third", "in", "pool/volume"} {
			must.Succeed(t, os.Mkdir(h.Path(name), 0o755))
		}
		// Its own volume is mounted where a publication is, and another pool on itself.
		for from, to := range map[string]string{"pool/volume": "pods", "third": "third", "pool-2": "in"} {
			must.Succeed(t, syscall.Mount(h.Path(from), h.Path(to), "", syscall.MS_BIND, ""))
			t.Cleanup(func() { must.Succeed(t, syscall.Unmount(h.Path(to), 0)) })
		}
		h.start(`[{"name":"one","path":"pool"},{"name":"two","path":"in"},{"name":"three","path":"third"}]`)
		h.later(time.Minute)
		for _, status := range h.Status() {
			if status.Err != nil {
				t.Errorf("pool %s: %v", status.Name, status.Err)
			}
		}
	})
}

func TestOneDirectoryAsTwoPoolsIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("pool"), 0o755))
		must.Succeed(t, os.Symlink("pool", h.Path("alias")))
		h.start(`[{"name":"one","path":"pool"},{"name":"two","path":"alias"}]`)
		h.later(time.Minute)
		status := h.Status()
		if (status[0].Err == nil) == (status[1].Err == nil) {
			t.Errorf("status %+v, want one pool of the two to serve", status)
		}
	})
}
