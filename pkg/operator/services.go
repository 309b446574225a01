package operator

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// capacityKind is that of the objects by which the driver's pods publish what a pool has on their node.
var capacityKind = schema.GroupVersionKind{Group: "storage.k8s.io", Version: "v1", Kind: "CSIStorageCapacity"}

// services is where the driver serves the pools, on nodes that have a pod of it.
func (c *cluster) services(ctx context.Context, has []hppv1.StoragePool, pods []corev1.Pod) (map[string]status.Service, error) {
	classes, err := list[storagev1.StorageClass](ctx, c)
	if err != nil {
		return nil, err
	}
	capacities, err := list[storagev1.CSIStorageCapacity](ctx, c, client.InNamespace(c.namespace))
	if err != nil {
		return nil, err
	}
	nodes := sets.New[string]()
	for i := range pods {
		if render.PoolOf(pods[i].Labels) == "" {
			nodes.Insert(render.NodeOf(&pods[i]))
		}
	}
	services, pools := map[string]status.Service{}, map[string]string{}
	for i := range classes {
		if pool := poolOfClass(has, &classes[i]); pool != "" {
			pools[classes[i].Name] = pool
			services[pool] = status.Service{Asked: true, Serving: sets.New[string](), NotServing: sets.New[string]()}
		}
	}
	for i := range capacities {
		if capacities[i].NodeTopology == nil {
			continue
		}
		node := capacities[i].NodeTopology.MatchLabels[place.TopologyKey]
		if service, known := services[pools[capacities[i].StorageClassName]]; known && nodes.Has(node) {
			if serves(&capacities[i]) {
				service.Serving.Insert(node)
			} else {
				service.NotServing.Insert(node)
			}
		}
	}
	for name, service := range services {
		service.NotServing = service.NotServing.Difference(service.Serving)
		services[name] = service
	}
	return services, nil
}

// poolOfClass is the one of the pools that a class is for, if its capacity is published: that is so for classes that wait for a consumer.
// The driver chooses a pool for a class that names none.
func poolOfClass(pools []hppv1.StoragePool, class *storagev1.StorageClass) string {
	if class.Provisioner != render.DriverName || class.VolumeBindingMode == nil || *class.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
		return ""
	}
	name := class.Parameters[render.PoolParameter]
	if name == "" && len(pools) == 1 {
		return pools[0].Name
	}
	name = cmp.Or(name, hppv1.LegacyPool)
	if !slices.ContainsFunc(pools, func(p hppv1.StoragePool) bool { return p.Name == name }) {
		return ""
	}
	return name
}

// serves says whether a pool is served, full or not: only then has it both numbers, and they are the same.
func serves(capacity *storagev1.CSIStorageCapacity) bool {
	if capacity.Capacity == nil {
		return false
	}
	if capacity.MaximumVolumeSize == nil {
		return !capacity.Capacity.IsZero()
	}
	return capacity.MaximumVolumeSize.Cmp(*capacity.Capacity) <= 0
}

// servesElsewise lets through changes of a capacity by which a pool begins or ceases to be served.
func servesElsewise() predicate.Predicate {
	parse := func(object client.Object) *storagev1.CSIStorageCapacity {
		capacity := &storagev1.CSIStorageCapacity{}
		if live, ok := object.(*unstructured.Unstructured); ok {
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, capacity); err != nil {
				return &storagev1.CSIStorageCapacity{}
			}
		}
		return capacity
	}
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return serves(parse(e.ObjectOld)) != serves(parse(e.ObjectNew))
	}}
}
