package operator

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

// The oldest object counts, whatever the order in which they are listed.
func TestActiveOf(t *testing.T) {
	made := func(name string, second int64) hppv1.HostPathProvisioner {
		return hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(second, 0)}}
	}
	if got := activeOf([]hppv1.HostPathProvisioner{made("b", 2), made("c", 1), made("a", 3)}).Name; got != "c" {
		t.Errorf("%s counts, want c", got)
	}
	if got := activeOf([]hppv1.HostPathProvisioner{made("b", 2), made("a", 2)}).Name; got != "a" {
		t.Errorf("%s counts, want a", got)
	}
}

func TestFinished(t *testing.T) {
	job := &batchv1.Job{Status: batchv1.JobStatus{Conditions: []batchv1.JobCondition{{Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}}}
	if finished(job, batchv1.JobComplete) || !finished(job, batchv1.JobFailed) {
		t.Error("a Job that has failed counts as complete")
	}
}
