package cases_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

func claimSource(name string, readOnly bool) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name, ReadOnly: readOnly}}
}

// A claim that is mounted read-only, by the pod or by the container, is read and
// not written, while another pod writes.
func TestReadOnlyMounts(t *testing.T) {
	h := begin(t)
	h.claim("data", "64Mi")
	h.pod("writer", with("data", "/data"))
	h.ready("writer")
	h.mustRun("writer", "echo hello >/data/file")

	h.pod("reader",
		withVolume(corev1.VolumeMount{MountPath: "/pod"}, claimSource("data", true)))
	h.pod("container",
		withVolume(corev1.VolumeMount{MountPath: "/pod", ReadOnly: true}, claimSource("data", false)))
	for _, pod := range []string{"reader", "container"} {
		h.ready(pod)
		if got := h.mustRun(pod, "cat /pod/file"); got != "hello\n" {
			t.Errorf("%s reads %q", pod, got)
		}
		if _, err := h.run(pod, "echo no >/pod/file"); err == nil || !strings.Contains(err.Error(), "Read-only file system") {
			t.Errorf("%s writes, or fails in another way: %v", pod, err)
		}
	}
	h.mustRun("writer", "echo more >>/data/file")
}

// A pod that is not root writes, with its own group and without one.
func TestUsersAndGroups(t *testing.T) {
	h := begin(t)
	h.claim("data", "64Mi")
	h.pod("grouped", with("data", "/data"), func(pod *corev1.Pod) {
		pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: pointer(int64(1000)), RunAsGroup: pointer(int64(1000)), FSGroup: pointer(int64(2000))}
	})
	h.ready("grouped")
	h.mustRun("grouped", "echo hello >/data/file")
	h.remove("grouped")
	path := h.disk(h.volume("data"))
	h.wantGroup(path, 2000)
	h.wantGroup(filepath.Join(path, "file"), 2000)

	h.claim("open", "64Mi")
	h.pod("plain", with("open", "/data"), func(pod *corev1.Pod) {
		pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: pointer(int64(1000)), RunAsNonRoot: pointer(true)}
	})
	h.ready("plain")
	h.mustRun("plain", "echo hello >/data/file")
}

func (h *harness) wantGroup(path string, want uint32) {
	h.Helper()
	info, err := os.Stat(path)
	if err != nil {
		h.Error(err)
	} else if got := info.Sys().(*syscall.Stat_t).Gid; got != want {
		h.Errorf("%s belongs to group %d, want %d", path, got, want)
	}
}

// An inline volume is made by the mount, holds what its size allows, and goes with it.
func TestInlineEphemeralVolume(t *testing.T) {
	h := begin(t)
	h.pod("user", withVolume(corev1.VolumeMount{MountPath: "/data"}, corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: cluster.DriverName, VolumeAttributes: map[string]string{"storagePool": "local", "size": "64Mi"}},
	}))
	node := c.Nodes[h.ready("user").Spec.NodeName]
	h.mustRun("user", "echo hello >/data/file")
	found, err := filepath.Glob(filepath.Join(node.Disk("/var/hpvolumes"), "csi-*", "file"))
	if err != nil || len(found) != 1 {
		t.Fatalf("found the file of an inline volume at %v, %v; want it once", found, err)
	}
	h.wantFile(found[0], "hello\n")
	h.wantNoSpace("user", "dd if=/dev/zero of=/data/big bs=1M count=80")
	h.remove("user")
	h.wantGone(filepath.Dir(found[0]))
}
