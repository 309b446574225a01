package kubectl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
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

// A cluster is what the checks look at.
type cluster struct {
	nodes   []Node
	pods    []pod
	classes []storageClass
	claims  []claim
	drivers []named
	csi     []csiNode
	// definitions are the kinds that the cluster has, and deployed the containers of Deployments.
	definitions []named
	deployed    []deployment
	events      []event
}

type named struct {
	Metadata struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
}

type storageClass struct {
	named
	Provisioner string `json:"provisioner"`
}

// isDefault is as Kubernetes' admission sees it.
func (s storageClass) isDefault() bool {
	return s.Metadata.Annotations["storageclass.kubernetes.io/is-default-class"] == "true"
}

type claim struct {
	named
	Spec struct {
		StorageClassName string `json:"storageClassName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

type csiNode struct {
	named
	Spec struct {
		Drivers []struct {
			Name string `json:"name"`
		} `json:"drivers"`
	} `json:"spec"`
}

type deployment struct {
	named
	Spec struct {
		Template struct {
			Spec struct {
				Containers []struct {
					Name    string   `json:"name"`
					Image   string   `json:"image"`
					Command []string `json:"command"`
					Args    []string `json:"args"`
				} `json:"containers"`
			} `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
}

type event struct {
	InvolvedObject struct {
		Kind      string `json:"kind"`
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"involvedObject"`
	Message       string `json:"message"`
	LastTimestamp string `json:"lastTimestamp"`
	EventTime     string `json:"eventTime"`
}

func (e event) when() string { return max(e.LastTimestamp, e.EventTime) }

// Doctor checks what the driver needs of a cluster, and what waits for it.
func Doctor(ctx context.Context, k Kubectl, nodes []Node) ([]Finding, error) {
	c := cluster{nodes: nodes}
	for _, read := range []func() error{
		func() (err error) { c.pods, err = drivers(ctx, k); return err },
		func() (err error) { c.classes, err = get[storageClass](ctx, k, "storageclasses"); return err },
		func() (err error) { c.claims, err = get[claim](ctx, k, "persistentvolumeclaims"); return err },
		func() (err error) { c.drivers, err = get[named](ctx, k, "csidrivers"); return err },
		func() (err error) { c.csi, err = get[csiNode](ctx, k, "csinodes"); return err },
		func() (err error) { c.definitions, err = get[named](ctx, k, "customresourcedefinitions"); return err },
		func() (err error) { c.deployed, err = get[deployment](ctx, k, "deployments"); return err },
		func() (err error) {
			c.events, err = get[event](ctx, k, "events", "--field-selector=involvedObject.kind=PersistentVolumeClaim")
			return err
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
			known[n.Metadata.Name] = known[n.Metadata.Name] || d.Name == driverName
		}
	}
	var problems []Finding
	if !slices.ContainsFunc(c.drivers, func(d named) bool { return d.Metadata.Name == driverName }) {
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

// ours are the StorageClasses of the driver.
func (c cluster) ours() map[string]bool {
	names := map[string]bool{}
	for _, s := range c.classes {
		if s.Provisioner == driverName {
			names[s.Metadata.Name] = true
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
		if s.isDefault() {
			defaults = append(defaults, s.Metadata.Name)
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
	wanted := slices.ContainsFunc(c.pods, func(p pod) bool { return p.has("csi-snapshotter") })
	if !wanted {
		return "they are not installed: docs/snapshots.md has how", nil
	}
	if !slices.ContainsFunc(c.definitions, func(d named) bool { return d.Metadata.Name == "volumesnapshots.snapshot.storage.k8s.io" }) {
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
		if !ours[cl.Spec.StorageClassName] {
			continue
		}
		if cl.Status.Phase != "Pending" {
			bound++
			continue
		}
		said := c.lastEvent(cl)
		if said == "" || strings.HasPrefix(said, "waiting for first consumer") {
			continue // as it should: no pod uses it yet
		}
		problems = append(problems, Finding{
			Problem: fmt.Sprintf("%s/%s waits: %s", cl.Metadata.Namespace, cl.Metadata.Name, said),
			Mend:    "docs/troubleshooting.md says what to do, by these words",
		})
	}
	return fmt.Sprintf("%d have their volumes, and none waits but for its first pod", bound), problems
}

func (c cluster) lastEvent(of claim) string {
	var last event
	for _, e := range c.events {
		if e.InvolvedObject.Kind == "PersistentVolumeClaim" && e.InvolvedObject.Namespace == of.Metadata.Namespace &&
			e.InvolvedObject.Name == of.Metadata.Name && e.when() >= last.when() {
			last = e
		}
	}
	return last.Message
}
