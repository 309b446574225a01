package cases_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/audit"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const operatorManager = "hostpath-provisioner-operator"

// An applied object is one that the operator has applied, with the fields that it says it owns.
type applied struct {
	*testing.T

	client dynamic.ResourceInterface
	object *unstructured.Unstructured
	fields map[string]any
}

// drift disturbs each object that the operator has applied, whatever its kind, and wants it back within 5 seconds: with a
// label gone and another one changed, without all fields that the API server lets go, and deleted. Claims are left out, which
// hold data and are made once.
func drift(t *testing.T, h *harness) {
	all := appliedObjects(t)
	kinds := map[string]bool{}
	for _, a := range all {
		kinds[a.object.GetKind()] = true
	}
	for _, kind := range []string{
		"DaemonSet", "Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "CSIDriver",
		"StorageClass", "PrometheusRule", "ServiceMonitor", "SecurityContextConstraints", "PersistentVolumeClaim",
	} {
		if !kinds[kind] {
			t.Errorf("the operator has applied no %s, but %q", kind, sorted(kinds))
		}
	}
	for _, a := range all {
		if a.object.GetKind() == "PersistentVolumeClaim" {
			continue
		}
		t.Run(a.object.GetKind()+" "+a.object.GetName(), func(t *testing.T) {
			a.T = t
			a.repaired("its labels", a.relabel)
			a.repaired("its fields", a.strip)
			a.repaired("itself", a.remove)
		})
	}
	keepsAddition(t, h)
}

// appliedObjects are all objects of the cluster with fields that the operator has applied, ServiceAccounts last: when one is made
// anew the DaemonSet changes.
func appliedObjects(t *testing.T) []*applied {
	t.Helper()
	config := rest.CopyConfig(c.Config)
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	client, err := dynamic.NewForConfig(config)
	must.Succeed(t, err)
	lists, err := c.Client.Discovery().ServerPreferredResources()
	must.Succeed(t, err)
	var found []*applied
	for _, list := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "patch", "delete"}}, lists) {
		for _, kind := range list.APIResources {
			version, err := schema.ParseGroupVersion(list.GroupVersion)
			must.Succeed(t, err)
			resource := client.Resource(version.WithResource(kind.Name))
			objects, err := resource.List(t.Context(), metav1.ListOptions{})
			must.Succeed(t, err)
			for _, object := range objects.Items {
				a := &applied{T: t, client: resource, object: &object}
				if kind.Namespaced {
					a.client = resource.Namespace(object.GetNamespace())
				}
				if a.fields = appliedFields(t, &object); a.fields != nil {
					found = append(found, a)
				}
			}
		}
	}
	slices.SortStableFunc(found, func(a, b *applied) int {
		last := func(a *applied) int { return strings.Count(a.object.GetKind(), "ServiceAccount") }
		return last(a) - last(b)
	})
	return found
}

// appliedFields are those of an object that the operator has applied, or nil.
// https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
func appliedFields(t *testing.T, object *unstructured.Unstructured) map[string]any {
	t.Helper()
	for _, entry := range object.GetManagedFields() {
		if entry.Manager != operatorManager || entry.Operation != metav1.ManagedFieldsOperationApply || entry.Subresource != "" {
			continue
		}
		var fields map[string]any
		must.Succeed(t, json.NewDecoder(entry.FieldsV1.GetRawReader()).Decode(&fields))
		return fields
	}
	return nil
}

// repaired disturbs an object, and wants it to be as it was in 5 seconds. What else the machine does makes some times longer, and
// none shorter: if it took longer it is disturbed again.
func (a *applied) repaired(what string, disturb func(context.Context) bool) {
	a.Helper()
	const most, tries = 5 * time.Second, 3
	var took time.Duration
	for range tries {
		if took = a.comesBack(what, disturb); took <= c.Log.Limit(most) {
			return
		}
		a.Logf("%s came back after %s", what, took)
	}
	a.Fatalf("%s came back after %s each time, want %s", what, took, most)
}

// comesBack disturbs an object, and answers how long it takes until it is as it was.
func (a *applied) comesBack(what string, disturb func(context.Context) bool) time.Duration {
	a.Helper()
	ctx := a.Context()
	before, err := a.client.Get(ctx, a.object.GetName(), metav1.GetOptions{})
	must.Succeed(a, err)
	a.object = before
	deleted := disturb(ctx)
	began := time.Now()
	if err := c.Log.Until(ctx, long, what+" to come back", cluster.Patient(func(ctx context.Context) (string, error) {
		now, err := a.client.Get(ctx, before.GetName(), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return "it is not there", nil
		case err != nil:
			return "", err
		case deleted && now.GetUID() == before.GetUID():
			return "it is still the old one", nil
		}
		return cmp.Diff(described(before), described(now)), nil
	})); err != nil {
		a.Fatal(err)
	}
	return time.Since(began)
}

