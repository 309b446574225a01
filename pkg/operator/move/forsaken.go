package move

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// A VolumeMove may be removed by force: its finalizer is taken away, and maybe another one made under its name at once. What was made for it says
// by itself which move it is of, and from where to where: such a forsaken move is ended as one that was deleted. It is undone, unless its
// PersistentVolume may have led to the target: then it is completed.

// begunAnnotation on what is made for a move is the beginning of it.
const begunAnnotation = "hostpathprovisioner.kubevirt.io/move-begun"

// A beginning is what was asked for, and what was found when the move began.
type beginning struct {
	Spec   v1alpha1.VolumeMoveSpec   `json:"spec"`
	Status v1alpha1.VolumeMoveStatus `json:"status"`
}

func beginningOf(m *v1alpha1.VolumeMove) string {
	data, _ := json.Marshal(beginning{m.Spec, v1alpha1.VolumeMoveStatus{ // it never fails
		SourceNode: m.Status.SourceNode, TargetNode: m.Status.TargetNode, PromisedBytes: m.Status.PromisedBytes,
		Volume: m.Status.Volume, VolumeUID: m.Status.VolumeUID, VolumeHandle: m.Status.VolumeHandle, ClaimUID: m.Status.ClaimUID,
	}})
	return string(data)
}

// Underway are the moves that have begun and not ended, with those whose VolumeMove was removed by force. Each needs the driver and the pools on both
// of its nodes, also while it has no pod there: without them it can neither go on nor be undone. The namespace is the driver's.
func Underway(ctx context.Context, api client.Reader, namespace string) (found []v1alpha1.VolumeMove, err error) {
	a := apiServer{reader: api}
	err = eachPage(ctx, a, metav1.NamespaceAll, func(page *v1alpha1.VolumeMoveList) {
		found = append(found, slices.DeleteFunc(page.Items, func(m v1alpha1.VolumeMove) bool { return !m.Underway() })...)
	})
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil, nil // the definition is not there, and neither are objects
	}
	if err != nil {
		return nil, err
	}
	// After those: none is missed that is removed meanwhile.
	forsaken, err := a.forsaken(ctx, namespace)
	for _, m := range forsaken {
		found = append(found, *m)
	}
	return found, err
}

// forsaken are the moves that have objects but no VolumeMove, or one that has ended and asks for nothing any more: what was made late stays
// otherwise. Those of operators that noted no beginning have no status.
func (a apiServer) forsaken(ctx context.Context, namespace string) ([]*v1alpha1.VolumeMove, error) {
	policies, pods := &networkingv1.NetworkPolicyList{}, &corev1.PodList{}
	for _, list := range []client.ObjectList{policies, pods} {
		if err := a.reader.List(ctx, list, client.InNamespace(namespace), client.HasLabels{moveLabel}); err != nil {
			return nil, err
		}
	}
	var made []client.Object
	for i := range policies.Items {
		made = append(made, &policies.Items[i])
	}
	for i := range pods.Items {
		made = append(made, &pods.Items[i])
	}
	if len(made) == 0 {
		return nil, nil
	}
	there := map[types.UID]*v1alpha1.VolumeMove{}
	// After the objects: each is made after its VolumeMove.
	if err := eachPage(ctx, a, metav1.NamespaceAll, func(page *v1alpha1.VolumeMoveList) {
		for i := range page.Items {
			there[page.Items[i].UID] = &page.Items[i]
		}
	}); err != nil {
		return nil, err
	}
	found := map[types.UID]*v1alpha1.VolumeMove{}
	for _, object := range made {
		m := recalled(object)
		switch {
		case m == nil:
		case there[m.UID] != nil:
			if m := there[m.UID]; m.Ended() && !controllerutil.ContainsFinalizer(m, v1alpha1.Finalizer) {
				found[m.UID] = m
			}
		case found[m.UID] == nil || found[m.UID].Status.SourceNode == "": // some of it may be of an operator that noted no beginning
			found[m.UID] = m
		}
	}
	return slices.SortedFunc(maps.Values(found), func(a, b *v1alpha1.VolumeMove) int { return cmp.Compare(a.UID, b.UID) }), nil
}

