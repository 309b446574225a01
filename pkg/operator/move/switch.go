package move

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

const (
	// volumeFile of the Secret is the PersistentVolume that replaces the one before.
	volumeFile = "persistentvolume.json"
	// sizeFile of it is the size of the one before.
	sizeFile = "size"
	// fenceFile of it is the fence as of which the copy is whole.
	fenceFile = "fence"
	// endedFile of it says that nothing is to be done any more but to remove what was made for the move.
	endedFile = "ended"
	// placedFile of it is the node to which the PersistentVolume leads. From then on, what removes or replaces that is not this move.
	placedFile = "placed"
	// movedBy on a PersistentVolume is the uid of the move that made it, and on a claim has the controller of volumes look at it again.
	movedBy = "hostpathprovisioner.kubevirt.io/moved-by"
	// undoneBy on a PersistentVolume is the uid of the move that is undone: an operator that has lost its lease may not have heard of that.
	undoneBy = "hostpathprovisioner.kubevirt.io/undone-by"
	// reclaimPolicy on a PersistentVolume is the policy that it has when it does not move.
	reclaimPolicy = "hostpathprovisioner.kubevirt.io/reclaim-policy"
	// preResize is on a PersistentVolume whose size csi-resizer has written, and that kubelet has not made so large yet.
	preResize = "volume.alpha.kubernetes.io/pre-resize-capacity"
)

// ownFinalizers keep a PersistentVolume while it is bound, and until its directory is removed. Both are for what is not to happen here:
// the object is replaced.
var ownFinalizers = []string{"external-provisioner.volume.kubernetes.io/finalizer", "kubernetes.io/pv-protection"}

// A claimedVolume is the PersistentVolume of the claim of a move, which is replaced by one on another node.
type claimedVolume struct {
	move    *v1alpha1.VolumeMove
	api     apiServer
	objects objects
}

// replacement is the PersistentVolume on a node that takes the place of another. It is what kubectl takes, too: see docs/operator.md.
func (v claimedVolume) replacement(of *corev1.PersistentVolume, saved *corev1.PersistentVolume, node string) *corev1.PersistentVolume {
	to := &corev1.PersistentVolume{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}, ObjectMeta: metav1.ObjectMeta{
		Name: of.Name, Labels: of.Labels, Annotations: map[string]string{}, Finalizers: slices.Clone(of.Finalizers),
	}, Spec: *of.Spec.DeepCopy()}
	for key, value := range of.Annotations {
		to.Annotations[key] = value
	}
	to.Annotations[reclaimPolicy] = string(policyOf(of))
	to.Annotations[movedBy] = string(v.move.UID)
	if node == v.move.Status.SourceNode {
		v.noteUndone(to)
	}
	to.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	if to.Spec.ClaimRef != nil {
		to.Spec.ClaimRef.ResourceVersion = ""
	}
	to.Spec.NodeAffinity = onNode(node)
	// The size of the disk, if the upstream driver has written that, becomes the promise. One that csi-resizer has written is kubelet's to keep.
	if of.Annotations[preResize] == "" && node == v.move.Status.TargetNode && v.move.Status.PromisedBytes > 0 {
		to.Spec.Capacity[corev1.ResourceStorage] = *resource.NewQuantity(v.move.Status.PromisedBytes, resource.BinarySI)
	}
	// Other controllers may have taken their finalizers off one that is deleted.
	if saved != nil {
		for _, finalizer := range saved.Finalizers {
			if !slices.Contains(to.Finalizers, finalizer) {
				to.Finalizers = append(to.Finalizers, finalizer)
			}
		}
	}
	slices.Sort(to.Finalizers)
	return to
}

// policyOf is the policy that a volume has when it does not move.
func policyOf(v *corev1.PersistentVolume) corev1.PersistentVolumeReclaimPolicy {
	return cmp.Or(corev1.PersistentVolumeReclaimPolicy(v.Annotations[reclaimPolicy]), v.Spec.PersistentVolumeReclaimPolicy)
}

func onNode(name string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: place.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{name}}},
	}}}}
}

