package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

var errForeign = errors.New("not of this migration")

// An observation is what is seen, with what steps need of it.
type observation struct {
	seen
	pv       *corev1.PersistentVolume      // nil if it is absent
	claimObj *corev1.PersistentVolumeClaim // nil if it is absent
	answer   client.Volume                 // of the driver
}

// observe reads everything that the next step depends on. It asks the API server, and no cache.
func (m *migration) observe(ctx context.Context, s *saved) (o observation, err error) {
	o.saved, o.finished = s.onDisk, s.Finished
	if err := m.observeVolume(ctx, s, &o); err != nil || m.done(s, o) {
		return o, err
	}
	if m.Undo || !m.deletedSince(s, o) {
		if err := m.observeDisk(s, &o); err != nil {
			return o, err
		}
	}
	if m.deletedSince(s, o) {
		return o, nil // whatever has the name of the claim now
	}
	if err := m.observeClaim(ctx, s, &o); err != nil {
		return o, err
	}
	return o, m.observeDriver(ctx, s, &o)
}

// done reports whether a migration was completed and nothing of it is left to do: what becomes of the PersistentVolume and its claim since
// is not its business.
func (m *migration) done(s *saved, o observation) bool {
	return s.Finished && o.volume == csi && !m.Undo
}

// deletedSince reports whether a volume was deleted after its migration was complete. If its directory is still there, an undo can
// have it back.
func (m *migration) deletedSince(s *saved, o observation) bool {
	return s.Finished && o.volume == absent && (!m.Undo || o.directory == absent)
}

func (m *migration) observeVolume(ctx context.Context, s *saved, o *observation) error {
	pv, err := m.client.CoreV1().PersistentVolumes().Get(ctx, s.Volume.Name, metav1.GetOptions{})
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		return err
	}
	if m.Undo && s.Finished {
		s.keepPolicy(pv, !missing)
	}
	o.retains = s.Volume.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain
	if missing {
		return nil
	}
	ref := pv.Spec.ClaimRef
	switch {
	case m.done(s, observation{seen: seen{volume: s.formOf(pv)}}):
		o.volume = csi
		return nil
	case ref == nil || ref.Namespace != s.claimName().Namespace || ref.Name != s.claimName().Name:
		return fmt.Errorf("PersistentVolume %s is %w: it is for another claim", pv.Name, errForeign)
	case s.formOf(pv) == absent:
		return fmt.Errorf("PersistentVolume %s is %w: it has another source", pv.Name, errForeign)
	}
	o.volume = s.formOf(pv)
	s.keepVolume(pv, o.volume)
	policy := pv.Spec.PersistentVolumeReclaimPolicy
	o.pv = pv
	o.volumeGoing = pv.DeletionTimestamp != nil
	o.safe = policy == corev1.PersistentVolumeReclaimRetain && !slices.Contains(pv.Finalizers, provisionerFinalizer)
	o.policy = policy == s.Volume.Spec.PersistentVolumeReclaimPolicy
	o.stale = ref.UID != "" // unless there is its claim
	return nil
}

// formOf is the form of a PersistentVolume; absent for one of something else.
func (s *saved) formOf(pv *corev1.PersistentVolume) form {
	switch {
	case pv.Spec.CSI != nil && pv.Spec.CSI.Driver == s.Driver && pv.Spec.CSI.VolumeHandle == s.To.Name:
		return csi
	case origin.Path(pv) != "" && origin.Path(pv) == origin.Path(s.Volume):
		return plain
	}
	return absent
}

// keepPolicy has the old PersistentVolume be made with the reclaim policy that a migrated one has by now: an administrator may have chosen
// it to keep the data. A directory whose PersistentVolume was deleted was kept.
func (s *saved) keepPolicy(now *corev1.PersistentVolume, there bool) {
	policy := corev1.PersistentVolumeReclaimRetain
	if there {
		policy = now.Spec.PersistentVolumeReclaimPolicy
	}
	s.Volume.Spec.PersistentVolumeReclaimPolicy = policy
}

