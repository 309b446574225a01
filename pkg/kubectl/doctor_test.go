package kubectl

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	account        = "--as=system:serviceaccount:storage:hostpath"
	controller     = "--as=system:serviceaccount:kube-system:snapshot-controller"
	mayProvision   = "auth can-i create persistentvolumes " + account
	mayReadNodes   = "auth can-i list nodes " + controller
	eventsOfClaims = "get events --field-selector=involvedObject.kind=PersistentVolumeClaim"
	pendingPods    = "get pods --field-selector=status.phase=Pending"
)

// healthy is a cluster in order, in which a test breaks something.
func healthy() answers {
	return answers{
		plainPods:                           listOf(sidecars("node-a", "driver:1"), sidecars("node-b", "driver:1")),
		inspectOf("node-a"):                 report(`"pools":[{"name":"local","quota":"xfs"}]`),
		inspectOf("node-b"):                 report(`"pools":[{"name":"local","quota":"btrfs"}]`),
		"get daemonsets":                    listOf(daemonSet("storage", "driver"), daemonSet("storage", "another", "--other")),
		"get nodes":                         listOf(aNode("node-a", "v1.36.1+k3s1", "6.12.0-1-amd64"), aNode("node-b", "v1.25.0", "5.14.0-427.el9.x86_64"), aNode("node-c", "v1.20.0", "4.18.0")),
		"get storageclasses":                listOf(class("hostpath-csi", driverName, "true"), class("other", "example.com/other", "")),
		"get persistentvolumeclaims":        listOf(aClaim("bound", "hostpath-csi", "Bound"), aClaim("early", "hostpath-csi", "Pending"), aClaim("foreign", "other", "Pending")),
		"get csidrivers":                    listOf(object(driverName)),
		"get csinodes":                      listOf(onNode("node-a", driverName), onNode("node-b", "other", driverName), onNode("node-c")),
		"get csistoragecapacities":          listOf(capacityOf("hostpath-csi", "node-a"), capacityOf("hostpath-csi", "node-b")),
		"get customresourcedefinitions":     listOf(object("volumesnapshots.snapshot.storage.k8s.io"), object(snapshotContents), object(snapshotClasses), object(provisioners), object(storageProfiles)),
		"get deployments":                   listOf(snapshotController("--leader-election", distributed), operatorIn("storage")),
		pendingPods:                         listOf(pendingPod("elsewhere", "foreign", "0/3 nodes are available"), pendingPod("starts", "early", "")),
		eventsOfClaims:                      listOf(said("early", "2026-01-01T00:00:02Z", "WaitForFirstConsumer", "waiting for first consumer to be created before binding"), said("foreign", "2026-01-01T00:00:00Z", "ProvisioningFailed", "no room")),
		"get mutatingwebhookconfigurations": listOf(map[string]any{"webhooks": []any{map[string]any{"name": restoreWebhook, "clientConfig": map[string]any{"caBundle": "YQ=="}}}}),
		"get " + snapshotClasses:            listOf(map[string]any{"driver": driverName}),
		"get " + snapshotContents:           listOf(content("made", driverName, "node-a"), content("foreign", "example.com/other", "")),
		"get " + provisioners:               listOf(provisioner("True", "False", "")),
		"get " + storageProfiles:            listOf(cdiProfile("Block", "csi-clone")),
		mayProvision:                        "yes",
		"auth can-i create csistoragecapacities.storage.k8s.io " + account + " --namespace=storage":            "yes",
		"auth can-i patch persistentvolumeclaims " + account + " --subresource=status":                         "yes",
		"auth can-i patch volumesnapshotcontents.snapshot.storage.k8s.io " + account + " --subresource=status": "yes",
		mayReadNodes: "yes",
	}
}

func object(name string) map[string]any {
	return map[string]any{"metadata": map[string]any{"name": name, "namespace": "apps"}}
}

func sidecars(node, image string) map[string]any {
	p := driverPod(node, true)
	p["spec"].(map[string]any)["containers"] = []any{map[string]any{"name": container, "image": image}, map[string]any{"name": "csi-snapshotter", "image": "snapshotter:1"}}
	p["spec"].(map[string]any)["serviceAccountName"] = "hostpath"
	return p
}

