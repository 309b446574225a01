package provisioner

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/handover"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// abandoned are directories that were made for a claim and are nobody's: the process that made them was killed before it
// had saved the PersistentVolume, and the claim was deleted before the next process started. No PersistentVolume will
// ever have them deleted.
type abandoned struct {
	*Provisioner
	kept map[volume.ID]bool // checked, and not to be removed
}

// page is how many volumes of the pool are read at once.
const page = 500

// remove removes what is abandoned and empty.
func (a *abandoned) remove(ctx context.Context) {
	known, err := a.names()
	if err != nil {
		a.events.log.Error(err, "failed to list claims and PersistentVolumes")
		return
	}
	for after := (volume.ID{}); ; {
		volumes, next := a.pool.List(ctx, after, page)
		for _, v := range volumes {
			name := pvOf(v.ID)
			if name == "" || known[name] || a.kept[v.ID] {
				continue
			}
			removed, err := a.removeOne(ctx, v.ID, name)
			if err != nil {
				a.events.log.Error(err, "failed to check a directory without a PersistentVolume", "volume", v.ID)
			}
			a.kept[v.ID] = !removed && err == nil
		}
		if after = next; next == (volume.ID{}) {
			return
		}
	}
}

// names are those of PersistentVolumes that are there, and of those that are to be made for the claims that are there.
func (a *abandoned) names() (map[string]bool, error) {
	known := make(map[string]bool)
	volumes, err := a.volumes.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, pv := range volumes {
		known[pv.Name] = true
	}
	claims, err := a.claims.List(labels.Everything())
	for _, claim := range claims {
		known["pvc-"+string(claim.UID)] = true
	}
	return known, err
}

// pvOf is the PersistentVolume that a directory is named after; empty if it is named otherwise.
func pvOf(id volume.ID) string {
	at := strings.LastIndex(id.String(), "pvc-")
	if at < 0 || !pvName.MatchString(id.String()[at:]) {
		return ""
	}
	return id.String()[at:]
}

func (a *abandoned) removeOne(ctx context.Context, id volume.ID, pv string) (removed bool, err error) {
	// Of another node's PersistentVolumes this process keeps none.
	_, err = a.client.CoreV1().PersistentVolumes().Get(ctx, pv, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return false, err
	}
	unlock, err := a.pool.Lock(id)
	if err != nil {
		return false, err
	}
	defer unlock()
	// What has no record was made by somebody else, and what has content was a volume: its PersistentVolume was deleted, and
	// the directory retained.
	place := handover.Place{Directory: a.config.Path, Name: id.String()}
	found, err := handover.Handover{From: place, To: place}.Find()
	if err != nil || !found.From.Directory || !found.From.Recorded {
		return false, err
	}
	if empty, err := isEmpty(a.config.Path, id.String()); err != nil || !empty {
		return false, err
	}
	if err := a.pool.Delete(ctx, id); err != nil {
		return false, fmt.Errorf("delete: %w", err)
	}
	a.events.log.Info("removed the directory of a claim that was deleted before its PersistentVolume was made", "volume", id)
	return true, nil
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
