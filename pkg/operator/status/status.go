// Package status computes the status of a HostPathProvisioner from what is observed of it.
package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/version"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// Reasons of conditions.
const (
	reasonComplete    = "Complete"
	reasonDeploying   = "DeployStarted"
	reasonUpgrading   = "UpgradeStarted"
	reasonRollingOut  = "RollingOut"
	reasonNotReady    = "NodesNotReady"
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
	// Mounters are the Deployments that are to keep pools with a template mounted, and are what was applied.
	Mounters []appsv1.Deployment
	// Leaving are pools that are still to be unmounted, in words.
	Leaving []string
	// Claims are those that pools with a template need, and LeftClaims those of nodes and pools that are not wanted any more.
	Claims, LeftClaims []corev1.PersistentVolumeClaim
	// DeletedNodes are nodes that are gone but for volumes that name them.
	DeletedNodes []hppv1.DeletedNode
	// Problems are errors of this reconciliation.
	Problems []error
	// Notices are things that a user should know, although they keep nothing from working.
	Notices []string
}

// Assess computes the status of an object from what is observed.
func Assess(object *hppv1.HostPathProvisioner, operatorVersion string, seen Observed) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	status.TargetVersion = operatorVersion
	status.NodeStatuses = nodeProblems(seen.Pods)
	status.StoragePoolStatuses = poolStatuses(object, seen)
	status.DeletedNodes = seen.DeletedNodes

	waiting := notRolledOut(seen)
	for _, pool := range status.StoragePoolStatuses {
		if pool.Phase != hppv1.StoragePoolReady {
			waiting = append(waiting, fmt.Sprintf("pool %s: %s", pool.Name, pool.Message))
		}
	}
	missing := strings.Join(slices.Concat(waiting, seen.Leaving), "; ")
	first := status.ObservedVersion == ""
	upgrade := !first && status.ObservedVersion != operatorVersion
	if len(waiting) == 0 && len(seen.Problems) == 0 {
		status.ObservedVersion = operatorVersion
	}
	c := conditions{status: &status, generation: object.Generation}
	c.available(waiting, status.NodeStatuses, seen)
	switch {
	case len(waiting) == 0 && len(seen.Problems) == 0 && len(seen.Leaving) > 0:
		c.set(hppv1.ConditionProgressing, true, reasonUnmounting, "Waiting for "+missing)
	case len(waiting) == 0 && len(seen.Problems) == 0:
		c.set(hppv1.ConditionProgressing, false, reasonComplete, "Everything is rolled out")
	case first:
		c.set(hppv1.ConditionProgressing, true, reasonDeploying, missing)
	case upgrade:
		c.set(hppv1.ConditionProgressing, true, reasonUpgrading, "Upgrade to "+operatorVersion+": "+missing)
	default:
		c.set(hppv1.ConditionProgressing, true, reasonRollingOut, missing)
	}
	c.degraded(first || upgrade, status.NodeStatuses, seen)
	return status
}

// mostMessage is how many bytes the message of a condition has. It could have 32768, but is for people.
const mostMessage = 2048

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

func (c conditions) available(waiting []string, nodes []hppv1.NodeStatus, seen Observed) {
	if len(waiting) == 0 {
		notices := slices.Clone(seen.Notices)
		for _, node := range seen.DeletedNodes {
			notices = append(notices, fmt.Sprintf("The node %s was deleted, and %d PersistentVolumes are left of it: deletedNodes of this status has the command that removes them",
				node.Node, node.PersistentVolumes))
		}
		c.set(hppv1.ConditionAvailable, true, reasonComplete, joined("Application Available", notices))
		return
	}
	c.set(hppv1.ConditionAvailable, false, reasonNotReady, joined(strings.Join(waiting, "; "), nodeTexts(nodes)))
}

