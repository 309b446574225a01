package provisioner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Delete removes the directory of a PersistentVolume, if it is known to be this instance's own. Refusals become events
// on the PersistentVolume, and nothing is touched. A directory that is gone already is no error.
func (p *Provisioner) Delete(ctx context.Context, pv *corev1.PersistentVolume) error {
	if p.config.ofOtherInstance(pv) {
		return &controller.IgnoredError{Reason: "it belongs to node " + pv.Annotations[origin.ProvisionOnNode]}
	}
	pv, err := p.stillDeleted(ctx, pv)
	if err != nil {
		return err
	}
	directory, id, err := p.deletable(ctx, pv)
	if err == nil {
		err = p.refuseRestored(pv, directory)
	}
	if err != nil {
		return fmt.Errorf("%w: %w; no directory was removed", errNotOwn, err)
	}
	unlock, err := p.pool.Lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	if directory != id.String() {
		if err := p.shortenName(directory, id); err != nil {
			return err
		}
	}
	if err := p.pool.Delete(ctx, id); err != nil && !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	return p.checkGone(directory)
}

// stillDeleted reads a PersistentVolume from the API server. The informer, or a retry, may have it as it was before an administrator
// rescued its data: what changed is left to the change's own event.
func (p *Provisioner) stillDeleted(ctx context.Context, pv *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	now, err := p.client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, &controller.IgnoredError{Reason: "it is gone"}
	case err != nil:
		return nil, fmt.Errorf("read the PersistentVolume again: %w", err)
	case now.UID != pv.UID:
		return nil, &controller.IgnoredError{Reason: "it changed meanwhile"}
	}
	released, err := p.released(ctx, now)
	if err == nil && !released {
		err = &controller.IgnoredError{Reason: "it changed meanwhile"}
	}
	return now, err
}

// released reports whether the claim of a PersistentVolume, and its data with it, was deleted. The phase alone does not say it: the persistent
// volume controller sets that some time after an administrator has taken the claim from the volume or given it another one.
func (p *Provisioner) released(ctx context.Context, pv *corev1.PersistentVolume) (bool, error) {
	ref := pv.Spec.ClaimRef
	if pv.Status.Phase != corev1.VolumeReleased || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete || ref == nil || ref.UID == "" {
		return false, nil
	}
	claim, err := p.client.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the claim of the PersistentVolume: %w", err)
	}
	// A claim that was restored from a backup has another uid, and names the volume that it had.
	return claim.UID != ref.UID && claim.Spec.VolumeName != pv.Name, nil
}

const (
	// atOnce is more than a provisioner takes to save a PersistentVolume.
	atOnce = time.Minute
	// unclaimed is more than Kubernetes takes to see that the claim of a new PersistentVolume is not there, also where thousands are made anew
	// before its controllers run.
	unclaimed = time.Hour
)

// refuseRestored refuses a PersistentVolume that was made anew, as from a backup, before its claim was: Kubernetes takes that for deleted. No claim
// was seen to have it, and the record of its directory has another one. Where the record has none yet, it was released soon after it was
// made, and its directory was not made for it just then. How old the directory is says nothing: it may be from a backup too.
func (p *Provisioner) refuseRestored(pv *corev1.PersistentVolume, directory string) error {
	if p.bound.had(pv) {
		return nil
	}
	at := store.VolumePath{Directory: p.config.Path, Name: directory}
	found, err := store.Handover{From: at, To: at}.Find()
	own := found.From
	switch known := own.Client != ""; {
	case err != nil, !own.Directory, known && own.Client == string(pv.UID):
		return err
	case !known && !releasedSoon(pv, own):
		return nil
	}
	return errors.New("no claim was seen to have it, and its directory was not made for it: it is from a backup, and its claim was not there yet. " +
		"Make a claim that names it in spec.volumeName, and take uid and resourceVersion out of its claimRef; or remove the directory")
}

// releasedSoon says that no claim may have had a PersistentVolume, unless its directory was made for it.
func releasedSoon(pv *corev1.PersistentVolume, own store.Presence) bool {
	made, released := pv.CreationTimestamp.Time, pv.Status.LastPhaseTransitionTime
	if released == nil || released.Sub(made) > unclaimed { // Kubernetes before 1.29 does not say
		return false
	}
	return !own.Recorded || made.Sub(own.Created) >= atOnce
}

