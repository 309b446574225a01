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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
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
	// at is the node as it was when it was looked for users. Blind says that nothing on it can say first whether the pool is used: its kubelet does
	// not answer, or the mounter has to end before the clean-up.
	at    nodeState
	blind bool
}

func (l *leftover) spot() render.Spot { return render.Spot{Pool: l.Pool, Node: l.Node} }

// was is what its mounter says, whether the claim can be used or not.
func (l *leftover) was() render.Leftover {
	if l.mounter == nil {
		return l.Leftover
	}
	return render.LeftoverOf(l.mounter)
}

func (l *leftover) stays() bool { return l.mounter != nil && l.mounter.DeletionTimestamp == nil }

func (l *leftover) wants() bool {
	return l.stays() && (l.mounter.Spec.Replicas == nil || *l.mounter.Spec.Replicas > 0)
}

func (l *leftover) waits(what string) string {
	return fmt.Sprintf("pool %s at %s on %s: %s", l.Pool, l.Path, l.Node, what)
}

// besides says whether a clean-up can begin beside the pods of the mounter: it waits for their lock, and has their claim.
func (l *leftover) besides(mounters []corev1.Pod) bool {
	return l.Claim != "" && !l.exclusive && !slices.ContainsFunc(mounters, func(p corev1.Pod) bool { return !render.Keeps(&p) })
}

// A cleaner unmounts pools by way of Jobs.
type cleaner struct {
	*cluster
	applier  *apply.Applier
	rendered *render.Renderer
}

// cleanUp brings what is left of mounters one step further: a Job that has the claim too looks on the node until it sees no volume of the pool
// published, and starts, then the pods of the mounter end, then the Job unmounts the pool, and only then both are removed: as long as one exists
// there is something to unmount. So the claim has a pod at any time, and stays attached. Nothing of it is begun while a pod is known to use the
// pool. It returns what it waits for.
func (c *cleaner) cleanUp(ctx context.Context, left []leftover) (waiting []string, err error) {
	users, err := c.users(ctx, left, func(*corev1.Pod) bool { return true })
	if err != nil {
		return nil, err
	}
	var problems []error
	for i := range left {
		text, err := c.cleanUpOne(ctx, &left[i], users[left[i].spot()])
		if text != "" {
			waiting = append(waiting, text)
		}
		problems = append(problems, err)
	}
	slices.Sort(waiting)
	return waiting, errors.Join(problems...)
}

// cleanUpOne decides whether a pool may be unmounted: not one that is not known to be ours, nor one that a pod uses.
func (c *cleaner) cleanUpOne(ctx context.Context, l *leftover, users sets.Set[string]) (waiting string, err error) {
	if l.Node == "" || l.Path == "" {
		return l.Mounter + ", which does not name the node and path of its pool: unmount the pool and delete the Deployment", nil
	}
	if !l.known {
		return l.waits(fmt.Sprintf("the HostPathProvisioner has had no such pool there, and nothing is unmounted: if it is mounted, unmount it, and delete what is named %s and %s",
			l.Mounter, render.CleanUpName(l.Mounter))), nil
	}
	switch {
	case len(users) == 0 && (!l.at.there || l.at.lost && c.rendered.Deleting()):
		// No pod can unmount there, and a deletion does not wait for a node that may never be ready. One whose object was deleted may register
		// again with its pods: Kubernetes removes them when it does not.
		return "", c.forget(ctx, l)
	case len(users) > 0:
		return l.waits("it is used by " + status.Some(sets.List(users))), c.keep(ctx, l)
	case !l.at.ready:
		return l.waits("the node is not ready"), nil
	}
	return c.unmount(ctx, l)
}

