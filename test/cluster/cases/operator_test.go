package cases_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
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
func (h *harness) withOperator() dynamic.ResourceInterface {
	h.Helper()
	h.withoutDriver()
	client := h.withAPI(crdFile)
	h.kubectl("apply", "-f", operatorDir+"/namespace.yaml")
	h.kubectl("apply", "-k", operatorOverlay)
	return client
}

// withoutDriver removes the driver that was installed from deploy/csi, and puts it back at the end, when it removes an operator. Until then there are
// the images and the class for one.
func (h *harness) withoutDriver() {
	h.Helper()
	must.Succeed(h, c.Uninstall(h.Context(), kustomization))
	h.Cleanup(func() {
		ctx := context.Background()
		_, err := c.Kubectl(ctx, "delete", "-k", operatorOverlay, "--ignore-not-found", "--timeout=2m")
		_, namespaceErr := c.Kubectl(ctx, "delete", "-f", operatorDir+"/namespace.yaml", "--ignore-not-found", "--timeout=2m")
		err = errors.Join(err, namespaceErr)
		for _, n := range c.Nodes {
			err = errors.Join(err, os.RemoveAll(n.Disk(operatorPool)))
		}
		if err = errors.Join(err, c.Install(ctx, kustomization)); err != nil {
			h.Error(err)
		}
	})
	h.importAll("hostpath-provisioner-operator", "pool-mounter")
	_, err := c.Client.StorageV1().StorageClasses().Create(h.Context(), &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: operatorClass},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": "local"},
		VolumeBindingMode: pointer(storagev1.VolumeBindingWaitForFirstConsumer),
		ReclaimPolicy:     pointer(corev1.PersistentVolumeReclaimDelete),
		// Pools on claims of this class grow.
		AllowVolumeExpansion: pointer(true),
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		if err := c.Client.StorageV1().StorageClasses().Delete(context.Background(), operatorClass, metav1.DeleteOptions{}); err != nil {
			h.Error(err)
		}
	})
}

// importAll has the nodes know the images of programs.
func (h *harness) importAll(programs ...string) {
	h.Helper()
	for _, n := range c.Nodes {
		for _, program := range programs {
			must.Succeed(h, n.Import(h.Context(), filepath.Join(c.Programs, program+".tar")))
		}
	}
}

// condition waits until a condition of an object has a value.
func (h *harness) condition(client dynamic.ResourceInterface, name, condition, want string) *unstructured.Unstructured {
	h.Helper()
	var object *unstructured.Unstructured
	h.until(name+" to be "+condition+"="+want, func(ctx context.Context) (string, error) {
		var err error
		object, err = client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
		var texts []string
		for _, element := range conditions {
			one := element.(map[string]any)
			if one["type"] == condition && one["status"] == want && one["observedGeneration"] == object.GetGeneration() {
				return "", nil
			}
			texts = append(texts, fmt.Sprintf("%v=%v: %v", one["type"], one["status"], one["message"]))
		}
		return "conditions: " + strings.Join(texts, "; "), nil
	})
	return object
}

// untilStatus waits for some words in the status of an object.
func (h *harness) untilStatus(client dynamic.ResourceInterface, name, what, words string) {
	h.Helper()
	h.until(what, func(ctx context.Context) (string, error) {
		object, err := client.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if text := fmt.Sprint(object.Object["status"]); !strings.Contains(text, words) {
			return text, nil
		}
		return "", nil
	})
}

