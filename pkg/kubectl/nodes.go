package kubectl

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// container has this name in all manifests of the driver, and the operator's are made of these.
	container = "driver"
	// atOnce is how many nodes are asked at a time.
	atOnce = 16
)

// A Driver is one of its pods.
type Driver struct{ Node, Namespace, Pod string }

// A pod is what is read of one.
type pod struct {
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Spec struct {
		NodeName   string `json:"nodeName"`
		Containers []struct {
			Name  string `json:"name"`
			Image string `json:"image"`
		} `json:"containers"`
	} `json:"spec"`
	Status struct {
		ContainerStatuses []struct {
			Name  string `json:"name"`
			State struct {
				Running *struct{} `json:"running"`
			} `json:"state"`
		} `json:"containerStatuses"`
	} `json:"status"`
}

func (p pod) isDriver() bool { return p.Spec.NodeName != "" && p.has(container) }

// has reports whether it has a container of that name.
func (p pod) has(name string) bool {
	for _, c := range p.Spec.Containers {
		if c.Name == name {
			return true
		}
	}
	return false
}

func (p pod) runs() bool {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c.State.Running != nil
		}
	}
	return false
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
func drivers(ctx context.Context, k Kubectl) ([]pod, error) {
	of := make(map[string]pod)
	for _, selector := range selectors {
		pods, err := list[pod](ctx, k, "pods", "--namespace="+k.Namespace, "--selector="+selector)
		if err != nil {
			return nil, err
		}
		for _, p := range pods {
			if known, ok := of[p.Spec.NodeName]; p.isDriver() && (!ok || !known.runs()) {
				of[p.Spec.NodeName] = p
			}
		}
	}
	if len(of) == 0 {
		return nil, fmt.Errorf("the namespace %s has no pod of the driver, with the label %s or %s: name its namespace by --namespace", k.Namespace, selectors[0], selectors[1])
	}
	all := make([]pod, 0, len(of))
	for _, p := range of {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b pod) int { return cmp.Compare(a.Spec.NodeName, b.Spec.NodeName) })
	return all, nil
}

func ask(ctx context.Context, k Kubectl, p pod, each time.Duration) Node {
	n := Node{Driver: Driver{Node: p.Spec.NodeName, Namespace: p.Metadata.Namespace, Pod: p.Metadata.Name}}
	if !p.runs() {
		n.Err = fmt.Errorf("the driver does not run: see kubectl -n %s describe pod %s", n.Driver.Namespace, n.Driver.Pod)
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
