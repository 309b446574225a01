package move

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

// A colocation is the volumes that pods use together with the one that moves, and together with those. The scheduler starts a pod only where
// all of its volumes are, so all of them go to one node.
type colocation struct {
	pods []corev1.Pod // that use any of them, or would
	// beside are the pods of the namespace that run, as far as the scheduler looks at them.
	beside []corev1.Pod
	// to is the node where one of them is already, or goes, and by whom what says that; empty for none.
	to, by string
	// claims are those of the volumes, with the one that moves.
	claims []string
	// follow are how many bytes the volumes have that move to the same node later.
	follow map[share]int64
	// bound are volumes that do not move, and that not every node reaches.
	bound []*corev1.PersistentVolume
}

// A share is of what volumes take room: the pool, and the StorageClass, by which nodes say how much they have of it. A pool may have several.
type share struct{ class, pool string }

func shareOf(v *corev1.PersistentVolume) share {
	return share{v.Spec.StorageClassName, v.Spec.CSI.VolumeAttributes[render.PoolParameter]}
}

// colocation finds them, or says why the volume waits for others.
func (pl planner) colocation(ctx context.Context, source string) (c *colocation, waits string, err error) {
	if c, err = pl.together(ctx); err != nil || len(c.claims) == 1 {
		return c, "", err
	}
	moves := &v1alpha1.VolumeMoveList{}
	if err := pl.api.reader.List(ctx, moves, client.InNamespace(pl.move.Namespace)); err != nil {
		return nil, "", err
	}
	for _, name := range c.claims[1:] {
		if waits, err = pl.accept(ctx, c, name, source, moves.Items); err != nil || waits != "" {
			return nil, waits, err
		}
	}
	return c, "", nil
}

// together finds the pods and the claims.
func (pl planner) together(ctx context.Context) (*colocation, error) {
	c := &colocation{follow: map[share]int64{}}
	var all []corev1.Pod
	if err := pl.api.eachPod(ctx, pl.move.Namespace, func(pod *corev1.Pod) {
		if schedule.UsesClaims(pod) {
			all = append(all, *pod)
		}
		c.beside = append(c.beside, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, Labels: pod.Labels},
			Spec:       corev1.PodSpec{NodeName: pod.Spec.NodeName, Affinity: pod.Spec.Affinity},
		})
	}); err != nil {
		return nil, err
	}
	all, err := pl.addUnmade(ctx, all)
	c.pods, c.claims = schedule.Together(all, pl.move.Namespace, pl.move.Spec.ClaimName)
	return c, err
}

// claimed is another claim, and the volume that it is bound to; nil if it is not.
func (pl planner) claimed(ctx context.Context, name string) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	if there, err := pl.api.find(ctx, client.ObjectKey{Namespace: pl.move.Namespace, Name: name}, claim); err != nil || !there || claim.Spec.VolumeName == "" {
		return nil, nil, err
	}
	if there, err := pl.api.find(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, volume); err != nil || !there {
		return nil, nil, err
	}
	return claim, volume, nil
}

// moveOfClaim is the move of a claim that has not ended; nil for none, and for one that was deleted before it began.
func moveOfClaim(claim string, moves []v1alpha1.VolumeMove) *v1alpha1.VolumeMove {
	i := slices.IndexFunc(moves, func(o v1alpha1.VolumeMove) bool {
		return o.Spec.ClaimName == claim && !o.Ended() && (o.Underway() || o.DeletionTimestamp == nil)
	})
	if i < 0 {
		return nil
	}
	return &moves[i]
}

// addUnmade adds the pods that use claims and that the StatefulSets of the namespace would make: one that is scaled to zero has none.
func (pl planner) addUnmade(ctx context.Context, pods []corev1.Pod) ([]corev1.Pod, error) {
	var sets []appsv1.StatefulSet
	if err := eachPage(ctx, pl.api, pl.move.Namespace, func(page *appsv1.StatefulSetList) { sets = append(sets, page.Items...) }); err != nil || len(sets) == 0 {
		return pods, err
	}
	var claims []types.NamespacedName
	err := eachPage(ctx, pl.api, pl.move.Namespace, func(page *corev1.PersistentVolumeClaimList) {
		for i := range page.Items {
			claims = append(claims, client.ObjectKeyFromObject(&page.Items[i]))
		}
	})
	return schedule.AddUnmade(pods, sets, claims), err
}

// accept takes the volume of another claim into account.
func (pl planner) accept(ctx context.Context, c *colocation, name, source string, moves []v1alpha1.VolumeMove) (waits string, err error) {
	claim, volume, err := pl.claimed(ctx, name)
	if err != nil || volume == nil {
		return "", err // no pod starts until it is bound
	}
	on := place.NodeOfVolume(volume)
	switch {
	case !place.OfDriver(volume) || on == "":
		c.bound = append(c.bound, volume)
		return "", nil
	case on != source:
		return c.goesTo(on, fmt.Sprintf("the claim %s, which pods use too, is on node %s", name, on)), nil
	}
	other := moveOfClaim(name, moves)
	if other == nil {
		return fmt.Sprintf("pods use the claim %s too, which is on node %s: make a VolumeMove for it, too, or have no pod and no StatefulSet use both", name, source), nil
	}
	return pl.follows(ctx, c, claim, volume, other)
}

// follows takes a volume into account that moves too.
func (pl planner) follows(ctx context.Context, c *colocation, claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, other *v1alpha1.VolumeMove) (waits string, err error) {
	to := other.Spec.TargetNode
	switch {
	case other.Status.Phase == v1alpha1.Undoing:
		return fmt.Sprintf("pods use the claim %s too, whose VolumeMove %s is undone", claim.Name, other.Name), nil
	case other.Underway():
		to = other.Status.TargetNode // which has promised its room
	default:
		if waits, err = pl.keeps(ctx, v, claim, other.Spec.Snapshots); err != nil || waits != "" {
			return fmt.Sprintf("pods use the claim %s too, which cannot move: %s", claim.Name, waits), err
		}
		size := v1alpha1.Size(claim, v)
		c.follow[shareOf(v)] += size.Value()
	}
	if to == "" {
		return "", nil
	}
	return c.goesTo(to, fmt.Sprintf("the claim %s, which pods use too, goes to node %s", claim.Name, to)), nil
}

// goesTo says that one of the volumes is on a node, or goes there.
func (c *colocation) goesTo(node, by string) (waits string) {
	if c.to != "" && c.to != node {
		return fmt.Sprintf("%s, and %s", c.by, by)
	}
	c.to, c.by = node, by
	return ""
}

// reaches says whether a node has all that a volume's affinity asks for.
func reaches(node *corev1.Node, v *corev1.PersistentVolume) bool {
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return true
	}
	has := labels.Merge(node.Labels, labels.Set{place.TopologyKey: node.Name})
	return schedule.Selected(v.Spec.NodeAffinity.Required.NodeSelectorTerms, node.Name, has)
}
