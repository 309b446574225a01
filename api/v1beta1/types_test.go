package v1beta1_test

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

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

// What kubectl explain says of the object is what the tests of the upstream operator look for in it.
func TestDescriptionsAreThoseOfUpstream(t *testing.T) {
	text, err := os.ReadFile("../../deploy/operator/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type described struct {
		Description string               `json:"description"`
		Properties  map[string]described `json:"properties"`
	}
	var definition struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema described `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(text, &definition); err != nil {
		t.Fatal(err)
	}
	object := definition.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties
	status := object["status"].Properties
	for want, of := range map[string]described{
		"HostPathProvisionerSpec defines the desired state of HostPathProvisioner":    object["spec"],
		"HostPathProvisionerStatus defines the observed state of HostPathProvisioner": object["status"],
		"Conditions contains the current conditions observed by the operator":         status["conditions"],
		"ObservedVersion The observed version of the HostPathProvisioner deployment":  status["observedVersion"],
		"OperatorVersion The version of the HostPathProvisioner Operator":             status["operatorVersion"],
		"TargetVersion The targeted version of the HostPathProvisioner deployment":    status["targetVersion"],
	} {
		if !strings.Contains(strings.Join(strings.Fields(of.Description), " "), want) {
			t.Errorf("%q is not in %q", want, of.Description)
		}
	}
}