// save keeps what replaces a PersistentVolume, so that nothing is lost between the two: a Secret that is deleted by hand stays.
func (v claimedVolume) save(ctx context.Context, volume *corev1.PersistentVolume, node string) error {
	secret, err := v.objects.secret(ctx)
	if err != nil {
		return err
	}
	before, err := savedIn(secret)
	if err != nil {
		return err
	}
	to := v.replacement(volume, before, node)
	if before != nil && equality.Semantic.DeepEqual(before, to) && string(secret.Data[fenceFile]) == v.move.Status.Fence {
		return nil
	}
	if volume.UID == v.move.Status.VolumeUID {
		secret.Data[sizeFile] = []byte(volume.Spec.Capacity.Storage().String())
	}
	data, err := json.Marshal(to)
	if err != nil {
		return err
	}
	secret.Data[volumeFile], secret.Data[fenceFile] = data, []byte(v.move.Status.Fence)
	if secret.DeletionTimestamp == nil {
		controllerutil.AddFinalizer(secret, v1alpha1.Finalizer)
	}
	return v.api.writer.Update(ctx, secret)
}

// savedIn is what was saved, or nil.
func savedIn(secret *corev1.Secret) (*corev1.PersistentVolume, error) {
	data := secret.Data[volumeFile]
	if data == nil {
		return nil, nil //nolint:nilnil // there is none
	}
	volume := &corev1.PersistentVolume{}
	if err := json.Unmarshal(data, volume); err != nil {
		return nil, fmt.Errorf("read the PersistentVolume in the secret %s: %w", secret.Name, err)
	}
	return volume, nil
}

// stillBound is the volume, or why the move cannot go on.
func (v claimedVolume) stillBound(ctx context.Context) (*corev1.PersistentVolume, string, error) {
	if v.move.DeletionTimestamp != nil {
		return nil, "the VolumeMove was deleted", nil
	}
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	if there, err := v.api.find(ctx, client.ObjectKey{Namespace: v.move.Namespace, Name: v.move.Spec.ClaimName}, claim); err != nil {
		return nil, "", err
	} else if !there || claim.UID != v.move.Status.ClaimUID || claim.DeletionTimestamp != nil {
		return nil, "the claim was deleted", nil
	}
	if there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, volume); err != nil {
		return nil, "", err
	} else if !there || volume.UID != v.move.Status.VolumeUID || claim.Spec.VolumeName != volume.Name || !v.owns(volume) {
		return nil, "the PersistentVolume was replaced", nil
	}
	return volume, "", nil
}

// owner is what keeps the last copy: see wanted.
const owner = "the claim, and with the policy Retain the PersistentVolume"

// wanted says whether the claim is there, or a PersistentVolume that does not go with it: one that is retained, or that another claim has by
// now. Until then, the last copy of the volume is not removed.
func (v claimedVolume) wanted(ctx context.Context) (bool, error) {
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Namespace: v.move.Namespace, Name: v.move.Spec.ClaimName}, claim)
	if err != nil || there && claim.UID == v.move.Status.ClaimUID && claim.DeletionTimestamp == nil {
		return err == nil, err
	}
	there, err = v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, volume)
	ref := volume.Spec.ClaimRef
	goes := policyOf(volume) != corev1.PersistentVolumeReclaimRetain && ref != nil && ref.UID == v.move.Status.ClaimUID
	return there && !goes && place.OfDriver(volume) && volume.Spec.CSI.VolumeHandle == v.move.Status.VolumeHandle, err
}

// another is a PersistentVolume of another name that leads to what a node has, or may; empty for none.
func (v claimedVolume) another(ctx context.Context, on string) (name string, err error) {
	return v.api.another(ctx, v.move.Status.Volume, v.move.Status.VolumeHandle, on)
}

// ledByTwo says that the volume cannot move because another PersistentVolume leads to the source, too.
func (v claimedVolume) ledByTwo(ctx context.Context) (string, error) {
	another, err := v.another(ctx, v.move.Status.SourceNode)
	return ledByTwo(another), err
}

