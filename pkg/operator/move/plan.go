package move

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A plan is which volume goes from where to where.
type plan struct {
	claim          *corev1.PersistentVolumeClaim
	volume         *corev1.PersistentVolume
	source, target string
}

// A planner finds out whether the volume of a claim can move, and where to.
type planner struct {
	move   *v1alpha1.VolumeMove
	api    apiServer
	driver driver
	now    func() time.Time
	// end ends moves that were removed by force.
	end func(ctx context.Context, of func(m *v1alpha1.VolumeMove) bool) (waits outcome, err error)
}

// plan finds what is to move, or says what keeps it from moving for now.
func (pl planner) plan(ctx context.Context) (p plan, waits string, err error) {
	if waits, err = pl.otherMove(ctx); err != nil || waits != "" {
		return p, waits, err
	}
	if waits, err = pl.driverGoes(ctx); err != nil || waits != "" {
		return p, waits, err
	}
	p.claim = &corev1.PersistentVolumeClaim{}
	err = pl.api.reader.Get(ctx, client.ObjectKey{Namespace: pl.move.Namespace, Name: pl.move.Spec.ClaimName}, p.claim)
	if apierrors.IsNotFound(err) {
		return p, fmt.Sprintf("there is no claim %s", pl.move.Spec.ClaimName), nil
	}
	if err != nil {
		return p, "", err
	}
	if p.claim.DeletionTimestamp != nil || p.claim.Status.Phase != corev1.ClaimBound || p.claim.Spec.VolumeName == "" {
		return p, fmt.Sprintf("the claim %s is not bound, or is being deleted", pl.move.Spec.ClaimName), nil
	}
	if owner := metav1.GetControllerOf(p.claim); owner != nil && owner.Kind == "Pod" {
		return p, fmt.Sprintf("the claim %s is deleted with the pod %s, which would be evicted", pl.move.Spec.ClaimName, owner.Name), nil
	}
	p.volume = &corev1.PersistentVolume{}
	if err := pl.api.reader.Get(ctx, client.ObjectKey{Name: p.claim.Spec.VolumeName}, p.volume); err != nil {
		return p, "", err
	}
	if waits, err = pl.keeps(ctx, p.volume, p.claim, pl.move.Spec.Snapshots); err != nil || waits != "" {
		return p, waits, err
	}
	if waits, err = pl.moveOfVolume(ctx, p.volume); err != nil || waits != "" {
		return p, waits, err
	}
	p.source = place.NodeOfVolume(p.volume)
	with, waits, err := pl.colocation(ctx, p.source)
	if err != nil || waits != "" {
		return p, waits, err
	}
	p.target, waits, err = pl.target(ctx, p, with)
	return p, waits, err
}

// otherMove says which move of the claim goes first: one that has begun, or the oldest.
func (pl planner) otherMove(ctx context.Context) (string, error) {
	all := &v1alpha1.VolumeMoveList{}
	if err := pl.api.reader.List(ctx, all, client.InNamespace(pl.move.Namespace)); err != nil {
		return "", err
	}
	for i := range all.Items {
		other := &all.Items[i]
		if other.UID == pl.move.UID || other.Spec.ClaimName != pl.move.Spec.ClaimName || other.Ended() {
			continue
		}
		older := other.CreationTimestamp.Before(&pl.move.CreationTimestamp) || other.CreationTimestamp.Equal(&pl.move.CreationTimestamp) && other.Name < pl.move.Name
		if other.Underway() || older && other.DeletionTimestamp == nil {
			return fmt.Sprintf("the VolumeMove %s of the same claim goes first", other.Name), nil
		}
	}
	return "", nil
}

// moveOfVolume says which move of the volume goes first, which may have another claim by now: it waits for the target to say that it has the volume.
func (pl planner) moveOfVolume(ctx context.Context, v *corev1.PersistentVolume) (string, error) {
	all := &v1alpha1.VolumeMoveList{}
	if err := pl.api.reader.List(ctx, all); err != nil {
		return "", err
	}
	for i := range all.Items {
		if other := &all.Items[i]; other.UID != pl.move.UID && other.Underway() && other.Status.VolumeHandle == v.Spec.CSI.VolumeHandle {
			return fmt.Sprintf("the VolumeMove %s of the same volume, in the namespace %s, goes first", other.Name, other.Namespace), nil
		}
	}
	waits, err := pl.end(ctx, func(other *v1alpha1.VolumeMove) bool { return other.Status.VolumeHandle == v.Spec.CSI.VolumeHandle })
	return waits.message, err
}

