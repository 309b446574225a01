package kubectl

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// aVolume is a PersistentVolume of the driver on node-a that a claim is bound to.
func aVolume(claim, size string) map[string]any {
	return map[string]any{
		"metadata": map[string]any{"name": "pv-" + claim},
		"spec": map[string]any{
			"storageClassName": "local", "capacity": map[string]any{"storage": size},
			"claimRef": map[string]any{"namespace": "apps", "name": claim},
			"csi":      map[string]any{"driver": driverName, "volumeHandle": "pv-" + claim},
			"nodeAffinity": map[string]any{"required": map[string]any{"nodeSelectorTerms": []any{map[string]any{"matchExpressions": []any{
				map[string]any{"key": topologyKey, "operator": "In", "values": []any{"node-a"}},
			}}}}},
		},
		"status": map[string]any{"phase": "Bound"},
	}
}

// aUser is a pod that uses a claim. A controller makes it again.
func aUser(name, claim string) map[string]any {
	return map[string]any{
		"metadata": map[string]any{"namespace": "apps", "name": name, "ownerReferences": []any{map[string]any{"kind": "StatefulSet", "name": "db", "controller": true}}},
		"spec":     map[string]any{"volumes": []any{map[string]any{"name": "data", "persistentVolumeClaim": map[string]any{"claimName": claim}}}},
	}
}

func with(object map[string]any, part, key string, value any) map[string]any {
	to, ok := object[part].(map[string]any)
	if !ok {
		to = map[string]any{}
		object[part] = to
	}
	to[key] = value
	return object
}

// anotherOf has a PersistentVolume lead to what that of another claim does.
func anotherOf(volume map[string]any, claim string) map[string]any {
	volume["spec"].(map[string]any)["csi"] = map[string]any{"driver": driverName, "volumeHandle": "pv-" + claim}
	return volume
}

func aCapacity(node, size string) any {
	return map[string]any{
		"metadata": map[string]any{"name": node}, "storageClassName": "local", "capacity": size,
		"nodeTopology": map[string]any{"matchLabels": map[string]any{topologyKey: node}},
	}
}

func TestPlanOfDrain(t *testing.T) {
	ofPod := map[string]any{"metadata": map[string]any{"namespace": "apps", "name": "of-pod", "ownerReferences": []any{map[string]any{"kind": "Pod", "name": "web"}}}}
	released := with(aVolume("released", "1Gi"), "status", "phase", "Released")
	moves := aMove("moves-1", "moves", map[string]any{"phase": "Removing", "sourceNode": "node-a", "targetNode": "node-b", "volume": "pv-moves", "volumeHandle": "pv-moves"})
	alone := aUser("alone", "alone")
	delete(alone["metadata"].(map[string]any), "ownerReferences")
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(moves),
		"get persistentvolumes": listOf(
			aVolume("first", "3Gi"), aVolume("second", "3Gi"), aVolume("third", "3Gi"), aVolume("alone", "1Gi"), aVolume("pinned", "1Gi"), aVolume("snapped", "1Gi"),
			aVolume("machine", "1Gi"), aVolume("plugged", "1Gi"), aVolume("of-pod", "1Gi"), released,
			with(aVolume("shared", "1Gi"), "spec", "nodeAffinity", nil), aVolume("upstream", "1Ti"),
			aVolume("twice", "1Gi"), anotherOf(aVolume("again", "1Gi"), "twice"), aVolume("everywhere", "1Gi"), with(anotherOf(aVolume("anywhere", "1Gi"), "everywhere"), "spec", "nodeAffinity", nil),
		),
		"get persistentvolumeclaims": listOf(ofPod, map[string]any{
			"metadata": map[string]any{"namespace": "apps", "name": "upstream"},
			"spec":     map[string]any{"resources": map[string]any{"requests": map[string]any{"storage": "1Gi"}}},
		}),
		"get pods": listOf(
			aUser("db-0", "first"), alone,
			with(aUser("web-0", "pinned"), "spec", "nodeSelector", map[string]any{"kubernetes.io/hostname": "node-a"}),
			with(aUser("virt-launcher-vm", "machine"), "metadata", "labels", map[string]any{"kubevirt.io": "virt-launcher"}),
			with(aUser("hp-volume-abcde", "plugged"), "metadata", "labels", map[string]any{"kubevirt.io": "hotplug-disk"}),
			with(aUser("gone", "second"), "status", "phase", "Succeeded"),
		),
		"get csistoragecapacities": listOf(aCapacity("node-a", "1Ti"), aCapacity("node-b", "4Gi"), aCapacity("node-c", "5Gi")),
		"get nodes":                listOf(),
		"get storageclasses":       listOf(),
	}
	node := Node{Driver: Driver{Node: "node-a"}, Report: Report{Pools: []Pool{{Snapshots: []Snapshot{
		{Source: "pv-snapped"}, {Source: "pv-snapped"}, {Source: "pv-deleted"}, {Source: "pv-moves"}, // which has a reference
	}}}}}
	got := map[string]string{}
	plan, err := PlanDrain(t.Context(), a.kubectl(t), node, MoveOptions{Evict: true})
	must.Succeed(t, err)
	for _, p := range plan {
		got[p.Volume] = p.To + p.Problem
	}
	want := map[string]string{
		"pv-first": "node-c", "pv-second": "node-b", "pv-third": "no other node has room for it",
		"pv-alone":      "no controller makes pod alone again: delete it, or use --force",
		"pv-pinned":     "pod web-0 may run on node node-a only, by its nodeSelector",
		"pv-snapped":    "it has 2 snapshots, which stay on the node: delete them, or use --leave-snapshots",
		"pv-machine":    "a virtual machine runs on it: stop it, or have KubeVirt migrate the volume (docs/kubevirt.md)",
		"pv-plugged":    "a virtual machine runs on it: stop it, or have KubeVirt migrate the volume (docs/kubevirt.md)", // without a restart, by a pod beside its own
		"pv-of-pod":     "it is deleted with its pod: delete the pod",
		"pv-upstream":   "node-c", // which needs what its claim asks for: the upstream driver has given it the size of the disk
		"pv-released":   "it is bound to no claim: delete the PersistentVolume, or let a claim use it",
		"pv-deleted":    "1 snapshots of the volume pv-deleted, which is not there, stay on the node: delete them, or use --leave-snapshots",
		"pv-moves":      "node-b",
		"pv-twice":      "the PersistentVolume pv-again leads to it, too: keep one of the two, and delete the other once its policy is Retain",
		"pv-again":      "the PersistentVolume pv-twice leads to it, too: keep one of the two, and delete the other once its policy is Retain",
		"pv-everywhere": "the PersistentVolume pv-anywhere leads to it, too: keep one of the two, and delete the other once its policy is Retain",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	one, err := PlanMove(t.Context(), a.kubectl(t), "apps", "first", MoveOptions{Target: "node-b"})
	if err != nil || len(one) != 1 || one[0].To != "node-b" || one[0].Problem != "" {
		t.Errorf("the plan of one is %+v, %v", one, err)
	}
	if one, err := PlanMove(t.Context(), a.kubectl(t), "apps", "first", MoveOptions{Target: "node-d"}); err != nil || one[0].Problem != "node node-d has no room for it" {
		t.Errorf("the plan for a node without room is %+v, %v", one, err)
	}
	for _, claim := range []string{"none", "shared"} {
		if _, err := PlanMove(t.Context(), a.kubectl(t), "apps", claim, MoveOptions{}); err == nil {
			t.Errorf("claim %s is planned", claim)
		}
	}
}

