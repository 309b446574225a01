package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/apply"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// cleanUp brings what is left of mounters one step further: the pods of a mounter end, then a Job unmounts the pool, and
// only then the mounter is removed: as long as it exists there is something to unmount. It returns what it
// waits for.
func (r *Reconciler) cleanUp(ctx context.Context, a *apply.Applier, rendered *render.Renderer, left []appsv1.Deployment) (waiting []string, err error) {
	var problems []error
	for i := range left {
		text, err := r.cleanUpOne(ctx, a, rendered, render.LeftoverOf(&left[i]))
		if text != "" {
			waiting = append(waiting, text)
		}
		problems = append(problems, err)
	}
	slices.Sort(waiting)
	return waiting, errors.Join(problems...)
}

func (r *Reconciler) cleanUpOne(ctx context.Context, a *apply.Applier, rendered *render.Renderer, l render.Leftover) (waiting string, err error) {
	if l.Node == "" || l.Path == "" {
		return fmt.Sprintf("Deployment %s, which does not name the node and path of its pool: unmount the pool and delete the Deployment", l.Deployment.Name), nil
	}
	there, ready, err := r.answers(ctx, l.Node)
	switch {
	case err != nil:
		return "", err
	case !there, !ready && rendered.Deleting():
		// No pod can unmount there, and a deletion does not wait for a node that may never be ready.
		return "", r.forget(ctx, a, l)
	case !ready:
		return waits(l, "the node is not ready"), nil
	}
	if l.Deployment.Spec.Replicas == nil || *l.Deployment.Spec.Replicas > 0 {
		scale := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":0}}`))
		return waits(l, "its mounter is shutting down"), r.Client.Patch(ctx, l.Deployment, scale, client.FieldOwner(apply.FieldManager))
	}
	if running, err := r.mounterRuns(ctx, l); running || err != nil {
		return waits(l, "its mounter is shutting down"), err
	}
	wanted, err := wantedCleanUp(rendered, l)
	if err != nil {
		return "", err
	}
	job, err := get[batchv1.Job](ctx, r, wanted.GetName())
	switch {
	case err != nil:
		return "", err
	case job != nil && job.DeletionTimestamp == nil && finished(job, batchv1.JobComplete):
		return "", r.forget(ctx, a, l)
	case job != nil && finished(job, batchv1.JobFailed):
		why, err := r.lastWords(ctx, job)
		return waits(l, "failed to unmount it: "+why), err
	case job != nil:
		pods, err := r.podsOf(ctx, job)
		if err == nil && job.DeletionTimestamp == nil && !apply.UpToDate(job, wanted) && !slices.ContainsFunc(pods, running) {
			// What kept its pod from starting may be what has changed, such as the image. The template of a Job cannot be.
			err = r.removeCleanUp(ctx, a, l.Deployment.Name)
		}
		return waits(l, "it is being unmounted"+notStarted(pods)), err
	}
	return waits(l, "it is being unmounted"), a.Apply(ctx, wanted)
}

func wantedCleanUp(rendered *render.Renderer, l render.Leftover) (*unstructured.Unstructured, error) {
	job, err := rendered.CleanUpJob(l)
	if err != nil {
		return nil, err
	}
	wanted, err := render.Convert(job)
	if err != nil {
		return nil, err
	}
	return wanted, apply.Stamp(wanted)
}

func waits(l render.Leftover, what string) string {
	return fmt.Sprintf("pool %s at %s on %s: %s", l.Pool, l.Path, l.Node, what)
}

// forget removes a mounter and its clean-up.
func (r *Reconciler) forget(ctx context.Context, a *apply.Applier, l render.Leftover) error {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(l.Deployment)
	if err != nil {
		return err
	}
	deployment := &unstructured.Unstructured{Object: content}
	deployment.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("Deployment"))
	return errors.Join(r.removeCleanUp(ctx, a, l.Deployment.Name), a.Remove(ctx, deployment))
}

// removeCleanUp removes the Job of a mounter, if there is one.
func (r *Reconciler) removeCleanUp(ctx context.Context, a *apply.Applier, mounter string) error {
	job := &unstructured.Unstructured{}
	job.SetGroupVersionKind(batchv1.SchemeGroupVersion.WithKind("Job"))
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: r.Config.Namespace, Name: render.CleanUpName(mounter)}, job)
	if err == nil && job.GetDeletionTimestamp() == nil {
		err = a.Remove(ctx, job)
	}
	return client.IgnoreNotFound(err)
}

// mounterRuns says whether a pod of a mounter may still be at work: it would mount again what is unmounted. The pods of the upstream
// operator are not in the cache, and have the same labels on all nodes.
func (r *Reconciler) mounterRuns(ctx context.Context, l render.Leftover) (bool, error) {
	selector, err := metav1.LabelSelectorAsSelector(l.Deployment.Spec.Selector)
	if err != nil {
		return false, err
	}
	pods := &corev1.PodList{}
	if err := r.APIReader.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return false, err
	}
	return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool {
		return render.NodeOf(&p) == l.Node && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
	}), nil
}

func (r *Reconciler) podsOf(ctx context.Context, job *batchv1.Job) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	err := r.Client.List(ctx, pods, client.InNamespace(job.Namespace), client.MatchingLabels{batchv1.JobNameLabel: job.Name})
	return pods.Items, err
}

func running(pod corev1.Pod) bool { return pod.Status.Phase == corev1.PodRunning }

// notStarted says what keeps one of the pods from starting, and is empty if nothing does.
func notStarted(pods []corev1.Pod) string {
	for i := range pods {
		if pods[i].Status.Phase != corev1.PodPending {
			continue
		}
		if text, _ := status.PodProblem(&pods[i]); text != "" {
			return ": " + text
		}
	}
	return ""
}

