package operator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/apply"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// jobNameLabel is on the pods of a Job also before Kubernetes 1.27, which has batchv1.JobNameLabel too.
const jobNameLabel = "job-name"

// A leftover is a pool on a node that is to be unmounted. Its mounter is nil if that was deleted before its clean-up was done.
type leftover struct {
	render.Leftover
	mounter *appsv1.Deployment
	// exclusive says that only one pod at a time may have the claim.
	exclusive bool
	// known says that it is at a place where the HostPathProvisioner has, or had, this pool, under the name that the mounter has there.
	known bool
}

// wants says whether the mounter is to have a pod.
func (l *leftover) wants() bool {
	return l.mounter != nil && l.mounter.DeletionTimestamp == nil && (l.mounter.Spec.Replicas == nil || *l.mounter.Spec.Replicas > 0)
}

// cleanUp brings what is left of mounters one step further: a Job that has the claim too starts, then the pods of the mounter end, then
// the Job unmounts the pool, and only then both are removed: as long as one exists there is something to unmount. So the claim has a pod
// at any time, and stays attached. Nothing of it is begun while a pod uses the pool. It returns what it waits for.
func (r *Reconciler) cleanUp(ctx context.Context, a *apply.Applier, rendered *render.Renderer, left []leftover) (waiting []string, err error) {
	users, err := r.users(ctx, left, func(*corev1.Pod) bool { return true })
	if err != nil {
		return nil, err
	}
	var problems []error
	for i := range left {
		text, err := r.cleanUpOne(ctx, a, rendered, &left[i], users[spotOf(&left[i])])
		if text != "" {
			waiting = append(waiting, text)
		}
		problems = append(problems, err)
	}
	slices.Sort(waiting)
	return waiting, errors.Join(problems...)
}

func (r *Reconciler) cleanUpOne(ctx context.Context, a *apply.Applier, rendered *render.Renderer, l *leftover, users []string) (waiting string, err error) {
	if l.Node == "" || l.Path == "" {
		return fmt.Sprintf("%s, which does not name the node and path of its pool: unmount the pool and delete the Deployment", l.Mounter), nil
	}
	if !l.known {
		return waits(l, fmt.Sprintf("the HostPathProvisioner has had no such pool there, and nothing is unmounted: if it is mounted, unmount it, and delete what is named %s and %s",
			l.Mounter, render.CleanUpName(l.Mounter))), nil
	}
	node, err := r.state(ctx, l.Node)
	switch {
	case err != nil:
		return "", err
	case !node.there, node.lost && len(users) == 0 && rendered.Deleting():
		// No pod can unmount there, and a deletion does not wait for a node that may never be ready.
		return "", r.forget(ctx, a, l)
	case len(users) > 0:
		return waits(l, "it is used by "+few(users)), r.keep(ctx, a, rendered, l)
	case !node.ready:
		return waits(l, "the node is not ready"), nil
	}
	return r.unmount(ctx, a, rendered, l)
}