// The classes of one pool have its room together.
func TestPlanOfClassesOfOnePool(t *testing.T) {
	class := func(name, pool string) any {
		return map[string]any{"metadata": map[string]any{"name": name}, "parameters": map[string]any{"storagePool": pool}}
	}
	room := func(class string) any {
		c := aCapacity("node-b", "4Gi").(map[string]any)
		c["storageClassName"] = class
		return c
	}
	together := aUser("db-0", "data")
	with(together, "spec", "volumes", append(together["spec"].(map[string]any)["volumes"].([]any), map[string]any{"name": "logs", "persistentVolumeClaim": map[string]any{"claimName": "logs"}}))
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(),
		"get persistentvolumes": listOf(
			aVolume("data", "2Gi"), inClass(aVolume("logs", "3Gi"), "kept"), aVolume("one", "3Gi"), inClass(aVolume("other", "4Gi"), "other"), inClass(aVolume("second", "2Gi"), "kept"),
		),
		"get persistentvolumeclaims": listOf(),
		"get pods":                   listOf(together),
		"get csistoragecapacities":   listOf(room("local"), room("kept"), room("other")),
		"get nodes":                  listOf(),
		"get storageclasses":         listOf(class("local", "pool"), class("kept", "pool"), class("other", "another")),
	}
	plan, err := PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
	must.Succeed(t, err)
	got := map[string]string{}
	for _, p := range plan {
		got[p.Claim] = p.To + p.Problem
	}
	const full = "no other node has room for it"
	if diff := cmp.Diff(map[string]string{"data": full, "logs": full, "one": "node-b", "other": "node-b", "second": full}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A move that has begun has had its room promised: the same command follows it, and takes the volumes of its pods to the same node. Until it has
// ended, the node may have the last copy, also where the PersistentVolume leads to another.
func TestPlanOfMovesThatHaveBegun(t *testing.T) {
	begun := func(claim, phase, from, to string) any {
		status := says(phase, "goes on")
		status["volume"], status["sourceNode"], status["targetNode"] = "pv-"+claim, from, to
		return aMove(claim+"-1", claim, status)
	}
	both := aUser("db-0", "data")
	with(both, "spec", "volumes", append(both["spec"].(map[string]any)["volumes"].([]any), map[string]any{"name": "logs", "persistentVolumeClaim": map[string]any{"claimName": "logs"}}))
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(
			begun("data", "Copying", "node-a", "node-b"), begun("moved", "Removing", "node-a", "node-b"), begun("switches", "Switching", "node-a", "node-b"),
			begun("comes", "Copying", "node-b", "node-a"), begun("returns", "Undoing", "node-a", "node-b"), begun("has-come", "Removing", "node-b", "node-a"),
			begun("stays-away", "Undoing", "node-b", "node-a"), begun("elsewhere", "Copying", "node-b", "node-c"), begun("ended", "Succeeded", "node-a", "node-b"),
		),
		"get persistentvolumes":      listOf(aVolume("data", "6Gi"), aVolume("logs", "2Gi"), aVolume("has-come", "1Gi")),
		"get persistentvolumeclaims": listOf(),
		"get pods":                   listOf(both),
		"get csistoragecapacities":   listOf(aCapacity("node-b", "4Gi"), aCapacity("node-c", "5Gi")),
		"get nodes":                  listOf(),
		"get storageclasses":         listOf(),
	}
	plan, err := PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
	must.Succeed(t, err)
	got, groups := map[string]string{}, map[string]int{}
	for _, p := range plan {
		if got[p.Claim] = p.Problem; p.Problem == "" {
			got[p.Claim] = p.To + " " + string(p.move)
		}
		groups[p.Claim] = p.group
	}
	if groups["data"] == 0 || groups["data"] != groups["logs"] { // which data waits for
		t.Errorf("the groups are %v", groups)
	}
	want := map[string]string{
		"data": "node-b uid-data-1", "logs": "node-b ", "moved": "node-b uid-moved-1", "switches": "node-b uid-switches-1", "has-come": "node-c ",
		"comes":   "the VolumeMove comes-1 brings it here: drain the node again when it has ended",
		"returns": "the VolumeMove returns-1 brings it here: drain the node again when it has ended",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func inClass(volume map[string]any, class string) map[string]any {
	return with(volume, "spec", "storageClassName", class)
}

func aPlace(name string, spec map[string]any) any {
	return map[string]any{"metadata": map[string]any{"name": name, "labels": map[string]any{"kubernetes.io/hostname": name, "disk": name}}, "spec": spec}
}

// A volume goes where its pods may run: to no cordoned node, and to none that they do not select or tolerate.
func TestPlanAsksWherePodsMayRun(t *testing.T) {
	disk := func(name string) any {
		return map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{"nodeSelectorTerms": []any{
			map[string]any{"matchExpressions": []any{map[string]any{"key": "disk", "operator": "NotIn", "values": []any{name}}}},
		}}}}
	}
	apart := map[string]any{"podAntiAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": []any{
		map[string]any{"labelSelector": map[string]any{"matchLabels": map[string]any{"app": "apart"}}, "topologyKey": "kubernetes.io/hostname"},
	}}}
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(),
		"get persistentvolumes": listOf(
			aVolume("free", "1Gi"), aVolume("bound", "1Gi"), aVolume("selects", "1Gi"), aVolume("unused", "1Gi"), aVolume("apart", "1Gi"),
			inClass(aVolume("limited", "1Gi"), "limited"),
		),
		"get storageclasses": listOf(map[string]any{
			"metadata":          map[string]any{"name": "limited"},
			"allowedTopologies": []any{map[string]any{"matchLabelExpressions": []any{map[string]any{"key": topologyKey, "values": []any{"node-a", "node-d"}}}}},
		}),
		"get persistentvolumeclaims": listOf(),
		"get pods": listOf(
			with(aUser("free-0", "free"), "spec", "tolerations", []any{map[string]any{"operator": "Exists"}}),
			with(aUser("bound-0", "bound"), "spec", "affinity", disk("node-c")),
			with(aUser("selects-0", "selects"), "spec", "nodeSelector", map[string]any{"disk": "node-c"}),
			with(aUser("apart-0", "apart"), "spec", "affinity", apart),
			with(with(aUser("apart-1", "another"), "spec", "nodeName", "node-c"), "metadata", "labels", map[string]any{"app": "apart"}),
		),
		"get csistoragecapacities": listOf(aCapacity("node-a", "1Ti"), aCapacity("node-b", "90Gi"), aCapacity("node-c", "50Gi"), aCapacity("node-d", "70Gi")),
		"get nodes": listOf(
			aPlace("node-a", map[string]any{"unschedulable": true}), aPlace("node-b", map[string]any{"unschedulable": true}), aPlace("node-c", nil),
			aPlace("node-d", map[string]any{"taints": []any{map[string]any{"key": "own", "effect": "NoSchedule"}}}),
		),
	}
	plan, err := PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
	must.Succeed(t, err)
	got := map[string]string{}
	for _, p := range plan {
		got[p.Claim] = p.To + p.Problem
	}
	want := map[string]string{
		"free": "node-d", "selects": "node-c", "unused": "node-c",
		"bound": "no other node has room for it, and node node-b is cordoned, and pod bound-0 does not tolerate the taint own of node node-d, and " +
			"pod bound-0 may not run on node node-c by its node selector or affinity",
		"apart": "no other node has room for it, and node node-b is cordoned, and pod apart-0 does not tolerate the taint own of node node-d, and " +
			"pod apart-0 may not run on node node-c, by the anti-affinity to pod apart-1",
		"limited": "no other node can take it, and node node-b is not in the topologies that the StorageClass limited allows, and " +
			"node node-c is not in the topologies that the StorageClass limited allows, and " +
			"node node-d has the taint own",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if one, err := PlanMove(t.Context(), a.kubectl(t), "apps", "free", MoveOptions{Target: "node-b"}); err != nil || one[0].Problem != "node node-b is cordoned" {
		t.Errorf("the plan for a cordoned node is %+v, %v", one, err)
	}
}

