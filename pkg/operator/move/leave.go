package move

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// leave says what a volume that is copied waits for before it may be fenced: the volumes that pods use together with it, and that are on the source,
// have to be copied too. One that was switched alone would keep its pods from both nodes until the others have come, which may be refused. Once one of
// them has leave, all have.
func (pl planner) leave(ctx context.Context, volume *corev1.PersistentVolume) (outcome, error) {
	if pl.move.Status.MayFenceTime != nil || pl.move.Status.FencedTime != nil {
		return outcome{}, nil
	}
	c, err := pl.together(ctx)
	if err != nil || len(c.claims) == 1 {
		return outcome{}, err
	}
	moves := &v1alpha1.VolumeMoveList{}
	if err := pl.api.reader.List(ctx, moves, client.InNamespace(pl.move.Namespace)); err != nil {
		return outcome{}, err
	}
	if slices.ContainsFunc(moves.Items, func(o v1alpha1.VolumeMove) bool {
		return slices.Contains(c.claims[1:], o.Spec.ClaimName) && hasLeave(&o) && o.Status.TargetNode == pl.move.Status.TargetNode
	}) {
		return outcome{}, nil
	}
	const said = "all is copied but what pods write meanwhile: it waits for "
	for _, name := range c.claims[1:] {
		waits, err := pl.lags(ctx, name, moves.Items)
		if err != nil || waits != (outcome{}) {
			waits.message = said + waits.message
			return waits, err
		}
	}
	waits, err := pl.snapshots(ctx, volume, pl.move.Spec.Snapshots) // for which its mover would not fence it
	if err != nil || waits == "" {
		return outcome{}, err
	}
	return outcome{"WaitingForVolumes", said + "this: " + waits, idle}, nil
}

// hasLeave says that the volume of a move may be fenced, or was, and is on the target then.
func hasLeave(m *v1alpha1.VolumeMove) bool {
	switch m.Status.Phase {
	case v1alpha1.Fenced, v1alpha1.Switching:
		return m.DeletionTimestamp == nil // it would be undone
	case v1alpha1.Removing:
		return true
	}
	return false
}

// lags says why the volume of another claim is not ready to be fenced; empty if it is, and for one that is not on the source.
func (pl planner) lags(ctx context.Context, name string, moves []v1alpha1.VolumeMove) (outcome, error) {
	later := func(format string, args ...any) (outcome, error) {
		return outcome{"WaitingForVolumes", fmt.Sprintf(format, args...), idle}, nil
	}
	claim, volume, err := pl.claimed(ctx, name)
	if err != nil || volume == nil {
		return outcome{}, err // no pod starts until it is bound
	}
	switch on := place.NodeOfVolume(volume); {
	case !place.OfDriver(volume) || on == "":
		target := &corev1.Node{}
		if there, err := pl.api.find(ctx, client.ObjectKey{Name: pl.move.Status.TargetNode}, target); err != nil || !there || reaches(target, volume) {
			return outcome{}, err
		}
		return later("the volume %s, which pods use too, and which node %s does not reach: delete this VolumeMove, or have no pod use both", volume.Name, target.Name)
	case on != pl.move.Status.SourceNode:
		return outcome{}, nil
	}
	other := moveOfClaim(name, moves)
	if other == nil {
		return later("a VolumeMove of the claim %s, which pods use too, and which is on node %s: make it, or delete this one", name, pl.move.Status.SourceNode)
	}
	said := fmt.Sprintf("the VolumeMove %s/%s of the claim %s, which pods use too", other.Namespace, other.Name, name)
	switch {
	case !other.Underway():
		if c := meta.FindStatusCondition(other.Status.Conditions, v1alpha1.ConditionComplete); c != nil {
			said += ": " + c.Message
		}
		return later("%s", said)
	case other.Status.Phase == v1alpha1.Undoing || other.DeletionTimestamp != nil:
		return later("%s: it is undone", said)
	case other.Status.TargetNode != pl.move.Status.TargetNode:
		return later("%s: it goes to node %s: delete one of the two", said, other.Status.TargetNode)
	case !other.Status.Copied:
		return wait("WaitingForVolumes", "%s: it copies", said), nil
	}
	keeps, err := pl.keeps(ctx, volume, claim, other.Spec.Snapshots)
	if err != nil || keeps == "" {
		return outcome{}, err
	}
	return later("%s: %s", said, keeps)
}
