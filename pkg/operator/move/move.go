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
	"net"
	"strconv"
	"strings"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
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

	reported map[client.ObjectKey]string // when the mover of the source reported last, by its own clock
	arrived  map[client.ObjectKey]*arrivals
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

// An outcome is what a step did or waits for, as the condition of the move says it. An empty one waits for nothing.
type outcome struct {
	reason, message string
	// after is when it is looked at again.
	after time.Duration
}

// wait has the move be looked at again in a while.
func wait(reason, format string, args ...any) outcome {
	return outcome{reason: reason, message: fmt.Sprintf(format, args...), after: poll}
}

// next has the move go on at once, after something was done.
func next(reason, format string, args ...any) outcome {
	return outcome{reason: reason, message: fmt.Sprintf(format, args...), after: soon}
}

// A reconciliation is one look at one move. Its methods are the phases, in their order, and its fields what they work on.
type reconciliation struct {
	of      *Reconciler
	move    *v1alpha1.VolumeMove
	api     apiServer
	planner planner
	copying copying
	movers  movers
	objects objects
	users   users
	volume  claimedVolume
	times   timeline
}

func (r *Reconciler) reconciliation(move *v1alpha1.VolumeMove) reconciliation {
	if r.reported == nil {
		r.reported, r.arrived = map[client.ObjectKey]string{}, map[client.ObjectKey]*arrivals{}
	}
	api := apiServer{writer: r.Client, reader: r.APIReader}
	driver := driver{api: api, namespace: r.DriverNamespace}
	objects := objects{move: move, api: api, namespace: r.DriverNamespace, now: r.now}
	movers := movers{move: move, api: api, objects: objects, driver: driver}
	users := users{move: move, api: api, arrived: r.arrived}
	times := timeline{move: move, now: r.now, reported: r.reported}
	return reconciliation{
		of: r, move: move, api: api, objects: objects, movers: movers, users: users, times: times,
		planner: planner{move: move, api: api, driver: driver, now: r.now, end: r.endForsaken},
		copying: copying{move: move, api: api, objects: objects, movers: movers, users: users, reports: r.Reports, times: times},
		volume:  claimedVolume{move: move, api: api, objects: objects},
	}
}

// Reconcile does the next step of a move. A request without a namespace names a forsaken one by its uid.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	if request.Namespace == "" {
		waits, err := r.endForsaken(ctx, func(m *v1alpha1.VolumeMove) bool { return string(m.UID) == request.Name })
		return ctrl.Result{RequeueAfter: waits.after}, err
	}
	object := &v1alpha1.VolumeMove{}
	if err := r.APIReader.Get(ctx, request.NamespacedName, object); err != nil {
		if !apierrors.IsNotFound(err) {
			return ctrl.Result{}, err
		}
		delete(r.reported, request.NamespacedName)
		delete(r.arrived, request.NamespacedName)
		waits, err := r.endForsaken(ctx, named(request.NamespacedName))
		return ctrl.Result{RequeueAfter: waits.after}, err
	}
	after, err := r.look(ctx, object)
	priority := handler.LowPriority
	if object.Underway() { // pods may stand still for it, and many others may wait to begin
		priority = 0
	}
	return ctrl.Result{RequeueAfter: after, Priority: &priority}, err
}

// look does the next step of a move that was read, and says when the one after that is due.
func (r *Reconciler) look(ctx context.Context, object *v1alpha1.VolumeMove) (after time.Duration, err error) {
	m := r.reconciliation(object)
	before := object.DeepCopy()
	result, err := m.step(ctx)
	if err != nil {
		result = wait("Error", "%v", err)
		object.Status.Phase, object.Status.Copied = before.Status.Phase, before.Status.Copied // what was not learned leads to no other
	}
	if result.message == "" {
		return result.after, nil
	}
	m.report(result)
	m.times.noteProgress(before.Status)
	if object.Ended() {
		delete(r.arrived, client.ObjectKeyFromObject(object))
	}
	if !equality.Semantic.DeepEqual(before.Status, object.Status) {
		// What was read is what is replaced: a deletion since then is seen first.
		if statusErr := r.Client.Status().Update(ctx, object); apierrors.IsConflict(statusErr) {
			return soon, nil
		} else if statusErr != nil {
			return 0, errors.Join(err, client.IgnoreNotFound(statusErr))
		}
	}
	return result.after, err
}