// gone says whether the claim and the PersistentVolume are.
func (v claimedVolume) gone(ctx context.Context) (bool, error) {
	claim := &corev1.PersistentVolumeClaim{}
	there, err := v.api.find(ctx, client.ObjectKey{Namespace: v.move.Namespace, Name: v.move.Spec.ClaimName}, claim)
	if err != nil || there && claim.UID == v.move.Status.ClaimUID {
		return false, err
	}
	there, err = v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, &corev1.PersistentVolume{})
	return !there && err == nil, err
}

// untouched says whether the PersistentVolume is the one before, so that no pod has used the copy, whether that is confirmed or not.
func (v claimedVolume) untouched(ctx context.Context) (bool, error) {
	volume := &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, volume)
	return there && volume.UID == v.move.Status.VolumeUID && volume.DeletionTimestamp == nil, err
}

// replaced says whether the PersistentVolume has taken the place of the one before, though it may be gone by now: pods may have used the volume
// on the target.
func (v claimedVolume) replaced(ctx context.Context) (bool, error) {
	now := &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, now)
	if err != nil || there && now.Annotations[movedBy] == string(v.move.UID) {
		return err == nil, err
	}
	return v.placed(ctx, v.move.Status.TargetNode)
}

// placed says whether the PersistentVolume was seen to lead to a node by this move.
func (v claimedVolume) placed(ctx context.Context, node string) (bool, error) {
	secret := &corev1.Secret{ObjectMeta: v.objects.meta("")}
	there, err := v.api.find(ctx, client.ObjectKeyFromObject(secret), secret)
	return there && v.objects.has(secret) && string(secret.Data[placedFile]) == node, err
}

// notePlaced notes that it does.
func (v claimedVolume) notePlaced(ctx context.Context, node string) error {
	secret, err := v.objects.secret(ctx)
	if err != nil || string(secret.Data[placedFile]) == node {
		return err
	}
	secret.Data[placedFile] = []byte(node)
	return v.api.writer.Update(ctx, secret)
}

// recovered says whether an administrator has made a PersistentVolume that leads to what is to be removed on a node: to the source, after the
// switch, or to the target, when the move is undone: ours may lead there for a while. Where ours is as it should be, and the volume is wanted, so
// that the other node shows what it has before anything is removed, none is looked for.
func (v claimedVolume) recovered(ctx context.Context, on string, wanted bool) (found bool, err error) {
	now := &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, now)
	at := place.NodeOfVolume(now)
	if err != nil || wanted && there && at != on && (at == v.move.Status.SourceNode || at == v.move.Status.TargetNode) {
		return false, err
	}
	undoes := on == v.move.Status.TargetNode
	err = place.EachVolume(ctx, v.api.reader, func(one *corev1.PersistentVolume) {
		// Ours leads there until it is put back, which is noted on it: what has the note, too, was made of it.
		ours := undoes && one.Annotations[movedBy] == string(v.move.UID) && !v.isUndone(one)
		found = found || !ours && place.OfDriver(one) && one.Spec.CSI.VolumeHandle == v.move.Status.VolumeHandle && place.NodeOfVolume(one) == on
	})
	return found, err
}

// owns says whether a PersistentVolume is the one of the claim and of the volume that moves, whatever the status says.
func (v claimedVolume) owns(volume *corev1.PersistentVolume) bool {
	ref := volume.Spec.ClaimRef
	return place.OfDriver(volume) && volume.Spec.CSI.VolumeHandle == v.move.Status.VolumeHandle &&
		ref != nil && ref.Namespace == v.move.Namespace && ref.Name == v.move.Spec.ClaimName && ref.UID == v.move.Status.ClaimUID
}

// did is what moveTo did, of which more may follow at once.
func (v claimedVolume) did(format string, args ...any) outcome {
	return next(string(v.move.Status.Phase), format, args...)
}

// waits is what moveTo waits for, which others do, perhaps never.
func (v claimedVolume) waits(format string, args ...any) outcome {
	return wait(string(v.move.Status.Phase), format, args...)
}

