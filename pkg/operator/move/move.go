// Package move moves the volume of a claim to another node, as a VolumeMove asks: it has movers run on the two nodes, which are pods
// made for one move, stops the pods that use the volume, and replaces the PersistentVolume under its claim. What the movers do is in
// pkg/mover, and the order of the steps in pkg/pool/move.go.
//
// The operator may be killed at any instruction. A phase is written into the status before anything of it is done, and each step of a
// phase is repeated until the objects, or the pod that did it, show that it was done. The status of a VolumeMove is not trusted: what the
// driver has recorded on the nodes decides, and each of its steps refuses what is of another move.
package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

const (
	// soon is when a move goes on that has more to do at once.
	soon = time.Millisecond
	// poll is how often a move is looked at while movers or pods have something to do, and idle while it waits for others.
	poll = time.Second
	idle = 10 * time.Second
)

// A Reconciler moves volumes.
type Reconciler struct {
	// Client writes. All reads are of the API server itself: a cache may be late.
	Client    client.Client
	APIReader client.Reader
	// Reports are those of movers.
	Reports Reports
	// DriverNamespace is that of the driver's DaemonSet.
	DriverNamespace string
	// Now is the time; nil for the real one.
	Now func() time.Time

	heard map[client.ObjectKey]string // when the mover of the source reported last, by its own clock
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

// A saying is what a move does or waits for.
type saying struct {
	reason, message string
	// after is when it is looked at again.
	after time.Duration
}

func says(reason, format string, args ...any) saying {
	return saying{reason: reason, message: fmt.Sprintf(format, args...), after: poll}
}

// next has the move go on at once.
func next(reason, format string, args ...any) saying {
	return saying{reason: reason, message: fmt.Sprintf(format, args...), after: soon}
}

// A moving is one look at one move.
type moving struct {
	*Reconciler
	*v1alpha1.VolumeMove
}

// Reconcile does the next step of a move.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	object := &v1alpha1.VolumeMove{}
	if err := r.APIReader.Get(ctx, request.NamespacedName, object); err != nil {
		delete(r.heard, request.NamespacedName)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	m := moving{r, object}
	before := object.DeepCopy()
	said, err := m.step(ctx)
	if err != nil {
		said = says("Error", "%v", err)
	}
	if said.message == "" {
		return ctrl.Result{RequeueAfter: said.after}, nil
	}
	m.say(said)
	m.noteProgress(before.Status)
	if !equality.Semantic.DeepEqual(before.Status, object.Status) {
		// What was read is what is replaced: a deletion since then is seen first.
		if statusErr := r.Client.Status().Update(ctx, object); apierrors.IsConflict(statusErr) {
			return ctrl.Result{RequeueAfter: soon}, nil
		} else if statusErr != nil {
			return ctrl.Result{}, errors.Join(err, client.IgnoreNotFound(statusErr))
		}
	}
	return ctrl.Result{RequeueAfter: said.after}, err
}

func (m moving) say(said saying) {
	complete := metav1.ConditionFalse
	if m.Status.Phase == v1alpha1.Succeeded {
		complete = metav1.ConditionTrue
	}
	m.Status.ObservedGeneration = m.Generation
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionComplete, Status: complete, Reason: said.reason, Message: short(said.message), ObservedGeneration: m.Generation,
	})
}

// short keeps a message within what the API server and a terminal take.
func short(message string) string {
	const most = 1000
	if len(message) > most {
		return message[:most] + "…"
	}
	return message
}

// step does the next step of the phase that was written.
func (m moving) step(ctx context.Context) (saying, error) {
	switch m.Status.Phase {
	case "", v1alpha1.Pending:
		return m.begin(ctx)
	case v1alpha1.Copying, v1alpha1.Fenced:
		return m.copy(ctx)
	case v1alpha1.Switching:
		return m.switchOver(ctx)
	case v1alpha1.Removing:
		return m.remove(ctx)
	case v1alpha1.Undoing:
		return m.undo(ctx)
	}
	return m.release(ctx)
}