// unmount brings the clean-up of a pool that no pod uses one step further.
func (r *Reconciler) unmount(ctx context.Context, a *apply.Applier, rendered *render.Renderer, l *leftover) (waiting string, err error) {
	job, pods, err := r.cleanUpThere(ctx, l.Mounter)
	if err != nil {
		return "", err
	}
	mounters, err := r.mounterPods(ctx, l)
	if err != nil {
		return "", err
	}
	mounts := l.wants() || len(mounters) > 0
	done := job != nil && job.DeletionTimestamp == nil && finished(job, batchv1.JobComplete)
	switch {
	case l.mounter == nil && len(mounters) > 0:
		// Without the Job it would not be known any more that there is something to unmount.
		return waits(l, "a pod of its mounter, which was deleted, is left: "+mounters[0].Name), nil
	case done && mounts:
		// Its pod was done before it was seen, as beside a mounter that fails at each start, or before the mounter was started again. No pod uses
		// the pool: the mounter may end, and what it may have mounted since is unmounted by the next clean-up.
		return waits(l, "its mounter is shutting down"), errors.Join(r.scale(ctx, l, 0), r.removeCleanUp(ctx, a, l.Mounter))
	case done:
		return "", r.forget(ctx, a, l)
	case mounts && (slices.ContainsFunc(pods, running) || !besides(l, mounters)):
		return waits(l, "its mounter is shutting down"), r.scale(ctx, l, 0)
	case job == nil:
		wanted, err := wantedCleanUp(rendered, l)
		if err != nil {
			return "", err
		}
		return waits(l, "it is being unmounted"), a.Apply(ctx, wanted)
	case finished(job, batchv1.JobComplete), finished(job, batchv1.JobFailed):
		// One of an earlier version gives up.
		return waits(l, "it is being unmounted"+troubles(pods)), r.removeCleanUp(ctx, a, l.Mounter)
	case job.DeletionTimestamp == nil && l.mounter != nil && !slices.ContainsFunc(pods, running):
		// What kept its pod from starting may be what has changed, such as the image. The template of a Job cannot be.
		err = r.removeOutdated(ctx, a, rendered, l, job)
	}
	return waits(l, "it is being unmounted"+troubles(pods)), err
}

func (r *Reconciler) removeOutdated(ctx context.Context, a *apply.Applier, rendered *render.Renderer, l *leftover, job *batchv1.Job) error {
	wanted, err := wantedCleanUp(rendered, l)
	if err != nil || apply.UpToDate(job, wanted) {
		return err
	}
	return r.removeCleanUp(ctx, a, l.Mounter)
}

// besides says whether a clean-up can begin beside the pods of a mounter: it waits for their lock, and has their claim.
func besides(l *leftover, mounters []corev1.Pod) bool {
	return l.Claim != "" && !l.exclusive && !slices.ContainsFunc(mounters, func(p corev1.Pod) bool { return !render.Keeps(&p) })
}

// keep has the mounter of a pool that is used run, and ends its clean-up once it does. A mounter that was deleted is not made anew: there
// the clean-up keeps the claim.
func (r *Reconciler) keep(ctx context.Context, a *apply.Applier, rendered *render.Renderer, l *leftover) error {
	job, _, err := r.cleanUpThere(ctx, l.Mounter)
	if err != nil {
		return err
	}
	if l.mounter == nil || l.mounter.DeletionTimestamp != nil {
		if job != nil {
			return nil
		}
		wanted, err := wantedCleanUp(rendered, l)
		if err != nil {
			return err
		}
		return a.Apply(ctx, wanted)
	}
	if err := r.scale(ctx, l, 1); err != nil || job == nil {
		return err
	}
	mounters, err := r.mounterPods(ctx, l)
	if err != nil || !slices.ContainsFunc(mounters, running) && !l.exclusive {
		return err
	}
	return r.removeCleanUp(ctx, a, l.Mounter)
}

// scale has a mounter run or end.
func (r *Reconciler) scale(ctx context.Context, l *leftover, replicas int) error {
	if l.mounter == nil || l.mounter.DeletionTimestamp != nil || l.wants() == (replicas > 0) {
		return nil
	}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	return r.Client.Patch(ctx, l.mounter, patch, client.FieldOwner(apply.FieldManager))
}

// cleanUpThere is the Job of a mounter, or nil, and its pods.
func (r *Reconciler) cleanUpThere(ctx context.Context, mounter string) (*batchv1.Job, []corev1.Pod, error) {
	job, err := get[batchv1.Job](ctx, r, render.CleanUpName(mounter))
	if err != nil || job == nil {
		return nil, nil, err
	}
	pods := &corev1.PodList{}
	err = r.Client.List(ctx, pods, client.InNamespace(job.Namespace), client.MatchingLabels{jobNameLabel: job.Name})
	return job, pods.Items, err
}