func (m *migration) observeClaim(ctx context.Context, s *saved, o *observation) error {
	name := s.claimName()
	pods, err := m.client.CoreV1().Pods(name.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	o.users = users(pods.Items, name.Name)
	claim, err := m.client.CoreV1().PersistentVolumeClaims(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	o.claimObj, o.claimGoing = claim, claim.DeletionTimestamp != nil
	switch {
	case claim.UID == s.Claim.UID:
		o.claim = plain
	case o.pv != nil && claim.Spec.VolumeName == o.pv.Name && (o.pv.Spec.ClaimRef.UID == "" || o.pv.Spec.ClaimRef.UID == claim.UID):
		o.claim = o.volume
	default:
		advice := "it is bound to no volume yet: delete it"
		if claim.Spec.VolumeName != "" {
			advice = fmt.Sprintf("it is for the PersistentVolume %s, which may have data: delete it only if that can go", claim.Spec.VolumeName)
		}
		return fmt.Errorf("claim %s is %w: another client created it meanwhile; %s", name, errForeign, advice)
	}
	s.keepClaim(claim, o.claim)
	if o.pv != nil && o.pv.Spec.ClaimRef.UID == claim.UID {
		o.stale = false
	}
	o.bound = o.pv != nil && claim.Status.Phase == corev1.ClaimBound && o.pv.Status.Phase == corev1.VolumeBound && o.pv.Spec.ClaimRef.UID == claim.UID
	return nil
}

func (m *migration) observeDisk(s *saved, o *observation) error {
	h := store.Handover{From: s.From, To: s.To}
	where, err := h.Find()
	if err != nil {
		return err
	}
	inPlace := s.From == s.To
	switch {
	case where.From.Directory && where.To.Directory && !inPlace:
		return fmt.Errorf("both %s and %s are there: move the one away that is not the volume's", s.From, s.To)
	case where.From.Directory && inPlace:
		o.directory = m.want()
	case where.From.Directory:
		o.directory = plain
	case where.To.Directory:
		o.directory = csi
	}
	there, here := where.To.Recorded, where.From.Recorded && !inPlace
	if m.Undo {
		there, here = where.From.Recorded == s.Recorded, where.To.Recorded && !inPlace
	}
	o.recorded = there && !here
	return nil
}

// observeDriver asks the driver about a volume for which a PersistentVolume is to be made.
func (m *migration) observeDriver(ctx context.Context, s *saved, o *observation) error {
	if m.Undo || o.volume != absent || o.directory != csi {
		return nil
	}
	id, err := volume.ParseID(s.To.Name)
	if err != nil {
		return err
	}
	o.answer, err = m.driver.Volume(ctx, id)
	if errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	o.reported = err == nil
	return err
}

// perform does a step, after what others have changed of the objects is safe.
func (m *migration) perform(ctx context.Context, what step, s *saved, o observation) error {
	if err := m.files.writeKept(s); err != nil {
		return err
	}
	return m.do(ctx, what, s, o)
}

func (m *migration) do(ctx context.Context, what step, s *saved, o observation) error {
	h := s.handover(m.want())
	switch what {
	case save:
		// The provisioner, which may run on, removes an empty directory that it does not know to have had a PersistentVolume.
		if err := h.Confirm(); err != nil {
			return err
		}
		return m.files.write(s)
	case reopen:
		if err := errors.Join(m.checks.checkOthers(ctx, s), h.Movable()); err != nil {
			return err
		}
		s.Finished = false
		return m.files.write(s)
	case retain:
		return m.patchVolume(ctx, o.pv, map[string]any{
			"metadata": map[string]any{"finalizers": slices.DeleteFunc(slices.Clone(o.pv.Finalizers), func(f string) bool { return f == provisionerFinalizer })},
			"spec":     map[string]any{"persistentVolumeReclaimPolicy": corev1.PersistentVolumeReclaimRetain},
		})
	case deleteClaim:
		return ignoreChanged(m.client.CoreV1().PersistentVolumeClaims(o.claimObj.Namespace).Delete(ctx, o.claimObj.Name, asSeen(o.claimObj.ObjectMeta)))
	case deleteVolume:
		return ignoreChanged(m.client.CoreV1().PersistentVolumes().Delete(ctx, o.pv.Name, asSeen(o.pv.ObjectMeta)))
	case move:
		// Since the claim was found to be free, another pod or PersistentVolume may have come that has the path.
		if err := m.checks.checkOthers(ctx, s); err != nil {
			return err
		}
		return h.Move()
	case record:
		if m.Undo && !s.Recorded {
			return h.Forget()
		}
		return h.Record(s.Bytes)
	case createVolume:
		_, err := m.client.CoreV1().PersistentVolumes().Create(ctx, s.volume(m.want(), o.answer), metav1.CreateOptions{})
		return err
	case freeVolume:
		return m.patchVolume(ctx, o.pv, map[string]any{"spec": map[string]any{"claimRef": map[string]any{"uid": nil, "resourceVersion": nil}}})
	case createClaim:
		claim := s.claim(m.want())
		_, err := m.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Create(ctx, claim, metav1.CreateOptions{})
		return err
	case restorePolicy:
		return m.patchVolume(ctx, o.pv, map[string]any{"spec": map[string]any{"persistentVolumeReclaimPolicy": s.Volume.Spec.PersistentVolumeReclaimPolicy}})
	case finish:
		if m.Undo {
			return m.files.remove(s)
		}
		s.Finished = true
		return m.files.write(s)
	case nothing, awaitClaimGone, awaitVolumeGone, awaitReport, awaitBound:
	}
	return nil
}

// asSeen are the preconditions that delete an object only if it did not change since it was read: its reclaim policy, its
// users.
func asSeen(of metav1.ObjectMeta) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &of.UID, ResourceVersion: &of.ResourceVersion}}
}

