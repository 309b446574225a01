package pool_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const neighbours = `[{"name":"a","path":"a"},{"name":"b","path":"b"}]`

func poolNamed(t *testing.T, name string) volume.PoolName {
	t.Helper()
	parsed := must.Value(volume.ParsePoolName(name))(t)
	return parsed
}

func (h *harness) tryCreateIn(in, name string, bytes int64) error {
	h.t.Helper()
	return must.Err(h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Pool: poolNamed(h.t, in), Range: volume.Range{Required: bytes}}))
}

func (h *harness) createIn(in, name string, bytes int64) {
	h.t.Helper()
	must.Succeed(h.t, h.tryCreateIn(in, name, bytes))
}

// wantCapacity expects a capacity in MiB, of which filesystems take up to so many themselves.
func (h *harness) wantCapacity(in string, want, less int64) {
	h.t.Helper()
	got := must.Value(h.Capacity(h.t.Context(), poolNamed(h.t, in), false))(h.t)
	if got > want*mib || got < (want-less)*mib {
		h.t.Errorf("capacity of %s is %d MiB, want %d, or up to %d less", in, got/mib, want, less)
	}
}

func (h *harness) sharing(in string) []string {
	h.t.Helper()
	for _, status := range h.Status() {
		if status.Name == poolNamed(h.t, in) {
			var with []string
			for _, name := range status.SharesWith {
				with = append(with, name.String())
			}
			return with
		}
	}
	h.t.Fatalf("no status of pool %s", in)
	return nil
}

func (h *harness) wantSharing(in string, with ...string) {
	h.t.Helper()
	if got := h.sharing(in); !slices.Equal(got, with) {
		h.t.Errorf("pool %s shares its filesystem with %q, want %q", in, got, with)
	}
}

// onTmpfs runs a test on a node whose pools are on one filesystem of 256 MiB.
func onTmpfs(t *testing.T, datadir string, test func(t *testing.T, b *harness)) {
	t.Helper()
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(datadir)
		test(t, h)
	})
}

func TestPoolsShareFilesystem(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-1", 150*mib)
		h.wantCapacity("a", 106, 2)
		h.wantCapacity("b", 106, 2)
		wantError(t, h.tryCreateIn("b", "pvc-2", 150*mib), volume.ErrNoSpace)
		h.createIn("b", "pvc-2", 50*mib)
		h.wantCapacity("a", 56, 2)
		h.wantSharing("a", "b")
		h.wantSharing("b", "a")
		h.restart(neighbours)
		h.wantCapacity("a", 56, 2)
		h.wantCapacity("b", 56, 2)
		h.delete("pvc-1")
		h.settled()
		h.wantCapacity("b", 206, 2)
	})
}

func TestReserveAndOverprovisionOfPoolsThatShareFilesystem(t *testing.T) {
	onTmpfs(t, `[{"name":"a","path":"a","reserve":"56Mi"},{"name":"b","path":"b","overprovision":0.5}]`, func(t *testing.T, h *harness) {
		h.wantCapacity("a", 200, 2)
		h.wantCapacity("b", 128, 2)
		h.createIn("a", "pvc-1", 100*mib)
		h.wantCapacity("a", 100, 2)
		h.wantCapacity("b", 28, 2)
	})
}

// What the volumes of one pool hold is theirs, and no use by others to the other pool.
func TestUseOfAnotherPoolIsNotForeign(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-1", 100*mib)
		must.Succeed(t, os.WriteFile(h.Path("a", "pvc-1", "data"), make([]byte, 90*mib), 0o600))
		h.createIn("b", "pvc-2", 50*mib)
		h.later(2 * time.Minute)
		h.wantCapacity("a", 106, 2)
		h.wantCapacity("b", 106, 2)
		h.restart(neighbours)
		h.wantCapacity("a", 106, 2)
		h.wantCapacity("b", 106, 2)
	})
}

func TestViewOfPoolsThatShareFilesystem(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-1", 150*mib)
		for _, view := range h.inspect(neighbours) {
			if got := *view.AvailableBytes / mib; got > 106 || got < 104 || len(view.SharesWith) != 1 || view.SharesWith[0] == view.Name {
				t.Errorf("pool %s has %d MiB available and shares its filesystem with %v, want 106 and the other pool", view.Name, got, view.SharesWith)
			}
		}
	})
}

// A pool that is added to the configuration later was not there when others wrote.
func TestUseOfOlderPoolIsNotForeign(t *testing.T) {
	onTmpfs(t, `[{"name":"a","path":"a"}]`, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-1", 100*mib)
		must.Succeed(t, os.WriteFile(h.Path("a", "pvc-1", "data"), make([]byte, 90*mib), 0o600))
		h.later(time.Second) // pools are known by the second in which they were made
		h.restart(neighbours)
		h.wantCapacity("a", 156, 2)
		h.wantCapacity("b", 156, 2)
	})
}

func TestPoolMountedLaterSharesFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		must.Succeed(t, os.Mkdir(h.Path("late"), 0o755))
		disk(t, h) // of 64 MiB
		h.start(`[{"name":"a","path":"disk/a"},{"name":"b","path":"disk/b"}]`)
		h.createIn("b", "pvc-2", 20*mib)
		must.Succeed(t, os.WriteFile(h.Path("disk", "b", "pvc-2", "data"), make([]byte, 18*mib), 0o600))
		must.Succeed(t, h.Close(t.Context()))
		var said diary
		h.log = funcr.New(said.write, funcr.Options{})
		h.start(`[{"name":"a","path":"disk/a"},{"name":"b","path":"late","requireMount":true}]`)
		h.createIn("a", "pvc-1", 24*mib)
		h.wantSharing("a")
		must.Succeed(t, syscall.Mount(h.Path("disk", "b"), h.Path("late"), "", syscall.MS_BIND, ""))
		defer func() { must.Succeed(t, syscall.Unmount(h.Path("late"), 0)) }()
		h.later(10 * time.Second)
		h.wantSharing("a", "b")
		h.wantSharing("b", "a")
		h.wantCapacity("a", 20, 1)
		h.wantCapacity("b", 20, 1)
		must.Succeed(t, h.Close(t.Context()))
		if said.count(`"msg"="The pool shares its filesystem with others; the promises of all of them count" "pool"="b" "with"=["a"]`) == 0 {
			t.Errorf("log without the pools that share a filesystem: %q", said.lines)
		}
	})
}

// The subvolumes of a btrfs have device numbers and statfs(2) ids of their own, and one space.
func TestPoolsInSubvolumesShareFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.LoopFS(t, "btrfs", 400*mib)
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "btrfs", args...).CombinedOutput(); err != nil {
			t.Fatalf("btrfs %v: %v: %s", args, err, out)
		}
	}
	run("quota", "enable", root)
	run("subvolume", "create", root+"/a")
	run("subvolume", "create", root+"/b")
	withQuotas(t, root, neighbours, func(t *testing.T, h *harness) {
		before := must.Value(h.Capacity(t.Context(), poolNamed(t, "b"), false))(t)
		h.createIn("a", "pvc-1", 200*mib)
		h.wantCapacity("b", before/mib-200, 4)
		wantError(t, h.tryCreateIn("b", "pvc-2", 200*mib), volume.ErrNoSpace)
		h.wantSharing("a", "b")
		// What is counted for one pool is no use by others to the other.
		must.Succeed(t, os.WriteFile(h.Path("a", "pvc-1", "data"), make([]byte, 64*mib), 0o600))
		syncfs(t, root)
		h.later(2 * time.Minute)
		h.wantCapacity("b", before/mib-200, 8)
		h.wantCapacity("a", before/mib-200, 8)
	})
}

// Blocks that a pod with two volumes copies by reference from one to the other count for both. They do not hide what others hold.
func TestReflinkBetweenVolumesHidesNothing(t *testing.T) {
	root := testenv.CountingBtrfs(t, 400*mib, "-m", "single")
	must.Succeed(t, os.WriteFile(root+"/others", bytes.Repeat([]byte("x"), 60*mib), 0o600))
	withQuotas(t, root, neighbours, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-a", 64*mib)
		h.createIn("b", "pvc-b", 64*mib)
		must.Succeed(t, os.WriteFile(h.Path("a", "pvc-a", "data"), bytes.Repeat([]byte("y"), 48*mib), 0o600))
		count := func() int64 {
			t.Helper()
			syncfs(t, root)
			h.later(2 * time.Minute)
			got := must.Value(h.Capacity(t.Context(), poolNamed(t, "a"), false))(t)
			return got / mib
		}
		before := count()
		from, err := os.Open(h.Path("a", "pvc-a", "data"))
		must.Succeed(t, err)
		to, err := os.Create(h.Path("b", "pvc-b", "data"))
		must.Succeed(t, err)
		must.Succeed(t, unix.IoctlFileClone(int(to.Fd()), int(from.Fd())), from.Close(), to.Close())
		if after := count(); after > before+2 {
			t.Errorf("%d MiB are available after a copy that shares all its blocks, %d before", after, before)
		}
	})
}

// opening starts a node with a pool, named b, that is being opened until release is called.
func opening(t *testing.T, h *harness) (release func()) {
	t.Helper()
	h.start(neighbours)
	h.createIn("b", "pvc-b", mib)
	h.createIn("a", "pvc-old", mib)
	h.createIn("a", "pvc-source", mib)
	must.Succeed(t, h.publish("pvc-old", "a"))
	must.Succeed(t, h.Close(t.Context()))
	until := make(chan struct{})
	h.real = func(d *dir.Dir) (quota.Facility, error) {
		if d.String() == h.Path("b") {
			<-until
		}
		return nil, quota.ErrNone
	}
	h.begin("node-1", neighbours)
	h.later(time.Second)
	release = sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	return release
}

