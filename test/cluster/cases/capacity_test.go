package cases_test

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	mib = 1 << 20
	gib = 1 << 30
	// quantum is the unit in which the capacity of a pool of 8 GiB is reported.
	quantum = 16 * mib
	// step leaves room for what the pool itself writes in the meantime: one quantum more.
	step = 2 * quantum
)

// capacities are what the cluster knows to be free, in bytes, by class and node. Left
// out are classes of single tests, whose objects may outlive them for a moment.
func capacities(ctx context.Context) (map[string]map[string]int64, error) {
	list, err := c.Client.StorageV1().CSIStorageCapacities(cluster.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	found := map[string]map[string]int64{}
	for _, item := range list.Items {
		if _, ok := poolPaths[item.StorageClassName]; !ok {
			continue
		}
		node := item.NodeTopology.MatchLabels["topology.hostpath.csi/node"]
		if found[item.StorageClassName] == nil {
			found[item.StorageClassName] = map[string]int64{}
		}
		if _, twice := found[item.StorageClassName][node]; twice {
			return nil, fmt.Errorf("two objects for class %s on %s", item.StorageClassName, node)
		}
		if item.Capacity == nil {
			return nil, fmt.Errorf("%s has no capacity", item.Name)
		}
		if m := item.MaximumVolumeSize; m != nil && m.Cmp(*item.Capacity) > 0 {
			return nil, fmt.Errorf("%s has a largest volume of %v with a capacity of %v", item.Name, m, item.Capacity)
		}
		found[item.StorageClassName][node] = item.Capacity.Value()
	}
	return found, nil
}

// capacity is what the cluster knows to be free of class hostpath-csi on a node.
func (h *harness) capacity(node string) int64 {
	h.Helper()
	all, err := capacities(h.Context())
	must.Succeed(h, err)
	bytes, ok := all["hostpath-csi"][node]
	if !ok {
		h.Fatalf("no capacity is known of %s: %v", node, all)
	}
	return bytes
}

// wantCapacity waits until a capacity is this, or less by what it is rounded by.
func (h *harness) wantCapacity(class, node string, want int64) {
	h.Helper()
	h.until(fmt.Sprintf("capacity %d MiB of %s on %s", want/mib, class, node), func(ctx context.Context) (string, error) {
		all, err := capacities(ctx)
		if err != nil {
			return "", err
		}
		got := all[class][node]
		if got <= want && got > want-step {
			return "", nil
		}
		return fmt.Sprintf("is %d MiB", got/mib), nil
	})
}

// free is what the filesystem of a pool has free.
func (h *harness) free(node, pool string) int64 {
	h.Helper()
	var stat syscall.Statfs_t
	must.Succeed(h, syscall.Statfs(c.Nodes[node].Disk(pool), &stat))
	return int64(stat.Bavail) * stat.Bsize
}

// room is what a pool has for volumes, if it has none: all that is free, or on btrfs what is left of that beside
// its trees (docs/capacity.md).
func (h *harness) room(node, pool string) int64 {
	h.Helper()
	d, err := dir.Open(c.Nodes[node].Disk(pool))
	must.Succeed(h, err)
	defer func() { _ = d.Close() }() // opened for reading
	trees, err := quota.TreesOf(d)
	must.Succeed(h, err)
	free := h.free(node, pool)
	if trees.Copies == 0 {
		return free
	}
	return (free + trees.Spare - trees.Reserve) / (12*trees.Copies + 1) * 12
}

// near says whether two capacities are the same but for what the filesystem takes for
// itself: a few bytes can be a whole quantum of what is reported.
func near(a, b int64) bool { return max(a-b, b-a) <= quantum }

// settle waits until the space of earlier volumes on a node is free and the cluster
// knows: until then a capacity grows by itself. A volume that is gone from the pool may
// still be in its trash, and what the trash had is free with one of btrfs' next commits.
// Promised is what volumes of now are promised.
func (h *harness) settle(node string, promised int64) {
	h.Helper()
	const pool = "/var/hpvolumes"
	disk := c.Nodes[node].Disk(pool)
	h.until("the trash of "+node+" to be empty", func(context.Context) (string, error) {
		left, err := filepath.Glob(filepath.Join(disk, ".hostpath-provisioner/trash/*/*"))
		if err != nil || len(left) == 0 {
			return "", err
		}
		return fmt.Sprintf("%d volumes", len(left)), nil
	})
	for _, args := range [][]string{{"filesystem", "sync"}, {"subvolume", "sync"}, {"filesystem", "sync"}} {
		if out, err := exec.CommandContext(h.Context(), "btrfs", append(args, disk)...).CombinedOutput(); err != nil {
			h.Fatalf("btrfs %v: %v: %s", args, err, out)
		}
	}
	h.until(fmt.Sprintf("the capacity of %s to be what its disk has room for but %d MiB", node, promised/mib), func(ctx context.Context) (string, error) {
		all, err := capacities(ctx)
		if err != nil {
			return "", err
		}
		got, want := all["hostpath-csi"][node], h.room(node, pool)-promised
		if near(got, want) {
			return "", nil
		}
		return fmt.Sprintf("is %d MiB of %d", got/mib, want/mib), nil
	})
}

// There is one object for each class and node, which says what the disk has free
// and what was promised of it.
func TestCapacityObjects(t *testing.T) {
	h := begin(t)
	h.settle(nodeA, 0)
	h.settle(nodeB, 0)
	all, err := capacities(t.Context())
	must.Succeed(t, err)
	if len(all) != len(poolPaths) {
		t.Errorf("there are capacities of %d classes, want %d: %v", len(all), len(poolPaths), all)
	}
	for class, pool := range poolPaths {
		if len(all[class]) != 2 {
			t.Errorf("there are capacities of %d nodes for %s, want 2: %v", len(all[class]), class, all[class])
		}
		for _, node := range []string{nodeA, nodeB} {
			h.wantCapacity(class, node, h.room(node, pool)+quantum)
		}
	}
}

// filler is the pod that fills a node, and its claim.
func filler(node string) string { return "filler-" + node }

// fill takes all but some bytes of the pool of a node, in which there is no other
// volume, and returns how many.
func (h *harness) fill(node string, leave int64) (taken int64) {
	h.Helper()
	h.settle(node, 0)
	size := (h.capacity(node) - leave) / mib
	name := filler(node)
	h.claim(name, fmt.Sprintf("%dMi", size))
	h.pod(name, with(name, "/data"), on(node))
	h.ready(name)
	h.wantCapacity("hostpath-csi", node, leave)
	return size * mib
}

// A pod that fits only on one node lands there, also if it would rather be on the
// other.
func TestSchedulingByCapacity(t *testing.T) {
	h := begin(t)
	h.fill(nodeA, 512*mib)
	for i := range 3 {
		name := fmt.Sprintf("user-%d", i)
		h.claim(name, "1Gi")
		h.pod(name, with(name, "/data"), preferring(nodeA))
	}
	for i := range 3 {
		if got := h.ready(fmt.Sprintf("user-%d", i)).Spec.NodeName; got != nodeB {
			t.Errorf("user-%d is on %s, where it has no room", i, got)
		}
	}
	h.claim("small", "256Mi")
	h.pod("small", with("small", "/data"), preferring(nodeA))
	if got := h.ready("small").Spec.NodeName; got != nodeA {
		t.Errorf("the small one is on %s, want it where it prefers to be and has room", got)
	}
}
