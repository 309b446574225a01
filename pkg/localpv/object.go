// Package localpv reconciles the PersistentVolumes of a node with its devices. What may be done to a device is decided by
// pkg/devices; this package gives it the volumes, and reports the results to the API.
package localpv

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

// Names that users' objects have.
const (
	prefix = "local-pv-provisioner.cybozu.io/"
	// legacyNodeLabel selects the volumes of a node: all versions write it.
	legacyNodeLabel = "local-pv-provisioner.cybozu.com/node"
	nodeLabel       = prefix + "node"
	// configAnnotation of a node names its ConfigMap.
	configAnnotation = prefix + "pv-spec-configmap"
	// wipeAnnotation of a volume says how it is cleaned at least.
	wipeAnnotation     = prefix + devices.KeyWipe
	identityAnnotation = devices.IdentityAnnotation
	// progressAnnotation of a volume says how much of its device is cleaned.
	progressAnnotation = prefix + "wipe-progress"
)

// annotations are the part of a configuration that a volume keeps.
func annotations(c devices.Config) map[string]string {
	kept := map[string]string{
		prefix + devices.KeyStorageClass: c.StorageClass,
		prefix + devices.KeyVolumeMode:   c.VolumeMode,
		prefix + devices.KeyDeviceDir:    c.DeviceDir,
		prefix + devices.KeyFilter:       c.Filter.String(),
	}
	if c.VolumeMode == devices.Filesystem {
		kept[prefix+devices.KeyFSType] = c.FSType
	}
	return kept
}

// newVolume is the PersistentVolume of a device that is offered. The node has to have its label.
func newVolume(node *metav1.PartialObjectMetadata, c devices.Config, o devices.Offer) *corev1.PersistentVolume {
	kept := annotations(c)
	if c.Wipe != devices.WipeSignatures {
		kept[wipeAnnotation] = string(c.Wipe)
	}
	kept[identityAnnotation] = o.Identity // also that it has none
	yes := true
	mode := corev1.PersistentVolumeMode(c.VolumeMode)
	local := &corev1.LocalVolumeSource{Path: o.Path}
	if c.VolumeMode == devices.Filesystem {
		local.FSType = &c.FSType
	}
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:        o.Name,
			Labels:      map[string]string{legacyNodeLabel: node.Name, nodeLabel: node.Name},
			Annotations: kept,
			// It does not block the deletion of the node, which takes the right to set finalizers there on OpenShift
			// (OwnerReferencesPermissionEnforcement).
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: &yes}},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(o.Bytes, resource.BinarySI)},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName:              c.StorageClass,
			VolumeMode:                    &mode,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: local},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node.Labels[corev1.LabelHostname]},
				}},
			}}}},
		},
	}
}

// volumeOf is a volume as pkg/devices takes it; false for one that is not local.
func volumeOf(pv *corev1.PersistentVolume) (devices.Volume, bool) {
	if pv.Spec.Local == nil {
		return devices.Volume{}, false
	}
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	identity, told := pv.Annotations[identityAnnotation]
	v := devices.Volume{Name: pv.Name, UID: string(pv.UID), Path: pv.Spec.Local.Path, Bytes: size.Value(),
		Identity: identity, Unidentified: told && identity == "", Released: released(pv)}
	switch wipe := devices.Wipe(pv.Annotations[wipeAnnotation]); wipe {
	case devices.WipeDiscard, devices.WipeZero:
		v.Wipe = wipe
	}
	if claim := pv.Spec.ClaimRef; claim != nil {
		v.ClaimUID, v.Claim = string(claim.UID), claim.Namespace+"/"+claim.Name
		v.Deleted = v.Released && pv.DeletionTimestamp != nil
		v.Released = v.Released && !v.Deleted
		v.Used, v.Bound = !v.Released, pv.Status.Phase == corev1.VolumeBound || v.Deleted
	}
	return v, true
}

// released says that the claim of a volume was deleted. An administrator who gives the volume to another claim, with its data, takes the UID or the
// whole reference from it; the phase follows later.
func released(pv *corev1.PersistentVolume) bool {
	return pv.Status.Phase == corev1.VolumeReleased && pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.UID != ""
}

// volumeFor is a volume of the node, one that another program has made and that may be on it, or one of another node whose disk
// is known; false for any other one.
func volumeFor(node *metav1.PartialObjectMetadata, pv *corev1.PersistentVolume) (devices.Volume, bool) {
	v, ok := volumeOf(pv)
	if ok && pv.Labels[legacyNodeLabel] == node.Name {
		return v, true
	}
	if path := pv.Spec.HostPath; path != nil {
		v, ok = devices.Volume{Name: pv.Name, UID: string(pv.UID), Path: path.Path}, true
	}
	v.Foreign = true
	if ok && mayBeOn(node, pv) {
		return v, true
	}
	if v.Identity == "" {
		return devices.Volume{}, false
	}
	v.Foreign, v.Elsewhere = false, true
	return v, ok
}

// mayBeOn says whether the affinity of a volume allows a node. What it does not know, it takes for allowed.
func mayBeOn(node *metav1.PartialObjectMetadata, pv *corev1.PersistentVolume) bool {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return true
	}
	return slices.ContainsFunc(pv.Spec.NodeAffinity.Required.NodeSelectorTerms, func(term corev1.NodeSelectorTerm) bool {
		return matches(term.MatchExpressions, node.Labels) && matches(term.MatchFields, map[string]string{metav1.ObjectNameField: node.Name})
	})
}

// matches evaluates the operators that all labels have. Gt and Lt are for numbers, and taken for true.
func matches(expressions []corev1.NodeSelectorRequirement, of map[string]string) bool {
	for _, e := range expressions {
		value, has := of[e.Key]
		listed := has && slices.Contains(e.Values, value)
		switch {
		case e.Operator == corev1.NodeSelectorOpIn && !listed, e.Operator == corev1.NodeSelectorOpNotIn && listed,
			e.Operator == corev1.NodeSelectorOpExists && !has, e.Operator == corev1.NodeSelectorOpDoesNotExist && has:
			return false
		}
	}
	return true
}

func volumesOf(pvs []corev1.PersistentVolume) (volumes []devices.Volume) {
	for n := range pvs {
		if v, ok := volumeOf(&pvs[n]); ok {
			volumes = append(volumes, v)
		}
	}
	slices.SortFunc(volumes, func(a, b devices.Volume) int { return strings.Compare(a.Name, b.Name) })
	return volumes
}

// conflicts are the volumes that were made with another configuration, each with what differs. Early versions did not
// write all annotations: what the volume itself says counts as well.
func conflicts(pvs []corev1.PersistentVolume, c devices.Config) (found []string) {
	for _, pv := range pvs {
		spec := map[string]string{prefix + devices.KeyStorageClass: pv.Spec.StorageClassName}
		if pv.Spec.VolumeMode != nil {
			spec[prefix+devices.KeyVolumeMode] = string(*pv.Spec.VolumeMode)
		}
		if pv.Spec.Local != nil && pv.Spec.Local.FSType != nil {
			spec[prefix+devices.KeyFSType] = *pv.Spec.Local.FSType
		}
		for key, want := range annotations(c) {
			got, ok := pv.Annotations[key]
			if !ok {
				got = spec[key]
			}
			if got != want {
				found = append(found, fmt.Sprintf("%s has %s %q, not %q", pv.Name, strings.TrimPrefix(key, prefix), got, want))
			}
		}
	}
	slices.Sort(found)
	return found
}