// begin plans the move. Nothing is made before the plan is written.
func (m moving) begin(ctx context.Context) (saying, error) {
	if m.DeletionTimestamp != nil {
		return m.release(ctx)
	}
	m.Status.Phase = v1alpha1.Pending
	p, waits, err := m.plan(ctx)
	if err != nil || waits != "" {
		return saying{reason: "Waiting", message: waits, after: idle}, err
	}
	if !controllerutil.ContainsFinalizer(m.VolumeMove, v1alpha1.Finalizer) {
		before := m.DeepCopy()
		controllerutil.AddFinalizer(m.VolumeMove, v1alpha1.Finalizer)
		status := m.Status
		err := m.Client.Patch(ctx, m.VolumeMove, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		m.Status = status
		if err != nil {
			return saying{}, client.IgnoreNotFound(err)
		}
	}
	m.Status.Phase = v1alpha1.Copying
	m.Status.SourceNode, m.Status.TargetNode = p.source, p.target
	m.Status.Volume, m.Status.VolumeUID, m.Status.ClaimUID = p.volume.Name, p.volume.UID, p.claim.UID
	m.Status.VolumeHandle = p.volume.Spec.CSI.VolumeHandle
	size := v1alpha1.Size(p.claim, p.volume)
	m.Status.PromisedBytes = size.Value()
	return next("Copying", "copy the volume from node %s to node %s", p.source, p.target), nil
}

// copy copies the volume until it is handed over.
func (m moving) copy(ctx context.Context) (saying, error) {
	volume, why, err := m.stillBound(ctx)
	if err != nil {
		return saying{}, err
	}
	if why != "" {
		m.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s", why), nil
	}
	source, target, err := m.nodeStates(ctx)
	switch {
	case err != nil:
		return saying{}, err
	case !target.there:
		m.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s", target.away(m.Status.TargetNode)), nil
	case !source.there:
		return says("NodeGone", "%s, which has the volume: the move goes on if it comes back", source.away(m.Status.SourceNode)), nil
	}
	said, err := m.movers(ctx, volume)
	if err != nil || said != (saying{}) {
		return said, err
	}
	// The source has handed the volume over. Before that is acted on, what replaces its object is kept.
	if err := m.save(ctx, volume, m.Status.TargetNode); err != nil {
		return saying{}, err
	}
	m.Status.Phase = v1alpha1.Switching
	return next("Switching", "node %s has all of the volume", m.Status.TargetNode), nil
}

// stillBound is the volume, or why the move cannot go on.
func (m moving) stillBound(ctx context.Context) (*corev1.PersistentVolume, string, error) {
	if m.DeletionTimestamp != nil {
		return nil, "the VolumeMove was deleted", nil
	}
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	if there, err := m.find(ctx, client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.ClaimName}, claim); err != nil {
		return nil, "", err
	} else if !there || claim.UID != m.Status.ClaimUID || claim.DeletionTimestamp != nil {
		return nil, "the claim was deleted", nil
	}
	if there, err := m.find(ctx, client.ObjectKey{Name: m.Status.Volume}, volume); err != nil {
		return nil, "", err
	} else if !there || volume.UID != m.Status.VolumeUID || claim.Spec.VolumeName != volume.Name || !m.owns(volume) {
		return nil, "the PersistentVolume was replaced", nil
	}
	return volume, "", nil
}

// find reads an object, if it is there.
func (m moving) find(ctx context.Context, key client.ObjectKey, to client.Object) (bool, error) {
	err := m.APIReader.Get(ctx, key, to)
	return err == nil, client.IgnoreNotFound(err)
}

// switchOver makes the copy the volume, and replaces the PersistentVolume.
func (m moving) switchOver(ctx context.Context) (saying, error) {
	replaced, err := m.replaced(ctx)
	if err != nil {
		return saying{}, err
	}
	if !replaced {
		if said, err := m.confirm(ctx); err != nil || said != (saying{}) {
			return said, err
		}
	}
	done, said, err := m.replaceVolume(ctx, m.Status.TargetNode)
	if err != nil || !done {
		return next("Switching", "%s", said), err
	}
	if s := m.Status.Standstill; s != nil && s.Seconds == nil {
		seconds := int64(m.now().Sub(s.Since.Time).Round(time.Second) / time.Second)
		s.Seconds = &seconds
	}
	m.Status.Phase = v1alpha1.Removing
	return next("Removing", "the volume is on node %s: remove the old copy on node %s", m.Status.TargetNode, m.Status.SourceNode), nil
}