// degraded is true for errors, and for nodes that are not ready. While a version is being rolled out, pods that are only
// starting are no reason.
func (c conditions) degraded(rollingOut bool, nodes []hppv1.NodeStatus, seen Observed) {
	var failing []string
	for _, pod := range seen.Pods {
		if text, failed := PodProblem(&pod); failed || text != "" && !rollingOut {
			failing = append(failing, render.NodeOf(&pod)+": "+text)
		}
	}
	slices.Sort(failing)
	switch {
	case len(seen.Problems) > 0:
		var texts []string
		for _, problem := range seen.Problems {
			texts = append(texts, problem.Error())
		}
		c.set(hppv1.ConditionDegraded, true, reasonFailed, strings.Join(texts, "; "))
	case len(failing) > 0:
		c.set(hppv1.ConditionDegraded, true, reasonNotReady, strings.Join(failing, "; "))
	case !rollingOut && slices.ContainsFunc(c.status.StoragePoolStatuses, func(p hppv1.StoragePoolStatus) bool { return p.Phase != hppv1.StoragePoolReady }):
		c.set(hppv1.ConditionDegraded, true, reasonPoolProblem, "Some pools are not usable on all nodes: see storagePoolStatuses")
	default:
		c.set(hppv1.ConditionDegraded, false, reasonAsExpected, "")
	}
}

// Refuse is the status of an object that is not reconciled.
func Refuse(object *hppv1.HostPathProvisioner, operatorVersion, reason, message string) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	c := conditions{status: &status, generation: object.Generation}
	// What runs goes on. It is said anew in any case: the upstream operator leaves out reasons, and with such a condition the API server
	// takes no status.
	serves := reason != ReasonSecond && meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionAvailable)
	available := message
	if serves {
		available = "What was rolled out before goes on, and nothing is changed: " + message
	}
	c.set(hppv1.ConditionAvailable, serves, reason, available)
	c.set(hppv1.ConditionProgressing, false, reason, message)
	c.set(hppv1.ConditionDegraded, true, reason, message)
	return status
}

// Deleting is the status of an object that waits for pods to end. Users and legacy are how many PersistentVolumes there are of
// the driver and of the pre-CSI provisioner.
func Deleting(object *hppv1.HostPathProvisioner, operatorVersion string, waiting []string, users, legacy int) hppv1.HostPathProvisionerStatus {
	status := begin(object, operatorVersion)
	message := "Waiting for " + strings.Join(waiting, ", ")
	if users > 0 {
		message += fmt.Sprintf("; %d PersistentVolumes still use the driver: they and their data stay, and pods can use them again once there is a HostPathProvisioner", users)
	}
	if legacy > 0 {
		message += fmt.Sprintf("; %d PersistentVolumes are of the pre-CSI provisioner: pods can go on using them, and they and their data stay until there is a HostPathProvisioner with the same pathConfig", legacy)
	}
	c := conditions{status: &status, generation: object.Generation}
	c.set(hppv1.ConditionAvailable, false, reasonDeleting, message)
	c.set(hppv1.ConditionProgressing, true, reasonDeleting, message)
	c.set(hppv1.ConditionDegraded, false, reasonDeleting, "")
	return status
}