func wantedCleanUp(rendered *render.Renderer, l *leftover) (*unstructured.Unstructured, error) {
	job, err := rendered.CleanUpJob(l.Leftover)
	if err != nil {
		return nil, err
	}
	wanted, err := render.Convert(job)
	if err != nil {
		return nil, err
	}
	return wanted, apply.Stamp(wanted)
}

func waits(l *leftover, what string) string {
	return fmt.Sprintf("pool %s at %s on %s: %s", l.Pool, l.Path, l.Node, what)
}

// forget removes a mounter and its clean-up.
func (r *Reconciler) forget(ctx context.Context, a *apply.Applier, l *leftover) error {
	if l.mounter == nil || l.mounter.DeletionTimestamp != nil {
		return r.removeCleanUp(ctx, a, l.Mounter)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(l.mounter)
	if err != nil {
		return err
	}
	deployment := &unstructured.Unstructured{Object: content}
	deployment.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("Deployment"))
	return errors.Join(r.removeCleanUp(ctx, a, l.Mounter), a.Remove(ctx, deployment))
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

// mounterPods are the pods of a mounter that may still be at work: they would mount again what is unmounted. Those of the upstream
// operator are not in the cache, and have the same labels on all nodes. A Deployment that was deleted can leave its pods behind.
func (r *Reconciler) mounterPods(ctx context.Context, l *leftover) ([]corev1.Pod, error) {
	selector := labels.SelectorFromSet(labels.Set{render.UpstreamPoolLabel: render.PoolLabels(l.Pool)[render.UpstreamPoolLabel]})
	if l.mounter != nil {
		var err error
		if selector, err = metav1.LabelSelectorAsSelector(l.mounter.Spec.Selector); err != nil {
			return nil, err
		}
	}
	pods := &corev1.PodList{}
	if err := r.APIReader.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return render.NodeOf(&p) != l.Node || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed || ofJob(&p)
	}), nil
}

func running(pod corev1.Pod) bool { return pod.Status.Phase == corev1.PodRunning }

// notStarted says what keeps one of the pods from starting, and is empty if nothing does.
func notStarted(pods []corev1.Pod) string {
	for i := range pods {
		if pods[i].Status.Phase != corev1.PodPending {
			continue
		}
		if problem := status.ProblemOf(&pods[i]); problem != nil {
			return ": " + problem.String()
		}
	}
	return ""
}

// troubles says why a clean-up has not unmounted its pool yet: what keeps its pod from starting, or else the last line of its last try.
// It is empty if nothing is known to be wrong.
func troubles(pods []corev1.Pod) string {
	last := &corev1.ContainerStateTerminated{}
	for _, pod := range pods {
		for _, c := range pod.Status.ContainerStatuses {
			for _, ended := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
				if ended != nil && ended.ExitCode != 0 && ended.Message != "" && last.FinishedAt.Before(&ended.FinishedAt) {
					last = ended
				}
			}
		}
	}
	if last.Message == "" {
		return notStarted(pods)
	}
	lines := strings.Split(strings.TrimSpace(last.Message), "\n")
	return ": " + lines[len(lines)-1]
}

func ofJob(pod *corev1.Pod) bool { _, found := pod.Labels[jobNameLabel]; return found }

func finished(job *batchv1.Job, how batchv1.JobConditionType) bool {
	for _, c := range job.Status.Conditions {
		if c.Type == how && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

// mountersThere are all mounters of pools in the namespace, also those that are being deleted.
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
		found = append(found, d)
	}
	return found, nil
}