// confirm makes the copy the volume. If the target goes for good before that, or before the PersistentVolume leads to it, no pod has
// written there, and the source has everything: it is used again.
func (m moving) confirm(ctx context.Context) (saying, error) {
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return saying{}, err
	}
	away := target.away(m.Status.TargetNode)
	switch {
	case !target.there && !source.ready:
		return says("NodeGone", "%s, and %s: both have all of the volume", away, source.away(m.Status.SourceNode)), nil
	case !target.there:
		m.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s: have the volume be used on node %s again", away, m.Status.SourceNode), nil
	case away != "":
		away += ", then the volume is used on node " + m.Status.SourceNode + " again: "
	}
	// A mover that still ran could begin the copy anew.
	left, err := m.removePods(ctx, roleOut, roleIn)
	if err != nil || len(left) > 0 {
		return says("Switching", "%swait for the movers to end: %s", away, list(left)), err
	}
	if m.DeletionTimestamp != nil {
		if before, err := m.untouched(ctx); err != nil || before {
			m.Status.Phase = v1alpha1.Undoing
			return next("Undoing", "the VolumeMove was deleted"), err
		}
	}
	done, said, err := m.node(ctx, roleConfirm)
	if done || err != nil {
		return saying{}, err
	}
	if again, err := m.copyAgain(ctx); again || err != nil {
		return next("Copying", "%snode %s has no whole copy any more, and gets another: %s", away, m.Status.TargetNode, said), err
	}
	return says("Switching", "%smake the copy on node %s the volume: %s", away, m.Status.TargetNode, said), nil
}

// untouched says whether the PersistentVolume is the one before, so that no pod has used the copy, whether that is confirmed or not.
func (m moving) untouched(ctx context.Context) (bool, error) {
	volume := &corev1.PersistentVolume{}
	there, err := m.find(ctx, client.ObjectKey{Name: m.Status.Volume}, volume)
	return there && volume.UID == m.Status.VolumeUID && volume.DeletionTimestamp == nil, err
}

// copyAgain has the movers run again if the driver of the target has refused to confirm: the target may have lost the copy. They find out
// whether it is whole.
func (m moving) copyAgain(ctx context.Context) (bool, error) {
	pod := &corev1.Pod{ObjectMeta: m.meta("-" + string(roleConfirm))}
	if there, err := m.find(ctx, client.ObjectKeyFromObject(pod), pod); err != nil || !there || !hasRefused(pod) {
		return false, err
	}
	if before, err := m.untouched(ctx); err != nil || !before {
		return false, err
	}
	if _, err := m.removePods(ctx, roleConfirm); err != nil { // until it has ended, it may confirm what is whole
		return false, err
	}
	m.Status.Phase = v1alpha1.Fenced
	return true, nil
}

// owner is what keeps the last copy: see wanted.
const owner = "the claim, and with the policy Retain the PersistentVolume"

// wanted says whether the claim is there, or the PersistentVolume of a claim whose volume outlives it. Until then, the last copy of the
// volume is not removed.
func (m moving) wanted(ctx context.Context) (bool, error) {
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	there, err := m.find(ctx, client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.ClaimName}, claim)
	if err != nil || there && claim.UID == m.Status.ClaimUID && claim.DeletionTimestamp == nil {
		return err == nil, err
	}
	there, err = m.find(ctx, client.ObjectKey{Name: m.Status.Volume}, volume)
	return there && policyOf(volume) == corev1.PersistentVolumeReclaimRetain &&
		place.OfDriver(volume) && volume.Spec.CSI.VolumeHandle == m.Status.VolumeHandle, err
}

// remove removes the old copy, and what the move has made.
func (m moving) remove(ctx context.Context) (saying, error) {
	ending, stuck, err := m.freeStuck(ctx)
	if err != nil {
		return saying{}, err
	}
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return saying{}, err
	}
	if said, err := m.assure(ctx, source, target); err != nil || said != (saying{}) {
		return said, err
	}
	if done, said, err := m.node(ctx, roleRemove); !done || err != nil {
		return says("Removing", "remove the old copy on node %s: %s", m.Status.SourceNode, said), err
	}
	if len(ending) > 0 {
		return says("Removing", "pods on node %s wait for the volume, which is on node %s now: %s", m.Status.SourceNode, m.Status.TargetNode, list(ending)), nil
	}
	m.Status.Phase = v1alpha1.Succeeded
	message := fmt.Sprintf("the volume was moved from node %s to node %s, where it is promised %s", m.Status.SourceNode, m.Status.TargetNode,
		resource.NewQuantity(m.Status.PromisedBytes, resource.BinarySI))
	if len(stuck) > 0 {
		message += fmt.Sprintf("; delete what waits for it on node %s in vain: %s", m.Status.SourceNode, list(stuck))
	}
	if !source.there {
		message += fmt.Sprintf("; if node %s comes back, remove what it had there: move-out --step=remove", m.Status.SourceNode)
	}
	return next("Moved", "%s", message), nil
}