// The volumes of one pod go to one node, or none of them does.
func TestPlanOfVolumesOfOnePod(t *testing.T) {
	both := func(name, one, other string) map[string]any {
		pod := aUser(name, one)
		volumes := pod["spec"].(map[string]any)["volumes"].([]any)
		return with(pod, "spec", "volumes", append(volumes, map[string]any{"name": "other", "persistentVolumeClaim": map[string]any{"claimName": other}}))
	}
	moved := aVolume("moved", "1Gi")
	values := moved["spec"].(map[string]any)["nodeAffinity"].(map[string]any)["required"].(map[string]any)["nodeSelectorTerms"].([]any)[0]
	values.(map[string]any)["matchExpressions"].([]any)[0].(map[string]any)["values"] = []any{"node-b"}
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(),
		"get persistentvolumes": listOf(
			aVolume("data", "2Gi"), aVolume("logs", "3Gi"), aVolume("after", "1Gi"), moved, aVolume("kept", "1Gi"), aVolume("with-kept", "1Gi"), aVolume("single", "1Gi"),
		),
		"get persistentvolumeclaims": listOf(),
		"get pods": listOf(
			both("db-0", "data", "logs"), both("web-0", "after", "moved"), both("app-0", "with-kept", "kept"), aUser("one-0", "single"),
			with(aUser("vm", "kept"), "metadata", "labels", map[string]any{"kubevirt.io": "virt-launcher"}),
		),
		"get csistoragecapacities": listOf(aCapacity("node-a", "1Ti"), aCapacity("node-b", "6Gi"), aCapacity("node-c", "4Gi")),
		"get nodes":                listOf(),
		"get storageclasses":       listOf(),
	}
	want := map[string]string{
		"after": "node-b", "data": "node-b", "logs": "node-b", "single": "node-c",
		"kept": "a virtual machine runs on it: stop it, or have KubeVirt migrate the volume (docs/kubevirt.md)", "with-kept": "pods use the claim kept too, which stays",
	}
	for _, of := range []string{"", "data", "logs", "after", "with-kept"} {
		var plan []Planned
		var err error
		if of == "" {
			plan, err = PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
		} else {
			plan, err = PlanMove(t.Context(), a.kubectl(t), "apps", of, MoveOptions{Evict: true})
		}
		must.Succeed(t, err)
		counts := map[string]int{"": len(want), "data": 2, "logs": 2, "after": 1, "with-kept": 2}
		if len(plan) != counts[of] || of != "" && plan[0].Claim != of {
			t.Errorf("for %q the plan is %+v", of, plan)
		}
		for _, p := range plan {
			if got := p.To + p.Problem; got != want[p.Claim] {
				t.Errorf("for %q claim %s gets %q, want %q", of, p.Claim, got, want[p.Claim])
			}
		}
	}
	if plan, err := PlanMove(t.Context(), a.kubectl(t), "apps", "after", MoveOptions{Target: "node-c"}); err != nil || plan[0].Problem != "pods use a volume on node node-b too" {
		t.Errorf("away from a volume on another node the plan is %+v, %v", plan, err)
	}
}

