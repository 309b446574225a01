package serve

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Publishing costs twice as much where a call does not find the pool in memory.
func TestPoolIsOpenedFromCache(t *testing.T) {
	for kind, bytes := range map[string]int64{"ext4": 64 << 20, "xfs": 300 << 20, "btrfs": 128 << 20} {
		for _, requireMount := range []string{"false", "true"} {
			t.Run(kind+", requireMount "+requireMount, func(t *testing.T) {
				root := testenv.LoopFS(t, kind, bytes)
				p := onePool(t, root, requireMount)
				wantCached(t, p, true)
				format := filepath.Join(root, store.OwnName, "format")
				written, err := os.ReadFile(format)
				if err != nil {
					t.Fatal(err)
				}
				for name, change := range map[string]func() error{
					"forgotten": func() error { return syscall.Mount("", root, "", syscall.MS_REMOUNT, "") },
					"written in other ways": func() error {
						p.directory.root.Store(&dir.Way{ID: p.directory.root.Load().ID}) // before Linux 6.8
						return os.WriteFile(format, append([]byte(" "), written...), 0o600)
					},
				} {
					if err := change(); err != nil {
						t.Fatal(err)
					}
					if s, err := p.openCached(p.identity.Load()); err == nil {
						s.Close()
						t.Errorf("a pool that was %s is found in memory", name)
					}
					wantEntered(t, p)
					if err := os.WriteFile(format, written, 0o600); err != nil {
						t.Fatal(err)
					}
					wantCached(t, p, true)
				}
			})
		}
	}
}

func TestCacheOfOtherPoolIsNotUsed(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 64<<20)
	p := onePool(t, filepath.Join(root, "pool"), "false")
	wantCached(t, p, true)
	// The same format in another directory.
	for _, change := range []error{
		os.Rename(filepath.Join(root, "pool"), filepath.Join(root, "away")),
		os.MkdirAll(filepath.Join(root, "pool", store.OwnName, "volumes"), 0o700),
		os.Link(filepath.Join(root, "away", store.OwnName, "format"), filepath.Join(root, "pool", store.OwnName, "format")),
	} {
		if change != nil {
			t.Fatal(change)
		}
	}
	wantCached(t, p, false)
	// With requireMount, the directory that something was mounted on.
	p.directory.needMount.Store(true)
	wantCached(t, p, false)
	if err := errors.Join(os.RemoveAll(filepath.Join(root, "pool")), os.Rename(filepath.Join(root, "away"), filepath.Join(root, "pool"))); err != nil {
		t.Fatal(err)
	}
	wantCached(t, p, false)
}

// The root of another filesystem may have the numbers that the one before had, as after mkfs on the same disk: here another
// mount of the same one stands for it.
func TestFormatIsReadByOtherMount(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 64<<20)
	p := onePool(t, root, "false")
	wantCached(t, p, true)
	if err := syscall.Mount(root, root, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(root, syscall.MNT_DETACH) })
	wantCached(t, p, true)
	if err := os.WriteFile(filepath.Join(root, store.OwnName, "format"), []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	wantCached(t, p, false)
}

// A record is read without its directory being opened.
func TestNoRecordIsMissingWithoutDirectoryOfRecords(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 64<<20)
	p := onePool(t, root, "false")
	id, err := volume.ParseID("pvc-1")
	if err != nil {
		t.Fatal(err)
	}
	read := func() error {
		v, err := p.openCached(p.identity.Load())
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		record, err := v.Store.Records().Read(id)
		if record != nil {
			t.Errorf("read %+v", record)
		}
		return err
	}
	if err := read(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(root, store.OwnName, "volumes")); err != nil {
		t.Fatal(err)
	}
	if err := read(); !errors.Is(err, volume.ErrIO) {
		t.Errorf("without the directory: %v, want %v", err, volume.ErrIO)
	}
}

// With each mount, some filesystems have other numbers.
func TestCheckUpdatesCachedIdentity(t *testing.T) {
	p := onePool(t, filepath.Join(testenv.LoopFS(t, "ext4", 64<<20), "pool"), "false")
	p.directory.root.Store(&dir.Way{ID: dir.ID{Dev: 1, Ino: 1}})
	wantCached(t, p, false)
	if st := p.checks.check(t.Context()); st.err != nil {
		t.Fatal(st.err)
	}
	wantCached(t, p, true)
}

// Others may ask a server for what is in memory, and wait for it.
func TestCacheIsUsedOnLocalFilesystemsOnly(t *testing.T) {
	p := onePool(t, testenv.Tmpfs(t, 1<<20), "false")
	wantCached(t, p, false)
	wantEntered(t, p)
}

func onePool(t *testing.T, path, requireMount string) *Pool {
	t.Helper()
	configs, err := poolconfig.Parse(`[{"name":"local","path":"`+path+`","requireMount":`+requireMount+`}]`, "/")
	if err != nil {
		t.Fatal(err)
	}
	dev, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	mounts, loops := &bindtest.Fake{}, looptest.NewFake(dev)
	s := Start(configs, Options{Node: nodeOf("node-1"), Mounts: mounts, Devices: loops, Dev: dev, CheckEvery: time.Hour, SyncEvery: time.Hour, Log: logr.Discard()})
	t.Cleanup(func() {
		if err := errors.Join(s.Close(context.WithoutCancel(t.Context())), mounts.Close(), loops.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := s.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantEntered(t, s.Pools[0])
	return s.Pools[0]
}

func wantEntered(t *testing.T, p *Pool) {
	t.Helper()
	s, err := p.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

func wantCached(t *testing.T, p *Pool, want bool) {
	t.Helper()
	s, err := p.openCached(p.identity.Load())
	if err == nil {
		s.Close()
	}
	if (err == nil) != want {
		t.Errorf("found in memory: %v, want %v", err, want)
	}
}

// A call that is at work in the bare directory may be making a volume there.
func TestPoolIsNotReplacedDuringCall(t *testing.T) {
	testenv.NeedRoot(t)
	p := onePool(t, filepath.Join(t.TempDir(), "pool"), "false")
	call, err := p.Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", p.Config.Path, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(p.Config.Path, syscall.MNT_DETACH) })
	if st := p.checks.check(t.Context()); !errors.Is(st.err, store.ErrOther) {
		t.Errorf("checked with a call at work: %v, want %v", st.err, store.ErrOther)
	}
	call.Close()
	if st := p.checks.check(t.Context()); st.err != nil {
		t.Errorf("checked after the call: %v", st.err)
	}
	wantEntered(t, p)
}
