package cases_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// long is time enough for anything that a user would wait for.
const long = 2 * time.Minute

// The pools of each node, by the class that leads to them.
var poolPaths = map[string]string{
	"hostpath-csi":       "/var/hpvolumes",
	"hostpath-csi-plain": "/var/plain",
}

// What single cases have besides.
var casePaths = map[string]string{operatorClass: operatorPool, operatorLegacyClass: operatorPool}

// pathOf is the pool of a class on each node; empty if none is known.
func pathOf(class string) string { return cmp.Or(poolPaths[class], casePaths[class]) }

// A harness is a namespace for one test.
type harness struct {
	*testing.T
	namespace string
}

// begin makes a namespace. At the end of the test it is deleted, and then neither
// the cluster nor a disk may have anything left of it.
func begin(t *testing.T) *harness {
	t.Helper()
	made, err := c.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "case-"},
	}, metav1.CreateOptions{})
	must.Succeed(t, err)
	h := &harness{T: t, namespace: made.Name}
	t.Cleanup(h.end)
	h.until("the namespace's service account", func(ctx context.Context) (string, error) {
		_, err := c.Client.CoreV1().ServiceAccounts(h.namespace).Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "missing", nil
		}
		return "", err
	})
	return h
}

func (h *harness) end() {
	if h.Failed() {
		h.explain()
	}
	h.clear("nothing to be left", h.remains)
	// It is empty, so that this takes no time.
	if err := c.Client.CoreV1().Namespaces().Delete(context.Background(), h.namespace, metav1.DeleteOptions{}); err != nil {
		h.Error(err)
	}
}

// clear removes what is in the namespace, and waits for what follows from that.
func (h *harness) clear(what string, done func(context.Context) (string, error)) {
	h.Helper()
	// The test's own context has ended.
	ctx := context.Background()
	options := metav1.DeleteOptions{}
	all := metav1.ListOptions{}
	snapshots, err := snapshotKinds("volumesnapshots", h.namespace)
	if err != nil {
		h.Error(err)
		return
	}
	if err := errors.Join(
		snapshots.DeleteCollection(ctx, options, all),
		c.Client.AppsV1().StatefulSets(h.namespace).DeleteCollection(ctx, options, all),
		c.Client.CoreV1().Pods(h.namespace).DeleteCollection(ctx, options, all),
		c.Client.CoreV1().PersistentVolumeClaims(h.namespace).DeleteCollection(ctx, options, all),
	); err != nil {
		h.Error(err)
		return
	}
	if err := c.Log.Until(ctx, long, what, cluster.Patient(done)); err != nil {
		h.Error(err)
	}
}

// explain prints what has happened in the namespace.
func (h *harness) explain() {
	events, err := c.Client.CoreV1().Events(h.namespace).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		h.Log(err)
		return
	}
	for _, e := range events.Items {
		h.Logf("%s %s %s: %s: %s", e.CreationTimestamp.Format(time.TimeOnly), e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message)
	}
}

