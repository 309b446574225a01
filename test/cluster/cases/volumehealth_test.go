package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const illOverlay = "../overlay-ill"

// soon is how long it may take until what is wrong shows, and until it is over.
const soon = time.Minute

// A fact is something that is wrong with a pool or a volume of a node, and who sees it.
type fact struct {
	pool string
	// volume is what its pod shows, and storage what the CSINode does; empty for nothing.
	volume, storage string
	harm, mend      func(*harness, *sick)
}

// A sick is a pool of nodeA with a volume and its pod, all of one name.
type sick struct {
	name   string
	device string
	disk   *disk.Disk // nil for one that is always well
}

func (p *sick) path() string { return "/var/ill/" + p.name }

// What is wrong with pools and volumes shows in the status of pods and of the CSINode, by the feature gate CSIVolumeHealth, and goes
// when it is repaired. Kubelet asks for one volume after the other: one of a disk that hangs keeps none waiting. A kubelet without the
// gate shows and asks nothing.
func TestHealthOfVolumesInKubernetes(t *testing.T) {
	h := begin(t)
	pools := h.sickPools("failing", "hanging", "read-only", "full", "away")
	h.sickPod(lostPod, "hostpath-csi", nodeA)
	h.sickPod("elsewhere", "hostpath-csi", nodeB)
	for name := range pools {
		h.class(h.namespace+"-"+name, name, storagev1.VolumeBindingWaitForFirstConsumer)
		h.sickPod(name, h.namespace+"-"+name, nodeA)
	}
	for _, name := range []string{lostPod, "elsewhere", "failing", "hanging", "read-only", "full", "away"} {
		h.ready(name)
		h.mustRun(name, "echo hello >/data/file")
	}
	h.wantStorage("well", func(found []string) bool { return len(found) == 0 })

	lost, elsewhere := h.straying(lostPod), h.straying("elsewhere")
	h.rename(elsewhere.path, elsewhere.away)
	h.wantEvent("PersistentVolumeClaim", "elsewhere", "VolumeConditionAbnormal")
	hanging := fact{pool: "hanging", volume: "Inaccessible PoolHangs", storage: "StorageUnreachable PoolHangs"}
	pools["hanging"].disk.Hang()
	h.wantFact(hanging)
	t.Run("while a disk hangs", func(t *testing.T) {
		for _, f := range facts(lost) {
			t.Run(f.pool, func(t *testing.T) {
				t.Parallel()
				h, pool := h.in(t), pools[f.pool]
				f.harm(h, pool)
				h.wantFact(f)
				f.mend(h, pool)
				h.wantNoFact(f)
			})
		}
	})
	pools["hanging"].disk.Heal()
	h.wantNoFact(hanging)
	h.wantNothingWithoutGate("elsewhere")
	h.rename(elsewhere.away, elsewhere.path)
}

// facts are those of a cluster in which a disk hangs already.
func facts(lost straying) []fact {
	return []fact{
		{
			pool: "failing", volume: "Inaccessible PoolFailing", storage: "StorageUnreachable PoolFailing",
			harm: func(h *harness, p *sick) {
				p.disk.Fail(disk.Read, disk.Write, disk.Flush)
				if _, err := h.run(p.name, "dd if=/dev/zero of=/data/file bs=1M count=1 conv=fsync"); err == nil {
					h.Error("a disk that fails has stored something")
				}
			},
			// As an administrator: a filesystem that has stopped has to be mounted again.
			mend: func(h *harness, p *sick) {
				p.disk.Heal()
				h.remove(p.name)
				h.unmount(p)
				h.mount(p)
				h.pod(p.name, with(p.name, "/data"), on(nodeA))
				h.ready(p.name)
			},
		},
		{
			pool: "read-only", volume: "Degraded ReadOnly", storage: "StorageDegraded ReadOnly",
			harm: func(h *harness, p *sick) { h.onNode("mount", "-o", "remount,ro", p.path()) },
			mend: func(h *harness, p *sick) { h.onNode("mount", "-o", "remount,rw", p.path()) },
		},
		{
			pool: "full", volume: "Degraded NoSpace", storage: "StorageDegraded NoSpace",
			harm: func(h *harness, p *sick) { h.wantNoSpace(p.name, "cat /dev/zero >/data/big") },
			mend: func(h *harness, p *sick) { h.mustRun(p.name, "rm /data/big") },
		},
		{
			pool: "away", volume: "Inaccessible PoolMissing", storage: "StorageUnreachable PoolMissing",
			harm: func(h *harness, p *sick) { h.onNode("umount", "--lazy", p.path()) },
			mend: func(h *harness, p *sick) { h.mount(p) },
		},
		{
			pool: lostPod, volume: "DataLoss DirectoryMissing",
			harm: func(h *harness, _ *sick) { h.rename(lost.path, lost.away) },
			mend: func(h *harness, _ *sick) { h.rename(lost.away, lost.path) },
		},
	}
}