func class(name, provisioner, isDefault string) map[string]any {
	return map[string]any{
		"metadata":    map[string]any{"name": name, "annotations": map[string]any{"storageclass.kubernetes.io/is-default-class": isDefault}},
		"provisioner": provisioner, "parameters": map[string]any{"storagePool": "local"}, "volumeBindingMode": "WaitForFirstConsumer",
	}
}

func aClaim(name, class, phase string) any {
	c := object(name)
	c["spec"], c["status"] = map[string]any{"storageClassName": class}, map[string]any{"phase": phase}
	return c
}

func onNode(name string, drivers ...string) any {
	var all []any
	for _, d := range drivers {
		all = append(all, map[string]any{"name": d})
	}
	n := object(name)
	n["spec"] = map[string]any{"drivers": all}
	return n
}

func deployed(namespace, name, image string, arguments ...string) any {
	return map[string]any{
		"metadata": map[string]any{"name": name, "namespace": namespace},
		"spec": map[string]any{"template": map[string]any{"spec": map[string]any{
			"serviceAccountName": name, "containers": []any{map[string]any{"image": image, "args": arguments}},
		}}},
	}
}

func snapshotController(arguments ...string) any {
	return deployed("kube-system", "snapshot-controller", "sig-storage/snapshot-controller:v8", arguments...)
}

func operatorIn(namespace string) any {
	return deployed(namespace, "operator", "example.com/hostpath-provisioner-operator:v1")
}

func daemonSet(namespace, name string, arguments ...string) any {
	if arguments == nil {
		arguments = []string{"--v=2", "--drivername=" + driverName}
	}
	return deployed(namespace, name, "driver:1", arguments...)
}

func aNode(name, kubelet, kernel string) any {
	n := object(name)
	n["status"] = map[string]any{"nodeInfo": map[string]any{"kubeletVersion": kubelet, "kernelVersion": kernel}}
	return n
}

func capacityOf(class, node string) any {
	c := object(class + node)
	c["metadata"].(map[string]any)["namespace"] = "storage"
	c["storageClassName"], c["nodeTopology"] = class, map[string]any{"matchLabels": map[string]any{topologyKey: node}}
	return c
}

func content(name, driver, node string) any {
	c := object(name)
	c["spec"] = map[string]any{"driver": driver}
	if node != "" {
		c["metadata"].(map[string]any)["labels"] = map[string]any{managedBy: node}
	}
	return c
}

func provisioner(available, degraded, message string) any {
	p := object("hostpath-provisioner")
	p["status"] = map[string]any{"conditions": []any{
		map[string]any{"type": "Available", "status": available, "message": message}, map[string]any{"type": "Degraded", "status": degraded, "message": message},
		map[string]any{"type": "Progressing", "status": "True"},
	}}
	return p
}

// cdiProfile is one that an administrator has set, or CDI alone if the mode is empty.
func cdiProfile(mode, clones string) any {
	p := object("hostpath-csi")
	sets := func(mode string) any {
		return []any{map[string]any{"accessModes": []any{"ReadWriteOnce"}, "volumeMode": mode}}
	}
	p["spec"], p["status"] = map[string]any{}, map[string]any{"claimPropertySets": sets("Filesystem"), "cloneStrategy": clones}
	if mode != "" {
		p["spec"] = map[string]any{"claimPropertySets": sets(mode)}
	}
	return p
}

func said(claim, when, reason, what string) any {
	kind := "Normal"
	if reason == "ProvisioningFailed" {
		kind = "Warning"
	}
	return map[string]any{"type": kind, "reason": reason, "involvedObject": map[string]any{"kind": "PersistentVolumeClaim", "namespace": "apps", "name": claim}, "lastTimestamp": when, "message": what}
}

