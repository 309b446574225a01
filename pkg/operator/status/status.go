// Package status computes the status of a HostPathProvisioner from what is observed of it.
package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/version"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// Reasons of conditions.
const (
	reasonComplete    = "Complete"
	reasonDeploying   = "DeployStarted"
	reasonUpgrading   = "UpgradeStarted"
	reasonRollingOut  = "RollingOut"
	reasonNotReady    = "NodesNotReady"
	reasonNoNodes     = "NoNodes"
	reasonFailed      = "ReconcileFailed"
	ReasonDowngrade   = "DowngradeRefused"
	ReasonPools       = "InvalidPools"
	ReasonSecond      = "AnotherObjectExists"
	reasonDeleting    = "Deleting"
	reasonPoolProblem = "StoragePoolNotReady"
	reasonAsExpected  = "AsExpected"
	reasonUnmounting  = "Unmounting"
	ReasonHealthy     = "ProvisionerHealthy"
)

// Observed is what there is in the cluster of what an object asks for.
type Observed struct {
	// DaemonSets are those that should be there, with nil for one that is not.
	DaemonSets map[string]*appsv1.DaemonSet
	// Outdated are the names of those DaemonSets that are not what was applied, or could not be.
	Outdated sets.Set[string]
	// Pods are those of the DaemonSets.
	Pods []corev1.Pod
	// Mounters are the Deployments that are to keep pools with a template mounted, and Replaced the names of those that are not what was applied.
	Mounters []appsv1.Deployment
	Replaced sets.Set[string]
	// Deployed are the pools that the driver has, while it is not to have others.
	Deployed []hppv1.StoragePool
	// Services are where the driver serves pools, by the name of the pool.
	Services map[string]Service
	// NotChosen are nodes that are not to have the driver: those on which a pool is lacking.
	NotChosen sets.Set[string]
	// Leaving are pools that are still to be unmounted, in words.
	Leaving []string
	// MountedPools are the places at which pools are or were mounted.
	MountedPools []hppv1.MountedPool
	// Claims are those that pools with a template need, and LeftClaims those of nodes and pools that are not wanted any more.
	Claims, LeftClaims []corev1.PersistentVolumeClaim
	// DeletedNodes are nodes that are gone but for volumes that name them.
	DeletedNodes []hppv1.DeletedNode
	// Problems are errors of this reconciliation.
	Problems []error
	// Notices are things that a user should know, although they keep nothing from working.
	Notices []string
}

// A Service is what the driver publishes of a pool.
type Service struct {
	// Asked says that there is a StorageClass for which the driver publishes on each node whether it serves the pool.
	Asked bool
	// Serving and NotServing are the names of nodes.
	Serving, NotServing sets.Set[string]
}

// Nodes have a pod of the driver or a mounter. Those that are not to have the driver can be among them, but none of these on which a pool is lacking.
func (o *Observed) Nodes() sets.Set[string] {
	nodes := sets.New[string]()
	for i := range o.Pods {
		if render.PoolOf(o.Pods[i].Labels) == "" {
			nodes.Insert(render.NodeOf(&o.Pods[i]))
		}
	}
	for i := range o.Mounters {
		nodes.Insert(render.LeftoverOf(&o.Mounters[i]).Node)
	}
	for _, service := range o.Services {
		nodes = nodes.Union(service.Serving).Union(service.NotServing)
	}
	return nodes.Delete("").Difference(o.NotChosen)
}

// Lacking are those of the nodes on which a pool is not mounted, or not served.
func (o *Observed) Lacking(object *hppv1.HostPathProvisioner) sets.Set[string] {
	nodes, lacking := o.Nodes(), sets.New[string]()
	for _, pool := range render.Pools(object) {
		if pool.PVCTemplate != nil {
			lacking = lacking.Union(nodes.Difference(o.mounted(pool.Name).byThis))
		}
		if service := o.Services[pool.Name]; service.Asked {
			lacking = lacking.Union(nodes.Difference(service.Serving))
		}
	}
	return lacking
}

// A spread is over the nodes that are to have the driver. Its DaemonSet says how many these are.
type spread struct {
	nodes   sets.Set[string]
	desired int
}

