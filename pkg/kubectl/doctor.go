package kubectl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FindingHeadings are those of the table of findings.
var FindingHeadings = []string{"CHECK", "RESULT", "ABOUT"}

// A Finding is what one check found of one thing.
type Finding struct {
	Check string `json:"check"`
	// Problem is what is wrong, and Mend what to do; both are empty where all is well, and then Found says what was.
	Found   string `json:"found,omitempty"`
	Problem string `json:"problem,omitempty"`
	Mend    string `json:"mend,omitempty"`
}

func (f Finding) cells() []string {
	if f.Problem == "" {
		return []string{f.Check, "ok", f.Found}
	}
	return []string{f.Check, "PROBLEM", f.Problem + ". " + f.Mend}
}

type cluster struct {
	nodes   []Node
	pods    []corev1.Pod
	classes []storagev1.StorageClass
	claims  []corev1.PersistentVolumeClaim
	drivers []storagev1.CSIDriver
	csi     []storagev1.CSINode
	// definitions are the kinds that the cluster has.
	definitions []metav1.PartialObjectMetadata
	deployed    []appsv1.Deployment
	events      []corev1.Event
}

// Doctor checks what the driver needs of a cluster, and what waits for it.
func Doctor(ctx context.Context, k Kubectl, nodes []Node) ([]Finding, error) {
	c := cluster{nodes: nodes}
	for _, read := range []func() error{
		func() (err error) { c.pods, err = drivers(ctx, k); return err },
		func() error { return get(ctx, k, &c.classes, "storageclasses") },
		func() error { return get(ctx, k, &c.claims, "persistentvolumeclaims") },
		func() error { return get(ctx, k, &c.drivers, "csidrivers") },
		func() error { return get(ctx, k, &c.csi, "csinodes") },
		func() error { return get(ctx, k, &c.definitions, "customresourcedefinitions") },
		func() error { return get(ctx, k, &c.deployed, "deployments") },
		func() error {
			return get(ctx, k, &c.events, "events", "--field-selector=involvedObject.kind=PersistentVolumeClaim")
		},
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	var all []Finding
	for _, check := range []struct {
		name string
		run  func() (found string, problems []Finding)
	}{
		{"driver", c.driverRuns},
		{"registration", c.registered},
		{"versions", c.versions},
		{"pools", c.poolsInOrder},
		{"quotas", c.quotas},
		{"StorageClass", c.hasClasses},
		{"snapshots", c.snapshots},
		{"claims", c.waiting},
	} {
		found, problems := check.run()
		if len(problems) == 0 {
			problems = []Finding{{Found: found}}
		}
		for _, f := range problems {
			f.Check = check.name
			all = append(all, f)
		}
	}
	return all, nil
}

func (c cluster) driverRuns() (string, []Finding) {
	var problems []Finding
	for _, n := range c.nodes {
		if n.Err != nil {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("node %s gives no report: %v", n.Driver.Node, n.Err),
				Mend:    fmt.Sprintf("See kubectl -n %s logs %s -c %s", n.Driver.Namespace, n.Driver.Pod, container),
			})
		}
	}
	return fmt.Sprintf("it runs and answers on %d of %d nodes of the cluster", len(c.nodes), len(c.csi)), problems
}

// registered: kubelet knows the driver where its registrar found kubelet's directory.
func (c cluster) registered() (string, []Finding) {
	known := map[string]bool{}
	for _, n := range c.csi {
		for _, d := range n.Spec.Drivers {
			known[n.Name] = known[n.Name] || d.Name == driverName
		}
	}
	var problems []Finding
	if !slices.ContainsFunc(c.drivers, func(d storagev1.CSIDriver) bool { return d.Name == driverName }) {
		problems = append(problems, Finding{Problem: "the cluster has no CSIDriver " + driverName, Mend: "Apply deploy/csi again"})
	}
	for _, n := range c.nodes {
		if !known[n.Driver.Node] {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("kubelet on %s does not know the driver", n.Driver.Node),
				Mend: fmt.Sprintf("If kubelet's directory is not /var/lib/kubelet, change the paths in the DaemonSet; see kubectl -n %s logs %s -c node-driver-registrar",
					n.Driver.Namespace, n.Driver.Pod),
			})
		}
	}
	return "kubelet knows it on each of these nodes", problems
}

func (c cluster) versions() (string, []Finding) {
	images := map[string]map[string][]string{} // nodes by image by container
	for _, p := range c.pods {
		for _, one := range p.Spec.Containers {
			if images[one.Name] == nil {
				images[one.Name] = map[string][]string{}
			}
			images[one.Name][one.Image] = append(images[one.Name][one.Image], p.Spec.NodeName)
		}
	}
	var problems []Finding
	for _, name := range slices.Sorted(maps.Keys(images)) {
		if len(images[name]) == 1 {
			continue
		}
		var parts []string
		for _, image := range slices.Sorted(maps.Keys(images[name])) {
			parts = append(parts, image+" on "+strings.Join(images[name][image], ", "))
		}
		problems = append(problems, Finding{
			Problem: fmt.Sprintf("%s differs: %s", name, strings.Join(parts, "; ")),
			Mend:    "Wait for the rollout: kubectl get daemonsets --namespace=" + c.nodes[0].Driver.Namespace,
		})
	}
	var driver []string
	for image := range images[container] {
		driver = append(driver, image)
	}
	return "all nodes have " + strings.Join(driver, ", ") + " and the same sidecars", problems
}