// report has the condition of the move say what a step did or waits for.
func (m reconciliation) report(result outcome) {
	complete := metav1.ConditionFalse
	if m.move.Status.Phase == v1alpha1.Succeeded {
		complete = metav1.ConditionTrue
	}
	m.move.Status.ObservedGeneration = m.move.Generation
	meta.SetStatusCondition(&m.move.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionComplete, Status: complete, Reason: result.reason, Message: short(result.message), ObservedGeneration: m.move.Generation,
	})
}

// short keeps a message within what the API server and a terminal take. What movers say may have names of files.
func short(message string) string {
	const most = 1000
	message = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, message)
	if len(message) > most {
		return strings.ToValidUTF8(message[:most], "") + "…"
	}
	return message
}

// step does the next step of a move, and notes its end.
func (m reconciliation) step(ctx context.Context) (outcome, error) {
	underway := m.move.Underway()
	if underway {
		// It is made first and removed last: an operator may see by it that there is more of the move.
		if err := m.objects.networkPolicy(ctx); err != nil {
			return outcome{}, err
		}
	}
	result, err := m.phase(ctx)
	if err == nil && underway && m.move.Ended() {
		err = m.volume.noteEnded(ctx)
	}
	return result, err
}

// phase does the next step of the phase that was written.
func (m reconciliation) phase(ctx context.Context) (outcome, error) {
	switch m.move.Status.Phase {
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
func (m reconciliation) begin(ctx context.Context) (outcome, error) {
	if m.move.DeletionTimestamp != nil {
		return m.release(ctx)
	}
	m.move.Status.Phase = v1alpha1.Pending
	if waits, err := m.of.endForsaken(ctx, named(client.ObjectKeyFromObject(m.move))); err != nil || waits != (outcome{}) {
		return waits, err
	}
	p, waits, err := m.planner.plan(ctx)
	if err != nil || waits != "" {
		return outcome{reason: "Waiting", message: waits, after: idle}, err
	}
	if !controllerutil.ContainsFinalizer(m.move, v1alpha1.Finalizer) {
		before := m.move.DeepCopy()
		controllerutil.AddFinalizer(m.move, v1alpha1.Finalizer)
		status := m.move.Status
		err := m.api.writer.Patch(ctx, m.move, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		m.move.Status = status
		if err != nil {
			return outcome{}, client.IgnoreNotFound(err)
		}
	}
	m.move.Status.Phase = v1alpha1.Copying
	m.move.Status.SourceNode, m.move.Status.TargetNode = p.source, p.target
	m.move.Status.Volume, m.move.Status.VolumeUID, m.move.Status.ClaimUID = p.volume.Name, p.volume.UID, p.claim.UID
	m.move.Status.VolumeHandle = p.volume.Spec.CSI.VolumeHandle
	size := v1alpha1.Size(p.claim, p.volume)
	m.move.Status.PromisedBytes = size.Value()
	m.times.begun()
	return next("Copying", "copy the volume from node %s to node %s", p.source, p.target), nil
}

// copy copies the volume until it is handed over.
func (m reconciliation) copy(ctx context.Context) (outcome, error) {
	copied := m.move.Status.Copied
	m.move.Status.Copied = false // unless the movers are seen to work
	volume, why, err := m.volume.stillBound(ctx)
	if err != nil {
		return outcome{}, err
	}
	if why != "" {
		m.move.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s", why), nil
	}
	source, target, err := m.nodeStates(ctx)
	switch {
	case err != nil:
		return outcome{}, err
	case !target.there:
		m.move.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s", target.away(m.move.Status.TargetNode)), nil
	case !source.ready: // its mover could not be heard, and others would wait for that
		return outcome{"NodeGone", source.away(m.move.Status.SourceNode) + ", which has the volume: the move goes on if it comes back", idle}, nil
	}
	before := m.move.Status.Phase
	result, err := m.copying.run(ctx, volume, copied)
	if err != nil || result != (outcome{}) && m.move.Status.Phase == before {
		return result, err
	}
	if result != (outcome{}) {
		if waits, err := m.planner.leave(ctx, volume); err != nil || waits != (outcome{}) {
			m.move.Status.Phase, m.move.Status.Copied = before, true
			return waits, err
		}
	}
	// A volume that cannot move is not fenced. From the fence on no pod can begin to use it by another PersistentVolume, and from the switch on
	// none has it.
	if why, err := m.volume.ledByTwo(ctx); err != nil {
		return outcome{}, err
	} else if why != "" {
		m.move.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s", why), nil
	}
	if result != (outcome{}) {
		m.times.mayFence()
		return result, nil
	}
	// The source has handed the volume over. Before that is acted on, what replaces its object is kept.
	if err := m.volume.save(ctx, volume, m.move.Status.TargetNode); err != nil {
		return outcome{}, err
	}
	m.move.Status.Phase = v1alpha1.Switching
	return next("Switching", "node %s has all of the volume", m.move.Status.TargetNode), nil
}

// switchOver makes the copy the volume, and replaces the PersistentVolume.
func (m reconciliation) switchOver(ctx context.Context) (outcome, error) {
	replaced, err := m.volume.replaced(ctx)
	if err != nil {
		return outcome{}, err
	}
	if !replaced {
		if result, err := m.confirm(ctx); err != nil || result != (outcome{}) {
			return result, err
		}
	}
	if result, err := m.volume.moveTo(ctx, m.move.Status.TargetNode); err != nil || result != (outcome{}) {
		return result, err
	}
	m.times.switched()
	m.move.Status.Phase = v1alpha1.Removing
	return next("Removing", "the volume is on node %s: remove the old copy on node %s", m.move.Status.TargetNode, m.move.Status.SourceNode), nil
}

// confirm makes the copy the volume. If the target goes for good before that, or before the PersistentVolume leads to it, no pod has
// written there, and the source has everything: it is used again.
func (m reconciliation) confirm(ctx context.Context) (outcome, error) {
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return outcome{}, err
	}
	away := target.away(m.move.Status.TargetNode)
	switch {
	case !target.there && !source.ready:
		return wait("NodeGone", "%s, and %s: both have all of the volume", away, source.away(m.move.Status.SourceNode)), nil
	case !target.there:
		m.move.Status.Phase = v1alpha1.Undoing
		return next("Undoing", "%s: have the volume be used on node %s again", away, m.move.Status.SourceNode), nil
	case away != "":
		away += ", then the volume is used on node " + m.move.Status.SourceNode + " again: "
	}
	// A mover that still ran could begin the copy anew.
	left, err := m.objects.removePods(ctx, roleOut, roleIn)
	if err != nil || len(left) > 0 {
		return wait("Switching", "%swait for the movers to end: %s", away, list(left)), err
	}
	if m.move.DeletionTimestamp != nil {
		if before, err := m.volume.untouched(ctx); err != nil || before {
			m.move.Status.Phase = v1alpha1.Undoing
			return next("Undoing", "the VolumeMove was deleted"), err
		}
	}
	done, said, err := m.movers.step(ctx, roleConfirm)
	if err == nil && !done {
		done, err = m.wasDeleted(ctx)
	}
	if done || err != nil {
		return outcome{}, err
	}
	if again, err := m.copyAgain(ctx); again || err != nil {
		return next("Copying", "%snode %s has no whole copy any more, and gets another: %s", away, m.move.Status.TargetNode, said), err
	}
	return wait("Switching", "%smake the copy on node %s the volume: %s", away, m.move.Status.TargetNode, said), nil
}

// hasRefusedToConfirm says so of the driver of the target.
func (m reconciliation) hasRefusedToConfirm(ctx context.Context) (bool, error) {
	pod := &corev1.Pod{ObjectMeta: m.objects.meta("-" + string(roleConfirm))}
	there, err := m.api.find(ctx, client.ObjectKeyFromObject(pod), pod)
	return there && hasRefused(pod), err
}

// wasDeleted says of a volume that the target does not have that it was moved there before, and deleted with its claim.
func (m reconciliation) wasDeleted(ctx context.Context) (bool, error) {
	if refused, err := m.hasRefusedToConfirm(ctx); err != nil || !refused {
		return false, err
	}
	return m.volume.gone(ctx)
}

// copyAgain has the movers run again if the target has refused to confirm: it may have lost the copy. They find out whether it is whole.
func (m reconciliation) copyAgain(ctx context.Context) (bool, error) {
	if refused, err := m.hasRefusedToConfirm(ctx); err != nil || !refused {
		return false, err
	}
	if before, err := m.volume.untouched(ctx); err != nil || !before {
		return false, err
	}
	if _, err := m.objects.removePods(ctx, roleConfirm); err != nil { // until it has ended, it may confirm what is whole
		return false, err
	}
	m.move.Status.Phase = v1alpha1.Fenced
	return true, nil
}

// remove removes the old copy, and what the move has made.
func (m reconciliation) remove(ctx context.Context) (outcome, error) {
	wanted, err := m.volume.wanted(ctx)
	if err != nil {
		return outcome{}, err
	}
	if recovered, err := m.volume.recovered(ctx, m.move.Status.SourceNode, wanted); err != nil || recovered {
		return m.leave(m.move.Status.SourceNode, m.move.Status.TargetNode), err
	}
	if !wanted { // or by another PersistentVolume that leads to the target
		another, err := m.volume.another(ctx, m.move.Status.TargetNode)
		if err != nil {
			return outcome{}, err
		}
		wanted = another != ""
	}
	ending, stuck, err := m.users.freeStuck(ctx)
	if err != nil {
		return outcome{}, err
	}
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return outcome{}, err
	}
	vouched, result, err := m.assure(ctx, source, target, wanted)
	if err != nil || result != (outcome{}) {
		return result, err
	}
	if done, said, err := m.movers.step(ctx, roleRemove, vouched...); !done || err != nil {
		return wait("Removing", "remove the old copy on node %s, if node %s has the volume: %s", m.move.Status.SourceNode, m.move.Status.TargetNode, said), err
	}
	if len(ending) > 0 {
		return wait("Removing", "pods on node %s wait for the volume, which is on node %s now: %s", m.move.Status.SourceNode, m.move.Status.TargetNode, list(ending)), nil
	}
	m.move.Status.Phase = v1alpha1.Succeeded
	message := fmt.Sprintf("the volume was moved from node %s to node %s, where it is promised %s", m.move.Status.SourceNode, m.move.Status.TargetNode,
		resource.NewQuantity(m.move.Status.PromisedBytes, resource.BinarySI))
	if len(stuck) > 0 {
		message += fmt.Sprintf("; delete what waits for it on node %s in vain: %s", m.move.Status.SourceNode, list(stuck))
	}
	if !source.there {
		message += fmt.Sprintf("; if node %s comes back, remove what it had there: move-out --step=remove", m.move.Status.SourceNode)
	}
	return next("Moved", "%s", message), nil
}

// leave ends a move that an administrator has ended by hand, by a PersistentVolume that leads to what one node has.
func (m reconciliation) leave(on, other string) outcome {
	m.move.Status.Phase = v1alpha1.Failed
	return next("Recovered", "a PersistentVolume leads to the volume on node %s again, which stays; what node %s has of it stays, too", on, other)
}

// assure says why the old copy is not removed yet, or by what arguments it is. As long as the claim is there, the target has to answer that it
// has the volume: a node that was set up anew may have its name. The source asks it when it removes its own: it may hear of that late. Of one
// that is gone nothing is removed, and the target answers here.
func (m reconciliation) assure(ctx context.Context, source, target nodeState, wanted bool) (vouched []string, waits outcome, err error) {
	removal := &corev1.Pod{ObjectMeta: m.objects.meta("-" + string(roleRemove))}
	if _, err := m.api.find(ctx, client.ObjectKeyFromObject(removal), removal); err != nil {
		return nil, outcome{}, err
	}
	switch {
	case !wanted, removal.Status.Phase == corev1.PodSucceeded:
		return nil, outcome{}, nil
	case !target.ready:
		// What it has answered before says nothing.
		_, err = m.objects.removePods(ctx, roleAssure)
		return nil, wait("Removing", "%s, with the volume: node %s keeps what it had at the switch until it answers, or until you delete %s",
			target.away(m.move.Status.TargetNode), m.move.Status.SourceNode, owner), err
	case source.there && !source.ready:
		return nil, wait("Removing", "%s: the old copy is removed when it answers", source.away(m.move.Status.SourceNode)), nil
	case source.there:
		return m.vouch(ctx)
	}
	done, why, err := m.movers.step(ctx, roleAssure)
	if done || err != nil {
		return nil, outcome{}, err
	}
	return nil, wait("Removing", "ask node %s whether it has the volume: %s", m.move.Status.TargetNode, why), nil
}

// vouch has the target answer the source whether it has the volume.
func (m reconciliation) vouch(ctx context.Context) (vouched []string, waits outcome, err error) {
	if ready, err := m.objects.connect(ctx, roleVouch, roleRemove); err != nil || !ready {
		return nil, wait("Removing", "renew the certificates of the movers"), err
	}
	pod, why, err := m.movers.pod(ctx, roleVouch, m.movers.args(roleVouch, nil))
	if err != nil {
		return nil, outcome{}, err
	}
	if pod != nil {
		var address string
		if address, why = addressOf(pod); address != "" {
			return append(roleRemove.identity(), "--address="+address), outcome{}, nil
		}
	}
	return nil, wait("Removing", "have node %s answer whether it has the volume: %s", m.move.Status.TargetNode, why), nil
}

// undo has the volume be used on the source again, and then removes the copy. In this order: a target that does not answer, or whose disk
// does not, keeps no pod from the source, and as long as the source has not shown that it has the volume, the copy may be the only one. It may
// be confirmed, but no PersistentVolume leads to it.
func (m reconciliation) undo(ctx context.Context) (outcome, error) {
	source, target, err := m.nodeStates(ctx)
	if err != nil {
		return outcome{}, err
	}
	wanted, err := m.volume.wanted(ctx)
	if err != nil {
		return outcome{}, err
	}
	if recovered, err := m.volume.recovered(ctx, m.move.Status.TargetNode, wanted); err != nil || recovered {
		return m.leave(m.move.Status.TargetNode, m.move.Status.SourceNode), err
	}
	if wanted && !source.ready {
		return wait("Undoing", "%s, which has the volume: it is used there again when it answers; to give it up, delete "+owner, source.away(m.move.Status.SourceNode)), err
	}
	if left, err := m.objects.removePods(ctx, roleConfirm); err != nil || len(left) > 0 {
		return wait("Undoing", "wait for the movers to end: %s", list(left)), err
	}
	if result, err := m.volume.putBack(ctx); err != nil || result != (outcome{}) {
		return result, err
	}
	if waits, err := m.undoSteps(ctx, wanted); err != nil || len(waits) > 0 {
		return wait("Undoing", "%s", list(waits)), err
	}
	_, why, err := m.volume.stillBound(ctx)
	if err == nil && why == "" {
		why, err = m.volume.ledByTwo(ctx)
	}
	if err != nil {
		return outcome{}, err
	}
	m.move.Status.Phase = v1alpha1.Failed
	return next("Undone", "%s", m.undone(source, target, why)), nil
}

// undoSteps does the steps of undo, one after the other where the volume is wanted, or says what they wait for.
func (m reconciliation) undoSteps(ctx context.Context, wanted bool) (waits []string, err error) {
	steps := []role{roleUndo, roleAbortUndone}
	if !wanted {
		steps = []role{roleGiveUp, roleAbort}
	}
	for _, step := range steps {
		said, err := m.undoStep(ctx, step)
		if err != nil {
			return nil, err
		}
		if said != "" {
			waits = append(waits, said)
		}
		if said != "" && wanted {
			break
		}
	}
	return waits, nil
}

// undoStep does one of the steps of undo, or says what it waits for.
func (m reconciliation) undoStep(ctx context.Context, step role) (waits string, err error) {
	// A mover that still ran would fence the source, or make the copy, again. One that was made late may have: the step is done again.
	left, err := m.objects.removePods(ctx, step.copies())
	if err == nil && len(left) > 0 {
		_, err = m.objects.removePods(ctx, step)
	}
	if err != nil || len(left) > 0 {
		return "wait for the movers to end: " + list(left), err
	}
	done, said := false, ""
	if step == roleAbortUndone {
		done, said, err = m.abortUndone(ctx)
	} else {
		done, said, err = m.movers.step(ctx, step)
	}
	if err != nil || !done {
		return fmt.Sprintf("%s on node %s: %s", step.words(), m.movers.nodeOf(step), said), err
	}
	if step.onSource() {
		m.move.Status.MayFenceTime, m.move.Status.FencedTime = nil, nil
	}
	return "", nil
}

// abortUndone removes the copy. If that may be whole, the target does so when the source tells it that it has the volume: that may have been set up
// anew since it has shown so, and the target may hear late of the removal.
func (m reconciliation) abortUndone(ctx context.Context) (done bool, waits string, err error) {
	if ready, err := m.objects.connect(ctx, roleAbortUndone, roleTell); err != nil || !ready {
		return false, "renew the certificates of the movers", err
	}
	done, waits, err = m.movers.step(ctx, roleAbortUndone)
	if done || err != nil {
		return done, waits, err
	}
	target := &corev1.Pod{ObjectMeta: m.objects.meta("-" + string(roleAbortUndone))}
	if there, err := m.api.find(ctx, client.ObjectKeyFromObject(target), target); err != nil || !there || target.Status.PodIP == "" {
		return false, waits, err
	}
	tells := append(roleTell.identity(), "--address="+net.JoinHostPort(target.Status.PodIP, strconv.Itoa(port)))
	if done, said, err := m.movers.step(ctx, roleTell, tells...); !done || err != nil {
		return false, fmt.Sprintf("if node %s has the volume: %s", m.move.Status.SourceNode, said), err
	}
	return false, waits, nil
}

// undone says where the volume is after undo, and what to do on a node that may come back.
func (m reconciliation) undone(source, target nodeState, why string) string {
	message := fmt.Sprintf("the volume is on node %s as before: %s", m.move.Status.SourceNode, cmp.Or(target.away(m.move.Status.TargetNode), why))
	if !source.there {
		message = fmt.Sprintf("%s; if node %s comes back, undo the move there: move-out --step=undo --target-aborted", why, m.move.Status.SourceNode)
	}
	if !target.there {
		message += fmt.Sprintf("; if node %s comes back, remove the copy there: move-in --step=abort --even-confirmed", m.move.Status.TargetNode)
	}
	return message
}

// release removes what the move has made, and lets the object go. A move that has ended or not begun needs nothing of it: until then the
// pods stay whose steps were done, which show that.
func (m reconciliation) release(ctx context.Context) (outcome, error) {
	if !controllerutil.ContainsFinalizer(m.move, v1alpha1.Finalizer) {
		return outcome{}, nil
	}
	if left, err := m.objects.remove(ctx); err != nil || len(left) > 0 {
		return outcome{after: poll}, err
	}
	before := m.move.DeepCopy()
	controllerutil.RemoveFinalizer(m.move, v1alpha1.Finalizer)
	err := m.api.writer.Patch(ctx, m.move, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	return outcome{}, client.IgnoreNotFound(err)
}

// nodeStates are those of the source and of the target.
func (m reconciliation) nodeStates(ctx context.Context) (source, target nodeState, err error) {
	if source, err = m.api.nodeState(ctx, m.move.Status.SourceNode); err == nil {
		target, err = m.api.nodeState(ctx, m.move.Status.TargetNode)
	}
	return source, target, err
}