// has counts those that are in a set, by what is not: a node that is not to have the driver makes up for none that is.
func (s spread) has(in sets.Set[string]) int {
	return min(s.desired, s.nodes.Len()) - min(s.desired, s.nodes.Difference(in).Len())
}

// sortOut tells errors that waiting does not solve from those of requests that the API server takes when they are repeated.
func sortOut(problems []error) (lasting, passing []error) {
	for _, err := range problems {
		if passes(err) {
			passing = append(passing, err)
		} else {
			lasting = append(lasting, err)
		}
	}
	return lasting, passing
}

// passes reports whether all that an error is made of solves itself.
func passes(err error) bool {
	var several interface{ Unwrap() []error }
	if errors.As(err, &several) {
		return !slices.ContainsFunc(several.Unwrap(), func(err error) bool { return !passes(err) })
	}
	return apierrors.IsConflict(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsTooManyRequests(err) ||
		apierrors.IsServiceUnavailable(err) || errors.Is(err, context.DeadlineExceeded)
}

func texts(problems []error) []string {
	var all []string
	for _, problem := range problems {
		all = append(all, problem.Error())
	}
	return all
}

// Assess computes the status of an object from what is observed.
func Assess(object *hppv1.HostPathProvisioner, operatorVersion string, seen Observed) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	status.TargetVersion = operatorVersion
	status.NodeStatuses = first(nodeProblems(seen.Pods), mostNodes)
	pools := poolStates(render.Pools(object), seen)
	for _, pool := range pools {
		status.StoragePoolStatuses = append(status.StoragePoolStatuses, pool.StoragePoolStatus)
	}
	status.DeletedNodes, status.MountedPools = first(seen.DeletedNodes, mostDeleted), seen.MountedPools

	r := newRollout(&status, operatorVersion, seen, pools)
	if r.complete {
		status.ObservedVersion = operatorVersion
	}
	c := conditions{status: &status, generation: object.Generation}
	c.available(r, seen)
	c.progressing(r, seen)
	c.degraded(r, seen)
	c.rolledOut(r)
	return status
}

// A rollout is how far what was asked for is deployed.
type rollout struct {
	// first and upgrade say that no version of this operator, or another one, was rolled out before.
	first, upgrade bool
	// served says that the driver was available before.
	served  bool
	version string
	// noNodes says that no node is to have the driver.
	noNodes bool
	// missing is what is not as it should be, in words.
	missing []string
	// unmounted are pools on claims that this version does not keep mounted everywhere, and away those of them that no version does. Nowhere are pools
	// that no node serves. All are in words.
	unmounted, away, nowhere []string
	// lasting are the errors that waiting does not solve.
	lasting []error
	// complete says that all nodes have what was asked for. Once it was so, a node that fails does not change that: only
	// something that is to be deployed does.
	complete bool
}

func newRollout(status *hppv1.HostPathProvisionerStatus, operatorVersion string, seen Observed, pools []poolState) rollout {
	r := rollout{
		first:   status.ObservedVersion == "",
		upgrade: status.ObservedVersion != "" && status.ObservedVersion != operatorVersion,
		version: operatorVersion,
		noNodes: selectsNoNode(seen),
	}
	r.served = !r.first || meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionAvailable)
	r.unmounted = textsOf(pools, poolUnmounted)
	r.away = textsOf(slices.DeleteFunc(slices.Clone(pools), func(p poolState) bool { return p.stays }), poolUnmounted)
	r.nowhere = textsOf(pools, poolNowhere)
	changing := notDeployed(seen)
	for i := range pools {
		if p := &pools[i]; p.deployed < p.DesiredReady {
			changing = append(changing, fmt.Sprintf("pool %s: what mounts it is deployed on %d of %d nodes", p.Name, p.deployed, p.DesiredReady))
		}
	}
	var passing []error
	r.lasting, passing = sortOut(seen.Problems)
	r.missing = slices.Concat(changing, notReady(seen, func(*appsv1.DaemonSet) int32 { return 0 }), r.unmounted, textsOf(pools, poolUnknown), texts(passing))
	before := !r.first && !r.upgrade && meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionRolledOut)
	r.complete = len(seen.Problems) == 0 && !r.noNodes && (len(r.missing) == 0 || before && len(changing) == 0)
	return r
}