// described is what an object says but for what the API server and other controllers keep in it. A Service that is made anew gets another
// address.
func described(object *unstructured.Unstructured) map[string]any {
	content := object.DeepCopy().Object
	delete(content, "status")
	if address, _, _ := unstructured.NestedString(content, "spec", "clusterIP"); object.GetKind() == "Service" && address != corev1.ClusterIPNone {
		unstructured.RemoveNestedField(content, "spec", "clusterIP")
		unstructured.RemoveNestedField(content, "spec", "clusterIPs")
	}
	content["metadata"] = map[string]any{"labels": object.GetLabels()}
	return content
}

// relabel removes the label by which the operator finds its objects, and changes another one.
func (a *applied) relabel(ctx context.Context) bool {
	a.Helper()
	patch := []byte(`{"metadata":{"labels":{"k8s-app":null,"app.kubernetes.io/component":"other"}}}`)
	if _, err := a.client.Patch(ctx, a.object.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		a.Fatal(err)
	}
	return false
}

// A removal is an operation of a JSON patch.
type removal struct {
	Operation string `json:"op"`
	Path      string `json:"path"`
}

// strip removes all fields that the operator owns, but for those that the API server wants to have.
func (a *applied) strip(ctx context.Context) bool {
	a.Helper()
	var removals []removal
	patch := func(of []removal, dryRun ...string) error {
		text, err := json.Marshal(of)
		must.Succeed(a, err)
		_, err = a.client.Patch(ctx, a.object.GetName(), types.JSONPatchType, text, metav1.PatchOptions{DryRun: dryRun})
		return err
	}
	for _, path := range paths("", a.object.Object, a.fields) {
		if strings.HasPrefix(path, "/metadata/") {
			continue
		}
		with := append(slices.Clone(removals), removal{"remove", path})
		if err := patch(with, metav1.DryRunAll); err == nil {
			removals = with
		} else if !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
			a.Fatal(path, err)
		}
	}
	a.Logf("%d fields can be removed", len(removals))
	if len(removals) == 0 {
		return false
	}
	must.Succeed(a, patch(removals))
	return false
}

func (a *applied) remove(ctx context.Context) bool {
	a.Helper()
	background := metav1.DeletePropagationBackground
	must.Succeed(a, a.client.Delete(ctx, a.object.GetName(), metav1.DeleteOptions{PropagationPolicy: &background}))
	return true
}

// paths are the fields of a value that have no owned fields in them, as JSON pointers.
func paths(at string, value any, owned map[string]any) []string {
	var found []string
	for key, below := range owned {
		kind, name, _ := strings.Cut(key, ":")
		element, position := part(value, kind, name)
		if element == nil {
			continue
		}
		path := at + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(position)
		inner, _ := below.(map[string]any)
		if deeper := paths(path, element, inner); len(deeper) > 0 {
			found = append(found, deeper...)
		} else if kind == "f" {
			found = append(found, path)
		}
	}
	slices.Sort(found)
	return found
}

// part is the field, or the element of a list, that a key of FieldsV1 means, and where it is in a value.
func part(value any, kind, name string) (element any, position string) {
	switch value := value.(type) {
	case map[string]any:
		if kind == "f" {
			return value[name], name
		}
	case []any:
		var keys map[string]any
		if kind != "k" || json.Unmarshal([]byte(name), &keys) != nil {
			return nil, ""
		}
		for i, element := range value {
			object, _ := element.(map[string]any)
			same := object != nil
			for key, want := range keys {
				same = same && fmt.Sprint(object[key]) == fmt.Sprint(want)
			}
			if same {
				return element, fmt.Sprint(i)
			}
		}
	}
	return nil, ""
}