// sickPools has the driver serve pools that can be made ill. They are on nodeA; on nodeB they are missing.
func (h *harness) sickPools(names ...string) map[string]*sick {
	h.Helper()
	pools := make(map[string]*sick)
	for _, name := range names {
		p := &sick{name: name}
		pools[name] = p
		image, err := loopfs.Format(h.Context(), h.TempDir(), "xfs", 300*mib)
		must.Succeed(h, err)
		if name == "failing" || name == "hanging" {
			p.disk = disk.New(h, image, h.TempDir())
			image = p.disk.Path
		}
		device, err := loopfs.Attach(image)
		must.Succeed(h, err)
		h.Cleanup(func() { must.Succeed(h, device.Close()) })
		p.device = device.Name()
		must.Succeed(h, os.MkdirAll(p.path(), 0o755))
		h.mount(p)
		h.Cleanup(func() { h.unmount(p) })
	}
	h.Cleanup(func() {
		h.clear("no volumes to be left in pools that were ill", h.remains)
		must.Succeed(h, c.Install(context.Background(), kustomization))
	})
	for _, p := range pools {
		if p.disk != nil {
			h.Cleanup(p.disk.Heal)
		}
	}
	must.Succeed(h, c.Install(h.Context(), illOverlay))
	return pools
}

// sickPod makes a pod with a claim of its name.
func (h *harness) sickPod(name, class, node string) {
	h.Helper()
	h.claim(name, "32Mi", ofClass(class))
	h.pod(name, with(name, "/data"), on(node))
}

// onNode runs a program on nodeA, also when the test has ended.
func (h *harness) onNode(program string, args ...string) {
	h.Helper()
	_, err := c.Nodes[nodeA].Output(context.Background(), program, args...)
	must.Succeed(h, err)
}

func (h *harness) mount(p *sick) {
	h.Helper()
	h.onNode("mount", "-t", "xfs", p.device, p.path())
}

// unmount waits for calls that still have the filesystem open.
func (h *harness) unmount(p *sick) {
	h.Helper()
	must.Succeed(h, c.Log.Until(context.Background(), soon, p.path()+" to be unmounted", func(ctx context.Context) (string, error) {
		_, err := c.Nodes[nodeA].Output(ctx, "umount", p.path())
		return text(err), nil
	}))
}

// A straying is the directory of a volume that goes, and comes back.
type straying struct{ path, away string }

func (h *harness) straying(claim string) straying {
	h.Helper()
	path := h.disk(h.volume(claim))
	// No name of a volume, so that it is none meanwhile.
	d := straying{path, filepath.Join(filepath.Dir(path), ".away-"+claim)}
	h.Cleanup(func() {
		if exists(d.away) {
			h.rename(d.away, d.path)
		}
	})
	return d
}

// wantFact waits until a fact shows, and nothing else of the same pod.
func (h *harness) wantFact(f fact) {
	h.Helper()
	h.wantVolume(f.pool, f.volume)
	if f.storage != "" {
		h.wantStorage(f.storage, func(found []string) bool { return slices.Contains(found, f.storage) })
	}
}

