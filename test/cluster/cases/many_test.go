package cases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// statefulSet makes a set of idle pods, all at once.
func (h *harness) statefulSet(name string, replicas int32, changes ...func(*appsv1.StatefulSet)) {
	h.Helper()
	labels := map[string]string{"set": name}
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas:            &replicas,
			PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector:            &metav1.LabelSelector{MatchLabels: labels},
			Template:            corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(idle)},
		},
	}
	set.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	for _, change := range changes {
		change(set)
	}
	if _, err := c.Client.AppsV1().StatefulSets(h.namespace).Create(h.Context(), set, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
}

func claimTemplate(class, size string) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{
			ObjectMeta: metav1.ObjectMeta{Name: "data"},
			Spec:       claimSpec(class, size),
		}}
	}
}

func allOn(node string) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Spec.Template.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
}

// allReady waits until all pods of a set are ready.
func (h *harness) allReady(name string) {
	h.Helper()
	h.until("all pods of "+name+" to be ready", func(ctx context.Context) (string, error) {
		set, err := c.Client.AppsV1().StatefulSets(h.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if set.Status.ReadyReplicas == *set.Spec.Replicas {
			return "", nil
		}
		return fmt.Sprintf("%d of %d", set.Status.ReadyReplicas, *set.Spec.Replicas), nil
	})
}

// removeSet deletes a set and waits until its pods are gone.
func (h *harness) removeSet(name string) {
	h.Helper()
	must.Succeed(h, c.Client.AppsV1().StatefulSets(h.namespace).Delete(h.Context(), name, metav1.DeleteOptions{}))
	h.until("the pods of "+name+" to be gone", func(ctx context.Context) (string, error) {
		pods, err := c.Client.CoreV1().Pods(h.namespace).List(ctx, metav1.ListOptions{LabelSelector: "set=" + name})
		if err != nil || len(pods.Items) == 0 {
			return "", err
		}
		return fmt.Sprintf("%d", len(pods.Items)), nil
	})
}

// took is how long it takes until all pods of a new set are ready.
func (h *harness) took(name string, replicas int32, changes ...func(*appsv1.StatefulSet)) time.Duration {
	h.Helper()
	start := time.Now()
	h.statefulSet(name, replicas, changes...)
	h.allReady(name)
	return time.Since(start)
}

// needTime leaves a case to make test-hard.
func needTime(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("this case takes minutes: CASES_FLAGS= has it")
	}
}

// A node carries as many volumes as it carries pods.
func TestHundredVolumesOnOneNode(t *testing.T) {
	needTime(t)
	h := begin(t)
	took := h.took("set", 100, claimTemplate("hostpath-csi", "16Mi"), allOn(nodeA))
	start := time.Now()
	h.removeSet("set")
	c.Log.Printf("100 pods with a volume each on one node: ready after %.1f s, removed after %.1f s", took.Seconds(), time.Since(start).Seconds())
}