// keepsAddition says that what a user has added to an object stays when the operator repairs it, but for its pod template.
func keepsAddition(t *testing.T, h *harness) {
	t.Helper()
	sets := c.Client.AppsV1().DaemonSets(cluster.Namespace)
	patch := []byte(`{"metadata":{"annotations":{"example.com/added":"by-a-user"}},"spec":{"minReadySeconds":1,"template":{"spec":{"containers":[{"name":"driver","image":"localhost/other","env":[{"name":"something","value":"true"}]}]}}}}`)
	if _, err := sets.Patch(t.Context(), operatorDaemonSet, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	h.until("the template to be put back", func(ctx context.Context) (string, error) {
		set, err := sets.Get(ctx, operatorDaemonSet, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if set.Annotations["example.com/added"] != "by-a-user" || set.Spec.MinReadySeconds != 1 {
			t.Error("what a user has added is gone")
		}
		driver := set.Spec.Template.Spec.Containers[0]
		if driver.Image == "localhost/other" || slices.ContainsFunc(driver.Env, func(e corev1.EnvVar) bool { return e.Name == "something" }) {
			return fmt.Sprint(driver.Image, driver.Env), nil
		}
		return "", nil
	})
}

// quiet says that the operator writes nothing for a time in which nothing changes that matters to it. Meanwhile each thing that it does
// again and again is done several times: a resync takes as long as a node has to be gone, which is 5 s here.
func quiet(t *testing.T, h *harness) {
	for range 3 {
		h.until("the driver to be rolled out again", rolledOutAgain)
		h.until("the mounters to be ready again", mountersReady)
		before, pods := settled(t, h)
		// Something happens in the cluster that is none of the operator's business.
		for range 5 {
			h.kubectl("annotate", "node", nodeA, "example.com/tick="+time.Now().Format(time.TimeOnly+".000"), "--overwrite")
		}
		h.kubectl("annotate", "hostpathprovisioner", "--all", "example.com/tick="+time.Now().Format(time.TimeOnly+".000"), "--overwrite")
		must.Succeed(t, c.Log.Until(t.Context(), quietTime+long, "time to pass in which nothing happens", quietFor(quietTime)))
		after := operatorWrites(t)
		if now := driverPodStates(t); now != pods {
			t.Logf("pods of the driver have changed meanwhile, which is to be in the status:\n%s\nbefore:\n%s", now, pods)
			continue
		}
		for _, r := range after[len(before):] {
			t.Errorf("the operator has written: %s", r)
		}
		return
	}
	t.Error("the pods of the driver do not come to rest")
}

// settled waits until there is no answer under way to what has happened before. It returns what the operator has written until then,
// and how the pods of the driver are.
func settled(t *testing.T, h *harness) (written []audit.Request, pods string) {
	t.Helper()
	// Events that were repeated are written once more when 6 minutes have passed without them, which is noticed every 6 minutes.
	enough := max(3*time.Second, min(quietTime/4, 13*time.Minute))
	var since time.Time
	caused := 0
	if err := c.Log.Until(t.Context(), enough+long, "the writes to end", func(context.Context) (string, error) {
		written = operatorWrites(t)
		now := 0
		for _, r := range written {
			if r.Verb != "patch" || r.Resource != "events" {
				now++
			}
		}
		if states := driverPodStates(t); now != caused || states != pods {
			caused, pods, since = now, states, time.Now()
		}
		if quiet := time.Since(since); quiet < enough || quiet < eventRetry && eventIsWrittenAgain(written) {
			return fmt.Sprintf("%d until now", len(written)), nil
		}
		return "", nil
	}); err != nil {
		t.Fatal(err)
	}
	return written, pods
}

// eventRetry is longer than client-go waits (tools/events: 10 to 12.5 s) before it writes an event again that was refused.
const eventRetry = 13 * time.Second

// eventIsWrittenAgain says whether an event that was repeated at once had not been made yet, so that its repetition is still to be written.
func eventIsWrittenAgain(written []audit.Request) bool {
	missing := map[string]bool{}
	for _, r := range written {
		if r.Verb == "patch" && r.Resource == "events" {
			missing[r.Name] = r.Missing
		}
	}
	return slices.Contains(slices.Collect(maps.Values(missing)), true)
}

// operatorWrites are the requests by which the operator has changed something, events included.
func operatorWrites(t *testing.T) []audit.Request {
	t.Helper()
	all, err := audit.Requests(audit.Path(c.Logs))
	must.Succeed(t, err)
	return slices.DeleteFunc(audit.Writes(all), func(r audit.Request) bool { return r.Account != cluster.Namespace+"/"+operatorManager })
}

// mountersReady says which mounter is not as it should be.
func mountersReady(ctx context.Context) (string, error) {
	all, err := c.Client.AppsV1().Deployments(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "hpp-pool"})
	if err != nil {
		return "", err
	}
	for _, one := range all.Items {
		if one.Status.ReadyReplicas == 0 || one.Status.Replicas != 1 || one.Status.ObservedGeneration != one.Generation {
			return fmt.Sprintf("%s has %d pods, ready are %d", one.Name, one.Status.Replicas, one.Status.ReadyReplicas), nil
		}
	}
	return "", nil
}