// unmount brings the clean-up of a pool that no pod uses one step further: Job, mounter, Job again, nothing.
func (c *cleaner) unmount(ctx context.Context, l *leftover) (waiting string, err error) {
	wanted, wantedErr := c.wanted(l)
	job, pods, jobErr := c.jobOf(ctx, l)
	mounters, mountersErr := c.mounterPods(ctx, l)
	if err := errors.Join(wantedErr, jobErr, mountersErr); err != nil {
		return "", err
	}
	mounts := l.wants() || len(mounters) > 0
	done := job != nil && job.DeletionTimestamp == nil && finished(job, batchv1.JobComplete)
	switch {
	case l.mounter == nil && len(mounters) > 0:
		// Without the Job it would not be known any more that there is something to unmount.
		return l.waits("a pod of its mounter, which was deleted, is left: " + mounters[0].Name), nil
	case done && slices.ContainsFunc(mounters, works):
		// The mounter was started again, and may have mounted the pool since. The next clean-up looks beside it whether that is used, waits for its
		// lock, and has the claim when it ends.
		return l.waits("it is being unmounted again"), c.removeJob(ctx, job)
	case done && mounts:
		// Its pod was done before it was seen, as beside a mounter that fails at each start, and has mounted nothing.
		return l.waits("its mounter is shutting down"), errors.Join(c.scale(ctx, l, 0), c.removeJob(ctx, job))
	case done:
		return c.unmounted(ctx, l, job)
	case mounts && (slices.ContainsFunc(pods, running) || !l.besides(mounters)):
		return l.waits("its mounter is shutting down"), c.scale(ctx, l, 0)
	case job == nil:
		return l.waits("it is being unmounted"), c.applier.Apply(ctx, wanted)
	case finished(job, batchv1.JobComplete), finished(job, batchv1.JobFailed):
		// One of an earlier version gives up.
		err = c.removeJob(ctx, job)
	case l.mounter != nil && !slices.ContainsFunc(pods, running) && !apply.UpToDate(job, wanted):
		// What kept its pod from starting may be what has changed, such as the image. The template of a Job cannot be.
		err = c.removeJob(ctx, job)
	}
	return l.waits("it is being unmounted" + troubles(pods)), err
}

// unmounted forgets a mounter whose clean-up is done. The API server is asked whether that is there: the cache may have one yet that was removed
// because the pool was mounted again after it, for as long as it takes to connect to an API server that was restarted.
func (c *cleaner) unmounted(ctx context.Context, l *leftover, job *batchv1.Job) (waiting string, err error) {
	jobs, err := listFrom[batchv1.Job](ctx, c.cluster, c.api, client.InNamespace(c.namespace))
	if err != nil {
		return "", err
	}
	if !slices.ContainsFunc(jobs, func(now batchv1.Job) bool { return now.Name == job.Name && now.UID == job.UID }) {
		return l.waits("it is being unmounted"), nil
	}
	return "", c.forget(ctx, l)
}

// keep has the mounter of a pool that is used run, and ends its clean-up once it does. A mounter that was deleted is not made anew: there
// the clean-up keeps the claim.
func (c *cleaner) keep(ctx context.Context, l *leftover) error {
	job, _, err := c.jobOf(ctx, l)
	if err != nil {
		return err
	}
	if !l.stays() {
		if job != nil {
			return nil
		}
		wanted, err := c.wanted(l)
		if err != nil {
			return err
		}
		return c.applier.Apply(ctx, wanted)
	}
	if err := c.scale(ctx, l, 1); err != nil || job == nil {
		return err
	}
	mounters, err := c.mounterPods(ctx, l)
	if err != nil || !slices.ContainsFunc(mounters, running) && !l.exclusive {
		return err
	}
	return c.removeJob(ctx, job)
}

func (c *cleaner) scale(ctx context.Context, l *leftover, replicas int) error {
	if !l.stays() || l.wants() == (replicas > 0) {
		return nil
	}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	return c.Patch(ctx, l.mounter, patch, client.FieldOwner(apply.FieldManager))
}

