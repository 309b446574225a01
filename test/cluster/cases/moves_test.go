package cases_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var volumeMoves = schema.GroupVersionResource{Group: "hostpathprovisioner.kubevirt.io", Version: "v1alpha1", Resource: "volumemoves"}

// The API server refuses a VolumeMove that makes no sense, and changes of what its move has begun with.
func TestMoveValidation(t *testing.T) {
	const file = operatorDir + "/hostpathprovisioner.kubevirt.io_volumemoves.yaml"
	h := begin(t)
	h.kubectl("apply", "--server-side", "--force-conflicts", "-f", file)
	must.Succeed(t, c.Established(t.Context(), "-f", file))
	object := func(name, spec string) *unstructured.Unstructured {
		move := provisioner(t, name, spec)
		move.SetAPIVersion(volumeMoves.GroupVersion().String())
		move.SetKind("VolumeMove")
		return move
	}
	client := h.moves()
	refused := func(err error, want string) string {
		if want == "" && err == nil || want != "" && apierrors.IsInvalid(err) && strings.Contains(err.Error(), want) {
			return ""
		}
		return fmt.Sprintf("got %v, want %q", err, want)
	}
	for name, tt := range map[string]struct{ spec, want string }{
		"no spec":                              {"", "spec: Required value"},
		"no claim":                             {"{}", "claimName: Required value"},
		"force that stops no pod":              {"{claimName: data, force: true}", "force is for when: Evict"},
		"policy for snapshots, not known":      {"{claimName: data, snapshots: Take}", "Unsupported value"},
		"comparison that is not known":         {"{claimName: data, verify: None}", "Unsupported value"},
		"what stops pods, not known":           {"{claimName: data, when: Now}", "Unsupported value"},
		"bandwidth with which no move ends":    {"{claimName: data, bytesPerSecond: 1}", "greater than or equal to 65536"},
		"target without a name":                {"{claimName: data, targetNode: ''}", "at least 1 chars long"},
		"force that stops pods":                {"{claimName: data, when: Evict, force: true}", ""},
		"everything that can be chosen at all": {"{claimName: data, targetNode: node-b, snapshots: LeaveBehind, verify: Changed, bytesPerSecond: 65536}", ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := client.Create(t.Context(), object("refused", tt.spec), metav1.CreateOptions{DryRun: []string{"All"}})
			if problem := refused(err, tt.want); problem != "" {
				t.Error(problem)
			}
		})
	}
	made, err := client.Create(t.Context(), object("changed", "{claimName: data, targetNode: node-b}"), metav1.CreateOptions{})
	must.Succeed(t, err)
	for name, tt := range map[string]struct{ spec, want string }{
		"claim":         {"{claimName: other, targetNode: node-b}", "delete the VolumeMove and make another"},
		"target":        {"{claimName: data, targetNode: node-a}", "delete the VolumeMove and make another"},
		"no target":     {"{claimName: data}", "delete the VolumeMove and make another"},
		"snapshots":     {"{claimName: data, targetNode: node-b, snapshots: LeaveBehind}", "delete the VolumeMove and make another"},
		"verify":        {"{claimName: data, targetNode: node-b, verify: Changed}", "delete the VolumeMove and make another"},
		"what can be":   {"{claimName: data, targetNode: node-b, when: Evict, force: true, bytesPerSecond: 1000000}", ""},
		"back to waits": {"{claimName: data, targetNode: node-b}", ""},
	} {
		t.Run("change of "+name, func(t *testing.T) {
			after := object("changed", tt.spec)
			after.SetResourceVersion(made.GetResourceVersion())
			_, err := client.Update(t.Context(), after, metav1.UpdateOptions{DryRun: []string{"All"}})
			if problem := refused(err, tt.want); problem != "" {
				t.Error(problem)
			}
		})
	}
}

