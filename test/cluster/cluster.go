// Package cluster starts a real Kubernetes cluster inside a sandbox of this
// machine, from programs that were built before: the control plane, and nodes
// with real kubelets and real pods. The product is installed there from its own
// manifests, as a user does it.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevirt.io/hostpath-provisioner/test/cluster/control"
	"kubevirt.io/hostpath-provisioner/test/cluster/node"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
)

// Options are what a cluster is made of.
type Options struct {
	Sandbox *sandbox.Sandbox
	// Programs is a directory with the programs of Kubernetes, of the sidecars
	// and of their stand-ins, and with the images of our programs, such as hostpath-csi-driver.tar.
	Programs string
	// Logs is a directory for the logs of all programs and containers.
	Logs string
	// Nodes are the names of the nodes.
	Nodes []string
	// Kubelet is the directory of each kubelet by another name than the usual one.
	Kubelet string
	// Pools are what each node gets.
	Pools []node.Pool
	// HealthOn are the nodes whose kubelet asks for the health of volumes and shows it, which
	// kubelets do only with a feature gate.
	HealthOn []string
	// Images are archives of all that the nodes run, as MakeImages makes them. If
	// there are none they are made.
	Images []string
	Log    *progress.Log
}

// Pools are the two that the overlay of the manifests is for: one whose sizes
// the kernel keeps, on a filesystem of that kind, btrfs or xfs, and one without.
func Pools(kind string) []node.Pool {
	return []node.Pool{
		{Path: "/var/hpvolumes", Kind: kind, Bytes: 8 << 30, Quota: true},
		{Path: "/var/plain", Kind: "ext4", Bytes: 1 << 30},
	}
}

// A Cluster is a running one.
type Cluster struct {
	Options

	Client kubernetes.Interface
	Config *rest.Config
	// Kubeconfig is that of the administrator, inside the sandbox.
	Kubeconfig string
	Nodes      map[string]*node.Node

	control *control.Plane
}

// Up starts a cluster and returns when its nodes are ready. What it started ends
// with the sandbox. When it fails the cluster is returned too, for what can be
// said of it.
func Up(ctx context.Context, options Options) (*Cluster, error) {
	c := &Cluster{Options: options, Nodes: map[string]*node.Node{}}
	if err := os.MkdirAll(c.Logs, 0o755); err != nil {
		return c, err
	}
	c.Log.Printf("control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler")
	var err error
	c.control, err = control.New(filepath.Join(c.Sandbox.Dir, "control"), c.Programs, c.Logs, c.Options.Nodes, c.serverGates())
	if err != nil {
		return c, err
	}
	if err := c.startControl(ctx); err != nil {
		return c, fmt.Errorf("start the control plane: %w", err)
	}
	if err := c.connect(); err != nil {
		return c, err
	}
	if len(c.Images) == 0 {
		c.Log.Printf("images")
		if c.Images, err = MakeImages(ctx, c.Programs, c.Sandbox.Dir); err != nil {
			return c, fmt.Errorf("make the images: %w", err)
		}
	}
	c.Log.Printf("nodes %s: containerd, kubelet", strings.Join(c.Options.Nodes, " and "))
	if err := c.startNodes(ctx); err != nil {
		return c, err
	}
	return c, c.Log.Until(ctx, 2*time.Minute, "nodes to be ready", Patient(c.nodesReady))
}

func (c *Cluster) startControl(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.Log.Limit(2*time.Minute))
	defer cancel()
	return c.control.Start(ctx)
}

func (c *Cluster) connect() (err error) {
	c.Kubeconfig = filepath.Join(c.Sandbox.Dir, "kubeconfig")
	if err := c.WriteKubeconfig(c.Kubeconfig, control.Server); err != nil {
		return err
	}
	if c.Config, err = c.control.Config(control.Admin); err != nil {
		return err
	}
	c.Client, err = kubernetes.NewForConfig(c.Config)
	return err
}

// WriteKubeconfig writes a file by which the administrator finds the API server
// at some address.
func (c *Cluster) WriteKubeconfig(path, server string) error {
	return c.control.WriteKubeconfig(path, control.Admin, server)
}

// startNodes starts all nodes at once.
func (c *Cluster) startNodes(ctx context.Context) error {
	var mu sync.Mutex
	var wait sync.WaitGroup
	var problems []error
	for i, name := range c.Options.Nodes {
		wait.Go(func() {
			started, err := c.startNode(ctx, i+1, name)
			mu.Lock()
			defer mu.Unlock()
			c.Nodes[name] = started
			problems = append(problems, err)
		})
	}
	wait.Wait()
	return errors.Join(problems...)
}

func (c *Cluster) startNode(ctx context.Context, number int, name string) (*node.Node, error) {
	dir := filepath.Join(c.Sandbox.Dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := c.control.WriteKubeconfig(kubeconfig, control.Node(name), control.Server); err != nil {
		return nil, err
	}
	group, err := c.Sandbox.Subgroup(name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Log.Limit(3*time.Minute))
	defer cancel()
	return node.Start(ctx, node.Config{
		Name:       name,
		Number:     number,
		Dir:        dir,
		Programs:   c.Programs,
		Logs:       c.Logs,
		Cgroup:     group,
		Kubeconfig: kubeconfig,
		Pause:      pauseImage,
		Images:     c.Images,
		Pools:      c.Pools,
		MaxPods:    250,
		Kubelet:    c.Kubelet,

		FeatureGates: c.kubeletGates(name),
	})
}

// healthGate is the feature gate of Kubernetes for the health that CSI drivers report.
const healthGate = "CSIVolumeHealth"

func (c *Cluster) serverGates() string {
	for _, node := range c.HealthOn {
		if node != "" {
			return healthGate + "=true"
		}
	}
	return ""
}

func (c *Cluster) kubeletGates(node string) string {
	if !slices.Contains(c.HealthOn, node) {
		return ""
	}
	return healthGate + ": true"
}

func (c *Cluster) nodesReady(ctx context.Context) (string, error) {
	if err := c.Err(); err != nil {
		return "", err
	}
	nodes, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	var missing []string
	for _, name := range c.Options.Nodes {
		missing = append(missing, name+": not registered")
		for _, n := range nodes.Items {
			if n.Name == name {
				missing[len(missing)-1] = unready(n)
			}
		}
	}
	return join(missing), nil
}

// unready says why no pod can be scheduled to a node, or is empty.
func unready(n corev1.Node) string {
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
			return n.Name + ": " + condition.Message
		}
	}
	for _, taint := range n.Spec.Taints {
		return n.Name + ": tainted with " + taint.Key
	}
	return ""
}

// join puts those of the parts together that say something.
func join(parts []string) string {
	var said []string
	for _, part := range parts {
		if part != "" {
			said = append(said, part)
		}
	}
	return strings.Join(said, "; ")
}

// Err says which of the cluster's programs have ended, if any have.
func (c *Cluster) Err() error {
	problems := []error{c.control.Err()}
	for _, n := range c.Nodes {
		problems = append(problems, n.Err())
	}
	return errors.Join(problems...)
}

// Kubectl runs kubectl as the administrator and returns what it prints.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(c.Programs, "kubectl"), append([]string{"--kubeconfig=" + c.Kubeconfig}, args...)...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}