const (
	// mostMessage is how many bytes the message of a condition, or of a pool, has. It could have 32768, but is for people.
	mostMessage = 2048
	// Of what a large cluster has thousands the status has the first: the API server takes no object of more than 1.5 MiB, and would never take
	// a status again. The claims are those of all pools.
	mostNodes, mostClaims, mostDeleted = 100, 500, 50
)

// first are the first of many.
func first[T any](all []T, most int) []T { return all[:min(most, len(all))] }

type conditions struct {
	status     *hppv1.HostPathProvisionerStatus
	generation int64
}

// set sets a condition. Its time changes only if its value does.
func (c conditions) set(kind string, value bool, reason, message string) {
	condition := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: Shorten(message, mostMessage), ObservedGeneration: c.generation,
	}
	if value {
		condition.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&c.status.Conditions, condition)
}

// available goes by pods that are ready, whatever their version. While something is rolled out, those of the driver which that replaces may be missing. Pools
// stay mounted meanwhile.
func (c conditions) available(r rollout, seen Observed) {
	allowed := func(*appsv1.DaemonSet) int32 { return 0 }
	replacing := r.served && !r.complete && !slices.ContainsFunc(seen.Pods, failsOfDriver)
	if replacing {
		allowed = maxUnavailable
	}
	lacking := notReady(seen, allowed)
	if len(r.lasting) > 0 {
		lacking = append(lacking, outdated(seen)...)
	}
	lacking = slices.Concat(lacking, r.nowhere, r.away)
	switch {
	case r.noNodes:
		c.set(hppv1.ConditionAvailable, false, reasonNoNodes, noNodes)
	case len(lacking) > 0:
		c.set(hppv1.ConditionAvailable, false, reasonNotReady, joined(strings.Join(lacking, "; "), byCause(seen.Pods, func(Problem) bool { return true })))
	default:
		notices := slices.Clone(seen.Notices)
		for _, node := range seen.DeletedNodes {
			notices = append(notices, fmt.Sprintf("The node %s was deleted, and has left %s: see Deleted nodes in operator.md",
				node.Node, place.Count(node.PersistentVolumes)))
		}
		c.set(hppv1.ConditionAvailable, true, reasonComplete, joined("Application Available", notices))
	}
}

func (c conditions) progressing(r rollout, seen Observed) {
	missing := strings.Join(slices.Concat(r.missing, seen.Leaving), "; ")
	switch {
	case r.noNodes && len(seen.Leaving) == 0:
		c.set(hppv1.ConditionProgressing, false, reasonNoNodes, noNodes)
	case r.complete && len(seen.Leaving) > 0:
		c.set(hppv1.ConditionProgressing, true, reasonUnmounting, "Waiting for "+missing)
	case r.complete:
		c.set(hppv1.ConditionProgressing, false, reasonComplete, "Everything is rolled out")
	case r.first:
		c.set(hppv1.ConditionProgressing, true, reasonDeploying, missing)
	case r.upgrade:
		c.set(hppv1.ConditionProgressing, true, reasonUpgrading, "Upgrade to "+r.version+": "+missing)
	default:
		c.set(hppv1.ConditionProgressing, true, reasonRollingOut, missing)
	}
}

// degraded is true for what waiting does not solve: errors, containers that fail, and pools that were mounted or serve nowhere.
func (c conditions) degraded(r rollout, seen Observed) {
	failing := byCause(seen.Pods, func(p Problem) bool { return p.Failed })
	pools := r.nowhere
	if r.complete {
		pools = slices.Concat(pools, r.unmounted)
	}
	switch {
	case len(r.lasting) > 0:
		c.set(hppv1.ConditionDegraded, true, reasonFailed, strings.Join(texts(r.lasting), "; "))
	case len(failing) > 0:
		c.set(hppv1.ConditionDegraded, true, reasonNotReady, strings.Join(failing, "; "))
	case r.noNodes:
		c.set(hppv1.ConditionDegraded, true, reasonNoNodes, noNodes)
	case len(pools) > 0:
		c.set(hppv1.ConditionDegraded, true, reasonPoolProblem, strings.Join(pools, "; "))
	default:
		c.set(hppv1.ConditionDegraded, false, reasonAsExpected, "")
	}
}