// The volume of a StatefulSet's pod, which writes and is evicted, moves to the other node, and back when that is drained, by kubectl too: in the
// long form there again, while kubectl drains. Its claim grows meanwhile. The claim stays, the pod starts where its volume is and goes on where it was, and nothing
// is left on the node before. With it go a volume of the provisioner from before CSI, and one of the upstream driver.
func TestVolumeMoves(t *testing.T) {
	const name, claim, pod = "moving", "data-writer-0", "writer-0"
	h := begin(t)
	client := h.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, name, onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.endProvisioner(name) })
	h.condition(client, name, "Available", "True")

	h.writersOn(nodeA, nodeB, 1, counting)
	h.mustRun(pod, "mkdir /data/dir && echo hello >/data/dir/file && ln /data/dir/file /data/link && chown 1000:1000 /data/dir; sync -f /data")
	first := h.claimNamed(claim)
	h.undone("undone", claim, pod)
	legs := []func(from string){
		func(from string) {
			earlier := h.earlierVolumes(from)
			h.moveAndGrow("there", claim, "96Mi")
			h.wantEarlier(earlier, otherNode(from))
		},
		func(from string) {
			h.kubectlDrain(from)
			h.drain(from, func() {}, claim)
		},
	}
	if !testing.Short() {
		legs = append(legs, func(from string) { h.drainBoth(from, claim) })
	}
	for i, move := range legs {
		before := h.volume(claim)
		directory := h.disk(before)
		written := h.numbers(pod)
		move(h.nodeOf(before))
		h.allReady("writer")
		after := h.volume(claim)
		if after.Name != before.Name || h.nodeOf(after) == h.nodeOf(before) || after.Spec.PersistentVolumeReclaimPolicy != before.Spec.PersistentVolumeReclaimPolicy {
			t.Fatalf("the volume was %+v, and is %+v", before.Spec, after.Spec)
		}
		if now := h.claimNamed(claim); now.UID != first.UID || now.Status.Phase != corev1.ClaimBound {
			t.Fatalf("the claim is %+v", now)
		}
		if at := h.ready(pod).Spec.NodeName; at != h.nodeOf(after) {
			t.Fatalf("the pod is on %s", at)
		}
		if now := h.numbers(pod); now < written {
			t.Fatalf("the pod had written %d numbers, and there are %d", written, now)
		}
		h.wantFile(filepath.Join(h.disk(after), "link"), "hello\n")
		h.wantGone(directory)
		h.wantClaimSize(claim, "96Mi")
		h.wantPromised(h.nodeOf(after), map[string]int64{after.Spec.CSI.VolumeHandle: 96 * mib})
		// The operator removes it when the move has ended.
		h.until(fmt.Sprintf("nothing to be left of move %d", i), func(ctx context.Context) (string, error) {
			return c.Kubectl(ctx, "get", "pods,secrets,networkpolicies", "-n", cluster.Namespace, "-l", "hostpathprovisioner.kubevirt.io/move", "-o", "name")
		})
		h.kubectl("uncordon", h.nodeOf(before))
	}
	h.mustRun(pod, "dd if=/dev/zero of=/data/big bs=1M count=80 && rm /data/big")
	h.removeSet("writer")
	h.kubectl("delete", "pvc", "-n", h.namespace, claim)
}

// The operator moves volumes of a driver that it has not deployed, without a HostPathProvisioner, and leaves that driver alone, also when the
// operator is removed.
func TestMoveWithoutHostPathProvisioner(t *testing.T) {
	needTime(t)
	h := begin(t)
	h.importAll("hostpath-provisioner-operator")
	t.Cleanup(func() {
		_, err := c.Kubectl(context.Background(), "delete", "-k", operatorOverlay, "--timeout=2m")
		must.Succeed(t, err)
	})
	h.kubectl("apply", "-k", operatorOverlay)
	must.Succeed(t, c.Established(t.Context(), "crd", "volumemoves.hostpathprovisioner.kubevirt.io"))

	h.claim("data", "64Mi")
	h.pod("writer", with("data", "/data"), on(nodeA))
	h.ready("writer")
	h.mustRun("writer", "echo before >/data/file")
	before := h.volume("data")
	directory := h.disk(before)
	h.move("there", "data", "Unpublished")
	h.untilStatus(h.moves(), "there", "the fence", "fencedTime:")
	h.remove("writer")
	h.moved("there")

	h.pod("reader", with("data", "/data"))
	if at := h.ready("reader").Spec.NodeName; at != nodeB {
		t.Errorf("the pod is on %s", at)
	}
	if got := h.mustRun("reader", "cat /data/file"); got != "before\n" {
		t.Errorf("the pod reads %q", got)
	}
	h.wantGone(directory)
	must.Succeed(t, c.DriverReady(t.Context()))
}