// driverGoes says that the driver is being removed, without which a move that has begun could neither go on nor be undone.
func (pl planner) driverGoes(ctx context.Context) (string, error) {
	all := &v1beta1.HostPathProvisionerList{}
	if err := pl.api.reader.List(ctx, all); err != nil {
		return "", err
	}
	for i := range all.Items {
		if all.Items[i].DeletionTimestamp != nil {
			return fmt.Sprintf("the HostPathProvisioner %s is being deleted, and with it the driver", all.Items[i].Name), nil
		}
	}
	return "", nil
}

// keeps says what keeps a volume on its node.
func (pl planner) keeps(ctx context.Context, v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim, policy v1alpha1.SnapshotsPolicy) (string, error) {
	if waits := movable(v, claim); waits != "" {
		return waits, nil
	}
	if waits, err := pl.snapshots(ctx, v, policy); err != nil || waits != "" {
		return waits, err
	}
	other, err := pl.api.another(ctx, v.Name, v.Spec.CSI.VolumeHandle, place.NodeOfVolume(v))
	return ledByTwo(other), err
}

// movable says why a volume cannot move.
func movable(v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) string {
	switch ref := v.Spec.ClaimRef; {
	case !place.OfDriver(v):
		return fmt.Sprintf("the volume %s is of another driver", v.Name)
	case ref == nil || ref.UID != claim.UID || v.DeletionTimestamp != nil:
		return fmt.Sprintf("the volume %s is not bound to the claim, or is being deleted", v.Name)
	case place.NodeOfVolume(v) == "":
		return fmt.Sprintf("the volume %s is on no single node: those of shared pools are on all", v.Name)
	}
	if _, err := volume.ParseID(v.Spec.CSI.VolumeHandle); err != nil {
		return fmt.Sprintf("the volume %s: %v", v.Name, err)
	}
	if i := slices.IndexFunc(v.Finalizers, func(f string) bool { return !slices.Contains(ownFinalizers, f) }); i >= 0 {
		return fmt.Sprintf("the volume %s has the finalizer %s of another controller, which may not let it be replaced", v.Name, v.Finalizers[i])
	}
	return ""
}

// snapshots says which keep a volume from moving.
func (pl planner) snapshots(ctx context.Context, v *corev1.PersistentVolume, policy v1alpha1.SnapshotsPolicy) (string, error) {
	if policy == v1alpha1.LeaveSnapshots {
		return "", nil
	}
	for next := ""; ; {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(place.SnapshotContent.GroupVersion().WithKind(place.SnapshotContent.Kind + "List"))
		if err := pl.api.reader.List(ctx, list, client.Limit(500), client.Continue(next)); meta.IsNoMatchError(err) {
			return "", nil
		} else if err != nil {
			return "", err
		}
		for _, content := range list.Items {
			driver, _, _ := unstructured.NestedString(content.Object, "spec", "driver")
			handle, _, _ := unstructured.NestedString(content.Object, "spec", "source", "volumeHandle")
			if driver != v.Spec.CSI.Driver || handle != v.Spec.CSI.VolumeHandle {
				continue
			}
			on, err := place.OnlyNodeOfSnapshot(&content)
			if err != nil {
				return "", err
			}
			if on == "" || on == place.NodeOfVolume(v) { // others were left behind by an earlier move
				return fmt.Sprintf("the volume has snapshots, such as the VolumeSnapshotContent %s, which stay on node %s: delete them, or move with snapshots: LeaveBehind",
					content.GetName(), place.NodeOfVolume(v)), nil
			}
		}
		if next = list.GetContinue(); next == "" {
			return "", nil
		}
	}
}

// target is the node that the volume goes to: the one that was asked for, or the one with the most room.
func (pl planner) target(ctx context.Context, p plan, with *colocation) (target, waits string, err error) {
	c, err := pl.candidates(ctx, p, with)
	if err != nil {
		return "", "", err
	}
	if earlier := c.driver[p.source]; earlier != "" {
		return "", earlier, nil
	}
	if to := pl.move.Spec.TargetNode; to != "" {
		return to, c.refuses(to), nil
	}
	var best *resource.Quantity
	refusals := []string{}
	for i := range c.nodes {
		name := c.nodes[i].Name
		if why := c.refuses(name); why != "" {
			refusals = append(refusals, why)
		} else if room := c.room[p.volume.Spec.StorageClassName][name]; best == nil || room.Cmp(*best) > 0 {
			target, best = name, &room
		}
	}
	if target == "" {
		return "", "no node can take the volume: " + list(refusals), nil
	}
	return target, "", nil
}