// What a StatefulSet that is scaled to zero would use together goes to one node, as the volumes of a pod.
func TestPlanOfStatefulSetWithoutPods(t *testing.T) {
	named := func(name string) any {
		return map[string]any{"metadata": map[string]any{"namespace": "apps", "name": name}}
	}
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(),
		"get persistentvolumes":                           listOf(aVolume("data-db-0", "2Gi"), aVolume("logs-db-0", "3Gi"), aVolume("data-db-1", "4Gi")),
		"get persistentvolumeclaims":                      listOf(named("data-db-0"), named("logs-db-0"), named("data-db-1")),
		"get statefulsets": listOf(map[string]any{
			"metadata": map[string]any{"namespace": "apps", "name": "db"},
			"spec":     map[string]any{"replicas": 0, "volumeClaimTemplates": []any{map[string]any{"metadata": map[string]any{"name": "data"}}, map[string]any{"metadata": map[string]any{"name": "logs"}}}},
		}),
		"get pods":                 listOf(),
		"get csistoragecapacities": listOf(aCapacity("node-b", "6Gi"), aCapacity("node-c", "4Gi")),
		"get nodes":                listOf(),
		"get storageclasses":       listOf(),
	}
	drained, err := PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
	must.Succeed(t, err)
	moved, err := PlanMove(t.Context(), a.kubectl(t), "apps", "logs-db-0", MoveOptions{Evict: true})
	must.Succeed(t, err)
	got := []string{}
	for _, p := range append(drained, moved...) {
		got = append(got, p.Claim+" "+p.To+p.Problem)
	}
	want := []string{"data-db-0 node-b", "data-db-1 node-c", "logs-db-0 node-b", "logs-db-0 node-b", "data-db-0 node-b"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func aMove(name, claim string, status map[string]any) any {
	return map[string]any{
		"metadata": map[string]any{"namespace": "apps", "name": name, "uid": "uid-" + name},
		"spec":     map[string]any{"claimName": claim, "snapshots": "Refuse", "when": "Unpublished", "verify": "All"}, "status": status,
	}
}

func says(phase, message string) map[string]any {
	return map[string]any{"phase": phase, "sourceNode": "node-a", "targetNode": "node-b", "bytesSent": 5, "conditions": []any{map[string]any{"type": "Complete", "message": message}}}
}

// The tolerations of a pod that runs were added when it was made (an admission plugin such as PodTolerationRestriction, or a webhook): its
// StatefulSet's template has none of them. Where the pod may run, its volume may go.
func TestPlanOfPodWithTolerationsOfItsOwn(t *testing.T) {
	for name, sets := range map[string][]any{"without the StatefulSet": nil, "with it": {map[string]any{
		"metadata": map[string]any{"namespace": "apps", "name": "db"},
		"spec":     map[string]any{"replicas": 1, "volumeClaimTemplates": []any{map[string]any{"metadata": map[string]any{"name": "data"}}}},
	}}} {
		pod := with(with(aUser("db-0", "data-db-0"), "spec", "nodeName", "node-a"), "spec", "tolerations", []any{map[string]any{"key": "own", "operator": "Exists"}})
		tainted := func(name string) any {
			return map[string]any{"metadata": map[string]any{"name": name}, "spec": map[string]any{"taints": []any{map[string]any{"key": "own", "effect": "NoSchedule"}}}}
		}
		a := answers{
			"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(),
			"get persistentvolumes":                           listOf(aVolume("data-db-0", "2Gi")),
			"get persistentvolumeclaims":                      listOf(map[string]any{"metadata": map[string]any{"namespace": "apps", "name": "data-db-0"}}),
			"get statefulsets":                                listOf(sets...),
			"get pods":                                        listOf(pod),
			"get csistoragecapacities":                        listOf(aCapacity("node-b", "5Gi")),
			"get nodes":                                       listOf(tainted("node-a"), tainted("node-b")),
			"get storageclasses":                              listOf(),
		}
		plan, err := PlanDrain(t.Context(), a.kubectl(t), Node{Driver: Driver{Node: "node-a"}}, MoveOptions{Evict: true})
		must.Succeed(t, err)
		if plan[0].To != "node-b" {
			t.Errorf("%s: it goes to %q: %s", name, plan[0].To, plan[0].Problem)
		}
	}
}

// One at a time is made; what an earlier call has made is taken up, what has failed before is not.
func TestMovesGoOnAfterAnInterruption(t *testing.T) {
	old := aMove("first-old", "first", says("Failed", "undone"))
	running := aMove("second-1", "second", says("Copying", "copies"))
	moved := aMove("second-1", "second", says("Succeeded", "was moved"))
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(old, running),
		"made.0":   aMove("first-1", "first", nil),
		"listed.0": listOf(old, moved, aMove("first-1", "first", says("Copying", "copies"))),
	}
	k := a.kubectl(t)
	plan := []Planned{{Namespace: "apps", Claim: "first", From: "node-a"}, {Namespace: "apps", Claim: "second", From: "node-a"}}
	ctx, stop := context.WithCancel(t.Context())
	var lines []Progress
	moves, err := Moves(ctx, k, plan, 2, time.Millisecond, MoveOptions{Evict: true, LeaveSnapshots: true, BytesPerSecond: 1 << 20}, func(p Progress) {
		lines = append(lines, p)
		if p.Moved == 1 {
			stop()
		}
	})
	if err == nil || !strings.Contains(err.Error(), "the same command shows them again") || moves[1].Message != "was moved" || moves[0].Move != "first-1" {
		t.Errorf("the moves are %+v, %v", moves, err)
	}
	if p := lines[len(lines)-1]; p.Of != 2 || p.BytesSent != 10 || len(p.Each) != 1 || p.Each[0].Move != "first-1" {
		t.Errorf("the progress is %+v", p)
	}
	text, err := os.ReadFile(filepath.Join(os.Getenv("KUBECTL_ANSWERS"), "created.0"))
	must.Succeed(t, err)
	var made v1alpha1.VolumeMove
	must.Succeed(t, json.Unmarshal(text, &made))
	want := v1alpha1.VolumeMoveSpec{ClaimName: "first", Snapshots: "LeaveBehind", When: "Evict", Verify: "All", BytesPerSecond: 1 << 20}
	if diff := cmp.Diff(want, made.Spec); diff != "" || made.GenerateName != "first-" || made.Namespace != "apps" {
		t.Errorf("made is %+v: %s", made, diff)
	}
}