func (c conditions) rolledOut(r rollout) {
	switch {
	case r.complete:
		c.set(hppv1.ConditionRolledOut, true, reasonComplete, "Version "+r.version+" runs on all nodes")
	case r.noNodes:
		c.set(hppv1.ConditionRolledOut, false, reasonNoNodes, noNodes)
	default:
		c.set(hppv1.ConditionRolledOut, false, reasonRollingOut, cmp.Or(strings.Join(r.missing, "; "), "Something could not be applied"))
	}
}

// Refuse is the status of an object that is not reconciled. It is available while what was rolled out for it before serves, in whatever version; nil if
// nothing was.
func Refuse(object *hppv1.HostPathProvisioner, operatorVersion, reason, message string, before *Observed) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	c := conditions{status: &status, generation: object.Generation}
	serves, available := false, message
	if before != nil {
		lacking := lackingNow(object, operatorVersion, *before)
		serves = len(lacking) == 0
		available = cmp.Or(strings.Join(lacking, "; "), "What was rolled out before goes on, and nothing is changed") + ": " + message
	}
	c.set(hppv1.ConditionAvailable, serves, reason, available)
	c.set(hppv1.ConditionProgressing, false, reason, message)
	c.set(hppv1.ConditionDegraded, true, reason, message)
	c.set(hppv1.ConditionRolledOut, false, reason, message)
	return status
}

// lackingNow is what keeps an object from being available while nothing is rolled out: of the pools that the driver has, whatever the object asks for.
func lackingNow(object *hppv1.HostPathProvisioner, operatorVersion string, seen Observed) []string {
	now := begin(object, operatorVersion)
	r := newRollout(&now, operatorVersion, seen, poolStates(seen.deployed(object), seen))
	if r.noNodes {
		return []string{noNodes}
	}
	return slices.Concat(notReady(seen, func(*appsv1.DaemonSet) int32 { return 0 }), texts(seen.Problems), r.nowhere, r.away)
}

// deployed are the pools that the driver has, with a template where they were mounted for the object, or are to be.
func (o *Observed) deployed(object *hppv1.HostPathProvisioner) []hppv1.StoragePool {
	onClaims := sets.New[string]()
	for i := range o.Mounters {
		onClaims.Insert(render.PoolOf(o.Mounters[i].Labels))
	}
	for _, at := range object.Status.MountedPools {
		onClaims.Insert(at.Name)
	}
	pools := slices.Clone(o.Deployed)
	for i := range pools {
		p := &pools[i]
		wanted := slices.ContainsFunc(render.Pools(object), func(w hppv1.StoragePool) bool {
			return w.PVCTemplate != nil && w.Name == p.Name && render.DataDirectory(w) == render.DataDirectory(*p)
		})
		if (wanted || onClaims.Has(p.Name)) && p.RequireMount != nil && *p.RequireMount {
			p.PVCTemplate = &hppv1.ClaimTemplate{}
		}
	}
	return pools
}

// Remember is the status of an object as it is, with the places at which pools are about to be mounted. The upstream operator leaves out
// reasons, and with such a condition the API server takes no status.
func Remember(object *hppv1.HostPathProvisioner, mounted []hppv1.MountedPool) hppv1.HostPathProvisionerStatus {
	status := *object.Status.DeepCopy()
	status.MountedPools = mounted
	for i := range status.Conditions {
		status.Conditions[i].Reason = cmp.Or(status.Conditions[i].Reason, reasonDeploying)
	}
	return status
}

