package cases_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A volume grows under the pod that uses it: the claim, the limit that the kernel
// keeps, what df shows in the pod, and what kubelet shows of it.
func TestExpandInUse(t *testing.T) {
	h := begin(t)
	h.claim("data", "64Mi")
	h.pod("user", with("data", "/data"))
	before := h.ready("user")
	h.wantSpace("user", "/data", 64*mib)
	h.wantNoSpace("user", "dd if=/dev/zero of=/data/big bs=1M count=150")
	h.mustRun("user", "rm /data/big; sync -f /data")

	h.resize("data", "256Mi")
	h.wantClaimSize("data", "256Mi")
	h.wantSpace("user", "/data", 256*mib)
	h.mustRun("user", "dd if=/dev/zero of=/data/big bs=1M count=150")
	h.wantNoSpace("user", "dd if=/dev/zero of=/data/bigger bs=1M count=150")
	h.wantShown(before.Spec.NodeName, "data", 256*mib)
	after := h.ready("user")
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the pod did not live through the growth of its volume")
	}
}

// Volumes that a kubelet had mounted before it was started again grow like others: what
// is asked for while it is away, and what is asked for later. Of a device it has to
// know anew where it is.
func TestExpandAfterKubeletRestart(t *testing.T) {
	h := begin(t)
	node := c.Nodes[nodeA]
	h.claim("data", "64Mi")
	h.claim("disk", "64Mi", asBlock)
	h.pod("user", with("data", "/data"), withDevice("disk", "/dev/disk"), on(nodeA))
	before := h.ready("user")
	disk := h.volume("disk")

	must.Succeed(t, node.StopKubelet(t.Context()))
	for _, claim := range []string{"data", "disk"} {
		h.resize(claim, "128Mi")
	}
	must.Succeed(t, node.StartKubelet(t.Context()))
	for _, size := range []string{"128Mi", "192Mi"} {
		for _, claim := range []string{"data", "disk"} {
			h.resize(claim, size)
			h.wantClaimSize(claim, size)
		}
		bytes := resource.MustParse(size)
		if got := h.deviceSize("user", "/dev/disk"); got != bytes.Value() {
			t.Errorf("the device has %d bytes, want %s", got, size)
		}
	}
	h.mustRun("user", "dd if=/dev/zero of=/data/big bs=1M count=150")
	h.wantNoSpace("user", "dd if=/dev/zero of=/data/bigger bs=1M count=100")
	h.mustRun("user", "dd if=/dev/zero of=/dev/disk bs=1M seek=191 count=1 conv=fsync")
	if got := h.attached(disk); len(got) != 1 {
		t.Errorf("the volume has the devices %q, want one", got)
	}
	after := h.ready("user")
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the pod did not live through the growth of its volumes")
	}
}

// Claims that are larger than their pool keep their volumes, and their pods start: also later ones, and those that a
// kubelet starts which was started again itself, as when its node reboots. The claims say why they did not grow, and grow
// when they are lowered to what fits.
func TestExpandBeyondPoolCapacity(t *testing.T) {
	h := begin(t)
	h.claim("data", "64Mi")
	h.claim("disk", "64Mi", asBlock)
	start := func() {
		t.Helper()
		h.pod("user", with("data", "/data"), withDevice("disk", "/dev/disk"), on(nodeA))
		h.ready("user")
	}
	each := func(do func(claim string)) {
		for _, claim := range []string{"data", "disk"} {
			do(claim)
		}
	}
	start()
	h.mustRun("user", "echo still here >/data/file; sync -f /data; cp /data/file /dev/disk")
	each(func(claim string) { h.resize(claim, "100Gi") })
	each(func(claim string) { h.wantCondition(claim, "bytes to promise") })

	restart := func() {
		t.Helper()
		h.remove("user")
		start()
		for _, from := range []string{"/data/file", "/dev/disk"} {
			if got := h.mustRun("user", "head -n 1 "+from); got != "still here\n" {
				t.Errorf("%s has %q after a restart", from, got)
			}
		}
	}
	restart()
	must.Succeed(t, c.Nodes[nodeA].StopKubelet(t.Context()))
	must.Succeed(t, c.Nodes[nodeA].StartKubelet(t.Context()))
	restart()
	h.wantNoSpace("user", "dd if=/dev/zero of=/data/big bs=1M count=150")
	h.mustRun("user", "rm /data/big; sync -f /data")
	each(func(claim string) { h.wantCondition(claim, "bytes to promise") })

	// At the first start kubelet learns that the size it was to grow to is given up.
	each(func(claim string) { h.resize(claim, "128Mi") })
	restart()
	each(func(claim string) { h.wantCondition(claim, "(re-)start a pod") })
	restart()
	each(func(claim string) { h.wantClaimSize(claim, "128Mi") })
	h.mustRun("user", "dd if=/dev/zero of=/data/big bs=1M count=100")
	if got := h.deviceSize("user", "/dev/disk"); got != 128*mib {
		t.Errorf("the device has %d bytes, want %d", got, 128*mib)
	}
}