// checkGone refuses what is no directory, as a link that an administrator has left in the place of one: pods follow it.
func (p *Provisioner) checkGone(name string) error {
	pool, err := dir.Open(p.config.Path)
	if err != nil {
		return err
	}
	defer func() { _ = pool.Close() }() // it is only read
	there, err := pool.Exists(name)
	if err != nil || !there {
		return err
	}
	return fmt.Errorf("%w: %s/%s is no directory: put the directory in its place, or remove that", errNotOwn, p.config.Path, name)
}

// shortenName gives a directory the name of a volume, if it does not have it already. One that has neither name is gone, unless its disk is.
func (p *Provisioner) shortenName(directory string, id volume.ID) error {
	h := store.Handover{
		From: store.VolumePath{Directory: p.config.Path, Name: directory},
		To:   store.VolumePath{Directory: p.config.Path, Name: id.String()},
	}
	where, err := h.Find()
	switch {
	case err != nil:
		return err
	case where.From.Directory:
		return h.Move()
	case where.To.Directory:
		return nil
	}
	return p.pool.Missing(id)
}

var errNotOwn = errors.New("not a volume of this provisioner")

// ofOtherInstance reports whether the instance of another node is responsible for a PersistentVolume.
func (c Config) ofOtherInstance(pv *corev1.PersistentVolume) bool {
	node, err := origin.Node(pv)
	return c.Mode == PerNode && err == nil && node != c.Node
}

// deletable is the directory of a PersistentVolume, if its record with Kubernetes proves it to be this instance's own.
func (p *Provisioner) deletable(ctx context.Context, pv *corev1.PersistentVolume) (directory string, id volume.ID, err error) {
	owner, err := origin.Node(pv)
	if err != nil {
		return "", id, err
	}
	if owner != p.config.Node && !p.config.Shared {
		return "", id, fmt.Errorf("its annotations name node %s, this is node %s", owner, p.config.Node)
	}
	directory, id, err = p.config.ownDirectory(pv)
	if err != nil {
		return "", id, err
	}
	node, err := p.node(ctx)
	if err != nil {
		return "", id, err
	}
	// The upstream single-node provisioner wrote no node affinity.
	if p.config.Mode == PerNode && !origin.Only(pv, node) || !origin.MayUse(pv, node) {
		return "", id, fmt.Errorf("its node affinity is not for this node and no other: label %s in %q", corev1.LabelHostname, origin.Hosts(pv))
	}
	users, err := p.users(directory, node)
	if err != nil {
		return "", id, err
	}
	if others := slices.DeleteFunc(users, func(user string) bool { return user == pv.Name }); len(others) > 0 {
		return "", id, fmt.Errorf("its directory is that of PersistentVolume %s too: delete that first", shorten(others))
	}
	return directory, id, nil
}

// users names the PersistentVolumes that pods of this node find a directory by, or something in it, by any maker; of any node if
// all have the directory. The informer that has them is the one that said that a PersistentVolume is to be deleted, so that it knows
// all that were there by then.
func (p *Provisioner) users(directory string, node *corev1.Node) (names []string, err error) {
	all, err := p.volumes.ByIndex(byDirectory, directory)
	if err != nil {
		return nil, fmt.Errorf("look for PersistentVolumes of directory %s: %w", directory, err)
	}
	for _, object := range all {
		if pv, ok := object.(*corev1.PersistentVolume); ok && (p.config.Shared || origin.MayUse(pv, node)) {
			names = append(names, pv.Name)
		}
	}
	return names, nil
}

// ShouldDelete reports on what is not deleted: where the data of a retained volume is, and a PersistentVolume that belongs to
// no instance. It is called for each PersistentVolume of this provisioner whenever it changes.
func (p *Provisioner) ShouldDelete(ctx context.Context, pv *corev1.PersistentVolume) bool {
	if p.config.ofOtherInstance(pv) {
		return false
	}
	if pv.Status.Phase != corev1.VolumeReleased {
		return true // the controller checks that itself
	}
	if pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain && pv.Spec.HostPath != nil {
		p.events.note(ctx, pv, "VolumeRetained", fmt.Sprintf("the claim is deleted; its data stays in %s on node %s. To have it removed, with what is promised to it, "+
			"set persistentVolumeReclaimPolicy of the PersistentVolume to Delete", pv.Spec.HostPath.Path, p.config.Node))
		return false
	}
	if _, err := origin.Node(pv); err != nil && p.config.Mode == PerNode {
		// All instances see it. One event is enough.
		p.events.warn(ctx, pv, "VolumeFailedDelete", fmt.Sprintf("%v: %v; no directory was removed", errNotOwn, err))
		return false
	}
	return true
}