// putBack undoes what moveTo has begun, if it has.
func (v claimedVolume) putBack(ctx context.Context) (outcome, error) {
	secret := &corev1.Secret{ObjectMeta: v.objects.meta("")}
	if there, err := v.api.find(ctx, client.ObjectKeyFromObject(secret), secret); err != nil || !there || !v.objects.has(secret) || secret.Data[volumeFile] == nil {
		return outcome{}, err
	}
	now := &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, now)
	// Of a volume with the policy Retain only the deletion shows that it was to be replaced.
	untouched := now.UID == v.move.Status.VolumeUID && now.Annotations[reclaimPolicy] == "" && now.DeletionTimestamp == nil
	others := now.Annotations[movedBy] != string(v.move.UID) && now.UID != v.move.Status.VolumeUID
	switch {
	case err != nil || there && others:
		return outcome{}, err
	case there && untouched && v.isUndone(now):
		return outcome{}, v.notePlaced(ctx, v.move.Status.SourceNode)
	case there && untouched:
		return v.did("note on the PersistentVolume %s that the move is undone", now.Name), v.patch(ctx, now, v.noteUndone)
	}
	return v.moveTo(ctx, v.move.Status.SourceNode)
}

func (v claimedVolume) isUndone(volume *corev1.PersistentVolume) bool {
	return volume.Annotations[undoneBy] == string(v.move.UID)
}

func (v claimedVolume) noteUndone(volume *corev1.PersistentVolume) {
	metav1.SetMetaDataAnnotation(&volume.ObjectMeta, undoneBy, string(v.move.UID))
}

// moveTo does the next step of having the PersistentVolume under the claim be on a node, by what is there. The volume is done when
// its claim is bound again, or is gone: then the outcome is empty.
func (v claimedVolume) moveTo(ctx context.Context, node string) (outcome, error) {
	placed, err := v.placed(ctx, node)
	if err != nil {
		return outcome{}, err
	}
	now := &corev1.PersistentVolume{}
	there, err := v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, now)
	at := place.NodeOfVolume(now)
	mine := v.owns(now) && (now.Annotations[movedBy] == string(v.move.UID) || now.UID == v.move.Status.VolumeUID)
	switch {
	case err != nil:
		return outcome{}, err
	case placed && (!there || node == v.move.Status.TargetNode && (!mine || at != node)):
		return outcome{}, nil // it was removed or replaced by others, who may make another one
	case !there:
		return v.recreate(ctx, node)
	case !mine:
		return v.waits("the PersistentVolume %s is another one, which is in the way: delete it", now.Name), nil
	case node == v.move.Status.TargetNode && v.isUndone(now):
		return v.waits("the move is undone"), nil
	case at == node && (now.UID != v.move.Status.VolumeUID || now.DeletionTimestamp == nil):
		if err := v.notePlaced(ctx, node); err != nil {
			return outcome{}, err
		}
		return v.bind(ctx, now)
	}
	replaces := v.did("replace the PersistentVolume %s", now.Name)
	if err := v.save(ctx, now, node); err != nil {
		return outcome{}, err
	}
	if now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
		return replaces, v.patch(ctx, now, func(to *corev1.PersistentVolume) {
			metav1.SetMetaDataAnnotation(&to.ObjectMeta, reclaimPolicy, string(to.Spec.PersistentVolumeReclaimPolicy))
			to.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		})
	}
	if now.DeletionTimestamp == nil {
		return replaces, client.IgnoreNotFound(v.api.writer.Delete(ctx, now, client.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion}))
	}
	if i := slices.IndexFunc(now.Finalizers, func(f string) bool { return !slices.Contains(ownFinalizers, f) }); i >= 0 {
		return v.waits("the PersistentVolume %s has the finalizer %s, which another controller has to remove", now.Name, now.Finalizers[i]), nil
	}
	// What is saved is what goes: a change since then is a conflict.
	return replaces, v.patch(ctx, now, func(to *corev1.PersistentVolume) { to.Finalizers = nil })
}