// A move that has brought a volume to a node, where the old copy is still to be removed, takes it away from no node: it would be said to be moved.
func TestMovesTakeUpNoneThatBroughtTheVolume(t *testing.T) {
	brought := aMove("first-1", "first", says("Removing", "node node-a does not answer: the old copy is removed when it answers"))
	away := says("Succeeded", "was moved")
	away["sourceNode"], away["targetNode"] = "node-b", "node-c"
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(brought),
		"made.0":   aMove("first-2", "first", nil),
		"listed.0": listOf(brought, aMove("first-2", "first", away)),
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	plan := []Planned{{Namespace: "apps", Claim: "first", From: "node-b"}}
	moves, err := Moves(ctx, a.kubectl(t), plan, 2, time.Millisecond, MoveOptions{}, func(p Progress) {
		if len(p.Each) > 0 && p.Each[0].Move == "first-1" {
			stop()
		}
	})
	if err != nil || moves[0].Move != "first-2" || moves[0].To != "node-c" {
		t.Errorf("the moves are %+v, %v", moves, err)
	}
}

// What an earlier command asks for is not what this one does: a VolumeMove that has not begun is taken up only if it asks for the same.
func TestMovesTakeUpWhatAsksForTheSame(t *testing.T) {
	waits := says("Pending", "the volume has snapshots: delete them, or move with snapshots: LeaveBehind")
	delete(waits, "targetNode")
	asks := func(key, value string) any {
		return with(aMove("data-1", "data", waits).(map[string]any), "spec", key, value)
	}
	const other = "the VolumeMove data-1 of the claim has not begun, and asks for something else: delete it, and try again"
	for name, tt := range map[string]struct {
		there any
		o     MoveOptions
		want  string
	}{
		"the same":            {asks("when", "Evict"), MoveOptions{Evict: true}, "data-1 was moved"},
		"to another node":     {asks("targetNode", "node-c"), MoveOptions{Target: "node-b"}, " " + other},
		"with snapshots":      {asks("when", "Unpublished"), MoveOptions{LeaveSnapshots: true}, " " + other},
		"without evictions":   {asks("when", "Evict"), MoveOptions{}, " " + other},
		"it is being deleted": {with(asks("when", "Evict").(map[string]any), "metadata", "deletionTimestamp", "2026-01-01T00:00:00Z"), MoveOptions{}, "data-2 was moved"},
		"it has begun":        {aMove("data-1", "data", says("Copying", "copies")), MoveOptions{Evict: true}, "data-1 was moved"},
	} {
		const asked = "get volumemoves.hostpathprovisioner.kubevirt.io"
		a := answers{
			asked: listOf(tt.there), "made.0": aMove("data-2", "data", nil), "listed.0": listOf(aMove("data-2", "data", says("Succeeded", "was moved"))),
			"later": listOf(aMove("data-1", "data", says("Succeeded", "was moved"))),
		}
		moves, err := Moves(t.Context(), a.kubectl(t), []Planned{{Namespace: "apps", Claim: "data", From: "node-a"}}, 1, time.Millisecond, tt.o, func(p Progress) {
			if at := os.Getenv("KUBECTL_ANSWERS"); len(p.Each) > 0 && p.Each[0].Move == "data-1" {
				must.Succeed(t, os.WriteFile(filepath.Join(at, asked), must.Value(os.ReadFile(filepath.Join(at, "later")))(t), 0o600))
			}
		})
		if got := moves[0].Move + " " + moves[0].Message; err != nil || got != tt.want {
			t.Errorf("%s: it becomes %q, %v, want %q", name, got, err, tt.want)
		}
	}
}