// Candidates are the nodes, and what is known of them.
type candidates struct {
	plan
	*colocation
	nodes  []corev1.Node
	driver map[string]string                       // see readyNodes
	room   map[string]map[string]resource.Quantity // by StorageClass and node
	class  *storagev1.StorageClass                 // may be nil
	coming map[string]map[share]int64              // see planner.coming
}

func (pl planner) candidates(ctx context.Context, p plan, with *colocation) (*candidates, error) {
	c := &candidates{plan: p, colocation: with, room: map[string]map[string]resource.Quantity{}}
	nodes := &corev1.NodeList{}
	if err := pl.api.reader.List(ctx, nodes); err != nil {
		return nil, err
	}
	c.nodes = nodes.Items
	var err error
	if c.driver, err = pl.driver.readyNodes(ctx); err != nil {
		return nil, err
	}
	if name := p.volume.Spec.StorageClassName; name != "" {
		class := &storagev1.StorageClass{}
		if err := pl.api.reader.Get(ctx, client.ObjectKey{Name: name}, class); err == nil {
			c.class = class
		} else if !apierrors.IsNotFound(err) {
			return nil, err
		}
	}
	capacities := &storagev1.CSIStorageCapacityList{}
	if err := pl.api.reader.List(ctx, capacities, client.InNamespace(pl.driver.namespace)); err != nil {
		return nil, err
	}
	for _, capacity := range capacities.Items {
		if capacity.NodeTopology == nil {
			continue
		}
		of := c.room[capacity.StorageClassName]
		if of == nil {
			of = map[string]resource.Quantity{}
			c.room[capacity.StorageClassName] = of
		}
		of[capacity.NodeTopology.MatchLabels[place.TopologyKey]] = *ptrOr(capacity.MaximumVolumeSize, capacity.Capacity)
	}
	c.coming, err = pl.coming(ctx, with)
	return c, err
}

// coming are how many bytes moves bring to nodes that have begun, or have brought there by now, with the volumes that wait to follow those. A move that
// has begun goes to no other node, and what a node says of its room may not have it yet.
func (pl planner) coming(ctx context.Context, with *colocation) (map[string]map[share]int64, error) {
	all := &v1alpha1.VolumeMoveList{}
	if err := pl.api.reader.List(ctx, all); err != nil {
		return nil, err
	}
	found := map[string]map[share]int64{}
	bring := func(to string, of share, bytes int64) {
		if found[to] == nil {
			found[to] = map[share]int64{}
		}
		found[to][of] += bytes
	}
	for i := range all.Items {
		m := &all.Items[i]
		if !m.Underway() && m.Status.Phase != v1alpha1.Succeeded {
			continue
		}
		v, err := pl.uncounted(ctx, m)
		if err != nil {
			return nil, err
		}
		if v != nil {
			bring(m.Status.TargetNode, shareOf(v), m.Status.PromisedBytes)
		}
	}
	// All of this one's own were counted when the first of them began, with what was to follow others then.
	if slices.ContainsFunc(all.Items, func(m v1alpha1.VolumeMove) bool {
		return m.Underway() && m.Namespace == pl.move.Namespace && slices.Contains(with.claims, m.Spec.ClaimName)
	}) {
		return found, nil
	}
	return found, pl.eachFollowing(ctx, all.Items, bring)
}

// eachFollowing calls bring once for each volume that waits to go where a move has begun to bring another that pods use together with it.
func (pl planner) eachFollowing(ctx context.Context, moves []v1alpha1.VolumeMove, bring func(to string, of share, bytes int64)) error {
	done := map[client.ObjectKey]bool{}
	for i := range moves {
		begun := &moves[i]
		if !begun.Underway() || begun.Status.Phase == v1alpha1.Undoing {
			continue
		}
		waiting := slices.DeleteFunc(slices.Clone(moves), func(m v1alpha1.VolumeMove) bool {
			return m.Namespace != begun.Namespace || m.Underway() || m.Ended() || m.DeletionTimestamp != nil
		})
		of := pl
		of.move = begun
		if err := of.eachOfOwnFollowing(ctx, waiting, done, bring); err != nil {
			return err
		}
	}
	return nil
}