// Deleting is the status of an object that waits for pods to end. Users and legacy are how many PersistentVolumes there are of
// the driver and of the pre-CSI provisioner.
func Deleting(object *hppv1.HostPathProvisioner, operatorVersion string, waiting []string, users, legacy int) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	message := "Waiting for " + strings.Join(waiting, ", ")
	if users > 0 {
		message += fmt.Sprintf("; %s of the driver and all data stay, and pods can use them again once there is a HostPathProvisioner", place.Count(users))
	}
	if legacy > 0 {
		message += fmt.Sprintf("; %s of the pre-CSI provisioner and all data stay until there is a HostPathProvisioner with the same pathConfig, and pods can go on using them", place.Count(legacy))
	}
	c := conditions{status: &status, generation: object.Generation}
	c.set(hppv1.ConditionAvailable, false, reasonDeleting, message)
	c.set(hppv1.ConditionProgressing, true, reasonDeleting, message)
	c.set(hppv1.ConditionDegraded, false, reasonDeleting, "")
	c.set(hppv1.ConditionRolledOut, false, reasonDeleting, message)
	return status
}

// begin is what each new status begins with: what was observed before, but for lists of what is seen now. All are made of it, because the first
// that is written gives the object an observed generation.
func begin(object *hppv1.HostPathProvisioner, operatorVersion string) hppv1.HostPathProvisionerStatus {
	status := *object.Status.DeepCopy()
	status.ObservedVersion = rolledOutVersion(object.Status)
	status.ObservedGeneration, status.OperatorVersion = object.Generation, operatorVersion
	status.NodeStatuses, status.StoragePoolStatuses, status.DeletedNodes = nil, nil, nil
	return status
}

// rolledOutVersion is the version of this operator that was last rolled out. That of the upstream operator, whose status has no
// observed generation, is none of them.
func rolledOutVersion(status hppv1.HostPathProvisionerStatus) string {
	if status.ObservedGeneration == 0 {
		return ""
	}
	return status.ObservedVersion
}

// Downgrades says whether a version is older than that which was last rolled out. Versions that are none cannot be compared.
func Downgrades(status hppv1.HostPathProvisionerStatus, to string) bool {
	before, err := version.ParseSemantic(rolledOutVersion(status))
	if err != nil {
		return false
	}
	after, err := version.ParseSemantic(to)
	return err == nil && after.LessThan(before)
}

func notDeployed(seen Observed) []string {
	var waiting []string
	for _, name := range slices.Sorted(maps.Keys(seen.DaemonSets)) {
		set := seen.DaemonSets[name]
		switch {
		case set == nil:
			waiting = append(waiting, name+" does not exist yet")
		case seen.Outdated.Has(name):
		case set.Status.ObservedGeneration != set.Generation:
			waiting = append(waiting, name+": its controller has not observed its last change yet")
		case set.Status.UpdatedNumberScheduled < set.Status.DesiredNumberScheduled:
			waiting = append(waiting, fmt.Sprintf("%s: %d of %d nodes are updated", name, set.Status.UpdatedNumberScheduled, set.Status.DesiredNumberScheduled))
		}
	}
	return append(waiting, outdated(seen)...)
}

func outdated(seen Observed) []string {
	var texts []string
	for _, name := range sets.List(seen.Outdated) {
		texts = append(texts, name+" is not what it should be yet")
	}
	return texts
}

// notReady says of which DaemonSets more pods are missing than is allowed. One pod is needed in any case.
func notReady(seen Observed, allowed func(*appsv1.DaemonSet) int32) []string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(seen.DaemonSets)) {
		set := seen.DaemonSets[name]
		if set == nil {
			texts = append(texts, name+" does not exist yet")
			continue
		}
		if ready, desired := set.Status.NumberReady, set.Status.DesiredNumberScheduled; ready < desired && (ready == 0 || ready < desired-allowed(set)) {
			texts = append(texts, fmt.Sprintf("%s: %d of %d nodes are ready", name, ready, desired))
		}
	}
	return texts
}

// maxUnavailable is how many pods of a DaemonSet its controller takes away at once to replace them.
func maxUnavailable(set *appsv1.DaemonSet) int32 {
	rolling := set.Spec.UpdateStrategy.RollingUpdate
	if rolling == nil || rolling.MaxUnavailable == nil {
		return 1
	}
	most, err := intstr.GetScaledValueFromIntOrPercent(rolling.MaxUnavailable, int(set.Status.DesiredNumberScheduled), true)
	if err != nil {
		return 0
	}
	return int32(most) //nolint:gosec // no more than there are nodes
}

