package kubectl

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

// ClaimChecks are whether claims get volumes: by their classes, the room that nodes report, and what waits.
type claimChecks struct {
	driver     driverPods
	classes    []storagev1.StorageClass
	capacities []storagev1.CSIStorageCapacity
	claims     []corev1.PersistentVolumeClaim
	// events are of claims.
	events []corev1.Event
	// pending are pods that do not run yet, of all namespaces.
	pending []corev1.Pod
}

func (c claimChecks) ours() map[string]bool {
	names := map[string]bool{}
	for _, s := range c.classes {
		if s.Provisioner == driverName {
			names[s.Name] = true
		}
	}
	return names
}

func (c claimChecks) hasClasses() (string, []Finding) {
	ours := c.ours()
	if len(ours) == 0 {
		return "", []Finding{{Problem: "no StorageClass has the provisioner " + driverName, Mend: "Apply deploy/csi/base/storageclass.yaml, or one of your own"}}
	}
	var defaults []string
	var problems []Finding
	for _, s := range c.classes {
		if s.Provisioner == driverName {
			problems = append(problems, c.wrongClass(s)...)
		}
		if s.Annotations["storageclass.kubernetes.io/is-default-class"] == "true" {
			defaults = append(defaults, s.Name)
		}
	}
	if len(defaults) > 1 {
		problems = append(problems, Finding{
			Problem: "several are the default: " + strings.Join(defaults, ", "),
			Mend:    `Keep one: kubectl patch storageclass NAME -p '{"metadata":{"annotations":{"storageclass.kubernetes.io/is-default-class":"false"}}}'`,
		})
	}
	found := strings.Join(slices.Sorted(maps.Keys(ours)), ", ")
	if len(defaults) == 1 {
		found += "; the default of the cluster is " + defaults[0]
	}
	return found, problems
}

// poolOf is the pool that a class names, as the driver takes it; empty if the class leaves it to a node with one pool.
func poolOf(s storagev1.StorageClass) string { return s.Parameters["storagePool"] }

// has reports whether a node serves the pool of a class.
func (n Node) has(s storagev1.StorageClass) bool {
	name := poolOf(s)
	return slices.ContainsFunc(n.Report.Pools, func(p Pool) bool {
		return p.Name == name || name == "" && (p.Name == "legacy" || len(n.Report.Pools) == 1)
	})
}

// wrongClass is what keeps the driver from making volumes of a class.
func (c claimChecks) wrongClass(s storagev1.StorageClass) []Finding {
	var problems []Finding
	if nodes := c.driver.reported(); len(nodes) > 0 && !slices.ContainsFunc(nodes, func(n Node) bool { return n.has(s) }) {
		problems = append(problems, Finding{
			Problem: fmt.Sprintf("%s is for the pool %q, which no node has", s.Name, poolOf(s)),
			Mend:    "Add the pool, or make the class again with another storagePool: docs/configuration.md#add-a-pool",
		})
	}
	for name := range s.Parameters {
		if strings.HasSuffix(name, "-secret-name") {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("%s names a Secret, and such volumes are refused", s.Name),
				Mend:    "Make the class again without " + name,
			})
		}
	}
	return problems
}

// reportsCapacity: the scheduler puts a pod only where an object says that there is room.
func (c claimChecks) reportsCapacity() (string, []Finding) {
	type place struct{ class, node string }
	known := map[place]bool{}
	for _, r := range c.capacities {
		if r.Namespace == c.driver.namespace && r.NodeTopology != nil {
			known[place{r.StorageClassName, r.NodeTopology.MatchLabels[topologyKey]}] = true
		}
	}
	var problems []Finding
	for _, s := range c.classes {
		if s.Provisioner != driverName || s.VolumeBindingMode == nil || *s.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
			continue
		}
		for _, n := range c.driver.reported() {
			if n.has(s) && !known[place{s.Name, n.Driver.Node}] {
				problems = append(problems, Finding{
					Problem: fmt.Sprintf("none is known of %s on %s, so that no claim goes there", s.Name, n.Driver.Node),
					Mend:    fmt.Sprintf("See kubectl -n %s logs %s -c csi-provisioner", n.Driver.Namespace, n.Driver.Pod),
				})
			}
		}
	}
	return "the scheduler knows that of each node", problems
}

// waiting are claims of the driver without a volume, with the last that was said of each.
func (c claimChecks) waiting() (string, []Finding) {
	ours, bound := c.ours(), 0
	var problems []Finding
	for _, cl := range c.claims {
		if cl.Spec.StorageClassName == nil || !ours[*cl.Spec.StorageClassName] {
			continue
		}
		if cl.Status.Phase != corev1.ClaimPending {
			bound++
			continue
		}
		if why := c.whyWaits(cl); why != "" {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("%s/%s waits%s", cl.Namespace, cl.Name, strings.TrimSuffix(why, ".")),
				Mend:    "docs/troubleshooting.md#a-pod-stays-pending says what to do, by these words",
			})
		}
	}
	return fmt.Sprintf("%d have their volumes, and none waits but for its first pod", bound), problems
}

// whyWaits is what keeps a claim without a volume, after the word that says that it waits; empty if no pod uses it.
func (c claimChecks) whyWaits(cl corev1.PersistentVolumeClaim) string {
	last := c.lastEvent(cl, "")
	switch last.Reason {
	case "", "WaitForFirstConsumer", "WaitForPodScheduled":
		if pod, why := c.unscheduled(cl); pod != "" {
			return fmt.Sprintf(" for the pod %s, which no node takes: %s", pod, why)
		}
	default:
		// Between two attempts Kubernetes says again and again that it waits.
		if failed := c.lastEvent(cl, corev1.EventTypeWarning); failed.Message != "" {
			last = failed
		}
	}
	if last.Reason == "WaitForFirstConsumer" || last.Message == "" {
		return "" // as it should: no pod uses it yet
	}
	return ": " + last.Message
}

// unscheduled is a pod of a claim for which the scheduler finds no node, such as one with room, and what it says of that. The claim's own
// events say only that it waits for the pod.
func (c claimChecks) unscheduled(of corev1.PersistentVolumeClaim) (pod, why string) {
	for _, p := range c.pending {
		if p.Namespace != of.Namespace || !uses(p, of.Name) {
			continue
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				return p.Name, condition.Message
			}
		}
	}
	return "", ""
}

// uses reports whether a pod has the volume of a claim. That of an ephemeral volume has the names of both.
func uses(p corev1.Pod, claim string) bool {
	return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim || v.Ephemeral != nil && p.Name+"-"+v.Name == claim
	})
}

// lastEvent is the last of a claim, of one type unless that is empty.
func (c claimChecks) lastEvent(of corev1.PersistentVolumeClaim, kind string) (last corev1.Event) {
	var at time.Time
	for _, e := range c.events {
		when := e.LastTimestamp.Time
		if e.EventTime.After(when) {
			when = e.EventTime.Time
		}
		if e.InvolvedObject.Kind == "PersistentVolumeClaim" && e.InvolvedObject.Namespace == of.Namespace && e.InvolvedObject.Name == of.Name &&
			(kind == "" || e.Type == kind) && !when.Before(at) {
			last, at = e, when
		}
	}
	return last
}