// A move that had begun when it was planned may end before it is looked at: none is made in its place, which would move the volume once more.
func TestMovesFollowOneThatHasEnded(t *testing.T) {
	a := answers{"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(aMove("first-1", "first", says("Succeeded", "was moved")))}
	moves, err := Moves(t.Context(), a.kubectl(t), []Planned{{Namespace: "apps", Claim: "first", From: "node-a", move: "uid-first-1"}}, 2, time.Millisecond, MoveOptions{}, func(Progress) {})
	if err != nil || moves[0].Move != "first-1" || !moves[0].Done() {
		t.Errorf("the moves are %+v, %v", moves, err)
	}
}

// A move that the operator cannot begin lets the others go first, and one that was deleted ends.
func TestMovesThatWaitHoldUpNoOther(t *testing.T) {
	waits := aMove("first-1", "first", says("Pending", "no node can take the volume"))
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(waits),
		"made.0":   aMove("second-1", "second", nil),
		"listed.0": listOf(aMove("second-1", "second", says("Succeeded", "was moved"))),
	}
	plan := []Planned{{Namespace: "apps", Claim: "first"}, {Namespace: "apps", Claim: "second"}}
	moves, err := Moves(t.Context(), a.kubectl(t), plan, 1, time.Millisecond, MoveOptions{}, func(Progress) {})
	want := []Moved{
		{Namespace: "apps", Claim: "first", Move: "first-1", From: "node-a", To: "node-b", Phase: "Pending", BytesSent: 5, Message: "the VolumeMove first-1 was deleted"},
		{Namespace: "apps", Claim: "second", Move: "second-1", From: "node-a", To: "node-b", Phase: "Succeeded", BytesSent: 5, Message: "was moved"},
	}
	if diff := cmp.Diff(want, moves, cmpopts.IgnoreUnexported(Moved{})); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err := Moves(t.Context(), answers{}.kubectl(t), plan, 1, time.Millisecond, MoveOptions{}, func(Progress) {}); err == nil || !strings.Contains(err.Error(), "moving needs the operator") {
		t.Errorf("without the kind VolumeMove: %v", err)
	}
}

