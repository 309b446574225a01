package operator

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// Kinds that not every cluster has.
var (
	constraintsKind    = schema.GroupVersionKind{Group: "security.openshift.io", Version: "v1", Kind: "SecurityContextConstraints"}
	prometheusRuleKind = schema.GroupVersionKind{Group: "monitoring.coreos.com", Version: "v1", Kind: "PrometheusRule"}
	serviceMonitorKind = schema.GroupVersionKind{Group: "monitoring.coreos.com", Version: "v1", Kind: "ServiceMonitor"}
)

var optionalKinds = []schema.GroupVersionKind{constraintsKind, prometheusRuleKind, serviceMonitorKind}

// OptionalKinds are those of the kinds that not every cluster has which this one has.
type OptionalKinds struct {
	mu      sync.Mutex
	present []schema.GroupVersionKind
	// snapshots says that there is place.SnapshotContent.
	snapshots bool
}

// Snapshots says whether the cluster has the kinds of external-snapshotter.
func (o *OptionalKinds) Snapshots() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.snapshots
}

// Has says whether the cluster has a kind.
func (o *OptionalKinds) Has(kind schema.GroupVersionKind) bool {
	return slices.Contains(o.Present(), kind)
}

// Present are the kinds that the cluster has.
func (o *OptionalKinds) Present() []schema.GroupVersionKind {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.present)
}

// discover asks which of the kinds there are that were not there before, and has each of them watched.
func (o *OptionalKinds) discover(mapper meta.RESTMapper, watch func(schema.GroupVersionKind) error) error {
	for _, kind := range optionalKinds {
		if o.Has(kind) {
			continue
		}
		if _, err := mapper.RESTMapping(kind.GroupKind(), kind.Version); meta.IsNoMatchError(err) {
			continue
		} else if err != nil {
			return err
		}
		if err := watch(kind); err != nil {
			return err
		}
		o.mu.Lock()
		o.present = append(o.present, kind)
		o.mu.Unlock()
	}
	_, err := mapper.RESTMapping(place.SnapshotContent.GroupKind(), place.SnapshotContent.Version)
	if err != nil && !meta.IsNoMatchError(err) {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.snapshots = err == nil
	return nil
}