// wantCondition waits until a condition of a claim has some words in its message.
func (h *harness) wantCondition(claim, words string) {
	h.Helper()
	h.until(fmt.Sprintf("a condition of claim %s with %q", claim, words), func(ctx context.Context) (string, error) {
		found, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(ctx, claim, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		for _, condition := range found.Status.Conditions {
			if strings.Contains(condition.Message, words) {
				return "", nil
			}
		}
		return fmt.Sprintf("%+v", found.Status.Conditions), nil
	})
}

func (h *harness) resize(claim, size string) {
	h.Helper()
	patch := fmt.Sprintf(`{"spec": {"resources": {"requests": {"storage": %q}}}}`, size)
	if _, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Patch(h.Context(), claim, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		h.Fatal(err)
	}
}

// wantSpace wants df in a pod to show a volume of that many bytes. On btrfs it shows
// the whole filesystem, whatever the volume's size is.
func (h *harness) wantSpace(pod, path string, bytes int64) {
	h.Helper()
	if poolKind == "btrfs" {
		bytes = c.Pools[0].Bytes
	}
	text := h.mustRun(pod, "df -P -k "+path)
	h.Logf("df in the pod:\n%s", text)
	lines := strings.Split(strings.TrimSpace(text), "\n")
	fields := strings.Fields(lines[len(lines)-1])
	if want := strconv.FormatInt(bytes>>10, 10); len(fields) < 2 || fields[1] != want {
		h.Errorf("df in the pod shows no volume of %s KiB:\n%s", want, text)
	}
}

// wantShown waits for kubelet to show the size of a claim's volume.
func (h *harness) wantShown(node, claim string, want int64) {
	h.Helper()
	h.until(fmt.Sprintf("kubelet to show the size of %s, %d", claim, want), func(ctx context.Context) (string, error) {
		got, err := h.shown(ctx, node, claim)
		if got == want {
			return "", err
		}
		return fmt.Sprintf("shows %d", got), err
	})
}

// shown is the size of a claim's volume in kubelet's statistics, or 0 if they do
// not have it yet.
func (h *harness) shown(ctx context.Context, node, claim string) (int64, error) {
	text, err := c.Client.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix("stats/summary").DoRaw(ctx)
	if err != nil {
		return 0, err
	}
	var summary struct {
		Pods []struct {
			Volumes []struct {
				CapacityBytes int64
				PVCRef        *corev1.ObjectReference
			} `json:"volume"`
		}
	}
	if err := json.Unmarshal(text, &summary); err != nil {
		return 0, err
	}
	for _, pod := range summary.Pods {
		for _, volume := range pod.Volumes {
			if ref := volume.PVCRef; ref != nil && ref.Namespace == h.namespace && ref.Name == claim {
				return volume.CapacityBytes, nil
			}
		}
	}
	return 0, nil
}