// recalled is the move that an object was made for, as one that was deleted: see recall.
func recalled(object client.Object) *v1alpha1.VolumeMove {
	namespace, name, ok := strings.Cut(object.GetAnnotations()[nameAnnotation], "/")
	if !ok {
		return nil
	}
	var was beginning
	if text := object.GetAnnotations()[begunAnnotation]; text == "" || json.Unmarshal([]byte(text), &was) != nil {
		was = beginning{}
	}
	m := &v1alpha1.VolumeMove{Spec: was.Spec, Status: was.Status}
	m.Status.Phase = v1alpha1.Undoing
	m.Namespace, m.Name, m.UID, m.DeletionTimestamp = namespace, name, types.UID(object.GetLabels()[moveLabel]), ptr.To(metav1.Now())
	return m
}

// endForsaken does what is next of those moves that are forsaken, and says what they wait for. Nothing else may hear of one.
func (r *Reconciler) endForsaken(ctx context.Context, of func(m *v1alpha1.VolumeMove) bool) (waits outcome, err error) {
	api := apiServer{writer: r.Client, reader: r.APIReader}
	all, err := api.forsaken(ctx, r.DriverNamespace)
	if err != nil {
		return outcome{}, err
	}
	for _, m := range all {
		if !of(m) {
			continue
		}
		result, err := r.reconciliation(m).end(ctx)
		if err != nil || result != (outcome{}) {
			return wait("Waiting", "what is left of an earlier VolumeMove %s in the namespace %s is ended first: %s", m.Name, m.Namespace, result.message), err
		}
	}
	return outcome{}, nil
}

// named has those be ended that have a name.
func named(key client.ObjectKey) func(m *v1alpha1.VolumeMove) bool {
	return func(m *v1alpha1.VolumeMove) bool { return client.ObjectKeyFromObject(m) == key }
}

// end does what is next of a move that is forsaken. It is empty if there is nothing left.
func (m reconciliation) end(ctx context.Context) (outcome, error) {
	if m.move.Status.SourceNode == "" {
		return outcome{}, m.objects.removeUnknown(ctx)
	}
	if !m.move.Ended() {
		if err := m.volume.recall(ctx); err != nil {
			return outcome{}, err
		}
	}
	for !m.move.Ended() {
		before := m.move.Status.Phase
		result, err := m.step(ctx)
		if err != nil || m.move.Status.Phase == before {
			return wait("Waiting", "%s", result.message), err
		}
	}
	left, err := m.objects.remove(ctx)
	if err != nil || len(left) > 0 {
		return wait("Waiting", "wait for the movers to end: %s", list(left)), err
	}
	return outcome{}, nil
}

// recall finds out where a move is whose status is lost. It is undone as long as its PersistentVolume was not seen to lead to the target, and
// completed after that. One whose PersistentVolume was made by hand is left, with what the nodes have.
func (v claimedVolume) recall(ctx context.Context) error {
	secret := &corev1.Secret{ObjectMeta: v.objects.meta("")}
	there, err := v.api.find(ctx, client.ObjectKeyFromObject(secret), secret)
	if err != nil {
		return err
	}
	if !there || !v.objects.has(secret) {
		secret.Data = nil
	}
	saved, err := savedIn(secret)
	if err != nil {
		return err
	}
	now := &corev1.PersistentVolume{}
	if there, err = v.api.find(ctx, client.ObjectKey{Name: v.move.Status.Volume}, now); err != nil {
		return err
	}
	wanted, err := v.wanted(ctx)
	if err != nil {
		return err
	}
	v.move.Status.Phase = v1alpha1.Undoing
	// A copy may be confirmed that is given up. What is confirmed needs none.
	v.move.Status.Fence = cmp.Or(string(secret.Data[fenceFile]), "unknown")
	if secret.Data[endedFile] != nil {
		v.move.Status.Phase = v1alpha1.Failed
		return nil
	}
	undone := saved != nil && v.isUndone(saved) || there && v.isUndone(now)
	before := there && place.OfDriver(now) && now.Spec.CSI.VolumeHandle == v.move.Status.VolumeHandle && place.NodeOfVolume(now) == v.move.Status.SourceNode
	switch {
	case undone, before && string(secret.Data[placedFile]) != v.move.Status.TargetNode:
	case saved != nil || there && now.Annotations[movedBy] == string(v.move.UID):
		v.move.Status.Phase = v1alpha1.Switching
	case wanted:
		v.move.Status.Phase = v1alpha1.Failed
	}
	return nil
}

// noteEnded notes that a move has ended, before its status says so: that may be lost, another move may take the volume on, and the movers that
// show it go first.
func (v claimedVolume) noteEnded(ctx context.Context) error {
	secret, err := v.objects.secret(ctx)
	if err != nil {
		return err
	}
	secret.Data[endedFile] = []byte(v.move.Status.Phase)
	return v.api.writer.Update(ctx, secret)
}
