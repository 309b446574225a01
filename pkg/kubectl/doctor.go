package kubectl

import (
	"context"
	"slices"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
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

// DriverPods are what runs the driver, and what it reports.
type driverPods struct {
	namespace string
	pods      []corev1.Pod
	nodes     []Node
}

// reported are the nodes whose pools are known.
func (d driverPods) reported() (nodes []Node) {
	for _, n := range d.nodes {
		if n.Err == nil {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// makesSnapshots says whether the sidecar for them is deployed.
func (d driverPods) makesSnapshots() bool {
	return slices.ContainsFunc(d.pods, func(p corev1.Pod) bool { return has(p, "csi-snapshotter") })
}

// Kinds are those that a cluster has by definitions.
type kinds []metav1.PartialObjectMetadata

func (k kinds) has(kind string) bool {
	return slices.ContainsFunc(k, func(d metav1.PartialObjectMetadata) bool { return d.Name == kind })
}

// A cluster is what was read of it for the checks.
type cluster struct {
	driver      driverPods
	sets        []appsv1.DaemonSet
	members     []corev1.Node
	classes     []storagev1.StorageClass
	claims      []corev1.PersistentVolumeClaim
	drivers     []storagev1.CSIDriver
	csi         []storagev1.CSINode
	room        []storagev1.CSIStorageCapacity
	definitions []metav1.PartialObjectMetadata
	deployed    []appsv1.Deployment
	events      []corev1.Event
	pending     []corev1.Pod
	bindings    []metav1.PartialObjectMetadata
	webhooks    []admissionv1.MutatingWebhookConfiguration
	// What follows is of kinds that a cluster may lack.
	snapshotClasses []snapshotClass
	contents        []snapshotContent
	wanted          []provisionerObject
	profiles        []storageProfile
	// refused are rights that an account lacks.
	refused []right
	// unread is why something could not be read, by its name.
	unread map[string]error
}

// A reading is something of the cluster that is asked for.
type reading struct {
	name string
	ask  func() error
}

// read asks for all of it at once. What cannot be read fails only the checks that need it.
func (c *cluster) read(ctx context.Context, readings []reading) error {
	errs := make([]error, len(readings))
	free := make(chan struct{}, atOnce)
	var asked sync.WaitGroup
	for i, r := range readings {
		asked.Go(func() {
			free <- struct{}{}
			defer func() { <-free }()
			errs[i] = r.ask()
		})
	}
	asked.Wait()
	for i, r := range readings {
		if errs[i] != nil {
			c.unread[r.name] = errs[i]
		}
	}
	return ctx.Err()
}

// The names of readings.
const (
	daemonSets       = "daemonsets"
	members          = "nodes"
	classes          = "storageclasses"
	claims           = "persistentvolumeclaims"
	csiDrivers       = "csidrivers"
	csiNodes         = "csinodes"
	capacities       = "csistoragecapacities"
	definitions      = "customresourcedefinitions"
	deployments      = "deployments"
	events           = "events"
	allPods          = "pods"
	policyBindings   = "validatingadmissionpolicybindings"
	mutatingWebhooks = "mutatingwebhookconfigurations"
	snapshotClasses  = "volumesnapshotclasses.snapshot.storage.k8s.io"
	snapshotContents = "volumesnapshotcontents.snapshot.storage.k8s.io"
	provisioners     = "hostpathprovisioners.hostpathprovisioner.kubevirt.io"
	storageProfiles  = "storageprofiles.cdi.kubevirt.io"
	rights           = "rights"
)

// listing reads all objects of a kind.
func listing[T any](ctx context.Context, k Kubectl, to *[]T, kind string, more ...string) reading {
	return reading{kind, func() error { return get(ctx, k, to, kind, more...) }}
}

// A check is one thing that the documents ask of a cluster.
type check struct {
	name string
	// of are the readings that it needs.
	of  []string
	run func() (found string, problems []Finding)
}

func (c *cluster) checks() []check {
	known := kinds(c.definitions)
	nodes := nodeChecks{driver: c.driver, objects: c.members, daemonSets: c.sets, csiDrivers: c.drivers, csiNodes: c.csi}
	ofClaims := claimChecks{driver: c.driver, classes: c.classes, capacities: c.room, claims: c.claims, events: c.events, pending: c.pending}
	ofRights := rightChecks{refused: c.refused, nodes: c.members, bindings: c.bindings}
	snapshots := snapshotChecks{driver: c.driver, kinds: known, deployments: c.deployed, classes: c.snapshotClasses, contents: c.contents, webhooks: c.webhooks}
	operator := operatorChecks{driver: c.driver, kinds: known, deployments: c.deployed, provisioners: c.wanted}
	machines := machineChecks{driver: c.driver, kinds: known, classes: c.classes, profiles: c.profiles}
	return []check{
		{"driver", []string{csiNodes, daemonSets}, nodes.driverRuns},
		{"nodes", []string{members}, nodes.newEnough},
		{"registration", []string{csiNodes, csiDrivers}, nodes.registered},
		{"versions", nil, c.driver.versions},
		{"pools", nil, c.driver.poolsInOrder},
		{"quotas", nil, c.driver.quotas},
		{"block volumes", nil, c.driver.blockVolumes},
		{"StorageClass", []string{classes}, ofClaims.hasClasses},
		{"capacity", []string{classes, capacities}, ofClaims.reportsCapacity},
		{"rights", []string{rights}, ofRights.rights},
		{"policy", []string{members, policyBindings}, ofRights.policy},
		{"snapshots", []string{definitions, deployments, snapshotClasses, snapshotContents}, snapshots.snapshots},
		{"restores", []string{mutatingWebhooks}, snapshots.restores},
		{"operator", []string{definitions, deployments, provisioners}, operator.operator},
		{"virtual machines", []string{definitions, classes, storageProfiles}, machines.virtualMachines},
		{"claims", []string{claims, events, allPods, classes}, ofClaims.waiting},
	}
}

// Doctor checks what the driver needs of a cluster, and what waits for it.
func Doctor(ctx context.Context, k Kubectl, nodes []Node) ([]Finding, error) {
	pods, err := drivers(ctx, k)
	if err != nil {
		return nil, err
	}
	c := cluster{driver: driverPods{namespace: k.Namespace, pods: pods, nodes: nodes}, unread: map[string]error{}}
	if err := c.read(ctx, []reading{
		listing(ctx, k, &c.sets, daemonSets),
		listing(ctx, k, &c.members, members),
		listing(ctx, k, &c.classes, classes),
		listing(ctx, k, &c.claims, claims),
		listing(ctx, k, &c.drivers, csiDrivers),
		listing(ctx, k, &c.csi, csiNodes),
		listing(ctx, k, &c.room, capacities),
		listing(ctx, k, &c.definitions, definitions),
		listing(ctx, k, &c.deployed, deployments),
		listing(ctx, k, &c.events, events, "--field-selector=involvedObject.kind=PersistentVolumeClaim"),
		listing(ctx, k, &c.pending, allPods, "--field-selector=status.phase=Pending"),
		listing(ctx, k, &c.webhooks, mutatingWebhooks),
	}); err != nil {
		return nil, err
	}
	// What there may be depends on what was read.
	more := []reading{{rights, func() (err error) { c.refused, err = askRights(ctx, k, wantedRights(c.driver, c.deployed)); return err }}}
	if hasPolicies(c.members) {
		more = append(more, listing(ctx, k, &c.bindings, policyBindings))
	}
	for _, r := range []reading{
		listing(ctx, k, &c.snapshotClasses, snapshotClasses),
		listing(ctx, k, &c.contents, snapshotContents),
		listing(ctx, k, &c.wanted, provisioners),
		listing(ctx, k, &c.profiles, storageProfiles),
	} {
		if kinds(c.definitions).has(r.name) {
			more = append(more, r)
		}
	}
	if err := c.read(ctx, more); err != nil {
		return nil, err
	}
	var all []Finding
	for _, check := range c.checks() {
		found, problems := c.outcome(check)
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

// outcome is what a check finds, or that it cannot be made.
func (c *cluster) outcome(of check) (found string, problems []Finding) {
	for _, name := range of.of {
		if err := c.unread[name]; err != nil {
			return "", []Finding{{Problem: "not checked: " + err.Error(), Mend: "Use an account that may read this"}}
		}
	}
	return of.run()
}
