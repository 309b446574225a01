package operator

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

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

// A node is reported once it has been gone for long enough, and not any more when it is back.
func TestGoneNodes(t *testing.T) {
	volume := func(name, node string) corev1.PersistentVolume {
		return corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: topologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}}},
		}}
	}
	volumes := []corev1.PersistentVolume{volume("pv-2", "gone"), volume("pv-1", "gone"), volume("pv-3", "here"), {}}
	left := volumesOfGone(volumes, sets.New("here"))
	g := &goneNodes{}
	now := time.Now()
	if found := g.report(left, now); len(found) > 0 {
		t.Errorf("reported at once: %v", found)
	}
	want := []hppv1.DeletedNode{{Node: "gone", PersistentVolumes: 2, Command: cleanUp([]string{"pv-1", "pv-2"})}}
	if diff := cmp.Diff(want, g.report(left, now.Add(goneAfter))); diff != "" {
		t.Error(diff)
	}
	if found := g.report(nil, now.Add(goneAfter)); len(found) > 0 {
		t.Errorf("reported although it is back: %v", found)
	}
	if found := g.report(left, now.Add(goneAfter)); len(found) > 0 {
		t.Errorf("the time that it was gone before counts: %v", found)
	}
}
