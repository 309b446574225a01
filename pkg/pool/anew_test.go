package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// anewDisk is a volume with a name of its own: filesystems that are made the same have files of the same numbers, and loop devices are
// those of the whole machine.
var anewDisk = "pvc-" + store.RandomSuffix()

// onMountedAnew has a node with a directory and a block volume published whose filesystem is then mounted anew. An overlay stands
// for all that has another superblock, and device number, by that, such as NFS with other options.
func onMountedAnew(t *testing.T, pools string, test func(t *testing.T, h *harness)) {
	testenv.NeedRoot(t)
	files, root := testenv.LoopFS(t, "ext4", 64<<20), testenv.Tmpfs(t, 16<<20)
	at := filepath.Join(root, "pool")
	must.Succeed(t, os.Mkdir(at, 0o755))
	for _, layer := range []string{"lower", "upper", "work"} {
		must.Succeed(t, os.Mkdir(filepath.Join(files, layer), 0o755))
	}
	mount := func() {
		layers := fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", files, files, files)
		must.Succeed(t, syscall.Mount("overlay", at, "overlay", 0, layers))
	}
	mount()
	defer func() { must.Succeed(t, syscall.Unmount(at, syscall.MNT_DETACH)) }()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Dev = must.Value(dir.Open("/dev"))(t)
		h.table, h.devices = must.Value(bind.NewKernel())(t), loop.NewKernel(h.Dev)
		h.start(pools)
		h.create("pvc-1", mib)
		h.createBlock(anewDisk, mib)
		defer func() { _, _ = h.unpublish("pvc-1", "a"), h.unpublish(anewDisk, "b") }() // also if the test has failed
		must.Succeed(t, h.publish("pvc-1", "a"), h.publishBlock(anewDisk, "b"))
		defer func() {
			must.Succeed(t, h.unpublish("pvc-1", "a"), h.unpublish(anewDisk, "b"))
			must.Succeed(t, h.publishBlock(anewDisk, "b"), h.unpublish(anewDisk, "b"))
			h.delete("pvc-1")
			h.delete(anewDisk)
		}()
		must.Succeed(t, syscall.Unmount(at, syscall.MNT_DETACH))
		mount()
		h.later(3 * time.Minute)
		must.Succeed(t, h.Status()[0].Err, os.WriteFile(h.Path("pods", "a", "data"), []byte("of a pod"), 0o600))
		if got := must.Value(os.ReadFile(h.Path("pool", "pvc-1", "data")))(t); string(got) != "of a pod" {
			t.Errorf("the pool has %q, want what the pod writes", got)
		}
		test(t, h)
	})
}

func TestPoolMountedAnewHasVolumesPublished(t *testing.T) {
	onMountedAnew(t, local, func(t *testing.T, h *harness) {
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
		wantError(t, h.Delete(t.Context(), id(t, anewDisk)), volume.ErrInUse)
		wantError(t, h.publishBlock(anewDisk, "c"), volume.ErrInUse) // by another device, with a cache of its own
	})
}

func TestPoolMountedAnewKeepsMarks(t *testing.T) {
	onMountedAnew(t, sharedPool, func(t *testing.T, h *harness) {
		two := h.another("node-2")
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		wantRefusedFor(t, two.publishBlock(anewDisk, "on-two"), "node-1")
		must.Succeed(t, two.Close(t.Context()))
	})
}

// onDisks are the devices on files of block volumes.
func (h *harness) onDisks() []loop.Device {
	h.t.Helper()
	return must.Value(h.devices.Attached(content.FileName))(h.t)
}

func TestPoolMountedAnewDetachesDeviceThatWasBusy(t *testing.T) {
	onMountedAnew(t, sharedPool, func(t *testing.T, h *harness) {
		held := must.Value(os.Open("/dev/" + h.onDisks()[0].Name))(t)
		for range 2 {
			wantError(t, h.unpublish(anewDisk, "b"), volume.ErrInUse)
		}
		must.Succeed(t, held.Close())
		h.later(2 * time.Minute)
		if left := h.onDisks(); len(left) > 0 {
			t.Errorf("%v is attached after its user has closed it", left)
		}
	})
}

// The driver was killed between unmounting and detaching.
func TestPoolMountedAnewDetachesWhatIsNotPublished(t *testing.T) {
	onMountedAnew(t, local, func(t *testing.T, h *harness) {
		must.Succeed(t, h.table.Unpublish(h.Target("b"), nil))
		h.restart(local)
		if left := h.onDisks(); len(left) > 0 {
			t.Errorf("%v is attached, and published nowhere", left)
		}
	})
}