// keepingPolicy keeps the operator from the first step of replacing a PersistentVolume.
const keepingPolicy = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: keeps-volumes}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [persistentvolumes], operations: [UPDATE]}]
  validations:
  - expression: object.spec.persistentVolumeReclaimPolicy == oldObject.spec.persistentVolumeReclaimPolicy
    message: volumes keep their policies
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: keeps-volumes}
spec: {policyName: keeps-volumes, validationActions: [Deny]}
`

// undone undoes a move when the copy is whole and the source has handed the volume over: the pod goes on where it was.
func (h *harness) undone(name, claim, pod string) {
	h.Helper()
	before := h.volume(claim)
	from := h.nodeOf(before)
	h.applyText(keepingPolicy)
	h.until("the policy to hold", func(ctx context.Context) (string, error) {
		_, err := c.Kubectl(ctx, "patch", "pv", before.Name, "--dry-run=server", `--patch={"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
		if err == nil {
			return "it does not", nil
		}
		return "", nil
	})
	written := h.numbers(pod)
	h.move(name, claim, "Evict")
	h.untilStatus(h.moves(), name, "the policy to refuse the switch", "volumes keep their policies")
	must.Succeed(h, h.moves().Delete(h.Context(), name, metav1.DeleteOptions{}))
	h.moveGone(name)
	h.kubectl("delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "keeps-volumes")
	h.allReady("writer")
	after := h.volume(claim)
	if after.UID != before.UID || after.DeletionTimestamp != nil || h.ready(pod).Spec.NodeName != from {
		h.Fatalf("the volume was %+v, and is %+v", before, after)
	}
	if now := h.numbers(pod); now < written {
		h.Fatalf("the pod had written %d numbers, and there are %d", written, now)
	}
	h.wantPromised(from, map[string]int64{after.Spec.CSI.VolumeHandle: 64 * mib})
}

// writersOn has pods of a StatefulSet write on one of two nodes.
func (h *harness) writersOn(node, other string, pods int32, script string) {
	h.Helper()
	h.kubectl("cordon", other)
	h.Cleanup(func() { h.kubectl("uncordon", other) })
	h.statefulSet("writer", pods, claimTemplate(operatorClass, "64Mi"), func(set *appsv1.StatefulSet) {
		set.Spec.Template.Spec.Containers[0].Command = []string{"sh", "-c", script}
	})
	h.allReady("writer")
	h.kubectl("uncordon", other)
}

// moves are the VolumeMoves of the harness.
func (h *harness) moves() dynamic.ResourceInterface {
	h.Helper()
	client, err := dynamic.NewForConfig(c.Config)
	must.Succeed(h, err)
	return client.Resource(volumeMoves).Namespace(h.namespace)
}

// move makes a VolumeMove, of the claim's volume to a node that the operator chooses.
func (h *harness) move(name, claim, when string) {
	h.Helper()
	_, err := h.moves().Create(h.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": volumeMoves.GroupVersion().String(), "kind": "VolumeMove", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"claimName": claim, "when": when, "verify": "All"},
	}}, metav1.CreateOptions{})
	must.Succeed(h, err)
}

// moved waits until a move has ended, and deletes it. It returns what it was at the end.
func (h *harness) moved(name string) *unstructured.Unstructured {
	h.Helper()
	ended := h.condition(h.moves(), name, "Complete", "True")
	must.Succeed(h, h.moves().Delete(h.Context(), name, metav1.DeleteOptions{}))
	h.moveGone(name)
	return ended
}

// moveGone waits until a VolumeMove that was deleted is gone.
func (h *harness) moveGone(name string) {
	h.Helper()
	h.until("the VolumeMove to be gone", func(ctx context.Context) (string, error) {
		_, err := h.moves().Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return "it is there", err
	})
}

