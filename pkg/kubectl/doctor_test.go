package kubectl

import (
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// healthy is a cluster in order, in which a test breaks something.
func healthy() answers {
	a := answers{
		plainPods:                       listOf(sidecars("node-a", "driver:1"), sidecars("node-b", "driver:1")),
		inspectOf("node-a"):             report(`"pools":[{"name":"local","quota":"xfs"}]`),
		inspectOf("node-b"):             report(`"pools":[{"name":"local","quota":"btrfs"}]`),
		"get storageclasses":            listOf(class("hostpath-csi", driverName, "true"), class("other", "example.com/other", "")),
		"get persistentvolumeclaims":    listOf(aClaim("bound", "hostpath-csi", "Bound"), aClaim("early", "hostpath-csi", "Pending"), aClaim("foreign", "other", "Pending")),
		"get csidrivers":                listOf(object(driverName)),
		"get csinodes":                  listOf(onNode("node-a", driverName), onNode("node-b", "other", driverName), onNode("node-c")),
		"get customresourcedefinitions": listOf(object("volumesnapshots.snapshot.storage.k8s.io")),
		"get deployments":               listOf(controller("--leader-election", distributed)),
		"get events --field-selector=involvedObject.kind=PersistentVolumeClaim": listOf(said("early", "2026-01-01T00:00:02Z", "waiting for first consumer to be created before binding"), said("foreign", "2026-01-01T00:00:00Z", "no room")),
	}
	return a
}

func object(name string) map[string]any {
	return map[string]any{"metadata": map[string]any{"name": name, "namespace": "apps"}}
}

func sidecars(node, image string) map[string]any {
	p := driverPod(node, true)
	p["spec"].(map[string]any)["containers"] = []any{map[string]any{"name": container, "image": image}, map[string]any{"name": "csi-snapshotter", "image": "snapshotter:1"}}
	return p
}

func class(name, provisioner, isDefault string) any {
	return map[string]any{"metadata": map[string]any{"name": name, "annotations": map[string]any{"storageclass.kubernetes.io/is-default-class": isDefault}}, "provisioner": provisioner}
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

func controller(arguments ...string) any {
	d := object("snapshot-controller")
	d["spec"] = map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"image": "sig-storage/snapshot-controller:v8", "args": arguments}}}}}
	return d
}

func said(claim, when, what string) any {
	return map[string]any{"involvedObject": map[string]any{"kind": "PersistentVolumeClaim", "namespace": "apps", "name": claim}, "lastTimestamp": when, "message": what}
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
	want := `CHECK          RESULT   ABOUT
driver         ok       it runs and answers on 2 of 3 nodes of the cluster
registration   ok       kubelet knows it on each of these nodes
versions       ok       all nodes have driver:1 and the same sidecars
pools          ok       2 in order
quotas         ok       sizes are kept by btrfs, xfs
StorageClass   ok       hostpath-csi; the default of the cluster is hostpath-csi
snapshots      ok       their controller leaves them to the nodes
claims         ok       1 have their volumes, and none waits but for its first pod
`
	if table.String() != want {
		t.Errorf("the table is\n%s\nwant\n%s", table.String(), want)
	}
}

func TestWhatIsMissingIsFound(t *testing.T) {
	for want, broken := range map[string]answers{
		"driver: node node-b gives no report: read its report":                              {inspectOf("node-b"): "{"},
		"registration: the cluster has no CSIDriver":                                        {"get csidrivers": listOf(object("other"))},
		"registration: kubelet on node-a does not know the driver":                          {"get csinodes": listOf(onNode("node-b", driverName))},
		"versions: driver differs: driver:1 on node-a; driver:2 on node-b":                  {plainPods: listOf(sidecars("node-a", "driver:1"), sidecars("node-b", "driver:2"))},
		"pools: pool local on node-b: it is read-only":                                      {inspectOf("node-b"): report(`"abnormal":1,"pools":[{"name":"local","quota":"xfs","abnormal":true,"condition":"it is read-only"}]`)},
		"quotas: pool local on node-b keeps no sizes: ext4 lacks prjquota":                  {inspectOf("node-b"): report(`"pools":[{"name":"local","unenforced":"ext4 lacks prjquota"}]`)},
		"StorageClass: no StorageClass has the provisioner":                                 {"get storageclasses": listOf(class("other", "example.com/other", ""))},
		"StorageClass: several are the default: hostpath-csi, other":                        {"get storageclasses": listOf(class("hostpath-csi", driverName, "true"), class("other", "example.com/other", "true"))},
		"snapshots: the cluster does not know VolumeSnapshots":                              {"get customresourcedefinitions": listOf()},
		"snapshots: the snapshot-controller runs without --enable-distributed-snapshotting": {"get deployments": listOf(controller("--enable-distributed-snapshotting=false"))},
		"claims: apps/early waits: pool \"local\" has 0 bytes to promise, 4096 are asked for": {"get events --field-selector=involvedObject.kind=PersistentVolumeClaim": listOf(
			said("early", "2026-01-01T00:00:03Z", `pool "local" has 0 bytes to promise, 4096 are asked for`), said("early", "2026-01-01T00:00:01Z", "waiting for first consumer"))},
	} {
		a := healthy()
		for name, answer := range broken {
			a[name] = answer
		}
		var problems []string
		for _, f := range findings(t, a) {
			if f.Problem != "" {
				problems = append(problems, f.Check+": "+f.Problem)
			}
			if f.Problem != "" && f.Mend == "" {
				t.Errorf("%s: nothing says what to do", f.Problem)
			}
		}
		if len(problems) == 0 || !strings.HasPrefix(problems[0], want) {
			t.Errorf("found %q, want %s", problems, want)
		}
	}
}

func TestSnapshotsThatAreNotInstalledAreNoProblem(t *testing.T) {
	a := healthy()
	a[plainPods] = listOf(driverPod("node-a", true), driverPod("node-b", true))
	a["get customresourcedefinitions"] = listOf()
	for _, f := range findings(t, a) {
		if f.Problem != "" && f.Check == "snapshots" {
			t.Errorf("found %+v", f)
		}
	}
}