// Of an earlier mount only names are known, and a pod may have chosen them: no volume is its node's for that.
func TestNamesInOtherFilesystemsTakeNoVolume(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 16<<20)
	overlay := func(name string) string {
		at, files := filepath.Join(root, name), filepath.Join(root, "files-"+name)
		for _, layer := range []string{"lower", "upper", "work"} {
			must.Succeed(t, os.MkdirAll(filepath.Join(files, layer), 0o755))
		}
		must.Succeed(t, os.Mkdir(at, 0o755))
		layers := fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", files, files, files)
		must.Succeed(t, syscall.Mount("overlay", at, "overlay", 0, layers))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(at, syscall.MNT_DETACH)) })
		return at
	}
	overlay("pool")
	other := overlay("other")
	bound := filepath.Join(root, "subpath")
	must.Succeed(t, os.MkdirAll(filepath.Join(other, "pvc-1", "pvc-2"), 0o755), os.Mkdir(bound, 0o755))
	must.Succeed(t, syscall.Mount(filepath.Join(other, "pvc-1", "pvc-2"), bound, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(bound, syscall.MNT_DETACH)) }()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.table = must.Value(bind.NewKernel())(t)
		h.start(sharedPool)
		two := h.another("node-2")
		h.create("pvc-1", mib)
		h.create("pvc-2", mib)
		h.later(2 * time.Minute)
		must.Succeed(t, two.publish("pvc-1", "on-two"), two.unpublish("pvc-1", "on-two"))
		h.delete("pvc-1")
		must.Succeed(t, h.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "pvc-2"), Target: h.Target("a"), SingleTarget: true}))
		must.Succeed(t, h.unpublish("pvc-2", "a"))
	})
}

func TestPoolMountedAnewServesWhatIsPublished(t *testing.T) {
	onMountedAnew(t, local, func(t *testing.T, h *harness) {
		must.Succeed(t, h.publishBlock(anewDisk, "b")) // a repeated call
		if got := must.Value(h.Publications().Stats(t.Context(), id(t, anewDisk), h.Target("b")))(t).Space.SizeBytes; got != mib {
			t.Errorf("it has %d bytes, want %d", got, mib)
		}
		must.Value(h.Expand(t.Context(), id(t, anewDisk), h.Target("b"), volume.ModeBlock, volume.Range{Required: 2 * mib}))(t)
		if got := h.onDisks()[0].SizeBytes; got != 2*mib {
			t.Errorf("its device has %d bytes, want %d", got, 2*mib)
		}
	})
}

// Before, a server exported the directory above the pool, and now the pool.
func TestPoolMountedAnewFromBelowHasVolumesPublished(t *testing.T) {
	testenv.NeedRoot(t)
	files, root := testenv.LoopFS(t, "ext4", 64<<20), testenv.Tmpfs(t, 16<<20)
	at, export := filepath.Join(root, "pool"), filepath.Join(root, "export")
	must.Succeed(t, os.Mkdir(at, 0o755), os.Mkdir(export, 0o755))
	for _, layer := range []string{"lower/pool", "upper/pool", "work", "work2"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(files, layer), 0o755))
	}
	mount := func(at, below, work string) {
		layers := fmt.Sprintf("lowerdir=%s/lower%s,upperdir=%s/upper%s,workdir=%s/%s", files, below, files, below, files, work)
		must.Succeed(t, syscall.Mount("overlay", at, "overlay", 0, layers))
	}
	mount(export, "", "work")
	must.Succeed(t, syscall.Mount(filepath.Join(export, "pool"), at, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(at, syscall.MNT_DETACH)) }()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.Dev = must.Value(dir.Open("/dev"))(t)
		h.table, h.devices = must.Value(bind.NewKernel())(t), loop.NewKernel(h.Dev)
		h.start(sharedPool)
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		defer func() { must.Succeed(t, h.unpublish("pvc-1", "a")) }()
		must.Succeed(t, syscall.Unmount(at, syscall.MNT_DETACH), syscall.Unmount(export, syscall.MNT_DETACH))
		mount(at, "/pool", "work2")
		h.restart(sharedPool)
		h.later(3 * time.Minute)
		must.Succeed(t, h.Status()[0].Err)
		two := h.another("node-2")
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		must.Succeed(t, two.Close(t.Context()))
		wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
	})
}