// moveAndGrow moves the volume of a claim, which is to grow when no node may change it any more. Then its pods are evicted.
func (h *harness) moveAndGrow(name, claim, size string) {
	h.Helper()
	h.move(name, claim, "Unpublished")
	h.untilStatus(h.moves(), name, "the fence", "fencedTime:")
	h.resize(claim, size)
	h.wantEvent("PersistentVolumeClaim", claim, "FileSystemResizeRequired")
	h.kubectl("patch", "volumemove", name, "-n", h.namespace, "--type=merge", `--patch={"spec":{"when":"Evict"}}`)
	h.moved(name)
}

// kubectlDrain has kubectl evict what runs on a node.
func (h *harness) kubectlDrain(node string) {
	h.Helper()
	h.Cleanup(func() { h.kubectl("uncordon", node) })
	h.kubectl(append([]string{"drain", node}, drainOptions...)...)
}

var drainOptions = []string{"--ignore-daemonsets", "--delete-emptydir-data", "--timeout=110s"}

// drainBoth drains a node by kubectl while kubectl hostpath moves its volumes, and once more when they are moved.
func (h *harness) drainBoth(node, claim string) {
	h.Helper()
	h.mustRun("writer-0", "dd if=/dev/urandom of=/data/random bs=1M count=6 && sync -f /data")
	drained := make(chan error, 1)
	go func() {
		ctx := h.Context()
		err := c.Log.Until(ctx, long, "a mover on "+node, cluster.Patient(func(ctx context.Context) (string, error) {
			pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{
				LabelSelector: "app.kubernetes.io/name=volume-mover", FieldSelector: "status.phase=Running,spec.nodeName=" + node})
			if err != nil || len(pods.Items) > 0 {
				return "", err
			}
			return "there is none", nil
		}))
		if err == nil {
			_, err = c.Kubectl(ctx, append([]string{"drain", node}, drainOptions...)...)
		}
		drained <- err
	}()
	h.drainWith(node, func() {}, []string{claim}, "--bytes-per-second=1048576")
	must.Succeed(h, <-drained)
	h.kubectlDrain(node)
}

// An earlier is a claim whose volume this driver has not made.
type earlier struct {
	claim, handle, directory, content string
	uid                               types.UID
	bytes                             int64 // that it is to be promised
}

// earlierVolumes makes a volume of the provisioner from before CSI, which migrates, and one of the upstream driver, whose PersistentVolume
// says that it has the size of the disk.
func (h *harness) earlierVolumes(node string) []earlier {
	h.Helper()
	of := old{claim: "upstream", node: node, class: operatorClass, pool: "local", handle: "pvc-16fd2706-8baf-433b-82eb-8c7fada847db", request: "32Mi"}
	of.make(h)
	h.bound("upstream")
	if got := h.migrated(node, "migrated"); got != "before\n" {
		h.Errorf("the pod reads %q", got)
	}
	all := []earlier{{claim: "upstream", content: "from before\n", bytes: 32 * mib}, {claim: "migrated", content: "before\n", bytes: 10 * mib}}
	for i := range all {
		e := &all[i]
		volume := h.volume(e.claim)
		e.handle, e.directory, e.uid = volume.Spec.CSI.VolumeHandle, h.disk(volume), h.claimNamed(e.claim).UID
		h.move(e.claim, e.claim, "Unpublished")
	}
	return all
}