// assure says why the old copy is not removed yet. As long as the claim is there, the target has to answer that it has the volume: a node
// that was set up anew may have its name. A source that does not answer would have it removed much later.
func (m moving) assure(ctx context.Context, source, target nodeState) (saying, error) {
	removal := &corev1.Pod{ObjectMeta: m.meta("-" + string(roleRemove))}
	if _, err := m.find(ctx, client.ObjectKeyFromObject(removal), removal); err != nil || removal.Status.Phase == corev1.PodSucceeded {
		return saying{}, err
	}
	wanted, err := m.wanted(ctx)
	if err != nil || !wanted {
		return saying{}, err
	}
	said := ""
	switch {
	case !target.ready:
		said = fmt.Sprintf("%s, with the volume: node %s keeps what it had at the switch until it answers, or until you delete %s",
			target.away(m.Status.TargetNode), m.Status.SourceNode, owner)
	case source.there && !source.ready:
		said = source.away(m.Status.SourceNode) + ": the old copy is removed when it answers"
	default:
		done, why, err := m.node(ctx, roleAssure)
		if done || err != nil {
			return saying{}, err
		}
		return says("Removing", "ask node %s whether it has the volume, before the old copy on node %s is removed: %s", m.Status.TargetNode, m.Status.SourceNode, why), nil
	}
	// What was asked before the node went away says nothing.
	_, err = m.removePods(ctx, roleAssure, roleRemove)
	return says("Removing", "%s", said), err
}

// undo has the volume be used on the source again, and then removes the copy. In this order: a target that does not answer, or whose disk
// does not, keeps no pod from the source, and as long as the source has not answered, the copy may be the only one. It may be confirmed, but
// no PersistentVolume leads to it.
func (m moving) undo(ctx context.Context) (saying, error) {
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return saying{}, err
	}
	wanted, err := m.wanted(ctx)
	if err != nil || wanted && !source.ready {
		return says("Undoing", "%s, which has the volume: it is used there again when it answers; to give it up, delete "+owner, source.away(m.Status.SourceNode)), err
	}
	if left, err := m.removePods(ctx, roleConfirm); err != nil || len(left) > 0 {
		return says("Undoing", "wait for the movers to end: %s", list(left)), err
	}
	if done, said, err := m.putBack(ctx); err != nil || !done {
		return next("Undoing", "%s", said), err
	}
	var waits []string
	for _, step := range []role{roleUndo, roleAbort} {
		said, err := m.undoStep(ctx, step)
		if err != nil {
			return saying{}, err
		}
		if said != "" {
			waits = append(waits, said)
		}
		if said != "" && wanted {
			break
		}
	}
	if len(waits) > 0 {
		return says("Undoing", "%s", list(waits)), nil
	}
	_, why, err := m.stillBound(ctx)
	if err != nil {
		return saying{}, err
	}
	m.Status.Phase = v1alpha1.Failed
	return next("Undone", "%s", m.undone(source, target, why)), nil
}

// undoStep does one of the two steps of undo, or says what it waits for.
func (m moving) undoStep(ctx context.Context, step role) (waits string, err error) {
	// A mover that still ran would fence the source, or make the copy, again.
	if left, err := m.removePods(ctx, step.copies()); err != nil || len(left) > 0 {
		return "wait for the movers to end: " + list(left), err
	}
	done, said, err := m.node(ctx, step)
	if err != nil || !done {
		return fmt.Sprintf("%s on node %s: %s", step.words(), m.nodeOf(step), said), err
	}
	if step == roleUndo {
		m.Status.FencedTime = nil
	}
	return "", nil
}

// undone says where the volume is after undo, and what to do on a node that may come back.
func (m moving) undone(source, target nodeState, why string) string {
	message := fmt.Sprintf("the volume is on node %s as before: %s", m.Status.SourceNode, cmp.Or(target.away(m.Status.TargetNode), why))
	if !source.there {
		message = fmt.Sprintf("%s; if node %s comes back, undo the move there: move-out --step=undo --target-aborted", why, m.Status.SourceNode)
	}
	if !target.there {
		message += fmt.Sprintf("; if node %s comes back, remove the copy there: move-in --step=abort --even-confirmed", m.Status.TargetNode)
	}
	return message
}

// release removes what the move has made, and lets the object go. A move that has ended or not begun needs nothing of it: until then the
// pods stay whose steps were done, which show that.
func (m moving) release(ctx context.Context) (saying, error) {
	if !controllerutil.ContainsFinalizer(m.VolumeMove, v1alpha1.Finalizer) {
		return saying{}, nil
	}
	if left, err := m.cleanUp(ctx); err != nil || len(left) > 0 {
		return saying{after: poll}, err
	}
	before := m.DeepCopy()
	controllerutil.RemoveFinalizer(m.VolumeMove, v1alpha1.Finalizer)
	err := m.Client.Patch(ctx, m.VolumeMove, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	return saying{}, client.IgnoreNotFound(err)
}
