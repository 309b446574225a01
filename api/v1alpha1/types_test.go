package v1alpha1_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestScheme(t *testing.T) {
	scheme := runtime.NewScheme()
	must.Succeed(t, v1alpha1.AddToScheme(scheme))
	if !scheme.Recognizes(v1alpha1.GroupVersion.WithKind(v1alpha1.Kind)) {
		t.Error("the kind is not known")
	}
}

func TestEnded(t *testing.T) {
	for phase, want := range map[v1alpha1.Phase]bool{
		"": false, v1alpha1.Pending: false, v1alpha1.Switching: false, v1alpha1.Removing: false, v1alpha1.Undoing: false,
		v1alpha1.Succeeded: true, v1alpha1.Failed: true,
	} {
		if got := (&v1alpha1.VolumeMove{Status: v1alpha1.VolumeMoveStatus{Phase: phase}}).Ended(); got != want {
			t.Errorf("a move in the phase %q has ended: %v, want %v", phase, got, want)
		}
	}
}