// migrated is a claim whose volume the provisioner from before CSI has made, and that was migrated. It returns what a pod wrote before.
func (h *harness) migrated(node, claim string) string {
	h.Helper()
	const from, name = "/var/hpvolumes/.earlier", "pvc-44444444-2222-3333-4444-555555555555"
	h.Cleanup(func() { must.Succeed(h, os.RemoveAll(c.Nodes[node].Disk(from))) })
	h.oldVolume(node, "kubevirt.io/hostpath-provisioner", "hostPath", from+"/"+name, claim)
	wrote := h.wrote(claim, "before")
	r := h.victim(node, []string{
		"NODE_NAME=" + node, "TO_CLASS=" + operatorClass, "FROM_DIR=" + from, `DATADIR=[{"name":"local","path":"` + operatorPool + `"}]`,
	}, "migrate", "--claim="+h.namespace+"/"+claim, "--apply", "--save-dir="+h.TempDir(),
		"--socket=/var/lib/kubelet/plugins/kubevirt.io.hostpath-provisioner/csi.sock").start()
	if <-r.ended; r.err != nil {
		h.Fatalf("migrate: %v\n%s", r.err, r.output)
	}
	h.bound(claim)
	return wrote
}

// wantEarlier waits until the volumes are moved, and expects them whole on a node, with their promises. It removes them.
func (h *harness) wantEarlier(all []earlier, node string) {
	h.Helper()
	for _, e := range all {
		h.wantPromiseSaid(h.moved(e.claim), e)
		h.pod(e.claim, with(e.claim, "/data"))
	}
	promised := map[string]int64{}
	for _, e := range all {
		if at := h.ready(e.claim).Spec.NodeName; at != node {
			h.Errorf("the pod with the volume %s is on %s", e.claim, at)
		}
		if got := h.mustRun(e.claim, "cat /data/file"); got != e.content {
			h.Errorf("the pod reads %q of %s", got, e.claim)
		}
		h.wantNoSpace(e.claim, "dd if=/dev/zero of=/data/big bs=1M count=40")
		h.mustRun(e.claim, "rm /data/big; sync -f /data")
		h.wantGone(e.directory)
		if now := h.claimNamed(e.claim); now.UID != e.uid || now.Status.Capacity.Storage().Value() != e.bytes {
			h.Errorf("the claim is %+v, want %d bytes", now, e.bytes)
		}
		promised[e.handle] = e.bytes
	}
	data := h.volume("data-writer-0")
	promised[data.Spec.CSI.VolumeHandle] = 96 * mib
	h.wantPromised(node, promised)
	for _, e := range all {
		h.remove(e.claim)
		h.removeClaim(e.claim)
	}
}

// wantPromiseSaid expects a move that has ended, and the PersistentVolume, to say what the volume is promised.
func (h *harness) wantPromiseSaid(move *unstructured.Unstructured, e earlier) {
	h.Helper()
	if got, _, err := unstructured.NestedInt64(move.Object, "status", "promisedBytes"); got != e.bytes || err != nil {
		h.Errorf("the VolumeMove %s says that %d bytes are promised, want %d (%v)", e.claim, got, e.bytes, err)
	}
	if got := h.volume(e.claim).Spec.Capacity.Storage(); got.Value() != e.bytes {
		h.Errorf("the PersistentVolume of %s has %s, want %d bytes", e.claim, got, e.bytes)
	}
}

// wantPromised waits until a node has just these volumes, by their ids, each with a promise that the kernel keeps, and the other has nothing.
func (h *harness) wantPromised(node string, want map[string]int64) {
	h.Helper()
	h.until("the promises on "+node, func(context.Context) (string, error) {
		var all []string
		for _, on := range []string{nodeA, nodeB} {
			var report struct{ Pools []promises }
			h.plugin(&report, "inspect", on)
			left := map[string]int64{}
			if on == node {
				left = maps.Clone(want)
			}
			for _, p := range report.Pools {
				all = append(all, p.problems(on, left)...)
			}
			for id := range left {
				all = append(all, fmt.Sprintf("%s is not on %s", id, on))
			}
		}
		return strings.Join(all, "; "), nil
	})
}

// promises are the part of inspect's document on a pool that says what is promised.
type promises struct {
	PromisedBytes   int64
	Creating, Trash []any
	Volumes         []struct {
		ID                        string
		Abnormal                  bool
		Move                      any
		PromisedBytes, LimitBytes int64
	}
}

