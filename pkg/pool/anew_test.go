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
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

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
		h.createBlock("pvc-disk", mib)
		defer func() { _, _ = h.unpublish("pvc-1", "a"), h.unpublish("pvc-disk", "b") }() // also if the test has failed
		must.Succeed(t, h.publish("pvc-1", "a"), h.publishBlock("pvc-disk", "b"))
		defer func() {
			must.Succeed(t, h.unpublish("pvc-1", "a"), h.unpublish("pvc-disk", "b"))
			must.Succeed(t, h.publishBlock("pvc-disk", "b"), h.unpublish("pvc-disk", "b"))
			h.delete("pvc-1")
			h.delete("pvc-disk")
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
		wantError(t, h.Delete(t.Context(), id(t, "pvc-disk")), volume.ErrInUse)
		wantError(t, h.publishBlock("pvc-disk", "c"), volume.ErrInUse) // by another device, with a cache of its own
	})
}

func TestPoolMountedAnewKeepsMarks(t *testing.T) {
	onMountedAnew(t, sharedPool, func(t *testing.T, h *harness) {
		two := h.another("node-2")
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		wantRefusedFor(t, two.publishBlock("pvc-disk", "on-two"), "node-1")
		must.Succeed(t, two.Close(t.Context()))
	})
}
