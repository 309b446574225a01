// Package render makes the objects that a HostPathProvisioner asks for. They are the manifests of deploy/, with pools,
// images, placement and names changed by typed code. It reads nothing of the cluster but what Facts has.
package render

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
)

// Facts are what is known of the cluster that matters for what is deployed.
type Facts struct {
	// OpenShift says that there are SecurityContextConstraints.
	OpenShift bool
	// Monitoring says that there are the kinds of the Prometheus operator.
	Monitoring bool
	// Nodes are those that the driver runs on, which pools with a template need a claim on.
	Nodes []string
	// Mounters are the pools on nodes that there are mounters of, wanted or not, by their names, and ClaimPools the pools that claims are of.
	Mounters   map[string]Spot
	ClaimPools map[string]string
	// ExclusiveClaims are the names of claims that only one pod may have at a time, and BlockClaims of those that are devices.
	ExclusiveClaims, BlockClaims sets.Set[string]
	// TLS is what the metrics of what is deployed accept.
	TLS tlsprofile.Profile
}

// A Renderer makes objects of one HostPathProvisioner.
type Renderer struct {
	manifests *Manifests
	config    Config
	facts     Facts
	object    *hppv1.HostPathProvisioner
	pools     []hppv1.StoragePool
	// spots are where mounters are wanted, and clashes where there cannot be any.
	spots   []spot
	clashes error
}

// Deleting says whether the HostPathProvisioner is being deleted.
func (r *Renderer) Deleting() bool { return r.object.DeletionTimestamp != nil }

// Objects are what there should be, in the order in which it is needed, but for claims.
func (r *Renderer) Objects() ([]*unstructured.Unstructured, error) {
	driver, err := r.driver()
	if err != nil {
		return nil, err
	}
	var all []*unstructured.Unstructured
	if r.facts.OpenShift {
		all = append(all, r.constraints())
	}
	objects := append(r.driverRights(), r.csiDriver())
	objects = append(objects, r.overlayClasses()...)
	objects = append(objects, driver)
	if r.object.Spec.PathConfig != nil {
		legacy, err := r.legacy(r.object.Spec.PathConfig)
		if err != nil {
			return nil, err
		}
		objects = append(objects, legacy...)
		if r.facts.OpenShift {
			all = append(all, r.legacyConstraints())
		}
	}
	mounters, err := r.mounters()
	if err != nil {
		return nil, err
	}
	for _, mounter := range mounters {
		objects = append(objects, mounter)
	}
	monitoring := monitoring{r.manifests, r.config}
	if r.facts.Monitoring {
		objects = append(objects, monitoring.objects()...)
	}
	for _, o := range objects {
		converted, err := Convert(o)
		if err != nil {
			return nil, err
		}
		all = append(all, converted)
	}
	if r.facts.Monitoring {
		rule, err := monitoring.prometheusRule()
		if err != nil {
			return nil, err
		}
		all = append(all, rule, monitoring.serviceMonitor(r.manifests.serviceMonitor, serviceMonitor), monitoring.serviceMonitor(r.manifests.operatorMonitor, operatorMonitor))
	}
	return all, nil
}

// For is what makes the objects of one HostPathProvisioner.
func (m *Manifests) For(config Config, facts Facts, object *hppv1.HostPathProvisioner) *Renderer {
	r := &Renderer{manifests: m, config: config, facts: facts, object: object, pools: Pools(object)}
	r.spots, r.clashes = findSpots(&r.facts, r.pools)
	return r
}

