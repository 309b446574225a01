package provisioner

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"kubevirt.io/hostpath-provisioner/pkg/pool/handover"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Delete removes the directory of a PersistentVolume, if it is known to be this instance's own. Refusals become events
// on the PersistentVolume, and nothing is touched. A directory that is gone already is no error.
func (p *Provisioner) Delete(ctx context.Context, pv *corev1.PersistentVolume) error {
	if p.ofOtherInstance(pv) {
		return &controller.IgnoredError{Reason: "it belongs to node " + pv.Annotations[Identity]}
	}
	directory, id, err := p.deletable(ctx, pv)
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
	return nil
}

// shortenName gives a directory the name of a volume, if it does not have it already.
func (p *Provisioner) shortenName(directory string, id volume.ID) error {
	h := handover.Handover{
		From: handover.Place{Directory: p.config.Path, Name: directory},
		To:   handover.Place{Directory: p.config.Path, Name: id.String()},
	}
	where, err := h.Find()
	if err != nil || !where.From.Directory {
		return err
	}
	return h.Move()
}

var errNotOwn = errors.New("not a volume of this provisioner")

// ofOtherInstance reports whether another instance is responsible for a PersistentVolume.
func (p *Provisioner) ofOtherInstance(pv *corev1.PersistentVolume) bool {
	owner := pv.Annotations[Identity]
	return p.config.Mode == PerNode && owner != "" && owner != p.config.Node
}

// deletable is the directory of a PersistentVolume, if its record with Kubernetes proves it to be this instance's own.
func (p *Provisioner) deletable(ctx context.Context, pv *corev1.PersistentVolume) (directory string, id volume.ID, err error) {
	owner := pv.Annotations[Identity]
	switch {
	case owner == "":
		return "", id, fmt.Errorf("annotation %s is missing", Identity)
	case owner != p.config.Node && !p.config.Shared:
		return "", id, fmt.Errorf("annotation %s names node %s, this is node %s", Identity, owner, p.config.Node)
	}
	if on := pv.Annotations[ProvisionOnNode]; on != "" && on != owner {
		return "", id, fmt.Errorf("annotation %s names node %s, annotation %s node %s", Identity, owner, ProvisionOnNode, on)
	}
	directory, id, err = p.config.ownDirectory(pv)
	if err != nil {
		return "", id, err
	}
	node, err := p.node(ctx)
	if err != nil {
		return "", id, err
	}
	hostname := node.Labels[corev1.LabelHostname]
	if err := checkAffinity(pv, hostname); err != nil {
		return "", id, err
	}
	users, err := p.users(ctx, directory, hostname)
	if err != nil {
		return "", id, err
	}
	if others := slices.DeleteFunc(users, func(user string) bool { return user == pv.Name }); len(others) > 0 {
		return "", id, fmt.Errorf("its directory is that of PersistentVolume %s too: delete that first", shorten(others))
	}
	return directory, id, nil
}

// checkAffinity refuses a PersistentVolume whose pods run on other nodes: their directory of that name is not this one.
func checkAffinity(pv *corev1.PersistentVolume, hostname string) error {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil // as the upstream single-node provisioner made them
	}
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, r := range term.MatchExpressions {
			if r.Key == corev1.LabelHostname && !slices.Contains(r.Values, hostname) {
				return fmt.Errorf("its node affinity is for %s in %q, this is %s", corev1.LabelHostname, r.Values, hostname)
			}
		}
	}
	return nil
}

// users names the PersistentVolumes that pods of this node find a directory by, or something in it, whoever made them.
// It asks the API server: this instance keeps only those that it has to do with.
func (p *Provisioner) users(ctx context.Context, directory, hostname string) (names []string, err error) {
	all, err := p.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list PersistentVolumes: %w", err)
	}
	whole := path.Join(p.config.Path, directory)
	for i := range all.Items {
		pv := &all.Items[i]
		at := path.Clean(PathOf(pv))
		inside := at == whole || strings.HasPrefix(at, whole+"/")
		if inside && checkAffinity(pv, hostname) == nil {
			names = append(names, pv.Name)
		}
	}
	return names, nil
}

// PathOf is the directory of a PersistentVolume; empty if it has none.
func PathOf(pv *corev1.PersistentVolume) string {
	switch {
	case pv.Spec.HostPath != nil:
		return pv.Spec.HostPath.Path
	case pv.Spec.Local != nil:
		return pv.Spec.Local.Path
	}
	return ""
}

// ShouldDelete reports on what is not deleted: where the data of a retained volume is, and a PersistentVolume that belongs to
// no instance. It is called for each PersistentVolume of this provisioner whenever it changes.
func (p *Provisioner) ShouldDelete(ctx context.Context, pv *corev1.PersistentVolume) bool {
	if p.ofOtherInstance(pv) {
		return false
	}
	if pv.Status.Phase != corev1.VolumeReleased {
		return true // the controller checks that itself
	}
	if pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain && pv.Spec.HostPath != nil {
		p.events.note(ctx, pv, "VolumeRetained", fmt.Sprintf("the claim is deleted; its data stays in %s on node %s until somebody removes it", pv.Spec.HostPath.Path, p.config.Node))
		return false
	}
	if pv.Annotations[Identity] == "" && p.config.Mode == PerNode {
		// All instances see it. One event is enough.
		p.events.warn(ctx, pv, "VolumeFailedDelete", fmt.Sprintf("%v: annotation %s is missing; no directory was removed", errNotOwn, Identity))
		return false
	}
	return true
}
