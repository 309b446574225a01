package operator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestReleaseIsThatOfTheOwnPod(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "operator-1"}}
	pod.Spec.Containers = []corev1.Container{{Name: "proxy", Image: "example.com/proxy:1"}, {Name: "operator", Image: "example.com/hpp/hostpath-provisioner-operator:v9"}}
	h := newHarness(t, pod)
	got, err := Release(t.Context(), h, "storage", "operator-1")
	must.Succeed(t, err)
	want, err := render.ReleaseOf("example.com/hpp/hostpath-provisioner-operator:v9")
	must.Succeed(t, err)
	if got != want {
		t.Errorf("the release is %+v, want %+v", got, want)
	}
	if got, err = Release(t.Context(), h, "storage", ""); err != nil || got != (render.Release{}) {
		t.Errorf("without a name of the pod: %+v, %v", got, err)
	}
	if _, err = Release(t.Context(), h, "storage", "operator-2"); err == nil {
		t.Error("a pod that is not there has a release")
	}
}
