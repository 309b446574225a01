// Package node runs a node of a cluster: a real kubelet and a real containerd in
// a mount namespace of their own, where the directories that a node has are this
// node's. Every node has filesystems for pools, on loop devices.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"kubevirt.io/hostpath-provisioner/test/cluster/process"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A Pool is a filesystem of a node that is to hold volumes.
type Pool struct {
	// Path is where the node mounts it.
	Path string
	// Kind is that of the filesystem, as package loopfs has it.
	Kind  string
	Bytes int64
	// Quota says that the kernel is to enforce the sizes of directories there.
	Quota bool
}

// A Config is what a node is made of.
type Config struct {
	Name string
	// Number distinguishes this node from the others, from 1 on.
	Number int
	// Dir has the files of the node. Its name must be short: there are sockets
	// in there.
	Dir, Programs, Logs string
	Cgroup              string
	Kubeconfig          string
	// Pause is the name of the image that holds a pod's namespaces.
	Pause string
	// Images are archives to import.
	Images []string
	Pools  []Pool
	// MaxPods is how many pods fit.
	MaxPods int
	// Kubelet is the directory of its kubelet by another name than the usual one: a symbolic link.
	Kubelet string
	// FeatureGates are those of its kubelet, as "Name: true".
	FeatureGates string
}

// A Node is a running node.
type Node struct {
	Config

	space      *process.Process
	containerd *process.Process
	kubelet    *process.Process
}

// own are the directories of a machine that each node has for itself, by the
// name that they have below the node's directory.
var own = map[string]string{
	"cni":   "/var/lib/cni",
	"run":   "/run/containerd",
	"logs":  "/var/log/containers",
	"netns": "/run/netns",
}

const (
	usualKubelet = "/var/lib/kubelet"
	// linkedKubelet is where a kubelet directory of another name leads.
	linkedKubelet = "/var/data/kubelet"
)

// placeKubelet makes the link to the directory of the kubelet, if it is one, and returns where the directory is. All nodes of the sandbox
// share the link.
func (n *Node) placeKubelet() (string, error) {
	if n.Kubelet == usualKubelet {
		return usualKubelet, nil
	}
	err := errors.Join(os.MkdirAll(filepath.Dir(n.Kubelet), 0o755), os.MkdirAll(linkedKubelet, 0o755))
	if at, _ := os.Readlink(n.Kubelet); err == nil && at != linkedKubelet {
		err = os.Symlink(linkedKubelet, n.Kubelet)
	}
	return linkedKubelet, err
}

// Start starts a node and returns when its kubelet is healthy.
func Start(ctx context.Context, config Config) (*Node, error) {
	n := &Node{Config: config}
	n.Kubelet = cmp.Or(n.Kubelet, usualKubelet)
	for _, step := range []func(context.Context) error{
		n.makePools, n.enterNamespace, n.startContainerd, n.importImages, n.StartKubelet,
	} {
		if err := step(ctx); err != nil {
			return n, fmt.Errorf("start node %s: %w", n.Name, err)
		}
	}
	return n, nil
}

func (n *Node) file(name string) string { return filepath.Join(n.Dir, name) }

// Disk is where a pool of the node can be read from outside the node.
func (n *Node) Disk(pool string) string { return n.file("pools" + pool) }