// pendingPod is one that no node takes, or that starts if nothing is said of it.
func pendingPod(name, claim, said string) any {
	p := object(name)
	p["spec"] = map[string]any{"volumes": []any{
		map[string]any{"name": "other", "emptyDir": map[string]any{}},
		map[string]any{"name": "scratch", "ephemeral": map[string]any{}},
		map[string]any{"name": "data", "persistentVolumeClaim": map[string]any{"claimName": claim}},
	}}
	scheduled := map[string]any{"type": "PodScheduled", "status": "True"}
	if said != "" {
		scheduled = map[string]any{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
	}
	p["status"] = map[string]any{"phase": "Pending", "conditions": []any{scheduled}}
	return p
}

func findings(t *testing.T, a answers) []Finding {
	t.Helper()
	k := a.kubectl(t)
	found, err := Doctor(t.Context(), k, nodesOf(t, a))
	must.Succeed(t, err)
	return found
}

func TestClusterInOrder(t *testing.T) {
	var table strings.Builder
	must.Succeed(t, WriteTable(&table, FindingHeadings, findings(t, healthy())))
	want := `CHECK              RESULT   ABOUT
driver             ok       it runs and answers on 2 of 3 nodes of the cluster
nodes              ok       their Linux is 5.12 and their Kubernetes 1.25, or newer
registration       ok       kubelet knows it on each of these nodes
versions           ok       all nodes have driver:1 and the same sidecars
pools              ok       2 in order
quotas             ok       sizes are kept by btrfs, xfs
block volumes      ok       the nodes have loop devices for them
StorageClass       ok       hostpath-csi; the default of the cluster is hostpath-csi
capacity           ok       the scheduler knows that of each node
rights             ok       the accounts have theirs
policy             ok       Kubernetes before 1.30 knows none: root on a node has the rights of the driver everywhere
snapshots          ok       their controller leaves them to the nodes
restores           ok       the operator sends them to the node of their snapshot
operator           ok       it is installed, with 1 HostPathProvisioners in order
virtual machines   ok       CDI has profiles for these classes that fit
claims             ok       1 have their volumes, and none waits but for its first pod
`
	if table.String() != want {
		t.Errorf("the table is\n%s\nwant\n%s", table.String(), want)
	}
}

func TestWhatIsMissingIsFound(t *testing.T) {
	secret := class("hostpath-csi", driverName, "")
	secret["parameters"].(map[string]any)["csi.storage.k8s.io/node-publish-secret-name"] = "key"
	unknown := class("hostpath-csi", driverName, "")
	unknown["parameters"] = map[string]any{"storagePool": "fast"}
	crashing := sidecars("node-b", "driver:1")
	crashing["status"].(map[string]any)["containerStatuses"] = append(crashing["status"].(map[string]any)["containerStatuses"].([]any),
		map[string]any{"name": "csi-provisioner", "state": map[string]any{"waiting": map[string]any{"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}})
	shared := report(`"pools":[{"name":"local","quota":"xfs","shared":true}]`)
	newer := listOf(aNode("node-a", "v1.36.0", "6.1.0"), aNode("node-b", "v1.30.0", "6.1.0"))
	broken := map[string]answers{
		"driver: node node-b gives no report: read its report":                                                                 {inspectOf("node-b"): "{"},
		"driver: the container csi-provisioner does not run on node-b: CrashLoopBackOff: back-off 5m0s":                        {plainPods: listOf(sidecars("node-a", "driver:1"), crashing)},
		"driver: several DaemonSets run the driver: storage/driver, other/driver":                                              {"get daemonsets": listOf(daemonSet("storage", "driver"), daemonSet("other", "driver"))},
		"nodes: node-a has Linux 5.4.0-100-generic, and the driver needs 5.12":                                                 {"get nodes": listOf(aNode("node-a", "v1.29.0", "5.4.0-100-generic"))},
		"nodes: node-b has Kubernetes v1.24.9, and the driver needs 1.25":                                                      {"get nodes": listOf(aNode("node-b", "v1.24.9", "6.1.0"))},
		"nodes: not checked: list nodes: exit status 1":                                                                        {"get nodes": "no"},
		"registration: the cluster has no CSIDriver":                                                                           {"get csidrivers": listOf(object("other"))},
		"registration: kubelet on node-a does not know the driver":                                                             {"get csinodes": listOf(onNode("node-b", driverName))},
		"versions: driver differs: driver:1 on node-a; driver:2 on node-b":                                                     {plainPods: listOf(sidecars("node-a", "driver:1"), sidecars("node-b", "driver:2"))},
		"pools: pool local on node-b: it is read-only":                                                                         {inspectOf("node-b"): report(`"abnormal":1,"pools":[{"name":"local","quota":"xfs","abnormal":true,"condition":"it is read-only"}]`)},
		"quotas: pool local on node-b keeps no sizes: ext4 lacks prjquota":                                                     {inspectOf("node-b"): report(`"pools":[{"name":"local","unenforced":"ext4 lacks prjquota"}]`)},
		"block volumes: none can be made on node-a: the module loop is missing":                                                {inspectOf("node-a"): report(`"pools":[{"name":"local","quota":"xfs"}],"noDevices":"the module loop is missing"`)},
		"StorageClass: no StorageClass has the provisioner":                                                                    {"get storageclasses": listOf(class("other", "example.com/other", ""))},
		"StorageClass: several are the default: hostpath-csi, other":                                                           {"get storageclasses": listOf(class("hostpath-csi", driverName, "true"), class("other", "example.com/other", "true"))},
		`StorageClass: hostpath-csi is for the pool "fast", which no node has`:                                                 {"get storageclasses": listOf(unknown)},
		"StorageClass: hostpath-csi names a Secret, and such volumes are refused":                                              {"get storageclasses": listOf(secret)},
		"capacity: none is known of hostpath-csi on node-b, so that no claim goes there":                                       {"get csistoragecapacities": listOf(capacityOf("hostpath-csi", "node-a"), capacityOf("other", "node-b"))},
		"rights: storage:hostpath may not create persistentvolumes, so that no volume":                                         {mayProvision: "no"},
		"rights: kube-system:snapshot-controller may not list nodes, so that no node makes":                                    {mayReadNodes: "no - for a reason"},
		"rights: not checked: ask for the rights of storage:hostpath: the answer is":                                           {mayProvision: "what"},
		"policy: root on a node has the rights of the driver everywhere":                                                       {"get nodes": newer, "get " + policyBindings: listOf(object("another"))},
		"snapshots: the cluster does not know volumesnapshots":                                                                 {"get customresourcedefinitions": listOf(object(snapshotClasses), object(snapshotContents))},
		"snapshots: the snapshot-controller runs without --enable-distributed-snapshotting":                                    {"get deployments": listOf(snapshotController("--enable-distributed-snapshotting=false"))},
		"snapshots: no VolumeSnapshotClass has the driver":                                                                     {"get " + snapshotClasses: listOf(map[string]any{"driver": "other"})},
		"snapshots: the VolumeSnapshotContent early is of no node":                                                             {"get " + snapshotContents: listOf(content("early", driverName, ""))},
		"restores: claims made from a snapshot may be sent to a node that does not have it":                                    {"get mutatingwebhookconfigurations": listOf(map[string]any{"webhooks": []any{map[string]any{"name": restoreWebhook}}})},
		"operator: HostPathProvisioner hostpath-provisioner is Available=False: no node":                                       {"get " + provisioners: listOf(provisioner("False", "False", "no node."))},
		"operator: HostPathProvisioner hostpath-provisioner is Degraded=True: it crashes":                                      {"get " + provisioners: listOf(provisioner("True", "True", "it crashes."))},
		"operator: it is in the namespace elsewhere and the driver in storage":                                                 {"get deployments": listOf(snapshotController(distributed), operatorIn("elsewhere"))},
		"virtual machines: CDI has no StorageProfile for hostpath-csi":                                                         {"get " + storageProfiles: listOf()},
		"virtual machines: the StorageProfile hostpath-csi is left to CDI, which makes disks as Filesystem and clones by copy": {"get " + storageProfiles: listOf(cdiProfile("", ""))},
		"virtual machines: the StorageProfile hostpath-csi is left to CDI, with which no virtual machine of this shared pool":  {"get " + storageProfiles: listOf(cdiProfile("", "")), inspectOf("node-a"): shared},
		"virtual machines: the StorageProfile hostpath-csi asks for clones or snapshots, which shared pools":                   {inspectOf("node-a"): shared},
		"claims: apps/early waits for the pod db-0, which no node takes: 0/2 nodes are available: 2 node(s) did not have enough free storage": {
			eventsOfClaims: listOf(said("early", "2026-01-01T00:00:03Z", "WaitForPodScheduled", "waiting for pod db-0 to be scheduled")),
			pendingPods:    listOf(pendingPod("db-0", "early", "0/2 nodes are available: 2 node(s) did not have enough free storage."))},
		"claims: apps/db-0-scratch waits for the pod db-0, which no node takes: 0/2 nodes are available": {
			"get persistentvolumeclaims": listOf(aClaim("db-0-scratch", "hostpath-csi", "Pending")),
			pendingPods:                  listOf(pendingPod("db-0", "early", "0/2 nodes are available"))},
		"claims: apps/early waits: pool \"local\" has 0 bytes to promise, 4096 are asked for": {eventsOfClaims: listOf(
			said("early", "2026-01-01T00:00:03Z", "ExternalProvisioning", "Waiting for a volume to be created either by the external provisioner or manually"),
			said("early", "2026-01-01T00:00:02Z", "ProvisioningFailed", `pool "local" has 0 bytes to promise, 4096 are asked for`),
			said("early", "2026-01-01T00:00:01Z", "WaitForFirstConsumer", "waiting for first consumer"))},
		"claims: apps/early waits: Waiting for a volume to be created either by the external provisioner": {eventsOfClaims: listOf(
			said("early", "2026-01-01T00:00:03Z", "ExternalProvisioning", "Waiting for a volume to be created either by the external provisioner or manually"))},
	}
	for len(broken) > 0 {
		a, wants := severalOf(broken)
		problems := map[string]string{} // the first of each check
		for _, f := range findings(t, a) {
			if f.Problem != "" && problems[f.Check] == "" {
				problems[f.Check] = f.Check + ": " + f.Problem
			}
			if f.Problem != "" && f.Mend == "" {
				t.Errorf("%s: nothing says what to do", f.Problem)
			}
		}
		for check, want := range wants {
			if !strings.HasPrefix(problems[check], want) {
				t.Errorf("found %q, want %s", problems, want)
			}
		}
	}
}

// severalOf takes what may be wrong of one cluster at once, and is found by different checks: reading a cluster takes a score of processes.
func severalOf(broken map[string]answers) (a answers, wants map[string]string) {
	a, wants = healthy(), map[string]string{}
	// Many checks go by these.
	basic := func(name string) bool {
		return slices.Contains([]string{plainPods, inspectOf("node-b"), "get storageclasses", "get customresourcedefinitions"}, name)
	}
	changed := map[string]bool{}
	for _, want := range slices.Sorted(maps.Keys(broken)) {
		check, _, _ := strings.Cut(want, ":")
		names := slices.Collect(maps.Keys(broken[want]))
		alone := slices.ContainsFunc(names, basic)
		if wants[check] != "" || alone && len(wants) > 0 || slices.ContainsFunc(names, func(name string) bool { return changed[name] }) {
			continue
		}
		for _, name := range names {
			a[name], changed[name] = broken[want][name], true
		}
		wants[check] = want
		delete(broken, want)
		if alone {
			break
		}
	}
	return a, wants
}

func TestSnapshotsThatAreNotInstalledAreNoProblem(t *testing.T) {
	a := healthy()
	a[plainPods] = listOf(driverPod("node-a", true), driverPod("node-b", true))
	a["get customresourcedefinitions"] = listOf()
	a["get mutatingwebhookconfigurations"] = listOf()
	for _, f := range findings(t, a) {
		if f.Problem != "" && (f.Check == "snapshots" || f.Check == "restores" || f.Check == "virtual machines") {
			t.Errorf("found %+v", f)
		}
	}
}

// CDI would wait for ever for golden images that are to be snapshots.
func TestProfileIsCompletedWithoutSnapshotsWhereThereAreNone(t *testing.T) {
	for name, pods := range map[string]any{"snapshots": healthy()[plainPods], "none": listOf(driverPod("node-a", true), driverPod("node-b", true))} {
		t.Run(name, func(t *testing.T) {
			a := healthy()
			a[plainPods], a["get "+storageProfiles] = pods, listOf(cdiProfile("", ""))
			for _, f := range findings(t, a) {
				if f.Check == "virtual machines" && strings.Contains(f.Mend, `"dataImportCronSourceFormat":"snapshot"`) != (name == "snapshots") {
					t.Errorf("it is mended by %s", f.Mend)
				}
			}
		})
	}
}

func TestPolicyIsThere(t *testing.T) {
	a := healthy()
	a["get nodes"] = listOf(aNode("node-a", "v1.36.0", "6.1.0"), aNode("node-b", "v1.30.0", "6.1.0"))
	a["get "+policyBindings] = listOf(object("hostpath-csi-node"))
	for _, f := range findings(t, a) {
		if f.Problem != "" {
			t.Errorf("found %+v", f)
		}
	}
}
