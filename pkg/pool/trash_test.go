package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const sharedOnTmpfs = `[{"name":"local","path":"pool","shared":true}]`

// halfFull runs a test on a tmpfs of 256 MiB with a volume of 128 MiB that is full.
func halfFull(t *testing.T, datadir string, test func(t *testing.T, b *harness)) {
	t.Helper()
	onTmpfs(t, datadir, func(t *testing.T, h *harness) {
		h.create("pvc-1", 128*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 127*mib), 0o600))
		test(t, h)
	})
}

// keep has a piece of trash of this node that cannot be erased: something is mounted in it.
func (h *harness) keep(name string, content int64) {
	h.t.Helper()
	at := h.Own("trash", "node-1", name)
	must.Succeed(h.t, os.MkdirAll(filepath.Join(at, "mounted"), 0o700))
	must.Succeed(h.t, os.WriteFile(filepath.Join(at, "mounted", "data"), make([]byte, content), 0o600))
	must.Succeed(h.t, syscall.Mount("tmpfs", filepath.Join(at, "mounted"), "tmpfs", 0, ""))
	h.t.Cleanup(func() { _ = syscall.Unmount(filepath.Join(at, "mounted"), syscall.MNT_DETACH) })
}

func TestTrashOfAnotherNodeHoldsItsPromise(t *testing.T) {
	for name, c := range map[string]struct {
		entry   string
		content int64
		held    int64 // MiB
	}{
		"a promise":                        {"pvc-9.0123456789abcdef+20971520", 4096, 20},
		"an empty directory from before":   {"pvc-9.0123456789abcdef", 0, 0},
		"a full directory from before":     {"pvc-9.0123456789abcdef", 30 * mib, 30},
		"a name that only looks like that": {"pvc-9.0123456789abcdef+020971520", 4096, 0},
	} {
		t.Run(name, func(t *testing.T) {
			halfFull(t, sharedOnTmpfs, func(t *testing.T, h *harness) {
				at := h.Own("trash", "node-2", c.entry)
				must.Succeed(t, os.MkdirAll(at, 0o700))
				must.Succeed(t, os.WriteFile(filepath.Join(at, "data"), make([]byte, c.content), 0o600))
				h.wantCapacity("local", 128-c.held, 2)
				view := h.inspect(sharedOnTmpfs)[0]
				if held := *view.TrashHeldBytes / mib; held != c.held || *view.Trash[0].HeldBytes/mib != c.held || *view.AvailableBytes/mib < 126-c.held {
					t.Errorf("inspect has %d MiB held, and %d available, want %d and about %d", held, *view.AvailableBytes/mib, c.held, 128-c.held)
				}
				must.Succeed(t, os.WriteFile(filepath.Join(at, "more"), make([]byte, 8*mib), 0o600))
				if !strings.HasSuffix(c.entry, "+20971520") || c.held == 0 {
					h.wantCapacity("local", 120-c.held, 2)
				}
				must.Succeed(t, os.RemoveAll(at))
				h.wantCapacity("local", 128, 2)
			})
		})
	}
}

// A restart knows what was promised to volumes that could not be erased.
func TestStuckTrashHoldsItsPromiseAfterRestart(t *testing.T) {
	halfFull(t, local, func(t *testing.T, h *harness) {
		h.create("pvc-2", 40*mib)
		must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-2", "mounted"), 0o700))
		must.Succeed(t, syscall.Mount("tmpfs", h.Path("pool", "pvc-2", "mounted"), "tmpfs", 0, ""))
		defer func() {
			must.Succeed(t, syscall.Unmount(h.Own("trash", "node-1", names(t, h.Own("trash", "node-1"))[0], "mounted"), 0))
		}()
		h.delete("pvc-2")
		h.settled()
		h.wantCapacity("local", 88, 2)
		h.restart(local)
		h.later(time.Minute)
		h.wantCapacity("local", 88, 2)
		if got := h.inspect(local)[0]; *got.TrashHeldBytes != 40*mib || *got.Trash[0].HeldBytes != 40*mib || *got.AvailableBytes/mib < 86 {
			t.Errorf("inspect has %d MiB held, and %d available, want 40 and about 88", *got.TrashHeldBytes/mib, *got.AvailableBytes/mib)
		}
	})
}

func TestStuckTrashWithoutPromiseIsMeasured(t *testing.T) {
	halfFull(t, local, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		h.keep("pvc-9.0123456789abcdef", 20*mib)
		h.start(local)
		h.wantCapacity("local", 108, 2)
		h.later(time.Minute)
		h.wantCapacity("local", 108, 2)
	})
}

// What has too many files to count them at a start is measured when it turns out to stay.
func TestStuckTrashWithManyFilesIsMeasuredInBackground(t *testing.T) {
	halfFull(t, local, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		h.keep("pvc-9.0123456789abcdef", 20*mib)
		many := h.Own("trash", "node-1", "pvc-9.0123456789abcdef", "many")
		must.Succeed(t, os.Mkdir(many, 0o700))
		for i := range 10_001 {
			must.Succeed(t, os.WriteFile(filepath.Join(many, fmt.Sprint(i)), nil, 0o600))
		}
		if got := h.inspect(local)[0]; got.TrashHeldBytes != nil {
			t.Errorf("inspect has %d bytes held, want that it is not known", *got.TrashHeldBytes)
		}
		h.start(local)
		h.later(time.Hour) // the reaper rests
		h.wantCapacity("local", 108, 2)
	})
}