// wantNoFact waits until it shows no more.
func (h *harness) wantNoFact(f fact) {
	h.Helper()
	h.wantVolume(f.pool, "")
	if f.storage != "" {
		h.wantStorage("no "+f.storage, func(found []string) bool { return !slices.Contains(found, f.storage) })
	}
}

// lostPod is the one whose volume loses something: of others the loss of data is said at no time.
const lostPod = "lost"

// wantVolume waits until the status of a pod says this of its volume, empty for nothing.
func (h *harness) wantVolume(pod, want string) {
	h.Helper()
	start := time.Now()
	must.Succeed(h, c.Log.Until(h.Context(), soon, fmt.Sprintf("pod %s to show %q", pod, want), cluster.Patient(func(ctx context.Context) (string, error) {
		found, err := c.Client.CoreV1().Pods(h.namespace).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		shown := shownIn(found)
		if pod != lostPod && strings.Contains(shown, string(corev1.VolumeHealthDataLoss)) {
			h.Errorf("pod %s shows %q, but nothing of its volume is lost", pod, shown)
		}
		if shown != want {
			return fmt.Sprintf("it shows %q", shown), nil
		}
		return "", nil
	})))
	c.Log.Printf("pod %s shows %q after %.1f s", pod, want, time.Since(start).Seconds())
}

// shownIn is what the status of a pod says of its volumes.
func shownIn(pod *corev1.Pod) string {
	var shown []string
	for _, v := range pod.Status.VolumeHealth {
		for _, condition := range v.HealthConditions {
			shown = append(shown, string(condition.Status)+" "+condition.Reason)
		}
	}
	return strings.Join(shown, ", ")
}

// wantStorage waits until the CSINode of nodeA says what it is to say.
func (h *harness) wantStorage(what string, wanted func([]string) bool) {
	h.Helper()
	must.Succeed(h, c.Log.Until(h.Context(), soon, "the CSINode to show "+what, cluster.Patient(func(ctx context.Context) (string, error) {
		shown, err := storageOf(ctx, nodeA)
		if err != nil || wanted(shown) {
			return "", err
		}
		return fmt.Sprintf("it shows %q", shown), nil
	})))
}

// storageOf is what a CSINode says of the driver's pools.
func storageOf(ctx context.Context, node string) ([]string, error) {
	found, err := c.Client.StorageV1().CSINodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var shown []string
	for _, h := range found.Status.StorageHealth {
		if h.Name != cluster.DriverName {
			continue
		}
		for _, condition := range h.HealthConditions {
			shown = append(shown, string(condition.Status)+" "+condition.Reason)
		}
	}
	return shown, nil
}

// wantNothingWithoutGate says that nodeB, whose kubelet has no gate, shows nothing of a pod's volume and of its pools, which are ill, and that
// kubelet never asked.
func (h *harness) wantNothingWithoutGate(pod string) {
	h.Helper()
	if shown := shownIn(h.ready(pod)); shown != "" {
		h.Errorf("without the feature gate pod %s shows %q", pod, shown)
	}
	shown, err := storageOf(h.Context(), nodeB)
	must.Succeed(h, err)
	if len(shown) > 0 {
		h.Errorf("without the feature gate the CSINode shows %q", shown)
	}
	_, metrics := h.fetch("https", *h.driverOn(nodeB), 8443, "/metrics", "")
	if !strings.Contains(metrics, `hostpath_pool_serving{pool="away"} 0`) || !strings.Contains(metrics, `method="NodeGetVolumeStats"`) {
		h.Errorf("the driver of %s knows of no missing pool, or kubelet has asked nothing:\n%s", nodeB, metrics)
	}
	for _, method := range []string{"NodeGetVolumeHealth", "NodeGetStorageHealth"} {
		if strings.Contains(metrics, method) {
			h.Errorf("without the feature gate kubelet has called %s", method)
		}
	}
}