// remains says what is left of the namespace, or is empty.
func (h *harness) remains(ctx context.Context) (string, error) {
	pods, err := c.Client.CoreV1().Pods(h.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	if len(pods.Items) > 0 {
		return fmt.Sprintf("%d pods", len(pods.Items)), nil
	}
	volumes, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, volume := range volumes.Items {
		if claim := volume.Spec.ClaimRef; claim != nil && claim.Namespace == h.namespace {
			return fmt.Sprintf("%s is %s: %s", volume.Name, volume.Status.Phase, volume.Status.Message), nil
		}
	}
	if left, err := snapshotsLeft(ctx, h.namespace); left != "" || err != nil {
		return left, err
	}
	return onDisks()
}

// onDisks says which volumes there are on the nodes' disks, whole or being made
// or removed, or is empty.
func onDisks() (string, error) {
	for name, n := range c.Nodes {
		for _, pool := range slices.AppendSeq(slices.Collect(maps.Values(poolPaths)), maps.Values(casePaths)) {
			for _, pattern := range []string{"*", ".hostpath-provisioner/creating/*/*", ".hostpath-provisioner/trash/*/*", ".hostpath-provisioner/volumes/*", ".hostpath-provisioner/snapshots/*"} {
				found, err := filepath.Glob(filepath.Join(n.Disk(pool), pattern))
				if err != nil {
					return "", err
				}
				for _, path := range found {
					if base := filepath.Base(path); base != "lost+found" && base != ".hostpath-provisioner" {
						return fmt.Sprintf("%s on the disk of %s", strings.TrimPrefix(path, n.Disk(pool)), name), nil
					}
				}
			}
		}
	}
	return "", nil
}

// until waits for something that has to come within a time that a user would
// accept.
func (h *harness) until(what string, check func(context.Context) (string, error)) {
	h.Helper()
	must.Succeed(h, c.Log.Until(h.Context(), long, what, cluster.Patient(check)))
}

// text is what an error says, and empty without one: what until waits for where an error is a state that passes.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// run runs a script in the first container of a pod and returns what it prints.
func (h *harness) run(pod, script string) (string, error) {
	out, err := h.exec(h.namespace, pod, "", "sh", "-ec", script)
	if err != nil {
		return out, fmt.Errorf("%s in %s: %w", script, pod, err)
	}
	return out, nil
}

// exec runs a program in a container of a pod, the first if none is named, and returns
// what it prints.
func (h *harness) exec(namespace, pod, container string, command ...string) (string, error) {
	request := c.Client.CoreV1().RESTClient().Post().Namespace(namespace).Resource("pods").Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(c.Config, "POST", request.URL())
	if err != nil {
		return "", err
	}
	var out, complaint bytes.Buffer
	if err := executor.StreamWithContext(h.Context(), remotecommand.StreamOptions{Stdout: &out, Stderr: &complaint}); err != nil {
		return out.String(), fmt.Errorf("%w: %s", err, bytes.TrimSpace(complaint.Bytes()))
	}
	return out.String(), nil
}

// mustRun is run for a script that has to succeed.
func (h *harness) mustRun(pod, script string) string {
	h.Helper()
	out, err := h.run(pod, script)
	must.Succeed(h, err)
	return out
}

// wantNoSpace says that a script writes more than a volume has space for.
func (h *harness) wantNoSpace(pod, script string) {
	h.Helper()
	if _, err := h.run(pod, script); err == nil {
		h.Errorf("%s in %s is not refused", script, pod)
	} else if !strings.Contains(err.Error(), "No space left on device") && !strings.Contains(err.Error(), "Disk quota exceeded") {
		h.Errorf("it is not for want of space that it fails: %v", err)
	}
}

// wantFile says that a file on a disk has this text.
func (h *harness) wantFile(path, want string) {
	h.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		h.Error(err)
	} else if string(got) != want {
		h.Errorf("%s holds %q, want %q", path, got, want)
	}
}

// wantGone says that a path must not be there, or no more in a moment.
func (h *harness) wantGone(path string) {
	h.Helper()
	h.until(path+" to be gone", func(context.Context) (string, error) {
		_, err := os.Lstat(path)
		if errors.Is(err, os.ErrNotExist) {
			return "", nil
		}
		return "still there", err
	})
}

// wantEvent waits for an event about an object whose message has all of the words.
func (h *harness) wantEvent(kind, name string, words ...string) corev1.Event {
	h.Helper()
	var found corev1.Event
	h.until(fmt.Sprintf("an event about %s %s with %q", kind, name, words), func(ctx context.Context) (string, error) {
		events, err := c.Client.CoreV1().Events(h.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		seen := map[string]bool{}
		for _, e := range events.Items {
			if e.InvolvedObject.Kind != kind || e.InvolvedObject.Name != name {
				continue
			}
			seen[e.Reason+": "+e.Message] = true
			if hasAll(e.Reason+" "+e.Message, words) {
				found = e
				return "", nil
			}
		}
		return fmt.Sprintf("seen %d others: %s", len(seen), strings.Join(sorted(seen), "; ")), nil
	})
	return found
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

func sorted(set map[string]bool) []string { return slices.Sorted(maps.Keys(set)) }

// disk is where a volume is on its node, seen from outside the node.
func (h *harness) disk(volume *corev1.PersistentVolume) string {
	h.Helper()
	path := pathOf(volume.Spec.StorageClassName)
	if path == "" {
		h.Fatalf("no pool is known of class %q", volume.Spec.StorageClassName)
	}
	return filepath.Join(c.Nodes[h.nodeOf(volume)].Disk(path), volume.Spec.CSI.VolumeHandle)
}

// nodeOf is the one node that a volume is for.
func (h *harness) nodeOf(volume *corev1.PersistentVolume) string {
	h.Helper()
	if volume.Spec.NodeAffinity != nil && volume.Spec.NodeAffinity.Required != nil {
		for _, term := range volume.Spec.NodeAffinity.Required.NodeSelectorTerms {
			for _, e := range term.MatchExpressions {
				if e.Key == "topology.hostpath.csi/node" && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) == 1 {
					return e.Values[0]
				}
			}
		}
	}
	h.Fatalf("volume %s is not for one node: %v", volume.Name, volume.Spec.NodeAffinity)
	return ""
}