// patch changes a PersistentVolume as it was read.
func (v claimedVolume) patch(ctx context.Context, volume *corev1.PersistentVolume, change func(*corev1.PersistentVolume)) error {
	changed := volume.DeepCopy()
	change(changed)
	err := v.api.writer.Patch(ctx, changed, client.MergeFromWithOptions(volume, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // it is read again
	}
	return client.IgnoreNotFound(err)
}

// recreate makes the PersistentVolume on a node of what was saved.
func (v claimedVolume) recreate(ctx context.Context, node string) (outcome, error) {
	secret, err := v.objects.secret(ctx)
	if err != nil {
		return outcome{}, err
	}
	saved, err := savedIn(secret)
	if err != nil {
		return outcome{}, err
	}
	if saved == nil {
		return v.waits("the secret %s was removed by force, and with it the PersistentVolume %s of the volume %s on node %s: make it with the annotation %s: %s",
			secret.Name, v.move.Status.Volume, v.move.Status.VolumeHandle, node, movedBy, v.move.UID), nil
	}
	saved.Spec.NodeAffinity = onNode(node)
	switch {
	case node == v.move.Status.SourceNode:
		v.noteUndone(saved)
	case v.isUndone(saved):
		return v.waits("the move is undone"), nil
	}
	if size, err := resource.ParseQuantity(string(secret.Data[sizeFile])); err == nil && node == v.move.Status.SourceNode {
		saved.Spec.Capacity[corev1.ResourceStorage] = size
	}
	if ready, err := v.readyFor(ctx, saved); err != nil || !ready {
		return v.waits("wait for the claim %s to be seen without its volume", v.move.Spec.ClaimName), err
	}
	if err := v.api.writer.Create(ctx, saved); err != nil && !apierrors.IsAlreadyExists(err) {
		return outcome{}, err
	}
	return v.did("the PersistentVolume %s is replaced", v.move.Status.Volume), nil
}

// readyFor says whether the claim will show the size of a volume that is made now: it does when it becomes Bound, and not if the controller
// of volumes has not seen it without one. A claim that showed more could not grow.
func (v claimedVolume) readyFor(ctx context.Context, volume *corev1.PersistentVolume) (bool, error) {
	claim := &corev1.PersistentVolumeClaim{}
	there, err := v.api.find(ctx, client.ObjectKey{Namespace: v.move.Namespace, Name: v.move.Spec.ClaimName}, claim)
	return !there || claim.UID != v.move.Status.ClaimUID || claim.Status.Phase == corev1.ClaimLost ||
		claim.Status.Capacity.Storage().Cmp(*volume.Spec.Capacity.Storage()) <= 0, err
}

// bind waits until the claim is bound again, and gives the volume its policy back.
func (v claimedVolume) bind(ctx context.Context, volume *corev1.PersistentVolume) (outcome, error) {
	policy := corev1.PersistentVolumeReclaimPolicy(volume.Annotations[reclaimPolicy])
	if policy == "" && volume.UID == v.move.Status.VolumeUID {
		return outcome{}, nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	err := v.api.reader.Get(ctx, client.ObjectKey{Namespace: v.move.Namespace, Name: v.move.Spec.ClaimName}, claim)
	if client.IgnoreNotFound(err) != nil {
		return outcome{}, err
	}
	if gone := err != nil || claim.UID != v.move.Status.ClaimUID; !gone {
		if claim.Annotations[movedBy] != string(volume.UID) {
			// Until it is touched, the claim is Lost for up to 15 s.
			metav1.SetMetaDataAnnotation(&claim.ObjectMeta, movedBy, string(volume.UID))
			err := v.api.writer.Update(ctx, claim)
			if apierrors.IsConflict(err) {
				err = nil
			}
			return v.did("have the claim be bound"), client.IgnoreNotFound(err)
		}
		if claim.DeletionTimestamp == nil && (claim.Status.Phase != corev1.ClaimBound || volume.Status.Phase != corev1.VolumeBound) {
			return v.waits("wait for the claim %s to be bound", claim.Name), nil
		}
	}
	if policy == "" {
		return outcome{}, nil
	}
	return outcome{after: soon}, v.patch(ctx, volume, func(to *corev1.PersistentVolume) {
		to.Spec.PersistentVolumeReclaimPolicy = policy
		delete(to.Annotations, reclaimPolicy)
	})
}
