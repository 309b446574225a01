package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func asBlock(claim *corev1.PersistentVolumeClaim) {
	mode := corev1.PersistentVolumeBlock
	claim.Spec.VolumeMode = &mode
}

// withDevice gives the container a claim's device.
func withDevice(claim, path string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: claim, VolumeSource: claimSource(claim, false)})
		pod.Spec.Containers[0].VolumeDevices = append(pod.Spec.Containers[0].VolumeDevices, corev1.VolumeDevice{Name: claim, DevicePath: path})
	}
}

// attached are the loop devices of the machine on the file of a block volume.
func (h *harness) attached(volume *corev1.PersistentVolume) []string {
	h.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must.Succeed(h, err)
	var found []string
	for _, file := range all {
		// The file may have gone meanwhile, with its device.
		text, err := os.ReadFile(file)
		if err == nil && strings.HasSuffix(strings.TrimSpace(string(text)), "/"+volume.Spec.CSI.VolumeHandle+"/disk.img") {
			found = append(found, file)
		}
	}
	return found
}

// deviceSize is how many bytes a device of a pod has.
func (h *harness) deviceSize(pod, device string) int64 {
	h.Helper()
	text := h.mustRun(pod, "blockdev --getsize64 "+device)
	size, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	must.Succeed(h, err)
	return size
}

// wantClaimSize waits until a claim has a size.
func (h *harness) wantClaimSize(name, want string) {
	h.Helper()
	h.until("claim "+name+" to have "+want, func(ctx context.Context) (string, error) {
		claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if got := claim.Status.Capacity.Storage(); got.Cmp(resource.MustParse(want)) != 0 {
			return fmt.Sprintf("has %v, %v", got, claim.Status.Conditions), nil
		}
		return "", nil
	})
}
