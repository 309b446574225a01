package pool_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// makeSubvolumeIn makes a subvolume in the groups of some volumes, which on btrfs with simple quotas needs no privilege.
func (h *harness) makeSubvolumeIn(path string, volumes ...string) {
	h.t.Helper()
	args := []string{"subvolume", "create"}
	for _, name := range volumes {
		d := must.Value(dir.Open(h.Path("pool", name)))(h.t)
		facility := must.Value(quota.Detect(d))(h.t)
		args = append(args, "-i", fmt.Sprintf("1/%d", 79508434583552+must.Value(facility.IDOf(d))(h.t)))
		must.Succeed(h.t, d.Close())
	}
	command(h.t, "btrfs", append(args, path)...)
}

func writeSynced(t *testing.T, path string, bytes int) error {
	t.Helper()
	f := must.Value(os.Create(path))(t)
	defer func() { _ = f.Close() }()
	if _, err := f.Write(make([]byte, bytes)); err != nil {
		return err
	}
	return f.Sync()
}

// With simple quotas a pod puts a subvolume into the groups of several volumes. What it holds is taken once, and hides nothing of what others
// hold.
func TestSubvolumeInTwoGroupsHidesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.SimpleBtrfs(t, 512*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		for _, name := range []string{"pvc-1", "pvc-2"} {
			h.create(name, 80*mib)
		}
		must.Succeed(t, writeSynced(t, root+"/others", 80*mib))
		h.wantNotHidden(root, func() {
			h.makeSubvolumeIn(h.Path("pool", "pvc-1", "nested"), "pvc-1", "pvc-2")
			must.Succeed(t, writeSynced(t, h.Path("pool", "pvc-1", "nested")+"/data", 64*mib))
		})
		h.delete("pvc-1")
		h.delete("pvc-2")
	})
}

// With simple quotas a pod puts subvolumes into the group of another volume, and removes them while a file of its own shares their blocks. They
// are taken out of the group, also if that happens again and again.
func TestOthersSubvolumesAreTakenOutOfLimit(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.SimpleBtrfs(t, 512*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-bad", 16*mib)
		h.create("pvc-1", 80*mib)
		intrude := func(n int) {
			t.Helper()
			nested := h.Path("pool", "pvc-bad", fmt.Sprint("nested-", n))
			h.makeSubvolumeIn(nested, "pvc-1")
			must.Succeed(t, writeSynced(t, nested+"/data", 32*mib))
			share(t, nested+"/data", h.Path("pool", "pvc-bad", fmt.Sprint("data-", n)))
			if n%2 == 0 {
				command(t, "btrfs", "subvolume", "delete", nested)
				command(t, "btrfs", "subvolume", "sync", root)
			}
			syncfs(t, root)
		}
		for n := range 4 {
			intrude(n)
			h.later(time.Minute + time.Second) // a survey
		}
		h.later(2 * time.Minute)
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("the volume is %+v", c)
		}
		if got := h.Status()[0].Restored; got < 2 {
			t.Errorf("%d limits were restored, of a volume into whose limit others came four times", got)
		}
		if err := writeSynced(t, h.Path("pool", "pvc-1", "data"), 76*mib); err != nil {
			out, _ := exec.Command("btrfs", "qgroup", "show", "-p", root).CombinedOutput()
			t.Errorf("writing 76 of 80 MiB: %v\n%s", err, out)
		}
		h.delete("pvc-1")
		h.delete("pvc-bad")
	})
}
