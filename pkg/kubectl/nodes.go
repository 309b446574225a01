package kubectl

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

const (
	// container has this name in all manifests of the driver, and the operator's are made of these.
	container = "driver"
	// atOnce is how many nodes are asked at a time.
	atOnce = 16
)

// A Driver is one of its pods.
type Driver struct{ Node, Namespace, Pod string }

func has(p corev1.Pod, name string) bool {
	return slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == name })
}

func runs(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == container && c.State.Running != nil })
}

// selectors find the pods of the driver as deploy/csi makes them, and as the operator does.
var selectors = []string{"app.kubernetes.io/name=hostpath-csi-driver", "k8s-app=hostpath-provisioner"}

// A Node is what one node has.
type Node struct {
	Driver Driver
	Report Report
	// Raw is the report as the node gave it.
	Raw json.RawMessage
	// Err is why there is none.
	Err error
}

// Nodes asks the driver on each node, many at once, for so long at most. Progress is told how many have answered.
func Nodes(ctx context.Context, k Kubectl, each time.Duration, progress func(answered, of int)) ([]Node, error) {
	pods, err := drivers(ctx, k)
	if err != nil {
		return nil, err
	}
	nodes := make([]Node, len(pods))
	free := make(chan struct{}, atOnce)
	var asked sync.WaitGroup
	var mu sync.Mutex
	answered := 0
	progress(0, len(pods))
	for i, p := range pods {
		asked.Go(func() {
			free <- struct{}{}
			defer func() { <-free }()
			nodes[i] = ask(ctx, k, p, each)
			mu.Lock()
			defer mu.Unlock()
			answered++
			progress(answered, len(pods))
		})
	}
	asked.Wait()
	return nodes, ctx.Err()
}

// NodeNamed asks one node.
func NodeNamed(ctx context.Context, k Kubectl, name string, patience time.Duration) (Node, error) {
	pods, err := drivers(ctx, k)
	if err != nil {
		return Node{}, err
	}
	var names []string
	for _, p := range pods {
		if p.Spec.NodeName == name {
			return ask(ctx, k, p, patience), nil
		}
		names = append(names, p.Spec.NodeName)
	}
	return Node{}, fmt.Errorf("it has no pod of the driver; these have: %s", strings.Join(names, ", "))
}

// NodeNames are the nodes that have a pod of the driver.
func NodeNames(ctx context.Context, k Kubectl) (names []string, err error) {
	pods, err := drivers(ctx, k)
	for _, p := range pods {
		names = append(names, p.Spec.NodeName)
	}
	return names, err
}

// drivers are the pods of the driver by their nodes. Of two on one node, as during an update, the one that runs counts.
func drivers(ctx context.Context, k Kubectl) ([]corev1.Pod, error) {
	of := make(map[string]corev1.Pod)
	for _, selector := range selectors {
		var pods []corev1.Pod
		if err := list(ctx, k, &pods, "pods", "--namespace="+k.Namespace, "--selector="+selector); err != nil {
			return nil, err
		}
		for _, p := range pods {
			if known, ok := of[p.Spec.NodeName]; p.Spec.NodeName != "" && has(p, container) && (!ok || !runs(known)) {
				of[p.Spec.NodeName] = p
			}
		}
	}
	if len(of) == 0 {
		return nil, noDriver(ctx, k)
	}
	return slices.SortedFunc(maps.Values(of), func(a, b corev1.Pod) int { return cmp.Compare(a.Spec.NodeName, b.Spec.NodeName) }), nil
}

// noDriver says where the driver is, or that its DaemonSet has no pods.
func noDriver(ctx context.Context, k Kubectl) error {
	var sets []appsv1.DaemonSet
	err := get(ctx, k, &sets, daemonSets)
	found := daemonSetsOf(sets)
	for _, set := range found {
		if name, here := strings.CutPrefix(set, k.Namespace+"/"); here {
			return fmt.Errorf("the DaemonSet %s has no pods: see kubectl -n %s describe daemonset %s; they are refused if the namespace lacks the label pod-security.kubernetes.io/enforce=privileged",
				set, k.Namespace, name)
		}
	}
	if err == nil && len(found) > 0 {
		namespace, _, _ := strings.Cut(found[0], "/")
		return fmt.Errorf("the namespace %s has no pod of the driver: use --namespace=%s", k.Namespace, namespace)
	}
	return fmt.Errorf("the namespace %s has no pod of the driver, with the label %s or %s: name its namespace by --namespace", k.Namespace, selectors[0], selectors[1])
}

// waitsFor is why a container of the driver's pod waits, in brackets. Others may be what the driver's waits for.
func waitsFor(p corev1.Pod) string {
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if why := reason(s); why != "" {
			return " (" + why + ")"
		}
	}
	return ""
}

func ask(ctx context.Context, k Kubectl, p corev1.Pod, each time.Duration) Node {
	n := Node{Driver: Driver{Node: p.Spec.NodeName, Namespace: p.Namespace, Pod: p.Name}}
	if !runs(p) {
		n.Err = fmt.Errorf("the driver does not run%s: see kubectl -n %s describe pod %s", waitsFor(p), n.Driver.Namespace, n.Driver.Pod)
		return n
	}
	ctx, cancel := context.WithTimeoutCause(ctx, each, fmt.Errorf("no answer in %v", each))
	defer cancel()
	if n.Raw, n.Err = k.Inspect(ctx, n.Driver); n.Err != nil {
		return n
	}
	if err := json.Unmarshal(n.Raw, &n.Report); err != nil {
		n.Err = fmt.Errorf("read its report: %w", err)
	} else if n.Report.Version != reportVersion {
		n.Err = fmt.Errorf("its report has version %d, and this program reads %d: use the plugin of the driver's version", n.Report.Version, reportVersion)
	}
	return n
}