// lastWords are the last line that a Job's pod which ended last has left.
func (r *Reconciler) lastWords(ctx context.Context, job *batchv1.Job) (string, error) {
	pods, err := r.podsOf(ctx, job)
	if err != nil {
		return "", err
	}
	last := &corev1.ContainerStateTerminated{Message: "see the Job " + job.Name}
	for _, pod := range pods {
		for _, c := range pod.Status.ContainerStatuses {
			if ended := c.State.Terminated; ended != nil && ended.Message != "" && last.FinishedAt.Before(&ended.FinishedAt) {
				last = ended
			}
		}
	}
	lines := strings.Split(strings.TrimSpace(last.Message), "\n")
	return lines[len(lines)-1], nil
}

func ofJob(pod *corev1.Pod) bool { _, found := pod.Labels[batchv1.JobNameLabel]; return found }

func finished(job *batchv1.Job, how batchv1.JobConditionType) bool {
	for _, c := range job.Status.Conditions {
		if c.Type == how && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

// mountersThere are all mounters of pools in the namespace.
func (r *Reconciler) mountersThere(ctx context.Context) ([]appsv1.Deployment, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("DeploymentList"))
	if err := r.Client.List(ctx, list, client.InNamespace(r.Config.Namespace), client.HasLabels{render.PoolLabel}); err != nil {
		return nil, err
	}
	var found []appsv1.Deployment
	for _, item := range list.Items {
		var d appsv1.Deployment
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(item.Object, &d); err != nil {
			return nil, err
		}
		if d.DeletionTimestamp == nil {
			found = append(found, d)
		}
	}
	return found, nil
}

// leftovers are the mounters that there are and that are not wanted, and now is what can be applied: a pool whose path is another one
// has to be unmounted before it has a mounter again, because nothing else would.
func (r *Reconciler) leftovers(ctx context.Context, wanted []*unstructured.Unstructured) (left []appsv1.Deployment, now []*unstructured.Unstructured, err error) {
	there, err := r.mountersThere(ctx)
	if err != nil {
		return nil, nil, err
	}
	at := map[string]*appsv1.Deployment{}
	for i := range there {
		at[there[i].Name] = &there[i]
	}
	keep := map[string]bool{}
	for _, object := range wanted {
		if object.GetKind() == "Deployment" {
			if mounter := at[object.GetName()]; mounter != nil && render.LeftoverOf(mounter).Moves(object) {
				continue
			}
			keep[object.GetName()] = true
		}
		now = append(now, object)
	}
	for i := range there {
		if !keep[there[i].Name] {
			left = append(left, there[i])
		}
	}
	return left, now, nil
}

// nodes are those that the driver is to run on: where the DaemonSet has pods, also ones that wait or end. While it has
// not as many as it should have, a node without a pod is one whose pod is being replaced, and keeps its pools. A pod that ends
// does not count: on a node that does not answer it stays, whether it should be there or not.
func (r *Reconciler) nodes(ctx context.Context, set *appsv1.DaemonSet, mounters []appsv1.Deployment) ([]string, error) {
	pods := &corev1.PodList{}
	if err := r.Client.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabels{render.AppLabel: render.App}); err != nil {
		return nil, err
	}
	found, stay := sets.New[string](), sets.New[string]()
	for i := range pods.Items {
		node := render.NodeOf(&pods.Items[i])
		if node == "" || !ofDriver(&pods.Items[i]) {
			continue
		}
		found.Insert(node)
		if pods.Items[i].DeletionTimestamp == nil {
			stay.Insert(node)
		}
	}
	settled := set != nil && set.Status.ObservedGeneration == set.Generation && set.Status.ObservedGeneration > 0 &&
		set.Status.CurrentNumberScheduled == set.Status.DesiredNumberScheduled && int(set.Status.DesiredNumberScheduled) == stay.Len()
	if !settled {
		for i := range mounters {
			found.Insert(render.LeftoverOf(&mounters[i]).Node)
		}
		found.Delete("")
	}
	return sets.List(found), nil
}

// applyClaim makes a claim that is not there. Of one that is, only the size follows the template, and only upwards: the
// rest cannot change.
func (r *Reconciler) applyClaim(ctx context.Context, a *apply.Applier, want *corev1.PersistentVolumeClaim) error {
	live := &corev1.PersistentVolumeClaim{}
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(want), live)
	if apierrors.IsNotFound(err) {
		converted, err := render.Convert(want)
		if err != nil {
			return err
		}
		return a.Create(ctx, converted)
	}
	if err != nil {
		return err
	}
	size, has := want.Spec.Resources.Requests.Storage(), live.Spec.Resources.Requests.Storage()
	if size.Cmp(*has) <= 0 {
		return nil
	}
	patch := fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":%q}}}}`, size.String())
	if err := r.Client.Patch(ctx, live, client.RawPatch(types.MergePatchType, []byte(patch)), client.FieldOwner(apply.FieldManager)); err != nil {
		return fmt.Errorf("grow the claim %s: %w", want.Name, err)
	}
	return nil
}

// dropCleanUps removes the Jobs of mounters that are wanted: by the next time they would be finished before they began.
func (r *Reconciler) dropCleanUps(ctx context.Context, a *apply.Applier, wanted []*unstructured.Unstructured) error {
	var problems []error
	for _, object := range wanted {
		if object.GetKind() != "Deployment" {
			continue
		}
		problems = append(problems, r.removeCleanUp(ctx, a, object.GetName()))
	}
	return errors.Join(problems...)
}
