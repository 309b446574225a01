package provisioner

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// abandoned are directories that were made for a claim and belong to no PersistentVolume: the process that made them was killed before it
// had saved the PersistentVolume, and the claim was deleted before the next process started. No PersistentVolume will
// ever have them deleted. Their records are provisional: a directory whose PersistentVolume has been seen once stays,
// whether that was retained or is replaced by a migration.
type abandoned struct {
	*Provisioner
	settled map[volume.ID]types.UID // nothing is left to do for them, whose claims have these PersistentVolumes
}

// page is how many volumes of the pool are read at once.
const page = 500

// remove removes what is abandoned and empty, and confirms what has its PersistentVolume: with the uid of that, once a claim has it.
func (a *abandoned) remove(ctx context.Context) {
	there := make(map[volume.ID]types.UID)
	for after := (volume.ID{}); ; {
		volumes, next := a.pool.List(ctx, after, page)
		known, err := a.known()
		if err != nil {
			a.events.log.Error(err, "Failed to list claims and PersistentVolumes")
			return
		}
		for _, v := range volumes {
			name := pvOf(v.ID)
			pv, is := a.of(v.ID, known)
			had := a.boundTo(v.ID, pv)
			last, settled := a.settled[v.ID]
			if settled {
				there[v.ID] = last
			}
			if name == "" || settled && last == had || is && pv == nil {
				continue
			}
			if there[v.ID] = had; !a.settle(ctx, v.ID, name, pv, had) {
				delete(there, v.ID)
			}
		}
		if after = next; next == (volume.ID{}) {
			a.settled = there
			return
		}
	}
}

// known is what there is by the name of the PersistentVolume: that, or nil if it is to be made for a claim.
func (a *abandoned) known() (map[string]*corev1.PersistentVolume, error) {
	known := make(map[string]*corev1.PersistentVolume)
	claims, err := a.claims.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, claim := range claims {
		known["pvc-"+string(claim.UID)] = nil
	}
	for _, object := range a.volumes.List() {
		if pv, ok := object.(*corev1.PersistentVolume); ok && !a.config.ofOtherInstance(pv) {
			known[pv.Name] = pv
		}
	}
	return known, nil
}

// boundTo is the uid of a PersistentVolume if a claim has that, and with it the directory; empty if none has.
func (a *abandoned) boundTo(id volume.ID, pv *corev1.PersistentVolume) types.UID {
	if pv == nil || pv.Status.Phase != corev1.VolumeBound || origin.Path(pv) != a.config.path(id) {
		return ""
	}
	return pv.UID
}

// of is what known has by the name of a directory's PersistentVolume, unless that is another directory: another provisioner of the name was first.
func (a *abandoned) of(id volume.ID, known map[string]*corev1.PersistentVolume) (pv *corev1.PersistentVolume, is bool) {
	pv, is = known[pvOf(id)]
	if pv != nil && a.elsewhere(id, pv) {
		return nil, false
	}
	return pv, is
}

// elsewhere says that a PersistentVolume is another directory than that which is named after it: another provisioner of the name was first.
func (a *abandoned) elsewhere(id volume.ID, pv *corev1.PersistentVolume) bool {
	at := origin.Path(pv)
	return at != "" && !origin.Inside(at, a.config.path(id))
}

// pvOf is the PersistentVolume that a directory is named after; empty if it is named otherwise.
func pvOf(id volume.ID) string {
	at := strings.LastIndex(id.String(), "pvc-")
	if at < 0 || !pvName.MatchString(id.String()[at:]) {
		return ""
	}
	return id.String()[at:]
}

// settle does what is left to do for a directory. It is not done while a PersistentVolume that may go has it.
func (a *abandoned) settle(ctx context.Context, id volume.ID, name string, pv *corev1.PersistentVolume, had types.UID) (done bool) {
	done, err := a.try(ctx, id, name, pv, had)
	if err != nil {
		a.events.log.Error(err, "Failed to check a directory that may have no PersistentVolume", "volume", id)
	}
	return done && err == nil
}

func (a *abandoned) try(ctx context.Context, id volume.ID, name string, pv *corev1.PersistentVolume, had types.UID) (done bool, err error) {
	unlock, err := a.pool.Lock(id)
	if err != nil {
		return false, err
	}
	defer unlock()
	if pv != nil {
		return true, a.pool.Confirm(ctx, id, string(had))
	}
	place := store.VolumePath{Directory: a.config.Path, Name: id.String()}
	found, err := store.Handover{From: place, To: place}.Find()
	if err != nil || !found.From.Directory || !found.From.Provisional {
		return true, err
	}
	if used, err := a.used(ctx, id, name); err != nil || used {
		return false, err
	}
	// Something was written there.
	if empty, err := isEmpty(a.config.Path, id.String()); err != nil || !empty {
		return true, err
	}
	if err := a.pool.Delete(ctx, id); err != nil {
		return false, fmt.Errorf("delete: %w", err)
	}
	a.events.log.Info("Removed the directory of a claim that was deleted before its PersistentVolume was made", "volume", id)
	return true, nil
}

// used asks the API server whether the PersistentVolume is there, unless it is elsewhere, or another one that names the directory.
func (a *abandoned) used(ctx context.Context, id volume.ID, name string) (bool, error) {
	node, err := a.node(ctx)
	if err != nil {
		return false, err
	}
	pv, err := a.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return false, err
	}
	// That of another node has the same path there.
	if err == nil && !a.elsewhere(id, pv) && (!a.config.ofOtherInstance(pv) || origin.MayUse(pv, node)) {
		return true, nil
	}
	users, err := a.users(id.String(), node)
	return len(users) > 0, err
}

func isEmpty(path, name string) (bool, error) {
	root, err := dir.Open(path)
	if err != nil {
		return false, err
	}
	defer func() { _ = root.Close() }() // it is only read
	d, err := root.Open(name)
	if err != nil {
		return false, err
	}
	defer func() { _ = d.Close() }()
	for _, err := range d.Entries() {
		return false, err
	}
	return true, nil
}