func TestNothingIsPromisedBeforeOtherPoolIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		release := opening(t, h)
		promise := map[string]func() error{
			"create": func() error { return h.tryCreateIn("a", "pvc-a", mib) },
			"expand": func() error {
				return must.Err(h.Expand(t.Context(), id(t, "pvc-old"), h.Target("a"), "", volume.Range{Required: 2 * mib}))
			},
			"snapshot": func() error { return h.snapshot("s", "pvc-source") },
		}
		for name, try := range promise {
			if err := try(); !errors.Is(err, volume.ErrUnavailable) {
				t.Errorf("%s: %v, want ErrUnavailable", name, err)
			}
		}
		release()
		h.later(time.Second)
		for name, try := range promise {
			if err := try(); err != nil {
				t.Errorf("%s when the other pool is read: %v", name, err)
			}
		}
	})
}

// One pool that hangs holds up those on other filesystems for a few seconds at most.
func TestPoolThatHangsAtStartHoldsUpNoOtherFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		mountTmpfs(t, h.Path("b"))
		opening(t, h)
		wantError(t, h.tryCreateIn("a", "pvc-a", mib), volume.ErrUnavailable)
		h.later(5 * time.Second)
		h.createIn("a", "pvc-a", mib)
	})
}

// What a pool has promised is not promised again while it is slow to be opened, however long that takes.
func TestNothingIsPromisedBesidePoolThatHangsAtStart(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("b", "pvc-much", 150*mib)
		must.Succeed(t, h.Close(t.Context()))
		release := opening(t, h)
		h.later(time.Minute)
		wantError(t, h.tryCreateIn("a", "pvc-a", 150*mib), volume.ErrUnavailable)
		h.wantCapacity("a", 0, 0)
		release()
		h.later(10 * time.Second)
		wantError(t, h.tryCreateIn("a", "pvc-a", 150*mib), volume.ErrNoSpace)
		h.wantCapacity("a", 103, 2)
	})
}

// A pool that cannot be served after a restart keeps its promises.
func TestPromisesOfPoolThatDoesNotServe(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("b", "pvc-b", 150*mib)
		h.restart(`[{"name":"a","path":"a"},{"name":"b","path":"b","enforcement":"required"}]`)
		h.wantCapacity("a", 106, 2)
		h.wantSharing("a", "b")
		wantError(t, h.tryCreateIn("a", "pvc-a", 150*mib), volume.ErrNoSpace)
		h.createIn("a", "pvc-a", 100*mib)
		h.restart(neighbours) // it serves again
		h.wantCapacity("a", 6, 2)
		h.delete("pvc-b")
		h.settled()
		h.wantCapacity("a", 156, 2)
	})
}

// Another driver that serves a pool goes on promising.
func TestPromisesOfPoolThatAnotherDriverServes(t *testing.T) {
	onTmpfs(t, `[{"name":"b","path":"b"}]`, func(t *testing.T, one *harness) {
		one.createIn("b", "pvc-1", 50*mib)
		two := one.second("node-1", neighbours)
		two.wantCapacity("a", 206, 2)
		one.createIn("b", "pvc-2", 100*mib)
		two.later(2 * time.Minute)
		two.wantCapacity("a", 106, 2)
		must.Succeed(t, one.Close(t.Context()))
		two.later(10 * time.Second)
		two.wantCapacity("b", 106, 2)
	})
}

// What a pool has promised whose layout cannot be read is not promised again.
func TestNothingIsPromisedBesideUnreadablePool(t *testing.T) {
	onTmpfs(t, neighbours, func(t *testing.T, h *harness) {
		h.createIn("a", "pvc-a", 20*mib)
		h.createIn("b", "pvc-b", 150*mib)
		must.Succeed(t, h.Close(t.Context()))
		format := h.Path("b", ".hostpath-provisioner", "format")
		whole, err := os.ReadFile(format)
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(format, []byte("{"), 0o600))
		h.start(neighbours)
		must.Succeed(t, h.publish("pvc-a", "a"))
		h.wantCapacity("a", 0, 0)
		if got := h.inspect(neighbours)[0].AvailableBytes; got == nil || *got != 0 {
			t.Errorf("inspect reports %v available in the other pool, want 0", got)
		}
		wantError(t, h.tryCreateIn("a", "pvc-2", mib), volume.ErrUnavailable)
		_, err = h.Expand(t.Context(), id(t, "pvc-a"), h.Target("a"), volume.ModeMount, volume.Range{Required: 30 * mib})
		wantError(t, err, volume.ErrUnavailable)
		must.Succeed(t, os.WriteFile(format, whole, 0o600))
		h.later(10 * time.Second)
		h.wantCapacity("a", 86, 2)
	})
}
