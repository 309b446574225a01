package cluster

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What the manifests in deploy/ call things.
const (
	Namespace  = "hostpath-provisioner"
	DaemonSet  = "hostpath-csi-driver"
	DriverName = "kubevirt.io.hostpath-provisioner"
)

// InstallSnapshotController applies a kustomization with the snapshot-controller and its kinds, and waits until these can
// be used.
func (c *Cluster) InstallSnapshotController(ctx context.Context, kustomization string) error {
	c.Log.Printf("kubectl apply -k %s", kustomization)
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "-k", kustomization); err != nil {
		return err
	}
	return c.Established(ctx, "crd",
		"volumesnapshots.snapshot.storage.k8s.io", "volumesnapshotcontents.snapshot.storage.k8s.io", "volumesnapshotclasses.snapshot.storage.k8s.io")
}

// Established waits until the API server answers for the definitions that the arguments name for kubectl get. One that was made a moment
// ago has no list of conditions, which kubectl wait takes for an error, and is said to be established before it is served.
func (c *Cluster) Established(ctx context.Context, definitions ...string) error {
	return c.Log.Until(ctx, time.Minute, "the API server to serve "+strings.Join(definitions, " "), func(ctx context.Context) (string, error) {
		err := c.established(ctx, definitions)
		if refused := new(exec.ExitError); errors.As(err, &refused) {
			return err.Error(), nil
		}
		return "", err
	})
}

func (c *Cluster) established(ctx context.Context, definitions []string) error {
	if _, err := c.Kubectl(ctx, append([]string{"wait", "--for=condition=Established", "--timeout=30s"}, definitions...)...); err != nil {
		return err
	}
	names, err := c.Kubectl(ctx, append([]string{"get", "-o", "name"}, definitions...)...)
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(names) {
		_, kind, _ := strings.Cut(name, "/")
		if _, err := c.Kubectl(ctx, "get", "--all-namespaces", kind); err != nil {
			return err
		}
	}
	return nil
}

// Install applies a kustomization of the product, and waits until it is ready.
func (c *Cluster) Install(ctx context.Context, kustomization string) error {
	c.Log.Printf("kubectl apply -k %s", kustomization)
	if _, err := c.Kubectl(ctx, "apply", "-k", kustomization); err != nil {
		return err
	}
	return c.DriverReady(ctx)
}

// InstallRestores applies a kustomization with the operator and its webhook for restores, and waits until the API server can
// ask that.
func (c *Cluster) InstallRestores(ctx context.Context, kustomization string) error {
	for _, n := range c.Nodes {
		if err := n.Import(ctx, filepath.Join(c.Programs, "hostpath-provisioner-operator.tar")); err != nil {
			return err
		}
	}
	c.Log.Printf("kubectl apply -k %s", kustomization)
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "-k", kustomization); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "wait", "--for=condition=Available", "--timeout=2m", "--namespace="+Namespace, "deployment/hostpath-provisioner-operator"); err != nil {
		return err
	}
	_, err := c.Kubectl(ctx, "wait", "--for=jsonpath={.webhooks[0].clientConfig.caBundle}", "--timeout=1m",
		"mutatingwebhookconfiguration/hostpath-provisioner-operator-restores")
	return err
}

// DriverReady waits until the driver runs on every node and kubelet knows of it.
func (c *Cluster) DriverReady(ctx context.Context) error {
	return c.Log.Until(ctx, 3*time.Minute, "the driver to be ready on every node", Patient(c.driverReady))
}

func (c *Cluster) driverReady(ctx context.Context) (string, error) {
	set, err := c.Client.AppsV1().DaemonSets(Namespace).Get(ctx, DaemonSet, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if !rolledOut(set, len(c.Options.Nodes)) {
		pods, err := c.Client.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%d of %d; %s", set.Status.NumberReady, len(c.Options.Nodes), waiting(pods.Items)), nil
	}
	for name := range c.Nodes {
		known, err := c.Client.StorageV1().CSINodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		registered := false
		for _, driver := range known.Spec.Drivers {
			registered = registered || driver.Name == DriverName
		}
		if !registered {
			return name + ": not registered with kubelet", nil
		}
	}
	return "", nil
}

func rolledOut(set *appsv1.DaemonSet, nodes int) bool {
	s := set.Status
	return s.ObservedGeneration == set.Generation && int(s.DesiredNumberScheduled) == nodes &&
		int(s.UpdatedNumberScheduled) == nodes && int(s.NumberReady) == nodes
}

// waiting says what keeps pods from being ready.
func waiting(pods []corev1.Pod) string {
	var parts []string
	for _, pod := range pods {
		parts = append(parts, State(pod))
	}
	return join(parts)
}

// State says why a pod is not ready, or is empty.
func State(pod corev1.Pod) string {
	if pod.DeletionTimestamp != nil {
		return pod.Name + ": terminating"
	}
	for _, status := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
		switch {
		case status.State.Waiting != nil:
			return fmt.Sprintf("%s: %s: %s %s", pod.Name, status.Name, status.State.Waiting.Reason, status.State.Waiting.Message)
		case status.State.Terminated != nil && pod.Status.Phase != corev1.PodSucceeded:
			return fmt.Sprintf("%s: %s has ended with %d", pod.Name, status.Name, status.State.Terminated.ExitCode)
		}
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return pod.Name + ": " + condition.Message
		}
	}
	if pod.Status.Phase == corev1.PodPending {
		return pod.Name + ": pending"
	}
	return ""
}

// Uninstall deletes what Install has applied, and waits until no pod of it is
// left.
func (c *Cluster) Uninstall(ctx context.Context, kustomization string) error {
	c.Log.Printf("kubectl delete -k %s", kustomization)
	if _, err := c.Kubectl(ctx, "delete", "-k", kustomization, "--timeout=2m"); err != nil {
		return err
	}
	return c.Log.Until(ctx, 2*time.Minute, "the driver to be gone", Patient(func(ctx context.Context) (string, error) {
		pods, err := c.Client.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		var there []string
		for _, pod := range pods.Items {
			there = append(there, pod.Name)
		}
		return strings.Join(there, ", "), nil
	}))
}