const noNodes = "no node is to have the driver: change workload, or the labels and taints of nodes"

// selectsNoNode says that no node is to have the driver, as far as the controllers of its DaemonSets know.
func selectsNoNode(seen Observed) bool {
	set := seen.DaemonSets[render.DriverDaemonSet]
	return set != nil && !seen.Outdated.Has(render.DriverDaemonSet) && set.Status.ObservedGeneration == set.Generation && set.Status.DesiredNumberScheduled == 0
}

// failsOfDriver says of a pod of the DaemonSets whether waiting does not make it ready.
func failsOfDriver(pod corev1.Pod) bool {
	problem := ProblemOf(&pod)
	return problem != nil && problem.Failed && render.PoolOf(pod.Labels) == ""
}

// nodeProblems are the nodes whose pods are not ready, by name.
func nodeProblems(pods []corev1.Pod) []hppv1.NodeStatus {
	var found []hppv1.NodeStatus
	for i := range pods {
		if problem := ProblemOf(&pods[i]); problem != nil {
			found = append(found, hppv1.NodeStatus{Node: render.NodeOf(&pods[i]), Pool: render.PoolOf(pods[i].Labels), Message: Shorten(problem.String(), mostMessage)})
		}
	}
	slices.SortFunc(found, func(a, b hppv1.NodeStatus) int {
		return strings.Compare(a.Node+"/"+a.Pool+"/"+a.Message, b.Node+"/"+b.Pool+"/"+b.Message)
	})
	return found
}

// byCause names the nodes of pods that are not ready. What keeps several from it, as an image that does not exist, is said once.
func byCause(pods []corev1.Pod, wanted func(Problem) bool) []string {
	nodes, said := make(map[string][]string), make(map[string]*Problem)
	for i := range pods {
		problem := ProblemOf(&pods[i])
		if problem == nil || !wanted(*problem) {
			continue
		}
		key := cmp.Or(problem.image, problem.Cause)
		nodes[key] = append(nodes[key], render.NodeOf(&pods[i]))
		// What kubelet says of an image changes while it waits. The longest has the reason.
		if before := said[key]; before == nil || cmp.Or(cmp.Compare(len(problem.Cause), len(before.Cause)), strings.Compare(problem.Cause, before.Cause)) > 0 {
			said[key] = problem
		}
	}
	var texts []string
	for key, on := range nodes {
		slices.Sort(on)
		cause := said[key].Cause
		if on = slices.Compact(on); len(on) == 1 {
			cause = said[key].String()
		}
		texts = append(texts, Some(on)+": "+cause)
	}
	slices.Sort(texts)
	return texts
}

// A Problem is what keeps a pod from being ready.
type Problem struct {
	Pod, Cause string
	// Failed: it is a failure, and not only a start.
	Failed bool
	// image is what cannot be pulled, or empty.
	image string
}

func (p *Problem) String() string { return "pod " + p.Pod + ": " + p.Cause }

// ProblemOf is that of a pod; nil for one that is ready or ends.
func ProblemOf(pod *corev1.Pod) *Problem {
	if pod.DeletionTimestamp != nil {
		return nil
	}
	problem := func(failed bool, format string, args ...any) *Problem {
		return &Problem{Pod: pod.Name, Cause: fmt.Sprintf(format, args...), Failed: failed}
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case s.State.Waiting != nil && !starting(s.State.Waiting.Reason):
			p := problem(true, "container %s: %s: %s", s.Name, s.State.Waiting.Reason, s.State.Waiting.Message)
			if pulling(s.State.Waiting.Reason) {
				p.image = s.Image
			}
			return p
		case s.State.Terminated != nil && s.State.Terminated.ExitCode != 0:
			return problem(true, "container %s ended with status %d", s.Name, s.State.Terminated.ExitCode)
		}
	}
	for _, condition := range pod.Status.Conditions {
		switch {
		case condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse:
			return problem(false, "not scheduled: %s", condition.Message)
		case condition.Type == corev1.PodReady && condition.Status != corev1.ConditionTrue:
			return problem(false, "not ready: %s", condition.Message)
		}
	}
	if pod.Status.Phase == corev1.PodPending {
		return problem(false, "starting")
	}
	return nil
}

