package operator

import (
	"context"
	"fmt"
	"slices"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/move"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// moves are those that have begun and not ended.
func (c *cluster) moves(ctx context.Context) ([]movev1.VolumeMove, error) {
	found, err := move.Underway(ctx, c.api, c.namespace)
	if err != nil {
		return nil, fmt.Errorf("look for VolumeMoves: %w", err)
	}
	return found, nil
}

// usersOf adds the moves that use pools on their two nodes. Which pool their volume is in is not known: between two steps nothing of it is mounted.
func usersOf(moves []movev1.VolumeMove, of []leftover, add func(at render.Spot, user string)) {
	for i := range moves {
		m := &moves[i]
		for j := range of {
			at := of[j].spot()
			if at.Node == m.Status.SourceNode || at.Node == m.Status.TargetNode {
				add(at, "VolumeMove "+m.Namespace+"/"+m.Name)
			}
		}
	}
}

// awaitMoves says which moves a deletion waits for. Everything is deployed again for one that has begun after some of it was removed.
func (r *Reconciler) awaitMoves(ctx context.Context, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	moves, err := r.cluster().moves(ctx)
	if err != nil || len(moves) == 0 {
		return nil, err
	}
	for i := range moves {
		waiting = append(waiting, fmt.Sprintf("VolumeMove %s/%s, which is %s: let it end, or delete it", moves[i].Namespace, moves[i].Name, moves[i].Status.Phase))
	}
	slices.Sort(waiting)
	_, err = r.deploy(ctx, withoutPools(object, (*hppv1.StoragePool).SharesDevice))
	return waiting, err
}
