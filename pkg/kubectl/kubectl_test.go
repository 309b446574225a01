package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// standIn prints the file that has what kubectl is asked as its name. test/cluster has the real one.
const standIn = `
for word; do
	case $word in
	--output=json | --all-namespaces) ;;
	*) asked="$asked${asked:+ }$word" ;;
	esac
done
case $asked in
create\ *) # the answer of its turn, and what is listed from then on
	set -- "$KUBECTL_ANSWERS"/created.*
	[ -f "$1" ] || shift
	cat >"$KUBECTL_ANSWERS/created.$#"
	cp "$KUBECTL_ANSWERS/listed.$#" "$KUBECTL_ANSWERS/get volumemoves.hostpathprovisioner.kubevirt.io"
	asked=made.$#
	;;
esac
if [ ! -f "$KUBECTL_ANSWERS/$asked" ]; then
	printf 'warning\nerror: %s\n' "$asked" >&2
	exit 1
fi
answer=$(cat "$KUBECTL_ANSWERS/$asked")
case $answer in
hang) exec sleep 3600 ;; # until it is killed
esac
printf '%s' "$answer"
case $answer in
*'"abnormal":1'*) exit 2 ;;
no*) exit 1 ;; # of auth can-i
esac`

// answers are what kubectl gives, by what it is asked.
type answers map[string]any

func (a answers) kubectl(t *testing.T) Kubectl {
	t.Helper()
	dir := t.TempDir()
	for _, kind := range []string{"get pods --namespace=storage --selector=app.kubernetes.io/name=hostpath-csi-driver", "get pods --namespace=storage --selector=k8s-app=hostpath-provisioner", "get persistentvolumes", "get statefulsets"} {
		if _, ok := a[kind]; !ok {
			a[kind] = map[string]any{"items": []any{}}
		}
	}
	for name, answer := range a {
		text, ok := answer.(string)
		if !ok {
			encoded, err := json.Marshal(answer)
			must.Succeed(t, err)
			text = string(encoded)
		}
		at := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(at), 0o700))
		must.Succeed(t, os.WriteFile(at, []byte(text), 0o600))
	}
	t.Setenv("KUBECTL_ANSWERS", dir)
	return Kubectl{Program: "/bin/sh", Flags: []string{"-c", standIn, "kubectl"}, Namespace: "storage"}
}

func driverPod(node string, running bool) map[string]any {
	state := map[string]any{}
	if running {
		state["running"] = map[string]any{}
	}
	return map[string]any{
		"metadata": map[string]any{"namespace": "storage", "name": "driver-" + node},
		"spec":     map[string]any{"nodeName": node, "containers": []any{map[string]any{"name": "driver"}}},
		"status":   map[string]any{"containerStatuses": []any{map[string]any{"name": "driver", "state": state}}},
	}
}

// waiting has the driver's container wait.
func waiting(pod map[string]any, reason, message string) map[string]any {
	pod["status"].(map[string]any)["containerStatuses"].([]any)[0].(map[string]any)["state"] = map[string]any{"waiting": map[string]any{"reason": reason, "message": message}}
	return pod
}

func listOf(items ...any) any { return map[string]any{"items": items} }

const (
	plainPods    = "get pods --namespace=storage --selector=app.kubernetes.io/name=hostpath-csi-driver"
	operatorPods = "get pods --namespace=storage --selector=k8s-app=hostpath-provisioner"
)

func inspectOf(node string) string {
	return "exec --namespace=storage driver-" + node + " --container=driver -- /hostpath-csi-driver inspect"
}

func report(more string) string { return `{"version":1,` + more + `}` }

func nodesOf(t *testing.T, a answers) []Node {
	t.Helper()
	nodes, err := Nodes(t.Context(), a.kubectl(t), time.Minute, func(int, int) {})
	must.Succeed(t, err)
	return nodes
}