// pulling says that an image is tried again, by kubelet's reasons (kubernetes/pkg/kubelet/images/types.go).
func pulling(reason string) bool { return reason == "ErrImagePull" || reason == "ImagePullBackOff" }

func starting(reason string) bool {
	return reason == "ContainerCreating" || reason == "PodInitializing"
}

// A poolState is the status of a pool, and what keeps it from being ready.
type poolState struct {
	hppv1.StoragePoolStatus
	lacks string
	// deployed is on how many nodes what mounts it is that which was applied, whether it does or fails. Stays says that it is mounted on all nodes, by
	// whatever version, and has its claims.
	deployed int
	stays    bool
	// mounted is on how many nodes this version mounts it, and without are those on which it does not.
	mounted int
	without sets.Set[string]
}

// What a pool can lack.
const (
	poolUnmounted = "mounts"
	poolNowhere   = "nodes"
	poolUnknown   = "reports"
	poolSomewhere = "some nodes"
	poolUntold    = "a class"
)

func textsOf(pools []poolState, lacks string) []string {
	var texts []string
	for _, pool := range pools {
		if pool.lacks == lacks {
			texts = append(texts, "pool "+pool.Name+": "+pool.Message)
		}
	}
	return texts
}

// poolStates are those of pools. A pool is usable where its driver is ready, mounts it if it has a template, and serves it, which is
// published only while a StorageClass names the pool.
func poolStates(pools []hppv1.StoragePool, seen Observed) []poolState {
	var states []poolState
	on := spread{nodes: seen.Nodes()}
	set := seen.DaemonSets[render.DriverDaemonSet]
	if set != nil {
		on.desired = int(set.Status.DesiredNumberScheduled)
	}
	for _, pool := range pools {
		state := poolState{StoragePoolStatus: hppv1.StoragePoolStatus{Name: pool.Name, Phase: hppv1.StoragePoolMounting, DesiredReady: on.desired}}
		if set != nil {
			state.CurrentReady = int(set.Status.NumberReady)
		}
		var unbound []string
		if state.deployed = state.DesiredReady; pool.PVCTemplate != nil {
			mounted := seen.mounted(pool.Name)
			state.deployed, state.mounted, state.without = on.has(mounted.deployed), on.has(mounted.byThis), on.nodes.Difference(mounted.byThis)
			state.CurrentReady = min(state.CurrentReady, state.mounted)
			state.ClaimStatuses, unbound = claimStatuses(pool.Name, seen)
			state.stays = on.has(mounted.byAny) >= state.DesiredReady && len(unbound) == 0
			state.ClaimStatuses = firstClaims(state.ClaimStatuses, mostClaims/len(pools))
		}
		state.judge(seen.Services[pool.Name], on, unbound, &pool)
		if state.lacks == "" && set != nil && state.CurrentReady >= state.DesiredReady && state.DesiredReady > 0 {
			state.Phase = hppv1.StoragePoolReady
		} else if state.Message == "" {
			state.Message = state.usable()
		}
		state.Message = Shorten(state.Message, mostMessage)
		states = append(states, state)
	}
	slices.SortFunc(states, func(a, b poolState) int { return strings.Compare(a.Name, b.Name) })
	return states
}