// The operator and one object make a cluster on which a claim binds and a pod writes, and on which there are snapshots, of frozen pods
// too. The removal of the object leaves the data.
func TestOperatorWithHostPathPool(t *testing.T) {
	h := begin(t)
	profiles := h.withProfiles(operatorClass)
	client := h.withOperator()
	if _, err := client.Create(t.Context(), provisioner(t, "plain", onePool("")+"\nfeatureGates: [Snapshotting, Freezing]"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// Also after a failure: what has a finalizer is removed while its operator is there.
	t.Cleanup(func() { h.endProvisioner("plain") })
	h.condition(client, "plain", "RolledOut", "True")
	h.condition(client, "plain", "Available", "True")
	h.condition(client, "plain", "Degraded", "False")
	profiles()

	h.claim("data", "64Mi", ofClass(operatorClass))
	h.pod("writer", with("data", "/data"))
	h.ready("writer")
	h.mustRun("writer", "echo hello >/data/file; sync -f /data")
	volume := h.volume("data")
	file := filepath.Join(h.disk(volume), "file")
	h.wantFile(file, "hello\n")

	t.Run("beside the provisioner from before CSI", func(t *testing.T) { besideProvisioner(t, h.in(t)) })
	t.Run("pods are frozen for snapshots", func(t *testing.T) {
		h := h.in(t)
		h.withFreezeClass()
		h.freezes(operatorClass)
	})
	t.Run("metrics are for those who may get them", func(t *testing.T) { operatorMetrics(h.in(t)) })
	t.Run("restores go to their node", func(t *testing.T) { operatorRestores(h.in(t)) })

	h.remove("writer")
	h.removeProvisioner("plain")
	h.wantFile(file, "hello\n")
	if sets, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).List(t.Context(), metav1.ListOptions{}); err != nil || len(sets.Items) > 0 {
		t.Errorf("%d DaemonSets are left (%v)", len(sets.Items), err)
	}
	// The claim is deleted by a driver, once there is one again.
	if _, err := client.Create(t.Context(), provisioner(t, "plain", onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	h.condition(client, "plain", "RolledOut", "True")
	h.removeClaim("data")
	h.wantGone(filepath.Dir(file))
}

// withProfiles has the cluster know StorageProfiles, with an empty one for a class, as CDI makes it. What it returns waits until the operator has
// completed that, and removes the kind.
func (h *harness) withProfiles(class string) (completed func()) {
	h.Helper()
	const kind = "testdata/storageprofile.yaml"
	h.Cleanup(func() { h.kubectl("delete", "--ignore-not-found", "-f", kind) })
	h.kubectl("apply", "-f", kind)
	h.kubectl("wait", "--for=condition=Established", "-f", kind)
	h.applyText(`{apiVersion: cdi.kubevirt.io/v1beta1, kind: StorageProfile, metadata: {name: ` + class + `}, spec: {}}`)
	return func() {
		h.Helper()
		h.until("the StorageProfile to be completed", func(context.Context) (string, error) {
			spec := h.kubectl("get", "storageprofile", class, "-o", "jsonpath={.spec.cloneStrategy} {.spec.claimPropertySets[*].volumeMode}")
			if spec == "csi-clone Block Filesystem" {
				return "", nil
			}
			return "it has " + spec, nil
		})
		h.kubectl("delete", "-f", kind)
	}
}

// operatorMetrics asks the operator for its metrics without a token, with ones that the API server does not accept, and with that of an
// account before and after it has the right.
func operatorMetrics(h *harness) {
	h.Helper()
	ctx := h.Context()
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "name=hostpath-provisioner-operator"})
	if err != nil || len(pods.Items) != 1 {
		h.Fatalf("%d operators (%v)", len(pods.Items), err)
	}
	token := func(audiences ...string) string {
		request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}
		made, err := c.Client.CoreV1().ServiceAccounts(h.namespace).CreateToken(ctx, "default", request, metav1.CreateOptions{})
		must.Succeed(h, err)
		return made.Status.Token
	}
	answer := func(token string) int {
		status, text := h.fetch("https", pods.Items[0], 8443, "/metrics", token)
		if strings.Contains(text, "kubevirt_hpp_cr_ready") != (status == http.StatusOK) {
			h.Errorf("the status %d comes with %q", status, text)
		}
		return status
	}
	reader, foreign := token(), token("another-service")
	refused := func(who, token string, want int) {
		if got := answer(token); got != want {
			h.Errorf("%s: status %d, want %d", who, got, want)
		}
	}
	refused("an account without the right", reader, http.StatusForbidden)
	h.kubectl("create", "clusterrolebinding", h.namespace, "--clusterrole=hostpath-provisioner-operator-metrics-reader", "--serviceaccount="+h.namespace+":default")
	h.Cleanup(func() { h.kubectl("delete", "clusterrolebinding", h.namespace) })
	// The API server takes the binding up in a moment.
	h.until("the account to get the metrics", func(context.Context) (string, error) {
		if status := answer(reader); status != http.StatusOK {
			return fmt.Sprintf("status %d", status), nil
		}
		return "", nil
	})
	refused("nobody", "", http.StatusUnauthorized)
	refused("a token that is none", "secret", http.StatusUnauthorized)
	refused("the account with a token for another service", foreign, http.StatusUnauthorized)
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
		// Mounters have no token.
		if pod.Spec.ServiceAccountName != name || pod.Labels["hpp-pool"] != "" {
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
