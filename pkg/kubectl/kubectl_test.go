package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The test's own program stands in for kubectl: what it is asked is the name of a file that it prints. test/cluster has the real one.
func TestMain(m *testing.M) {
	if dir := os.Getenv("KUBECTL_ANSWERS"); dir != "" {
		os.Exit(standIn(dir))
	}
	os.Exit(m.Run())
}

func standIn(dir string) int {
	var name []string
	for _, a := range os.Args[1:] {
		if a != "--" && a != "--output=json" && a != "--all-namespaces" && a != "/hostpath-csi-driver" {
			name = append(name, strings.NewReplacer("/", "_", "=", "_").Replace(a))
		}
	}
	answer := filepath.Join(dir, strings.Join(name, " "))
	text, err := os.ReadFile(answer)
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "warning\nerror: %v\n", err)
		return 1
	case string(text) == "hang":
		time.Sleep(time.Hour) // until it is killed
	}
	fmt.Print(string(text))
	if strings.Contains(string(text), `"abnormal":1`) {
		return 2
	}
	return 0
}

// answers are what kubectl gives, by what it is asked.
type answers map[string]any

func (a answers) kubectl(t *testing.T) Kubectl {
	t.Helper()
	dir := t.TempDir()
	for _, kind := range []string{"get pods --namespace_storage --selector_app.kubernetes.io_name_hostpath-csi-driver", "get pods --namespace_storage --selector_k8s-app_hostpath-provisioner", "get persistentvolumes"} {
		if _, ok := a[kind]; !ok {
			a[kind] = map[string]any{"items": []any{}}
		}
	}
	for name, answer := range a {
		text, ok := answer.(string)
		if !ok {
			encoded, err := json.Marshal(answer)
			if err != nil {
				t.Fatal(err)
			}
			text = string(encoded)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("KUBECTL_ANSWERS", dir)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Kubectl{Program: self, Namespace: "storage"}
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

func listOf(items ...any) any { return map[string]any{"items": items} }

const (
	plainPods    = "get pods --namespace_storage --selector_app.kubernetes.io_name_hostpath-csi-driver"
	operatorPods = "get pods --namespace_storage --selector_k8s-app_hostpath-provisioner"
)

func inspectOf(node string) string {
	return "exec --namespace_storage driver-" + node + " --container_driver inspect"
}

func report(more string) string { return `{"version":1,` + more + `}` }

func nodesOf(t *testing.T, a answers) []Node {
	t.Helper()
	nodes, err := Nodes(t.Context(), a.kubectl(t), time.Minute, func(int, int) {})
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

func TestNodesThatGiveNoReportAreShown(t *testing.T) {
	other := map[string]any{"metadata": map[string]any{"name": "mounter"}, "spec": map[string]any{"nodeName": "node-a", "containers": []any{map[string]any{"name": "mounter"}}}}
	a := answers{
		plainPods:           listOf(driverPod("node-a", false), driverPod("node-c", true)),
		operatorPods:        listOf(other, driverPod("node-a", true), driverPod("node-b", false), driverPod("node-d", true), driverPod("node-e", true)),
		inspectOf("node-a"): report(`"abnormal":1,"pools":[{"name":"local","path":"/p","quota":"xfs","sizeBytes":3221225472,"freeBytes":1073741824,"abnormal":true,"condition":"read-only"}]`),
		inspectOf("node-d"): `{"version":2}`,
		inspectOf("node-e"): `{"version":`,
	}
	rows := Pools(nodesOf(t, a))
	var table strings.Builder
	if err := WriteTable(&table, PoolHeadings, rows); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(table.String(), "\n")
	for i, want := range []string{
		"NODE     POOL    SIZE      PROMISED   USED      FREE      AVAILABLE   CONDITION",
		"node-a   local   3.0 GiB   -          2.0 GiB   1.0 GiB   -           ABNORMAL: read-only",
		"node-b   -       -         -          -         -         -           ABNORMAL: the driver does not run: see kubectl -n storage describe pod driver-node-b",
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
	if err != nil {
		t.Fatal(err)
	}
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
	nodes, err := Nodes(t.Context(), a.kubectl(t), 500*time.Millisecond, func(int, int) {})
	if err != nil || len(nodes) != 2 || nodes[1].Err != nil || nodes[0].Err == nil || nodes[0].Err.Error() != "no answer in 500ms" {
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
	if _, err := NodeNamed(t.Context(), answers{}.kubectl(t), "node-a", time.Minute); err == nil || !strings.Contains(err.Error(), "the namespace storage has no pod of the driver") {
		t.Errorf("a cluster without the driver: %v", err)
	}
}

// A node can report whatever it likes.
func TestCellsMoveNoCursor(t *testing.T) {
	var table strings.Builder
	if err := WriteTable(&table, []string{"A"}, []PoolRow{{Node: "a\x1b[2Jb\nc\td"}}); err != nil || strings.ContainsAny(table.String(), "\x1b\t") || strings.Count(table.String(), "\n") != 2 {
		t.Errorf("%v, the table is %q", err, table.String())
	}
}
