package operator

import (
	"errors"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Kinds are watched while the cluster has them, and not asked for when it has not. Without an answer nothing changes.
func TestOptionalKindsComeAndGo(t *testing.T) {
	var kinds OptionalKinds
	var has, watched []schema.GroupVersionKind
	var down error
	discover := func() error {
		return kinds.discover(
			func(kind schema.GroupVersionKind) (bool, error) { return slices.Contains(has, kind), down },
			func(kind schema.GroupVersionKind) error { watched = append(watched, kind); return nil },
			func(kind schema.GroupVersionKind) error {
				watched = slices.DeleteFunc(watched, func(k schema.GroupVersionKind) bool { return k == kind })
				return nil
			},
		)
	}
	for _, now := range [][]schema.GroupVersionKind{
		nil, {constraintsKind}, {constraintsKind, serviceMonitorKind, place.SnapshotContent}, {serviceMonitorKind}, nil, {constraintsKind},
	} {
		has = now
		must.Succeed(t, discover())
		want := slices.DeleteFunc(slices.Clone(now), func(k schema.GroupVersionKind) bool { return k == place.SnapshotContent })
		if !slices.Equal(watched, want) || !slices.Equal(kinds.Present(), want) || kinds.Snapshots() != slices.Contains(now, place.SnapshotContent) {
			t.Errorf("of %v are watched %v, used %v, snapshots %v", now, watched, kinds.Present(), kinds.Snapshots())
		}
	}
	has, down = nil, errors.New("the API server is down")
	if err := discover(); !errors.Is(err, down) || len(watched) != 1 || !kinds.Has(constraintsKind) {
		t.Errorf("without an answer: %v, watched %v", err, watched)
	}
}
