package cases_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

const (
	operatorOverlay   = "../overlay/operator"
	operatorDaemonSet = "hostpath-provisioner-csi"
	operatorClass     = "hostpath-operator"
	operatorPool      = "/var/hpvolumes/csi"
	// operatorLegacyClass is that of the pool which pathConfig makes.
	operatorLegacyClass = "hostpath-operator-legacy"
)

// withOperator replaces the driver that was installed from deploy/csi by the operator, and puts it back at the end.
func (s *scene) withOperator() dynamic.ResourceInterface {
	s.Helper()
	if err := c.Uninstall(s.Context(), kustomization); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		ctx := context.Background()
		_, err := c.Kubectl(ctx, "delete", "-k", operatorOverlay, "--ignore-not-found", "--timeout=2m")
		for _, n := range c.Nodes {
			err = errors.Join(err, os.RemoveAll(n.Disk(operatorPool)))
		}
		if err = errors.Join(err, c.Install(ctx, kustomization)); err != nil {
			s.Error(err)
		}
	})
	for _, n := range c.Nodes {
		for _, program := range []string{"hostpath-provisioner-operator", "pool-mounter"} {
			if err := n.Import(s.Context(), filepath.Join(c.Programs, program+".tar")); err != nil {
				s.Fatal(err)
			}
		}
	}
	client := s.withAPI(crdFile)
	if out, err := c.Kubectl(s.Context(), "apply", "-k", operatorOverlay); err != nil {
		s.Fatal(out, err)
	}
	_, err := c.Client.StorageV1().StorageClasses().Create(s.Context(), &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: operatorClass},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": "local"},
		VolumeBindingMode: pointer(storagev1.VolumeBindingWaitForFirstConsumer),
		ReclaimPolicy:     pointer(corev1.PersistentVolumeReclaimDelete),
		// Pools on claims of this class grow.
		AllowVolumeExpansion: pointer(true),
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := c.Client.StorageV1().StorageClasses().Delete(context.Background(), operatorClass, metav1.DeleteOptions{}); err != nil {
			s.Error(err)
		}
	})
	return client
}

// condition waits until a condition of an object has a value.
func (s *scene) condition(client dynamic.ResourceInterface, name, condition, want string) *unstructured.Unstructured {
	s.Helper()
	var object *unstructured.Unstructured
	s.until(name+" to be "+condition+"="+want, func(ctx context.Context) (string, error) {
		var err error
		object, err = client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
		var texts []string
		for _, element := range conditions {
			one := element.(map[string]any)
			if one["type"] == condition && one["status"] == want {
				return "", nil
			}
			texts = append(texts, fmt.Sprintf("%v=%v: %v", one["type"], one["status"], one["message"]))
		}
		return "conditions: " + strings.Join(texts, "; "), nil
	})
	return object
}

