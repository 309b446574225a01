package deploy_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// blockExampleDir is apart from exampleDir: its pod has to be root.
const blockExampleDir = "../../deploy/csi/example/block"

func TestExamplesUseStorageClass(t *testing.T) {
	sc := manifest.Only[storagev1.StorageClass](t, manifest.Render(t, csiDir), "StorageClass")
	for dir, mode := range map[string]corev1.PersistentVolumeMode{exampleDir: "", blockExampleDir: corev1.PersistentVolumeBlock} {
		pvc := manifest.Only[corev1.PersistentVolumeClaim](t, manifest.Render(t, dir), "PersistentVolumeClaim")
		if got := ptr(pvc.Spec.StorageClassName); got != sc.Name {
			t.Errorf("the claim in %s is of class %q, want %q", dir, got, sc.Name)
		}
		if got := ptr(pvc.Spec.VolumeMode); got != mode {
			t.Errorf("the claim in %s asks for the volume mode %q, want %q", dir, got, mode)
		}
		if !slices.Equal(pvc.Spec.AccessModes, []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}) {
			t.Errorf("the claim in %s asks for %v", dir, pvc.Spec.AccessModes)
		}
		if size := pvc.Spec.Resources.Requests[corev1.ResourceStorage]; size.Sign() <= 0 {
			t.Errorf("the claim in %s asks for %s", dir, &size)
		}
	}
}

func TestBlockExamplePodHasDevice(t *testing.T) {
	objs := manifest.Render(t, blockExampleDir)
	pvc := manifest.Only[corev1.PersistentVolumeClaim](t, objs, "PersistentVolumeClaim")
	pod := manifest.Only[corev1.Pod](t, objs, "Pod").Spec
	for _, c := range pod.Containers {
		if !slices.ContainsFunc(c.VolumeDevices, func(d corev1.VolumeDevice) bool {
			v, _ := volume(pod, d.Name)
			return ptr(v.PersistentVolumeClaim).ClaimName == pvc.Name && strings.Contains(strings.Join(c.Command, " "), d.DevicePath)
		}) {
			t.Errorf("container %s does not use the claim %s", c.Name, pvc.Name)
		}
	}
}

func TestExamplePodMountsClaim(t *testing.T) {
	objs := manifest.Render(t, exampleDir)
	pvc := manifest.Only[corev1.PersistentVolumeClaim](t, objs, "PersistentVolumeClaim")
	pod := manifest.Only[corev1.Pod](t, objs, "Pod").Spec
	for _, c := range pod.Containers {
		if err := mountsExist(pod, c); err != nil {
			t.Error(err)
		}
		if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
			v, _ := volume(pod, m.Name)
			return ptr(v.PersistentVolumeClaim).ClaimName == pvc.Name && !m.ReadOnly
		}) {
			t.Errorf("container %s cannot write to the claim %s", c.Name, pvc.Name)
		}
	}
}

// The example shows that a volume needs nothing of a pod: neither root, nor an
// fsGroup, nor a namespace that admits more than others do.
func TestExamplePodIsRestricted(t *testing.T) {
	pod := manifest.Only[corev1.Pod](t, manifest.Render(t, exampleDir), "Pod").Spec
	s := ptr(pod.SecurityContext)
	if !ptr(s.RunAsNonRoot) || ptr(s.RunAsUser) == 0 {
		t.Error("the pod may be root")
	}
	if s.FSGroup != nil {
		t.Error("the pod asks for an fsGroup")
	}
	isConfined(t, pod)
}

// A device is root's in the container too, but that is all that its pod needs.
func TestBlockExamplePodIsConfined(t *testing.T) {
	isConfined(t, manifest.Only[corev1.Pod](t, manifest.Render(t, blockExampleDir), "Pod").Spec)
}

// isConfined searches for & to use a volume.
func isConfined(t *testing.T, pod corev1.PodSpec) {
	t.Helper()
	s := ptr(pod.SecurityContext)
	if ptr(s.SeccompProfile).Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("the pod may make any system call")
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("the pod sees %s of the host", v.HostPath.Path)
		}
	}
	for _, c := range pod.Containers {
		cs := ptr(c.SecurityContext)
		if cs.AllowPrivilegeEscalation == nil || *cs.AllowPrivilegeEscalation || ptr(cs.Privileged) {
			t.Errorf("container %s may gain privileges", c.Name)
		}
		if !slices.Contains(ptr(cs.Capabilities).Drop, "ALL") || len(ptr(cs.Capabilities).Add) != 0 {
			t.Errorf("container %s keeps capabilities", c.Name)
		}
		for _, check := range []func(corev1.PodSpec, corev1.Container) error{imageIsPinned, rootIsReadOnly, requestsAreMade} {
			if err := check(pod, c); err != nil {
				t.Errorf("container %s: %v", c.Name, err)
			}
		}
	}
}
