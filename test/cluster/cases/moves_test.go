package cases_test

import (
	"context"
	"fmt"
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
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var volumeMoves = schema.GroupVersionResource{Group: "hostpathprovisioner.kubevirt.io", Version: "v1alpha1", Resource: "volumemoves"}

// The volume of a StatefulSet's pod, which writes and is evicted, moves to the other node, and back when that is drained. The claim stays,
// the pod starts where its volume is and goes on where it was, and nothing is left on the node before.
func TestVolumeMoves(t *testing.T) {
	const name, claim, pod = "moving", "data-writer-0", "writer-0"
	s := begin(t)
	client := s.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, name, onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.endProvisioner(name) })
	s.condition(client, name, "Available", "True")

	s.statefulSet("writer", 1, claimTemplate(operatorClass, "64Mi"), func(set *appsv1.StatefulSet) {
		c := &set.Spec.Template.Spec.Containers[0]
		c.Command = []string{"sh", "-c", counting}
	})
	s.allReady("writer")
	s.mustRun(pod, "mkdir /data/dir && echo hello >/data/dir/file && ln /data/dir/file /data/link && chown 1000:1000 /data/dir; sync")
	first := s.claimNamed(claim)
	for i, move := range []func(from string){
		func(string) { s.moveVolume("there", claim) },
		func(from string) { s.drain(from, func() {}, claim) },
	} {
		before := s.volume(claim)
		directory := s.disk(before)
		written := s.numbers(pod)
		move(s.nodeOf(before))
		s.allReady("writer")
		after := s.volume(claim)
		if after.Name != before.Name || s.nodeOf(after) == s.nodeOf(before) || after.Spec.PersistentVolumeReclaimPolicy != before.Spec.PersistentVolumeReclaimPolicy {
			t.Fatalf("the volume was %+v, and is %+v", before.Spec, after.Spec)
		}
		if now := s.claimNamed(claim); now.UID != first.UID || now.Status.Phase != corev1.ClaimBound {
			t.Fatalf("the claim is %+v", now)
		}
		if at := s.ready(pod).Spec.NodeName; at != s.nodeOf(after) {
			t.Fatalf("the pod is on %s", at)
		}
		if now := s.numbers(pod); now < written {
			t.Fatalf("the pod had written %d numbers, and there are %d", written, now)
		}
		s.wantFile(filepath.Join(s.disk(after), "link"), "hello\n")
		s.wantGone(directory)
		// The operator removes it when the move has ended.
		s.until(fmt.Sprintf("nothing to be left of move %d", i), func(ctx context.Context) (string, error) {
			return c.Kubectl(ctx, "get", "pods,secrets,networkpolicies", "-n", cluster.Namespace, "-l", "hostpathprovisioner.kubevirt.io/move", "-o", "name")
		})
	}
	s.removeSet("writer")
	s.kubectl("delete", "pvc", "-n", s.namespace, claim)
}

// moveVolume moves the volume of a claim to a node that the operator chooses, and evicts its pods.
func (s *scene) moveVolume(name, claim string) {
	s.Helper()
	client, err := dynamic.NewForConfig(c.Config)
	must.Succeed(s, err)
	moves := client.Resource(volumeMoves).Namespace(s.namespace)
	_, err = moves.Create(s.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": volumeMoves.GroupVersion().String(), "kind": "VolumeMove", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"claimName": claim, "when": "Evict", "verify": "All"},
	}}, metav1.CreateOptions{})
	must.Succeed(s, err)
	s.condition(moves, name, "Complete", "True")
	must.Succeed(s, moves.Delete(s.Context(), name, metav1.DeleteOptions{}))
	s.until("the VolumeMove to be gone", func(ctx context.Context) (string, error) {
		_, err := moves.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return "it is there", err
	})
}