func (s *poolState) judge(service Service, on spread, unbound []string, pool *hppv1.StoragePool) {
	onClaims := pool.PVCTemplate != nil
	serving, refused := on.has(service.Serving), on.nodes.Intersection(service.NotServing)
	switch {
	case len(unbound) > 0:
		s.Phase, s.Message, s.lacks = hppv1.StoragePoolPreparing, strings.Join(unbound, "; "), poolUnmounted
	case onClaims && s.mounted < s.DesiredReady:
		s.lacks, s.Message = poolUnmounted, s.usable()
		if s.without.Len() > 0 {
			s.Message += ", and not mounted on " + Some(sets.List(s.without))
		}
	case service.Asked && serving == 0 && refused.Len() > 0:
		s.CurrentReady, s.lacks = 0, poolNowhere
		s.Message = "serves on no node, its driver has the reason in its log and as a metric: " + Some(sets.List(refused))
	case service.Asked && serving == 0:
		s.CurrentReady, s.lacks, s.Message = 0, poolUnknown, "the driver has not published its capacity yet"
	case service.Asked && serving < s.DesiredReady:
		s.CurrentReady, s.lacks = min(s.CurrentReady, serving), poolSomewhere
		s.Message = s.usable()
		if refused.Len() > 0 {
			s.Message += ", and not served on " + Some(sets.List(refused))
		}
	case !service.Asked && conditional(pool):
		s.CurrentReady, s.lacks = 0, poolUntold
		s.Message = "whether it is served is known once a StorageClass with WaitForFirstConsumer names it"
	}
}

func (s *poolState) usable() string {
	return fmt.Sprintf("usable on %d of %d nodes", s.CurrentReady, s.DesiredReady)
}

// conditional says that nodes whose driver is ready may well not serve a pool. A pool on a claim is known to be mounted.
func conditional(pool *hppv1.StoragePool) bool {
	needsMount := pool.PVCTemplate == nil && pool.RequireMount != nil && *pool.RequireMount
	return needsMount || pool.Enforcement == "required"
}

// Some are the first of many names.
func Some(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// A mounting is the nodes on which a pool is mounted by any version, what mounts it is deployed in this one, and this one mounts it.
type mounting struct{ byAny, deployed, byThis sets.Set[string] }

// mounted is where a pool is. A mounter is ready while the pool is mounted, and while an earlier pod is left beside its successor, the ready one can be that.
func (o *Observed) mounted(pool string) mounting {
	found := mounting{sets.New[string](), sets.New[string](), sets.New[string]()}
	for i := range o.Mounters {
		m := &o.Mounters[i]
		if render.PoolOf(m.Labels) != pool {
			continue
		}
		now, node := &m.Status, render.LeftoverOf(m).Node
		if now.ReadyReplicas > 0 {
			found.byAny.Insert(node)
		}
		if o.Replaced.Has(m.Name) || now.ObservedGeneration != m.Generation || now.Replicas != now.UpdatedReplicas || now.UpdatedReplicas == 0 {
			continue
		}
		found.deployed.Insert(node)
		if now.ReadyReplicas > 0 {
			found.byThis.Insert(node)
		}
	}
	return found
}

// claimStatuses are those of a pool's claims, and what there is to say of those that it needs and that are not bound.
func claimStatuses(pool string, seen Observed) (statuses []hppv1.ClaimStatus, unbound []string) {
	for i, claim := range slices.Concat(seen.Claims, seen.LeftClaims) {
		if render.PoolOf(claim.Labels) != pool {
			continue
		}
		statuses = append(statuses, hppv1.ClaimStatus{Name: claim.Name, Status: *claim.Status.DeepCopy()})
		if i < len(seen.Claims) && claim.Status.Phase != corev1.ClaimBound {
			unbound = append(unbound, fmt.Sprintf("claim %s is %s", claim.Name, cmp.Or(claim.Status.Phase, corev1.ClaimPending)))
		}
	}
	slices.SortFunc(statuses, func(a, b hppv1.ClaimStatus) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(unbound)
	return statuses, unbound
}

// firstClaims has those that are not bound before others, if there are too many.
func firstClaims(all []hppv1.ClaimStatus, most int) []hppv1.ClaimStatus {
	if len(all) <= most {
		return all
	}
	isBound := func(s hppv1.ClaimStatus) bool { return s.Status.Phase == corev1.ClaimBound }
	waiting := slices.DeleteFunc(slices.Clone(all), isBound)
	bound := slices.DeleteFunc(all, func(s hppv1.ClaimStatus) bool { return !isBound(s) })
	return first(append(waiting, bound...), most)
}

func joined(first string, more []string) string {
	return strings.Join(slices.Concat([]string{first}, more), "; ")
}

// Shorten keeps a text to so many bytes.
func Shorten(text string, most int) string {
	const cut = "…"
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-len(cut)], "") + cut
}
