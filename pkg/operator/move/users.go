package move

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

// Users are the pods that use the claim of a move.
type users struct {
	move    *v1alpha1.VolumeMove
	api     apiServer
	arrived map[client.ObjectKey]*arrivals
}

// Arrivals are the pods that were found on the source after the switch, and in how many looks there were new ones of a controller. An operator
// that is started again counts anew.
type arrivals struct {
	pods map[types.UID]bool
	of   map[string]int
}

// note takes in those that are there now.
func (a *arrivals) note(pods []corev1.Pod) {
	came := map[string]bool{}
	for i := range pods {
		if !a.pods[pods[i].UID] {
			a.pods[pods[i].UID], came[makerOf(&pods[i])] = true, true
		}
	}
	for maker := range came {
		a.of[maker]++
	}
}

// makerOf is what makes a pod again, by its name: an object that is made again itself has another uid.
func makerOf(pod *corev1.Pod) string {
	if of := metav1.GetControllerOf(pod); of != nil {
		return of.Kind + "/" + of.Name
	}
	return ""
}

// pods are those that have not ended. A claim that was made anew under the name is another, and so are its pods.
func (u users) pods(ctx context.Context) ([]corev1.Pod, error) {
	claim := &corev1.PersistentVolumeClaim{}
	there, err := u.api.find(ctx, client.ObjectKey{Namespace: u.move.Namespace, Name: u.move.Spec.ClaimName}, claim)
	if err != nil || there && claim.UID != u.move.Status.ClaimUID {
		return nil, err
	}
	var found []corev1.Pod
	err = u.api.eachPod(ctx, u.move.Namespace, func(pod *corev1.Pod) {
		if schedule.Uses(pod, u.move.Spec.ClaimName) {
			found = append(found, *pod)
		}
	})
	return found, err
}

// eachPod calls found for the pods of a namespace that have not ended.
func (a apiServer) eachPod(ctx context.Context, namespace string, found func(pod *corev1.Pod)) error {
	return eachPage(ctx, a, namespace, func(pods *corev1.PodList) {
		for i := range pods.Items {
			if phase := pods.Items[i].Status.Phase; phase != corev1.PodSucceeded && phase != corev1.PodFailed {
				found(&pods.Items[i])
			}
		}
	})
}

// release has the pods on the source give the volume up, or says which have to.
func (u users) release(ctx context.Context) (string, error) {
	pods, err := u.pods(ctx)
	if err != nil {
		return "", err
	}
	var waits []string
	for i := range pods {
		if pods[i].Spec.NodeName != u.move.Status.SourceNode || u.cameToFence(&pods[i]) {
			continue
		}
		said := "pod " + pods[i].Name
		if u.move.Spec.When == v1alpha1.WhenEvict {
			if said, err = u.evict(ctx, &pods[i]); err != nil {
				return "", err
			}
		}
		waits = append(waits, said)
	}
	if len(waits) == 0 {
		return "until kubelet has unpublished it", nil
	}
	return list(waits), nil
}

// fences is how long a mover may take for the fence when it has leave.
const fences = time.Minute

// cameToFence says that a pod was made when the source published the volume no more, so that it does not have it. One that is evicted would
// be made again at once, and again. While the mover is not heard, one that has it shows that there is no fence.
func (u users) cameToFence(pod *corev1.Pod) bool {
	fenced, may := u.move.Status.FencedTime, u.move.Status.MayFenceTime
	if fenced == nil && may != nil {
		return pod.CreationTimestamp.After(may.Add(fences))
	}
	return fenced != nil && pod.CreationTimestamp.After(fenced.Time) && pod.Status.Phase == corev1.PodPending &&
		!slices.ContainsFunc(slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses), func(c corev1.ContainerStatus) bool {
			return c.State.Waiting == nil || c.LastTerminationState.Terminated != nil
		})
}

// schedulers is how long a scheduler may take for the last volume that it knew, after the switch, and how far the clocks of API servers may be apart.
const schedulers = 10 * time.Minute

// fewReturns is how often a pod is found on the source, by accident, in the place of one that was evicted there.
const fewReturns = 3

// isBoundToSource says that a pod that takes the place of this one would be on the source, too: its template says so, or it is not the first
// that does, and was made when the scheduler knew that the volume is on the target. That alone says nothing: clocks may have been set since.
// The target is nil if its Node is gone.
func (u users) isBoundToSource(pod *corev1.Pod, target *corev1.Node, came *arrivals) bool {
	s := u.move.Status.Standstill
	return target != nil && !schedule.Selects(pod, target) ||
		came.of[makerOf(pod)] > fewReturns && s != nil && s.Seconds != nil && pod.CreationTimestamp.After(s.Since.Add(time.Duration(*s.Seconds)*time.Second+schedulers))
}

// evict evicts a pod, if anything makes it again, or if that was asked for.
func (u users) evict(ctx context.Context, pod *corev1.Pod) (string, error) {
	switch {
	case pod.DeletionTimestamp != nil:
		return fmt.Sprintf("pod %s, which is ending", pod.Name), nil
	case metav1.GetControllerOf(pod) == nil && !u.move.Spec.Force:
		return fmt.Sprintf("pod %s, which nothing makes again: delete it, or set force", pod.Name), nil
	}
	eviction := &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(pod.UID)}},
	}
	err := u.api.writer.SubResource("eviction").Create(ctx, pod, eviction)
	switch {
	case apierrors.IsTooManyRequests(err):
		return fmt.Sprintf("pod %s, which its disruption budget keeps", pod.Name), nil
	case err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err):
		return "", fmt.Errorf("evict pod %s: %w", pod.Name, err)
	}
	return fmt.Sprintf("pod %s, which is evicted", pod.Name), nil
}

// freeStuck evicts pods that were scheduled to the source while the volume could not be used there: they can start on the target
// only, and kubelet does not give them back. It returns which of them are left, and those that nothing would make again.
func (u users) freeStuck(ctx context.Context) (ending, stuck []string, err error) {
	pods, err := u.pods(ctx)
	if err != nil {
		return nil, nil, err
	}
	target := &corev1.Node{}
	if there, err := u.api.find(ctx, client.ObjectKey{Name: u.move.Status.TargetNode}, target); err != nil {
		return nil, nil, err
	} else if !there {
		target = nil
	}
	pods = slices.DeleteFunc(pods, func(pod corev1.Pod) bool { return pod.Spec.NodeName != u.move.Status.SourceNode })
	came := u.arrived[client.ObjectKeyFromObject(u.move)]
	if came == nil {
		came = &arrivals{pods: map[types.UID]bool{}, of: map[string]int{}}
		u.arrived[client.ObjectKeyFromObject(u.move)] = came
	}
	came.note(pods)
	for i := range pods {
		pod := &pods[i]
		if pod.DeletionTimestamp == nil && (u.isBoundToSource(pod, target, came) || metav1.GetControllerOf(pod) == nil && !u.move.Spec.Force) {
			stuck = append(stuck, "pod "+pod.Name)
			continue
		}
		said, err := u.evict(ctx, pod)
		if err != nil {
			return nil, nil, err
		}
		ending = append(ending, said)
	}
	return ending, stuck, nil
}
