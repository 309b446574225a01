package kubectl

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/version"
)

// NodeChecks are whether the driver runs on nodes that are fit for it, and kubelet knows it.
type nodeChecks struct {
	driver     driverPods
	objects    []corev1.Node
	daemonSets []appsv1.DaemonSet
	csiDrivers []storagev1.CSIDriver
	csiNodes   []storagev1.CSINode
}

func (c nodeChecks) driverRuns() (string, []Finding) {
	var problems []Finding
	for _, n := range c.driver.nodes {
		if n.Err != nil {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("node %s gives no report: %v", n.Driver.Node, n.Err),
				Mend:    fmt.Sprintf("See kubectl -n %s logs %s -c %s", n.Driver.Namespace, n.Driver.Pod, container),
			})
		}
	}
	for _, p := range c.driver.pods {
		for _, s := range p.Status.ContainerStatuses {
			if s.Name != container && s.State.Waiting != nil {
				problems = append(problems, Finding{
					Problem: fmt.Sprintf("the container %s does not run on %s: %s", s.Name, p.Spec.NodeName, reason(s)),
					Mend:    fmt.Sprintf("See kubectl -n %s describe pod %s", p.Namespace, p.Name),
				})
			}
		}
	}
	if several := daemonSetsOf(c.daemonSets); len(several) > 1 {
		problems = append(problems, Finding{
			Problem: "several DaemonSets run the driver: " + strings.Join(several, ", "),
			Mend:    "Of deploy/csi and the operator keep one: docs/upgrade.md#from-deploycsi",
		})
	}
	return fmt.Sprintf("it runs and answers on %d of %d nodes of the cluster", len(c.driver.nodes), len(c.csiNodes)), problems
}

// reason is why a container waits, as kubelet says it.
func reason(s corev1.ContainerStatus) string {
	if s.State.Waiting == nil || s.State.Waiting.Reason == "" {
		return ""
	}
	return strings.TrimSuffix(s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
}

// daemonSetsOf are those that run the driver.
func daemonSetsOf(sets []appsv1.DaemonSet) (names []string) {
	for _, s := range sets {
		for _, one := range s.Spec.Template.Spec.Containers {
			if slices.ContainsFunc(slices.Concat(one.Command, one.Args), func(a string) bool { return strings.HasSuffix(a, "drivername="+driverName) }) {
				names = append(names, s.Namespace+"/"+s.Name)
			}
		}
	}
	return names
}

// What the driver needs of a node (README.md), and the first Kubernetes that knows policies for the rights of a node.
var (
	leastKubernetes = version.MustParseGeneric("1.25")
	leastLinux      = version.MustParseGeneric("5.12")
	firstPolicies   = version.MustParseGeneric("1.30")
)

// older reports whether what is written as a version is older than another. One that is not understood is not.
func older(written string, than *version.Version) bool {
	v, err := version.ParseGeneric(written)
	return err == nil && v.LessThan(than)
}

func (c nodeChecks) newEnough() (string, []Finding) {
	var problems []Finding
	served := map[string]bool{}
	for _, n := range c.driver.nodes {
		served[n.Driver.Node] = true
	}
	for _, n := range c.objects {
		if !served[n.Name] {
			continue
		}
		if info := n.Status.NodeInfo; older(info.KernelVersion, leastLinux) {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("%s has Linux %s, and the driver needs %s", n.Name, info.KernelVersion, leastLinux),
				Mend:    "Boot it with a newer kernel",
			})
		}
		if info := n.Status.NodeInfo; older(info.KubeletVersion, leastKubernetes) {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("%s has Kubernetes %s, and the driver needs %s", n.Name, info.KubeletVersion, leastKubernetes),
				Mend:    "Upgrade the cluster",
			})
		}
	}
	return fmt.Sprintf("their Linux is %s and their Kubernetes %s, or newer", leastLinux, leastKubernetes), problems
}

// registered: kubelet knows the driver where its registrar found kubelet's directory.
func (c nodeChecks) registered() (string, []Finding) {
	known := map[string]bool{}
	for _, n := range c.csiNodes {
		for _, d := range n.Spec.Drivers {
			known[n.Name] = known[n.Name] || d.Name == driverName
		}
	}
	var problems []Finding
	if !slices.ContainsFunc(c.csiDrivers, func(d storagev1.CSIDriver) bool { return d.Name == driverName }) {
		problems = append(problems, Finding{Problem: "the cluster has no CSIDriver " + driverName, Mend: "Apply deploy/csi again"})
	}
	for _, n := range c.driver.nodes {
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

func (d driverPods) versions() (string, []Finding) {
	images := map[string]map[string][]string{} // nodes by image by container
	for _, p := range d.pods {
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
			Mend:    "Wait for the rollout: kubectl get daemonsets --namespace=" + d.nodes[0].Driver.Namespace,
		})
	}
	var driver []string
	for image := range images[container] {
		driver = append(driver, image)
	}
	return "all nodes have " + strings.Join(driver, ", ") + " and the same sidecars", problems
}

func (d driverPods) poolsInOrder() (string, []Finding) {
	var problems []Finding
	count := 0
	for _, row := range Pools(d.nodes) {
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

func (d driverPods) quotas() (string, []Finding) {
	var problems []Finding
	by := map[string]bool{}
	for _, n := range d.nodes {
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

// blockVolumes are made where the node has loop devices.
func (d driverPods) blockVolumes() (string, []Finding) {
	var problems []Finding
	for _, n := range d.nodes {
		if n.Report.NoDevices != "" {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("none can be made on %s: %s", n.Driver.Node, n.Report.NoDevices),
				Mend:    "On the node: modprobe loop && echo loop >/etc/modules-load.d/loop.conf",
			})
		}
	}
	return "the nodes have loop devices for them", problems
}