// eachOfOwnFollowing does so for those that wait for this move, but for those that it was done for.
func (pl planner) eachOfOwnFollowing(ctx context.Context, waiting []v1alpha1.VolumeMove, done map[client.ObjectKey]bool, bring func(to string, of share, bytes int64)) error {
	if len(waiting) == 0 {
		return nil
	}
	c, err := pl.together(ctx)
	if err != nil {
		return err
	}
	for _, name := range c.claims[1:] {
		key := client.ObjectKey{Namespace: pl.move.Namespace, Name: name}
		if done[key] || moveOfClaim(name, waiting) == nil {
			continue
		}
		claim, v, err := pl.claimed(ctx, name)
		if err != nil {
			return err
		}
		if v != nil && place.OfDriver(v) && place.NodeOfVolume(v) == pl.move.Status.SourceNode {
			size := v1alpha1.Size(claim, v)
			bring(pl.move.Status.TargetNode, shareOf(v), size.Value())
			done[key] = true
		}
	}
	return nil
}

// counted is after how long what a node says of its room has what a move has had promised there: csi-provisioner asks each minute.
const counted = 3 * time.Minute

// uncounted is the PersistentVolume of a move, or nil if its target has counted it in what it says of its room.
func (pl planner) uncounted(ctx context.Context, m *v1alpha1.VolumeMove) (*corev1.PersistentVolume, error) {
	if since := m.Status.BegunTime; since == nil || pl.now().Sub(since.Time).Abs() > counted {
		if m.Status.Phase != v1alpha1.Copying {
			return nil, nil
		}
		// Its mover may have started late, or does still.
		mover := &corev1.Pod{ObjectMeta: objects{move: m, namespace: pl.driver.namespace}.meta("-" + string(roleIn))}
		there, err := pl.api.find(ctx, client.ObjectKeyFromObject(mover), mover)
		if err != nil || there && pl.now().Sub(mover.CreationTimestamp.Time) > counted {
			return nil, err
		}
	}
	v := &corev1.PersistentVolume{}
	if there, err := pl.api.find(ctx, client.ObjectKey{Name: m.Status.Volume}, v); err != nil || !there || !place.OfDriver(v) {
		return nil, err
	}
	return v, nil
}

// ptrOr is the first that is set, or 0.
func ptrOr(all ...*resource.Quantity) *resource.Quantity {
	for _, one := range all {
		if one != nil {
			return one
		}
	}
	return ptr.To(resource.Quantity{})
}

// refuses says why a node cannot take the volume.
func (c *candidates) refuses(name string) string {
	i := slices.IndexFunc(c.nodes, func(n corev1.Node) bool { return n.Name == name })
	earlier, ready := c.driver[name]
	switch {
	case name == c.source:
		return fmt.Sprintf("node %s has the volume", name)
	case i < 0:
		return fmt.Sprintf("there is no node %s", name)
	case !ready:
		return fmt.Sprintf("the driver is not ready on node %s", name)
	case earlier != "":
		return earlier
	case c.to != "" && c.to != name:
		return c.by
	}
	if why := c.unschedulable(&c.nodes[i]); why != "" {
		return why
	}
	return c.hasNoRoom(name)
}

// hasNoRoom says so of a node for the volume, those that follow it, and those that come there. Where a class is gone or publishes no capacity, the
// driver of the target decides.
func (c *candidates) hasNoRoom(name string) string {
	needed := maps.Clone(c.follow)
	own := v1alpha1.Size(c.claim, c.volume)
	needed[shareOf(c.volume)] += own.Value()
	inPool := map[string]int64{}
	for _, all := range []map[share]int64{needed, c.coming[name]} {
		for of, bytes := range all {
			inPool[of.pool] += bytes
		}
	}
	for _, of := range slices.SortedFunc(maps.Keys(needed), func(a, b share) int { return cmp.Compare(a.class, b.class) }) {
		size, room := resource.NewQuantity(inPool[of.pool], resource.BinarySI), c.room[of.class][name]
		if len(c.room[of.class]) > 0 && room.Cmp(*size) < 0 {
			return fmt.Sprintf("node %s has no room: %s of %s are available", name, room.String(), size.String())
		}
	}
	return ""
}

func list(of []string) string {
	const most = 5
	if len(of) <= most {
		return join(of)
	}
	return fmt.Sprintf("%s and %d more", join(of[:most]), len(of)-most)
}