// begin is what each new status begins with: what was observed before. All are made of it, because the first that is written
// gives the object an observed generation.
func begin(object *hppv1.HostPathProvisioner, operatorVersion string) hppv1.HostPathProvisionerStatus {
	status := *object.Status.DeepCopy()
	status.ObservedVersion = rolledOutVersion(object.Status)
	status.ObservedGeneration, status.OperatorVersion = object.Generation, operatorVersion
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

// notRolledOut says what is missing at the DaemonSets.
func notRolledOut(seen Observed) []string {
	var waiting []string
	for _, name := range slices.Sorted(maps.Keys(seen.DaemonSets)) {
		set := seen.DaemonSets[name]
		switch {
		case set == nil:
			waiting = append(waiting, name+" does not exist yet")
		case seen.Outdated.Has(name):
			waiting = append(waiting, name+" is not what it should be yet")
		case set.Status.ObservedGeneration != set.Generation:
			waiting = append(waiting, name+": its controller has not observed its last change yet")
		case set.Status.UpdatedNumberScheduled < set.Status.DesiredNumberScheduled:
			waiting = append(waiting, fmt.Sprintf("%s: %d of %d nodes are updated", name, set.Status.UpdatedNumberScheduled, set.Status.DesiredNumberScheduled))
		case set.Status.NumberReady < set.Status.DesiredNumberScheduled:
			waiting = append(waiting, fmt.Sprintf("%s: %d of %d nodes are ready", name, set.Status.NumberReady, set.Status.DesiredNumberScheduled))
		}
	}
	return waiting
}

// nodeProblems are the nodes whose pods are not ready, by name.
func nodeProblems(pods []corev1.Pod) []hppv1.NodeStatus {
	var found []hppv1.NodeStatus
	for i := range pods {
		if text, _ := PodProblem(&pods[i]); text != "" {
			found = append(found, hppv1.NodeStatus{Node: render.NodeOf(&pods[i]), Pool: render.PoolOf(pods[i].Labels), Message: text})
		}
	}
	slices.SortFunc(found, func(a, b hppv1.NodeStatus) int {
		return strings.Compare(a.Node+"/"+a.Pool+"/"+a.Message, b.Node+"/"+b.Pool+"/"+b.Message)
	})
	return found
}

func nodeTexts(nodes []hppv1.NodeStatus) []string {
	var texts []string
	for _, n := range nodes {
		texts = append(texts, n.Node+": "+n.Message)
	}
	return texts
}

// PodProblem says what keeps a pod from being ready, and whether that is a failure and not only a start.
func PodProblem(pod *corev1.Pod) (text string, failed bool) {
	if pod.DeletionTimestamp != nil {
		return "", false
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case s.State.Waiting != nil && !starting(s.State.Waiting.Reason):
			return fmt.Sprintf("container %s of pod %s: %s: %s", s.Name, pod.Name, s.State.Waiting.Reason, s.State.Waiting.Message), true
		case s.State.Terminated != nil && s.State.Terminated.ExitCode != 0:
			return fmt.Sprintf("container %s of pod %s ended with status %d", s.Name, pod.Name, s.State.Terminated.ExitCode), true
		}
	}
	for _, condition := range pod.Status.Conditions {
		switch {
		case condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse:
			return fmt.Sprintf("pod %s is not scheduled: %s", pod.Name, condition.Message), false
		case condition.Type == corev1.PodReady && condition.Status != corev1.ConditionTrue:
			return fmt.Sprintf("pod %s is not ready: %s", pod.Name, condition.Message), false
		}
	}
	if pod.Status.Phase == corev1.PodPending {
		return fmt.Sprintf("pod %s is starting", pod.Name), false
	}
	return "", false
}

func starting(reason string) bool {
	return reason == "ContainerCreating" || reason == "PodInitializing"
}

// poolStatuses are those of all pools. A pool without a template is usable where the driver is.
func poolStatuses(object *hppv1.HostPathProvisioner, seen Observed) []hppv1.StoragePoolStatus {
	var statuses []hppv1.StoragePoolStatus
	for _, pool := range render.Pools(object) {
		status := hppv1.StoragePoolStatus{Name: pool.Name, Phase: hppv1.StoragePoolMounting}
		set := seen.DaemonSets[render.DriverDaemonSet]
		if set != nil {
			status.DesiredReady = int(set.Status.DesiredNumberScheduled)
			status.CurrentReady = int(set.Status.NumberReady)
		}
		var unbound []string
		if pool.PVCTemplate != nil {
			status.CurrentReady = mounted(pool.Name, seen.Mounters)
			status.ClaimStatuses, unbound = claimStatuses(pool.Name, seen)
		}
		switch {
		case len(unbound) > 0:
			status.Phase, status.Message = hppv1.StoragePoolPreparing, strings.Join(unbound, "; ")
		case set != nil && status.CurrentReady >= status.DesiredReady:
			status.Phase = hppv1.StoragePoolReady
		default:
			status.Message = fmt.Sprintf("usable on %d of %d nodes", status.CurrentReady, status.DesiredReady)
		}
		statuses = append(statuses, status)
	}
	slices.SortFunc(statuses, func(a, b hppv1.StoragePoolStatus) int { return strings.Compare(a.Name, b.Name) })
	return statuses
}

// mounted is on how many nodes a pool is mounted: a mounter is ready while it is. A pod of the version before, which is about to
// be replaced, does not count.
func mounted(pool string, mounters []appsv1.Deployment) int {
	count := 0
	for i := range mounters {
		m := &mounters[i]
		if render.PoolOf(m.Labels) == pool && m.Status.ObservedGeneration == m.Generation && m.Status.UpdatedReplicas > 0 && m.Status.ReadyReplicas > 0 {
			count++
		}
	}
	return count
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

// joined puts texts behind a first one.
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
