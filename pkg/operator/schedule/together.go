package schedule

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Uses says whether a pod uses a claim of its namespace.
func Uses(pod *corev1.Pod, claim string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim || v.Ephemeral != nil && pod.Name+"-"+v.Name == claim
	})
}

// UsesClaims says whether a pod uses any.
func UsesClaims(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.PersistentVolumeClaim != nil || v.Ephemeral != nil })
}

// Together are the pods that use a claim of a namespace, or another claim of such a pod, and so on, and all of their claims: that one first.
func Together(pods []corev1.Pod, namespace, claim string) (users []corev1.Pod, claims []string) {
	claims = []string{claim}
	taken := make([]bool, len(pods))
	for next := 0; next < len(claims); next++ {
		for i := range pods {
			if taken[i] || pods[i].Namespace != namespace || !Uses(&pods[i], claims[next]) {
				continue
			}
			taken[i] = true
			users = append(users, pods[i])
			for _, volume := range pods[i].Spec.Volumes {
				// A claim that ends with its pod is made anew where the next pod runs.
				if volume.PersistentVolumeClaim != nil && !slices.Contains(claims, volume.PersistentVolumeClaim.ClaimName) {
					claims = append(claims, volume.PersistentVolumeClaim.ClaimName)
				}
			}
		}
	}
	return users, claims
}

// AddUnmade adds to pods those that use claims and that StatefulSets would make, with more replicas or others than now: one that is scaled to
// zero has none that show which claims belong together. They are those of the ordinals that there are claims of. Where a pod is there, it
// says itself on which nodes it may run.
func AddUnmade(pods []corev1.Pod, sets []appsv1.StatefulSet, claims []types.NamespacedName) []corev1.Pod {
	made := map[types.NamespacedName]bool{}
	for i := range pods {
		made[types.NamespacedName{Namespace: pods[i].Namespace, Name: pods[i].Name}] = true
	}
	ordinals := map[types.NamespacedName][]int32{} // by what a claim's name has before the ordinal
	for _, claim := range claims {
		if at := strings.LastIndexByte(claim.Name, '-'); at >= 0 {
			if n, err := strconv.ParseInt(claim.Name[at+1:], 10, 32); err == nil && strconv.FormatInt(n, 10) == claim.Name[at+1:] {
				base := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name[:at]}
				ordinals[base] = append(ordinals[base], int32(n))
			}
		}
	}
	for i := range sets {
		set := &sets[i]
		var all []int32
		if len(set.Spec.VolumeClaimTemplates) == 0 {
			all = []int32{0} // each pod uses the same
		}
		for _, template := range set.Spec.VolumeClaimTemplates {
			all = append(all, ordinals[types.NamespacedName{Namespace: set.Namespace, Name: template.Name + "-" + set.Name}]...)
		}
		slices.Sort(all)
		for _, n := range slices.Compact(all) {
			pod := podOf(set, n)
			if set.DeletionTimestamp == nil && UsesClaims(&pod) && !made[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] {
				pods = append(pods, pod)
			}
		}
	}
	return pods
}

// podOf is the pod of an ordinal, as far as it says on which nodes it may run. Beside which pods it may is not known before it is made.
func podOf(set *appsv1.StatefulSet, ordinal int32) corev1.Pod {
	from := &set.Spec.Template.Spec
	pod := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, Name: fmt.Sprintf("%s-%d", set.Name, ordinal),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: set.Name, UID: set.UID, Controller: ptr.To(true)}},
		},
		Spec: corev1.PodSpec{NodeSelector: from.NodeSelector, Tolerations: from.Tolerations},
	}
	if from.Affinity != nil {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: from.Affinity.NodeAffinity}
	}
	for _, volume := range from.Volumes {
		// A template takes the place of a volume of its name.
		if !slices.ContainsFunc(set.Spec.VolumeClaimTemplates, func(t corev1.PersistentVolumeClaim) bool { return t.Name == volume.Name }) {
			pod.Spec.Volumes = append(pod.Spec.Volumes, volume)
		}
	}
	for _, template := range set.Spec.VolumeClaimTemplates {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: template.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: fmt.Sprintf("%s-%s-%d", template.Name, set.Name, ordinal)},
		}})
	}
	return pod
}
