package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
func (s *scene) attached(volume *corev1.PersistentVolume) []string {
	s.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		s.Fatal(err)
	}
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
func (s *scene) deviceSize(pod, device string) int64 {
	s.Helper()
	text := s.mustRun(pod, "blockdev --getsize64 "+device)
	size, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		s.Fatal(err)
	}
	return size
}

// A claim for a block device is a device of the size asked for, keeps what is
// written from pod to pod, grows in use, and leaves no device behind.
func TestBlockVolume(t *testing.T) {
	s := begin(t)
	s.claim("disk", "64Mi", asBlock)
	s.pod("first", withDevice("disk", "/dev/disk"))
	s.ready("first")
	volume := s.volume("disk")
	if got := s.deviceSize("first", "/dev/disk"); got != 64*mib {
		t.Errorf("the device has %d bytes, want 64 MiB", got)
	}
	s.mustRun("first", "echo hello | dd of=/dev/disk conv=notrunc,fsync")
	s.wantStart(filepath.Join(s.disk(volume), "disk.img"), "hello\n")
	s.wantNoSpace("first", "dd if=/dev/zero of=/dev/disk bs=1M seek=64 count=1")

	s.resize("disk", "128Mi")
	s.until("the device to have 128 MiB", func(context.Context) (string, error) {
		if got := s.deviceSize("first", "/dev/disk"); got != 128*mib {
			return fmt.Sprintf("has %d bytes", got), nil
		}
		return "", nil
	})
	s.wantClaimSize("disk", "128Mi")

	s.remove("first")
	s.until("the device to be gone", func(context.Context) (string, error) {
		return strings.Join(s.attached(volume), " "), nil
	})
	s.pod("second", withDevice("disk", "/dev/disk"))
	s.ready("second")
	if got := s.mustRun("second", "head -c 6 /dev/disk"); got != "hello\n" {
		t.Errorf("the second pod reads %q", got)
	}
	if len(s.attached(volume)) != 1 {
		t.Errorf("the volume has the devices %q, want one", s.attached(volume))
	}
	s.remove("second")
	s.removeClaim("disk")
	if left := s.attached(volume); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

// wantStart says what a file on a disk begins with.
func (s *scene) wantStart(path, want string) {
	s.Helper()
	file, err := os.Open(path)
	if err != nil {
		s.Error(err)
		return
	}
	defer file.Close()
	got := make([]byte, len(want))
	if _, err := file.Read(got); err != nil || string(got) != want {
		s.Errorf("%s begins with %q, %v; want %q", path, got, err, want)
	}
}

// wantClaimSize waits until a claim has a size.
func (s *scene) wantClaimSize(name, want string) {
	s.Helper()
	s.until("claim "+name+" to have "+want, func(ctx context.Context) (string, error) {
		claim, err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if got := claim.Status.Capacity.Storage(); got.Cmp(resource.MustParse(want)) != 0 {
			return fmt.Sprintf("has %v, %v", got, claim.Status.Conditions), nil
		}
		return "", nil
	})
}
