package v1alpha1_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

func TestSize(t *testing.T) {
	storage := func(size string) corev1.ResourceList {
		if size == "" {
			return nil
		}
		return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	}
	for name, c := range map[string]struct{ asked, has, volume, want string }{
		"of this driver":             {"1Gi", "1Gi", "1Gi", "1Gi"},
		"of the upstream driver":     {"1Gi", "900Gi", "900Gi", "1Gi"},
		"that is to grow":            {"2Gi", "1Gi", "1Gi", "1Gi"},
		"that has not grown":         {"2Gi", "1Gi", "2Gi", "1Gi"},
		"of a claim without a size":  {"", "", "1Gi", "1Gi"},
		"without a size":             {"1Gi", "", "", "1Gi"},
		"of a claim that knows less": {"", "1Gi", "2Gi", "1Gi"},
	} {
		claim := &corev1.PersistentVolumeClaim{
			Spec:   corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{Requests: storage(c.asked)}},
			Status: corev1.PersistentVolumeClaimStatus{Capacity: storage(c.has)},
		}
		volume := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{Capacity: storage(c.volume)}}
		if got := v1alpha1.Size(claim, volume); got.Cmp(resource.MustParse(c.want)) != 0 {
			t.Errorf("a volume %s needs %s, want %s", name, got.String(), c.want)
		}
	}
}