// forget removes a mounter and its clean-up.
func (c *cleaner) forget(ctx context.Context, l *leftover) error {
	job, _, err := c.jobOf(ctx, l)
	err = errors.Join(err, c.removeJob(ctx, job))
	if l.stays() {
		err = errors.Join(err, c.applier.Remove(ctx, l.mounter))
	}
	return err
}

// jobOf is the Job that unmounts a pool, or nil, and its pods.
func (c *cleaner) jobOf(ctx context.Context, l *leftover) (*batchv1.Job, []corev1.Pod, error) {
	job, err := get[batchv1.Job](ctx, c.cluster, render.CleanUpName(l.Mounter))
	if err != nil || job == nil {
		return nil, nil, err
	}
	pods := &corev1.PodList{}
	err = c.List(ctx, pods, client.InNamespace(c.namespace), client.MatchingLabels{jobNameLabel: job.Name})
	return job, pods.Items, err
}

func (c *cleaner) removeJob(ctx context.Context, job *batchv1.Job) error {
	if job == nil || job.DeletionTimestamp != nil {
		return nil
	}
	return c.applier.Remove(ctx, job)
}

// wanted is the Job as it is applied.
func (c *cleaner) wanted(l *leftover) (*unstructured.Unstructured, error) {
	job, err := c.rendered.CleanUpJob(l.Leftover)
	if err != nil {
		return nil, err
	}
	wanted, err := render.Convert(job)
	if err != nil {
		return nil, err
	}
	return wanted, apply.Stamp(wanted)
}

// mounterPods are the pods of a mounter that may still be at work: they would mount again what is unmounted. Those of the upstream
// operator are not in the cache, and have the same labels on all nodes. A Deployment that was deleted can leave its pods behind.
func (c *cluster) mounterPods(ctx context.Context, l *leftover) ([]corev1.Pod, error) {
	selector := labels.SelectorFromSet(labels.Set{render.UpstreamPoolLabel: render.PoolLabels(l.Pool)[render.UpstreamPoolLabel]})
	if l.mounter != nil {
		var err error
		if selector, err = metav1.LabelSelectorAsSelector(l.mounter.Spec.Selector); err != nil {
			return nil, err
		}
	}
	pods := &corev1.PodList{}
	err := c.api.List(ctx, pods, client.InNamespace(c.namespace), client.MatchingLabelsSelector{Selector: selector})
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return render.NodeOf(&p) != l.Node || ended(&p) || ofJob(&p) }), err
}

// dropCleanUps removes the Jobs of mounters that are wanted: by the next time they would be finished before they began. One that has the
// claim goes once the mounter has it.
func (c *cleaner) dropCleanUps(ctx context.Context, wanted []*unstructured.Unstructured) error {
	var problems []error
	for _, object := range wanted {
		if object.GetKind() == "Deployment" {
			problems = append(problems, c.dropCleanUp(ctx, object.GetName()))
		}
	}
	return errors.Join(problems...)
}

func (c *cleaner) dropCleanUp(ctx context.Context, name string) error {
	job, pods, err := c.jobOf(ctx, &leftover{Leftover: render.Leftover{Mounter: name}})
	if err != nil || job == nil {
		return err
	}
	mounter, err := get[appsv1.Deployment](ctx, c.cluster, name)
	if err != nil || mounter == nil {
		return err
	}
	l := &leftover{Leftover: render.LeftoverOf(mounter), mounter: mounter}
	if err := c.findClaim(ctx, l); err != nil {
		return err
	}
	mounters, err := c.mounterPods(ctx, l)
	if err != nil || slices.ContainsFunc(pods, running) && !l.exclusive && !slices.ContainsFunc(mounters, running) {
		return err
	}
	return c.removeJob(ctx, job)
}

func running(pod corev1.Pod) bool { return pod.Status.Phase == corev1.PodRunning }

// works says whether a container of a pod runs. The phase of one whose container ends again and again is Running too.
func works(pod corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.State.Running != nil })
}