func TestNodesThatGiveNoReportAreShown(t *testing.T) {
	other := map[string]any{"metadata": map[string]any{"name": "mounter"}, "spec": map[string]any{"nodeName": "node-a", "containers": []any{map[string]any{"name": "mounter"}}}}
	a := answers{
		plainPods:           listOf(driverPod("node-a", false), driverPod("node-c", true)),
		operatorPods:        listOf(other, driverPod("node-a", true), waiting(driverPod("node-b", false), "ImagePullBackOff", "no such image"), driverPod("node-d", true), driverPod("node-e", true)),
		inspectOf("node-a"): report(`"abnormal":1,"pools":[{"name":"local","path":"/p","quota":"xfs","sizeBytes":3221225472,"freeBytes":1073741824,"abnormal":true,"condition":"read-only"}]`),
		inspectOf("node-d"): `{"version":2}`,
		inspectOf("node-e"): `{"version":`,
	}
	rows := Pools(nodesOf(t, a))
	var table strings.Builder
	must.Succeed(t, WriteTable(&table, PoolHeadings, rows))
	lines := strings.Split(table.String(), "\n")
	for i, want := range []string{
		"NODE     POOL    SIZE      PROMISED   USED      FREE      AVAILABLE   CONDITION",
		"node-a   local   3.0 GiB   -          2.0 GiB   1.0 GiB   -           ABNORMAL: read-only",
		"node-b   -       -         -          -         -         -           ABNORMAL: the driver does not run (ImagePullBackOff: no such image): see kubectl -n storage describe pod driver-node-b",
		"node-c   -       -         -          -         -         -           ABNORMAL: exit status 1: error: ",
		"node-d   -       -         -          -         -         -           ABNORMAL: its report has version 2, and this program reads 1",
		"node-e   -       -         -          -         -         -           ABNORMAL: read its report: ",
	} {
		if i >= len(lines) || !strings.HasPrefix(lines[i], want) {
			t.Errorf("line %d is not %q in\n%s", i, want, table.String())
		}
	}
}

func TestVolumesHaveTheirClaims(t *testing.T) {
	pv := func(name, handle, driver, claim string) any {
		spec := map[string]any{"csi": map[string]any{"driver": driver, "volumeHandle": handle}}
		if claim != "" {
			spec["claimRef"] = map[string]any{"namespace": "apps", "name": claim}
		}
		return map[string]any{"metadata": map[string]any{"name": name}, "spec": spec}
	}
	a := answers{
		plainPods: listOf(driverPod("node-a", true), driverPod("node-b", true)),
		inspectOf("node-a"): report(`"pools":[{"name":"local","uuid":"1","volumes":[
			{"id":"pvc-1","mode":"mount","promisedBytes":1024,"usedBytes":512,"nodes":["node-a"]},{"id":"pvc-left","abnormal":true,"condition":"lost"}],
			"snapshots":[{"source":"pvc-1"},{"source":"pvc-1"}]},
			{"name":"nfs","uuid":"2","shared":true,"volumes":[{"id":"pvc-2","nodes":["node-b"]}]}]`),
		inspectOf("node-b"): report(`"pools":[{"name":"nfs","uuid":"2","shared":true,"volumes":[{"id":"pvc-2","nodes":["node-b"]}]}]`),
		"get persistentvolumes": listOf(pv("pv-1", "pvc-1", driverName, "data"), pv("pv-2", "pvc-2", driverName, ""), pv("pv-3", "pvc-3", driverName, "gone"),
			pv("pv-4", "pvc-4", "another", "other"), map[string]any{"metadata": map[string]any{"name": "local"}, "spec": map[string]any{}}),
	}
	nodes := nodesOf(t, a)
	rows, err := Volumes(t.Context(), a.kubectl(t), nodes)
	must.Succeed(t, err)
	one, half := int64(1024), int64(512)
	want := []VolumeRow{
		{Volume: "pv-2", ID: "pvc-2", Node: "node-b", Pool: "nfs", PublishedOn: []string{"node-b"}},
		{ID: "pvc-left", Node: "node-a", Pool: "local", Abnormal: true, Condition: "lost"},
		{Namespace: "apps", Claim: "data", Volume: "pv-1", ID: "pvc-1", Node: "node-a", Pool: "local", Mode: "mount", PromisedBytes: &one, UsedBytes: &half, Snapshots: 2, PublishedOn: []string{"node-a"}},
		{Namespace: "apps", Claim: "gone", Volume: "pv-3", ID: "pvc-3", Abnormal: true, Condition: "no node has it"},
	}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("volumes (-want +got):\n%s", diff)
	}
	nodes[1].Err = errors.New("no answer")
	if rows, err = Volumes(t.Context(), a.kubectl(t), nodes); err != nil || rows[3].Abnormal || !strings.HasPrefix(rows[3].Condition, "unknown") {
		t.Errorf("a volume that may be on a silent node is %+v, %v", rows[3], err)
	}
}