// problems are what is otherwise than wanted. It takes from left what is there.
func (p promises) problems(node string, left map[string]int64) (all []string) {
	for _, v := range p.Volumes {
		if bytes, ok := left[v.ID]; !ok || v.Abnormal || v.Move != nil || v.PromisedBytes != bytes || v.LimitBytes != bytes {
			all = append(all, fmt.Sprintf("%s has %+v, want %d", node, v, bytes))
		}
		p.PromisedBytes -= v.PromisedBytes
		delete(left, v.ID)
	}
	if p.PromisedBytes != 0 || len(p.Creating) > 0 || len(p.Trash) > 0 {
		all = append(all, fmt.Sprintf("%s has promised %d bytes for nothing, and has %v and %v", node, p.PromisedBytes, p.Creating, p.Trash))
	}
	return all
}

// drain has kubectl hostpath move what the claims have from a node, once it says that it would. It does something every few seconds
// meanwhile.
func (h *harness) drain(node string, meanwhile func(), claims ...string) {
	h.Helper()
	h.drainWith(node, meanwhile, claims)
}

func (h *harness) drainWith(node string, meanwhile func(), claims []string, flags ...string) {
	h.Helper()
	type row struct{ Namespace, Claim, From, To, Phase, Problem string }
	var plan, moved []row
	h.plugin(&plan, "drain", node, "--dry-run")
	h.Cleanup(func() { h.kubectl("uncordon", node) })
	h.pluginWhile(&moved, meanwhile, append([]string{"drain", node}, flags...)...)
	for _, claim := range claims {
		want := row{Namespace: h.namespace, Claim: claim, From: node, To: otherNode(node)}
		if !slices.Contains(plan, want) {
			h.Errorf("the plan is %+v, want it to have %+v", plan, want)
		}
		want.Phase = "Succeeded"
		if !slices.Contains(moved, want) {
			h.Fatalf("what was moved is %+v, want it to have %+v", moved, want)
		}
	}
	if got := h.kubectl("get", "node", node, "--output=jsonpath={.spec.unschedulable}"); got != "true" {
		h.Errorf("whether the node is unschedulable is %q", got)
	}
}

func otherNode(node string) string {
	if node == nodeA {
		return nodeB
	}
	return nodeA
}

// checking writes files that are named for their checksums and lists them in order, and keeps the newest 32. Before, it checks what is
// there: each file has the content that was written, the list has no gap, and the file that was written last is there.
const checking = `trap exit TERM
mkdir -p /data/files && cd /data/files && touch ../list || exit 1
for file in *; do [ ! -e "$file" ] || [ "$(sha256sum <"$file")" = "$file  -" ] || echo "content of $file" >>../broken; done
awk '$1 != NR { exit 1 }' ../list || echo "gap in the list" >>../broken
read -r i sum <<END
$(tail -n 1 ../list)
END
[ -z "$sum" ] || [ -e "$sum" ] || echo "the last file is not there" >>../broken
while i=$((i+1)); do
	dd if=/dev/urandom of=../new bs=16k count=1 2>/dev/null && sum=$(sha256sum <../new) && sum=${sum%% *} && mv ../new "$sum" && echo "$i $sum" >>../list || exit 1
	[ "$i" -le 32 ] || rm "$(sed -n "$((i-32))s/.* //p" ../list)"
	sleep 0.3 & wait
done`

// Twenty pods of a StatefulSet, with a disruption budget, go on writing on one node and check what they wrote when they start on the
// other: the first node is drained, and then the other, while what takes part in moves is killed.
func TestDrainOfTwentyPods(t *testing.T) {
	needTime(t)
	const name, pods = "drained", 20
	h := begin(t)
	client := h.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, name, onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.endProvisioner(name) })
	h.condition(client, name, "Available", "True")

	h.writersOn(nodeA, nodeB, pods, checking)
	h.kubectl("create", "poddisruptionbudget", "writer", "-n", h.namespace, "--selector=set=writer", "--max-unavailable=4")
	var claims []string
	for i := range pods {
		claims = append(claims, fmt.Sprintf("data-writer-%d", i))
	}
	kills := &killer{s: h}
	for _, node := range []string{nodeA, nodeB} {
		meanwhile := func() {}
		if node == nodeB {
			meanwhile = kills.next
		}
		var written []int
		var directories []string
		for i, claim := range claims {
			written = append(written, h.listedAfter(i, 0))
			directories = append(directories, h.disk(h.volume(claim)))
		}
		start := time.Now()
		h.drain(node, meanwhile, claims...)
		h.allReady("writer")
		c.Log.Printf("%d volumes of pods that write were drained from %s in %.0f s", pods, node, time.Since(start).Seconds())
		h.kubectl("uncordon", node)
		for i, claim := range claims {
			if at := h.nodeOf(h.volume(claim)); at != otherNode(node) {
				t.Errorf("the volume of %s is on %s", claim, at)
			}
			h.listedAfter(i, written[i])
			h.wantGone(directories[i])
		}
	}
	if c.Log.Printf("killed: %v", kills.done); len(kills.done) < len(killed) {
		t.Errorf("killed: %v, want each of %q", kills.done, killed)
	}
	h.removeSet("writer")
}