// troubles says why a clean-up has not unmounted its pool yet: the last line of its last try, or else what keeps its pod from starting.
// It is empty if nothing is known to be wrong.
func troubles(pods []corev1.Pod) string {
	last, notStarted := &corev1.ContainerStateTerminated{}, ""
	for _, pod := range pods {
		for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			for _, ended := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
				if ended != nil && ended.ExitCode != 0 && ended.Message != "" && last.FinishedAt.Before(&ended.FinishedAt) {
					last = ended
				}
			}
		}
		if problem := status.ProblemOf(&pod); problem != nil && pod.Status.Phase == corev1.PodPending && notStarted == "" {
			notStarted = ": " + problem.String()
		}
	}
	if last.Message == "" {
		return notStarted
	}
	lines := strings.Split(strings.TrimSpace(last.Message), "\n")
	return ": " + lines[len(lines)-1]
}

func finished(job *batchv1.Job, how batchv1.JobConditionType) bool {
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool { return c.Type == how && c.Status == corev1.ConditionTrue })
}

// mayBeMounted are the pools on nodes that have a mounter, also one that is being deleted, or a clean-up that is not done, by the name of
// the mounter. Where a place of the object may be forgotten, or the object goes, the API server is asked: the cache may not have yet what was made
// just before.
func (c *cluster) mayBeMounted(ctx context.Context, object *hppv1.HostPathProvisioner) (map[string]*leftover, error) {
	from := client.Reader(c.Client)
	if object.DeletionTimestamp != nil || len(wantedPlaces(object)) < len(places(object)) {
		from = c.api
	}
	ofPools := []client.ListOption{client.InNamespace(c.namespace), client.HasLabels{render.PoolLabel}}
	mounters, err := listFrom[appsv1.Deployment](ctx, c, from, ofPools...)
	if err != nil {
		return nil, err
	}
	jobs, err := listFrom[batchv1.Job](ctx, c, from, ofPools...)
	if err != nil {
		return nil, err
	}
	found := map[string]*leftover{}
	for i := range mounters {
		found[mounters[i].Name] = &leftover{Leftover: render.LeftoverOf(&mounters[i]), mounter: &mounters[i]}
	}
	for i := range jobs {
		if l := render.CleanUpOf(&jobs[i]); l.Mounter != "" && found[l.Mounter] == nil {
			found[l.Mounter] = &leftover{Leftover: l}
		}
	}
	for _, l := range found {
		if err := c.findClaim(ctx, l); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// findClaim reads what matters of the claim of a pool. A pod with one that is not bound, or is being deleted, would not start.
func (c *cluster) findClaim(ctx context.Context, l *leftover) error {
	if l.Claim == "" {
		return nil
	}
	claim, key := &corev1.PersistentVolumeClaim{}, client.ObjectKey{Namespace: c.namespace, Name: l.Claim}
	err := c.Get(ctx, key, claim)
	if apierrors.IsNotFound(err) { // the cache has those with the label of a pool, which a user may have taken off
		err = c.api.Get(ctx, key, claim)
	}
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err != nil || claim.DeletionTimestamp != nil || claim.Status.Phase != corev1.ClaimBound {
		l.Claim = ""
	}
	l.exclusive = exclusive(claim)
	return nil
}

func exclusive(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// leftovers are the pools that may be mounted and are not wanted, and now is what can be applied: a pool whose path or claim is another one
// has to be unmounted before it has a mounter again, because nothing else would.
func leftovers(mounted map[string]*leftover, wanted []*unstructured.Unstructured) (left []leftover, now []*unstructured.Unstructured) {
	unwanted := maps.Clone(mounted)
	for _, object := range wanted {
		if object.GetKind() == "Deployment" {
			if l := mounted[object.GetName()]; l != nil && l.was().Moves(object) {
				continue
			}
			delete(unwanted, object.GetName())
		}
		now = append(now, object)
	}
	for _, name := range slices.Sorted(maps.Keys(unwanted)) {
		left = append(left, *unwanted[name])
	}
	return left, now
}
