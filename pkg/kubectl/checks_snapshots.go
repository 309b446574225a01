package kubectl

import (
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A snapshotClass is a VolumeSnapshotClass.
type snapshotClass struct {
	metav1.ObjectMeta `json:"metadata"`
	Driver            string `json:"driver"`
}

// A snapshotContent is a VolumeSnapshotContent.
type snapshotContent struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Driver string `json:"driver"`
	} `json:"spec"`
}

const (
	// distributed has the snapshot-controller leave a snapshot to the node of its volume.
	distributed = "--enable-distributed-snapshotting"
	// managedBy is how it says which node that is.
	managedBy = "snapshot.storage.kubernetes.io/managed-by"
	// restoreWebhook has claims made from a snapshot go to its node, whatever its configuration is called.
	restoreWebhook = "restores.hostpathprovisioner.kubevirt.io"
)

// snapshotKinds are what the snapshot-controller works with.
var snapshotKinds = []string{"volumesnapshots.snapshot.storage.k8s.io", snapshotContents, snapshotClasses}

// SnapshotChecks are whether snapshots are made on the node of their volume, and restored there.
type snapshotChecks struct {
	driver      driverPods
	kinds       kinds
	deployments []appsv1.Deployment
	classes     []snapshotClass
	contents    []snapshotContent
	webhooks    []admissionv1.MutatingWebhookConfiguration
}

// findSnapshotController is the Deployment of the snapshot-controller, nil if none is to be seen, and its command line.
func findSnapshotController(deployments []appsv1.Deployment) (*appsv1.Deployment, []string) {
	for i := range deployments {
		for _, one := range deployments[i].Spec.Template.Spec.Containers {
			if strings.Contains(one.Image, "snapshot-controller") {
				return &deployments[i], slices.Concat(one.Command, one.Args)
			}
		}
	}
	return nil, nil
}

// snapshots are checked where the driver has the sidecar for them.
func (c snapshotChecks) snapshots() (string, []Finding) {
	if !c.driver.makesSnapshots() {
		return "they are not installed: docs/snapshots.md has how", nil
	}
	var problems []Finding
	for _, kind := range snapshotKinds {
		if !c.kinds.has(kind) {
			problems = append(problems, Finding{
				Problem: "the cluster does not know " + kind,
				Mend:    "Install the definitions and the snapshot-controller of external-snapshotter: docs/snapshots.md#install",
			})
		}
	}
	if len(problems) > 0 {
		return "", problems
	}
	deployment, flags := findSnapshotController(c.deployments)
	if deployment != nil && !slices.Contains(flags, distributed) && !slices.Contains(flags, distributed+"=true") {
		problems = append(problems, Finding{
			Problem: "the snapshot-controller runs without " + distributed + ", so that no node makes a snapshot",
			Mend:    fmt.Sprintf("Add that to its arguments: kubectl edit deployment --namespace=%s %s", deployment.Namespace, deployment.Name),
		})
	}
	problems = append(problems, c.snapshotObjects()...)
	if deployment == nil {
		return "no Deployment of the snapshot-controller is to be seen; where the platform runs it, it needs " + distributed, problems
	}
	return "their controller leaves them to the nodes", problems
}

// snapshotObjects are checked for what keeps a snapshot from being made.
func (c snapshotChecks) snapshotObjects() (problems []Finding) {
	if !slices.ContainsFunc(c.classes, func(s snapshotClass) bool { return s.Driver == driverName }) {
		problems = append(problems, Finding{
			Problem: "no VolumeSnapshotClass has the driver " + driverName,
			Mend:    "Apply deploy/csi/snapshots/volumesnapshotclass.yaml, or one of your own",
		})
	}
	for _, s := range c.contents {
		if _, ok := s.Labels[managedBy]; s.Spec.Driver == driverName && !ok {
			problems = append(problems, Finding{
				Problem: fmt.Sprintf("the VolumeSnapshotContent %s is of no node, so that it is neither made nor removed", s.Name),
				Mend:    fmt.Sprintf("kubectl label volumesnapshotcontent %s %s=NODE, with the node of its volume", s.Name, managedBy),
			})
		}
	}
	return problems
}

// restores find the node of their snapshot by a webhook of the operator, where there are several.
func (c snapshotChecks) restores() (string, []Finding) {
	if !c.driver.makesSnapshots() || len(c.driver.nodes) < 2 {
		return "they need nothing here", nil
	}
	for _, configured := range c.webhooks {
		if slices.ContainsFunc(configured.Webhooks, func(w admissionv1.MutatingWebhook) bool {
			return w.Name == restoreWebhook && len(w.ClientConfig.CABundle) > 0
		}) {
			return "the operator sends them to the node of their snapshot", nil
		}
	}
	return "", []Finding{{
		Problem: "claims made from a snapshot may be sent to a node that does not have it, and wait there",
		Mend:    "Install deploy/operator, also beside deploy/csi: docs/operator.md#restores-on-their-node",
	}}
}