func TestNodeThatDoesNotAnswer(t *testing.T) {
	a := answers{plainPods: listOf(driverPod("node-a", true), driverPod("node-b", true)), inspectOf("node-a"): "hang", inspectOf("node-b"): report(`"pools":[]`)}
	nodes, err := Nodes(t.Context(), a.kubectl(t), 3*time.Second, func(int, int) {})
	if err != nil || len(nodes) != 2 || nodes[1].Err != nil || nodes[0].Err == nil || nodes[0].Err.Error() != "no answer in 3s" {
		t.Errorf("the nodes are %+v, %v", nodes, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Nodes(ctx, a.kubectl(t), time.Minute, func(int, int) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("it goes on after the user has ended it: %v", err)
	}
}

func TestOneNode(t *testing.T) {
	a := answers{plainPods: listOf(driverPod("node-a", true)), inspectOf("node-a"): report(`"pools":[]`)}
	k := a.kubectl(t)
	if n, err := NodeNamed(t.Context(), k, "node-a", time.Minute); err != nil || n.Err != nil || string(n.Raw) != report(`"pools":[]`) {
		t.Errorf("the node is %+v, %v", n, err)
	}
	if _, err := NodeNamed(t.Context(), k, "node-x", time.Minute); err == nil || !strings.HasSuffix(err.Error(), "these have: node-a") {
		t.Errorf("a node without the driver: %v", err)
	}
	elsewhere := answers{"get daemonsets": listOf(daemonSet("elsewhere", "driver"))}
	if _, err := NodeNamed(t.Context(), elsewhere.kubectl(t), "node-a", time.Minute); err == nil || !strings.HasSuffix(err.Error(), ": use --namespace=elsewhere") {
		t.Errorf("a driver in another namespace: %v", err)
	}
	refused := answers{"get daemonsets": listOf(daemonSet("storage", "driver"))}
	if _, err := NodeNamed(t.Context(), refused.kubectl(t), "node-a", time.Minute); err == nil || !strings.HasPrefix(err.Error(), "the DaemonSet storage/driver has no pods: see kubectl -n storage describe daemonset driver") {
		t.Errorf("a DaemonSet without pods: %v", err)
	}
	if _, err := NodeNamed(t.Context(), answers{}.kubectl(t), "node-a", time.Minute); err == nil || !strings.Contains(err.Error(), "the namespace storage has no pod of the driver") {
		t.Errorf("a cluster without the driver: %v", err)
	}
}

func TestErrorsMoveNoCursor(t *testing.T) {
	k := Kubectl{Program: "/bin/sh", Flags: []string{"-c", `printf 'a\033[2Jb' >&2; exit 1`}}
	if _, err := k.run(t.Context()); err == nil || !strings.HasSuffix(err.Error(), ": a?[2Jb") {
		t.Errorf("the error is %q", err)
	}
}

// A node can report whatever it likes.
func TestCellsMoveNoCursor(t *testing.T) {
	var table strings.Builder
	if err := WriteTable(&table, []string{"A"}, []PoolRow{{Node: "a\x1b[2Jb\nc\td"}}); err != nil || strings.ContainsAny(table.String(), "\x1b\t") || strings.Count(table.String(), "\n") != 2 {
		t.Errorf("%v, the table is %q", err, table.String())
	}
}