// What a failed copy leaves is erased slowly. A caller that tries again at once must not pile such copies up: each
// keeps space of the pool.
func TestFailedCopyHoldsItsSpaceOnce(t *testing.T) {
	for name, attempt := range map[string]func(b *harness) error{
		"a snapshot": func(h *harness) error {
			return must.Err(h.Snapshots().Create(h.t.Context(), pool.SnapshotRequest{ID: snapshotID(h.t, "s-1"), Source: id(h.t, "pvc-1")}))
		},
		"a clone": func(h *harness) error {
			return must.Err(h.Create(h.t.Context(), pool.Request{ID: id(h.t, "pvc-2"), Source: &pool.Source{ID: id(h.t, "pvc-1")}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onTmpfs(t, local, func(t *testing.T, h *harness) {
				h.create("other", mib)
				h.failsToCopy("pvc-1")
				must.Succeed(t, h.Close(t.Context()))
				wantCopies := func(want int) {
					copies := slices.DeleteFunc(names(t, h.Own("trash", "node-1")), func(name string) bool { return strings.HasPrefix(name, "stuck") })
					if len(copies) != want {
						t.Errorf("the trash has %q, want %d", copies, want)
					}
				}
				want := volume.ErrPrecondition
				for start := range 3 {
					h.keep(fmt.Sprint("stuck-", start), 0) // which tmpfs lists before what is older
					stop := h.startWithoutReaper()
					for range 4 {
						wantError(t, attempt(h), want)
						want = volume.ErrBusy
						wantCopies(1)
					}
					must.Succeed(t, h.snapshot(fmt.Sprint("s-of-other-", start), "other")) // which waits for nothing
					stop()
				}
				h.start(local)
				h.later(time.Minute)
				wantCopies(0)
				wantError(t, attempt(h), volume.ErrPrecondition)
			})
		})
	}
}

// startWithoutReaper starts a driver whose reaper does not come past the first piece of trash, which is stuck, until stop
// ends the driver.
func (h *harness) startWithoutReaper() (stop func()) { return h.startIn(local) }

// startIn is startWithoutReaper with other pools.
func (h *harness) startIn(datadir string) (stop func()) {
	stopped := make(chan struct{})
	h.log = funcr.New(func(_, said string) {
		if strings.Contains(said, "Failed to erase trash") {
			<-stopped
		}
	}, funcr.Options{})
	h.start(datadir)
	h.log = logr.Logger{}
	return func() {
		closed := make(chan error)
		go func() { closed <- h.Close(h.t.Context()) }()
		h.settled()
		close(stopped)
		must.Succeed(h.t, <-closed)
	}
}

// A snapshot that was deleted hinders none of its name.
func TestSnapshotAfterDeletionOfOneByItsName(t *testing.T) {
	onTmpfs(t, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		h.keep("stuck", 0)
		stop := h.startWithoutReaper()
		for range 2 {
			must.Succeed(t, h.snapshot("s-1", "pvc-1"), h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
		}
		stop()
	})
}

// What cannot be erased keeps its space, and a copy beside it would take as much again.
func TestCopyBesideOneThatCannotBeErased(t *testing.T) {
	onTmpfs(t, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.Close(t.Context()))
		h.keep("~s-1.0123456789abcdef+1048576", mib)
		h.start(local)
		h.later(time.Minute)
		err := h.snapshot("s-1", "pvc-1")
		wantError(t, err, volume.ErrPrecondition)
		if err == nil || !strings.Contains(err.Error(), "~s-1.0123456789abcdef+1048576") {
			t.Errorf("%v, want the piece of trash", err)
		}
		must.Succeed(t, h.snapshot("s-2", "pvc-1"))
	})
}

// failsToCopy makes a volume whose copy fails near its end: tmpfs lists first what was made last.
func (h *harness) failsToCopy(name string) {
	h.t.Helper()
	h.create(name, 16*mib)
	leased, err := os.Create(h.Path("pool", name, "leased"))
	must.Succeed(h.t, err)
	h.t.Cleanup(func() { _ = leased.Close() })
	_, err = unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must.Succeed(h.t, err)
	for i := range 200 {
		must.Succeed(h.t, os.WriteFile(h.Path("pool", name, fmt.Sprint(i)), make([]byte, 4096), 0o600))
	}
}

// Inodes take space of XFS that no quota counts, and so do shared blocks while they are overwritten. What a volume was given for that is sold
// again when it is erased, as its promise is.
func TestTrashHoldsWhatItsInodesTake(t *testing.T) {
	const datadir = `[{"name":"local","path":"pool","bytesPerInode":1024}]`
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.start(datadir)
		h.create("pvc-1", 80*mib)
		h.create("pvc-2", 40*mib)
		d := h.open("pvc-1")
		must.Succeed(t, h.Quota.Write(d, 80*mib))
		for range 80*mib/1024 - 1 {
			must.Succeed(t, must.Err(h.Quota.Create(d)))
		}
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 80*mib), 0o600))
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "inodes"), make([]byte, 40*mib), 0o600)) // which a tmpfs has for nothing
		must.Succeed(t, h.Close(t.Context()))
		h.keep("stuck", 0)
		stop := h.startIn(datadir)
		before := h.capacity()
		h.delete("pvc-1")
		if after := h.capacity(); after > before+4*mib {
			t.Errorf("%d MiB are available while all of a volume is on the disk that was removed, %d before", after/mib, before/mib)
		}
		stop()
	})
}
