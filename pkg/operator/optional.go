package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
type OptionalKinds struct{ present []schema.GroupVersionKind }

// Has says whether the cluster has a kind.
func (o *OptionalKinds) Has(kind schema.GroupVersionKind) bool {
	return slices.Contains(o.present, kind)
}

// Present are the kinds that the cluster has and the operator makes objects of.
func (o *OptionalKinds) Present() []schema.GroupVersionKind {
	return slices.DeleteFunc(slices.Clone(optionalKinds), func(kind schema.GroupVersionKind) bool { return !o.Has(kind) })
}

// readNowAndThen are kinds of which the operator makes no objects, and watches none.
var readNowAndThen = []schema.GroupVersionKind{place.SnapshotContent, storageProfileKind}

// prunable are the kinds of which the operator removes objects that it does not want any more.
func (o *OptionalKinds) prunable() []schema.GroupVersionKind {
	return append(slices.Clone(ownedKinds), o.Present()...)
}

// A kindDiscovery asks now and then which kinds the cluster has by now.
type kindDiscovery struct {
	ask   func(context.Context) error
	last  time.Time
	known bool
}

// refresh asks at most once in a time.
func (k *kindDiscovery) refresh(ctx context.Context, now time.Time, every time.Duration) error {
	if now.Sub(k.last) < every {
		return nil
	}
	if err := k.ask(ctx); err != nil {
		return fmt.Errorf("ask which kinds the cluster has: %w", err)
	}
	k.last, k.known = now, true
	return nil
}

// discover asks which of the kinds there are now. Those that are new it has watched, and those that are gone forgotten.
func (o *OptionalKinds) discover(served func(schema.GroupVersionKind) (bool, error), watch, forget func(schema.GroupVersionKind) error) error {
	for _, kind := range slices.Concat(optionalKinds, readNowAndThen) {
		there, err := served(kind)
		if err == nil && there != o.Has(kind) && !slices.Contains(readNowAndThen, kind) {
			change := forget
			if there {
				change = watch
			}
			err = change(kind)
		}
		if err != nil {
			return err
		}
		o.present = slices.DeleteFunc(o.present, func(k schema.GroupVersionKind) bool { return k == kind })
		if there {
			o.present = append(o.present, kind)
		}
	}
	return nil
}

// served asks the API server whether it has a kind, of which objects can be made. A RESTMapper would not notice that one is gone.
func served(api discovery.ServerResourcesInterface, kind schema.GroupVersionKind) (bool, error) {
	list, err := api.ServerResourcesForGroupVersion(kind.GroupVersion().String())
	if err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool {
		// While a definition is being deleted, its objects can only be read and deleted.
		return r.Kind == kind.Kind && slices.Contains(r.Verbs, "create")
	}), nil
}