func (n *Node) makePools(ctx context.Context) error {
	for _, pool := range n.Pools {
		dir := n.Disk(pool.Path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := pool.mount(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

func (p Pool) mount(ctx context.Context, dir string) error {
	if !p.Quota {
		return loopfs.Mount(ctx, dir, p.Kind, p.Bytes)
	}
	switch p.Kind {
	case "btrfs":
		if err := loopfs.Mount(ctx, dir, p.Kind, p.Bytes); err != nil {
			return err
		}
		return loopfs.SwitchQuotasOn(ctx, dir)
	case "xfs":
		return loopfs.Mount(ctx, dir, p.Kind, p.Bytes, "prjquota")
	}
	return fmt.Errorf("there is no way here to switch on the quotas of %s", p.Kind)
}

// enterNamespace makes a mount namespace with this node's own directories, and
// keeps it with a program that does nothing.
func (n *Node) enterNamespace(ctx context.Context) error {
	// The logs of containers are worth keeping too.
	binds := map[string]string{filepath.Join(n.Logs, n.Name+"-pods"): "/var/log/pods"}
	for name, target := range own {
		binds[n.file(name)] = target
	}
	kubelet, err := n.placeKubelet()
	if err != nil {
		return err
	}
	binds[n.file("kubelet")] = kubelet
	for _, pool := range n.Pools {
		binds[n.Disk(pool.Path)] = pool.Path
	}
	var script strings.Builder
	script.WriteString("set -e\n")
	for source, target := range binds {
		// The targets are in what all nodes of the sandbox share.
		if err := errors.Join(os.MkdirAll(source, 0o755), os.MkdirAll(target, 0o755)); err != nil {
			return err
		}
		fmt.Fprintf(&script, "mount --bind %q %q\n", source, target)
	}
	ready := n.file("ready")
	// As under systemd: a container's mounts show on the node.
	fmt.Fprintf(&script, "mount --make-rshared /\n: >%q\nexec sleep infinity\n", ready)
	n.space, err = process.Start(n.Name+"-namespace", n.Logs, exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script.String()))
	if err != nil {
		return err
	}
	return n.space.UntilReady(ctx, func(context.Context) error {
		_, err := os.Stat(ready)
		return err
	})
}

// Command is a program to be run on this node.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--mount=/proc/" + strconv.Itoa(n.space.PID()) + "/ns/mnt", "--", name}, args...)...)
}

// Output runs a program on this node and returns what it prints.
func (n *Node) Output(ctx context.Context, name string, args ...string) (string, error) {
	var complaint strings.Builder
	cmd := n.Command(ctx, name, args...)
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s %s on %s: %w: %s", name, strings.Join(args, " "), n.Name, err, strings.TrimSpace(complaint.String()))
	}
	return string(out), nil
}

// service starts a program that outlives the context.
func (n *Node) service(name, program string, args ...string) (*process.Process, error) {
	return process.Start(n.Name+"-"+name, n.Logs, n.Command(context.Background(), program, args...))
}

const containerdSocket = "/run/containerd/containerd.sock"

func (n *Node) startContainerd(ctx context.Context) error {
	config := n.file("containerd.toml")
	if err := errors.Join(
		os.MkdirAll(n.file("net.d"), 0o755),
		os.WriteFile(n.file("net.d/10-bridge.conflist"), []byte(n.network()), 0o644),
		os.WriteFile(config, []byte(n.containerdConfig()), 0o644),
	); err != nil {
		return err
	}
	var err error
	if n.containerd, err = n.service("containerd", "containerd", "--config", config); err != nil {
		return err
	}
	return n.containerd.UntilReady(ctx, func(ctx context.Context) error { return n.ctr(ctx, "version") })
}

func (n *Node) ctr(ctx context.Context, args ...string) error {
	_, err := n.Output(ctx, "ctr", append([]string{"--address", containerdSocket, "--namespace", "k8s.io"}, args...)...)
	return err
}

func (n *Node) importImages(ctx context.Context) error {
	for _, archive := range n.Images {
		if err := n.Import(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}

// Import gives the node the image in an archive.
func (n *Node) Import(ctx context.Context, archive string) error {
	return n.ctr(ctx, "images", "import", archive)
}

// Tag gives an image of the node one more name.
func (n *Node) Tag(ctx context.Context, image, name string) error {
	return n.ctr(ctx, "images", "tag", "--force", image, name)
}

// StartKubelet starts the kubelet and returns when it says that it is healthy.
func (n *Node) StartKubelet(ctx context.Context) error {
	config := n.file("kubelet.yaml")
	if err := errors.Join(
		os.WriteFile(n.file("resolv.conf"), nil, 0o644),
		os.WriteFile(config, []byte(n.kubeletConfig()), 0o644),
	); err != nil {
		return err
	}
	var err error
	n.kubelet, err = n.service("kubelet", filepath.Join(n.Programs, "kubelet"),
		"--config="+config,
		"--kubeconfig="+n.Kubeconfig,
		"--hostname-override="+n.Name,
		"--node-ip="+nodeAddress,
		"--root-dir="+n.Kubelet,
		"--cert-dir="+n.file("kubelet-certificates"),
		"--v=2",
	)
	if err != nil {
		return err
	}
	return n.kubelet.UntilReady(ctx, n.kubeletHealthy)
}

func (n *Node) kubeletHealthy(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/healthz", n.healthPort()), nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the kubelet's health is %s", response.Status)
	}
	return nil
}

// StopKubelet ends the kubelet and leaves the pods running.
func (n *Node) StopKubelet(ctx context.Context) error { return n.kubelet.Stop(ctx) }

// KillKubelet ends the kubelet at once and leaves the pods running.
func (n *Node) KillKubelet() error { return n.kubelet.Kill() }

// Err says which of its programs have ended, if any have.
func (n *Node) Err() error {
	return errors.Join(n.containerd.Err(), n.kubelet.Err())
}