// killed is what takes part in moves, in the order in which it is killed.
var killed = []string{"the operator", "a mover", "a driver", "a kubelet"}

// A killer kills one after another of what takes part in moves, and then the first again: each four times at most, because kubelet has
// what fails often wait longer and longer.
type killer struct {
	s     *harness
	turn  int
	nodes int
	done  map[string]int
}

func (k *killer) next() {
	k.s.Helper()
	what := killed[k.turn%len(killed)]
	if k.done[what] == 4 {
		k.turn++
		return
	}
	did := false
	switch node := []string{nodeA, nodeB}[k.nodes%2]; what {
	case "the operator":
		did = k.kill("name=hostpath-provisioner-operator", "")
	case "a mover":
		did = k.kill("app.kubernetes.io/name=volume-mover", node)
	case "a driver":
		did = k.kill("k8s-app=hostpath-provisioner", node)
	case "a kubelet":
		did = true
		must.Succeed(k.s, c.Nodes[node].KillKubelet(), c.Nodes[node].StartKubelet(k.s.Context()))
	}
	if !did { // there is none now
		return
	}
	if k.done == nil {
		k.done = map[string]int{}
	}
	k.done[what]++
	k.turn++
	if k.turn%len(killed) == 0 {
		k.nodes++
	}
}

// kill kills the processes of one pod with a label, on a node if one is given. It says whether there were any.
func (k *killer) kill(label, node string) bool {
	k.s.Helper()
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(k.s.Context(), metav1.ListOptions{LabelSelector: label})
	must.Succeed(k.s, err)
	for _, pod := range pods.Items {
		if node != "" && pod.Spec.NodeName != node || pod.Status.Phase != corev1.PodRunning {
			continue
		}
		if k.s.killProcesses(&pod) {
			return true
		}
	}
	return false
}

// listedAfter waits until a pod has written more files than before, so that it has checked all, and returns how many. It fails if the pod
// found anything else than it had written.
func (h *harness) listedAfter(pod, before int) (count int) {
	h.Helper()
	h.until(fmt.Sprintf("pod %d to write more than its %d files", pod, before), func(context.Context) (string, error) {
		broken, lines, _ := strings.Cut(h.mustRun(fmt.Sprintf("writer-%d", pod), "cat /data/broken 2>/dev/null || true; echo; cat /data/list 2>/dev/null | wc -l"), "\n")
		if broken != "" {
			return "", fmt.Errorf("pod %d found: %s", pod, broken)
		}
		if _, err := fmt.Sscan(lines, &count); err != nil {
			return "", err
		}
		if count <= before {
			return fmt.Sprintf("%d are listed", count), nil
		}
		return "", nil
	})
	return count
}

func (h *harness) claimNamed(name string) *corev1.PersistentVolumeClaim {
	h.Helper()
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(h.Context(), name, metav1.GetOptions{})
	must.Succeed(h, err)
	return claim
}

// numbers is how many a pod has written.
func (h *harness) numbers(pod string) (count int) {
	h.Helper()
	_, err := fmt.Sscan(strings.TrimSpace(h.mustRun(pod, "wc -l </data/numbers")), &count)
	must.Succeed(h, err)
	return count
}