// The operator and one object make a cluster on which a claim binds and a pod writes. What is changed or removed by hand
// comes back, what others added stays, and then nothing is written any more. The removal of the object leaves the data.
func TestOperatorWithHostPathPool(t *testing.T) {
	s := begin(t)
	client := s.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, "plain", onePool("")+"\nfeatureGates: [Snapshotting]"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// Also after a failure: what has a finalizer is removed while its operator is there.
	t.Cleanup(func() { s.removeProvisioner("plain") })
	s.condition(client, "plain", "Available", "True")
	s.condition(client, "plain", "Degraded", "False")

	s.claim("data", "64Mi", ofClass(operatorClass))
	s.pod("writer", with("data", "/data"))
	s.ready("writer")
	s.mustRun("writer", "echo hello >/data/file; sync")
	volume := s.volume("data")
	file := filepath.Join(s.disk(volume), "file")
	s.wantFile(file, "hello\n")

	t.Run("beside the provisioner from before CSI", func(t *testing.T) { besideProvisioner(t, s.in(t)) })
	t.Run("drift is repaired", func(t *testing.T) { drift(t, s) })
	t.Run("nothing is written in the steady state", func(t *testing.T) { quiet(t, s) })
	t.Run("restores go to their node", func(t *testing.T) { operatorRestores(s.in(t)) })

	s.remove("writer")
	s.removeProvisioner("plain")
	s.wantFile(file, "hello\n")
	if sets, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).List(t.Context(), metav1.ListOptions{}); err != nil || len(sets.Items) > 0 {
		t.Errorf("%d DaemonSets are left (%v)", len(sets.Items), err)
	}
	// The claim is deleted by a driver, once there is one again.
	if _, err := client.Create(t.Context(), provisioner(t, "plain", onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.condition(client, "plain", "Available", "True")
	s.removeClaim("data")
	s.wantGone(filepath.Dir(file))
}

// drift changes and deletes each object that the operator owns, and wants it back within 5 seconds.
func drift(t *testing.T, s *scene) {
	kinds := []string{"daemonset", "serviceaccount", "role", "rolebinding", "clusterrole", "clusterrolebinding", "csidriver"}
	out, err := c.Kubectl(t.Context(), "get", strings.Join(kinds, ","), "-n", cluster.Namespace,
		"-l", "app.kubernetes.io/managed-by=hostpath-provisioner-operator", "-o", "name")
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Fields(out)
	if len(names) != len(kinds) {
		t.Fatalf("the operator owns %q, want one of each of %q", names, kinds)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			before := described(t, name)
			for _, change := range [][]string{
				{"label", name, "k8s-app-", "app.kubernetes.io/component=other", "--overwrite"},
				{"delete", name, "--wait=false"},
			} {
				if out, err := c.Kubectl(t.Context(), append(change, "-n", cluster.Namespace)...); err != nil {
					t.Fatal(out, err)
				}
				deadline := time.Now().Add(5 * time.Second)
				for got := ""; got != before; {
					got = described(t, name)
					if got != before && time.Now().After(deadline) {
						t.Fatalf("after %q it is\n%s\nwant\n%s", change, got, before)
					}
				}
			}
		})
	}
	// What a user has added is not the operator's.
	if out, err := c.Kubectl(t.Context(), "annotate", "-n", cluster.Namespace, "daemonset", operatorDaemonSet, "example.com/added=by-a-user"); err != nil {
		t.Fatal(out, err)
	}
	if _, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Patch(t.Context(), operatorDaemonSet, types.StrategicMergePatchType,
		[]byte(`{"spec":{"template":{"spec":{"containers":[{"name":"driver","image":"localhost/other"}]}}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.until("the image to be put back", func(ctx context.Context) (string, error) {
		set, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if set.Annotations["example.com/added"] != "by-a-user" {
			t.Error("the annotation of a user is gone")
		}
		if image := set.Spec.Template.Spec.Containers[0].Image; image == "localhost/other" {
			return image, nil
		}
		return "", nil
	})
}

// described is what of an object says whether it is as it should be: its labels and what it holds.
func described(t *testing.T, name string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "get", "-n", cluster.Namespace, name, "--ignore-not-found",
		"-o", `jsonpath={.metadata.labels}{.rules}{.subjects}{.roleRef}{.spec}`)
	if err != nil {
		t.Fatal(out, err)
	}
	return out
}

// quiet counts at the API server what is written while nothing changes.
func quiet(t *testing.T, s *scene) {
	for range 3 {
		s.until("the driver to be rolled out again", rolledOutAgain)
		before, pods := settled(t, s)
		// Something happens in the cluster that is none of the operator's business.
		for range 5 {
			if out, err := c.Kubectl(t.Context(), "annotate", "node", nodeA, "example.com/tick="+time.Now().Format(time.TimeOnly+".000"), "--overwrite"); err != nil {
				t.Fatal(out, err)
			}
		}
		if out, err := c.Kubectl(t.Context(), "annotate", "hostpathprovisioner", "plain", "example.com/tick="+time.Now().Format(time.TimeOnly+".000"), "--overwrite"); err != nil {
			t.Fatal(out, err)
		}
		s.until("time to pass in which nothing happens", quietFor(20*time.Second))
		after := writes(t)
		if now := driverPodStates(t); now != pods {
			t.Logf("pods of the driver have changed meanwhile, which is to be in the status:\n%s\nbefore:\n%s", now, pods)
			continue
		}
		if after != before {
			t.Errorf("something was written:\n%s\nbefore:\n%s", after, before)
		}
		return
	}
	t.Error("the pods of the driver do not come to rest")
}

// rolledOutAgain says what is missing at the driver's DaemonSet.
func rolledOutAgain(ctx context.Context) (string, error) {
	set, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if set.Status.NumberReady < int32(len(c.Nodes)) || set.Status.UpdatedNumberScheduled < int32(len(c.Nodes)) || set.Status.ObservedGeneration != set.Generation {
		return fmt.Sprintf("%d nodes are ready", set.Status.NumberReady), nil
	}
	return withoutToken(ctx)
}

// withoutToken is a pod of the driver that ends, or whose token is of an account that was deleted, or empty.
func withoutToken(ctx context.Context) (string, error) {
	const name = "hostpath-provisioner-admin-csi"
	account, err := c.Client.CoreV1().ServiceAccounts(cluster.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, pod := range pods.Items {
		if pod.Spec.ServiceAccountName != name {
			continue
		}
		if pod.DeletionTimestamp != nil {
			return pod.Name + " is being deleted", nil
		}
		if of := pod.Annotations["hostpathprovisioner.kubevirt.io/account"]; of != string(account.UID) {
			return fmt.Sprintf("%s is of the account %s, which is %s now", pod.Name, of, account.UID), nil
		}
	}
	return "", nil
}

// settled waits until there is no answer under way to what has happened before. It returns what was written until then, and
// how the pods of the driver are.
func settled(t *testing.T, s *scene) (written, pods string) {
	t.Helper()
	var since time.Time
	s.until("the writes to end", func(context.Context) (string, error) {
		if now, states := writes(t), driverPodStates(t); now != written || states != pods {
			written, pods, since = now, states, time.Now()
		}
		if time.Since(since) < 3*time.Second {
			return written, nil
		}
		return "", nil
	})
	return written, pods
}

// driverPodStates has another text after each change of a pod of the driver.
func driverPodStates(t *testing.T) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "get", "pods", "-n", cluster.Namespace, "-l", "k8s-app=hostpath-provisioner",
		"-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion} {.status.containerStatuses[*].restartCount}{"\n"}{end}`)
	if err != nil {
		t.Fatal(out, err)
	}
	return out
}

// quietFor is a check that succeeds after a time without changes.
func quietFor(d time.Duration) func(context.Context) (string, error) {
	end := time.Now().Add(d)
	return func(context.Context) (string, error) {
		if time.Now().Before(end) {
			return "waiting", nil
		}
		return "", nil
	}
}

// writes are the numbers of the API server's requests that only the operator makes: applies, of any kind, and changes of
// its objects' status; and the events about them.
func writes(t *testing.T) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "get", "--raw", "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.SplitSeq(out, "\n") {
		if !strings.HasPrefix(line, "apiserver_request_total{") {
			continue
		}
		own := strings.Contains(line, `resource="hostpathprovisioners",`) && strings.Contains(line, `subresource="status"`) && strings.Contains(line, `verb="PUT"`)
		if own || strings.Contains(line, `verb="APPLY"`) {
			lines = append(lines, line)
		}
	}
	events, err := c.Client.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	count := int32(0)
	for _, e := range events.Items {
		if e.Regarding.Kind == "HostPathProvisioner" {
			count++
			if e.Series != nil {
				count += e.Series.Count
			}
		}
	}
	return fmt.Sprintf("%s\n%d events", strings.Join(lines, "\n"), count)
}
