package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// claim makes a claim of the class hostpath-csi, or of what changes make of it.
func (h *harness) claim(name, size string, changes ...func(*corev1.PersistentVolumeClaim)) {
	h.Helper()
	if _, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Create(h.Context(), newClaim(name, size, changes...), metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
}

func newClaim(name, size string, changes ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       claimSpec("hostpath-csi", size),
	}
	for _, change := range changes {
		change(claim)
	}
	return claim
}

func claimSpec(class, size string) corev1.PersistentVolumeClaimSpec {
	return corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class,
		AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)},
		},
	}
}

func ofClass(class string) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) { claim.Spec.StorageClassName = &class }
}

// idle is what a container does that has nothing to do.
const idle = "trap exit TERM; sleep infinity & wait"

// pod makes a pod with a shell that does nothing, or what changes make of it.
func (h *harness) pod(name string, changes ...func(*corev1.Pod)) {
	h.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: podSpec(idle)}
	for _, change := range changes {
		change(pod)
	}
	if _, err := c.Client.CoreV1().Pods(h.namespace).Create(h.Context(), pod, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
}

func podSpec(script string) corev1.PodSpec {
	return corev1.PodSpec{
		Containers: []corev1.Container{{
			Name:    "shell",
			Image:   cluster.Shell,
			Command: []string{"sh", "-c", script},
		}},
		AutomountServiceAccountToken:  new(bool),
		EnableServiceLinks:            new(bool),
		DNSPolicy:                     corev1.DNSDefault,
		TerminationGracePeriodSeconds: pointer(int64(2)),
	}
}

func pointer[T any](v T) *T { return &v }

// with mounts a claim.
func with(claim, path string) func(*corev1.Pod) {
	return withVolume(corev1.VolumeMount{MountPath: path}, corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
	})
}

func withVolume(mount corev1.VolumeMount, source corev1.VolumeSource) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		mount.Name = fmt.Sprintf("volume-%d", len(pod.Spec.Volumes))
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: mount.Name, VolumeSource: source})
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts, mount)
	}
}

func on(node string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node} }
}

// preferring has the scheduler take a node if that can be.
func preferring(node string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
				Weight: 100,
				Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
				}},
			}},
		}}
	}
}

func doing(script string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.Containers[0].Command = []string{"sh", "-c", script} }
}

// ready waits until a pod is ready, and returns it.
func (h *harness) ready(name string) *corev1.Pod {
	h.Helper()
	var pod *corev1.Pod
	h.until("pod "+name+" to be ready", func(ctx context.Context) (_ string, err error) {
		pod, err = c.Client.CoreV1().Pods(h.namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "not made yet", nil
		}
		if err != nil {
			return "", err
		}
		if podReady(*pod) {
			return "", nil
		}
		return cluster.State(*pod), nil
	})
	return pod
}

func podReady(pod corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Status.Conditions, func(condition corev1.PodCondition) bool {
		return condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue
	})
}

// remove deletes pods and waits until they are gone.
func (h *harness) remove(pods ...string) {
	h.Helper()
	for _, name := range pods {
		must.Succeed(h, c.Client.CoreV1().Pods(h.namespace).Delete(h.Context(), name, metav1.DeleteOptions{}))
	}
	h.until("pods to be gone: "+strings.Join(pods, " "), func(ctx context.Context) (string, error) {
		for _, name := range pods {
			_, err := c.Client.CoreV1().Pods(h.namespace).Get(ctx, name, metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return name + " is still there", err
			}
		}
		return "", nil
	})
}

// removeClaim deletes a claim and waits until its volume is gone from the cluster
// and from the disk.
func (h *harness) removeClaim(name string) {
	h.Helper()
	volume := h.volume(name)
	path := h.disk(volume)
	must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(h.Context(), name, metav1.DeleteOptions{}))
	h.until("volume "+volume.Name+" to be gone", func(ctx context.Context) (string, error) {
		left, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return string(left.Status.Phase) + " " + left.Status.Message, err
	})
	h.wantGone(path)
}

// volume is what a claim is bound to.
func (h *harness) volume(claim string) *corev1.PersistentVolume {
	h.Helper()
	bound, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(h.Context(), claim, metav1.GetOptions{})
	must.Succeed(h, err)
	if bound.Status.Phase != corev1.ClaimBound {
		h.Fatalf("claim %s is %s", claim, bound.Status.Phase)
	}
	volume, err := c.Client.CoreV1().PersistentVolumes().Get(h.Context(), bound.Spec.VolumeName, metav1.GetOptions{})
	must.Succeed(h, err)
	return volume
}

// kubectl runs kubectl, also at the end of a test.
func (h *harness) kubectl(args ...string) string {
	h.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), long)
	defer cancel()
	out, err := c.Kubectl(ctx, args...)
	must.Succeed(h, err)
	return out
}

// apply applies what kubectl takes by these arguments, and deletes it at the end of the test.
func (h *harness) apply(args ...string) {
	h.Helper()
	h.Cleanup(func() { h.kubectl(append([]string{"delete", "--ignore-not-found"}, args...)...) })
	h.kubectl(append([]string{"apply"}, args...)...)
}

func (h *harness) applyText(objects string) {
	h.Helper()
	file := filepath.Join(h.TempDir(), "objects.yaml")
	// kubectl of Kubernetes 1.30 takes what begins with a brace for JSON.
	must.Succeed(h, os.WriteFile(file, []byte("---\n"+objects), 0o600))
	h.apply("-f", file)
}