// All moves may wait for the same, as for a driver that is rolled out, and begin together when it is there: few more than asked for are made. Those
// that wait for each other are all made, wherever the plan has them.
func TestMovesThatWaitAreFew(t *testing.T) {
	for name, tt := range map[string]struct {
		atOnce, groups, most int
		made                 string
	}{
		"alone, two at once": {2, 0, 4, "0 1 2 3"},
		"alone, one at once": {1, 0, 2, "0 1"},
		"in groups of five":  {1, 4, 5, "0 4 8 12 16"},
		"in groups of two":   {2, 10, 5, "0 10 1 11"},
	} {
		moves := make([]Moved, 20)
		for i := range moves {
			if moves[i].Claim = strconv.Itoa(i); tt.groups > 0 {
				moves[i].group = i%tt.groups + 1
			}
		}
		var made []string
		for m := next(moves, tt.atOnce); m != nil; m = next(moves, tt.atOnce) {
			m.uid, m.waits = "made", fewLooks+1
			made = append(made, m.Claim)
		}
		if got := strings.Join(made, " "); got != tt.made || len(made) > tt.most {
			t.Errorf("%s: %q are made, want %q", name, got, tt.made)
		}
		for i := range moves { // what they waited for is there
			moves[i].waits = 0
		}
		if m := next(moves, tt.atOnce); m != nil {
			t.Errorf("%s: one more is made when all go on", name)
		}
		for i := range moves {
			moves[i].ended = moves[i].uid != ""
		}
		if next(moves, tt.atOnce) == nil {
			t.Errorf("%s: none is made when those have ended", name)
		}
	}
}

// Moves that the operator never begins are left to it when no other goes on: all others are made, and it ends.
func TestMovesThatNeverBeginHoldUpNoOther(t *testing.T) {
	list := []any{}
	for _, claim := range []string{"a", "b", "c", "d"} { // an earlier call has made them
		list = append(list, aMove(claim+"-1", claim, says("Pending", "node node-b has no room")))
	}
	a := answers{
		"get volumemoves.hostpathprovisioner.kubevirt.io": listOf(list...),
		"made.0": aMove("e-1", "e", nil), "listed.0": listOf(append(slices.Clone(list), aMove("e-1", "e", says("Succeeded", "was moved")))...),
	}
	k := a.kubectl(t)
	var plan []Planned
	for _, claim := range []string{"a", "b", "c", "d", "e"} {
		plan = append(plan, Planned{Namespace: "apps", Claim: claim, From: "node-a"})
	}
	looks := 0
	moves, err := Moves(t.Context(), k, plan, 2, time.Millisecond, MoveOptions{}, func(Progress) { looks++ })
	must.Succeed(t, err)
	got := map[string]string{}
	for _, m := range moves {
		got[m.Claim] = string(m.Phase) + ": " + m.Message
	}
	want := map[string]string{"e": "Succeeded: was moved"}
	for _, claim := range []string{"a", "b", "c", "d"} {
		want[claim] = "Pending: the VolumeMove " + claim + "-1 stays, and goes on by itself when it can: node node-b has no room"
	}
	if diff := cmp.Diff(want, got); diff != "" || looks != manyLooks+1 {
		t.Errorf("after %d looks (-want +got):\n%s", looks, diff)
	}
}