// Convert is an object as it is applied: with its kind, and without what is empty.
func Convert(from client.Object) (*unstructured.Unstructured, error) {
	kind, err := apiutil.GVKForObject(from, scheme.Scheme)
	if err != nil {
		return nil, err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(from)
	if err != nil {
		return nil, fmt.Errorf("convert %s %s: %w", kind.Kind, from.GetName(), err)
	}
	delete(content, "status")
	dropNulls(content)
	to := &unstructured.Unstructured{Object: content}
	to.SetGroupVersionKind(kind)
	return to, nil
}

// dropNulls removes fields without a value, which an apply would own.
func dropNulls(value any) {
	switch v := value.(type) {
	case map[string]any:
		for key, element := range v {
			if element == nil {
				delete(v, key)
				continue
			}
			dropNulls(element)
		}
	case []any:
		for _, element := range v {
			dropNulls(element)
		}
	}
}

func (r *Renderer) driverRights() []client.Object {
	namespaced := slices.Concat(r.manifests.namespacedRules, r.useOf(r.manifests.constraintsRules, driverConstraints))
	cluster := r.manifests.clusterRules
	if r.snapshotting() {
		cluster = slices.Concat(cluster, r.manifests.snapshotRules)
	}
	return r.rights(driverAccount, driverAccount, cluster, namespaced)
}

func (r *Renderer) snapshotting() bool { return r.object.HasFeature(hppv1.Snapshotting) }

// useOf are the rules by which pods may use constraints on OpenShift.
func (r *Renderer) useOf(from []rbacv1.PolicyRule, constraints string) []rbacv1.PolicyRule {
	if !r.facts.OpenShift {
		return nil
	}
	rules := slices.Clone(from)
	for i := range rules {
		rules[i].ResourceNames = []string{constraints}
	}
	return rules
}

// rights are an account, and what it may do: in one role in the cluster, and in one in the namespace if it needs that.
func (r *Renderer) rights(account, role string, cluster, namespaced []rbacv1.PolicyRule) []client.Object {
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: r.config.Namespace}}
	objects := []client.Object{
		&corev1.ServiceAccount{ObjectMeta: r.config.meta(account, nil)},
		&rbacv1.ClusterRole{ObjectMeta: r.config.clusterMeta(role, nil), Rules: cluster},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: r.config.clusterMeta(role, nil),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   subjects,
		},
	}
	if len(namespaced) == 0 {
		return objects
	}
	return append(objects,
		&rbacv1.Role{ObjectMeta: r.config.meta(role, nil), Rules: namespaced},
		&rbacv1.RoleBinding{
			ObjectMeta: r.config.meta(role, nil),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
			Subjects:   subjects,
		},
	)
}

// csiDriver also says which pools are shared, for the policy of deploy/operator/node-policy.yaml: their volumes are of no node.
func (r *Renderer) csiDriver() *storagev1.CSIDriver {
	driver := r.manifests.csiDriver.DeepCopy()
	driver.ObjectMeta = r.config.clusterMeta(driver.Name, driver.Labels)
	var shared []string
	for i := range r.pools {
		if r.pools[i].IsShared() {
			shared = append(shared, r.pools[i].Name)
		}
	}
	if len(shared) > 0 {
		metav1.SetMetaDataAnnotation(&driver.ObjectMeta, sharedAnnotation, strings.Join(shared, ","))
	}
	return driver
}

func (r *Renderer) constraints() *unstructured.Unstructured {
	constraints := r.manifests.constraints.DeepCopy()
	setMeta(constraints, r.config.clusterMeta(driverConstraints, nil))
	if len(r.facts.Mounters) > 0 || slices.ContainsFunc(r.pools, func(p hppv1.StoragePool) bool { return p.PVCTemplate != nil }) {
		volumes, _ := constraints.Object["volumes"].([]any)
		constraints.Object["volumes"] = append(volumes, "persistentVolumeClaim")
	}
	return constraints
}

func (r *Renderer) overlayClasses() []client.Object {
	var classes []client.Object
	for name, pool := range overlayPools(r.pools) {
		classes = append(classes, &storagev1.StorageClass{
			ObjectMeta:        r.config.clusterMeta(name, nil),
			Provisioner:       DriverName,
			Parameters:        map[string]string{PoolParameter: pool, "overlayCSI": "true"},
			ReclaimPolicy:     new(corev1.PersistentVolumeReclaimDelete),
			VolumeBindingMode: new(storagev1.VolumeBindingImmediate),
		})
	}
	return classes
}

// overlayPools are the pools with a shared claim by the name of their class. The first of several that want one name
// has it.
func overlayPools(of []hppv1.StoragePool) map[string]string {
	classes := map[string]string{}
	for _, p := range of {
		if name := overlayClass(p); name != "" && classes[name] == "" {
			classes[name] = p.Name
		}
	}
	return classes
}

// overlayClass is the name of the class of a pool with a shared claim, and empty for another pool.
func overlayClass(p hppv1.StoragePool) string {
	if p.PVCTemplate == nil || !p.IsShared() {
		return ""
	}
	return cmp.Or(p.OverlayClassName, hppv1.DefaultOverlayClass)
}

// setMeta sets name and labels of an object of a kind that is not compiled in.
func setMeta(object *unstructured.Unstructured, meta metav1.ObjectMeta) {
	object.SetName(meta.Name)
	object.SetNamespace(meta.Namespace)
	object.SetLabels(meta.Labels)
}

func sortedKeys[V any](of map[string]V) []string { return slices.Sorted(maps.Keys(of)) }