func (c cluster) poolsInOrder() (string, []Finding) {
	var problems []Finding
	count := 0
	for _, row := range Pools(c.nodes) {
		if row.Pool == "" {
			continue // its node gave no report
		}
		count++
		if row.Abnormal {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("pool %s on %s: %s", row.Pool, row.Node, row.Condition),
				Mend:    "See kubectl hostpath inspect " + row.Node,
			})
		}
	}
	return fmt.Sprintf("%d in order", count), problems
}

func (c cluster) quotas() (string, []Finding) {
	var problems []Finding
	by := map[string]bool{}
	for _, n := range c.nodes {
		for _, p := range n.Report.Pools {
			switch {
			case p.Quota != "":
				by[p.Quota] = true
			case p.Unenforced != "":
				problems = append(problems, Finding{
					Problem: fmt.Sprintf("pool %s on %s keeps no sizes: %s", p.Name, n.Driver.Node, p.Unenforced),
					Mend:    "docs/quotas.md has the commands for each filesystem",
				})
			}
		}
	}
	return "sizes are kept by " + strings.Join(slices.Sorted(maps.Keys(by)), ", "), problems
}

func (c cluster) ours() map[string]bool {
	names := map[string]bool{}
	for _, s := range c.classes {
		if s.Provisioner == driverName {
			names[s.Name] = true
		}
	}
	return names
}

func (c cluster) hasClasses() (string, []Finding) {
	ours := c.ours()
	if len(ours) == 0 {
		return "", []Finding{{Problem: "no StorageClass has the provisioner " + driverName, Mend: "Apply deploy/csi/base/storageclass.yaml, or one of your own"}}
	}
	var defaults []string
	for _, s := range c.classes {
		if s.Annotations["storageclass.kubernetes.io/is-default-class"] == "true" {
			defaults = append(defaults, s.Name)
		}
	}
	if len(defaults) > 1 {
		return "", []Finding{{
			Problem: "several are the default: " + strings.Join(defaults, ", "),
			Mend:    `Keep one: kubectl patch storageclass NAME -p '{"metadata":{"annotations":{"storageclass.kubernetes.io/is-default-class":"false"}}}'`,
		}}
	}
	found := strings.Join(slices.Sorted(maps.Keys(ours)), ", ")
	if len(defaults) == 1 {
		found += "; the default of the cluster is " + defaults[0]
	}
	return found, nil
}

// distributed has the snapshot-controller leave a snapshot to the node of its volume.
const distributed = "--enable-distributed-snapshotting"

// snapshots are checked where the driver has the sidecar for them.
func (c cluster) snapshots() (string, []Finding) {
	wanted := slices.ContainsFunc(c.pods, func(p corev1.Pod) bool { return has(p, "csi-snapshotter") })
	if !wanted {
		return "they are not installed: docs/snapshots.md has how", nil
	}
	if !slices.ContainsFunc(c.definitions, func(d metav1.PartialObjectMetadata) bool { return d.Name == "volumesnapshots.snapshot.storage.k8s.io" }) {
		return "", []Finding{{Problem: "the cluster does not know VolumeSnapshots", Mend: "Install the definitions and the snapshot-controller of external-snapshotter: docs/snapshots.md"}}
	}
	running := false
	for _, d := range c.deployed {
		for _, one := range d.Spec.Template.Spec.Containers {
			if !strings.Contains(one.Image, "snapshot-controller") {
				continue
			}
			running = true
			all := append(slices.Clone(one.Command), one.Args...)
			if slices.Contains(all, distributed) || slices.Contains(all, distributed+"=true") {
				return "their controller leaves them to the nodes", nil
			}
		}
	}
	if !running {
		return "no Deployment of the snapshot-controller is to be seen; where the platform runs it, it needs " + distributed, nil
	}
	return "", []Finding{{
		Problem: "the snapshot-controller runs without " + distributed + ", so that no node makes a snapshot",
		Mend:    "Add that to its arguments: kubectl edit deployment --namespace=kube-system snapshot-controller",
	}}
}

// waiting are claims of the driver without a volume, with the last that was said of each.
func (c cluster) waiting() (string, []Finding) {
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
		said := c.lastEvent(cl)
		if said == "" || strings.HasPrefix(said, "waiting for first consumer") {
			continue // as it should: no pod uses it yet
		}
		problems = append(problems, Finding{
			Problem: fmt.Sprintf("%s/%s waits: %s", cl.Namespace, cl.Name, said),
			Mend:    "docs/troubleshooting.md says what to do, by these words",
		})
	}
	return fmt.Sprintf("%d have their volumes, and none waits but for its first pod", bound), problems
}

func (c cluster) lastEvent(of corev1.PersistentVolumeClaim) (said string) {
	var last time.Time
	for _, e := range c.events {
		when := e.LastTimestamp.Time
		if e.EventTime.After(when) {
			when = e.EventTime.Time
		}
		if e.InvolvedObject.Kind == "PersistentVolumeClaim" && e.InvolvedObject.Namespace == of.Namespace && e.InvolvedObject.Name == of.Name && !when.Before(last) {
			said, last = e.Message, when
		}
	}
	return said
}