// What waits is left after as many looks in which nothing goes on, with its group, and waited for again with that when one of it goes on.
func TestMovesThatAreLeft(t *testing.T) {
	moves := []Moved{
		{Claim: "big", Phase: v1alpha1.Copying, uid: "1"}, {Claim: "alone", Phase: v1alpha1.Pending, uid: "2"},
		{Claim: "data", Phase: v1alpha1.Copying, uid: "3", group: 3}, {Claim: "logs", Phase: v1alpha1.Pending, uid: "4", group: 3}, {Claim: "unmade"},
	}
	waiting := map[string]bool{"alone": true, "data": true, "logs": true} // data is copied
	still := 0
	look := func(times int) (left string) {
		for range times {
			for i := range moves {
				m := &moves[i]
				m.Message = "no room"
				if m.waits++; !waiting[m.Claim] {
					m.waits = 0
				}
			}
			still = leave(moves, still)
		}
		for _, m := range moves {
			if m.left {
				left += m.Claim + ": " + m.Message + "\n"
			}
		}
		return left
	}
	const stays = " stays, and goes on by itself when it can: no room\n"
	for i, m := range moves {
		moves[i].Move = m.Claim + "-1"
	}
	if left := look(2 * manyLooks); left != "" {
		t.Errorf("while one goes on are left: %s", left)
	}
	moves[0].ended = true
	if left := look(manyLooks - 1); left != "" {
		t.Errorf("too early are left: %s", left)
	}
	moves[4].uid, waiting["unmade"] = "5", true
	if left := look(manyLooks - 1); left != "" {
		t.Errorf("just after one was made are left: %s", left)
	}
	moves[4].ended = true
	all := "alone: the VolumeMove alone-1" + stays + "data: the VolumeMove data-1" + stays + "logs: the VolumeMove logs-1" + stays
	if left := look(1); left != all {
		t.Errorf("then are left: %s", left)
	}
	if p := progressOf(moves); p.Failed != p.Of || len(p.Each) > 0 {
		t.Errorf("the progress is %+v", p)
	}
	if left := look(2 * manyLooks); left != all {
		t.Errorf("later are left: %s", left)
	}
	waiting["logs"] = false
	if left := look(1); left != "alone: the VolumeMove alone-1"+stays {
		t.Errorf("when one of a group goes on are left: %s", left)
	}
	if p := progressOf(moves); p.Failed+2 != p.Of || len(p.Each) != 2 {
		t.Errorf("the progress is %+v", p)
	}
	moves[1].ended = true
	if left := look(1); left != "" {
		t.Errorf("of those that have ended are left: %s", left)
	}
}

// A call that fails amid moves is made again, and what that says is shown; a VolumeMove that is refused holds up no other.
func TestMovesSurviveCallsThatFail(t *testing.T) {
	const asked = "get volumemoves.hostpathprovisioner.kubevirt.io"
	a := answers{
		asked:      listOf(),
		"made.3":   aMove("second-1", "second", nil), // the first is refused
		"listed.3": listOf(aMove("second-1", "second", says("Succeeded", "was moved"))),
	}
	for i := range mostRefusals {
		a["listed."+string(rune('0'+i))] = listOf()
	}
	plan := []Planned{{Namespace: "apps", Claim: "first"}, {Namespace: "apps", Claim: "second"}}
	k := a.kubectl(t)
	at, aside := filepath.Join(os.Getenv("KUBECTL_ANSWERS"), asked), filepath.Join(os.Getenv("KUBECTL_ANSWERS"), "aside")
	failed, refused := 0, 0
	moves, err := Moves(t.Context(), k, plan, 1, time.Millisecond, MoveOptions{}, func(p Progress) {
		switch {
		case strings.Contains(p.Problem, "list volumemoves"):
			if failed++; failed == 2 {
				must.Succeed(t, os.Rename(aside, at))
			}
		case strings.Contains(p.Problem, "claim apps/first"):
			if refused++; refused == 1 {
				must.Succeed(t, os.Rename(at, aside))
			}
		}
	})
	must.Succeed(t, err)
	if failed != 2 || refused != mostRefusals || moves[0].Done() || !strings.Contains(moves[0].Message, "make a VolumeMove: ") || !moves[1].Done() {
		t.Errorf("%d calls failed, %d were refused, and the moves are %+v", failed, refused, moves)
	}
	// One that is never answered ends in time.
	k = answers{asked: listOf(aMove("first-1", "first", says("Copying", "copies"))), "aside": listOf(aMove("first-1", "first", says("Succeeded", "was moved")))}.kubectl(t)
	k.Within = 3 * time.Second
	at, aside = filepath.Join(os.Getenv("KUBECTL_ANSWERS"), asked), filepath.Join(os.Getenv("KUBECTL_ANSWERS"), "aside")
	hangs, silent := false, 0
	moves, err = Moves(t.Context(), k, plan[:1], 1, time.Millisecond, MoveOptions{}, func(p Progress) {
		switch {
		case p.Problem == "" && !hangs:
			hangs = true
			must.Succeed(t, os.WriteFile(at, []byte("hang"), 0o600))
		case hangs && silent == 0 && strings.Contains(p.Problem, "has not answered"):
			silent++
			must.Succeed(t, os.Rename(aside, at))
		}
	})
	if err != nil || silent != 1 || !moves[0].Done() {
		t.Errorf("%d calls were not answered, and the moves are %+v, %v", silent, moves, err)
	}
	// One that fails for ever ends it.
	k = answers{asked: listOf(aMove("first-1", "first", says("Copying", "copies")))}.kubectl(t)
	if _, err := Moves(t.Context(), k, plan[:1], 1, time.Microsecond, MoveOptions{}, func(p Progress) {
		if p.Problem == "" {
			must.Succeed(t, os.Remove(filepath.Join(os.Getenv("KUBECTL_ANSWERS"), asked)))
		}
	}); err == nil {
		t.Error("it never ends")
	}
}