// ignoreChanged drops the error of an object that changed since it was read: it is read again.
func ignoreChanged(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// patchVolume changes a PersistentVolume that did not change since it was read.
func (m *migration) patchVolume(ctx context.Context, pv *corev1.PersistentVolume, change map[string]any) error {
	metadata, _ := change["metadata"].(map[string]any)
	if metadata == nil {
		metadata = make(map[string]any)
	}
	metadata["resourceVersion"] = pv.ResourceVersion
	change["metadata"] = metadata
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = m.client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return ignoreChanged(err)
}

func (m *migration) describe(what step, s *saved) string {
	h, pv, claim := s.handover(m.want()), "PersistentVolume "+s.Volume.Name, "claim "+s.claimName().String()
	switch what {
	case save:
		return "save both objects in " + s.file()
	case reopen:
		return "note in " + s.file() + " that the migration is being undone"
	case retain:
		return "set the reclaim policy of " + pv + " to Retain"
	case deleteClaim:
		return "delete the " + claim
	case awaitClaimGone:
		return "wait until the " + claim + " is gone"
	case deleteVolume:
		return "delete the " + pv + ", which leaves the directory"
	case awaitVolumeGone:
		return "wait until the " + pv + " is gone"
	case move:
		return fmt.Sprintf("rename %s to %s", h.From, h.To)
	case record:
		if m.Undo && !s.Recorded {
			return fmt.Sprintf("remove the record of %s", h.To)
		}
		return fmt.Sprintf("give %s its record (%d bytes)", h.To, s.Bytes)
	case awaitReport:
		return "wait until the driver reports the volume " + s.To.Name
	case createVolume:
		if m.Undo {
			return "create the " + pv + " as it was, with the reclaim policy Retain"
		}
		return fmt.Sprintf("create the %s of StorageClass %s, with the reclaim policy Retain", pv, s.Class)
	case freeVolume:
		return "let the " + pv + " be bound to a new claim of the same name"
	case createClaim:
		return "create the " + claim
	case awaitBound:
		return "wait until the " + claim + " is bound"
	case restorePolicy:
		return fmt.Sprintf("set the reclaim policy of %s back to %s", pv, s.Volume.Spec.PersistentVolumeReclaimPolicy)
	case finish:
		if m.Undo {
			return "remove " + s.file()
		}
		return "note in " + s.file() + " that the migration is complete"
	case nothing:
	}
	return "nothing to do"
}
