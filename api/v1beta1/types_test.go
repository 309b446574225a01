package v1beta1_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"kubevirt.io/hostpath-provisioner/api/v1beta1"
)

func TestIsShared(t *testing.T) {
	template := func(modes ...corev1.PersistentVolumeAccessMode) *v1beta1.ClaimTemplate {
		return &v1beta1.ClaimTemplate{AccessModes: modes}
	}
	tests := map[string]struct {
		pool v1beta1.StoragePool
		want bool
	}{
		"directory":                        {v1beta1.StoragePool{}, false},
		"directory that is shared":         {v1beta1.StoragePool{Shared: true}, true},
		"claim of each node":               {v1beta1.StoragePool{PVCTemplate: template(corev1.ReadWriteOnce)}, false},
		"claim for all nodes":              {v1beta1.StoragePool{PVCTemplate: template(corev1.ReadWriteOnce, corev1.ReadWriteMany)}, true},
		"claim of each, said to be shared": {v1beta1.StoragePool{Shared: true, PVCTemplate: template(corev1.ReadWriteOnce)}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := tt.pool.IsShared(); got != tt.want {
				t.Errorf("IsShared() = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestSpecOfATemplateIsACopy(t *testing.T) {
	class := "fast"
	template := &v1beta1.ClaimTemplate{
		AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		StorageClassName: &class,
		Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")}},
	}
	spec := template.Spec()
	want := corev1.PersistentVolumeClaimSpec{
		AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		StorageClassName: &class,
		Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")}},
	}
	if diff := cmp.Diff(want, *spec); diff != "" {
		t.Error(diff)
	}
	spec.AccessModes[0] = corev1.ReadWriteMany
	if template.AccessModes[0] != corev1.ReadWriteOnce {
		t.Error("a change of the spec has changed the template")
	}
}