// drain has kubectl hostpath move what the claims have from a node, once it says that it would. It does something every few seconds
// meanwhile.
func (s *scene) drain(node string, meanwhile func(), claims ...string) {
	s.Helper()
	type row struct{ Namespace, Claim, From, To, Phase, Problem string }
	var plan, moved []row
	s.plugin(&plan, "drain", node, "--dry-run")
	s.Cleanup(func() { s.kubectl("uncordon", node) })
	s.pluginWhile(&moved, meanwhile, "drain", node)
	for _, claim := range claims {
		want := row{Namespace: s.namespace, Claim: claim, From: node, To: otherNode(node)}
		if !slices.Contains(plan, want) {
			s.Errorf("the plan is %+v, want it to have %+v", plan, want)
		}
		want.Phase = "Succeeded"
		if !slices.Contains(moved, want) {
			s.Fatalf("what was moved is %+v, want it to have %+v", moved, want)
		}
	}
	if got := s.kubectl("get", "node", node, "--output=jsonpath={.spec.unschedulable}"); got != "true" {
		s.Errorf("whether the node is unschedulable is %q", got)
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
	s := begin(t)
	client := s.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, name, onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.endProvisioner(name) })
	s.condition(client, name, "Available", "True")

	s.kubectl("cordon", nodeB)
	t.Cleanup(func() { s.kubectl("uncordon", nodeB) })
	s.statefulSet("writer", pods, claimTemplate(operatorClass, "64Mi"), func(set *appsv1.StatefulSet) {
		set.Spec.Template.Spec.Containers[0].Command = []string{"sh", "-c", checking}
	})
	s.kubectl("create", "poddisruptionbudget", "writer", "-n", s.namespace, "--selector=set=writer", "--max-unavailable=4")
	s.allReady("writer")
	s.kubectl("uncordon", nodeB)
	var claims []string
	for i := range pods {
		claims = append(claims, fmt.Sprintf("data-writer-%d", i))
	}
	kills := &killer{s: s}
	for _, node := range []string{nodeA, nodeB} {
		meanwhile := func() {}
		if node == nodeB {
			meanwhile = kills.next
		}
		var written []int
		var directories []string
		for i, claim := range claims {
			written = append(written, s.listedAfter(i, 0))
			directories = append(directories, s.disk(s.volume(claim)))
		}
		start := time.Now()
		s.drain(node, meanwhile, claims...)
		s.allReady("writer")
		c.Log.Printf("%d volumes of pods that write were drained from %s in %.0f s", pods, node, time.Since(start).Seconds())
		s.kubectl("uncordon", node)
		for i, claim := range claims {
			if at := s.nodeOf(s.volume(claim)); at != otherNode(node) {
				t.Errorf("the volume of %s is on %s", claim, at)
			}
			s.listedAfter(i, written[i])
			s.wantGone(directories[i])
		}
	}
	if c.Log.Printf("killed: %v", kills.done); len(kills.done) < len(killed) {
		t.Errorf("killed: %v, want each of %q", kills.done, killed)
	}
	s.removeSet("writer")
}

// killed is what takes part in moves, in the order in which it is killed.
var killed = []string{"the operator", "a mover", "a driver", "a kubelet"}

// A killer kills one after another of what takes part in moves, and then the first again: each four times at most, because kubelet has
// what fails often wait longer and longer.
type killer struct {
	s     *scene
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
func (s *scene) listedAfter(pod, before int) (count int) {
	s.Helper()
	s.until(fmt.Sprintf("pod %d to write more than its %d files", pod, before), func(context.Context) (string, error) {
		broken, lines, _ := strings.Cut(s.mustRun(fmt.Sprintf("writer-%d", pod), "cat /data/broken 2>/dev/null || true; echo; cat /data/list 2>/dev/null | wc -l"), "\n")
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

func (s *scene) claimNamed(name string) *corev1.PersistentVolumeClaim {
	s.Helper()
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Get(s.Context(), name, metav1.GetOptions{})
	must.Succeed(s, err)
	return claim
}

// numbers is how many a pod has written.
func (s *scene) numbers(pod string) (count int) {
	s.Helper()
	_, err := fmt.Sscan(strings.TrimSpace(s.mustRun(pod, "wc -l </data/numbers")), &count)
	must.Succeed(s, err)
	return count
}