// mayBeMounted are the pools on nodes that have a mounter, or a clean-up that is not done, by the name of the mounter.
func (r *Reconciler) mayBeMounted(ctx context.Context) (map[string]*leftover, error) {
	there, err := r.mountersThere(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]*leftover{}
	for i := range there {
		found[there[i].Name] = &leftover{Leftover: render.LeftoverOf(&there[i]), mounter: &there[i]}
	}
	jobs := &unstructured.UnstructuredList{}
	jobs.SetGroupVersionKind(batchv1.SchemeGroupVersion.WithKind("JobList"))
	if err := r.Client.List(ctx, jobs, client.InNamespace(r.Config.Namespace), client.HasLabels{render.PoolLabel}); err != nil {
		return nil, err
	}
	for _, item := range jobs.Items {
		var job batchv1.Job
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(item.Object, &job); err != nil {
			return nil, err
		}
		if l := render.CleanUpOf(&job); l.Mounter != "" && found[l.Mounter] == nil {
			found[l.Mounter] = &leftover{Leftover: l}
		}
	}
	for _, l := range found {
		if err := r.findClaim(ctx, l); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// findClaim reads what matters of the claim of a pool. A pod with one that is not bound, or is being deleted, would not start.
func (r *Reconciler) findClaim(ctx context.Context, l *leftover) error {
	if l.Claim == "" {
		return nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: r.Config.Namespace, Name: l.Claim}, claim)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err != nil || claim.DeletionTimestamp != nil || claim.Status.Phase != corev1.ClaimBound {
		l.Claim = ""
	}
	l.exclusive = exclusive(claim)
	return nil
}

// exclusive says whether only one pod at a time may have a claim.
func exclusive(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// leftovers are the pools that may be mounted and are not wanted, and now is what can be applied: a pool whose path is another one has to
// be unmounted before it has a mounter again, because nothing else would.
func (r *Reconciler) leftovers(ctx context.Context, wanted []*unstructured.Unstructured) (left []leftover, now []*unstructured.Unstructured, err error) {
	at, err := r.mayBeMounted(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, object := range wanted {
		if object.GetKind() == "Deployment" {
			if mounted := at[object.GetName()]; mounted != nil && mounted.Moves(object) {
				continue
			}
			delete(at, object.GetName())
		}
		now = append(now, object)
	}
	for _, name := range slices.Sorted(maps.Keys(at)) {
		left = append(left, *at[name])
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
		set.Status.CurrentNumberScheduled == set.Status.DesiredNumberScheduled &&
		int(set.Status.DesiredNumberScheduled+set.Status.NumberMisscheduled) == stay.Len()
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
	if err := a.Disown(ctx, live); err != nil {
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
	// A takeover brings templates that have grown since their claims were made.
	converted, err := render.Convert(want)
	if err != nil {
		return err
	}
	a.Changed(converted, "ClaimGrown", nil)
	return nil
}

// dropCleanUps removes the Jobs of mounters that are wanted: by the next time they would be finished before they began. One that has the
// claim goes once the mounter has it.
func (r *Reconciler) dropCleanUps(ctx context.Context, a *apply.Applier, wanted []*unstructured.Unstructured) error {
	var problems []error
	for _, object := range wanted {
		if object.GetKind() != "Deployment" {
			continue
		}
		problems = append(problems, r.dropCleanUp(ctx, a, object.GetName()))
	}
	return errors.Join(problems...)
}

func (r *Reconciler) dropCleanUp(ctx context.Context, a *apply.Applier, name string) error {
	job, pods, err := r.cleanUpThere(ctx, name)
	if err != nil || job == nil {
		return err
	}
	mounter, err := get[appsv1.Deployment](ctx, r, name)
	if err != nil || mounter == nil {
		return err
	}
	l := &leftover{Leftover: render.LeftoverOf(mounter), mounter: mounter}
	if err := r.findClaim(ctx, l); err != nil {
		return err
	}
	mounters, err := r.mounterPods(ctx, l)
	if err != nil || slices.ContainsFunc(pods, running) && !l.exclusive && !slices.ContainsFunc(mounters, running) {
		return err
	}
	return r.removeCleanUp(ctx, a, name)
}
